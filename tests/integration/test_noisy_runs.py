"""Whole runs with noise on the rollout engine's norms: gaps by mode, what is validated, resumption."""

import pytest
from safetensors.torch import load_file

from qarl_nemo.train.checkpoint import checkpoint_dir
from qarl_nemo.train.trainer import Trainer
from support.asserts import assert_bitwise_equal
from support.runs import STEPS, column, make_config, read_metrics, train, without_clocks

# Four steps, four stages: none, 0.1, sqrt(0.1 * 0.01), 0.01.
NOISE = {"start": 0.1, "end": 0.01, "stages": STEPS}


class WatchedTrainer(Trainer):
    """Remembers what was served when it validated."""

    def validate(self, step: int) -> dict[str, float]:
        self.validated = [*getattr(self, "validated", []), self.noise]
        return super().validate(step)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noise") / "replayed"
    trainer = WatchedTrainer(make_config(folder, rollout={"noise": NOISE}))
    trainer.train()
    return folder, trainer, read_metrics(folder)


def test_a_replayed_run_has_no_gap(run, tmp_path):
    _, _, records = run
    assert column(records, "noise/stage") == [0, 1, 2, 3]
    assert column(records, "noise/sigma") == pytest.approx([0, 0.1, 0.1**1.5, 0.01])
    # 256 draws, one layer's two norms of 128 channels: within five standard errors of 1 / sqrt(2 * 256).
    assert column(records, "noise/rms") == pytest.approx(column(records, "noise/sigma"), rel=0.22)
    # Two optimizer steps a step, one version more for each other noise, and two more where none was served between.
    assert column(records, "weight_version") == [2, 6, 10, 13]
    assert max(column(records, "mismatch/abs_gap_mean")) < 1e-4
    train(tmp_path, rollout={"noise": NOISE | {"mode": "clean"}})
    clean = column(read_metrics(tmp_path), "mismatch/abs_gap_mean")
    assert clean[0] < 1e-4 < clean[3] < clean[1]


def test_validation_and_the_end_are_without_noise(run):
    folder, trainer, _ = run
    assert trainer.validated == [None] * 3
    assert [trainer._noise(step) and trainer._noise(step).step for step in range(1, STEPS + 2)] == [None, 2, 3, 4, None]
    saved = load_file(checkpoint_dir(folder, STEPS) / "model/model.safetensors")
    for name in trainer.learner.policy.noisy_norms():
        assert_bitwise_equal(trainer.sampler.model.get_parameter(name), saved[name])


@pytest.mark.parametrize("stopped_at", [1, 2, 3])
def test_a_killed_run_goes_on_to_the_same_numbers(run, stopped_at, tmp_path, monkeypatch):
    blocks = {"rollout": {"noise": NOISE}, "checkpointing": {"save_period": 1}}
    trainer = Trainer(make_config(tmp_path, **blocks))
    step = trainer._one_step

    def killed(number, *arguments):
        if number > stopped_at:
            raise KeyboardInterrupt
        return step(number, *arguments)

    monkeypatch.setattr(trainer, "_one_step", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    train(tmp_path, **blocks)
    assert without_clocks(read_metrics(tmp_path)) == without_clocks(run[2])
    weights = [load_file(checkpoint_dir(folder, STEPS) / "model/model.safetensors") for folder in (tmp_path, run[0])]
    for name, weight in weights[0].items():
        assert_bitwise_equal(weight, weights[1][name])


def test_a_run_whose_time_is_short_tests_without_noise_and_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    noise = {"rollout": {"noise": NOISE}, "grpo": {"max_num_steps": STEPS, "val_period": 9}}
    train(tmp_path / "whole", **noise)
    trainer = WatchedTrainer(make_config(tmp_path / "run", **noise))
    monkeypatch.setattr(trainer.limit, "is_up", lambda: trainer.step == 2)
    trainer.train()
    assert trainer.validated == [None, None]
    train(tmp_path / "run", **noise)
    found, expected = (without_clocks(read_metrics(tmp_path / name)) for name in ("run", "whole"))
    assert found[1].pop("validation/reward") is not None
    assert found == expected
