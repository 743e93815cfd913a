"""The `<destination>.partial` folder, in which a conversion works and from which it resumes after a kill.

    <destination>.partial/qarl_resume.json   settings, names of the output's files, finished shards with their checksums
    <destination>.partial/checkpoint/        the output; renamed to the destination when it is complete
    <destination>.partial/replaced/          with `overwrite`, the old destination until the rename
    <destination>.partial/qarl_lock          held by the process that works here

The record is made after `checkpoint` and removed last. So a kill leaves one of three states: a record and `checkpoint`
(resume), a record without it (renamed already: clean up), or no record (nothing was begun, or everything is done).
"""

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl_nemo.checkpoints.hf_config import RECORD_FILE, foreign_files, top_name
from qarl_nemo.checkpoints.resume_record import RESUME_FILE, FinishedShard, ResumeRecord, is_record
from qarl_nemo.files import FileError, exclusive, require_makeable, require_writable, sync

Sources = dict[str, list[int]]  # source file -> [size, mtime_ns]
_CHECKPOINT, _REPLACED, _LOCK = "checkpoint", "replaced", "qarl_lock"


def partial_path(destination: Path) -> Path:
    """Return the folder a conversion works in: `<destination>.partial`.

    Raises:
        ValueError: the destination has no name of its own, like `..`.
    """
    if destination.name in ("", ".."):
        raise ValueError(f"destination {destination} is no name for a new folder; choose one, like {destination}/model")
    return destination.with_name(destination.name + ".partial")


class PartialFolder:
    """A conversion in progress, locked against other processes; `open_partial` makes it.

    Attributes:
        folder: where the output's files are written.
        published: whether the destination is this conversion's complete output.
    """

    def __init__(
        self,
        destination: Path,
        settings: dict[str, Any],
        shards: Mapping[str, Sources],
        names: Sequence[str],
        *,
        overwrite: bool,
    ) -> None:
        """Resume what an earlier process left, or begin; see `open_partial`."""
        self._work, self._destination, self._overwrite = partial_path(destination), destination, overwrite
        self.folder, self._replaced = self._work / _CHECKPOINT, self._work / _REPLACED
        self._sources = shards
        self._record = ResumeRecord(settings=settings, files=[*shards, *names])
        before = ResumeRecord.read(self._work)
        # An earlier process may have been killed after the rename.
        self.published = before is not None and self._was_published(before)
        if before is not None and self.published:
            if not before.differences(self._record) and all(
                file in before.shards and before.shards[file].sources == sources for file, sources in shards.items()
            ):
                return
            self.clean_up()
            self.published, before = False, None
        self._put_back()
        check_destination(destination, overwrite)
        if before is not None:
            self._take_up(before)
        self.folder.mkdir(exist_ok=True)
        self._record.write(self._work)

    def finished(self, file: str) -> bool:
        """Say whether a shard is complete and unchanged, and its source files have not changed either."""
        shard = self._record.shards.get(file)
        return shard is not None and shard.sources == self._sources[file] and shard.is_intact(self.folder / file)

    def add(self, file: str, write: Callable[[Path], str]) -> None:
        """Write a shard under a temporary name, move it to its own, and note that it is finished.

        Args:
            file: shard file name.
            write: writes the file it is given and returns the checksum of what it intended to write.
        """
        temporary = self.folder / f"{file}.tmp"
        crc32 = write(temporary)
        shard = FinishedShard(file_bytes=temporary.stat().st_size, crc32=crc32, sources=self._sources[file])
        os.replace(temporary, self.folder / file)
        self._record.shards[file] = shard
        self._record.write(self._work)

    def publish(self, companions: Mapping[str, bytes]) -> None:
        """Write the files beside the shards and rename the complete folder to the destination.

        Args:
            companions: file name -> content.

        Raises:
            ValueError: the folder holds files that are not this conversion's, or the destination was made meanwhile.
        """
        for name, content in companions.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        self._refuse_strays(set(self._record.files))
        check_destination(self._destination, self._overwrite)
        for folder in {(self.folder / name).parent for name in companions} | {self.folder}:
            sync(folder)
        if self._destination.exists():
            os.replace(self._destination, self._replaced)
        try:
            os.replace(self.folder, self._destination)
        except BaseException:
            self._put_back()
            raise
        sync(self._destination.absolute().parent)
        self.published = True

    def clean_up(self) -> None:
        """Remove the old destination and the record."""
        if self._replaced.is_symlink():
            self._replaced.unlink()
        elif self._replaced.exists():
            shutil.rmtree(self._replaced)
        (self._work / RESUME_FILE).unlink()

    def _was_published(self, before: ResumeRecord) -> bool:
        """Say whether the destination is, byte for byte, the output that the record describes."""
        if self.folder.exists() or not self._destination.is_dir():
            return False
        there = {path.name for path in self._destination.iterdir()}
        return there == set(map(top_name, before.files)) and all(
            shard.is_intact(self._destination / file) for file, shard in before.shards.items()
        )

    def _put_back(self) -> None:
        """Undo the first of publishing's two renames if the second was not done."""
        if not self._replaced.exists():
            return
        if self._destination.exists():
            raise ValueError(
                f"{self._replaced} is what an interrupted overwrite had taken out of {self._destination}, and that "
                "exists again; keep one of them and move the other away"
            )
        os.replace(self._replaced, self._destination)

    def _take_up(self, before: ResumeRecord) -> None:
        changed = before.differences(self._record)
        if changed and not self._overwrite:
            raise ValueError(
                f"{self._work} is an unfinished conversion with other settings ({changed}); go on with the old "
                "settings, delete the folder, or overwrite it (--overwrite)"
            )
        if not changed:
            self._record.shards = before.shards
        if not self.folder.exists():
            return
        made = {*before.files, *before.shards}
        self._refuse_strays(made | {f"{file}.tmp" for file in made})
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in self._record.shards:
                path.unlink()

    def _refuse_strays(self, own: set[str]) -> None:
        tops = set(map(top_name, own))
        strays = sorted(path.name for path in self.folder.iterdir() if path.name not in tops)
        if strays:
            raise ValueError(
                f"{self.folder} holds files that this conversion did not make, which will not be published: "
                f"{', '.join(strays)}; move them away and run the same command again"
            )


