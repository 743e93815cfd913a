"""A dataset in OpenR1-Math-46K's fields, written here and read with the real loader."""

import datasets
import pytest

from qarl_nemo.train.config import HfData
from qarl_nemo.train.rollouts import encode_prompts
from qarl_nemo.train.tasks import Task, TaskSource, read_huggingface
from qarl_nemo.train.tokenizer import character_tokenizer

SYSTEM = "Reason step by step."
PROBLEMS = [("Compute $1+1$.", "2"), ("Halve $1$.", r"\frac{1}{2}"), ("Name a prime above 2.", "3")]
TEMPLATE = (
    "{% for message in messages %}{{ '*' if message.role == 'user' else '-' }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def record(problem: str, answer: str, index: int) -> dict:
    return {
        "data_source": "MATH-500",
        "prompt": [{"content": SYSTEM, "role": "system"}, {"content": problem, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
    }


def expected_task(problem: str, answer: str) -> Task:
    return Task(({"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}), answer)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def dataset():
    return datasets.Dataset.from_list([record(*pair, index) for index, pair in enumerate(PROBLEMS)])


@pytest.fixture(params=["parquet", "jsonl", "directory"])
def written(request, dataset, tmp_path):
    """The same records as one file, or as a dataset directory."""
    path = tmp_path / ("data" if request.param == "directory" else f"openr1.{request.param}")
    if request.param == "jsonl":
        dataset.to_json(path)
    elif request.param == "parquet":
        dataset.to_parquet(path)
    else:
        path.mkdir()
        dataset.to_parquet(path / "train.parquet")
    return str(path)


def test_messages_and_ground_truth_are_read(written):
    assert read_huggingface(written, "train") == [expected_task(*pair) for pair in PROBLEMS]


def test_a_part_of_a_split_can_be_held_out(written):
    config = HfData(source="huggingface", path=written, train_split="train[1:]", validation_split="train[:1]")
    source = TaskSource(config, seed=0)
    assert source.validation(10) == [expected_task(*PROBLEMS[0])]
    assert {task.answer for task in source.train(1, 2)} == {PROBLEMS[1][1], "3"}


def test_every_missing_column_is_named(dataset, tmp_path):
    path = str(tmp_path / "bare.parquet")
    dataset.remove_columns(["prompt", "reward_model"]).to_parquet(path)
    with pytest.raises(ValueError, match=r"lacks \['prompt', 'reward_model'\]; it has \['data_source'"):
        read_huggingface(path, "train")


def test_every_record_without_its_nested_fields_is_named(tmp_path):
    good = record(*PROBLEMS[0], 0)
    no_truth = good | {"reward_model": {"ground_truth": None, "style": "rule"}}
    no_struct = good | {"reward_model": None}
    path = str(tmp_path / "bad.parquet")
    datasets.Dataset.from_list([good, no_truth, no_struct, good]).to_parquet(path)
    with pytest.raises(ValueError, match=r"every record needs .*`reward_model.ground_truth`") as raised:
        read_huggingface(path, "train")
    message = str(raised.value)
    assert [number for number in range(4) if f"record {number}:" in message] == [1, 2]


def test_a_missing_file_and_an_unknown_split_are_named(dataset, tmp_path):
    with pytest.raises(ValueError, match=r"data file .*nowhere.parquet does not exist"):
        read_huggingface(str(tmp_path / "nowhere.parquet"), "train")
    (tmp_path / "data").mkdir()
    dataset.to_parquet(tmp_path / "data" / "train.parquet")
    with pytest.raises(ValueError, match="test"):
        read_huggingface(str(tmp_path / "data"), "test")


def test_a_dataset_that_cannot_be_reached_is_one_line_with_the_fix(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"dataset nobody/nothing, split 'train', cannot be loaded: .* set data.path"):
        read_huggingface("nobody/nothing", "train")


def test_messages_go_through_the_tokenizers_chat_template():
    tokenizer = character_tokenizer()
    task = Task(({"role": "system", "content": "12"}, {"role": "user", "content": "3+4"}), "7")
    with pytest.raises(ValueError, match="no chat_template"):
        encode_prompts([task], tokenizer)
    tokenizer.chat_template = TEMPLATE
    assert [tokenizer.decode(ids) for ids in encode_prompts([task, Task("5", "5")], tokenizer)] == ["-12*3+4=", "5"]
