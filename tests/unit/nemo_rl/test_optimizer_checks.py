"""Optimizers that Megatron or NeMo-RL would refuse once Ray has started are refused before."""

import pytest
from test_layout import on_a_host_without_gpus  # noqa: F401 a fixture for every test
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.checks.optimizer import optimizer_conflicts
from qarl_nemo.nemo_rl.config import apply_qarl

OFFLOADED = {"optimizer": "adam", "use_distributed_optimizer": True, "optimizer_cpu_offload": True,
             "optimizer_offload_fraction": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optimizer": "dist_muon"}, "optimizer_cpu_offload=true: optimizer=dist_muon does not go with it; set false"),
        ({"optimizer_offload_fraction": 0.0}, "optimizer_offload_fraction=0.0: optimizer_cpu_offload=true keeps that"),
        ({"use_distributed_optimizer": False}, "use_distributed_optimizer=false: optimizer_cpu_offload=true"),
    ],
)
def test_an_optimizer_on_the_host_is_one_that_nemo_rl_keeps_there(changes, line):
    where = "policy.megatron_cfg.optimizer"
    assert any(line in found for found in problems(config(**{where: OFFLOADED | changes})))
    apply_qarl(config(**{where: OFFLOADED}))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"optimizer": "adamm"},
            "optimizer=adamm: Megatron has no such optimizer; did you mean 'adam'? legal here: adam,",
        ),
        ({"optimizer": "Adam"}, "optimizer=Adam: Megatron has no such optimizer; did you mean 'adam'?"),
        (
            {"optimizer": None},
            "optimizer=null: Megatron has no such optimizer; legal here: adam, sgd, muon, dist_muon,",
        ),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "overlap_cpu_optimizer_d2h_h2d=true: optimizer_cpu_offload=false"),
    ],
)
def test_an_optimizer_is_one_that_megatron_has_with_settings_that_go_with_it(changes, line):
    where, adam = "policy.megatron_cfg.optimizer", {"optimizer": "adam", "use_distributed_optimizer": True}
    assert [found.startswith(f"{where}.{line}") for found in problems(config(**{where: adam | changes}))] == [True]
    apply_qarl(config(**{where: OFFLOADED | {"overlap_cpu_optimizer_d2h_h2d": True}}))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_parameters_that_every_rank_has_are_not_gathered(name):
    where, gather = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.distributed_data_parallel_config"
    whole = {where: {"optimizer": name, "use_distributed_optimizer": False}}
    for cluster in ({}, {"num_nodes": 1, "gpus_per_node": 8}):
        (line,) = [found for found in problems(config(**whole | {"cluster": cluster})) if "gather" in found]
        assert line.startswith(f"{where}.use_distributed_optimizer=false: every rank has all parameters, and {gather}")
        divided = {"adam": "; set true, or ", "sgd": "; set "}[name]
        assert line.endswith(f"{divided}{gather}.overlap_param_gather=false")
    assert optimizer_conflicts(config(**whole | {f"{gather}.overlap_param_gather": False}), ["experts"]) == []
    # A single rank has nobody to gather from; context parallel ranks have.
    one = whole | {"cluster": {"num_nodes": 1, "gpus_per_node": 2}}
    assert optimizer_conflicts(config(**one), ["mlp"]) == []
    shared = {"policy.megatron_cfg.tensor_model_parallel_size": 1, "policy.megatron_cfg.context_parallel_size": 2}
    assert len(optimizer_conflicts(config(**one | shared), ["mlp"])) == 1


def test_megatron_divides_sgds_momentum_in_the_hosts_memory_alone():
    where, sgd = "policy.megatron_cfg.optimizer", {"optimizer": "sgd", "use_distributed_optimizer": True}
    (line,) = problems(config(**{where: sgd}))
    assert line.startswith(f"{where}.use_distributed_optimizer=true: Megatron divides SGD's momentum only in")
    apply_qarl(config(**{where: OFFLOADED | {"optimizer": "sgd"}}))


# (tp, ep, etp) on 2 GPUs: 2 / (ep * etp) ranks have the same experts.
@pytest.mark.parametrize(("sizes", "gathered"), [((2, 1, 1), True), ((2, 2, 1), False), ((2, 1, 2), False)])
def test_ranks_that_share_attention_may_have_the_same_experts(sizes, gathered):
    where, gather = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.distributed_data_parallel_config"
    names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    layout = {f"policy.megatron_cfg.{name}": size for name, size in zip(names, sizes, strict=True)}
    adam = {where: {"optimizer": "adam", "use_distributed_optimizer": False}}
    values = config(**adam | layout | {"cluster": {"num_nodes": 1, "gpus_per_node": 2}})
    # A dense model's ranks share all of it.
    assert optimizer_conflicts(values, ["mlp"]) == []
    lines = optimizer_conflicts(values, ["experts"])
    assert [line.partition(":")[0] for line in lines] == [f"{where}.use_distributed_optimizer=false"] * gathered
    assert all(line.endswith(f"set true, or {gather}.overlap_param_gather=false") for line in lines)
    # Targets say that a model has experts, also where its config.json is not at hand.
    values["policy"]["model_name"] = "nowhere"
    assert not gathered or set(lines) <= set(problems(values))


@pytest.mark.parametrize("name", ["lion", "soap"])
def test_an_optimizer_that_megatron_does_not_divide_gets_whole_gradients(name):
    """Megatron makes all but Adam and SGD as it makes Muon: each rank steps with the gradients of all parameters."""
    where, gather = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.distributed_data_parallel_config"
    lines = problems(config(**{where: OFFLOADED | {"optimizer": name}}))
    keys = [f"{where}.use_distributed_optimizer", f"{where}.optimizer_cpu_offload", f"{gather}.overlap_param_gather"]
    assert lines == [f"{key}=true: optimizer={name} does not go with it; set false" for key in keys]
    whole = {where: {"optimizer": name, "use_distributed_optimizer": False}, f"{gather}.overlap_param_gather": False}
    apply_qarl(config(**whole))
