"""The `<destination>.partial` folder: finished shards, and a record that lets a killed conversion go on."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from qarl_nemo.checkpoints.hf_config import RECORD_FILE, write_json

RESUME_FILE = "qarl_resume.json"


def partial_path(destination: Path) -> Path:
    """Return the folder a conversion works in: `<destination>.partial`.

    Args:
        destination: the final folder.

    Returns:
        Its path, existing or not.
    """
    return destination.with_name(destination.name + ".partial")


class PartialFolder:
    """A conversion in progress; becomes the destination in one rename."""

    def __init__(self, destination: Path, settings: dict[str, Any], *, overwrite: bool) -> None:
        """Create the folder, or take up the one a killed conversion left.

        Args:
            destination: the final folder.
            settings: everything that determines the output except the weights; JSON types.
            overwrite: replace a destination this tool wrote, and drop a partial folder of other settings.

        Raises:
            ValueError: the destination exists, or the partial folder is of other settings or not this tool's.
        """
        _check_destination(destination, overwrite)
        self.folder = partial_path(destination)
        self._destination = destination
        self._overwrite = overwrite
        self._state = {"settings": settings, "shards": {}}
        if self.folder.exists():
            self._take_up(settings)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save()

    def finished(self, file: str, sources: dict[str, list[int]]) -> dict[str, Any] | None:
        """Return the record of a shard that is complete and whose source files have not changed.

        Args:
            file: shard file name.
            sources: source file -> [size, mtime_ns] now.

        Returns:
            What `record` stored, or None.
        """
        record = self._state["shards"].get(file)
        path = self.folder / file
        intact = (
            record is not None
            and record["sources"] == sources
            and path.is_file()
            and path.stat().st_size == record["file_bytes"]
        )
        return record if intact else None

    def record(self, file: str, temporary: Path, **facts: Any) -> dict[str, Any]:
        """Move a written shard to its name and note that it is finished.

        Args:
            file: shard file name.
            temporary: the complete file beside it.
            **facts: `sources`, `tensor_bytes` and `names` of the shard.

        Returns:
            The stored record.
        """
        shutil.copymode(self.folder / RESUME_FILE, temporary)
        os.replace(temporary, self.folder / file)
        record = {"file_bytes": (self.folder / file).stat().st_size, **facts}
        self._state["shards"][file] = record
        self._save()
        return record

    def publish(self) -> None:
        """Rename the complete folder to the destination."""
        retired = self._destination.with_name(self._destination.name + ".old")
        if self._overwrite and self._destination.exists():
            shutil.rmtree(retired, ignore_errors=True)
            os.replace(self._destination, retired)
        os.replace(self.folder, self._destination)
        (self._destination / RESUME_FILE).unlink()
        if self._overwrite:
            shutil.rmtree(retired, ignore_errors=True)

    def _take_up(self, settings: dict[str, Any]) -> None:
        entries = [path.name for path in self.folder.iterdir() if path.suffix != ".tmp"]
        if RESUME_FILE not in entries:
            if entries:
                raise ValueError(f"{self.folder} exists and is no unfinished conversion of this tool; move it away")
            return
        state = json.loads((self.folder / RESUME_FILE).read_text(encoding="utf-8"))
        before = state["settings"]
        changed = [key for key in sorted({*before, *settings}) if before.get(key) != settings.get(key)]
        if not changed:
            self._state = state
        elif self._overwrite:
            shutil.rmtree(self.folder)
        else:
            listed = ", ".join(f"{key} was {before.get(key)}, now {settings.get(key)}" for key in changed)
            raise ValueError(
                f"{self.folder} is an unfinished conversion with other settings ({listed}); go on with the old "
                "settings, delete the folder, or overwrite"
            )

    def _save(self) -> None:
        temporary = self.folder / (RESUME_FILE + ".tmp")
        write_json(temporary, self._state)
        os.replace(temporary, self.folder / RESUME_FILE)


def _check_destination(destination: Path, overwrite: bool) -> None:
    if not destination.exists():
        return
    if not overwrite:
        raise ValueError(f"destination {destination} exists; choose another one or overwrite it explicitly")
    if not (destination / RECORD_FILE).is_file():
        raise ValueError(
            f"destination {destination} was not written by this tool (no {RECORD_FILE}), so it is not overwritten; "
            "choose another one or remove it yourself"
        )
