"""Benchmarks as NeMo-RL's validation: the same problems, words and checks as `qarl eval`."""

import re

import pytest

from support.nemo_rl import installed  # noqa: F401 skips where NeMo-RL is not

pytest.importorskip("nemo_rl.data.datasets.raw_dataset")

import ray
from nemo_rl.data.datasets import load_response_dataset
from nemo_rl.environments import utils

from qarl_nemo.config import ConfigError
from qarl_nemo.data.benchmarks import BENCHMARKS
from qarl_nemo.nemo_rl import plugin
from qarl_nemo.nemo_rl.reward_environment import RewardFunctionEnvironment
from qarl_nemo.train.tokenizer import character_tokenizer
from support.files import write_jsonl


@pytest.fixture
def sums(tmp_path):
    return write_jsonl(
        tmp_path / "gsm8k.jsonl",
        [{"question": f"1+{n}=", "answer": f"It is\n#### {1 + n}"} for n in range(3)],
    )


def load(sums, **options):
    block = {"dataset_name": "qarl_nemo.nemo_rl.benchmark.Benchmark", "benchmark": "gsm8k", "data_path": str(sums)}
    return load_response_dataset(block | options)


def prompt_of(data):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return data.processor(data.dataset[0], data.task_spec, tokenizer, 4096, 0)


def test_a_benchmark_is_asked_in_its_records_words(sums):
    data = load(sums, prompt_file=None)
    datum = prompt_of(data)
    assert datum["message_log"][0]["content"] == BENCHMARKS["gsm8k"].ask("1+0=")
    assert datum["extra_env_info"] == {"ground_truth": "1", "benchmark": "gsm8k"}
    assert datum["task_name"] == "gsm8k"


def test_a_prompt_file_asks_as_in_training(sums, tmp_path):
    (tmp_path / "prompt.txt").write_text("Compute {}")
    assert (
        prompt_of(load(sums, prompt_file=str(tmp_path / "prompt.txt")))["message_log"][0]["content"] == "Compute 1+0="
    )


def test_problems_repeat(sums):
    assert [row["messages"][1]["content"] for row in load(sums, repeat=2).dataset] == ["1", "2", "3"] * 2


def test_a_benchmark_is_itself_under_any_name(sums):
    data = load(sums, task_name="gsm8k#2")
    datum = prompt_of(data)
    assert datum["task_name"] == "gsm8k#2"
    assert datum["extra_env_info"]["benchmark"] == "gsm8k"


def test_unknown_benchmarks_are_refused(sums):
    with pytest.raises(ConfigError, match="unknown benchmark 'gsm'"):
        load(sums, benchmark="gsm")
    with pytest.raises(ConfigError, match=re.escape("'ood' stands for several")):
        load(sums, benchmark="ood")


def test_nemo_rl_knows_the_environment_once_the_plugin_is_registered(monkeypatch):
    monkeypatch.setattr(utils, "ENV_REGISTRY", dict(utils.ENV_REGISTRY))
    plugin.register()
    plugin.register()
    actor = utils.ENV_REGISTRY[plugin.ENVIRONMENT]["actor_class_fqn"]
    assert utils.get_object(actor).__ray_metadata__.class_name == "RewardFunctionEnvironment"
    assert utils.get_actor_python_env(actor)


@pytest.mark.slow
def test_answers_are_checked_as_each_benchmark_asks():
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        asked = [("gsm8k", r"\boxed{7}", "7"), ("gpqa", r"\boxed{C}", "B"), ("gpqa", "answer: B", "B")]
        logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for _, text, _ in asked]
        metadata = [{"benchmark": name, "ground_truth": expected} for name, _, expected in asked]
        environment = RewardFunctionEnvironment.remote({"num_workers": 2})
        returned = ray.get(environment.step.remote(logs, metadata))
        assert returned.rewards.tolist() == [1.0, 0.0, 1.0]
        assert returned.terminateds.tolist() == [1.0, 1.0, 1.0]
        assert returned.metadata == metadata
        assert [one["content"] for one in returned.observations][:2] == [
            "Environment: correct",
            "Environment: incorrect",
        ]
    finally:
        ray.shutdown()
