"""Files a user names: every failure names the file and what was expected of it."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from qarl_nemo.files import (
    FileError,
    exclusive,
    read_json,
    readable_bytes,
    require_free,
    require_space,
    require_writable,
    write_atomic,
)

HOLD = """
import pathlib, sys
from qarl_nemo.files import exclusive
with exclusive(pathlib.Path(sys.argv[1]), "folder x"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("folder", "it is a folder"),
        ("pipe", "not a regular file"),
        (b'{\n"\xff"}', "not UTF-8: byte 0xff at position 3, in line 2; save it as UTF-8"),
        (b"{", "not JSON"),
        (b"[" * 200_000, "nested more than 100 levels deep"),
        (b'{"a":' + b"[" * 99 + b"0" + b"]" * 99 + b"}", "nested more than 100 levels deep"),
        (b"1" * 5000, "not JSON"),
        (b"[]", "an object, but it holds []"),
        (b'""', 'an object, but it holds ""'),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match="a model's config") as error:
        read_json(path, "a model's config")
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_file_of_the_greatest_depth_is_read(tmp_path):
    (tmp_path / "deep.json").write_bytes(b'{"a":' + b"[" * 98 + b"0" + b"]" * 98 + b"}")
    assert read_json(tmp_path / "deep.json", "a model's config")


def test_a_write_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileError, match="taken cannot be written"):
        write_atomic(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_write_removes_what_a_kill_left_long_ago_and_no_other_file(tmp_path):
    ours, days = tmp_path / "a[1].html", time.time() - 2 * 86_400
    new, others = ".a[1].html.7.tmp", [".a1.html.7.tmp", ".a[1].html.x.tmp", "a[1].html.7.tmp", ".a[1].htm.7.tmp"]
    old = [*others, ".a[1].html.6.tmp"]
    for name in (new, *old):
        (tmp_path / name).touch()
    for name in old:
        os.utime(tmp_path / name, (days, days))
    write_atomic(ours, "text")
    assert {path.name for path in tmp_path.iterdir()} == {ours.name, new, *others}


def test_a_place_that_cannot_be_written_is_refused_and_nothing_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "new" / "folder"):
        require_writable(place)
    with pytest.raises(FileError, match=r"file is a file; choose another place"):
        require_writable(tmp_path / "file" / "folder")
    # Tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for place in (tmp_path, tmp_path / "new" / "folder"):
        with pytest.raises(FileError, match="permission denied; choose another place"):
            require_writable(place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_space_is_required_before_anything_is_written(tmp_path):
    require_space(tmp_path / "not" / "yet", 1, "a checkpoint")
    with pytest.raises(FileError, match=r"a checkpoint needs 10+\.0 TB"):
        require_space(tmp_path / "not" / "yet", 10**30, "a checkpoint")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (61_234, "61.2 kB"), (61.2e9, "61.2 GB"), (999.7e3, "1 MB")],
)
def test_sizes_of_small_things_are_not_rounded_away(num_bytes, text):
    assert readable_bytes(num_bytes) == text


def test_a_lock_is_held_by_one_process_and_freed_by_a_kill(tmp_path):
    lock = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(FileError, match=f"folder x is in use by process {holder.pid} on "), exclusive(lock, "folder x"):
        pass
    threading.Timer(0.2, holder.kill).start()
    with exclusive(lock, "folder x", wait=True):
        assert holder.wait() < 0
        assert lock.exists()
    assert not lock.exists()


def test_a_lock_is_asked_for_without_a_trace(tmp_path):
    require_free(tmp_path / "new" / ".lock", "folder x")
    require_free(tmp_path / ".lock", "folder x")
    with (
        exclusive(tmp_path / ".lock", "folder x"),
        pytest.raises(FileError, match=r"^folder x is in use by process \d+ on .*; wait for it or stop it$"),
    ):
        require_free(tmp_path / ".lock", "folder x")
    require_free(tmp_path / ".lock", "folder x")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileError, match="cannot be locked: is a directory"):
        require_free(tmp_path, "folder x")


def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(FileError, match="cannot be locked: operation not supported; folder x must lie") as error:
        exclusive(tmp_path / ".lock", "folder x").__enter__()
    assert str(tmp_path / ".lock") in str(error.value)


def test_a_full_disk_keeps_nobody_from_locking(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with exclusive(tmp_path / ".lock", "folder x"):
        assert (tmp_path / ".lock").read_text() == ""
