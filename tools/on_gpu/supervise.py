"""Run one command, and end whatever it started and left behind, as soon as it ends or this program is told to.

    python tools/on_gpu/supervise.py "python tools/bench/real_size.py ..."

Tests give the engines and Ray clusters that they start sessions of their own. No signal to the command's session
reaches those: they would outlive a test that is stopped, and keep its GPUs. Here Linux hands every process whose parent
has ended to this one (a "subreaper"), so that all of them stay its descendants and can be found.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

GRACE_S = 10
"""Seconds that a stopped command has to end by itself."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: str) -> int:
    """Run a command in a session of its own.

    Args:
        command: for bash.

    Returns:
        Its exit code, or 128 and the number of the signal that ended it.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # Nobody would stop the command if this program's own parent were killed.
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, _exit)
    process = subprocess.Popen(["bash", "-c", command], start_new_session=True)
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        _end_descendants()


def _exit(*_: object) -> None:
    # A second signal must not interrupt what the first one begins.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _end_descendants() -> None:
    # Again and again: one of them may start another before it is killed.
    while left := psutil.Process().children(recursive=True):
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
