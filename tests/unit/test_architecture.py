"""No config.json of whatever content ends in a traceback."""

import json

import pytest

from qarl_nemo.architecture import Architecture, read_architecture
from qarl_nemo.files import FileError

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIG = SIZES | EXPERTS | {"model_type": "qwen3_moe"}


def problem(config, *supported):
    with pytest.raises(FileError) as error:
        Architecture.parse(config, "here/config.json", *supported)
    assert str(error.value).startswith("here/config.json: ")
    return str(error.value)


@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "deepseek_v3", "qwen3_next", "gemma3", "glm4_moe", "olmoe", "qwen2_moe", None, 3, ["llama"]],
)
def test_other_models_are_refused_with_those_that_are_not(model_type):
    expected = f"model_type is {json.dumps(model_type)}; supported: qwen3_moe, qwen3, qwen2, llama, mistral"
    assert expected in problem(CONFIG | {"model_type": model_type})
    assert "supported: qwen2" in problem(CONFIG | {"model_type": "llama"}, ["qwen2"])


def test_another_class_of_a_known_type_is_refused():
    found = problem(CONFIG | {"architectures": ["Qwen3MoeForSequenceClassification"]})
    assert "of a qwen3_moe model ['Qwen3MoeForCausalLM'] is supported" in found


@pytest.mark.parametrize("value", [0, -1, True, 1.5, 1e12, 10**12, 10**30, "64", [64], {}, float("nan")])
def test_no_absurd_size_is_believed(value):
    keys = [*SIZES, "moe_intermediate_size", "num_experts", "num_experts_per_tok", "head_dim"]
    found = problem(CONFIG | dict.fromkeys(keys, value))
    assert [key for key in keys if f"{key}={json.dumps(value)} is not a whole number from 1 to " not in found] == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None, "num_experts": None}, "lacks hidden_size, num_experts or num_local_experts"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is no multiple of 4 key-value heads"),
        (
            {"num_attention_heads": 10, "num_key_value_heads": 5},
            "hidden_size=96 is no multiple of num_attention_heads=10",
        ),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 of 4 experts"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers=[4] is not a list of layers from 0 to 3"),
        ({"mlp_only_layers": {"a": 1}}, "mlp_only_layers="),
        ({"mlp_only_layers": "ab"}, "mlp_only_layers="),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"decoder_sparse_step": "2"}, "decoder_sparse_step="),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is neither true nor false"),
        ({"attention_bias": True}, "attention_bias set, which no published model of this family has"),
    ],
)
def test_what_does_not_fit_is_named(changes, expected):
    assert expected in problem(CONFIG | changes)


def test_every_problem_is_in_one_error():
    found = problem(CONFIG | {"hidden_size": -4, "vocab_size": "many", "tie_word_embeddings": "yes"})
    assert all(key in found for key in ("hidden_size=-4", 'vocab_size="many"', 'tie_word_embeddings="yes"'))


@pytest.mark.parametrize("text", ["", "[]", '""', '[["a", 1]]', "3", "null", "{", "\udcff"])
def test_a_config_that_is_no_object_names_its_file(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FileError, match=r"config\.json: expected a model's config\.json"):
        read_architecture(tmp_path)


def test_the_first_llamas_have_as_many_keys_as_queries():
    config = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    assert Architecture.parse(config | {"model_type": "llama"}, "").num_key_value_heads == 6
    assert "lacks num_key_value_heads" in problem(config | {"model_type": "mistral"})
