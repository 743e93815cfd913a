from types import SimpleNamespace

import pytest

from qarl_nemo.metrics import throughput
from qarl_nemo.metrics.throughput import PhaseTimer, peak_memory


@pytest.fixture
def timer_at(monkeypatch):
    def make(*times):
        events, ticks = [], iter(times)
        monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        return PhaseTimer(synchronize=lambda: events.append("sync")), events

    return make


def test_phases_add_up_within_a_step_and_start_anew_with_the_next(timer_at):
    timer, events = timer_at(1, 3, 4, 5, 6, 9, 10, 20, 21, 22)
    with timer.phase("rollout"):  # 1 .. 3
        pass
    with timer.phase("update"):  # 4 .. 5
        pass
    with timer.phase("update"):  # 6 .. 9
        pass
    metrics = timer.finish_step({"rollout": 50, "update": 12})  # at 10, so the step took 9 s
    assert metrics == {
        "timing/rollout_s": 2,
        "timing/update_s": 4,
        "timing/step_s": 9,
        "throughput/rollout_tokens_s": 25,
        "throughput/update_tokens_s": 3,
    }
    assert len(events) == 6
    with timer.phase("refit"):  # 20 .. 21: the time between steps belongs to no step
        pass
    assert timer.finish_step({}) == {"timing/refit_s": 1, "timing/step_s": 2}


def test_tokens_of_a_phase_that_never_ran_are_an_error(timer_at):
    timer, _ = timer_at(1, 2, 3)
    with timer.phase("rollout"):
        pass
    with pytest.raises(ValueError, match=r"\['update'\].*\['rollout'\]"):
        timer.finish_step({"update": 5})


def test_peak_memory_is_in_bytes():
    # an interpreter with torch loaded holds more than 10 MB and less than 100 GB: KiB or pages would fall outside
    assert 1e7 < peak_memory()["memory/process_peak_bytes"] < 1e11
