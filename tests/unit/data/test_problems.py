"""Tasks from records: named sets and fields of one's own, templates, and every record that is none, listed."""

import json
import sys
from pathlib import Path

import datasets
import pytest

from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.problems import Task, read_tasks
from qarl_nemo.data.records import read_records
from support.files import write_jsonl

SYSTEM = "Reason step by step."
PROBLEMS = [("Compute $1+1$.", "2"), ("Halve $1$.", r"\frac{1}{2}"), ("Name a prime above 2.", "3")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def openr1_record(problem: str, answer: str, index: int) -> dict:
    return {
        "data_source": "MATH-500",
        "prompt": [{"content": SYSTEM, "role": "system"}, {"content": problem, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
    }


def openr1_task(problem: str, answer: str) -> Task:
    return Task(({"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}), answer)


@pytest.fixture
def openr1():
    return datasets.Dataset.from_list([openr1_record(*pair, index) for index, pair in enumerate(PROBLEMS)])


@pytest.fixture(params=["parquet", "jsonl", "directory", "hub's directory"])
def written(request, openr1, tmp_path):
    """The same records as one file, or as a folder whose files are called as splits, or as the hub calls them."""
    path = tmp_path / (f"openr1.{request.param}" if request.param in ("parquet", "jsonl") else "folder")
    if request.param == "jsonl":
        openr1.to_json(path)
    elif request.param == "parquet":
        openr1.to_parquet(path)
    else:
        path.mkdir()
        openr1.to_parquet(path / ("train.parquet" if request.param == "directory" else "train-00000-of-00001.parquet"))
    return str(path)


def test_messages_and_nested_answers_are_read(written):
    found = read_tasks(DatasetConfig(dataset_name="openr1_math", data_path=written))
    assert found == [openr1_task(*pair) for pair in PROBLEMS]
    own = DatasetConfig(data_path=written, input_key="prompt", output_key="reward_model.ground_truth")
    assert read_tasks(own) == found


@pytest.mark.parametrize(
    ("split", "kept"),
    [("train[:1]", [0]), ("train[1:]", [1, 2]), ("train[-34%:]", [2]), ("train[:1]+train[2:]", [0, 2])],
)
def test_a_part_of_a_split_can_be_held_out(written, split, kept):
    config = DatasetConfig(dataset_name="openr1_math", data_path=written, split=split)
    assert read_tasks(config) == [openr1_task(*PROBLEMS[number]) for number in kept]


def test_gsm8k_and_math_know_their_fields_and_answers(tmp_path):
    gsm8k = write_jsonl(tmp_path / "train.jsonl", [{"question": "How many?", "answer": "2*36=72\n#### 1,072"}])
    assert read_tasks(DatasetConfig(dataset_name="gsm8k", data_path=gsm8k)) == [Task("How many?", "1072")]
    # The folder that holds the file of the split is as good as the file.
    assert read_tasks(DatasetConfig(dataset_name="gsm8k", data_path=str(tmp_path))) == [Task("How many?", "1072")]
    write_jsonl(tmp_path / "test.jsonl", [{"question": "How few?", "answer": "#### 2"}])
    both = DatasetConfig(dataset_name="gsm8k", data_path=str(tmp_path), split="train[:1]+test")
    assert [task.answer for task in read_tasks(both)] == ["1072", "2"]
    records = [{"problem": "Halve 1.", "level": "Level 1", "solution": r"It is $\boxed{\frac12}$.", "type": "Algebra"}]
    math = write_jsonl(tmp_path / "math.jsonl", records)
    assert read_tasks(DatasetConfig(dataset_name="math", data_path=math)) == [Task("Halve 1.", r"\frac12")]
    # Of a copy that holds the answers alone.
    records = [{"problem": "Halve 1.", "answer": r"\frac12"}]
    math = write_jsonl(tmp_path / "answers.jsonl", records)
    config = DatasetConfig(dataset_name="math", data_path=math, output_key="answer", answer_format="plain")
    assert read_tasks(config) == [Task("Halve 1.", r"\frac12")]


def test_a_folder_without_data_is_told_what_it_needs(tmp_path, monkeypatch):
    (tmp_path / "readme.md").touch()
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path), "."):
        with pytest.raises(ValueError, match=rf"^dataset {tmp_path}, .*; a folder holds train.jsonl, or is a copy"):
            read_tasks(DatasetConfig(dataset_name="gsm8k", data_path=path))


def test_a_folder_like_the_hubs_has_the_named_subset(tmp_path):
    (tmp_path / "main").mkdir()
    (tmp_path / "socratic").mkdir()
    for subset, answer in (("main", "#### 1"), ("socratic", "How? ** #### 2")):
        record = {"question": "q", "answer": answer}
        datasets.Dataset.from_list([record]).to_parquet(tmp_path / subset / "train-00000-of-00001.parquet")
    configs = [{"config_name": name, "data_dir": name} for name in ("main", "socratic")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    config = DatasetConfig(dataset_name="gsm8k", data_path=str(tmp_path))
    assert read_tasks(config) == [Task("q", "1")]
    assert read_tasks(config.model_copy(update={"subset": "socratic"})) == [Task("q", "2")]
    with pytest.raises(ValueError, match=r"cannot be loaded: .*socratik.* Available: \['main', 'socratic'\]$"):
        read_tasks(config.model_copy(update={"subset": "socratik"}))
    (tmp_path / "README.md").unlink()
    assert read_tasks(config) == [Task("q", "1")], "without its table of contents the folder's name tells"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.csv", 'question,answer\n"a,1\n', "data file .*a.csv is not CSV: unexpected end of data"),
        ("a.csv", "question,answer\na,1,2\n", "a.csv, record 1: it has more cells than the first line names"),
        ("a.json", '[{"question": 1', "data file .*a.json is not JSON: Expecting"),
        ("a.json", '[{"question": 1,\n"answer": ', "data file .*a.json is not JSON: Expecting"),
        ("a.json", r'[{"problem": "\ud800", "answer": "1"}]', "data file .*a.json is not JSON: .*surrogates"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(name, text, why, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=why):
        read_tasks(DatasetConfig(dataset_name="gsm8k", data_path=str(tmp_path / name)))


def test_a_json_file_says_what_its_lines_would_say(tmp_path):
    """`datasets` makes a float of 12345678901234567890, and a time of 2020-01-01."""
    answers = [12345678901234567890, 0.5, "2020-01-01", "2021-05-06"]
    records = [{"problem": "When?", "answer": answer} for answer in answers]
    lines = write_jsonl(tmp_path / "a.jsonl", records)
    tasks = read_tasks(DatasetConfig(data_path=lines))
    assert [task.answer for task in tasks] == [str(answer) for answer in answers]
    listed, named_json = tmp_path / "listed.json", tmp_path / "lines.json"
    listed.write_text(json.dumps(records, indent=1))
    named_json.write_text("\n" + Path(lines).read_text())
    for path in (listed, named_json):
        assert read_tasks(DatasetConfig(data_path=str(path))) == tasks
        assert read_tasks(DatasetConfig(data_path=str(path), split="train[1:3]")) == tasks[1:3]
    rows = tmp_path / "rows.csv"
    rows.write_text("problem,answer\r\n" + "".join(f"When?,{answer}\r\n" for answer in answers))
    assert read_tasks(DatasetConfig(data_path=str(rows))) == tasks
    assert read_tasks(DatasetConfig(data_path=str(rows), split="train[1:3]")) == tasks[1:3]
    listed.write_text(json.dumps(records[0]))
    assert read_tasks(DatasetConfig(data_path=str(listed))) == tasks[:1]


def test_the_template_and_the_system_prompt_are_put_around_text_and_messages(tmp_path):
    records = [{"problem": "1+{x}", "answer": 2}, {"problem": [{"role": "user", "content": "q"}], "answer": 0.5}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    plain = DatasetConfig(data_path=path, prompt_template="Solve {problem}. {}")
    assert read_tasks(plain) == [
        Task("Solve 1+{x}. {}", "2"),
        Task(({"role": "user", "content": "Solve q. {}"},), "0.5"),
    ]
    system = {"role": "system", "content": SYSTEM}
    with_system = plain.model_copy(update={"system_prompt": SYSTEM})
    assert [task.prompt for task in read_tasks(with_system)] == [
        (system, {"role": "user", "content": "Solve 1+{x}. {}"}),
        (system, {"role": "user", "content": "Solve q. {}"}),
    ]


def test_two_system_messages_are_refused(openr1, tmp_path):
    openr1.to_json(tmp_path / "a.jsonl")
    config = DatasetConfig(dataset_name="openr1_math", data_path=str(tmp_path / "a.jsonl"), system_prompt="Think.")
    with pytest.raises(ValueError, match=r"line 1, line 2, line 3: it has a system message, and"):
        read_tasks(config)


def test_a_conversation_ends_with_the_users_message(tmp_path):
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"problem": asked[:length], "answer": 1} for length in (1, 2, 3)])
    with pytest.raises(
        ValueError, match=r"; line 2: its last message is of the role 'assistant', and has to be the us"
    ):
        read_tasks(DatasetConfig(data_path=path))
    path = write_jsonl(tmp_path / "b.jsonl", [{"problem": asked, "answer": 1}])
    (task,) = read_tasks(DatasetConfig(data_path=path))
    assert task.prompt == tuple(asked)


@pytest.mark.parametrize(("answer_format", "mark"), [("hash", "####"), ("boxed", r"\boxed{}")])
def test_an_answer_without_its_mark_names_the_other_formats(answer_format, mark, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"problem": "p", "answer": "1"}])
    with pytest.raises(ValueError, match="line 1: its answer has no ") as raised:
        read_tasks(DatasetConfig(data_path=path, answer_format=answer_format))
    others = " or ".join(one for one in ("plain", "hash", "boxed") if one != answer_format)
    said = f"its answer has no {mark}, which answer_format={answer_format} reads: set answer_format to {others}"
    assert str(raised.value).endswith(said)
    assert read_tasks(DatasetConfig(data_path=path, answer_format="plain")) == [Task("p", "1")]


def test_the_whole_record_is_kept_for_a_reward_function_alone(tmp_path, monkeypatch):
    (tmp_path / "level_rewards.py").write_text("def score(response, answer, record):\n    return record['level']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    path = write_jsonl(tmp_path / "a.jsonl", [{"problem": "p", "answer": "1", "level": 5}])
    (task,) = read_tasks(DatasetConfig(data_path=path, reward_function="level_rewards:score"))
    assert task.reward_function("", task.answer, task.record) == 5.0
    (task,) = read_tasks(DatasetConfig(data_path=path))
    assert (task.reward_function, task.record) == (None, {})


def test_every_unusable_line_is_listed(tmp_path):
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"problem": "p", "answer": "1"})
    lines = [good, '{"problem": "p"', '{"problem": "p"}', '{"answer": "1"}', '{"problem": 3, "answer": "1"}', "[1]",
             '{"problem": "p", "answer": null}', '{"problem": "p", "answer": true}', good,
             '{"problem": [{"role": "user"}], "answer": 1}', '{"problem": [], "answer": 1}',
             '{"problem": " ", "answer": 1}',
             '{"problem": [{"role": "user", "content": ""}], "answer": 1}', '{"problem": "p", "answer": NaN}',
             r'{"problem": "half of \uD83D", "answer": 1}']  # fmt: skip
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"bad.jsonl: every record needs the fields `problem` .* `answer`") as raised:
        read_tasks(DatasetConfig(data_path=str(path)))
    message = str(raised.value)
    assert [number for number in range(1, 16) if f"line {number}:" in message] == [*range(2, 9), 10, 11, 13, 14, 15]
    assert "line 12, line 13: the problem is empty" in message
    assert "line 15: UnicodeEncodeError" in message
    assert "line 2: not JSON, column 16: Expecting ',' delimiter" in message
    assert "line 3: no field 'answer' (its fields: problem)" in message
    assert "the answer is None, neither text nor a number" in message
    assert message.endswith("; set input_key and output_key to the fields of problem and answer")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_fields_that_there_are_are_listed(suffix, tmp_path):
    records = datasets.Dataset.from_list([{"question": "q", "answer": "1"}])
    path = tmp_path / f"a.{suffix}"
    records.to_json(path) if suffix == "jsonl" else records.to_parquet(path)
    with pytest.raises(ValueError, match=r"no field 'problem' \(its fields: question, answer\); set input_key"):
        read_tasks(DatasetConfig(data_path=str(path)))
    assert read_tasks(DatasetConfig(data_path=str(path), input_key="question")) == [Task("q", "1")]


