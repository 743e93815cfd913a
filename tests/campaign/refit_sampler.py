"""Refit faults on the built-in sampler: spoiled updates, and updates that break off while they are loaded."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from refit_campaign import Counts
from torch import Tensor

from qarl_nemo.layers.install import install
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import RefitUpdate, publish
from qarl_nemo.train.sampling import SamplingParams
from support.engines import PROMPTS, W4A16_G32, make_sampler, tiny_model
from support.interruptions import FailsAt

_TARGETS = ("experts", "attention")
_NUM_BREAKS = 60


def sampler_faults(seed: int, *, rounds: int, every: int) -> Counts:
    """Refit the built-in sampler with every fault.

    Args:
        seed: seeds everything random.
        rounds: number of rounds A -> B -> A.
        every: try one of so many faults.

    Returns:
        The counts.
    """
    engine, counts = _Engine(), Counts()
    for _ in range(rounds):
        counts.rounds += 1
        counts.identical += engine.refit("B") and engine.refit("A")
    chance = random.Random(seed)
    for number, name in enumerate(_fault_names(engine)):
        if number % every == 0:
            counts.tried += 1
            problem = engine.survive(name, chance)
            if problem:
                counts.failures.append(f"built-in sampler, {name}: {problem}")
    return counts


class _Engine:
    def __init__(self) -> None:
        self.sampler = make_sampler(tiny_model(), W4A16_G32, _TARGETS)
        self.tensors = {name: _published(number) for number, name in enumerate("AB")}
        self.version, self.serving = -1, ""
        self.answers: dict[str, tuple[Tensor, Tensor]] = {}
        for name in "BA":
            self.sampler.load(self.next(name))
            self.answers[name], self.serving = self.respond(), name
        self.num_operations = self._count()

    def next(self, name: str) -> RefitUpdate:
        """Return an update as the next version."""
        self.version += 1
        return RefitUpdate(
            Manifest.of([self.tensors[name]], version=self.version, fmt=W4A16_G32.name), [self.tensors[name]]
        )

    def respond(self) -> tuple[Tensor, Tensor]:
        """Return greedy tokens and their logprobs."""
        found = self.sampler.generate(PROMPTS[:2], SamplingParams(4, 0.0), torch.Generator().manual_seed(0))
        return found.input_ids, found.generation_logprobs

    def refit(self, name: str) -> bool:
        """Serve an update; say whether it answers as it did at first."""
        self.sampler.load(self.next(name))
        self.serving = name
        return self.serves(name, self.version)

    def serves(self, name: str, version: int) -> bool:
        """Say whether an update answers as it did at first, under this version."""
        same = all(torch.equal(*pair) for pair in zip(self.respond(), self.answers[name], strict=True))
        return same and self.sampler.version == version

    def survive(self, fault: str, chance: random.Random) -> str:
        """Load an update with a fault; return what went wrong, if anything did."""
        served, version = self.serving, self.sampler.version
        other = "B" if served == "A" else "A"
        kind, _, where = fault.partition(" ")
        update, problem, harmless = self.next(other), "", kind == "reordered"
        try:
            if kind == "broken":
                with FailsAt(int(where)):
                    self.sampler.load(update)
            else:
                self.sampler.load(_spoiled(update, version, kind, where, chance))
        except (ValueError, MemoryError) as error:
            problem = "" if str(error) else "nobody was told why"
        else:
            problem = "" if harmless else "it was served"
        if not problem and not (self.serves(other, self.version) if harmless else self.serves(served, version)):
            problem = "what serves has changed"
        return problem or ("" if self.refit(other) else "the next whole refit serves something else")

    def _count(self) -> int:
        update = self.next(self.serving)
        with FailsAt() as counting:
            self.sampler.load(update)
        return counting.count


def _fault_names(engine: _Engine) -> Iterator[str]:
    for name in engine.tensors["A"]:
        for kind in ("lost", "corrupted", "misshapen", "retyped", "renamed"):
            yield f"{kind} {name}"
    for number in range(len(engine.tensors["A"])):
        yield f"cut {number}"
    yield from ("reordered all", "replayed same", "replayed older", "replayed x", "replayed -1", "format w4a8")
    step = max(1, engine.num_operations // _NUM_BREAKS)
    for number in range(1, engine.num_operations + 1, step):
        yield f"broken {number}"


def _spoiled(update: RefitUpdate, serving: Any, kind: str, where: str, chance: random.Random) -> RefitUpdate:
    tensors = update.tensors
    if kind == "replayed":
        version = {"same": serving, "older": serving - 1, "x": "x", "-1": -1}[where]
        return replace(update, manifest=replace(update.manifest, version=version))
    if kind == "format":
        return replace(update, manifest=replace(update.manifest, format=where))
    if kind == "cut":
        return replace(update, layers=[dict(list(tensors.items())[: int(where)])])
    if kind == "reordered":
        return replace(update, layers=[dict(chance.sample(list(tensors.items()), len(tensors)))])
    tensor = tensors.pop(where)
    if kind == "corrupted":
        tensors[where] = tensor.detach().clone()
        tensors[where].view(-1).view(torch.uint8)[chance.randrange(tensor.nbytes)] ^= 1 << chance.randrange(8)
    elif kind == "misshapen":
        tensors[where] = tensor[:-1]
    elif kind == "retyped":
        tensors[where] = tensor.double()
    elif kind == "renamed":
        tensors[f"{where}.other"] = tensor
    return replace(update, layers=[tensors])


def _published(seed: int) -> dict[str, Tensor]:
    model = tiny_model(seed=seed)
    report = install(model, _TARGETS, W4A16_G32)
    return publish(report.weights, model.named_parameters(), W4A16_G32, version=0).tensors
