"""NeMo-RL's arguments of `vllm.LLM` become those of an engine that serves the `qarl:` block, or one error."""

import json

import pytest

from qarl_nemo.config import QarlConfig
from qarl_nemo.nemo_rl.engine_arguments import engine_arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a config.json, and no weights."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 32, "head_dim": 16}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    config = {"model_type": "qwen3_moe", "num_experts_per_tok": 2} | sizes | counts
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def qarl(name, **options):
    return QarlConfig(format=name, alignment="none" if name == "bf16" else "aligned", **options)


def nemo_rl(model, **options):
    given = {"model": model, "load_format": "dummy", "enforce_eager": True, "hf_overrides": {"rope_theta": 1e6}}
    return given | {"worker_extension_cls": "nemo_rl's", "enable_sleep_mode": True} | options


@pytest.mark.parametrize(
    ("name", "method", "backend"),
    [
        ("w4a16", "compressed-tensors", "marlin"),
        ("w4a8", "compressed-tensors", None),
        ("fp8_channel", "compressed-tensors", None),
        ("int8", "compressed-tensors", "triton"),
        ("nvfp4", "compressed-tensors", "marlin"),
        ("fp8_block", "fp8", "triton"),
        ("bf16", None, "triton"),
    ],
)
def test_the_engine_serves_the_block(model, name, method, backend):
    given = nemo_rl(model)
    made = engine_arguments(given, qarl(name))
    assert given == nemo_rl(model)
    assert made["hf_overrides"].get("quantization_config", {}).get("quant_method") == method
    assert made["hf_overrides"]["rope_theta"] == 1e6
    assert made.get("moe_backend") == backend
    assert made["worker_extension_cls"] == "qarl_nemo.nemo_rl.vllm_extension.QarlWorkerExtension"
    assert made["compilation_config"] == {"mode": 0, "custom_ops": ["+quant_fp8"]}
    assert made["logprobs_mode"] == "processed_logprobs"
    assert made["load_format"] == "dummy"
    assert made["enable_sleep_mode"]


def test_routers_and_what_is_no_target_stay_bf16(model):
    experts = engine_arguments(nemo_rl(model), qarl("fp8_block"))["hf_overrides"]["quantization_config"]
    assert {"model.layers.1.mlp.gate", "model.layers.1.self_attn.o_proj"} <= set(experts["modules_to_not_convert"])
    both = engine_arguments(nemo_rl(model), qarl("fp8_block", targets=["experts", "attention"]))
    assert both["hf_overrides"]["quantization_config"]["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    ]
    assert both["linear_backend"] == "cutlass"


def test_own_compilation_settings_are_kept_but_for_the_learners_operators(model):
    own = {"use_inductor": False, "custom_ops": ["+rms_norm"], "cudagraph_capture_sizes": [8]}
    made = engine_arguments(nemo_rl(model, enforce_eager=False, compilation_config=own), qarl("w4a8"))
    assert made["compilation_config"] == {
        "mode": 0,
        "custom_ops": ["+quant_fp8", "+rms_norm"],
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [8],
    }


def test_settings_that_would_serve_something_else_are_listed_together(model):
    given = nemo_rl(model, moe_backend="triton", quantization="fp8", hf_overrides={"quantization_config": {"a": 1}})
    with pytest.raises(ValueError, match="does not serve the `qarl:` block") as refused:
        engine_arguments(given, qarl("w4a16"))
    text = str(refused.value)
    assert all(part in text for part in ("moe_backend=triton", "marlin", "quantization=fp8", "hf_overrides."))
    assert engine_arguments(nemo_rl(model, moe_backend="auto"), qarl("w4a16"))["moe_backend"] == "marlin"


def test_blocks_may_be_json_as_on_a_command_line(model):
    given = nemo_rl(
        model, compilation_config='{"cudagraph_capture_sizes": [8]}', kernel_config='{"moe_backend": "auto"}'
    )
    made = engine_arguments(given, qarl("w4a16"))
    assert made["compilation_config"]["cudagraph_capture_sizes"] == [8]
    assert made["kernel_config"] == {"moe_backend": "auto"}
    with pytest.raises(ValueError, match=r"compilation_config\.mode=3"):
        engine_arguments(nemo_rl(model, compilation_config='{"mode": 3}'), qarl("w4a16"))
