"""The list of a folder's files, written last: a file that is not as listed was cut short or damaged."""

import json
from pathlib import Path

from qarl_nemo.files import FileError, checksum, os_reason, read_json

FILE_LIST = "files.json"


def write_file_list(folder: Path) -> None:
    """List every file of a folder, which is complete but for this list, with its size and checksum."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / FILE_LIST).write_text(json.dumps(files, indent=1))


def file_problems(folder: Path, *, checksums: bool) -> list[str]:
    """Compare a folder with its list.

    Args:
        folder: the folder.
        checksums: read every byte; otherwise compare only sizes.

    Returns:
        One sentence for each file that is missing or not as listed, or for the list itself; none for a whole folder.
    """
    path = folder / FILE_LIST
    if not path.exists():
        return [f"{path}: is missing; it is written last, so the folder is not whole"]
    try:
        listed = read_json(path, "the list of a checkpoint's files, written last")
    except FileError as error:
        return [str(error)]
    if not listed:
        return [f"{path}: lists no file"]
    found = (_problem(folder, name, entry, checksums) for name, entry in listed.items())
    return [problem for problem in found if problem]


def _problem(folder: Path, name: str, entry: object, checksums: bool) -> str | None:
    path = folder / name
    if not isinstance(entry, dict) or not {"bytes", "crc32"} <= entry.keys() or ".." in Path(name).parts:
        return f"{folder / FILE_LIST}: expected bytes and crc32 of {name!r}, found {str(entry)[:80]}"
    try:
        size = path.stat().st_size
        if not path.is_file():
            return f"{path}: is not a regular file"
        if size != entry["bytes"]:
            return f"{path}: has {size} bytes, {entry['bytes']} were written"
        if checksums and checksum(path) != entry["crc32"]:
            return f"{path}: is damaged, its checksum is not the one that was written"
    except OSError as error:
        return f"{path}: {os_reason(error)}"
    return None
