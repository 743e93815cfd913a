"""How GPUs share a model, in Megatron's words."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, isqrt
from typing import Any

MAX_GPUS = 2**16


def divisors(*counts: int) -> list[int]:
    """Return the numbers that divide all of some counts, which are more than 0, ascending."""
    common = gcd(*counts)
    small = [size for size in range(1, isqrt(common) + 1) if common % size == 0]
    return sorted({*small, *(common // size for size in small)})


def shares_kv_heads(tp: int, num_kv_heads: int) -> bool:
    """Tell whether vLLM gives each of so many ranks whole key-value heads, or each head to equally many ranks.

    Source: vllm 0.25.1, `vllm/model_executor/layers/linear.py`, `QKVParallelLinear`.
    """
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0


def either(values: Iterable[object]) -> str:
    """Return e.g. `1, 2 or 4`."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True)
class Parallelism:
    """How GPUs share a model, in Megatron's words.

    Attributes:
        end_layers: how many layers the first and the last pipeline stage have, where they have a number of their own.

    Raises:
        ValueError: sizes do not divide the GPUs; all problems are listed.
    """

    num_gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    end_layers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str, num_gpus: int) -> "Parallelism":
        """Return the layout that e.g. `tp2_ep8` names; sizes left out are 1.

        Args:
            text: tp, pp, cp, ep and etp with their sizes; `dp` for none.
            num_gpus: GPUs that share the model.

        Raises:
            ValueError: the text is not of this form, or the sizes do not divide the GPUs.
        """
        sizes = re.findall(r"(etp|tp|pp|cp|ep)([1-9]\d{0,5})(?:_|$)", text)
        spelled = "_".join(name + size for name, size in sizes) == text
        if text != "dp" and (not spelled or not sizes or len(dict(sizes)) < len(sizes)):
            raise ValueError(f"layout {text!r}: legal are tp, pp, cp, ep and etp with a size each, e.g. tp2_ep8, or dp")
        values: dict[str, Any] = {name: int(size) for name, size in sizes}
        return cls(num_gpus, **values)

    def __post_init__(self) -> None:
        if not 1 <= self.num_gpus <= MAX_GPUS:
            raise ValueError(f"num_gpus={self.num_gpus} is not from 1 to {MAX_GPUS}")
        dense, experts = self.tp * self.pp * self.cp, self.ep * self.etp * self.pp
        problems = [
            f"{name}={size} does not divide num_gpus={self.num_gpus}; it may be {either(divisors(self.num_gpus))}"
            for name, size in (("tp * pp * cp", dense), ("ep * etp * pp", experts))
            if self.num_gpus % size
        ]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def name(self) -> str:
        """The layout's name, e.g. `tp2_ep8`; sizes of one are left out."""
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        return "_".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "dp"

    def stage_layers(self, num_layers: int) -> int:
        """Return how many of a model's layers the fullest pipeline stage has."""
        left, inner = num_layers - sum(self.end_layers), self.pp - len(self.end_layers)
        return max(*self.end_layers, -(-left // inner) if inner else 0, 0)

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share the optimizer state of a parameter outside the experts."""
        return self.num_gpus // (self.tp * self.pp)

    @property
    def expert_optimizer_shards(self) -> int:
        """Ranks that share the optimizer state of an expert."""
        return self.num_gpus // (self.ep * self.etp * self.pp)
