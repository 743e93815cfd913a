"""How the grouped GEMMs are launched: tile shapes, the tables of tuned tiles, the number of programs.

A tuned table is `tuned/<device name>.json`, written by `tools/bench/kernels/tune.py`; it maps a problem's key, such as
`bf16/N1536/K2048/E128/R1024` (experts and rows per expert rounded to powers of two), to the fields of `TileConfig`.
A problem that is not in the table takes the tile of the nearest one, by factors of two; a device without a table takes
the operator's default.
"""

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One program's tile and how it is compiled.

    Attributes:
        block_m: rows of a tile (`wgrad`: out-features).
        block_n: columns of a tile (`wgrad`: in-features).
        block_k: step along the contracted axis.
        num_warps: warps of a program; a multiple of 4, since four warps issue a tensor-core instruction together.
        num_stages: tiles in flight between device memory and the tensor cores.
        programs_per_sm: resident programs that hide each other's epilogues; of `wgrad` alone also 0, one for each tile.
        group_m: row tiles that share a column tile before the next one is taken.
        flatten: merge the loops over tiles and over K, so that a tile's loads start under the previous epilogue.
        epilogue_split: number of column slices in which a tile is stored; more slices need less shared memory.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    programs_per_sm: int = 1
    group_m: int = 8
    flatten: bool = True
    epilogue_split: int = 1


DEFAULTS = {
    "bf16": TileConfig(),
    "bf16_transposed": TileConfig(),
    "fp8_channel": TileConfig(block_k=128),
    "fp8_block": TileConfig(64, 128, 128, num_warps=4, num_stages=4, programs_per_sm=2, epilogue_split=2),
    "int8": TileConfig(block_k=128),
    "int4": TileConfig(block_n=128, programs_per_sm=2, epilogue_split=2),
    "wgrad": TileConfig(),
    "wgrad_fp32": TileConfig(epilogue_split=4),
}


def is_watched() -> bool:
    """Return whether a trace or a mode sees torch's operators; if none does, a launch need not be one.

    An operator written in Python costs a host 15 to 40 us at each call, more than a small kernel runs.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


@functools.cache
def num_sms(device_index: int | None) -> int:
    """Return the device's number of streaming multiprocessors; 2 without a device (the interpreter).

    Args:
        device_index: CUDA device, None = CPU.
    """
    if device_index is None:
        return 2
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def problem_key(op: str, n: int, k: int, num_experts: int, num_rows: int) -> str:
    """Return the tuned table's key of a problem; expert count and rows per expert are rounded to powers of two.

    Args:
        op: a key of `DEFAULTS`.
        n: out-features of the weight.
        k: in-features of the weight.
        num_experts: E.
        num_rows: M over all experts.
    """
    experts = 1 << round(math.log2(max(num_experts, 1)))
    rows = 1 << round(math.log2(max(num_rows / max(num_experts, 1), 16)))
    return f"{op}/N{n}/K{k}/E{experts}/R{rows}"


def tile_config(
    op: str, x: Tensor, n: int, k: int, num_experts: int, out_dtype: torch.dtype = torch.bfloat16
) -> TileConfig:
    """Return the tuned tile nearest to a problem on x's device, or the operator's default.

    Args:
        op: a key of `DEFAULTS`.
        x: [M, ...] the GEMM's rows.
        n: out-features of the weight.
        k: in-features of the weight.
        num_experts: E.
        out_dtype: dtype of the result; an FP32 tile takes twice the shared memory and has its own table rows.
    """
    op = f"{op}_fp32" if out_dtype == torch.float32 else op
    if x.device.type != "cuda":
        return TileConfig(32, 32, 128 if "8" in op else 32, num_warps=4, num_stages=2, group_m=2)
    key = problem_key(op, n, k, num_experts, x.shape[0])
    return _nearest_tile(torch.cuda.get_device_name(x.device), key) or DEFAULTS[op]


def table_name(device_name: str) -> str:
    """Return the file name of a device's tuned table."""
    return device_name.lower().replace(" ", "_").replace("/", "_") + ".json"


@functools.cache
def _nearest_tile(device_name: str, key: str) -> TileConfig | None:
    op, *sizes = _parse_key(key)
    candidates = {}
    for other, tile in _tuned_table(device_name).items():
        other_op, *other_sizes = _parse_key(other)
        if other_op == op:
            pairs = zip(sizes, other_sizes, strict=True)
            candidates[sum(abs(math.log2(size / other_size)) for size, other_size in pairs)] = tile
    return candidates[min(candidates)] if candidates else None


def _parse_key(key: str) -> tuple[str, int, int, int, int]:
    op, *sizes = key.split("/")
    n, k, experts, rows = (int(size[1:]) for size in sizes)
    return op, n, k, experts, rows


@functools.cache
def _tuned_table(device_name: str) -> dict[str, TileConfig]:
    path = resources.files("qarl_kernels.ops") / "tuned" / table_name(device_name)
    if not path.is_file():
        return {}
    return {key: TileConfig(**fields) for key, fields in json.loads(path.read_text()).items()}
