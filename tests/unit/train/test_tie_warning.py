"""A run says at its start if its weights lie half-way between codes of a grid that it will serve."""

import pytest
import torch

from qarl_nemo.config import validate
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.model import load_model
from qarl_nemo.train.setup import transformers_learner

STAGES = {"format": "w8a16", "schedule": [{"from_step": 3, "bits": 4}]}


def told(capsys, convention: str, *, on_a_grid: bool, **qarl) -> str:
    """What the start of a run printed, whose weights are steps of 1/16 of a group's largest."""
    config = {
        "run_dir": "runs/a",
        "device": "cpu",
        "policy": {"model_init": {}},
        "loss_fn": {"objective": "tbpo"},
        "qarl": {"group_size": 32, "scale_convention": convention, **qarl},
    }
    config = validate(config, LocalConfig, source="test")
    model, _ = load_model(config.policy, torch.device("cpu"), seed=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if on_a_grid and parameter.dim() > 1 and parameter.shape[-1] % 32 == 0:
                steps = torch.randint(-15, 16, parameter.unflatten(-1, (-1, 32)).shape, generator=generator)
                steps[..., 0] = -16
                parameter.copy_(steps.flatten(-2) * 2**-10)
    transformers_learner(config, model)
    return capsys.readouterr().out


@pytest.mark.parametrize("alignment", ["aligned", "rollout_only"])
@pytest.mark.parametrize("qarl", [{"format": "w4a16"}, STAGES], ids=["4 bits", "8, 4 bits"])
def test_a_run_warns_of_a_grid_that_its_weights_are_between(capsys, qarl, alignment):
    assert "half-way between two codes of 4 bits" in told(
        capsys, "clipped_range", on_a_grid=True, alignment=alignment, **qarl
    )


def test_other_grids_and_other_weights_are_not_warned_of(capsys):
    assert "half-way" not in told(capsys, "full_range", on_a_grid=True)
    assert "half-way" not in told(capsys, "clipped_range", on_a_grid=True, nested_in="w8a16")
    assert "half-way" not in told(capsys, "clipped_range", on_a_grid=False)
