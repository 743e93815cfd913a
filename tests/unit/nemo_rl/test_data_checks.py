"""The `data:` block is checked before Ray starts: keys that nothing would read, values, files and environments."""

import sys
from types import SimpleNamespace

import pytest

from qarl_nemo.nemo_rl.checks import data_files
from qarl_nemo.nemo_rl.checks.data import data_conflicts
from qarl_nemo.nemo_rl.checks.data_files import file_hints
from qarl_nemo.nemo_rl.data_sets import data_sets, name_data_sets
from support.files import write_jsonl

PROBLEMS = "qarl_nemo.nemo_rl.problems"
BENCHMARK = "qarl_nemo.nemo_rl.benchmark.Benchmark"
GSM8K = {"dataset_name": f"{PROBLEMS}.GSM8K", "env_name": "math"}
MATH500 = {"dataset_name": BENCHMARK, "benchmark": "math500", "env_name": "qarl_benchmark"}
MATH = {"math": {"num_workers": 8}}
WORKERS = MATH | {"qarl_benchmark": {"num_workers": 8}}


def conflicts(env=WORKERS, **data) -> list[str]:
    return data_conflicts({"data": data, "env": env})


@pytest.fixture(autouse=True)
def on_a_host_with_gpus(monkeypatch):
    monkeypatch.setattr(data_files, "first_gpu_gib", lambda: 79.0)


@pytest.fixture
def file(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", [{"problem": "p", "answer": "1"}])


def test_what_is_right_is_not_mentioned(file):
    default = {"prompt_file": file, "system_prompt_file": None, "processor": "math_hf_data_processor"}
    train = [GSM8K | {"data_path": file, "answer_format": "hash", "split_validation_size": 0, "seed": 42}, GSM8K]
    validation = [MATH500, MATH500 | {"data_path": file, "repeat": 4}]
    assert conflicts(train=train, validation=validation, default=default, overlong_prompts="skip") == []
    # Sets of NeMo-RL's own, and of others, have other keys.
    assert conflicts(train={"dataset_name": "AIME2024", "repeat": 3}, default={"num_frames": 2}) == []
    assert conflicts() == conflicts(train=None) == []


def test_a_misspelt_key_names_the_nearest_one():
    (line,) = conflicts(train=GSM8K | {"answer_fromat": "hash"})
    assert line.startswith("data.train.answer_fromat: this data set does not read it; did you mean 'answer_format'?")
    (line,) = conflicts(validation=[MATH500, MATH500 | {"repat": 4}])
    assert line.startswith("data.validation.1.repat: this data set does not read it; did you mean 'repeat'? legal here")
    (line,) = conflicts(train=GSM8K, default={"inptu_key": "question"})
    assert line.startswith("data.default.inptu_key: this data set does not read it; did you mean 'input_key'?")
    # Other sets may read it, and a null takes back what a recipe says.
    assert conflicts(train=GSM8K, validation={"dataset_name": "AIME2024"}, default={"variant": "2024"}) == []
    assert conflicts(train=GSM8K | {"answer_fromat": None}) == []


def test_a_key_of_the_embedded_engine_or_of_benchmarks_names_its_place():
    lines = conflicts(train=GSM8K | {"prompt_template": "{problem}", "system_prompt": "x", "benchmark": "math500"})
    assert [line.partition(":")[0] for line in lines] == [
        f"data.train.{key}" for key in ("prompt_template", "system_prompt", "benchmark")
    ]
    assert "set prompt_file to a text file, in which {} stands for the problem" in lines[0]
    assert "set system_prompt_file to" in lines[1]
    assert f"a key of {BENCHMARK}" in lines[2]
    (line,) = conflicts(train=GSM8K | {"_override_": True})
    assert line.startswith("data.train._override_: NeMo-RL replaces only top-level blocks; set data._override_=true")


def test_a_key_that_is_nearly_overlong_prompts_is_refused():
    for key in ("overlong_prompt", "over_long_prompts", "overlong"):
        assert conflicts(**{key: "skip"}) == [f"data.{key}: nothing reads this key; set data.overlong_prompts"]
    assert conflicts(max_input_seq_length=512, shuffle=True) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"benchmark": "livecodebench"}, "data.validation.benchmark=livecodebench: livecodebench is not supported"),
        ({"benchmark": "ood"}, "data.validation.benchmark=ood: benchmark 'ood' stands for several"),
        ({"benchmark": None}, "data.validation.benchmark is missing; legal: aime24, "),
        ({"repeat": 0}, "data.validation.repeat=0: set a whole number from 1"),
        ({"repeat": -3}, "data.validation.repeat=-3: set a whole number from 1"),
        ({"repeat": None}, "data.validation.repeat=null: set a whole number from 1"),
        ({"env_name": None}, "data.validation.env_name=null: the answers of a benchmark are checked in"),
        ({"env_name": "math"}, "data.validation.env_name=math: the answers of a benchmark are checked in"),
        ({"data_path": "/nope.jsonl"}, "data.validation.data_path: data file /nope.jsonl does not exist"),
    ],
)
def test_a_benchmark_that_could_not_be_asked_is_refused(changes, said):
    (line,) = conflicts(validation=MATH500 | changes)
    assert line.startswith(said)


