"""`qarl eval` on tiny random models: what is served, what is kept, what goes on after a kill, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_checkpoint, quantize_checkpoint
from qarl_nemo.checkpoints.stored import stored_format, stored_layers
from qarl_nemo.cli.evaluate import evaluate
from qarl_nemo.files import FileError
from qarl_nemo.layers.install import install
from qarl_nemo.measure.eval.models import find_model
from qarl_nemo.measure.eval.output import answers_path, first_prompts, notes
from qarl_nemo.measure.eval.packed import PackedEngine
from qarl_nemo.measure.eval.run import plan, run
from qarl_nemo.measure.eval.settings import EvalSettings, prepare
from qarl_nemo.measure.eval.store import AnswerStore
from qarl_nemo.refit.publish import publish
from qarl_nemo.train.file_list import write_file_list
from qarl_nemo.train.model import load_checkpoint
from support.days import let_a_day_pass
from support.engines import TOKENIZER
from support.files import write_jsonl
from support.whole_models import quantized_copies, save_sparse

TARGETS = ("experts", "attention")
FORMATS = ("w4a16", "w3a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4")
CONTEXT = 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval") / "tiny"
    return save_sparse(folder, TOKENIZER, num_hidden_layers=1, num_experts=4, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def quantized(checkpoint, tmp_path_factory):
    """Format -> a checkpoint in it."""
    return quantized_copies(checkpoint, tmp_path_factory.mktemp("quantized"), FORMATS, TARGETS)


@pytest.fixture
def sums(tmp_path) -> Path:
    problems = [{"question": f"{a}+{b}=", "answer": f"It is\n#### {a + b}"} for a in range(3) for b in range(3)]
    return Path(write_jsonl(tmp_path / "gsm8k.jsonl", problems))


def settings(tmp_path, sums, *models, **options) -> EvalSettings:
    sizes = {"max_new_tokens": 6, "num_samples": 2, "batch_size": 5, "device": "cpu", "precision": "float32"}
    return EvalSettings(models, ("gsm8k",), tmp_path / "out" / "r.json", {"gsm8k": sums}, **sizes | options)


def kept(chosen: EvalSettings) -> list[dict]:
    return [json.loads(line) for line in answers_path(chosen.output).read_text().splitlines()][1:]


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_is_served_from_the_tensors_that_a_refit_would_bring(name, checkpoint, quantized):
    learner, tokenizer = load_checkpoint(checkpoint, torch.bfloat16)
    report = install(learner, TARGETS, get_format(name))
    expected = publish(report.weights, learner.named_parameters(), get_format(name), version=0).tensors
    model = find_model(quantized[name])
    assert (model.served, model.targets, model.quantized) == (get_format(name), TARGETS, True)
    engine = PackedEngine(model, tokenizer, [0], device=torch.device("cpu"), dtype=torch.bfloat16)
    assert engine._sampler.version == 0
    layout = engine._sampler.layout
    found = {key: tensor for layer in stored_layers(model.checkpoint, layout) for key, tensor in layer.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected)


def test_tensors_that_are_not_the_models_are_all_named(checkpoint, quantized, tmp_path):
    model = find_model(quantized["w4a16"])
    tokenizer = load_checkpoint(checkpoint, torch.float32)[1]
    lacking = tuple(info for info in model.checkpoint.tensors if "experts.2.up_proj.weight_packed" not in info.name)
    model = replace(model, checkpoint=replace(model.checkpoint, tensors=lacking))
    with pytest.raises(ValueError, match=r"the update lacks .*gate_up_proj.weight_packed"):
        PackedEngine(model, tokenizer, [0], device=torch.device("cpu"), dtype=torch.float32)


def test_a_model_that_lacks_tensors_is_refused_before_another_answers(checkpoint, sums, tmp_path):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text()) | {"num_hidden_layers": 2}
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"1 problem.*\n.*broken is not what its config.json says"):
        prepare(settings(tmp_path, sums, checkpoint, broken))


def make_run(checkpoint, folder, config) -> Path:
    """Return the checkpoint's folder of a run at step 4."""
    step = folder / "checkpoints" / "step_000004"
    shutil.copytree(checkpoint, step / "model")
    write_file_list(step)
    (folder / "config.yaml").write_text(config)
    return step


