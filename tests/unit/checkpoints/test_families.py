"""Every supported family: what is written is what another loader reads, and the list of BF16 modules fits it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from qarl_kernels import get_format
from qarl_nemo.architecture import FAMILIES
from qarl_nemo.checkpoints import model_quantization_config, plan_quantization, quantize_checkpoint
from qarl_nemo.checkpoints.ignored import require_listed
from support.whole_models import DENSE, SPARSE, checkpoint_of, tensors_of

CONFIGS = {name: (SPARSE if family.experts else DENSE) | {"model_type": name} for name, family in FAMILIES.items()}
CONFIGS["llama-biases"] = CONFIGS["llama"] | {"attention_bias": True, "mlp_bias": True}
TARGETS = {
    name: ["experts", "attention"] if "num_experts" in config else ["mlp", "attention"]
    for name, config in CONFIGS.items()
}


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_with_the_same_bits(name, make_source, tmp_path, read_all, read_quantized):
    fmt, config = get_format("w4a16"), CONFIGS[name]
    torch.manual_seed(0)
    source = make_source({key: 0.05 * tensor for key, tensor in tensors_of(config).items()}, config)
    report = quantize_checkpoint(source, tmp_path / "out", fmt, TARGETS[name])
    model, loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(loaded.values())
    # Its first forward unpacks what compressed-tensors packed.
    assert model(torch.arange(8)[None]).logits.isfinite().all()
    stored, computed = read_all(tmp_path / "out"), model.state_dict()
    for row in report.rows:
        expected = read_quantized(stored, row["name"], fmt) if row["quantized"] else stored[row["name"]]
        assert torch.equal(in_transformers(computed, row["name"]), expected), row["name"]
    assert sum(row["quantized"] for row in report.rows) == (32 if "num_experts" in config else 14)


def in_transformers(weights, name):
    """transformers stacks the experts of a layer, gate above up."""
    block, found, rest = name.partition(".experts.")
    if not found:
        return weights[name]
    expert, part, _ = rest.split(".")
    if part == "down_proj":
        return weights[f"{block}.experts.down_proj"][int(expert)]
    gate, up = weights[f"{block}.experts.gate_up_proj"][int(expert)].chunk(2)
    return gate if part == "gate_proj" else up


FP8_SUFFIXES = {"fp8_block": ("weight", "weight_scale_inv"), "fp8_channel": ("weight", "weight_scale")}


def written(plan):
    """Names of the tensors that a plan's output has."""
    suffixes = FP8_SUFFIXES.get(plan.fmt.name, ("weight_packed", "weight_scale", "weight_shape"))
    for tensor in plan.tensors:
        module, _, suffix = tensor.info.name.rpartition(".")
        yield from (f"{module}.{name}" for name in (suffixes if tensor.quantized else (suffix,)))


def linears(plan):
    """Modules that multiply, by their shapes alone."""
    names = [tensor.info.name for tensor in plan.tensors if len(tensor.info.shape) == 2]
    return [name.removesuffix(".weight") for name in names if "embed_tokens" not in name]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("key", ["w4a16", "fp8_block", "fp8_channel"])
@pytest.mark.parametrize("targets", [["attention"], ["experts"], ["mlp"], ["experts", "attention"]], ids="+".join)
def test_the_list_fits_whatever_is_quantized(name, key, targets):
    config, fmt = CONFIGS[name] | {"mlp_only_layers": [1]}, get_format(key)
    targets = targets if "num_experts" in config else ["attention" if targets == ["attention"] else "mlp"]
    plan = plan_quantization(checkpoint_of(config), fmt, targets)
    quantization = model_quantization_config(fmt, [tensor.info.name for tensor in plan.tensors], targets)
    require_listed(quantization, written(plan), linears(plan))
    # Another target's list, and one that lost an entry, must not pass.
    other = "mlp" if "mlp" not in targets else "attention"
    wrong = model_quantization_config(fmt, [tensor.info.name for tensor in plan.tensors], [other])
    with pytest.raises(ValueError, match="modules that it calls"):
        require_listed(wrong, written(plan), linears(plan))
    kept = "modules_to_not_convert" if "modules_to_not_convert" in quantization else "ignore"
    shorter = quantization | {kept: [entry for entry in quantization[kept] if entry != "lm_head"]}
    with pytest.raises(ValueError, match="1 BF16 modules that it calls quantized: lm_head"):
        require_listed(shorter, written(plan), linears(plan))


def test_linears_that_no_pattern_knows_stop_the_output(monkeypatch, make_source, tmp_path):
    """What happened to Mixtral's and DeepSeek's: linears under other names stayed BF16 and were not listed."""
    monkeypatch.setattr(
        "qarl_nemo.checkpoints.hf_config.model_quantization_config",
        lambda *_: {"quant_method": "compressed-tensors", "ignore": ["lm_head"]},
    )
    with pytest.raises(ValueError, match=r"6 BF16 modules that it calls quantized: .*layers.{0..1}.mlp.down_proj"):
        quantize_checkpoint(make_source(tensors_of(DENSE), DENSE), tmp_path / "out", get_format("w4a16"), ["attention"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("entry", ["re:.*q_proj", "re:layers", "model.layers.0.self_attn.q_proj", "re:model.layers.0"])
def test_patterns_match_as_compressed_tensors_matches_them(entry):
    from compressed_tensors.utils.match import match_name

    module = "model.layers.0.self_attn.q_proj"
    quantization = {"quant_method": "compressed-tensors", "ignore": [entry]}
    if match_name(module, entry):
        require_listed(quantization, [f"{module}.weight"], [module])
    else:
        with pytest.raises(ValueError, match="calls quantized"):
            require_listed(quantization, [f"{module}.weight"], [module])


def test_the_record_is_json(make_source, tmp_path):
    quantize_checkpoint(make_source(tensors_of(DENSE), DENSE), tmp_path / "out", get_format("w4a16"), ["mlp"])
    assert json.loads((tmp_path / "out" / "qarl_quantization.json").read_text())["dropped"] == {}
