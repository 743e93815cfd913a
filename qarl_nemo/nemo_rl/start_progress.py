"""Says which stage a start is in, how long it has been going, and how long it takes if it goes as the last one did."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from qarl_nemo.files import FileError, exclusive, make_folder, read_json, write_atomic
from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.nemo_rl.layout import read_layout
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.model_shapes import read_model

_SECONDS = "start_s"
_KEPT, _LONGEST_S = 50, 1e6
_FIRST = "first start of this model, format and layout here: it takes minutes, longer where kernels are compiled"
_say = partial(print, flush=True)


def start_key(config: Mapping[str, Any], qarl: Any) -> str:
    """Name what decides how long a start takes: the model's shape, the format, the GPUs and their layout.

    Args:
        config: the whole checked NeMo-RL config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.
    """
    model, layout = read_model(config), read_layout(config)
    sizes = {"model": look_up(config, "policy.model_name", "?")} if model is None else asdict(model)
    sizes |= {"format": qarl.format, "targets": "+".join(sorted(qarl.targets)), "alignment": qarl.alignment}
    sizes |= {} if layout is None else asdict(layout) | dict(layout.sizes)
    # Blocks and tuples are left out, and targets are sorted above: sets have no fixed order from process to process.
    return " ".join(f"{name}={value}" for name, value in sizes.items() if isinstance(value, int | str))


class StartProgress:
    """Prints a line when a stage begins and now and then within it, and notes for later starts how long all took.

    Args:
        period_s: seconds between two lines.
        clock: returns seconds; the start begins now.
        show: prints a line.
    """

    def __init__(
        self, *, period_s: float = 15.0, clock: Callable[[], float] = time.monotonic, show: Callable[[str], None] = _say
    ) -> None:
        self._period_s, self._clock, self._show = period_s, clock, show
        self._began, self._key, self._stage = clock(), "", ""
        self._last: tuple[float, str] | None = None
        self._over, self._thread = threading.Event(), threading.Thread(target=self._tell, daemon=True)

    def begin(self, key: str, log_dir: Path, stage: str) -> None:
        """Begin to print.

        Args:
            key: what `start_key` returned.
            log_dir: the config's log folder, in which NeMo-RL makes one for each start.
            stage: the first stage.
        """
        self._key, self._last = key, _last_start(key, log_dir)
        self.enter(stage)
        self._thread.start()

    def enter(self, stage: str) -> None:
        """Say that a stage begins."""
        self._stage = stage
        self._show(self._line())

    def end_with_refit(self, synchronizer: Any, log_dir: Path) -> None:
        """Have the first refit end the start, because each of NeMo-RL's loops samples its first responses after it.

        Args:
            synchronizer: what `plugin.install_refit` returned.
            log_dir: NeMo-RL's folder of this start, with `run.json`.
        """
        refit = synchronizer.sync_weights

        def first_refit(*arguments: Any, **named: Any) -> Any:
            figures = refit(*arguments, **named)
            synchronizer.sync_weights = refit
            self._finish(log_dir)
            return figures

        synchronizer.sync_weights = first_refit

    def close(self) -> None:
        """Print no more lines; a start that failed notes nothing."""
        self._over.set()

    def _finish(self, log_dir: Path) -> None:
        self.close()
        seconds = round(self._clock() - self._began, 1)
        self._show(f"qarl: start: done after {seconds:.0f} s")
        try:
            facts = read_json(log_dir / FACTS_FILE, "what a run wrote of itself")
            write_atomic(log_dir / FACTS_FILE, json.dumps(facts | {_SECONDS: seconds}, indent=1) + "\n")
            _remember(self._key, seconds)
        except (FileError, RuntimeError) as error:
            self._show(f"qarl: the start's seconds are not noted: {error}")

    def _tell(self) -> None:
        while not self._over.wait(self._period_s):
            self._show(self._line())

    def _line(self) -> str:
        passed = self._clock() - self._began
        said = f"qarl: start: {self._stage}  {passed:.0f} s"
        if self._last is None:
            return f"{said}; {_FIRST}"
        seconds, which = self._last
        left = f"ETA {seconds - passed:.0f} s" if passed < seconds else "longer than the last time"
        return f"{said}, {left} (the last start {which} took {seconds:.0f} s)"


def _last_start(key: str, log_dir: Path) -> tuple[float, str] | None:
    with suppress(RuntimeError):  # the user has no home folder
        if (seconds := _durations(_starts_file()).get(key)) is not None:
            return seconds, "of this model, format and layout"
    with suppress(OSError):
        for file in sorted(log_dir.glob(f"*/{FACTS_FILE}"), key=lambda file: file.stat().st_mtime, reverse=True):
            if (seconds := _durations(file).get(_SECONDS)) is not None:
                return seconds, "in this log folder"
    return None


def _remember(key: str, seconds: float) -> None:
    file = _starts_file()
    make_folder(file.parent, "the folder of past starts")
    # In a home folder on NFS, a lock server that hangs must not stop the run.
    with exclusive(file.with_suffix(".lock"), str(file)):
        starts = [(other, took) for other, took in _durations(file).items() if other != key]  # newest last
        write_atomic(file, json.dumps(dict([*starts, (key, seconds)][-_KEPT:]), indent=1) + "\n")


def _durations(file: Path) -> dict[str, float]:
    # A file that was cut or edited must not keep a run from starting.
    with suppress(FileError):
        values = read_json(file, "seconds of starts").items()
        return {key: float(value) for key, value in values if type(value) in (int, float) and 0 <= value < _LONGEST_S}
    return {}


def _starts_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qarl_nemo" / "starts.json"