def test_a_run_is_served_in_the_format_of_its_rollouts_and_asked_as_in_training(checkpoint, tmp_path):
    qarl = "qarl: {format: w2a16, group_size: 64, targets: [experts]}\n"
    step = make_run(checkpoint, tmp_path / "run", qarl + "policy: {tokenizer: {chat_template: null}}\n")
    model = find_model(tmp_path / "run")
    assert model.label == f"{tmp_path / 'run'}, step 4"
    assert (model.format_name, model.served.group_size, model.targets) == ("w2a16", 64, ("experts",))
    assert model.prompts.chat_template is None
    learner, tokenizer = load_checkpoint(checkpoint, torch.float32)
    engine = PackedEngine(model, tokenizer, [0], device=torch.device("cpu"), dtype=torch.float32)
    report = install(learner, model.targets, model.served)
    assert {slot.weight.format for slot in engine._sampler.slots.values()} == {model.served}
    assert engine._sampler.slots.keys() == {weight.name for weight in report.weights.values()}
    (step / "model" / "config.json").write_text("{}")
    with pytest.raises(FileError, match="not a whole checkpoint"):
        find_model(tmp_path / "run")


def always_seven(checkpoint, folder) -> Path:
    """A copy of the model whose residual stream holds a constant, which its head reads as the token 7."""
    weights = load_file(shutil.copytree(checkpoint, folder) / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 10.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][TOKENIZER.convert_tokens_to_ids("7"), 0] = 10.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_right_answers_are_counted(checkpoint, tmp_path, sums):
    answers = [7, 8, 7, 9]
    problems = [{"question": f"{n}+{n}=", "answer": f"#### {answer}"} for n, answer in enumerate(answers)]
    write_jsonl(sums, problems)
    chosen = settings(tmp_path, sums, always_seven(checkpoint, tmp_path / "seven"), max_new_tokens=1)
    evaluate(chosen)
    assert [(row["response"], row["right"]) for row in kept(chosen)] == [
        ("7", answer == 7) for answer in answers for _ in range(2)
    ]
    results = json.loads(chosen.output.read_text())
    assert results["complete"]
    # Shares 1, 0, 1, 0: mean 1/2, error sqrt(4 / 4 / 3 / 4)
    assert results["results"][0]["avg"] == {"value": 0.5, "standard_error": pytest.approx((1 / 12) ** 0.5)}
    assert results["results"][0]["pass_at"]["2"]["value"] == 0.5


@pytest.mark.gpu
def test_vllm_serves_bf16_and_quantized_checkpoints_and_runs(checkpoint, tmp_path, sums):
    pytest.importorskip("vllm")
    seven = always_seven(checkpoint, tmp_path / "seven")
    quantize_checkpoint(seven, tmp_path / "w4a16", get_format("w4a16"), TARGETS)
    make_run(seven, tmp_path / "run", "qarl: {format: fp8_block, targets: [experts]}\n")
    models = (seven, tmp_path / "w4a16", tmp_path / "run", checkpoint)
    options = {"engine": "vllm", "device": "cuda", "precision": None, "gpu_memory_utilization": 0.3}
    chosen = settings(tmp_path, sums, *models, **options, max_new_tokens=4)
    evaluate(chosen)
    says_seven = [
        [row["response"] == "7777" for row in kept(chosen) if row["model"].startswith(str(m))] for m in models
    ]
    assert [all(said) for said in says_seven] == [True, True, True, False]
    formats = [model["format"] for model in json.loads(chosen.output.read_text())["models"]]
    assert formats == ["bf16", "w4a16", "fp8_block", "bf16"]


