"""Where Megatron-core and NeMo-RL keep `torch_dist` checkpoints."""

import re
from pathlib import Path

METADATA_FILE = ".metadata"
_WEIGHTS = ("policy/weights/", "weights/")
# Where they keep iterations, from the folder of one to that of a whole run.
_ITERATIONS = tuple(
    f"{above}{weights}iter_*" for above in ("", "step_*/", "checkpoints/step_*/") for weights in ("", *_WEIGHTS)
)


def find_iterations(folder: Path) -> list[Path]:
    """Return the folders with `.metadata`, in order: this one, or those of the iterations below it."""
    found = [folder] if (folder / METADATA_FILE).is_file() else []
    for pattern in _ITERATIONS:
        found = found or sorted((path.parent for path in folder.glob(f"{pattern}/{METADATA_FILE}")), key=_in_order)
    return found


def _in_order(path: Path) -> list[int]:
    """Sort steps by their numbers."""
    return [int(number) for number in re.findall(r"\d+", str(path))]
