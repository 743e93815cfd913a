"""Rates and decays of which Megatron's schedule would say nothing but `AssertionError` once workers have started."""

import pytest
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.checks.learning_rate import schedule_conflicts

OPTIMIZER, SCHEDULER = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
RATES = {"optimizer": "adam", "use_distributed_optimizer": True, "lr": 1e-6, "min_lr": 1e-6}
SCHEDULE = {"lr_warmup_init": 1e-6, "lr_decay_style": "constant", "start_weight_decay": 0.01, "end_weight_decay": 0.01,
            "weight_decay_incr_style": "constant"}  # fmt: skip


def run(rates=None, schedule=None):
    return config(**{OPTIMIZER: RATES | (rates or {}), SCHEDULER: SCHEDULE | (schedule or {})})


def test_what_the_recipes_say_is_legal():
    assert schedule_conflicts(run()) == []
    assert schedule_conflicts(config()) == []
    assert schedule_conflicts(run({"lr": 5e-6}, {"lr_decay_style": "WSD"})) == []


def test_a_smaller_rate_alone_is_refused_with_both_that_are_larger():
    lines = problems(run({"lr": 5e-7}))
    assert lines == [
        f"{key}=1e-06: more than {OPTIMIZER}.lr=5e-07, the largest rate, which Megatron refuses once workers have "
        "started; set at most 5e-07"
        for key in (f"{OPTIMIZER}.min_lr", f"{SCHEDULER}.lr_warmup_init")
    ]
    assert schedule_conflicts(run({"lr": 5e-7, "min_lr": 5e-7}, {"lr_warmup_init": 0})) == []


@pytest.mark.parametrize(
    ("rates", "schedule", "line"),
    [
        ({"min_lr": None}, {}, f"{OPTIMIZER}.min_lr=null: Megatron's schedules need a rate; set 0 or more"),
        ({"min_lr": -1.0}, {}, f"{OPTIMIZER}.min_lr=-1.0: Megatron's schedules need a rate"),
        ({}, {"lr_decay_style": "inverse_square_root"}, f"{SCHEDULER}.lr_decay_style=inverse_square_root: Megatron has "
         "no such style; did you mean 'inverse-square-root'?"),
        ({}, {"weight_decay_incr_style": "exp"}, f"{SCHEDULER}.weight_decay_incr_style=exp: Megatron has no such"),
        ({}, {"end_weight_decay": 0.1}, f"{SCHEDULER}.end_weight_decay=0.1: {SCHEDULER}.weight_decay_incr_style="),
        ({}, {"end_weight_decay": 0.0, "weight_decay_incr_style": "linear"},
         f"{SCHEDULER}.end_weight_decay=0.0: Megatron's weight decay only grows"),
    ],
)  # fmt: skip
def test_what_megatron_asserts_is_named(rates, schedule, line):
    (found,) = schedule_conflicts(run(rates, schedule))
    assert found.startswith(line)


def test_the_styles_are_those_of_megatron():
    """Each steps through Megatron's own schedule, and one that is refused does not."""
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")

    class Optimizer:
        param_groups = ({"lr": 0.0, "weight_decay": 0.0},)

    def train(style):
        schedule = module.OptimizerParamScheduler(
            Optimizer(), 0.0, 1e-6, 0.0, 2, 8, style, 0.01, 0.01, 8, "constant",
            use_checkpoint_opt_param_scheduler=False, wsd_decay_steps=8, lr_wsd_decay_style="exponential",
        )  # fmt: skip
        for _ in range(10):
            schedule.step(1)

    for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD"):
        assert schedule_conflicts(run({}, {"lr_decay_style": style})) == []
        train(style)
    with pytest.raises(Exception, match="decay style is not supported"):
        train("exponential")
    assert len(schedule_conflicts(run({}, {"lr_decay_style": "exponential"}))) == 1