def test_a_killed_evaluation_goes_on_and_asks_nothing_twice(checkpoint, tmp_path, sums):
    whole = settings(tmp_path / "whole", sums, checkpoint)
    evaluate(whole)
    chosen = settings(tmp_path, sums, checkpoint)
    job = prepare(chosen)
    chosen.output.parent.mkdir()
    asked = []

    def kill(_: str, num_new: int) -> None:
        asked.append(num_new)
        if sum(asked) >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan(job, AnswerStore(answers_path(chosen.output), job.fixed_settings())), kill, lambda rows: None)
    path = answers_path(chosen.output)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 10
    # The kill could also have cut a line short, and left a part of a chunk.
    path.write_text("".join(lines[:8]) + lines[8][:20])
    evaluations = plan(job, AnswerStore(path, job.fixed_settings()))
    assert [(one.num_kept, one.num_answers) for one in evaluations] == [(5, 18)]
    asked.clear()
    run(evaluations, lambda _, num_new: asked.append(num_new), lambda rows: None)
    assert sum(asked) == 13
    # Seeds belong to answers, not to the order in which processes ask.
    assert [row["response"] for row in kept(chosen)] == [row["response"] for row in kept(whole)]


def test_kept_answers_of_something_else_are_not_taken(checkpoint, tmp_path, sums):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    chosen = settings(tmp_path, sums, model)
    evaluate(chosen)
    whole = sums.read_text()
    sums.write_text(whole + whole.splitlines()[0] + "\n")
    with pytest.raises(FileError, match="gsm8k: other problems are asked now"):
        evaluate(chosen)
    sums.write_text(whole)
    with pytest.raises(FileError, match=r"(?s)another evaluation.*seed: there 0, now 1") as error:
        evaluate(replace(chosen, seed=1, max_new_tokens=7))
    assert "max_new_tokens: there 6, now 7" in str(error.value)
    sums.write_text(sums.read_text().replace("+", "*"))
    with pytest.raises(FileError, match="differs from now in prompt;"):
        evaluate(chosen)
    sums.write_text(sums.read_text().replace("*", "+").replace("#### ", "#### 1"))
    with pytest.raises(FileError, match="differs from now in answer;"):
        evaluate(chosen)
    sums.write_text(sums.read_text().replace("#### 1", "#### "))
    evaluate(chosen)
    answers = answers_path(chosen.output)
    kept_text = answers.read_text()
    answers.write_text(kept_text.replace('"chunk": 1,', '"chunk": [1],'))
    with pytest.raises(FileError, match="line 7 is damaged, or not a run's: chunk: "):
        evaluate(chosen)
    answers.write_text(kept_text)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(FileError, match="differs from now in weights;"):
        evaluate(chosen)


def test_an_evaluation_whose_template_writes_the_day_goes_on_the_day_after(checkpoint, tmp_path, sums, monkeypatch):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d%m') }}{{ messages[0].content }}")
    chosen = settings(tmp_path, sums, model)
    evaluate(chosen)
    let_a_day_pass(monkeypatch)
    evaluate(chosen)
    template.write_text(template.read_text() + "=")
    with pytest.raises(FileError, match="differs from now in prompt;"):
        evaluate(chosen)


def test_models_stand_side_by_side_and_a_sample_is_said(checkpoint, quantized, tmp_path, sums, capsys):
    chosen = settings(tmp_path, sums, checkpoint, quantized["w4a16"], limit=4)
    evaluate(chosen)
    shown = capsys.readouterr().out
    assert "engine packed on cpu: 16 answers" in shown
    for told in (
        "right answers in percent (standard error)",
        f"a prompt of gsm8k, as {checkpoint} and {quantized['w4a16']} see it:\n    ",
        "gsm8k: a sample of 4 of 9 problems",
        "gsm8k: 9 problems, where 1319 are published",
    ):
        assert told in shown
    rows = kept(chosen)
    by_model = [[row["problem"] for row in rows if row["model"] == str(path)] for path in chosen.models]
    assert by_model[0] == by_model[1]
    assert len(set(by_model[0])) == 4
    results = json.loads(chosen.output.read_text())
    assert [model["format"] for model in results["models"]] == ["bf16", "w4a16"]
    assert set(results["results"][0]["pass_at"]) == {"1", "2"}