def test_the_environment_of_benchmarks_needs_workers_where_it_is_used():
    said = ["env.qarl_benchmark.num_workers=null: set a whole number from 1"]
    assert conflicts(env={"qarl_benchmark": {}}, validation=MATH500) == said
    assert conflicts(env={}, validation=MATH500) == said
    assert conflicts(env=MATH, train=GSM8K) == []
    # A reward function replaces the environment, the default's only where the set has none.
    own = {"reward_function": "qarl_nemo.verify:reward"}
    assert conflicts(env={}, validation=MATH500 | own) == []
    bare = {key: value for key, value in MATH500.items() if key != "env_name"}
    assert conflicts(env={}, validation=bare, default=own) == []
    assert conflicts(env={}, validation=MATH500, default=own) == said


def test_the_environment_of_benchmarks_is_for_no_other_data_set():
    (line,) = conflicts(train=GSM8K | {"env_name": "qarl_benchmark"})
    assert line.startswith("data.train.env_name=qarl_benchmark: that environment checks the answers of")
    bare = {"dataset_name": GSM8K["dataset_name"]}
    (line,) = conflicts(train=bare, default={"env_name": "qarl_benchmark"})
    assert line.startswith("data.default.env_name=qarl_benchmark: ")
    own = {"reward_function": "qarl_nemo.verify:reward"}
    assert conflicts(train=bare | own, default={"env_name": "qarl_benchmark"}) == []


def test_an_environment_that_is_not_configured_names_the_nearest_one():
    sets = {
        "train": [GSM8K | {"env_name": "mathh"}, GSM8K],
        "validation": {"dataset_name": "AIME2024", "env_name": None},
    }
    lines = conflicts(env=WORKERS | {"reward_function": {"num_workers": 2}, "should_use_nemo_gym": False}, **sets)
    assert lines == [
        "data.train.0.env_name=mathh: not an environment of the `env` block; did you mean 'math'? legal here: math, "
        "qarl_benchmark",
        "data.validation.env_name=null: not an environment of the `env` block; legal here: math, qarl_benchmark",
    ]
    # NeMo-RL starts that of the default even where no set has it.
    (line,) = conflicts(train=GSM8K, default={"env_name": "code"})
    assert line.startswith("data.default.env_name=code: ")


def test_a_data_set_of_ours_is_rewarded_by_a_function_or_in_an_environment():
    own = {"reward_function": "qarl_nemo.verify:reward"}
    (line,) = conflicts(train=GSM8K | own)
    assert line.startswith(
        "data.train.env_name=math: data.train.reward_function=qarl_nemo.verify:reward rewards in its"
    )
    # A recipe takes back what it builds on, a default is for the other sets, and a saved config has the function's own.
    saved = "reward_function qarl_nemo.verify:reward"
    for name in (None, saved):
        assert conflicts(env=WORKERS | {saved: {}}, train=GSM8K | own | {"env_name": name}) == []
    bare = {"dataset_name": GSM8K["dataset_name"]}
    assert conflicts(train=bare | own, default={"env_name": "math"}) == []
    assert conflicts(train=bare, default={"env_name": "math"} | own) == []
    assert conflicts(train=GSM8K, default=own) == []


def test_the_default_counts_as_if_it_stood_in_every_set(file):
    own = {"dataset_name": f"{PROBLEMS}.Problems"}
    assert conflicts(train={"data_path": file}, default=own) == []
    (line,) = conflicts(train=[{"data_path": file}, {}], default=own)
    assert line.startswith("data.train.1.data_path is missing: a local file or folder, or a name on the hub; without")
    assert "GSM8K, MATH, OpenR1Math46K" in line
    (line,) = conflicts(train={"data_path": file, "answer_format": "hashh"}, default=own)
    assert line.startswith("data.train: answer_format: Input should be")
    # What is wrong with the default is told once.
    lines = conflicts(train=[GSM8K, GSM8K], default={"data_path": "/nope.jsonl"})
    assert [line.partition(";")[0] for line in lines] == [
        "data.default.data_path: data file /nope.jsonl does not exist"
    ]


@pytest.mark.parametrize("name", [f"{PROBLEMS}.GSMK", "qarl_nemo.nemo_rl.GSM8K", "qarl_nemo.nemo_rl.Benchmark"])
def test_an_unknown_class_of_this_package_names_the_legal_ones(name):
    (line,) = conflicts(train={"dataset_name": name})
    assert line.startswith(f"data.train.dataset_name={name}: no such data set; did you mean 'qarl_nemo.nemo_rl.")
    assert line.endswith(BENCHMARK)


