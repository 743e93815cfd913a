"""A refit is all or nothing: whatever is wrong is listed, and the old version keeps serving bit for bit."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qarl_kernels import get_format
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import RefitUpdate
from support.asserts import assert_bitwise_equal
from support.engines import W4A16_G32, gaps, make_engine, make_sampler, sample, tiny_model
from support.interruptions import FailsAt

EXPERTS = "model.layers.0.mlp.experts"
PACKED = f"{EXPERTS}.gate_up_proj.weight_packed"
SCALE = f"{EXPERTS}.down_proj.weight_scale"
NORM = "model.norm.weight"


@pytest.fixture
def engine():
    return make_engine()


def described(tensors, *, version=5, fmt="w4a16") -> RefitUpdate:
    """An update whose manifest agrees with its tensors: only the engine can refuse it."""
    return RefitUpdate(Manifest.of([tensors], version=version, fmt=fmt), [tensors])


def flip_one_bit(tensor: torch.Tensor) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[-1] ^= 1
    return flipped


def step_weights(engine):
    """Change every parameter, as an optimizer step would."""
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.1)
    engine.report.changes.bump()


def assert_refused(engine, update, *expected):
    before = sample(engine)
    with pytest.raises(ValueError, match=r"refused, version 0 keeps serving") as raised:
        engine.sampler.load(update)
    lines = str(raised.value).splitlines()[1:]
    assert f"{len(lines)} problem(s)" in str(raised.value)
    for text in expected:
        assert any(text in line for line in lines), f"{text!r} not in:\n{raised.value}"
    assert engine.sampler.version == 0
    after = sample(engine)
    assert after.weight_version == 0
    assert_bitwise_equal(after.input_ids, before.input_ids)
    assert_bitwise_equal(after.generation_logprobs, before.generation_logprobs)


def test_a_whole_update_is_served(engine):
    before = sample(engine)
    step_weights(engine)
    engine.refit()
    assert engine.sampler.version == 1
    assert not torch.equal(sample(engine).generation_logprobs, before.generation_logprobs)


def test_every_problem_of_an_update_is_listed_at_once(engine):
    step_weights(engine)
    update = engine.publish()
    values = update.tensors
    broken = {name: tensor for name, tensor in values.items() if name != NORM} | {
        "model.layers.9.extra.weight": torch.zeros(2),
        PACKED: flip_one_bit(values[PACKED]),
        SCALE: values[SCALE].float(),
        "lm_head.weight": values["lm_head.weight"][:-1],
    }
    assert_refused(
        engine,
        RefitUpdate(update.manifest, [broken]),
        f"missing: {NORM}",
        "not in the manifest: model.layers.9.extra.weight",
        f"{PACKED}: its bytes differ from the manifest's checksum",
        f"{SCALE}: got float32 [4, 128, 4], the manifest says bfloat16 [4, 128, 4]",
        "lm_head.weight: got float32 [18, 128], the manifest says float32 [19, 128]",
    )


@pytest.mark.parametrize("name", [PACKED, SCALE, NORM, "model.layers.1.mlp.gate.weight"])
def test_one_flipped_bit_is_enough(engine, name):
    step_weights(engine)
    update = engine.publish()
    broken = RefitUpdate(update.manifest, [update.tensors | {name: flip_one_bit(update.tensors[name])}])
    assert_refused(engine, broken, f"{name}: its bytes differ")


def test_an_update_that_agrees_with_its_manifest_but_not_with_the_engine(engine):
    step_weights(engine)
    tensors = dict(engine.publish().tensors)
    del tensors[NORM]
    tensors["surprise"] = torch.zeros(1)
    tensors[SCALE] = tensors[SCALE].half()
    tensors[PACKED] = tensors[PACKED][:3].contiguous()
    assert_refused(
        engine,
        described(tensors),
        f"the update lacks {NORM}, which this engine needs",
        "this engine has no place for surprise",
        f"{SCALE} is float16 [4, 128, 4], this engine holds bfloat16 [4, 128, 4]",
        f"{PACKED} is int32 [3, 256, 16], this engine holds int32 [4, 256, 16]",
    )


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "int8", "nvfp4", "bf16", "w8a16"])
def test_another_format_is_refused(engine, name):
    step_weights(engine)
    other = engine.publish(get_format(name))
    assert_refused(engine, other, f"the update is in format {name}, this engine serves w4a16", PACKED)


def test_a_rehearsed_update_is_refused(engine):
    session, update = engine.sampler._session, engine.publish()
    assert session.refusals(update.manifest, rehearsed=False) == []
    (problem,) = session.refusals(update.manifest, rehearsed=True)
    assert "send an update that is not rehearsed" in problem


def test_another_group_size_is_refused(engine):
    step_weights(engine)
    other = engine.publish(get_format("w4a16", group_size=128))
    assert_refused(engine, other, f"{SCALE} is bfloat16 [4, 128, 1], this engine holds bfloat16 [4, 128, 4]")


@pytest.mark.parametrize("name", ["w4a8", "w3a16"])
def test_formats_that_share_w4a16s_layout_are_told_apart_by_name(name):
    engine = make_engine(get_format("w4a16"))
    update = engine.publish(get_format(name))
    assert_refused(engine, update, f"the update is in format {name}, this engine serves w4a16")


def test_a_refusal_before_the_first_refit_says_that_nothing_is_served(engine):
    fresh = make_sampler(engine.model, W4A16_G32)
    update = engine.publish()
    tensors = {name: tensor for name, tensor in update.tensors.items() if name != NORM}
    with pytest.raises(ValueError, match="refused, nothing keeps serving"):
        fresh.load(RefitUpdate(update.manifest, [tensors]))
    assert fresh.version is None


def test_published_tensors_dequantize_to_what_the_learners_forward_multiplies(fmt):
    engine = make_engine(fmt)
    step_weights(engine)
    engine.refit()
    for name, slot in engine.sampler.slots.items():
        forward = engine.report.weights[name].operand()
        assert_bitwise_equal(slot.operand().values, forward.values)
        if forward.scale is not None:
            assert_bitwise_equal(slot.operand().scale, forward.scale)


def test_biases_of_packed_layers_are_refitted_too():
    config = tiny_model().config
    config.attention_bias = True
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.normal_(parameter)
    engine = make_engine(targets=("experts", "attention"), model=model)
    for name, parameter in engine.sampler.model.named_parameters():
        assert_bitwise_equal(parameter.detach(), model.get_parameter(name).detach())
    assert "model.layers.0.self_attn.q_proj.bias" in dict(engine.sampler.model.named_parameters())
    assert gaps(engine, sample(engine)).max() < 1e-4


def test_an_update_that_breaks_off_at_any_operation_leaves_the_old_version_whole(engine):
    step_weights(engine)
    update = engine.publish()
    fresh = make_sampler(engine.model, W4A16_G32)
    with FailsAt() as mode:
        fresh.load(update)
    before = served(engine.sampler)
    # Along the way, where tensors are checked, copied and repacked, and each of the last ones.
    for number in {*range(1, mode.count, mode.count // 40), *range(mode.count - 10, mode.count + 1)}:
        with pytest.raises(MemoryError, match=f"operation {number},"), FailsAt(number):
            engine.sampler.load(update)
        assert engine.sampler.version == 0
        for name, tensor in served(engine.sampler).items():
            assert torch.equal(tensor, before[name]), f"operation {number} changed {name}"
    engine.sampler.load(update)
    wanted = served(fresh)
    for name, tensor in served(engine.sampler).items():
        assert_bitwise_equal(tensor, wanted[name])
        assert not torch.equal(tensor, before[name]), name


def served(sampler):
    """Everything that answers are computed from, by name."""
    tensors = {name: parameter.detach().clone() for name, parameter in sampler.model.named_parameters()}
    for name, slot in sampler.slots.items():
        tensors |= {f"{name}.{suffix}": part.clone() for suffix, part in slot.weight.tensors.items()}
        tensors[f"{name} operand"] = slot.operand().values.clone()
    return tensors


@pytest.mark.parametrize("version", [0, "x", -1, True])
def test_a_version_that_is_not_newer_is_refused(engine, version):
    step_weights(engine)
    assert_refused(engine, described(engine.publish().tensors, version=version), repr(version))


@pytest.mark.parametrize("name", ["w4a16", "w2a16", "w4a8"])
def test_one_set_of_8_bit_codes_serves_engines_of_fewer(name):
    fmt = get_format(name, nested_in="w8a16", group_size=None if name == "w4a8" else 32)
    engine = make_engine(fmt)
    update = engine.publish()
    assert (update.manifest.format, update.manifest.published) == (name, "w8a16")
    rollouts = sample(engine)
    assert gaps(engine, rollouts).max() < 1e-4
    for weight in engine.report.weights.values():
        slot, stored = engine.sampler.slots[weight.name], weight.quantized()
        for suffix, tensor in stored.tensors.items():
            assert_bitwise_equal(update.tensors[f"{weight.name}.{suffix}"], tensor)
        assert slot.weight.num_bytes < stored.num_bytes
        assert_bitwise_equal(slot.operand().effective_weight(), weight.operand().effective_weight())
    # An engine that took the 8-bit codes for its own would have to refuse their shape.
    plain = described(update.tensors, fmt=name)
    assert_refused(engine, plain, "int32")


@pytest.mark.parametrize(
    ("learner", "other"),
    [
        (("w4a16", "w8a16"), ("w2a16", "w8a16")),
        (("w8a16", None), ("w4a16", "w8a16")),
        (("w4a16", "w8a16"), ("w8a16", None)),
    ],
)
def test_one_update_serves_engines_of_different_precision(learner, other):
    fmt, draft = (get_format(name, nested_in=nested_in, group_size=32) for name, nested_in in (learner, other))
    engine = make_engine(fmt)
    update, drafts = engine.publish(), make_sampler(engine.model, draft)
    drafts.load(update.served_as(draft))
    own = make_engine(draft)
    for name, slot in drafts.slots.items():
        narrow, wide = (one.slots[name].operand().effective_weight() for one in (own.sampler, engine.sampler))
        assert_bitwise_equal(slot.operand().effective_weight(), narrow)
        assert not torch.equal(narrow, wide)
    with pytest.raises(
        ValueError, match="what is published is w8a16; w4a16 is not nested in it: publish with nested_in"
    ):
        update.served_as(W4A16_G32)
