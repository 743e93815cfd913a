"""The file of all answers: a killed evaluation goes on after the last whole chunk, and nothing of it is asked twice."""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from qarl_nemo.files import FileError, os_reason, write_atomic
from qarl_nemo.metrics.recorded import read_lines, require_kind

Row = dict[str, Any]
_Count = Annotated[int, Field(ge=0)]
# Of one chunk of one benchmark and model.
Key = tuple[str, str, int]


class _KeptAnswer(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    benchmark: str
    chunk: _Count
    chunk_size: Annotated[int, Field(ge=1)]
    problem: _Count
    sample: _Count
    prompt: str
    num_tokens: _Count
    truncated: bool
    right: bool


class AnswerStore:
    """One JSON object a line: first the settings, then an object for each answer.

    Raises:
        FileError: it holds answers of another evaluation, or is damaged; every setting that differs is listed.
    """

    def __init__(self, path: Path, settings: Row) -> None:
        self.path = path
        self._chunks: dict[Key, list[Row]] = defaultdict(list)
        lines = read_lines(path) if path.exists() else []
        # Settings without an answer bind nobody: that evaluation was refused or killed before its first one.
        if len(lines) > 1 or (lines and "settings" not in lines[0]):
            self._require_same(lines[0], settings)
        for number, row in enumerate(lines[1:], start=2):
            require_kind(row, _KeptAnswer, f"{path}, line {number}")
            self._chunks[_key(row)].append(row)
        # A kill can only have cut the last one short.
        for key in [key for key, rows in self._chunks.items() if len(rows) != rows[0]["chunk_size"]]:
            del self._chunks[key]
        self._settings = settings
        # Until something is added a refused evaluation leaves the file as it was, or none.
        self._is_written = False

    def chunk(self, model: str, benchmark: str, number: int) -> list[Row] | None:
        """Return the answers of a whole chunk, as they are held here; None if it is still to be asked."""
        return self._chunks.get((model, benchmark, number))

    def add(self, rows: Sequence[Row]) -> None:
        """Append a chunk.

        Args:
            rows: its answers, whole.

        Raises:
            FileError: the disk is full or failed; what was there stays.
        """
        self._chunks[_key(rows[0])] = list(rows)
        if not self._is_written:
            # Also where no row is lost: what comes next must not stand on a line that a kill has left unfinished.
            self.rewrite()
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_line, rows)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be written: {os_reason(error)}; then the same command goes on"
            ) from error

    def rewrite(self) -> None:
        """Write the whole file, as after answers were changed.

        Raises:
            FileError: the disk is full or failed; what was there stays.
        """
        rows = (row for rows in self._chunks.values() for row in rows)
        write_atomic(self.path, "".join(map(_line, [{"settings": self._settings}, *rows])))
        self._is_written = True

    def _require_same(self, header: Row, settings: Row) -> None:
        found = header.get("settings")
        if not isinstance(found, dict):
            raise FileError(f"{self.path} is not a file of answers of qarl eval; choose another --output")
        differing = [
            f"{key}: there {found.get(key)!r}, now {settings.get(key)!r}"
            for key in dict.fromkeys([*found, *settings])
            if found.get(key) != settings.get(key)
        ]
        if differing:
            raise FileError(
                f"{self.path} holds the answers of another evaluation; go on with the same settings, or choose another "
                "--output. Differing:\n  " + "\n  ".join(differing)
            )


def _key(row: Row) -> Key:
    return row["model"], row["benchmark"], row["chunk"]


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
