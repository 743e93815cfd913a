"""The files of a run's frozen base, remembered at its start: its checkpoints hold none of them, and need the same."""

import json
import zlib
from pathlib import Path

from qarl_nemo.files import FileError, read_json, write_atomic

_NAME = "base.json"
# Read of each file: so many blocks, as far apart as possible.
_NUM_BLOCKS, _BLOCK_BYTES = 64, 1 << 14


def hold_base(run_dir: Path, base: Path, *, new: bool) -> None:
    """Note the size and a sample of the bytes of every weight file, or require that they are what was noted.

    Args:
        run_dir: the run's folder.
        base: folder of the checkpoint that it trains on.
        new: whether the run begins.

    Raises:
        FileError: as `require_same_base`.
    """
    if new:
        write_atomic(run_dir / _NAME, json.dumps(_marks(base), indent=1))
    else:
        require_same_base(run_dir, base)


def require_same_base(run_dir: Path, base: Path) -> None:
    """Require that a base is the one that the run began with, unless that was not noted.

    Args:
        run_dir: the run's folder.
        base: folder of the checkpoint.

    Raises:
        FileError: weight files are gone, new or others; all are named.
    """
    path = run_dir / _NAME
    if not path.is_file():
        return
    noted, found = read_json(path, "the weight files of a run's base"), _marks(base)
    changed = sorted(name for name in noted.keys() | found.keys() if noted.get(name) != found.get(name))
    if changed:
        raise FileError(
            f"the run {run_dir} trained on the frozen base {base}, which has changed since: {', '.join(changed)}; put "
            "back what it was, or start another run"
        )


def _marks(base: Path) -> dict[str, str]:
    return {path.name: _mark(path) for path in sorted(base.glob("*.safetensors"))}


def _mark(path: Path) -> str:
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for block in range(_NUM_BLOCKS):
            file.seek(max(size - _BLOCK_BYTES, 0) * block // (_NUM_BLOCKS - 1))
            crc = zlib.crc32(file.read(_BLOCK_BYTES), crc)
    return f"{size} bytes, sample {crc:08x}"
