"""Rewards: a reward model's GPUs are not the learner's, and what is made of rewards can be computed."""

import pytest
from test_layout import launch, on_a_host_without_gpus  # noqa: F401 a fixture for every test
from test_nemo_rl_config import problems

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