def test_prompts_go_through_the_chat_template(checkpoint, tmp_path, sums):
    model = shutil.copytree(checkpoint, tmp_path / "chat")
    template = "{% for m in messages %}0{{ m['role'] | length }}{{ m['content'] }}{% endfor %}="
    (model / "chat_template.jinja").write_text(template)
    prompt_file = tmp_path / "as_trained.txt"
    prompt_file.write_text("{}*")
    chosen = settings(tmp_path, sums, model, checkpoint, prompt_file=prompt_file, system_prompt="1-1")
    job = prepare(chosen)
    asked = plan(job, AnswerStore(tmp_path / "answers.jsonl", {}))
    # `system` has six letters, `user` four.
    assert asked[0].asked[0].texts[0] == "061-1040+0=*="
    assert asked[1].asked[0].texts[0].endswith("0+0=*")
    # Each template is shown, so that one nobody trained is seen before hours of answers.
    assert list(first_prompts(asked)) == [
        f"a prompt of gsm8k, as {model} sees it:\n    061-1040+0=*=\nits answer: 0",
        # Its tokenizer has no line ends.
        f"a prompt of gsm8k, as {checkpoint} sees it:\n    1-1<unk>0+0=*\nits answer: 0",
    ]


def test_the_models_context_bounds_answers(checkpoint, tmp_path, sums):
    job = prepare(settings(tmp_path, sums, checkpoint, max_new_tokens=None))
    (evaluation,) = plan(job, AnswerStore(tmp_path / "answers.jsonl", {}))
    longest = max(map(len, evaluation.asked[0].prompts.values()))
    assert evaluation.asked[0].params.max_new_tokens == CONTEXT - longest
    # Longer than the benchmark allows, and than the model has positions.
    questions = ["1+" * 1200, "1+" * (CONTEXT // 2), "1+2="]
    write_jsonl(sums, [{"question": question, "answer": "#### 3"} for question in questions])
    job = prepare(settings(tmp_path, sums, checkpoint))
    evaluations = plan(job, AnswerStore(tmp_path / "answers.jsonl", {}))
    rows = run(evaluations, lambda *_: None, lambda rows: None)
    assert (rows[0]["num_overlong"], rows[0]["num_problems"]) == (2, 3)
    assert rows[0]["avg"]["value"] <= 0.34
    assert "2 prompts were too long" in " ".join(notes(rows))


def test_everything_wrong_is_in_one_error(checkpoint, tmp_path, sums):
    wrong = EvalSettings(
        (checkpoint, checkpoint, tmp_path / "none"),
        ("gsm8k", "livecodebench", "gsm"),
        tmp_path,
        {"gsm9k": sums},
        engine="sglang",
        device="gpu",
        limit=0,
        temperature=-1.0,
        top_p=2.0,
        prompt_file=tmp_path / "no.txt",
    )
    with pytest.raises(ValueError, match="problem") as error:
        prepare(wrong)
    for expected in (
        "named more than once",
        "none does not exist",
        "livecodebench is not supported",
        "unknown benchmark 'gsm'",
        "no benchmark for the data of gsm9k",
        "unknown engine 'sglang'; legal: auto, vllm, packed",
        "device=gpu; legal: cpu, cuda, auto",
        "limit=0 must be at least 1",
        "temperature=-1.0 must be 0 or lie in [0.01, 100]",
        "top_p=2.0 must lie in (0, 1]",
        "no.txt: expected a prompt file",
        "is a folder; name a file, such as",
    ):
        assert expected in str(error.value), expected


def test_all_data_that_is_missing_is_in_one_error(checkpoint, tmp_path):
    copies = {name: tmp_path / f"{name}.jsonl" for name in ("aime24", "gsm8k")}
    names = ("math500", *copies)
    asked = EvalSettings((checkpoint,), names, tmp_path / "r.json", copies, engine="packed", device="cpu")
    with pytest.raises(ValueError, match=r"3 problem\(s\)(.|\n)*aime24.jsonl does not(.|\n)*gsm8k.jsonl does") as error:
        prepare(asked)
    assert "the hub has not been asked yet for math500: no --data names a copy" in str(error.value)


def test_data_that_is_not_asked_and_prompt_files_without_a_place_are_errors(checkpoint, tmp_path, sums):
    prompt_file = tmp_path / "words.txt"
    prompt_file.write_text("Answer!")
    chosen = settings(tmp_path, sums, checkpoint, prompt_file=prompt_file)
    wrong = replace(chosen, data={"gsm8k": sums, "math500": sums, "gpqa": sums})
    with pytest.raises(ValueError, match=r"2 problem\(s\)") as error:
        prepare(wrong)
    assert (
        "a copy of math500, gpqa, which --benchmarks does not ask; add math500, gpqa there, or leave out its --data"
    ) in str(error.value)
    assert f"prompt file {prompt_file}: a prompt's template has one {{}} for the question" in str(error.value)
    prompt_file.write_text("{} Answer!")
    assert len(prepare(chosen).questions) == 1


def test_what_is_no_result_is_not_replaced(checkpoint, tmp_path, sums):
    chosen = settings(tmp_path, sums, checkpoint)
    evaluate(chosen)
    evaluate(chosen)
    for path in (sums, answers_path(chosen.output)):
        with pytest.raises(ValueError, match=f"output {path} holds no results of qarl eval and would be lost"):
            prepare(replace(chosen, output=path))


def test_greedy_answers_are_not_counted_several_times(checkpoint, tmp_path, sums):
    with pytest.raises(ValueError, match="gsm8k: 3 answers at temperature 0 are one; set --num-samples 1"):
        prepare(settings(tmp_path, sums, checkpoint, temperature=0.0, num_samples=3))
    (questions,) = prepare(settings(tmp_path, sums, checkpoint, temperature=0.0, num_samples=None)).questions
    assert questions.benchmark.num_samples == 1


def test_the_format_of_a_checkpoint_is_read_from_its_config(quantized):
    config = open_checkpoint(quantized["w4a8"]).config["quantization_config"]
    assert stored_format(config) == get_format("w4a8")
    # As llm-compressor writes it, with more keys.
    config["config_groups"]["group_0"]["weights"]["observer_kwargs"] = {}
    assert stored_format(config | {"sparsity_config": {}}) == get_format("w4a8")
    # GPTQ's order of calibration leaves groups where they are, unless it sorts them.
    for order, same in (("weight", True), ("static", True), ("group", False), ("dynamic", False), (None, True)):
        config["config_groups"]["group_0"]["weights"]["actorder"] = order
        assert (stored_format(config) == get_format("w4a8")) == same
    # A rotation that engines compute as well.
    assert stored_format(config | {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}) is None
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    assert stored_format(config) is None
    assert stored_format({"quant_method": "gptq", "bits": 4}) is None


def test_a_format_of_others_needs_vllm(quantized, tmp_path, sums):
    model = shutil.copytree(quantized["w4a16"], tmp_path / "gptq")
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="built-in sampler does not know its quantization_config; set --engine vllm"):
        prepare(settings(tmp_path, sums, model))


def test_a_model_that_the_built_in_sampler_does_not_know_is_refused_before_the_hub_is_asked(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint, tmp_path / "gpt2")
    config = json.loads((model / "config.json").read_text()) | {"model_type": "gpt2"}
    (model / "config.json").write_text(json.dumps(config))
    asked = EvalSettings((model,), ("gsm8k",), tmp_path / "r.json", engine="packed", device="cpu")
    with pytest.raises(ValueError, match=r'1 problem\(s\)(.|\n)*model_type is "gpt2"; supported: '):
        prepare(asked)
