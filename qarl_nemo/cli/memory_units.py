"""Units of what `qarl memory` prints."""

from dataclasses import dataclass

from qarl_nemo.memory import GIB, MIB


@dataclass(frozen=True)
class Unit:
    """A unit of memory.

    Attributes:
        name: GiB or MiB.
        size: its bytes.
    """

    name: str
    size: int

    @classmethod
    def of(cls, largest: float) -> "Unit":
        """Return the unit of sizes of which the largest is this; MiB below 1 GiB, where GiB would read 0.0."""
        return cls("GiB", GIB) if largest >= GIB else cls("MiB", MIB)

    def text(self, size: float) -> str:
        """Return bytes in this unit, without its name."""
        return f"{size / self.size:.1f}"


def with_unit(size: float) -> str:
    """Return bytes in the unit that suits them, e.g. `3.4 GiB`."""
    unit = Unit.of(size)
    return f"{unit.text(size)} {unit.name}"
