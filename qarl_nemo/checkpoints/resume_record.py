"""`qarl_resume.json`: the settings of an unfinished conversion, and which of its shards are finished."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from qarl_nemo.checkpoints.hf_config import TEMPLATES_FOLDER
from qarl_nemo.files import FileError, checksum, read_json, write_atomic

RESUME_FILE = "qarl_resume.json"
_WHAT = "the record of an unfinished conversion"


class FinishedShard(BaseModel, extra="forbid", strict=True):
    """A shard as it was intended to be written.

    Attributes:
        file_bytes: size of the file.
        crc32: checksum of its content, see `files.checksum`.
        sources: source file -> [size, mtime_ns] before it was read.
    """

    file_bytes: int
    crc32: str
    sources: dict[str, list[int]]

    def is_intact(self, path: Path) -> bool:
        """Say whether a file is still what was written."""
        return path.is_file() and path.stat().st_size == self.file_bytes and checksum(path) == self.crc32


class ResumeRecord(BaseModel, extra="forbid", strict=True):
    """An unfinished conversion.

    Attributes:
        settings: everything that determines the output except the weights; JSON types.
        files: names of all files of the output.
        shards: finished shards by file name.
    """

    settings: dict[str, Any]
    files: list[str]
    shards: dict[str, FinishedShard] = {}

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the record in a folder that no other process writes.

        Returns:
            The record, None if there is none.

        Raises:
            FileError: it is damaged, or another version of this tool wrote it.
        """
        for unfinished in folder.glob(_UNFINISHED):
            unfinished.unlink()
        path = folder / RESUME_FILE
        if not path.exists():
            return None
        try:
            record = cls.model_validate(read_json(path, _WHAT))
        except ValidationError as error:
            where = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()[:3])
            raise FileError(
                f"{path}: expected {_WHAT}, but it is damaged or of another version of this tool ({where}); delete "
                f"{folder} and begin again"
            ) from None
        inside = ("", f"{TEMPLATES_FOLDER}/")
        outside = [
            name
            for name in {*record.files, *record.shards}
            if name.removesuffix(Path(name).name) not in inside or Path(name).name == ".."
        ]
        if outside:
            raise FileError(f"{path} names files outside its folder: {', '.join(outside)}; delete {folder}")
        return record

    def write(self, folder: Path) -> None:
        """Write the record, or replace it in one step."""
        write_atomic(folder / RESUME_FILE, json.dumps(self.model_dump(), indent=2) + "\n")

    def differences(self, other: Self) -> str:
        """Say how the settings of another record differ: `key was A, now B`, joined; empty if nothing does."""
        old, new = self.settings, other.settings
        changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        return ", ".join(f"{key} was {old.get(key)}, now {new.get(key)}" for key in changed)


# Temporary files that a killed `write_atomic` leaves.
_UNFINISHED = f".{RESUME_FILE}.*.tmp"


def is_record(name: str) -> bool:
    """Say whether a file in the folder is the record, whole or half-written."""
    return name == RESUME_FILE or Path(name).match(_UNFINISHED)
