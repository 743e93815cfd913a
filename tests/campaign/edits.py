"""Damage to one file: any file's bytes and kind here, what formats know in `trees`, `tensors` and `pickles`."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234567\n"
Content = tuple[str, bytes]
ContentEdit = Callable[[random.Random, bytes], Content]


@dataclass(frozen=True, slots=True)
class Edit:
    """One damage, as plain data: a case is a list of these, and is shrunk by leaving some out.

    Attributes:
        place: file relative to the case's folder, or `arguments`.
        what: what is wrong with it, for people.
        content: new bytes of the file; None for another kind of damage.
        kind: what the file becomes: missing, folder, pipe, loop, dangling, endless.
        arguments: arguments added to the command, where `place` says so.
    """

    place: str
    what: str
    content: bytes | None = None
    kind: str = ""
    arguments: tuple[str, ...] = ()

    def apply(self, folder: Path) -> None:
        """Damage the file inside a case's folder."""
        if self.place == "arguments":
            return
        path = folder / self.place
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if self.content is not None:
            path.write_bytes(self.content)
            return
        make = {
            "missing": lambda: None,
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "loop": lambda: path.symlink_to(path.name),
            "dangling": lambda: path.symlink_to("nothing-here"),
            "endless": lambda: path.symlink_to("/dev/zero"),
        }
        make[self.kind]()

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def draw_edit(rng: random.Random, folder: Path, place: str, by_format: ContentEdit | None) -> Edit:
    """Draw one damage to one file.

    Args:
        rng: source of randomness.
        folder: the undamaged inputs.
        place: file relative to `folder`.
        by_format: what only this format knows; used more often than not.

    Returns:
        The damage.
    """
    if rng.random() < 0.12:
        kind = rng.choice(("missing", "folder", "pipe", "loop", "dangling", "endless"))
        return Edit(place, f"is now {kind}", kind=kind)
    data = (folder / place).read_bytes()
    edit = by_format if by_format is not None and rng.random() < 0.7 else edit_bytes
    what, content = edit(rng, data)
    return Edit(place, what, content)


def edit_bytes(rng: random.Random, data: bytes) -> Content:
    """Flip, cut, insert or replace bytes; the beginning, where headers are, as often as all the rest.

    Args:
        rng: source of randomness.
        data: the file.

    Returns:
        What was done, and the new content.
    """
    at = rng.randrange(max(1, min(len(data), 64) if rng.random() < 0.5 else len(data)))
    names = ("flip", "truncate", "empty", "overwrite", "insert", "append", "cut out", "lfs", "encoding", "nul", "text")
    name = rng.choices(names, weights=(6, 4, 1, 3, 2, 2, 2, 1, 2, 1, 1))[0]
    size = rng.choice((1, 2, 8, 100))
    noise = rng.randbytes(size)
    contents = {
        "flip": lambda: data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :] if data else b"\x01",
        "truncate": lambda: data[:at],
        "empty": lambda: b"",
        "overwrite": lambda: data[:at] + noise + data[at + size :],
        "insert": lambda: data[:at] + noise + data[at:],
        "append": lambda: data + noise,
        "cut out": lambda: data[:at] + data[at + size :],
        "lfs": lambda: LFS_POINTER,
        "encoding": lambda: data[:at] + b"\xff\xfe\xe9" + data[at:],
        "nul": lambda: bytes(len(data)),
        "text": lambda: b"<html><body>404: not found</body></html>\n",
    }
    return f"{name} at byte {at} of {len(data)} ({size} bytes)", contents[name]()
