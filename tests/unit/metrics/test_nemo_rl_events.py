"""TensorBoard's events of NeMo-RL: a cut end is none, and damage is said."""

import pytest
from torch.utils.tensorboard import SummaryWriter

from qarl_nemo.metrics.nemo_rl_logs import is_nemo_rl_log
from qarl_nemo.metrics.runs import load_run


def write_events(folder, steps):
    with SummaryWriter(folder / "tensorboard") as writer:
        for step in steps:
            writer.add_scalar("train/reward", step / 10, step)
    (file,) = folder.rglob("events.out.tfevents.*")
    return file


def test_events_that_a_kill_cut_short_are_read_up_to_there_and_damaged_ones_refused(tmp_path):
    folder = tmp_path / "exp_001"
    file = write_events(folder, range(1, 6))
    whole = file.read_bytes()
    assert load_run(folder).steps.tolist() == [1, 2, 3, 4, 5]
    file.write_bytes(whole[:-3])
    assert load_run(folder).steps.tolist() == [1, 2, 3, 4]
    for place in (len(whole) // 2, len(whole) - 20):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"tfevents.* is damaged: expected TensorBoard's events, but: .*crc32"):
            load_run(folder)


def test_a_run_of_the_embedded_engine_is_none_of_nemo_rls_beside_it(make_run, tmp_path):
    make_run("ours")
    write_events(tmp_path / "ours" / "exp_001", range(1, 3))
    assert not is_nemo_rl_log(tmp_path / "ours")
    assert is_nemo_rl_log(tmp_path / "ours" / "exp_001")
