"""Files that a user names: read with errors that say which, written atomically, locked against a second process."""

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import os
import shutil
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

# A config, an index or a tokenizer takes megabytes; a larger file is something else under this name.
MAX_TEXT_BYTES = 1 << 30
_MAX_DEPTH = 100
_LEFT_AFTER_S = 86_400
_TOO_DEEP = f"it is nested more than {_MAX_DEPTH} levels deep"


class FileError(ValueError):
    """A file that cannot be used; the message names it, the place in it and what was expected."""


def require_file(path: Path, what: str) -> None:
    """Require a readable regular file, so that a pipe or a device is refused before it blocks the reader.

    Args:
        path: the file.
        what: what it should be, for the error: "a run's config".

    Raises:
        FileError: there is none, it is a folder, a pipe or a device, or may not be read.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        _refuse(path, what, error)
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise FileError(f"{path}: expected {what}, but it is {kind}")
    if not os.access(path, os.R_OK):
        raise FileError(f"{path}: expected {what}, but it may not be read (permission denied)")


def read_text(path: Path, what: str) -> str:
    """Read a whole UTF-8 file.

    Args:
        path: the file.
        what: what it should be, for the error.

    Raises:
        FileError: as `require_file`; it is not UTF-8, or larger than `MAX_TEXT_BYTES`.
    """
    require_file(path, what)
    try:
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise FileError(f"{path}: expected {what}, but it has {size / 2**30:.1f} GiB; at most 1 GiB is read whole")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        _refuse_bytes(path, what)
    except OSError as error:
        _refuse(path, what, error)


def read_words(path: Path, what: str) -> str:
    """Read what a model will see, without the byte order mark with which some editors begin a file.

    Args:
        path: the file.
        what: what it should be, for the error.

    Raises:
        FileError: as `read_text`.
    """
    return read_text(path, what).removeprefix("\ufeff")


def text_lines(path: Path, what: str) -> Iterator[str]:
    """Read the lines of a UTF-8 file, which may be larger than memory, without a byte order mark before the first one.

    They end as Python's files do: strings of JSON may hold the other separators that `str.splitlines` splits at.

    Args:
        path: the file.
        what: what it should be, for the error.

    Yields:
        Each line, without its end.

    Raises:
        FileError: as `require_file`; it is not UTF-8, or a line is longer than `MAX_TEXT_BYTES`.
    """
    require_file(path, what)
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_TEXT_BYTES + 1)
                if len(line) > MAX_TEXT_BYTES:
                    longest = readable_bytes(MAX_TEXT_BYTES)
                    raise FileError(f"{path}: expected {what}, but line {number} is longer than {longest}; split it")
                if not line:
                    return
                yield line.removesuffix("\n")
    except UnicodeDecodeError:
        _refuse_bytes(path, what)
    except OSError as error:
        _refuse(path, what, error)


def _refuse_bytes(path: Path, what: str) -> NoReturn:
    """Say where the first bytes are that are not UTF-8; Python names their place in its buffer alone."""
    place, start = "", 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                place = f": byte {line[error.start]:#04x} at position {start + error.start}, in line {number}"
                break
            start += len(line)
    raise FileError(f"{path}: expected {what}, but it is not UTF-8{place}; save it as UTF-8")


def read_json(path: Path, what: str, kind: type = dict) -> Any:
    """Read a JSON file whose outermost value is of one kind.

    Args:
        path: the file.
        what: what it should be, for the error.
        kind: `dict` or `list`.

    Raises:
        FileError: as `read_text`; it is not JSON, or another kind of value.
    """
    return parse_json(read_text(path, what), str(path), what, kind)


def parse_json(text: str, place: str, what: str, kind: type = dict) -> Any:
    """Parse JSON text whose outermost value is of one kind.

    Args:
        text: the JSON.
        place: where it stands, for the error: a file, or a file and a line.
        what: what it should be, for the error.
        kind: `dict` or `list`.

    Raises:
        FileError: it is not JSON, or another kind of value.
    """
    try:
        value = load_json(text)
    except ValueError as error:
        raise FileError(f"{place}: expected {what}, but it is not JSON: {error}") from error
    if not isinstance(value, kind):
        names = {dict: "an object", list: "a list"}
        raise FileError(f"{place}: expected {what}, {names[kind]}, but it holds {json.dumps(value)[:80]}")
    return value


def load_json(text: str) -> Any:
    """Parse JSON text whose depth is bounded, so that no later walk through it exceeds Python's stack.

    Raises:
        ValueError: it is not JSON, or nested deeper than any file of models, data or runs.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for node in level if isinstance(node, dict | list) for child in _children(node)]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def _children(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name beside `path`, flush it to disk, rename it, and remove what kills left.

    Args:
        path: final place; its folder must exist.
        content: text (written as UTF-8) or bytes.

    Raises:
        FileError: the disk is full, or the folder may not be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _remove_left(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise FileError(f"{path} cannot be written: {os_reason(error)}") from error


def _remove_left(path: Path) -> None:
    # A process id says nothing: on a shared disk it may be another host's or container's. No write takes this long.
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            if left.name.split(".")[-2].isdecimal() and time.time() - left.stat().st_mtime > _LEFT_AFTER_S:
                left.unlink()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Compute a file's CRC-32, which finds damage, not malice, as eight hexadecimal digits."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def require_writable(path: Path) -> None:
    """Refuse a folder that cannot be written to or made, and leave nothing behind.

    Raises:
        FileError: what should be a folder is a file, or it may not be written.
    """
    require_makeable(path)
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise FileError(f"{path} cannot be written to: permission denied; choose another place")


def require_makeable(path: Path) -> None:
    """Refuse a place under a file, where nothing can be made.

    Raises:
        FileError: what should be a folder is a file.
    """
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise FileError(f"{path} cannot be made: {nearest} is a file; choose another place")


def make_folder(path: Path, what: str) -> None:
    """Make a folder and those above it, unless it is there.

    Args:
        path: the folder.
        what: what it will be, for the error: "a run's folder".

    Raises:
        FileError: it cannot be made or may not be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path} cannot be made as {what}: {os_reason(error)}; choose another place") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise FileError(f"{path} cannot be used as {what}: permission denied; choose another place")


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Require free space on the disk of a folder, which need not exist yet.

    Args:
        folder: where something will be written.
        needed_bytes: its size.
        what: what it is, for the error: "a checkpoint".

    Raises:
        FileError: less is free.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise FileError(
            f"{folder}: {what} needs {readable_bytes(needed_bytes)} and its disk has {readable_bytes(free)} free; free "
            "some or choose another folder, then run the same command again"
        )


def os_reason(error: OSError) -> str:
    """Return why the system refused, in lower case, such as `permission denied`; names a full disk as such."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error.strerror}); free some space or choose another folder"
    return (error.strerror or str(error)).lower()


def readable_bytes(num_bytes: float) -> str:
    """Return a size for people, three digits in the largest fitting unit, a power of 1000: `12.3 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def require_free(lock: Path, what: str) -> None:
    """Refuse where another process holds a lock file, as `exclusive` would; nothing is made or written.

    Args:
        lock: the lock file, which need not exist.
        what: what it guards, for the error: "run folder runs/a".

    Raises:
        FileError: another process holds it, or it cannot be asked for.
    """
    try:
        with lock.open(encoding="utf-8") as file:
            try:
                # A held lock refuses a shared one, too; over NFS an exclusive one needs a file open for writing.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(file, what) from None
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise FileError(f"{lock} cannot be locked: {os_reason(error)}") from error


def _in_use(file: TextIO, what: str) -> FileError:
    file.seek(0)
    holder = file.read(200).strip() or "another process"
    return FileError(f"{what} is in use by {holder}; wait for it or stop it")


@contextlib.contextmanager
def exclusive(lock: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file while working on what it guards; the system frees it when the process ends, however it ends.

    Args:
        lock: the lock file, made here and removed at the end; its folder must exist.
        what: what it guards, for the error: "run folder runs/a".
        wait: until another process that holds it gives it up.

    Raises:
        FileError: another process holds it and we do not wait, it cannot be written, or its file system has no locks.
    """
    while True:
        try:
            file = lock.open("a+", encoding="utf-8")
        except OSError as error:
            raise FileError(f"{lock} cannot be written: {os_reason(error)}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise _in_use(file, what) from None
        except OSError as error:
            file.close()
            raise FileError(
                f"{lock} cannot be locked: {os_reason(error)}; {what} must lie on a file system with locks: choose one "
                "of this machine, or mount it with them (Lustre: -o flock; NFS: a server that runs lockd)"
            ) from error
        # The holder may have ended and removed the file between our open and our lock; a lock on it guards nothing.
        if _same_file(lock, file.fileno()):
            break
        file.close()
    with file:
        try:
            # Only for another process's message: a full disk does not keep anybody from locking.
            with contextlib.suppress(OSError):
                file.truncate(0)
                os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}".encode())
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _refuse(path: Path, what: str, error: Exception) -> NoReturn:
    reason = os_reason(error) if isinstance(error, OSError) else str(error)
    raise FileError(f"{path}: expected {what}, but: {reason or repr(error)}") from error
