"""torchrun that ends, when a rank failed, with one line instead of its own traceback."""

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main


def ended(rank: int, failure: ProcessFailure) -> str:
    """Say how the rank ended that failed first.

    Args:
        rank: which.
        failure: as torchrun records it; a negative exit code is a signal's number.
    """
    if failure.exitcode >= 0:
        return f"rank {rank} ended with code {failure.exitcode}, and the others were ended"
    hint = ", as the system does where memory is short" if failure.signal_name() == "SIGKILL" else ""
    return f"rank {rank} was ended by {failure.signal_name()}{hint}, and the others were ended"


if __name__ == "__main__":
    # It logs the same of every rank, with the process's number.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        sys.exit(f"qarl: {ended(*error.get_first_failure())}")