@contextlib.contextmanager
def open_partial(
    destination: Path, settings: dict[str, Any], shards: Mapping[str, Sources], names: Sequence[str], *, overwrite: bool
) -> Iterator[PartialFolder]:
    """Open the folder for one conversion, as the only process that works on this destination.

    Args:
        destination: the final folder.
        settings: everything that determines the output except the weights; JSON types.
        shards: shard file name -> the source files it is made from, with their sizes and times.
        names: all other files of the output.
        overwrite: replace a destination this tool wrote, and drop an unfinished conversion with other settings.

    Yields:
        The folder; whatever was not published stays for the next call.

    Raises:
        ValueError: the destination exists, the folder there has other settings or is not this tool's, or another
            process works on this destination.
    """
    work = partial_path(destination)
    _require_own(work)
    work.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive(work / _LOCK, f"destination {destination}"):
            yield PartialFolder(destination, settings, shards, names, overwrite=overwrite)
    finally:
        # The folder is empty unless there is something to resume.
        with contextlib.suppress(OSError):
            work.rmdir()


def is_in_place(destination: Path) -> bool:
    """Say whether a conversion was interrupted when all was written and only the old destination had to be removed."""
    work = partial_path(destination)
    return (work / RESUME_FILE).is_file() and not (work / _CHECKPOINT).exists() and destination.is_dir()


def _require_own(work: Path) -> None:
    """Refuse a folder of the user's that happens to have this name, before a lock is put into it."""
    if not work.exists():
        return
    entries = {path.name for path in work.iterdir()}
    begun = any(is_record(name) for name in entries)
    idle = _REPLACED not in entries and not any((work / _CHECKPOINT).glob("*"))
    foreign = {name for name in entries if not is_record(name)} - {_CHECKPOINT, _REPLACED, _LOCK}
    if foreign or not (begun or idle):
        raise ValueError(
            f"{work} exists and is no unfinished conversion of this version of the tool: it holds "
            f"{', '.join(sorted(foreign or entries))}; move it away"
        )


def require_place(destination: Path) -> None:
    """Require that folders may be made where a destination and its partial folder will be.

    Raises:
        FileError: they may not.
    """
    require_makeable(destination)
    require_writable(destination.absolute().parent)


def check_destination(destination: Path, overwrite: bool) -> None:
    """Require that a folder may be made, or replaced.

    Raises:
        ValueError: it may not.
    """
    if destination.is_symlink():
        # Replacing it would take the link away and leave the folder behind it, or fail at the last rename.
        target = os.path.realpath(destination)
        link = f"destination {destination} is a symbolic link to {target}"
        if destination.exists():
            raise ValueError(f"{link}, and a link is not replaced; name {target} itself")
        raise ValueError(f"{link}, which does not exist; remove it or make its target and name that")
    if not destination.exists():
        return
    if not (destination / RECORD_FILE).is_file():
        raise ValueError(
            f"destination {destination} exists and was not written by this tool (no {RECORD_FILE}), so that "
            "--overwrite does not replace it; choose another one or remove it yourself"
        )
    if not overwrite:
        raise ValueError(
            f"destination {destination} exists; choose another one, or replace it with --overwrite (overwrite=True)"
        )
    foreign = foreign_files(destination)
    if foreign:
        raise ValueError(
            f"destination {destination} holds what this tool did not write, so it is not overwritten; move away "
            f"{', '.join(foreign)}"
        )
    if not os.access(destination, os.W_OK | os.X_OK):
        # It is moved into another folder and deleted, once the new one is complete.
        raise FileError(
            f"destination {destination} cannot be replaced: permission denied; choose another one, or make it writable "
            f"(chmod u+wx {shlex.quote(str(destination))})"
        )