def test_every_record_without_its_nested_fields_is_named(tmp_path):
    good = openr1_record(*PROBLEMS[0], 0)
    no_truth = good | {"reward_model": {"ground_truth": None, "style": "rule"}}
    no_struct = good | {"reward_model": None}
    path = str(tmp_path / "bad.parquet")
    datasets.Dataset.from_list([good, no_truth, no_struct, good]).to_parquet(path)
    with pytest.raises(ValueError, match=r"needs the fields .*`reward_model.ground_truth`") as raised:
        read_tasks(DatasetConfig(dataset_name="openr1_math", data_path=path))
    assert [number for number in range(5) if f"record {number}:" in str(raised.value)] == [2, 3]


def test_numbers_of_narrow_columns_are_the_ones_that_were_stored(tmp_path):
    path, numbers = str(tmp_path / "narrow.parquet"), ["250.35", "1234.56", "99.99", "36.6"]
    kind = datasets.Features(
        {
            "problem": datasets.Value("string"),
            "deep": {"answer": datasets.Value("float32")},
            "odd": [datasets.Value("float32")],
        }
    )
    records = [{"problem": "p", "deep": {"answer": float(number)}, "odd": [0.1]} for number in numbers]
    datasets.Dataset.from_list(records, features=kind).to_parquet(path)
    config = DatasetConfig(data_path=path, output_key="deep.answer")
    assert [task.answer for task in read_tasks(config)] == numbers
    assert next(iter(read_records(config)))[1]["odd"] == [0.1]