def test_files_that_are_not_there_are_told_and_names_on_the_hub_are_not(tmp_path, file):
    missing = str(tmp_path / "nope.txt")
    lines = conflicts(
        train=[GSM8K | {"data_path": str(tmp_path / "nope.jsonl")}, {"dataset_name": "AIME2024"}],
        validation={"dataset_name": "ResponseDataset", "data_path": str(tmp_path / "nope.json")},
        default={"prompt_file": missing, "system_prompt_file": file},
    )
    assert [line.partition(" ")[0] for line in lines] == [
        f"data.default.prompt_file={missing}:",
        "data.train.0.data_path:",
        f"data.validation.data_path={tmp_path / 'nope.json'}:",
    ]
    hub = [{"dataset_name": f"{PROBLEMS}.Problems", "data_path": "someone/problems"}, GSM8K]
    other = {"dataset_name": "ResponseDataset", "data_path": "someone/problems"}
    # Only the launcher resolves the references of a recipe.
    reference = GSM8K | {"data_path": "${oc.env:PWD}/a.jsonl", "prompt_file": "${oc.env:PWD}/a.txt"}
    assert conflicts(train=[*hub, reference], validation=[other, other | {"data_path": file}]) == []


def test_a_machine_without_gpus_refuses_only_what_no_other_machine_would_have(tmp_path, file, monkeypatch):
    elsewhere, here = str(tmp_path / "mount" / "a.jsonl"), "nowhere/a.jsonl"
    data = {
        "train": [GSM8K | {"data_path": elsewhere}, GSM8K | {"data_path": here}],
        "validation": [MATH500 | {"data_path": elsewhere}, {"dataset_name": "ResponseDataset", "data_path": elsewhere}],
        "default": {"prompt_file": elsewhere, "system_prompt_file": file},
    }
    assert len(conflicts(**data)) == 5
    assert file_hints(data) == []
    monkeypatch.setattr(data_files, "first_gpu_gib", lambda: None)
    assert [line.partition(":")[0] for line in conflicts(**data)] == ["data.train.1.data_path"]
    hints = file_hints(data)
    assert [line.partition(":")[0].partition("=")[0] for line in hints] == [
        "data.default.prompt_file", "data.train.0.data_path", "data.validation.0.data_path",
        "data.validation.1.data_path",
    ]  # fmt: skip
    assert hints[0].endswith("This machine has no GPU, so the run is not refused; it needs the file where it starts")
    # A file of another kind, or a folder in a file's place, is there, and wrong everywhere.
    folder = GSM8K | {"prompt_file": str(tmp_path)}
    assert len(conflicts(train=folder)) == 1
    assert file_hints({"train": folder}) == file_hints({"train": GSM8K | {"data_path": file}}) == []


def test_data_sets_have_names_of_their_own(file):
    own = {"dataset_name": f"{PROBLEMS}.Problems", "data_path": file}
    data = {
        "train": [
            dict(GSM8K),
            GSM8K | {"split": "test"},
            GSM8K | {"data_path": file},
            own,
            {"dataset_name": "AIME2024"},
        ],
        "validation": [dict(MATH500), MATH500 | {"prompt_file": None}, {}],
        "default": {"dataset_name": f"{PROBLEMS}.GSM8K"},
    }
    name_data_sets(data)
    # As a saved config does, which another run may start from.
    assert conflicts(**data) == []
    folder = file.split("/")[-2]
    assert [dataset.get("task_name") for _, dataset, _ in data_sets(data)] == [
        "gsm8k-train", "gsm8k-test", "gsm8k-train#2", f"{folder}-a.jsonl-train", None,
        "math500", "math500#2", "gsm8k-train#3",
    ]  # fmt: skip


def test_a_prompt_file_of_nemo_rls_own_recipes_is_named_by_its_whole_path(monkeypatch, tmp_path):
    prompt = tmp_path / "examples" / "prompts" / "cot.txt"
    prompt.parent.mkdir(parents=True)
    prompt.write_text("{}")
    monkeypatch.setenv("NEMO_RL_ROOT", str(tmp_path))
    (line,) = conflicts(train=GSM8K | {"prompt_file": "examples/prompts/cot.txt"})
    assert line.startswith("data.train.prompt_file=examples/prompts/cot.txt: there is no such file here")
    assert line.endswith(f"set NeMo-RL's, {prompt}, one of your own, or null for none")
    (line,) = conflicts(train=GSM8K | {"prompt_file": "examples/prompts/nothing.txt"})
    assert line.endswith("there is no such file; set one that is there, or null for none")


def test_a_set_that_nemo_rl_does_not_have_names_those_that_it_has(monkeypatch):
    # Without NeMo-RL nobody knows its names.
    assert conflicts(train={"dataset_name": "nosuch"}) == []
    registry = SimpleNamespace(DATASET_REGISTRY={"AIME2024": None, "ResponseDataset": None})
    monkeypatch.setitem(sys.modules, "nemo_rl.data.datasets.response_datasets", registry)
    (line,) = conflicts(train={"dataset_name": "AIME2042"}, validation={"dataset_name": "my.own.Set"})
    assert line.startswith("data.train.dataset_name=AIME2042: no such data set; did you mean 'AIME2024'? legal here: A")
    assert line.endswith(f"or a class, as {PROBLEMS}.Problems")
    (line,) = conflicts(train={}, default={"dataset_name": "nosuch"})
    assert line.startswith("data.default.dataset_name=nosuch: no such data set; legal here: AIME2024, ResponseDataset")
    assert conflicts(train={"dataset_name": "AIME2024"}, validation=GSM8K) == []
