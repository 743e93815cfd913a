"""The `qarl:` block: formats and alignments that go together, and the stages of a schedule."""

from contextlib import nullcontext

import pytest

from qarl_formats import get_format
from qarl_nemo.config import ConfigError, QarlConfig, validate


@pytest.mark.parametrize(
    ("alignment", "number_format"), [("none", "w4a16"), ("aligned", "bf16"), ("rollout_only", "bf16")]
)
def test_alignment_none_and_bf16_go_together(alignment, number_format):
    with pytest.raises(ConfigError, match="alignment=none and format=bf16 go together"):
        validate({"alignment": alignment, "format": number_format}, QarlConfig, source="test")


@pytest.mark.parametrize(
    "name", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "w2a16", "w3a16", "w8a16"]
)
def test_every_format_is_legal_with_both_quantized_alignments(name):
    for alignment in ("aligned", "rollout_only"):
        assert validate({"alignment": alignment, "format": name}, QarlConfig, source="test").format == name


LEGAL = "w4a16, w4a8, fp8_block, fp8_channel, int8, nvfp4, w8a16, bf16"


@pytest.mark.parametrize("name", ["w9a16", "w4a16x", "int4", "fp8", "w2a2", "W2A2", "w4a4", "w16a4"])
def test_unknown_formats_are_refused_with_the_legal_ones_or_the_reason(name):
    few_bits = name.endswith(("a2", "A2", "a4"))
    said = " .*fewer than 8 bits have no tensor-core path" if few_bits else f": .*legal here: {LEGAL}"
    with pytest.raises(ConfigError, match=f"unknown format '{name}'{said}"):
        validate({"format": name}, QarlConfig, source="test")


def test_a_misspelt_narrow_format_is_recognized():
    with pytest.raises(ConfigError, match="unknown format 'w3a61': did you mean 'w3a16'"):
        validate({"format": "w3a61"}, QarlConfig, source="test")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("int4", "'w4a16'"),
        ("INT3", "'w3a16'"),
        ("int2", "'w2a16'"),
        ("fp8", "'fp8_block' or 'fp8_channel'"),
        ("nvpf4", "'nvfp4'"),
        ("int88", "'int8'"),
    ],
)
def test_names_that_others_use_lead_to_the_format_that_is_meant(name, meant):
    with pytest.raises(ConfigError, match=f"unknown format '{name}': did you mean {meant}\\? legal here: {LEGAL}"):
        validate({"format": name}, QarlConfig, source="test")
    with pytest.raises(ValueError, match=f"unknown format '{name}': did you mean {meant}\\? legal: {LEGAL}"):
        get_format(name)


def test_a_name_that_resembles_none_is_answered_with_the_legal_ones_alone():
    with pytest.raises(ValueError, match=f"unknown format 'banana': legal: {LEGAL}"):
        get_format("banana")


def stages(*pairs):
    return [{"from_step": step, "bits": bits} for step, bits in pairs]


def test_the_grid_of_every_step():
    qarl = validate({"format": "w8a16", "schedule": stages((10, 4), (20, 2))}, QarlConfig, source="test")
    bits = {step: (qarl.served_at(step).grid_bits, qarl.executed_at(step).grid_bits) for step in (1, 9, 10, 19, 20, 99)}
    assert bits == {1: (8, 8), 9: (8, 8), 10: (4, 4), 19: (4, 4), 20: (2, 2), 99: (2, 2)}
    # The engine serves one format throughout.
    assert {qarl.served_at(step).name for step in bits} == {"w8a16"}
    assert {qarl.served_at(step).num_bits for step in bits} == {8}
    rollout_only = qarl.model_copy(update={"alignment": "rollout_only"})
    assert [rollout_only.executed_at(step).name for step in bits] == ["bf16"] * len(bits)


def test_a_stage_may_go_up_to_all_bits_that_are_stored():
    qarl = validate({"format": "w2a16", "schedule": stages((10, 4), (20, 3))}, QarlConfig, source="test")
    assert [qarl.served_at(step).grid_bits for step in (9, 10, 20)] == [2, 4, 3]


@pytest.mark.parametrize(("number", "is_legal"), [(64, True), (65, False)])
def test_the_number_of_stages_is_limited(number, is_legal):
    schedule = stages(*((2 + index, 2 + 2 * (index % 2)) for index in range(number)))
    with nullcontext() if is_legal else pytest.raises(ConfigError, match="at most 64"):
        validate({"format": "w8a16", "schedule": schedule}, QarlConfig, source="test")


@pytest.mark.parametrize(
    ("name", "schedule", "problem"),
    [
        ("w4a16", stages((10, 8)), "8 bits are not stored in the 4 of w4a16; w8a16 has 8"),
        ("w4a16", stages((10, 4)), "step 10 goes on with 4 bits"),
        ("w3a16", stages((10, 3)), "step 10 goes on with 3 bits"),
        ("w8a16", stages((10, 4), (20, 4)), "step 20 goes on with 4 bits"),
        ("w8a16", stages((10, 1)), "greater than or equal to 2"),
        ("w8a16", stages((10, 4), (10, 2)), "from_step=10 is not after 10"),
        ("w8a16", stages((20, 4), (10, 2)), "from_step=10 is not after 20; stages ascend"),
        ("fp8_block", stages((10, 4)), "fp8_block has one grid only; take format=w8a16"),
        ("w8a16", stages((1, 4)), "greater than or equal to 2"),
        ("w8a16", [{"from_step": 3, "bit": 4}], "unknown key 'schedule.0.bit': did you mean 'bits'"),
    ],
)
def test_stages_that_cannot_be_are_refused(name, schedule, problem):
    with pytest.raises(ConfigError, match=problem):
        validate({"format": name, "schedule": schedule}, QarlConfig, source="test")


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValueError, match="frozen"):
        QarlConfig().format = "bf16"
