"""Compiles a CUDA source of this folder when its constants are first met, with NVRTC alone: no toolkit is needed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import cpp_extension

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_CAPABILITY = (9, 0)


def compile_source(
    name: str, constants: "DataclassInstance", shared_bytes: int, device_index: int
) -> Callable[..., None] | None:
    """Compile and load a kernel for one GPU.

    Args:
        name: what the kernel and, before `.cu`, its file are called.
        constants: a dataclass; its fields become macros of their names.
        shared_bytes: a block's dynamic shared memory.
        device_index: the GPU's.

    Returns:
        The kernel; None on a GPU before Hopper, or whose blocks have too little shared memory.

    Raises:
        RuntimeError: the source cannot be compiled or loaded.
    """
    device: Any = torch.cuda.get_device_properties(device_index)
    if (device.major, device.minor) < _CAPABILITY or shared_bytes > device.shared_memory_per_block_optin:
        return None
    macros = "".join(f"#define {macro} {value}\n" for macro, value in asdict(constants).items())
    source = (resources.files("qarl_kernels.ops") / f"{name}.cu").read_text(encoding="utf-8")
    with torch.cuda.device(device_index), _without_headers():
        kernel: Any = torch.cuda._compile_kernel(macros + source, name)
        kernel.set_shared_memory_config(shared_bytes)
    return kernel


@contextmanager
def _without_headers() -> Iterator[None]:
    # No source here includes anything, but torch refuses to compile where no CUDA toolkit is installed.
    installed = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = installed or ""
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = installed
