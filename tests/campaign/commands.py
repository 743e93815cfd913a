"""The commands that are given damaged inputs: what they are called with, and when success is right."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from edits import ContentEdit, Edit, draw_edit
from pickles import edit_metadata
from tensors import edit_npz, edit_safetensors, edit_torch_save
from trees import edit_json, edit_jsonl, edit_yaml

BY_FORMAT: Mapping[str, ContentEdit] = {
    ".json": edit_json,
    ".jsonl": edit_jsonl,
    ".yaml": edit_yaml,
    ".safetensors": edit_safetensors,
    ".metadata": edit_metadata,
    ".npz": edit_npz,
    ".pt": edit_torch_save,
}


class Command(ABC):
    """A command, its undamaged inputs in `base`, and the oracle that judges how it ended.

    Attributes:
        name: the command's name.
        share: how many of all inputs it is given.
        preload: modules every call needs.
    """

    name: str
    share: float
    preload: tuple[str, ...]

    def __init__(self, base: Path) -> None:
        self.base = base

    @abstractmethod
    def prepare(self) -> None:
        """Write the undamaged inputs into `base`."""

    @abstractmethod
    def learn(self, run: "Run") -> None:
        """Run the undamaged inputs once and keep what they give."""

    @abstractmethod
    def places(self) -> Mapping[str, float]:
        """Return file -> how often it is damaged."""

    @abstractmethod
    def arguments(self, folder: Path) -> list[str]:
        """Return the command line for inputs in `folder`."""

    def draw_arguments(self, rng: random.Random) -> Edit | None:
        """Draw arguments that change the command line; None where there are none."""
        return None

    @abstractmethod
    def wrongly_accepted(self, folder: Path, edits: Sequence[Edit]) -> str | None:
        """Say why exit code 0 is wrong for these inputs, None if it is right."""

    @abstractmethod
    def left_behind(self, folder: Path, run: "Run") -> str | None:
        """Say what a refused call left that later passes for whole, None if nothing does."""

    def works_on(self, folder: Path) -> bool:
        """Return whether a call that ran out of time was doing what legal inputs ask for; by default it hung."""
        return False

    def draw(self, rng: random.Random) -> list[Edit]:
        """Draw the damage of one case: mostly one edit, sometimes two."""
        edits: list[Edit] = []
        places = dict(self.places())
        for _ in range(1 if rng.random() < 0.85 else 2):
            edit = self.draw_arguments(rng) if rng.random() < 0.08 else None
            if edit is None:
                place = rng.choices(list(places), list(places.values()))[0]
                edit = draw_edit(rng, self.base, place, BY_FORMAT.get(Path(place).suffix or Path(place).name))
            edits.append(edit)
        return edits


class Run(ABC):
    """Runs the command line; what `kill_points.QarlServer.run` does with a time limit."""

    @abstractmethod
    def __call__(self, arguments: Sequence[str], folder: Path) -> tuple[int, str]:
        """Return exit code and output of one call."""
