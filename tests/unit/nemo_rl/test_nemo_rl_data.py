"""Our data sets, read by NeMo-RL itself: fields, prompts that are too long, and rewards of one's own."""

import sys

import pytest

from support.nemo_rl import installed  # noqa: F401

# isort: split
import datasets
from nemo_rl.data import ResponseDatasetConfig
from nemo_rl.data.datasets import AllTaskProcessedDataset
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.utils import setup_response_data
from nemo_rl.environments.utils import ENV_REGISTRY

from qarl_nemo.config import ConfigError
from qarl_nemo.nemo_rl import plugin
from qarl_nemo.nemo_rl.checks.data_keys import BENCHMARK_KEYS, PROBLEM_KEYS, UNUSED_KEYS
from qarl_nemo.train.tokenizer import character_tokenizer
from support.files import write_jsonl

HERE = "qarl_nemo.nemo_rl.problems"
TEMPLATE = "{% for message in messages %}*{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(autouse=True)
def tidy(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr("nemo_rl.environments.utils.ENV_REGISTRY", dict(ENV_REGISTRY))
    datasets.disable_progress_bars()


@pytest.fixture
def tokenizer():
    made = character_tokenizer()
    made.chat_template = TEMPLATE
    return made


def write(path, *records):
    return write_jsonl(path, records)


def load(name, path, **keys):
    values = {"dataset_name": f"{HERE}.{name}", "data_path": path, "prompt_file": None, "system_prompt_file": None}
    return load_response_dataset(values | {"processor": "math_hf_data_processor", "env_name": "math"} | keys)


def contents(dataset):
    return [tuple(message["content"] for message in row["messages"]) for row in dataset.dataset]


def test_named_sets_and_fields_of_ones_own_are_data_sets_of_nemo_rl(tmp_path):
    openr1 = {
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    }
    assert contents(load("OpenR1Math46K", write(tmp_path / "a.jsonl", openr1))) == [("1+1?", "2")]
    gsm8k = {"question": "q", "answer": "so\n#### 1,000"}
    assert contents(load("GSM8K", write(tmp_path / "b.jsonl", gsm8k))) == [("q", "1000")]
    math = {"problem": "q", "solution": r"so \boxed{x}"}
    assert contents(load("MATH", write(tmp_path / "c.jsonl", math))) == [("q", "x")]
    own = write(tmp_path / "d.jsonl", {"input": "q", "output": "#### 5"}, {"input": "r", "output": "#### 6"})
    keys = {"input_key": "input", "output_key": "output", "answer_format": "hash"}
    assert contents(load("Problems", own, **keys)) == [("q", "5"), ("r", "6")]
    assert contents(load("Problems", own, **keys, split="train[1:]")) == [("r", "6")]
    with pytest.raises(
        ConfigError, match=r"no field 'problem' and no 'answer' \(its fields: input, output\); set input_key"
    ):
        load("Problems", own)
    with pytest.raises(ValueError, match=r"answer_format: Input should be"):
        load("Problems", own, answer_format="hsah")


def test_the_processor_hands_on_the_record_for_a_reward_function(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "nemo_rewards.py").write_text("def score(response, answer, record):\n    return record['level']\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    path = write(tmp_path / "a.jsonl", {"problem": "1+1", "answer": "2", "level": 5})
    for keys, record in (({}, {}), ({"reward_function": "nemo_rewards:score"}, {"level": 5})):
        data = load("Problems", path, **keys)
        dataset = AllTaskProcessedDataset(data.dataset, tokenizer, data.task_spec, data.processor, max_seq_length=9)
        datum = dataset[0]
        assert datum["extra_env_info"]["ground_truth"] == "2"
        assert datum["extra_env_info"]["record"].items() >= record.items()
        assert datum["message_log"][0]["content"] == "*1+1="


def test_the_keys_of_nemo_rl_are_known():
    assert set(ResponseDatasetConfig.__annotations__) <= {*PROBLEM_KEYS, *BENCHMARK_KEYS, *UNUSED_KEYS}
    assert set(UNUSED_KEYS) <= set(ResponseDatasetConfig.__annotations__)


def test_nemo_rl_knows_which_keys_our_data_sets_read(tmp_path, recwarn):
    path = write(tmp_path / "a.jsonl", {"problem": "1", "answer": "2"}, {"problem": "3", "answer": "4"})
    load("Problems", path, split="train[:2]", input_key="problem", split_validation_size=1, seed=3)
    assert [str(warning.message) for warning in recwarn if "will be ignored" in str(warning.message)] == []


def chat(*messages):
    return [{"role": role, "content": content} for role, content in messages]


def seen(data, tokenizer):
    dataset = AllTaskProcessedDataset(data.dataset, tokenizer, data.task_spec, data.processor, max_seq_length=99)
    return [dataset[place]["message_log"][0]["content"] for place in range(len(dataset))]


def test_a_records_system_message_is_in_the_prompt(tmp_path, tokenizer):
    with_system = {"problem": chat(("system", "+"), ("user", "1")), "answer": "2"}
    path = write(tmp_path / "a.jsonl", with_system, {"problem": chat(("user", "3")), "answer": "4"})
    assert seen(load("Problems", path), tokenizer) == ["*+*1=", "*3="]
    (tmp_path / "system.txt").write_text("-")
    system = {"system_prompt_file": str(tmp_path / "system.txt")}
    path = write(tmp_path / "b.jsonl", {"problem": "1", "answer": "2"})
    assert seen(load("Problems", path, **system), tokenizer) == ["*-*1="]
    path = write(tmp_path / "c.jsonl", {"problem": "1", "answer": "2"}, with_system)
    with pytest.raises(
        ConfigError, match=r"line 2: it has a system message, and the config's system prompt is another"
    ):
        load("Problems", path, **system)


def test_a_longer_conversation_is_refused_with_its_place(tmp_path):
    system, turns = ("system", "s"), (("user", "u1"), ("assistant", "a"), ("user", "u2"))
    records = [chat(system, *turns), chat(("user", "u1")), chat(*turns), chat(system, ("assistant", "a")), chat(system)]
    path = write(tmp_path / "a.jsonl", *({"problem": one, "answer": "2"} for one in records))
    with pytest.raises(ConfigError) as caught:
        load("Problems", path)
    said = str(caught.value)
    assert "line 1, line 3: it has 3 messages beside the system's, and NeMo-RL takes one" in said
    assert "line 4: its last message is of the role 'assistant'" in said
    assert "line 5: its last message is of the role 'system'" in said
    assert "line 2" not in said


def data_block(path, **keys):
    return {"max_input_seq_length": 5, "train": {"dataset_name": f"{HERE}.Problems", "data_path": path}} | keys


@pytest.fixture
def lengths(tmp_path):
    """Prompts of 3, 4 and 9 tokens with the template's two; NeMo-RL cuts 5 and more."""
    return write(tmp_path / "a.jsonl", *({"problem": "1" * length, "answer": length} for length in (1, 7, 2)))


NO_VALIDATION = {"max_val_samples": 0, "val_batch_size": 0, "val_period": 0, "val_at_start": False, "val_at_end": False}


def set_up(tokenizer, data, grpo=NO_VALIDATION):
    def setup(*parts):
        return (*setup_response_data(parts[0], parts[1]), {}, {})

    return plugin.setup_data(setup, tokenizer, data, {}, grpo)


def test_long_prompts_are_an_error_that_counts_them(lengths, tokenizer):
    said = r"1 of the 3 prompts of data.train have 5 tokens or more, the longest 9; .*, or data.overlong_prompts to"
    with pytest.raises(ConfigError, match=said):
        set_up(tokenizer, data_block(lengths))


def test_long_prompts_are_skipped_and_counted_or_left_to_nemo_rl(lengths, tokenizer, capsys):
    train, validation, *_ = set_up(tokenizer, data_block(lengths, overlong_prompts="skip", validation=None))
    assert [train[place]["loss_multiplier"] for place in range(len(train))] == [1.0, 1.0]
    assert validation is None
    printed = capsys.readouterr().out
    assert "qarl: data: train: 2 problems, 1 with 5 tokens or more (at most 9) skipped" in printed
    assert "qarl: a prompt\n*1=\nits answer\n1\n" in printed
    train, *_ = set_up(tokenizer, data_block(lengths, overlong_prompts="mask"))
    assert [train[place]["loss_multiplier"] for place in range(len(train))] == [1.0, 0.0, 1.0]


def test_fewer_prompts_than_a_step_takes_are_an_error(lengths, tokenizer):
    """NeMo-RL drops a batch that is not whole, and would end without a step once all workers have started."""
    data = data_block(lengths, overlong_prompts="skip")
    said = r"data.train has 2 prompts, and grpo.num_prompts_per_step takes 3 at once.*set grpo.num_prompts_per_step to "
    with pytest.raises(ConfigError, match=said + "at most 2"):
        set_up(tokenizer, data, NO_VALIDATION | {"num_prompts_per_step": 3})
    set_up(tokenizer, data, NO_VALIDATION | {"num_prompts_per_step": 2})
    dynamic = {"num_prompts_per_step": 2, "use_dynamic_sampling": True, "batch_multiplier": 2}
    with pytest.raises(ConfigError, match=r"has 2 prompts, .* takes 4 at once"):
        set_up(tokenizer, data, NO_VALIDATION | dynamic)


def test_validation_prompts_are_looked_at_too(lengths, tokenizer):
    data = data_block(lengths, validation={"dataset_name": f"{HERE}.Problems", "data_path": lengths})
    data["train"]["split"] = "train[:1]"
    with pytest.raises(ConfigError, match=r"1 of the 3 prompts of data.validation"):
        set_up(tokenizer, data)
    del data["train"][0]["split"]
    with pytest.raises(
        ConfigError, match=r"1 of the 3 prompts of data.train .*\n  1 of the 3 prompts of data.validation"
    ):
        set_up(tokenizer, data)


def test_two_data_sets_of_one_file_have_their_own_prompts(lengths, tmp_path, tokenizer):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(name[0] + "{}")
    sets = [
        {"dataset_name": f"{HERE}.Problems", "data_path": lengths, "prompt_file": str(tmp_path / f"{name}.txt")}
        for name in ("one", "two")
    ]
    train, *_ = set_up(tokenizer, {"max_input_seq_length": 99, "train": sets})
    assert [train[place]["message_log"][0]["content"] for place in (0, 3)] == ["*o1=", "*t1="]


def test_a_validation_tells_what_it_does_not_ask(lengths, tokenizer, capsys):
    own = {"dataset_name": f"{HERE}.Problems", "data_path": lengths}
    grpo = {"val_period": 5, "val_at_start": False, "val_at_end": False, "max_val_samples": 5, "val_batch_size": 2}

    def told(**changes):
        validation = [dict(own), own | {"split": "train[1:]"}, dict(own)]
        data = {"max_input_seq_length": 99, "train": dict(own), "validation": validation}
        set_up(tokenizer, data, grpo=grpo | changes)
        return capsys.readouterr().out

    assert "qarl: data: validation asks 4 of 8 problems, none of " in told()
    assert "a.jsonl-train#3; for all set grpo.max_val_samples=8\n" in told()
    assert "validation asks" not in told(max_val_samples=8)
    assert "validation asks" not in told(val_period=0)


@pytest.mark.slow
def test_rewards_of_ones_own_reach_nemo_rl(tmp_path, tokenizer, monkeypatch):
    ray = pytest.importorskip("ray")
    (tmp_path / "nemo_rewards.py").write_text(
        "def score(response, answer, record):\n    return len(response) + record['level']\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    path = write(tmp_path / "a.jsonl", *({"problem": "1", "answer": "2", "level": 10 * n} for n in range(3)))
    data = data_block(path)
    data["train"]["reward_function"] = "nemo_rewards:score"
    env = {"reward_function": {"num_workers": 2}}
    plugin.register()
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        train, _, task_to_env, _ = plugin.setup_data(setup_response_data, tokenizer, data, env, NO_VALIDATION)
        (environment,) = task_to_env.values()
        logs = [[{"role": "user", "content": "1"}, {"role": "assistant", "content": "x" * n}] for n in range(3)]
        metadata = [train[place]["extra_env_info"] for place in range(3)]
        answered = ray.get(environment.step.remote(logs, metadata))
        assert answered.rewards.tolist() == [0.0, 11.0, 22.0]
        assert answered.terminateds.tolist() == [1.0] * 3
        with pytest.raises(ray.exceptions.RayTaskError, match=r"reward function nemo_rewards:score failed .* KeyError"):
            ray.get(environment.step.remote(logs[:1], [{"ground_truth": "2"}]))
    finally:
        ray.shutdown()
