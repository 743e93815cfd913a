"""What a power cut would lose: which files and names were not flushed to the disk when a folder got its name."""

import os
from pathlib import Path

import pytest


class FlushedDisk:
    """Watches `os.fsync`, `os.rename` and `os.replace` of this process.

    Attributes:
        lost: renamed folder's new path -> files and folders of it that had changed since they were flushed, or never
            were; the folder that it stands in is among them as `..` until that is flushed after the rename.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: dict[Path, set[str]] = {}
        self._flushed: set[tuple[int, int]] = set()
        fsync = os.fsync

        def noted(descriptor: int) -> None:
            fsync(descriptor)
            self._flushed.add(_state(os.fstat(descriptor)))
            for path, lost in self.lost.items():
                if os.fstat(descriptor).st_ino == path.parent.stat().st_ino:
                    lost.discard("..")

        monkeypatch.setattr(os, "fsync", noted)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, move):
        def moved(source, target):
            source, is_folder = Path(source), os.path.isdir(source)
            paths = (source, *source.rglob("*")) if is_folder else ()
            lost = {str(path.relative_to(source)) for path in paths if _state(path.stat()) not in self._flushed}
            move(source, target)
            if is_folder:
                self.lost[Path(target).absolute()] = lost | {".."}

        return moved


def _state(status: os.stat_result) -> tuple[int, int]:
    # A file that is written after it was flushed has another time.
    return status.st_ino, status.st_mtime_ns
