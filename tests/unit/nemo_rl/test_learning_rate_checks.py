"""Rates and decays of which Megatron's schedule would say nothing but `AssertionError` once workers have started."""

import pytest
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.checks.hints import find_hints
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
        ({}, {"start_weight_decay": -0.1, "end_weight_decay": -0.1},
         f"{SCHEDULER}.start_weight_decay=-0.1: weights would grow; set 0 or more"),
        ({}, {"lr_decay_iters": 0}, f"{SCHEDULER}.lr_decay_iters=0: a number of steps; set 1 or more, or null"),
        ({}, {"max_steps": 0, "lr_decay_iters": 9}, f"{SCHEDULER}.max_steps=0: a number of steps; set 1 or more"),
        ({}, {"lr_decay_iters": 13, "lr_warmup_iters": 13}, f"{SCHEDULER}.lr_warmup_iters=13: no less than {SCHEDULER}."
         "lr_decay_iters=13, so that Megatron-Bridge would shorten it with a warning alone; set less than 13"),
        ({"lr": 5e-6}, {"lr_decay_style": "WSD", "lr_decay_iters": 50, "lr_wsd_decay_iters": 51},
         f"{SCHEDULER}.lr_wsd_decay_iters=51: more than {SCHEDULER}.lr_decay_iters=50, so that annealing"),
        ({}, {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 13},
         f"{SCHEDULER}.lr_warmup_fraction=0.1: {SCHEDULER}.lr_warmup_iters=13 says it otherwise; set null, or"),
        ({}, {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
         f"{SCHEDULER}.override_opt_param_scheduler=true: {SCHEDULER}.use_checkpoint_opt_param_scheduler=true takes"),
    ],
)  # fmt: skip
def test_what_megatron_asserts_is_named(rates, schedule, line):
    (found,) = schedule_conflicts(run(rates, schedule))
    assert found.startswith(line)


def test_lengths_that_megatron_takes_are_taken():
    for schedule in (
        {"lr_decay_iters": 13, "lr_warmup_iters": 12},
        {"lr_decay_iters": None, "lr_warmup_iters": 13},
        {"lr_decay_style": "WSD", "lr_decay_iters": 50, "lr_wsd_decay_iters": 50},
        {"lr_decay_iters": 50, "lr_wsd_decay_iters": 51},
        {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 0},
        # Megatron-Bridge puts it in the other's place.
        {"max_steps": 100, "lr_decay_iters": 5, "lr_warmup_iters": 50},
        {"override_opt_param_scheduler": True},
    ):
        assert schedule_conflicts(run({}, schedule)) == []


def test_a_run_shorter_than_its_warm_up_gets_a_hint():
    def hints(steps, **schedule):
        return [line for line in find_hints(run({}, schedule) | {"grpo": {"max_num_steps": steps}}) if "warm" in line]

    (line,) = hints(13, lr_warmup_iters=13)
    assert line.startswith(
        f"{SCHEDULER}.lr_warmup_iters=13: the run ends at grpo.max_num_steps=13, and so does its warm"
    )
    assert line.endswith(f"set less than 13, or {SCHEDULER}.lr_decay_iters to more than 13")
    assert hints(14, lr_warmup_iters=13) == hints(10, lr_warmup_iters=0) == hints(10) == []
    assert hints(10, lr_warmup_iters=13, lr_decay_iters=1000) == []


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
