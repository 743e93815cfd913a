"""vLLM's side of a refit: `worker_extension_cls="qarl_nemo.refit.load.PackedRefit"`.

Each rank checks the announced update against its own layers, takes tensors in, verifies them whole, and only then
converts layer by layer into the tensors its kernels and captured CUDA graphs already read (`rank.py`).
"""

import sys

import torch

from qarl_nemo.refit.answers import answering
from qarl_nemo.refit.calls import RankCalls
from qarl_nemo.refit.engine_decode import decode_int4_experts
from qarl_nemo.refit.engine_decode_linear import decode_int4_linear
from qarl_nemo.refit.engine_mends import mend_adapter_sums, mend_int8_experts
from qarl_nemo.refit.forget import wake_with_weights
from qarl_nemo.refit.manifest import checksums
from qarl_nemo.refit.rank import RankRefit

# vLLM imports this module in every worker, before it builds the model.
if "vllm" in sys.modules:
    mend_int8_experts()
    mend_adapter_sums()
    decode_int4_experts()
    decode_int4_linear()


@answering
class PackedRefit(RankCalls):
    """RPC methods that vLLM adds to its workers."""

    def _qarl_session(self) -> RankRefit:
        # Made when first asked for: a worker gets its model late.
        if "_qarl_refit" not in vars(self):
            self._qarl_refit = RankRefit(self)
        return self._qarl_refit

    def qarl_digests(self) -> dict[str, int]:
        """Return the checksum of every tensor that this rank's kernels read, by name."""
        tensors = self._qarl_session().kernel_tensors()
        # vLLM leaves these uninitialized where NVFP4 is of weights only, and reads none of them.
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("_input_global_scale")}
        return dict(zip(tensors, checksums(tensors.values()), strict=True))

    def qarl_forget(self) -> int:
        """Let vLLM's next sleep free what every refit brings, uncopied; return its bytes, and serve nothing if any."""
        return self._qarl_session().forget()

    def qarl_asleep(self) -> None:
        """Let what was forgotten come back with the weights."""
        wake_with_weights()

    def qarl_memory(self) -> dict[str, int]:
        """Return this rank's GPU memory in bytes: allocated, reserved, and the peak since the last call."""
        memory = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_allocated(),
        }
        torch.cuda.reset_peak_memory_stats()
        return memory
