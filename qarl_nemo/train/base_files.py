"""The files of a run's frozen base, remembered at its start: its checkpoints hold none of them, and need the same."""

import json
import zlib
from pathlib import Path
from typing import Any

from qarl_nemo.files import FileError, read_json, write_atomic

_NAME = "base.json"
# Its entry beside those of files, which have a suffix: where the base was at the start. A relative path in the config
# is one from where the run was started, which nothing else keeps.
_FOLDER = "folder"
# Read of each file: so many blocks, as far apart as possible.
_NUM_BLOCKS, _BLOCK_BYTES = 64, 1 << 14


def hold_base(run_dir: Path, base: Path, *, new: bool) -> None:
    """Note a base's place, and size and a sample of bytes of every weight file, or require that these are the same.

    Args:
        run_dir: the run's folder.
        base: folder of the checkpoint that it trains on.
        new: whether the run begins.

    Raises:
        FileError: as `require_same_base`.
    """
    if new:
        write_atomic(run_dir / _NAME, json.dumps({_FOLDER: str(base.resolve()), **_marks(base)}, indent=1))
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
    if changed := _changed(_noted(run_dir), base):
        raise FileError(
            f"the run {run_dir} trained on the frozen base {base}, which has changed since: {', '.join(changed)}; put "
            "back what it was, or start another run"
        )


def find_base(run_dir: Path, configured: Path, given: Path | None = None) -> Path:
    """Find a run's base, the same that it began with, where the config says, or where it was at the start.

    Args:
        run_dir: the run's folder.
        configured: where the config says it is; a relative path may be one from another folder.
        given: where the user says it is now, which is then the only place.

    Raises:
        FileError: it is in none of these places, or has changed.
    """
    noted = _noted(run_dir)
    if given is not None:
        _require_moved(run_dir, configured, given, noted)
        return given
    began = noted.get(_FOLDER)
    places = [configured, *([Path(began)] if isinstance(began, str) and began != str(configured) else [])]
    found = [place for place in places if place.is_dir()]
    if not found:
        or_there = f", and no {places[1]}, where it was at the start" if len(places) > 1 else ""
        fix = "put it back there, or say where it is now with --base" if noted else "put it back there"
        relative = "; a relative path is one from where the run was started" if not configured.is_absolute() else ""
        raise FileError(
            f"the run {run_dir} trained on the frozen base {configured}, and there is no such folder{or_there}: {fix}"
            f"{relative}"
        )
    # From another folder a relative path may lead to another model.
    base = next((place for place in found if not _changed(noted, place)), found[0])
    require_same_base(run_dir, base)
    return base


def _require_moved(run_dir: Path, configured: Path, given: Path, noted: dict[str, Any]) -> None:
    if not noted:
        raise FileError(
            f"the run {run_dir} has no {_NAME}, against which --base {given} could be checked: leave --base out, and "
            f"put the base at {configured}"
        )
    if not given.is_dir():
        raise FileError(
            f"--base {given} is no folder: name the one that holds the base of {run_dir}, which was {configured}"
        )
    if changed := _changed(noted, given):
        raise FileError(
            f"--base {given} is not what the run {run_dir} trained on, which was {configured}; other weight files: "
            f"{', '.join(changed)}"
        )


def _noted(run_dir: Path) -> dict[str, Any]:
    path = run_dir / _NAME
    return read_json(path, "the weight files of a run's base") if path.is_file() else {}


def _changed(noted: dict[str, Any], base: Path) -> list[str]:
    """Return the names of weight files that are gone, new or others; none for a run that noted nothing."""
    if not noted:
        return []
    before, found = {name: mark for name, mark in noted.items() if name != _FOLDER}, _marks(base)
    return sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))


def _marks(base: Path) -> dict[str, str]:
    return {path.name: _mark(path) for path in sorted(base.glob("*.safetensors"))}


def _mark(path: Path) -> str:
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for block in range(_NUM_BLOCKS):
            file.seek(max(size - _BLOCK_BYTES, 0) * block // (_NUM_BLOCKS - 1))
            crc = zlib.crc32(file.read(_BLOCK_BYTES), crc)
    return f"{size} bytes, sample {crc:08x}"
