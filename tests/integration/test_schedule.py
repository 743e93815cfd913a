"""Progressive bits: stages of a run on narrower grids, in one storage and one engine."""

import pytest
import torch

from qarl_nemo.measure.eval.models import find_model
from qarl_nemo.measure.eval.output import model_record
from qarl_nemo.train.policy import TransformersPolicy
from support.runs import STEPS, column, read_metrics, train, without_clocks

STAGES = [{"from_step": 2, "bits": 4}, {"from_step": 3, "bits": 2, "reset_moments": True}]
QARL = {"format": "w8a16", "group_size": 32, "schedule": STAGES}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedule") / "run"
    trainer = train(folder, qarl=QARL)
    return folder, trainer, read_metrics(folder)


def test_every_step_is_sampled_and_trained_on_its_stages_grid(run):
    _, trainer, records = run
    assert column(records, "refit/grid_bits") == [8, 4, 2, 2]
    # Two optimizer steps a step, and one more version where a stage begins.
    assert column(records, "weight_version") == [2, 5, 8, 10]
    assert max(column(records, "mismatch/abs_gap_mean")) < 1e-4
    for slot in trainer.sampler.slots.values():
        # Codes of 2 bits in the words of 8, for whoever serves w8a16.
        assert slot.weight.tensors["weight_packed"].shape[-1] == slot.shape[-1] // 4
        assert set(slot.weight.codes().unique().tolist()) == {-2, -1, 0, 1}
    assert column(records, "refit/bytes") == [records[0]["refit/bytes"]] * STEPS


def test_a_learner_that_stayed_on_the_old_grid_would_show(tmp_path, monkeypatch):
    monkeypatch.setattr(TransformersPolicy, "execute", lambda *_: None)
    train(tmp_path, qarl=QARL)
    gaps = column(read_metrics(tmp_path), "mismatch/abs_gap_mean")
    assert gaps[0] < 1e-4 < 1e-2 < gaps[2]


def test_rollouts_alone_may_change_their_grid(tmp_path):
    train(tmp_path, qarl=QARL | {"alignment": "rollout_only"})
    gaps = column(read_metrics(tmp_path), "mismatch/abs_gap_mean")
    assert gaps[0] < gaps[1] < gaps[2]


@pytest.mark.parametrize("stopped_at", [1, 2, 3])
def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(run, stopped_at, tmp_path):
    checkpointing = {"save_period": 1}
    train(tmp_path, qarl=QARL, checkpointing=checkpointing, grpo={"max_num_steps": stopped_at})
    trainer = train(tmp_path, qarl=QARL, checkpointing=checkpointing)
    assert without_clocks(read_metrics(tmp_path)) == without_clocks(run[2])
    assert trainer.format.grid_bits == 2


def test_moments_are_kept_unless_a_stage_says_otherwise(run, tmp_path):
    kept = [STAGES[0], {"from_step": 3, "bits": 2}]
    trainer = train(tmp_path, qarl=QARL | {"schedule": kept})
    (state, *_), (own, *_) = (one.learner.policy.optimizer.optimizers[0].state.values() for one in (trainer, run[1]))
    # Four steps of two minibatches, of which the reset run forgot the first two steps'.
    assert (state["step"], own["step"]) == (8, 4)
    norms = [column(read_metrics(folder), "optim/grad_norm") for folder in (tmp_path, run[0])]
    assert norms[0][:2] == norms[1][:2]
    assert norms[0][3] != norms[1][3]


def test_a_run_is_evaluated_on_the_grid_of_its_last_step(run):
    model = find_model(run[0])
    assert (model.served.name, model.served.grid_bits) == ("w8a16", 2)
    written = model_record(model)
    assert (written["format"], written["grid_bits"]) == ("w8a16", 2)


def test_forgotten_moments_leave_a_new_optimizer(run):
    optimizer = run[1].learner.policy.optimizer
    before = [master.detach().clone() for master in optimizer.masters.values()]
    optimizer.reset_moments()
    gradients = [torch.randn(master.shape) for master in before]
    for parameter, gradient in zip(optimizer.parameters.values(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    fresh = [torch.nn.Parameter(master) for master in before]
    adamw = torch.optim.AdamW(fresh, lr=optimizer.lr, weight_decay=0.0, betas=(0.9, 0.95))
    scale = min(1.0, 1.0 / (float(torch.cat([one.flatten() for one in gradients]).norm()) + 1e-6))
    for parameter, gradient in zip(fresh, gradients, strict=True):
        parameter.grad = gradient * scale
    adamw.step()
    for master, expected in zip(optimizer.masters.values(), fresh, strict=True):
        # A step is one learning rate, 3e-4; moments of the steps before would turn it elsewhere.
        assert torch.allclose(master, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("name", "num_bits"), [("w4a16", 4), ("w8a16", 8)])
def test_stages_may_be_nested_in_one_grid(name, num_bits, tmp_path):
    stages = [{"from_step": 2, "bits": 2}]
    nested = {"format": name, "nested_in": "w8a16", "schedule": stages}
    trainer = train(tmp_path, qarl=QARL | nested, grpo={"max_num_steps": 2})
    records = read_metrics(tmp_path)
    assert column(records, "refit/grid_bits") == [num_bits, 2]
    assert max(column(records, "mismatch/abs_gap_mean")) < 1e-4
    assert min(column(records, "refit/flipped_codes")) > 0
    # They are counted on the grid that is served.
    assert trainer.flips._format == trainer.format
    for slot in trainer.sampler.slots.values():
        assert slot.weight.tensors["weight_packed"].shape[-1] == slot.shape[-1] * num_bits // 32
        assert set(slot.weight.codes().unique().tolist()) == {-2, -1, 0, 1}
    assert find_model(tmp_path).served.published_name == "w8a16"