def test_csv_has_cells_of_any_length_and_each_column_once(tmp_path):
    (tmp_path / "a.csv").write_text(f"problem,answer\n{'x' * 200_000},1\n")
    assert read_tasks(DatasetConfig(data_path=str(tmp_path / "a.csv"))) == [Task("x" * 200_000, "1")]
    # Spreadsheets write columns without a name.
    (tmp_path / "c.csv").write_text("problem,answer,,\n1,2,,\n")
    assert read_tasks(DatasetConfig(data_path=str(tmp_path / "c.csv"))) == [Task("1", "2")]
    (tmp_path / "b.csv").write_text("problem,answer,answer\n1,2,3\n")
    with pytest.raises(ValueError, match="its first line names more than one column 'answer'"):
        read_tasks(DatasetConfig(data_path=str(tmp_path / "b.csv")))


def test_a_long_list_of_unusable_lines_is_counted(tmp_path):
    path = write_jsonl(tmp_path / "bad.jsonl", [{"problem": "p"}] * 25)
    with pytest.raises(ValueError, match=r"line 1, .*, line 20 and 5 more: no field 'answer' \(its") as raised:
        read_tasks(DatasetConfig(data_path=path))
    assert "line 21" not in str(raised.value)


def test_missing_and_empty_data_are_named(openr1, tmp_path):
    for name in ("nowhere.jsonl", "nowhere.parquet"):
        with pytest.raises(ValueError, match=rf"data file .*{name} does not exist"):
            read_tasks(DatasetConfig(data_path=str(tmp_path / name)))
    with pytest.raises(ValueError, match=r"exist; data_path takes train.jsonl and test.jsonl of github.com/"):
        read_tasks(DatasetConfig(dataset_name="gsm8k", data_path=str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(ValueError, match=r"data folder .*nowhere does not exist"):
        read_tasks(DatasetConfig(data_path=str(tmp_path / "nowhere")))
    (tmp_path / "test.txt").touch()
    with pytest.raises(ValueError, match=r"data file .*test.txt is not read; files that are end in .jsonl, .json, "):
        read_tasks(DatasetConfig(data_path=str(tmp_path / "test.txt")))
    for name in ("none.jsonl", "none.json", "none.csv", "none.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"^data file .*{name} is empty$"):
            read_tasks(DatasetConfig(data_path=str(tmp_path / name)))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(
        ValueError, match=r"folder.jsonl, split 'train', cannot be loaded: .*a folder holds train.jsonl"
    ):
        read_tasks(DatasetConfig(data_path=str(tmp_path / "folder.jsonl")))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl.*split 'train' is empty"):
        read_tasks(DatasetConfig(data_path=str(tmp_path / "empty.jsonl")))
    (tmp_path / "data").mkdir()
    openr1.to_parquet(tmp_path / "data" / "train.parquet")
    with pytest.raises(ValueError, match=r"split 'test', cannot be loaded"):
        read_tasks(DatasetConfig(data_path=str(tmp_path / "data"), split="test"))


@pytest.mark.parametrize("split", ["train[1", "train[a:b]", "train[5:]"])
def test_a_part_that_is_none_is_named(split, tmp_path):
    records = [{"problem": "p", "answer": "1"}]
    files = [write_jsonl(tmp_path / "a.jsonl", records), str(tmp_path / "a.parquet")]
    datasets.Dataset.from_list(records).to_parquet(files[1])
    said = r"is empty$|no data!$" if split == "train[5:]" else r"; legal are train, train\[:100\], train\[90%:\]"
    for file in files:
        with pytest.raises(ValueError, match=rf"{file}\b.* split 'train\[.*({said})"):
            read_tasks(DatasetConfig(data_path=file, split=split))


@pytest.mark.parametrize(("name", "hub"), [("gsm8k", "openai/gsm8k"), ("math", "DigitalLearningGmbH/MATH-lighteval")])
def test_a_data_set_that_cannot_be_reached_is_one_line_with_the_fix(name, hub, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    fix = r"without a network, set its data_path to a local file or folder \(.*\)$"
    with pytest.raises(ValueError, match=rf"^dataset {hub}, split 'train', cannot be loaded: .*{fix}"):
        read_tasks(DatasetConfig(dataset_name=name))


def test_files_that_are_not_jsonl_need_the_datasets_library(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"problem": "p", "answer": "1"}])
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(read_tasks(DatasetConfig(data_path=path))) == 1
    with pytest.raises(ImportError, match=r"only .jsonl files are read without the package `datasets`: pip install"):
        read_tasks(DatasetConfig(dataset_name="gsm8k"))


def test_a_file_of_lines_may_be_larger_than_what_is_read_whole(tmp_path, monkeypatch):
    records = [{"problem": f"p{n}", "answer": n} for n in range(10)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    # Of 29 bytes or so a line.
    monkeypatch.setattr("qarl_nemo.files.MAX_TEXT_BYTES", 40)
    tasks = [Task(f"p{n}", str(n)) for n in range(10)]
    assert read_tasks(DatasetConfig(data_path=path)) == tasks
    parts = DatasetConfig(data_path=path, split="train[80%:]+train[:1]")
    assert read_tasks(parts) == [tasks[8], tasks[9], tasks[0]]
    (tmp_path / "a.jsonl").write_text("{}\n" + " " * 41)
    with pytest.raises(ValueError, match=r"a.jsonl: .*, but line 2 is longer than 40 bytes"):
        read_tasks(DatasetConfig(data_path=path))


@pytest.mark.parametrize("name", ["a.json", "a.csv"])
def test_a_file_that_is_read_whole_and_too_large_says_which_are_not(tmp_path, monkeypatch, name):
    monkeypatch.setattr("qarl_nemo.data.records.MAX_TEXT_BYTES", 40)
    (tmp_path / name).write_text("problem,answer" + "1,2\n" * 10)
    with pytest.raises(ValueError, match=rf"{name} has 54 bytes, and .* at most 40 bytes are read; write it as .jsonl"):
        read_tasks(DatasetConfig(data_path=str(tmp_path / name)))


def test_bytes_that_are_no_text_are_named_by_their_place(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"problem": "p", "answer": 1}\r\n' * 1000 + b'"\xff"')
    # 1,000 lines of 31 bytes, and a quote.
    with pytest.raises(ValueError, match=r"not UTF-8: byte 0xff at position 31001, in line 1001; save it as UTF-8"):
        read_tasks(DatasetConfig(data_path=str(tmp_path / "a.jsonl")))


def test_a_line_holds_what_other_readers_call_an_end_of_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"problem": "1\u2028+1", "answer": 2}\n\n', encoding="utf-8")
    assert read_tasks(DatasetConfig(data_path=str(tmp_path / "a.jsonl"))) == [Task("1\u2028+1", "2")]


def test_a_byte_order_mark_before_the_first_line_is_none_of_it(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('\ufeff{"problem": "1+1=", "answer": 2}\n', encoding="utf-8")
    assert read_tasks(DatasetConfig(data_path=str(path))) == [Task("1+1=", "2")]


def test_what_is_quoted_of_a_bad_line_is_short(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{f"field{n}": "x" * 1000 for n in range(1000)}])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("[" * 100_000)
    with pytest.raises(ValueError, match=r"line 1: .*field0, .*line 2: it is nested more than 100") as raised:
        read_tasks(DatasetConfig(data_path=path))
    assert len(str(raised.value)) < 2000


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(ValueError, match="data_path"):
        DatasetConfig(data_path="")
