"""A learner whose optimizer's package is missing is refused before Ray starts, where it would start here."""

import pytest
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.checks import muon
from qarl_nemo.nemo_rl.checks.muon import muon_conflicts, muon_hints
from qarl_nemo.nemo_rl.config import apply_qarl

OPTIMIZER = "policy.megatron_cfg.optimizer"
MUON = config(
    **{
        OPTIMIZER: {"optimizer": "dist_muon", "use_distributed_optimizer": False},
        "policy.megatron_cfg.distributed_data_parallel_config": {"overlap_param_gather": False},
    }
)
ONE_ENVIRONMENT = "NEMO_RL_PY_EXECUTABLES_SYSTEM"


@pytest.fixture
def machine(monkeypatch):
    """Sets what a machine has: its first GPU's GiB, the package's version, and NeMo-RL's one environment."""

    def set_up(gpu, package, one_environment):
        monkeypatch.setattr(muon, "first_gpu_gib", lambda: gpu)
        monkeypatch.setattr(muon, "installed_version", lambda _: package)
        monkeypatch.setenv(ONE_ENVIRONMENT, one_environment)

    return set_up


def test_muon_without_its_package_is_refused_where_workers_would_start(machine):
    machine(79.0, None, "1")
    (line,) = problems(MUON)
    assert line.startswith(f"{OPTIMIZER}.optimizer=dist_muon: Megatron's Muon needs the package emerging-optimizers")
    assert "pip install emerging-optimizers==0.3.0, or set" in line
    assert f"{OPTIMIZER}.optimizer=adam" in line
    assert muon_hints(MUON) == []


@pytest.mark.parametrize(
    ("gpu", "package", "one_environment"), [(79.0, "0.3.0", "1"), (79.0, None, "0"), (None, None, "1")]
)
def test_it_is_not_where_the_package_is_or_may_be_elsewhere(machine, gpu, package, one_environment):
    machine(gpu, package, one_environment)
    apply_qarl(MUON)


@pytest.mark.parametrize("name", ["lion", "soap"])
def test_lion_and_soap_come_from_the_same_package(machine, name):
    machine(79.0, None, "1")
    (line,) = muon_conflicts(config(**{f"{OPTIMIZER}.optimizer": name}))
    assert line.startswith(f"{OPTIMIZER}.optimizer={name}: Megatron's {name} needs the package emerging-optimizers")


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_other_optimizers_need_no_package(machine, name):
    machine(79.0, None, "1")
    assert muon_conflicts(config(**{f"{OPTIMIZER}.optimizer": name})) == []
    assert muon_conflicts(config()) == []
    machine(None, None, "1")
    assert muon_hints(config()) == []


def test_a_machine_without_gpus_only_gets_a_hint(machine):
    machine(None, None, "1")
    (line,) = muon_hints(MUON)
    assert "needs the package emerging-optimizers where the run starts, which this Python lacks; pip install" in line
    machine(None, "0.3.0", "1")
    assert muon_hints(MUON) == []
    # Workers have environments of their own.
    machine(None, None, "0")
    assert muon_hints(MUON) == []
