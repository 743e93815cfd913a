"""The extension of an engine under test: ours, with what no user needs."""

import torch

from qarl_nemo.refit.answers import answering
from qarl_nemo.refit.load import PackedRefit


@answering
class Rank(PackedRefit):
    """RPC methods of a rank."""

    def qarl_overwrite_what_refits_bring(self) -> None:
        """Leave nothing of what every refit is said to bring, so that what it does not write shows."""
        for tensor in self._qarl_session().brought():
            storage = tensor.untyped_storage()
            # Other tensors may lie in a larger storage, which is then never forgotten.
            if storage.nbytes() == tensor.nbytes:
                torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(0xA5)
        torch.cuda.synchronize()
