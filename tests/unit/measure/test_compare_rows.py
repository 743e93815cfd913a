"""The names under which `qarl compare --record` keeps its figures."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from qarl_nemo.measure.compare import output
from qarl_nemo.measure.compare.operators import _difference
from qarl_nemo.measure.compare.output import legend, write_comparison
from qarl_nemo.measure.compare.prompts import make_prompts
from qarl_nemo.measure.compare.record import append_comparison, comparison_rows, require_rows_of
from qarl_nemo.measure.compare.run import Comparison
from qarl_nemo.measure.compare.score import Response, engine_scores, kernel_scores, model_scores
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.metrics.results import Figure, append_results, read_results, running_command
from qarl_nemo.train.tokenizer import character_tokenizer


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"nested_in": "w8a16"}, "_in_w8a16"),
        ({"group_size": 64, "targets": ("mlp",)}, "_mlp_group_size_64"),
        ({"scale_convention": "clipped_range", "nested_in": "w8a16"}, "_clipped_range_in_w8a16"),
        ({"group_size": 128, "scale_convention": "full_range"}, ""),
        ({"own_width": True, "targets": ("mlp",)}, "_mlp_own_width"),
        ({"attention": "engine", "engine": "vllm", "nested_in": "w8a16"}, "_in_w8a16_engine_attention"),
    ],
)
def test_what_was_asked_for_is_told_apart_in_the_names_of_rows(options, end):
    """A grid that is nested is not the format's own, whose rows stay."""
    asked = CompareSettings(Path("model"), **options)
    (row,) = comparison_rows(asked, "packed", [Figure("gap_aligned_w4a16", 0.1, "nats", "<=")], "cpu", "qarl compare")
    assert row["name"] == f"gap_aligned_w4a16{end}"


def test_rows_of_another_checkpoint_are_not_replaced(tmp_path):
    file = tmp_path / "rows.json"
    require_rows_of(Path("models/a"), file)
    figures = [Figure("gap_aligned_w4a16", 0.1, "nats", "<=")]
    command = "qarl compare --format w4a16 'models/a b' --engine vllm"
    append_results(file, comparison_rows(CompareSettings(Path("models/a b")), "packed", figures, "cpu", command))
    append_results(file, [read_results(file)[0].model_copy(update={"name": "own", "command": "python own's.py"})])
    require_rows_of(Path("models/a b/"), file)
    with pytest.raises(ValueError, match=r"another checkpoint than models/a \(qarl compare .*; name another file"):
        require_rows_of(Path("models/a"), file)


def test_the_legend_names_the_unit_and_the_arms_that_stand_in_the_table():
    said = list(legend(Comparison("packed", {}, [{"arm": "aligned"}, {"arm": "engine"}], [])))
    assert any("nats a token" in line for line in said)
    assert said[1].endswith("x own: over |gap| of the arm `attention`.")
    assert [line.split(":")[0] for line in said] == [said[0], "x floor", "engine"]


def test_a_comparison_of_other_settings_stays_under_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "write_fidelity_figure", lambda _, path, title: path.write_text(title) and path)
    for name in ("first", "second", "second", "third"):
        write_comparison(tmp_path, CompareSettings(Path(name)), Comparison("packed", {}, [], []))
    kept = {file.name: json.loads(file.read_text())["settings"]["checkpoint"] for file in tmp_path.glob("*.json")}
    assert kept == {"compare.json": "third", "compare-1.json": "first", "compare-2.json": "second"}
    assert (tmp_path / "compare-1.png").read_text().startswith("first")
    (tmp_path / "compare.json").write_text("a user's own")
    write_comparison(tmp_path, CompareSettings(Path("third")), Comparison("packed", {}, [], []))
    assert (tmp_path / "compare-3.json").read_text() == "a user's own"


@pytest.mark.parametrize("expected", [0.0, float("inf"), float("nan")])
def test_operators_without_a_finite_ratio_are_written(expected, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "write_fidelity_figure", lambda _, path, title: path)
    row = {"operator": "mlp", **_difference(torch.ones(1, 2), torch.full((1, 2), expected))}
    write_comparison(tmp_path, CompareSettings(Path("model")), Comparison("vllm 1", {}, [], [row]))
    (written,) = json.loads((tmp_path / "compare.json").read_text())["operators"]
    assert (written["operator"], written["snr_db"]) == ("mlp", None)


