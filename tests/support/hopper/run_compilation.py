"""Compiles kernels for Hopper and prints as JSON what is wrong.

`even` and `odd` compile every other launch of every operator, and one whose tiles in flight no such GPU can hold.
`sample` compiles a layer of packed NVFP4 weights from its quantization to its product, and once more the product with
codes that are rounded to BF16 before they are joined, which Triton cannot compile.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterable, Iterator

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import qarl_kernels
from qarl_kernels.ops import int4_gemm
from qarl_kernels.ops.int4_gemm import _weight
from qarl_kernels.ops.launch import TileConfig
from support.hopper import operators
from support.hopper.device import Launch, compile_problem, described, install

UNTUNED = "a GPU without a table of tuned tiles"


def half(first: int) -> dict[str, object]:
    """Compile every other launch from the first of them, and say which kernels no launch needs."""
    distinct: dict[Launch, None] = {}
    for device, problems in operators.tuned_problems().items():
        with described(device) as launches:
            for problem in sorted(problems):
                operators.call_gemms(*problem)
        distinct |= dict.fromkeys(launches)
    with described(UNTUNED) as launches:
        for problem in operators.OTHER_PROBLEMS:
            operators.call_gemms(*problem)
        operators.call_weight_operators()
        operators.call_layers()
        operators.call_row_operators()
    distinct |= dict.fromkeys(launches)
    with described(UNTUNED) as deep:
        operators.call_gemm_of_tile(TileConfig(num_stages=8))
    return {"uncovered": uncovered(distinct), "failed": failures(list(distinct)[first::2]), "too_deep": failures(deep)}


def uncovered(launches: Iterable[Launch]) -> list[str]:
    """Name the jitted functions that no launch compiles, neither as a kernel nor as what one calls."""
    reached: set[int] = set()
    waiting = [launch.kernel for launch in launches]
    while waiting:
        function = waiting.pop()
        if id(function) not in reached:
            reached.add(id(function))
            used = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
            waiting += [one for one in used if isinstance(one, JITFunction)]
    return sorted(f"{one.__module__}.{one.__name__}" for one in jitted_functions() if id(one) not in reached)


def jitted_functions() -> Iterator[JITFunction]:
    """Every jitted function of the package, from the module that defines it."""
    for found in pkgutil.walk_packages(qarl_kernels.__path__, "qarl_kernels."):
        module = importlib.import_module(found.name)
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.__module__ == found.name:
                yield value


def failures(launches: Iterable[Launch]) -> list[str]:
    """Say which launches do not compile, or compile to what cannot run, and why."""
    found = []
    for launch in launches:
        # Should the compiler end the process, this names what it was at.
        print("compiling", launch.kernel.__name__, flush=True)
        if problem := compile_problem(launch):
            found.append(f"{launch.kernel.__name__}: {problem}; {launch.specialization}")
    return found


def sample() -> dict[str, object]:
    """Compile a packed layer, and its product spelled so that it does not compile."""
    with described(UNTUNED) as launches:
        operators.call_packed_nvfp4()
    failed = failures(launches)
    (product,) = (launch for launch in launches if launch.kernel.__name__ == "_grouped_gemm_int4_kernel")
    int4_gemm._weight = _rounded_early
    for function in (int4_gemm.dequantize_words, product.kernel):
        function.hash = None  # It is of the source, whose callees are others now.
    return {"uncovered": uncovered(launches), "failed": failed, "rounded_early": compile_problem(product)}


@triton.jit
def _rounded_early(words, scale, offset, position: tl.constexpr, fp4: tl.constexpr):
    return _weight(words, scale, offset, position, fp4).to(tl.bfloat16)


if __name__ == "__main__":
    install()
    print(json.dumps({"sample": sample, "even": lambda: half(0), "odd": lambda: half(1)}[sys.argv[1]]()))
