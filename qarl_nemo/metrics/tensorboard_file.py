"""TensorBoard's event files: written in the caller's thread, so that it sees the error of a full disk, and read."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.summary.writer.record_writer import RecordWriter

from qarl_nemo.files import FileError, make_folder, os_reason


class TensorboardFile:
    """Appends scalars to an event file of its own in a folder.

    Args:
        folder: made when missing.
        resume_step: later steps in earlier files are no longer shown.

    Raises:
        FileError: the disk is full or failed.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        make_folder(folder, "the folder of TensorBoard's events")
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        restart = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=resume_step + 1, session_log=restart))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one step and flush it.

        Args:
            step: training step.
            scalars: values by name, finite.

        Raises:
            FileError: the disk is full or failed.
        """
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError as error:
            raise FileError(f"{self._file.name} cannot be written: {os_reason(error)}") from error


def read_events(file: Path) -> Iterator[Event]:
    """Yield a file's events; TensorBoard's own loader ends at a damaged one as at the last, and says nothing.

    Args:
        file: an event file, perhaps still written, whose last event may be cut short.

    Raises:
        DataLossError: an event is damaged.
    """
    reader = PyRecordReader_New(str(file))
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return
        except DataLossError as error:
            if "truncated record" in str(error):
                return
            raise
        yield Event.FromString(reader.record())
