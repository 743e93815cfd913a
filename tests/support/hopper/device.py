"""A Hopper GPU that is only described: operators launch from fake tensors, and what they launch is noted and compiled.

Triton's hook that is asked before a kernel is compiled notes what it would compile and says that this is done, so that
nothing is launched; later the notes are compiled down to the GPU's instructions, for which Triton needs no device.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import TritonError
from triton.runtime.jit import JITFunction

CAPABILITY = (9, 0)
# What a program of sm_90 may ask for: 228 KiB of a multiprocessor, of which the driver keeps one.
MAX_SHARED_BYTES = 227 * 1024
_ADDRESS = 1 << 30
_GUARDED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.__invert__, torch.Tensor.contiguous)


class Launch(NamedTuple):
    """What one launch compiles.

    Attributes:
        kernel: the jitted function.
        specialization: the types and constants of its arguments and how it is compiled, as `preload` reads them.
    """

    kernel: JITFunction
    specialization: str


class _Driver:
    """What Triton asks of a driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)


class _RunOperators(TorchDispatchMode):
    """Lets fake tensors run this package's operators, and not their fakes, which launch nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "qarl":
            return func(*args, **kwargs or {})
        with self, _Unguarded():
            return OPDEFS[func._schema.name]._init_fn(*args, **kwargs or {})


class _Unguarded(TorchFunctionMode):
    """Does as if on the CPU what a torch without CUDA refuses to begin for a tensor on a GPU, even for a fake one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _GUARDED:
            return func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)]
        devices = [tensor.fake_device for tensor in tensors]
        for tensor in tensors:
            tensor.fake_device = torch.device("cpu")
        out = func(*args)
        for tensor, device in zip([out, *tensors], [devices[0], *devices], strict=True):
            if tensor is not None:
                tensor.fake_device = device
        return out


def install() -> None:
    """Make Triton compile for the described GPU, whatever this machine has."""
    driver.set_active(_Driver())


@contextmanager
def described(name: str) -> Iterator[list[Launch]]:
    """Run what follows on fake tensors of the described GPU, and note what it launches.

    Args:
        name: the device's name, which chooses the table of tuned tiles.
    """
    properties = SimpleNamespace(major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132)
    answers = {
        "get_device_capability": CAPABILITY,
        "get_device_name": name,
        "get_device_properties": properties,
        "current_stream": SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": False,
        "device": nullcontext(),
        "device_of": nullcontext(),
    }
    launches: dict[Launch, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        launches[Launch(fn.jit_function, compile["specialization_data"])] = None
        return True

    with ExitStack() as stack:
        for function, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, function, lambda *_, answer=answer: answer))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", _address, create=True))
        stack.enter_context(patch.object(knobs.runtime, "jit_cache_hook", note))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_RunOperators())
        stack.enter_context(_Unguarded())
        noted: list[Launch] = []
        yield noted
        noted += launches


def _address(tensor: torch.Tensor) -> int:
    return _ADDRESS + tensor.storage_offset() * tensor.element_size()


def compile_problem(launch: Launch) -> str | None:
    """Compile a launch to instructions, and say why it cannot run; None if it can."""
    with tempfile.TemporaryFile("w+") as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            shared = launch.kernel.preload(launch.specialization).metadata.shared
        except (RuntimeError, TritonError) as error:
            log.seek(0)
            # Below the errors stands the whole module.
            lines = [line for line in log.read().splitlines() if re.search(r"\berror: |LLVM ERROR", line)]
            return "; ".join([f"{type(error).__name__}: {error}", *lines])
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    if shared > MAX_SHARED_BYTES:
        return f"needs {shared} bytes of shared memory, and a program may have {MAX_SHARED_BYTES}"
    return None
