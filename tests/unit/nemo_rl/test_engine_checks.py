"""What vLLM is given is decided, argument by argument, wherever it was said; a running engine's settings once more."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qarl_formats import get_format
from qarl_nemo.names import TARGETS
from qarl_nemo.nemo_rl.checks.engine import (
    argument_problems,
    environment_problems,
    given_arguments,
    repeated_arguments,
    served_problems,
)
from qarl_nemo.nemo_rl.checks.engine_rules import ENVIRONMENT_RULES, NO_MATTER, RULES, rules_table
from qarl_nemo.refit.engine_settings import COMPILATION, ENVIRONMENT, kernel_choices

DOCS = Path(__file__).parents[3] / "docs" / "design" / "vllm_settings.md"
# No rule has it among its legal values.
WRONG = "something_else"
KERNELS = {"moe_backend": ("marlin",)}
SERVED = {"moe_backend": "marlin"}


def said(name, value):
    """An argument, in its block where the name has one."""
    block, _, key = name.rpartition(".")
    return {block: {key: value}} if block else {name: value}


def test_the_docs_have_the_table_of_the_code():
    assert rules_table() in DOCS.read_text(), "paste what `python -m qarl_nemo.nemo_rl.checks.engine_rules` prints"


def test_an_argument_is_decided_once():
    names = [*RULES, *(name for names in NO_MATTER.values() for name in names)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", RULES)
def test_each_rule_holds_for_a_mapping_and_for_json(name):
    arguments = said(name, WRONG)
    blocks = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in arguments.items()}
    for given in (arguments, blocks):
        (line,) = argument_problems(given, KERNELS)
        assert line.startswith(f"policy.generation.vllm_kwargs.{name}={WRONG}: {RULES[name].why}; ")
    for legal in (None, *RULES[name].legal):
        assert argument_problems(said(name, legal), KERNELS) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"compilation_config": 3}, "compilation_config.mode=3"),
        ({"compilation_config": {"mode": "VLLM_COMPILE"}}, "compilation_config.mode=vllm_compile"),
        ({"compilation_config": {"pass_config": {"fuse_norm_quant": True}}}, "pass_config.fuse_norm_quant"),
        ({"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}, "custom_ops=['-rotary_embedding']"),
        ({"compilation_config": {"level": 3}}, "compilation_config.level=3"),
        ({"compilation_config": "O3"}, "not a mapping"),
        ({"kernel_config": {"moe_backend": "triton"}}, "kernel_config.moe_backend=triton"),
        (
            {"moe_backend": "triton"},
            "moe_backend=triton: the learner follows another kernel for this format; set marlin",
        ),
        ({"cpu_offload_gb": 1.5}, "cpu_offload_gb=1.5"),
        ({"enable_lora": 1}, "enable_lora=1"),
        ({"kv_cache_dtyp": "fp8"}, "did you mean kv_cache_dtype?"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config="),
    ],
)
def test_settings_that_break_alignment_are_refused(arguments, named):
    (line,) = argument_problems(arguments, KERNELS)
    assert named in line


# Which kernel vLLM takes with `auto`, and which others multiply the same, was read in its 0.25.1.
DENSE_KERNELS = {
    "w4a16": {"machete", "marlin"},
    "w3a16": {"machete", "marlin"},
    "w8a16": {"machete", "marlin"},
    "w4a8": {"cutlass"},
    "fp8_channel": {"cutlass"},
    "fp8_block": {"cutlass"},
    "int8": {"cutlass"},
    "nvfp4": {"marlin"},
}
OTHERS = ("garbage", "exllama", "triton", "torch", "humming", "conch", "cutlass", "marlin", "machete", "deep_gemm")


@pytest.mark.parametrize("name", DENSE_KERNELS)
def test_attention_runs_on_kernels_that_the_learner_follows(name):
    kernels, legal = kernel_choices(get_format(name), ("experts", "attention")), DENSE_KERNELS[name]
    for word in ("auto", *legal):
        assert argument_problems({"linear_backend": word}, kernels) == []
        assert argument_problems({"kernel_config": {"linear_backend": word.upper()}}, kernels) == []
    for word in set(OTHERS) - legal:
        (line,) = argument_problems({"linear_backend": word}, kernels)
        assert f"linear_backend={word}: the learner follows another kernel for this format; set " in line
        assert all(each in line.rpartition("set ")[2] for each in legal)


def test_without_quantized_attention_no_kernel_of_dense_layers_matters():
    assert argument_problems({"linear_backend": "triton"}, kernel_choices(get_format("w4a16"), ("experts",))) == []
    assert argument_problems({"linear_backend": "triton"}, kernel_choices(get_format("bf16"), TARGETS)) == []
    experts = kernel_choices(get_format("fp8_channel"), ("experts",))
    assert argument_problems({"moe_backend": "triton"}, experts) == []
    (line,) = argument_problems({"moe_backend": "deep_gemm"}, experts)
    assert line.endswith("set auto or cutlass or triton")


def test_settings_that_do_not_are_left_alone():
    compilation = {"mode": 0, "custom_ops": ["+rms_norm"], "pass_config": {"fuse_norm_quant": False}}
    compilation |= {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2], "use_inductor": False}
    arguments = {"compilation_config": compilation, "cpu_offload_gb": 0.0, "max_num_seqs": 64, "max_loras": 1}
    arguments |= {"moe_backend": "auto", "attention_backend": "FLASH_ATTN", "hf_overrides": {"rope_theta": 1e6}}
    assert argument_problems(arguments, KERNELS) == []


def test_what_nemo_rl_passes_on_is_found_where_it_was_said():
    generation = {
        "vllm_cfg": {"precision": "fp8", "logprobs_mode": "raw_logprobs", "pipeline_parallel_size": 2},
        # NeMo-RL's own key wins over this one, so that only that one is wrong.
        "vllm_kwargs": {"logprobs_mode": "processed_logprobs", "kv_cache_dtype": "fp8"},
    }
    lines = argument_problems(given_arguments(generation)[0], KERNELS, given_arguments(generation)[1])
    assert sorted(line.partition(":")[0] for line in lines) == [
        "policy.generation.vllm_cfg.logprobs_mode=raw_logprobs",
        "policy.generation.vllm_cfg.pipeline_parallel_size=2",
        "policy.generation.vllm_cfg.precision=fp8",
        "policy.generation.vllm_kwargs.kv_cache_dtype=fp8",
    ]


def test_speculation_that_nemo_rl_switches_off_is_none():
    arguments, _ = given_arguments({"vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 0}}})
    assert argument_problems(arguments, KERNELS) == []


def test_an_argument_that_nemo_rl_gives_itself_is_not_said_twice():
    (line,) = repeated_arguments({"vllm_kwargs": {"enforce_eager": True, "max_num_seqs": 8}})
    assert "vllm_cfg.enforce_eager" in line


def test_the_environment_is_held_against_the_rules():
    wrong = dict.fromkeys(ENVIRONMENT_RULES, "1") | {"VLLM_USE_DEEP_GEMM": "1"}
    found = [line.partition("=")[0] for line in environment_problems(wrong, "")]
    assert found == list(ENVIRONMENT_RULES)
    assert environment_problems(ENVIRONMENT, "", forced=True) == []
    (line,) = environment_problems({"VLLM_USE_DEEP_GEMM": "1"}, "vllm_cfg.env_vars.", forced=True)
    assert line.startswith("vllm_cfg.env_vars.VLLM_USE_DEEP_GEMM=1")


def settings_of_an_engine(**changes):
    """The settings that rules look at, each at its first legal value, as nested records; dotted changes."""
    values = {rule.served: next(iter(rule.legal), None) for rule in RULES.values() if rule.served}
    values |= {"kernel_config.moe_backend": "marlin", "compilation_config.custom_ops": ["+quant_fp8", "all"]}
    root = SimpleNamespace()
    for dotted, value in (values | changes).items():
        *parents, last = dotted.split(".")
        block = root
        for parent in parents:
            if not hasattr(block, parent):
                setattr(block, parent, SimpleNamespace())
            block = getattr(block, parent)
        setattr(block, last, value)
    return root


@pytest.mark.parametrize("served", [rule.served for rule in RULES.values() if rule.served])
def test_a_running_engines_settings_are_checked_again(served):
    assert served_problems(settings_of_an_engine(), SERVED) == []
    (line,) = served_problems(settings_of_an_engine(**{served: WRONG}), SERVED)
    assert line.startswith(f"VllmConfig.{served}={WRONG}")


def test_a_running_engines_kernels_and_operators_are_checked_again():
    (line,) = served_problems(settings_of_an_engine(**{"kernel_config.moe_backend": "triton"}), SERVED)
    assert "needed: marlin" in line
    wrong = {"compilation_config.custom_ops": ["none"]}
    assert len(served_problems(settings_of_an_engine(**wrong), SERVED)) == 1 + len(COMPILATION["custom_ops"])
