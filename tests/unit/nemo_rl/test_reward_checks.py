"""Rewards: a reward model's GPUs are not the learner's, and what is made of rewards can be computed."""

import pytest
from test_layout import launch, on_a_host_without_gpus  # noqa: F401 a fixture for every test
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.launch_summary import launch_summary
from qarl_nemo.nemo_rl.layout import read_layout

RESOURCES = "env.reward_model.resources"
COLOCATED = "policy.generation.colocated"


def rewarded(cluster, resources, **changes) -> dict:
    """A run of so many nodes and GPUs on each, with a reward model on so many; the default's environment, too."""
    nodes, gpus = ({"num_nodes": nodes, "gpus_per_node": gpus} for nodes, gpus in (cluster, resources))
    data = {"train": {"dataset_name": "AIME2024"}, "default": {"env_name": "reward_model"}}
    said = {"cluster": nodes, "data": data, "env": {"reward_model": {"resources": gpus}}, "grpo.val_period": 0}
    return launch(**said | {"policy.megatron_cfg.expert_model_parallel_size": 1} | changes)


def apart(nodes, gpus) -> dict:
    return {COLOCATED: {"enabled": False, "resources": {"num_nodes": nodes, "gpus_per_node": gpus}}}


@pytest.mark.parametrize(
    ("cluster", "resources", "changes", "left"),
    [
        ((1, 8), (1, 4), {}, (4, 4)),
        ((1, 8), (1, 2), apart(None, 4), (2, 4)),
        # Whole nodes of several, however few of their GPUs are used; of two, one is left, which the others share.
        ((3, 8), (1, 2), {}, (16, 16)),
        ((4, 8), (1, 8), apart(1, 8), (16, 8)),
        ((2, 8), (1, 2), apart(None, 4), (4, 4)),
    ],
)
def test_a_reward_models_gpus_are_neither_the_learners_nor_the_engines(cluster, resources, changes, left):
    values = rewarded(cluster, resources, **changes)
    layout = read_layout(values)
    assert (layout.learner_gpus, layout.engine_gpus) == left
    # It is not started where no data set names it, or a function rewards.
    for data in ({}, {"default": {"env_name": "reward_model", "reward_function": "a:b"}}):
        whole = read_layout(values | {"data": data})
        assert whole.learner_gpus + (0 if whole.colocated else whole.engine_gpus) == cluster[0] * cluster[1]


def test_a_layout_is_checked_for_the_gpus_that_are_left():
    tp = {"policy.megatron_cfg.tensor_model_parallel_size": 4, "policy.logprob_batch_size": 1}
    found = problems(rewarded((1, 8), (1, 2), **tp))
    assert any("their product 4 does not divide the learner's 6 GPUs (cluster.num_nodes=1, cluster.gpus_per_node=8, a "
               "reward model apart)" in line for line in found), found  # fmt: skip
    (line,) = problems(rewarded((1, 8), (1, 2), **apart(None, 6)))
    assert line.startswith(
        f"{COLOCATED}.resources.gpus_per_node=6: learner and engines share 6 GPUs (cluster.num_nodes="
    )
    values = rewarded((1, 8), (1, 4), qarl={"format": "w4a16", "gpu_memory_gib": 1000.0})
    text = launch_summary(values, apply_qarl(values), ["run"], None)
    assert "4 (1 node(s) of 4), shared by learner and engines, beside a reward model's" in text


@pytest.mark.parametrize(
    ("cluster", "resources", "line"),
    [
        ((1, 8), (1, 8), f"{RESOURCES}.gpus_per_node=8: a reward model has GPUs of its own, and learner"),
        ((1, 8), (2, 1), f"{RESOURCES}.num_nodes=2: a reward model has GPUs of its own"),
        ((2, 8), (2, 8), f"{RESOURCES}.num_nodes=2: a reward model has GPUs of its own"),
        ((2, 8), (1, 9), f"{RESOURCES}.gpus_per_node=9: a reward model has GPUs of its own"),
        ((1, 8), (1, None), f"{RESOURCES}.gpus_per_node=null: a reward model has GPUs of its own"),
    ],
)
def test_a_reward_model_leaves_learner_and_engines_some_gpus(cluster, resources, line):
    found = [one for one in problems(rewarded(cluster, resources)) if RESOURCES in one]
    assert [one.startswith(line) for one in found] == [True]


SCALING = {"enabled": True, "source_min": -1.0, "source_max": 1.0, "target_min": 0.0, "target_max": 1.0}
SHAPING = {"enabled": True, "overlong_buffer_length": 128, "overlong_buffer_penalty": 1, "max_response_length": 4096,
           "stop_properly_penalty_coef": None}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"advantage_clip_low": 1.0, "advantage_clip_high": -1.0},
         "grpo.advantage_clip_low=1.0: grpo.advantage_clip_high=-1.0 is not more, so that every advantage would be -1.0"
         "; set less than -1.0, or null"),
        ({"advantage_clip_low": 0.0, "advantage_clip_high": 0.0}, "grpo.advantage_clip_low=0.0: grpo.advantage_clip_h"),
        ({"reward_scaling": SCALING | {"source_min": 1.0}},
         "grpo.reward_scaling.source_min=1.0: grpo.reward_scaling.source_max=1.0 is not more, and NeMo-RL divides"),
        ({"reward_scaling": SCALING | {"source_min": None}},
         "grpo.reward_scaling.source_min=null: grpo.reward_scaling.source_max=1.0 is not more"),
        ({"reward_scaling": {"enabled": True, "source_min": 2.0}}, "grpo.reward_scaling.source_min=2.0: grpo.reward"),
        ({"reward_shaping": SHAPING | {"max_response_length": None}},
         "grpo.reward_shaping.max_response_length=null: grpo.reward_shaping.enabled=true needs it where stop_prop"),
        ({"reward_shaping": SHAPING | {"overlong_buffer_length": 0}},
         "grpo.reward_shaping.overlong_buffer_length=0: grpo.reward_shaping.enabled=true needs it"),
        ({"reward_shaping": SHAPING | {"overlong_buffer_penalty": -1}},
         "grpo.reward_shaping.overlong_buffer_penalty=-1: grpo.reward_shaping.enabled=true needs it"),
        ({"reward_shaping": SHAPING | {"stop_properly_penalty_coef": 2}},
         "grpo.reward_shaping.stop_properly_penalty_coef=2: the part of a cut off answer's reward that stays; set 0"),
    ],
)  # fmt: skip
def test_bounds_and_lengths_that_rewards_cannot_be_computed_with_are_refused(changes, line):
    (found,) = problems(config(**{f"grpo.{key}": value for key, value in changes.items()}))
    assert found.startswith(line)


def test_bounds_and_lengths_of_rewards_that_nemo_rl_takes_are_taken():
    for changes in (
        {"advantage_clip_low": -1.0, "advantage_clip_high": 1.0},
        {"advantage_clip_low": 1.0, "advantage_clip_high": None},
        {"reward_scaling": SCALING},
        {"reward_scaling": {"enabled": True}},
        {"reward_scaling": SCALING | {"enabled": False, "source_min": 1.0}},
        {"reward_shaping": SHAPING},
        {"reward_shaping": SHAPING | {"enabled": False, "max_response_length": None}},
        {"reward_shaping": {"enabled": True, "stop_properly_penalty_coef": 0}},
    ):
        apply_qarl(config(**{f"grpo.{key}": value for key, value in changes.items()}))
