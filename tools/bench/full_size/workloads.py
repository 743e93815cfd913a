"""How much work a step is, on how many GPUs, by the name that rows of docs/results/full_size.json carry."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

PROMPT_TOKENS = 243
TEMPLATE_TOKENS = 3
"""How many of `PROMPT_TOKENS` the model's template adds."""
ANSWERS_PER_PROMPT = 8
WHOLE_LAYERS = 48
# Log-normal lengths: of answers that end at 4096 tokens a quarter does so there, and the mean is 2979.
_MEDIAN_TOKENS, _SPREAD = 3000, 0.45


@dataclass(frozen=True)
class Workload:
    """What a step asks of a host.

    Attributes:
        gpus: learner's and engines', shared or not.
        layers: how many the model has.
        answers: how many a step has.
        updates: optimizer steps that share them.
        longest: tokens of the longest answer.
        prompt_tokens: tokens of each prompt.
        drawn: answers have log-normal lengths; otherwise, without `measured`, all are as long as the longest.
        measured: lengths that answers had elsewhere, as whose answers are as long.
        even_routers: tokens spread over experts in every layer; otherwise as random weights send them, which is to few
            of them in deep layers.
        shipped: recipes run as they are shipped, not with the settings that suit the host best.
    """

    gpus: int = 4
    layers: int = WHOLE_LAYERS
    answers: int = 128
    updates: int = 2
    longest: int = 2048
    prompt_tokens: int = PROMPT_TOKENS
    drawn: bool = False
    measured: tuple[int, ...] = ()
    even_routers: bool = False
    shipped: bool = False

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> "Workload":
        """Return what `dataclasses.asdict` made of a workload and JSON of that; TypeError if it is none."""
        said: dict[str, Any] = {**found}
        return cls(**said | {"measured": tuple(said.get("measured", ()))})

    @property
    def unequal(self) -> bool:
        """Whether answers differ in length."""
        return self.drawn or bool(self.measured)

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return self.answers // ANSWERS_PER_PROMPT

    def lengths(self, steps: int) -> list[list[int]]:
        """Draw the tokens of every answer, in the order in which they are asked for.

        Each step has the same lengths in an order of its own, so that steps ask for the same work and engines do not.

        Returns:
            The `answers` lengths of each step, the same at each call.
        """
        if not self.unequal:
            return [[self.longest] * self.answers] * steps
        shares, measured = [(place + 0.5) / self.answers for place in range(self.answers)], sorted(self.measured)
        step = [
            min(self.longest, measured[int(share * len(measured))] if measured else _drawn(share)) for share in shares
        ]
        order = random.Random(0)
        return [order.sample(step, len(step)) for _ in range(steps)]


def _drawn(share: float) -> int:
    """Return the length that a share of drawn answers stay below."""
    return round(_MEDIAN_TOKENS * math.exp(_SPREAD * NormalDist().inv_cdf(share)))


_A = Workload()
_B = Workload(answers=256, updates=1, longest=4096, drawn=True)
WORKLOADS = {
    # The whole model on four GPUs.
    "a": _A,
    "b": _B,
    "a_even": replace(_A, even_routers=True),
    # Half of it on two, with as much work and as many expert weights a GPU.
    "a24": replace(_A, gpus=2, layers=24, answers=64),
    "b24": replace(_B, gpus=2, layers=24, answers=128),
    "a24_even": replace(_A, gpus=2, layers=24, answers=64, even_routers=True),
    # More answers on the same GPUs.
    "a24_128": replace(_A, gpus=2, layers=24, answers=128),
    "a24_256": replace(_A, gpus=2, layers=24, answers=256),
    # As much work a GPU on more of them.
    "a24_4gpu": replace(_A, layers=24),
    "a12_1gpu": replace(_A, gpus=1, layers=12, answers=32),
    "a12_2gpu": replace(_A, gpus=2, layers=12, answers=64),
    "a12_4gpu": replace(_A, layers=12),
    "a12_8gpu": replace(_A, gpus=8, layers=12, answers=256),
    # What a GPU of its own for the learner has room for, with unequal answers.
    "b12": replace(_B, gpus=2, layers=12, answers=128),
    # Recipes as shipped on the node that they are for; the paper's eight optimizer steps, of fewer and shorter answers.
    "8gpu": Workload(gpus=8, answers=256, updates=8, shipped=True),
    # The same with as much work a GPU and a sixth of the layers: whether the shipped recipes run at all.
    "2gpu": Workload(gpus=2, layers=8, answers=64, updates=8, shipped=True),
    "2gpu_unequal": Workload(gpus=2, layers=8, answers=64, updates=8, shipped=True, longest=4096, drawn=True),
}
