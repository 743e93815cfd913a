"""The problems of a run, as a digest in its folder: one that is resumed goes on with the same ones, or says so."""

import hashlib
import json
from pathlib import Path
from typing import Any

from qarl_nemo.config import ConfigError
from qarl_nemo.data.problems import Task
from qarl_nemo.files import read_json, write_atomic
from qarl_nemo.train.prompts import PromptEncoder
from qarl_nemo.train.tasks import TaskSource

_NAME = "data.json"


def hold_data(run_dir: Path, source: TaskSource, encode: PromptEncoder, *, new: bool) -> None:
    """Remember a run's problems and its chat template, or require that they are still the same.

    Of a problem count prompt, answer and, where a reward function reads them, the other fields of its record.
    What a template writes is not compared: some write the day, which is another one when a run goes on.

    Args:
        run_dir: the run's folder.
        source: its problems.
        encode: writes their prompts.
        new: whether the run begins.

    Raises:
        ConfigError: the files, the hub's data or the chat template have changed since the run began.
        FileError: what was remembered cannot be read.
    """
    file = run_dir / _NAME
    digests = {name: _digest(encode.template, tasks) for name, tasks in source.tasks.items() if tasks}
    if not digests:
        # Made-up problems follow from the config.
        return
    if new or not file.exists():
        write_atomic(file, json.dumps(digests, indent=1) + "\n")
        return
    held = read_json(file, "the digests of a run's problems")
    differing = [name for name in {**held, **digests} if held.get(name) != digests.get(name)]
    changed = [
        f"data.{name}" for name in differing if held.get(name) not in _earlier(source.tasks.get(name, []), encode)
    ]
    if changed:
        raise ConfigError(
            f"{run_dir}: {' and '.join(changed)} or the chat template hold other prompts or answers than when this run "
            "began, or other fields for its reward function; bring those back, or choose another run_dir=..."
        )


def _digest(template: Any, tasks: list[Task], *, records: bool = True) -> str:
    digest = hashlib.sha256(json.dumps(template).encode())
    for task in tasks:
        reads = records and getattr(task.reward_function, "reads_record", False)
        fields = [dict(task.record)] if reads else []
        digest.update(json.dumps([task.prompt, task.answer, *fields], default=_text).encode())
    return digest.hexdigest()


def _text(value: object) -> str:
    # Fields of other types than JSON's; an object's address is another one in each process.
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def _earlier(tasks: list[Task], encode: PromptEncoder) -> tuple[str, str]:
    """Return what earlier versions remember: no fields of records, and before that what the template wrote."""
    return _digest(encode.template, tasks, records=False), _written(tasks, encode)


def _written(tasks: list[Task], encode: PromptEncoder) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps([encode.text(task.prompt), task.answer]).encode())
    return digest.hexdigest()
