"""The tables of vLLM's arguments against vLLM itself: none undecided, none unknown, and what an engine is made of."""

import dataclasses

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

from transformers import Qwen3MoeConfig  # noqa: E402
from vllm.config import AttentionConfig, CompilationConfig, KernelConfig, VllmConfig  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs  # noqa: E402

from qarl_nemo.config import QarlConfig  # noqa: E402
from qarl_nemo.nemo_rl.checks.engine import served_problems  # noqa: E402
from qarl_nemo.nemo_rl.checks.engine_rules import NESTED, NO_MATTER, RULES  # noqa: E402
from qarl_nemo.nemo_rl.engine_arguments import engine_arguments  # noqa: E402
from qarl_nemo.refit.engine_settings import kernel_options  # noqa: E402

BLOCKS = {"compilation_config": CompilationConfig, "attention_config": AttentionConfig, "kernel_config": KernelConfig}
# What NeMo-RL's worker takes out again, and what `vllm.LLM` takes itself.
OTHERS = {"compilation_config.use_inductor", "chat_template"}
QARL = QarlConfig()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a config.json, and no weights."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3MoeConfig(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, **sizes, **heads)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def test_every_argument_of_this_vllm_is_decided():
    fields = {field.name for kind in (EngineArgs, AsyncEngineArgs) for field in dataclasses.fields(kind)}
    decided = {name for name in RULES if "." not in name} | {name for names in NO_MATTER.values() for name in names}
    assert fields == (decided | {*BLOCKS, "hf_overrides"}) - OTHERS


def test_every_key_of_a_block_is_one_of_this_vllm():
    for block, kind in BLOCKS.items():
        rules = {name.partition(".")[2] for name in {*RULES} - OTHERS if name.startswith(f"{block}.")}
        assert rules | {*NESTED[block]} <= {field.name for field in dataclasses.fields(kind)}


def test_an_engine_of_our_arguments_has_the_settings(model):
    config = _config(model, QARL)
    assert served_problems(config, kernel_options(QARL.served_format, QARL.targets)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_cache_dtype", "fp8"), ("logprobs_mode", "raw_logprobs"), ("cpu_offload_gb", 1), ("enable_lora", True)],
)
def test_settings_that_slipped_in_are_seen_in_the_engine(model, name, value):
    config = _config(model, QARL, **{name: value})
    (line,) = served_problems(config, kernel_options(QARL.served_format, QARL.targets))
    assert line.startswith(f"VllmConfig.{RULES[name].served}=")


def test_a_compiler_that_slipped_in_is_seen_in_the_engine(model):
    # An eager engine drops the compiler by itself.
    slipped_in = {"compilation_config": {"mode": 3, "custom_ops": ["+quant_fp8"]}, "enforce_eager": False}
    config = _config(model, QARL, **slipped_in)
    problems = served_problems(config, kernel_options(QARL.served_format, QARL.targets))
    assert any("compilation_config.mode=vllm_compile" in line for line in problems)


def _config(model: str, qarl: QarlConfig, **slipped_in) -> VllmConfig:
    given = {"model": model, "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 64, "enforce_eager": True}
    arguments = engine_arguments(given | {"skip_tokenizer_init": True}, qarl) | slipped_in
    # It imports NeMo-RL.
    del arguments["worker_extension_cls"]
    return EngineArgs(**arguments).create_engine_config()