@pytest.mark.parametrize("name", ["prompts.json", "prompts.csv"])
def test_a_file_of_another_kind_is_no_text_of_prompts(name, tmp_path):
    (tmp_path / name).write_text('[{"problem": "1+1="}]\n')
    asked = CompareSettings(Path("model"), prompts=tmp_path / name)
    config = PreTrainedConfig(max_position_embeddings=100, vocab_size=20)
    with pytest.raises(ValueError, match=f"{name}: prompts are read from .jsonl, or from text"):
        make_prompts(asked, character_tokenizer(), config)


def test_gaps_and_operators_may_go_into_one_file(tmp_path, monkeypatch):
    from qarl_nemo.measure.compare import record

    monkeypatch.setattr(record, "gap_figures", lambda *_: [Figure("gap_aligned_w4a16", 0.1, "nats", "<=")])
    monkeypatch.setattr(record, "_operator_figures", lambda _: [Figure("operator_norm_w4a16", 0.0, "", "<=")])
    file = tmp_path / "rows.json"
    assert append_comparison(CompareSettings(Path("model")), Comparison("packed", {}, [], []), file, file) == [file]
    assert [row.name for row in read_results(file)] == ["gap_aligned_w4a16", "operator_norm_w4a16"]


def test_the_command_that_runs_is_what_one_would_type_again(monkeypatch):
    words = ["tool", "--prompts", "a b.jsonl", "--record=x.json", "--record", "y.json", "policy.precision=bfloat16"]
    monkeypatch.setattr("sys.argv", words)
    assert running_command("tool", "--record") == "tool --prompts 'a b.jsonl' policy.precision=bfloat16"
    monkeypatch.setattr("sys.argv", ["tool", "--record", "y.json"])
    assert running_command("tool", "--record") == "tool"


@pytest.mark.parametrize(
    ("text", "prompts"), [('{"prompt": "1\u20282"}\n\n', ["1\u20282"]), ('\ufeff{"prompt": "1"}', ["1"])]
)
def test_a_file_of_prompts_may_hold_any_character_of_json(tmp_path, text, prompts):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    tokenizer = character_tokenizer()
    asked = CompareSettings(Path("model"), prompts=file, max_new_tokens=4)
    config = PreTrainedConfig(vocab_size=len(tokenizer), max_position_embeddings=99)
    found = make_prompts(asked, tokenizer, config)
    assert found == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    file.write_text('{"prompt": [{"role": "user", "content": "1"}]}')
    with pytest.raises(
        ValueError, match=r"jsonl holds messages, .*; write each prompt as text, or as prompt_token_ids"
    ):
        make_prompts(asked, tokenizer, config)
    file.write_text('{"prompt":' + "[" * 100_000)
    with pytest.raises(ValueError, match="line 1: no prompt"):
        make_prompts(asked, tokenizer, config)


def test_two_kernels_of_a_learner_agree_on_the_likeliest_token_whatever_the_engine_found():
    response = Response([1], [2, 3], [-1.0, -1.0], [9, 9], [-1.0, -1.0], [9, 9])
    logprobs = torch.tensor([[-1.0, -2.0]])
    one, other = (logprobs, torch.tensor([[2, 3]])), (logprobs - 0.5, torch.tensor([[2, 4]]))
    assert model_scores([response], *one).metrics()["top1_agreement"] == 0.0
    found = kernel_scores([response], one, other).metrics()
    assert (found["top1_agreement"], found["gap_mean"]) == (0.5, 0.5)


def test_the_divergence_is_that_of_the_engine_to_the_model():
    response = Response([1], [5], logprobs=[-1.0], top_tokens=[5], read_logprobs=[-1.0], read_top_tokens=[5])
    measured = model_scores([response], torch.tensor([[-2.0]]), torch.tensor([[5]])).metrics()
    # d = -2 - -1, and exp(d) - 1 - d = 1 / e; the other way round it would be e - 2.
    assert measured["kl_k3"] == pytest.approx(math.exp(-1))


def test_an_engine_that_reads_is_compared_with_itself_as_it_sampled():
    response = Response([1], [5], logprobs=[-1.0], top_tokens=[5], read_logprobs=[-1.5], read_top_tokens=[6])
    measured = engine_scores([response]).metrics()
    assert (measured["gap_mean"], measured["top1_agreement"]) == (0.5, 0.0)
