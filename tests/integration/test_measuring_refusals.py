"""What `qarl compare` and `qarl eval` refuse of their options before a weight is read, all of it in one error."""

import json
import shutil
from pathlib import Path

import pytest

from qarl_nemo.measure.compare.job import prepare as prepare_comparison
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.measure.eval.run import plan
from qarl_nemo.measure.eval.settings import EvalSettings
from qarl_nemo.measure.eval.settings import prepare as prepare_evaluation
from qarl_nemo.measure.eval.store import AnswerStore
from support.engines import TOKENIZER
from support.files import write_jsonl
from support.whole_models import save_sparse


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_sparse(tmp_path_factory.mktemp("refusals") / "tiny", TOKENIZER, max_position_embeddings=128)


@pytest.fixture
def sums(tmp_path) -> Path:
    return Path(write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "1+2=", "answer": "It is\n#### 3"}]))


def comparison(checkpoint, **options) -> CompareSettings:
    return CompareSettings(checkpoint, **{"group_size": 64, "max_new_tokens": 20, "device": "cpu"} | options)


def evaluation(tmp_path, sums, *models) -> EvalSettings:
    return EvalSettings(models, ("gsm8k",), tmp_path / "out" / "r.json", {"gsm8k": sums}, device="cpu")


def test_options_without_effect_and_places_are_listed_with_the_rest(qarl, checkpoint, tmp_path):
    prompts, file = tmp_path / "prompts.txt", tmp_path / "file"
    prompts.write_bytes(b"1+1=\n\xff\n")
    file.touch()
    options = ["--prompts", prompts, "--prompt-tokens", 8, "--gpu-memory-utilization", 0.5, "--num-responses", 0]
    options += ["--parallel", 2]
    options += ["--output", file / "out", "--record", file / "a.json", "--record-operators", file]
    code, printed = qarl("compare", checkpoint, *options)
    assert code == 2
    for text in (
        "9 problem(s) with this comparison",
        "--prompt-tokens is the length of random prompts, and --prompts names others",
        "--gpu-memory-utilization is vLLM's share; leave it out, or set --engine vllm",
        "--parallel starts vLLM engines beside each other; leave it out, or set --engine vllm",
        "--record-operators records what --layers measures",
        f"{file / 'out'} cannot be made: {file} is a file; choose another place",
        f"{file / 'a.json'} cannot be made: {file} is a file; choose another place",
        f"{file}: expected a JSON list of results, but it is not JSON",
        "num_responses=0 must be at least 1",
        f"{prompts}: expected a file of prompts, but it is not UTF-8: byte 0xff at position 5, in line 2",
    ):
        assert text in printed, printed


def test_a_refused_comparison_leaves_no_folder(qarl, tmp_path):
    code, printed = qarl("compare", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert code == 2, printed
    assert not (tmp_path / "out").exists()


def test_random_prompts_that_are_too_many_or_too_long_are_said_once(checkpoint):
    for sizes, said in (
        ({"num_prompts": 10**10}, f"num_prompts={10**10} must be at most 16777216"),
        ({"prompt_tokens": 10**6}, f"prompt_tokens={10**6}: of the model's 128 positions 107 leave room"),
        ({"max_new_tokens": 128}, "max_new_tokens=128 leaves no room for a prompt in the model's 128 positions"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            prepare_comparison(comparison(checkpoint, **sizes))
        assert str(error.value).startswith("1 problem(s)")


def test_messages_without_words_and_ids_that_are_no_numbers_are_no_prompts(checkpoint, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    wrong = [{"prompt": [{"a": 1}]}, {"prompt": [{"role": "user", "content": 5}]}, {"prompt_token_ids": [True]}]
    prompts.write_text("\n".join(map(json.dumps, [*wrong, {"prompt_token_ids": [5]}])))
    with pytest.raises(ValueError, match="line 1, line 2, line 3: no prompt"):
        prepare_comparison(comparison(checkpoint, prompts=prompts))


def test_options_without_effect_and_without_form_are_in_the_same_error(qarl, checkpoint, tmp_path, sums):
    options = ["--engine", "packed", "--gpu-memory-utilization", 0.5, "--temperature", 0, "--top-p", 0.5, "--limit", 0]
    options += ["--chat-template", "none", "--chat-template-kwargs", "{}", "--output", sums / "r.json"]
    options += ["--data", "gsm8k", "--data", "gpqa=a", "--data", "gpqa=b", "--max-new-tokens", 10**8]
    options += ["--benchmarks", "gsm8k"]
    code, printed = qarl("eval", checkpoint, *options)
    assert code == 2
    for text in (
        "7 problem(s) with this evaluation",
        "--data gsm8k: write NAME=PATH, for example --data gsm8k=data/test.jsonl; --data names more than one copy of",
        "--chat-template-kwargs are a template's, and --chat-template none has none; leave one out",
        "limit=0 must be at least 1",
        f"max_new_tokens={10**8} must be at most 16777216",
        "top_p=0.5 does nothing beside temperature=0, which draws nothing; leave one out",
        f"{sums / 'r.json'} cannot be made: {sums} is a file",
        "gpu_memory_utilization is vLLM's share, and the engine is packed; leave it out",
    ):
        assert text in printed, printed
    code, printed = qarl("eval", checkpoint, "--chat-template-kwargs", "")
    assert "--chat-template-kwargs: expected the template's options, but it is not JSON" in printed


def test_every_models_tokenizer_is_looked_at_before_one_is_asked(checkpoint, tmp_path, sums):
    models = [shutil.copytree(checkpoint, tmp_path / name) for name in ("cut", "without")]
    (models[0] / "tokenizer.json").write_text("{")
    (models[1] / "tokenizer.json").unlink()
    job = prepare_evaluation(evaluation(tmp_path, sums, checkpoint, *models))
    with pytest.raises(ValueError, match=r"2 problem.*\n.*cut/tokenizer.json: .*not JSON(.|\n)*without: its tokenizer"):
        plan(job, AnswerStore(tmp_path / "answers.jsonl", {}))


def test_a_copy_that_is_not_there_is_not_asked_of_the_hub(checkpoint, tmp_path):
    chosen = evaluation(tmp_path, tmp_path / "gsm8k", checkpoint)
    with pytest.raises(ValueError, match=rf"--data gsm8k={tmp_path / 'gsm8k'} does not exist; name a local file"):
        prepare_evaluation(chosen)
