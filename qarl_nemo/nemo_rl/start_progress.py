"""Says how long a run has been starting, and how long it will take if it starts as the one before did."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qarl_nemo.files import FileError, read_json, write_atomic
from qarl_nemo.metrics.recorded import FACTS_FILE

_PERIOD_S = 15.0
_SECONDS = "start_s"


@contextmanager
def shown_start(
    log_dir: Path, *, period_s: float = _PERIOD_S, show: Callable[[str], None] = lambda text: print(text, flush=True)
) -> Iterator[None]:
    """Print a line now and then while engines and learner start, and note in `run.json` how many seconds they took.

    Args:
        log_dir: NeMo-RL's folder of this start, with `run.json`; the folders beside it are those of earlier starts.
        period_s: seconds between two lines.
        show: prints a line.
    """
    last, began, ready = _last_start(log_dir), time.monotonic(), threading.Event()

    def tell() -> None:
        while not ready.wait(period_s):
            show(f"qarl: starting for {time.monotonic() - began:.0f} s; {_remaining(last, time.monotonic() - began)}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ready.set()
        thread.join()
    try:
        facts = read_json(log_dir / FACTS_FILE, "what a run wrote of itself")
        facts[_SECONDS] = round(time.monotonic() - began, 1)
        write_atomic(log_dir / FACTS_FILE, json.dumps(facts, indent=1) + "\n")
    except (FileError, OSError) as error:
        show(f"qarl: the start's seconds are not noted: {error}")


def _last_start(log_dir: Path) -> float | None:
    files = [file for file in log_dir.parent.glob(f"*/{FACTS_FILE}") if file.parent != log_dir]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        # A start that was cut while it wrote must not keep this one from starting.
        with suppress(FileError):
            seconds = read_json(file, "what an earlier start wrote").get(_SECONDS)
            if isinstance(seconds, float | int):
                return float(seconds)
    return None


def _remaining(last: float | None, passed: float) -> str:
    if last is None:
        return "engines and learner take minutes, longer where kernels have to be compiled"
    if passed < last:
        return f"about {last - passed:.0f} s more, as long as the last start"
    return f"the last start took {last:.0f} s"
