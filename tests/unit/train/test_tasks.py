"""Problems: generated ones, data sets, and that a step's prompts depend on seed, stream and step alone."""

import random

import pytest

from qarl_nemo.data.config import DatasetsData
from qarl_nemo.train.config import ArithmeticData
from qarl_nemo.train.step_metrics import mean_rewards
from qarl_nemo.train.tasks import TaskSource, arithmetic_tasks, eval_chain
from support.files import write_jsonl


@pytest.fixture
def ten_problems(tmp_path):
    records = [{"problem": f"p{n}", "answer": n} for n in range(10)]
    path = write_jsonl(tmp_path / "ten.jsonl", records)
    return DatasetsData(source="datasets", train={"data_path": path})


@pytest.fixture(params=["arithmetic", "datasets"])
def data(request, ten_problems):
    return ArithmeticData(digits=3) if request.param == "arithmetic" else ten_problems


def test_prompts_depend_on_seed_and_step_alone(data):
    first = TaskSource(data, seed=1)
    in_order = [first.train(step, 4) for step in (1, 2, 3)]
    # another process, which starts at step 3: the same prompts
    assert TaskSource(data, seed=1).train(3, 4) == in_order[2]
    assert [first.train(step, 4) for step in (3, 1)] == [in_order[2], in_order[0]]
    assert in_order[0] != in_order[1]
    assert TaskSource(data, seed=2).train(1, 4) != in_order[0]


def test_a_file_is_not_read_as_several_splits(tmp_path):
    path = write_jsonl(tmp_path / "ten.jsonl", [{"problem": f"p{n}", "answer": n} for n in range(10)])

    def source(train, validation):
        blocks = {"train": {"data_path": path, "split": train}, "validation": {"data_path": path, "split": validation}}
        return TaskSource(DatasetsData(source="datasets", **blocks), seed=0)

    for split in ("test", "test[:1]", "tset+train"):
        with pytest.raises(ValueError, match=r"ten.jsonl is read as the splits .*train.*, but a file has none"):
            source("train", split)
    parts = source("train[:90%]", "train[90%:]")
    assert [len(parts.tasks[key]) for key in ("train", "validation")] == [9, 1]
    # A dot does not make a file of a folder.
    (tmp_path / "v1.0").mkdir()
    folder = {"data_path": str(tmp_path / "v1.0")}
    for name in ("train", "test"):
        write_jsonl(tmp_path / "v1.0" / f"{name}.jsonl", [{"problem": name, "answer": 1}])
    both = DatasetsData(source="datasets", train=folder, validation=folder | {"split": "test"})
    assert TaskSource(both, seed=0).tasks["validation"][0].prompt == "test"


def test_streams_differ(data):
    source = TaskSource(data, seed=1)
    assert source.train(1, 8) != source.train(1, 8, stream="warm_start")


def test_validation_is_the_same_for_every_seed_and_call(data):
    expected = TaskSource(data, seed=1).validation(5)
    source = TaskSource(data, seed=2)
    source.train(1, 4)
    assert source.validation(5) == expected == source.validation(5)


def test_every_epoch_holds_each_task_once_in_a_new_order(ten_problems):
    source = TaskSource(ten_problems, seed=3)
    # 5 steps of 4 prompts are 2 epochs of 10 tasks; step 3 spans both
    drawn = [task.answer for step in range(1, 6) for task in source.train(step, 4)]
    epochs = drawn[:10], drawn[10:]
    assert [sorted(map(int, epoch)) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]


def test_generated_answers_are_right_and_padded():
    config = ArithmeticData(digits=2, num_terms=3, operators="+-*", answer_digits=4)
    tasks = arithmetic_tasks(config, 200, random.Random(0))
    for task in tasks:
        expression = task.prompt.removesuffix("=")
        assert len(expression) == 8  # three terms of two digits, two operators
        # Python reads 07 as an error, so terms lose their padding before eval
        plain = "".join(str(int(part)) if part.isdecimal() else part for part in _split(expression))
        assert int(task.answer) == eval(plain)
        assert len(task.answer.removeprefix("-")) >= 4
    assert any(task.answer.startswith("-0") for task in tasks)
    assert {operator for task in tasks for operator in task.prompt if operator in "+-*"} == set("+-*")


def test_running_totals_end_in_the_answer():
    sizes = {"num_terms": 5, "operators": "+-", "answer_digits": 3}
    whole, running = (
        arithmetic_tasks(ArithmeticData(running_totals=wanted, **sizes), 50, random.Random(0))
        for wanted in (False, True)
    )
    assert [task.prompt for task in running] == [task.prompt for task in whole]
    assert [task.answer.split()[-1] for task in running] == [task.answer for task in whole]
    for task in running:
        terms = task.prompt.removesuffix("=").replace("-", " -").replace("+", " ").split()
        totals = [sum(map(int, terms[: count + 2])) for count in range(4)]
        assert list(map(int, task.answer.split())) == totals


def test_running_totals_refuse_products():
    with pytest.raises(ValueError, match=r"running_totals adds from left to right; legal operators with it: \+ and -"):
        ArithmeticData(running_totals=True, operators="+*")


def _split(expression):
    return [expression[start:stop] for start, stop in ((0, 2), (2, 3), (3, 5), (5, 6), (6, 8))]


@pytest.mark.parametrize(
    ("terms", "operators", "value"),
    [
        ([2, 3, 4], "+*", 14),  # 2 + (3 * 4); left to right it would be 20
        ([2, 3, 4], "*+", 10),  # (2 * 3) + 4
        ([9, 2, 3], "--", 4),  # (9 - 2) - 3; right to left it would be 10
        ([9, 2, 3], "-*", 3),  # 9 - (2 * 3); with the sign on 2 alone too: -2 * 3 = -6
        ([2, 3, 4, 5], "*-*", -14),  # (2 * 3) - (4 * 5)
        ([7], "", 7),
    ],
)
def test_products_bind_tighter_and_differences_run_left_to_right(terms, operators, value):
    assert eval_chain(terms, operators) == value


def several(tmp_path, **answers):
    return [
        {"data_path": write_jsonl(tmp_path / f"{name}.jsonl", [{"problem": name, "answer": n} for n in numbers])}
        for name, numbers in answers.items()
    ]


def test_several_data_sets_are_mixed_and_validated_in_turn(tmp_path):
    sets = several(tmp_path, a=range(6), b=range(6, 8))
    source = TaskSource(DatasetsData(source="datasets", train=sets, validation=sets), seed=0)
    assert sorted(int(task.answer) for task in source.train(1, 8)) == list(range(8))
    # Any part of the validation has some of each, as long as there are.
    assert [task.answer for task in source.validation(5)] == ["0", "6", "1", "7", "2"]
    assert len(source.validation(100)) == 8


def test_benchmarks_and_data_sets_are_validated_in_turn(tmp_path):
    math500 = write_jsonl(tmp_path / "math500.jsonl", [{"problem": "Half of 8?", "answer": "4"}])
    sets = several(tmp_path, a=range(2))
    validation = [*sets, {"benchmark": "math500", "data_path": math500}]
    source = TaskSource(DatasetsData(source="datasets", train=sets, validation=validation), seed=0)
    assert [task.answer for task in source.validation(3)] == ["0", "4", "1"]
    rewards = {"validation/reward": 0.5, "validation/reward_a": 0.25, "validation/reward_MATH-500": 1.0}
    assert mean_rewards([0.0, 1.0, 0.5], source.validation(3)) == rewards
    assert mean_rewards([0.5], source.validation(1)) == {"validation/reward": 0.5}, "one set is the whole"


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (("one/test.jsonl", "two/test.jsonl"), ("one/test", "two/test")),
        (("x/one/test.jsonl", "y/one/test.jsonl", "other.jsonl"), ("x/one/test", "y/one/test", "other")),
        (("one/test.jsonl", "one/test.json"), ("one/test.jsonl", "one/test.json")),
        (("test.jsonl", "one/test.jsonl"), ("test.jsonl", "one/test")),
        (("test.jsonl", "test.jsonl", "test.jsonl"), ("test", "test#2", "test#3")),
        (("one/test.jsonl", "two/test.jsonl", "one/test.jsonl"), ("one/test", "two/test", "one/test#2")),
    ],
)
def test_data_sets_of_one_name_have_their_own_scores(tmp_path, monkeypatch, files, names):
    monkeypatch.chdir(tmp_path)
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / file, [{"problem": "p", "answer": 1}])
    sets = [{"data_path": file} for file in files]
    source = TaskSource(DatasetsData(source="datasets", train=sets, validation=sets), seed=0)
    rewards = mean_rewards([float(place) for place in range(len(files))], source.validation(len(files)))
    assert {name: rewards[f"validation/reward_{name}"] for name in names} == {
        name: float(place) for place, name in enumerate(names)
    }
    assert len(rewards) == 1 + len(files)


def test_every_data_set_that_cannot_be_read_is_told_with_its_place(tmp_path):
    (right,) = several(tmp_path, a=range(2))
    wrong = {"data_path": write_jsonl(tmp_path / "b.jsonl", [{"question": "p", "answer": 1}])}
    missing = {"data_path": str(tmp_path / "nope.jsonl")}
    config = DatasetsData(source="datasets", train=[right, wrong, missing], validation=missing)
    with pytest.raises(ValueError, match=r"data\.train\.1: ") as raised:
        TaskSource(config, seed=0)
    lines = str(raised.value).split("\n  ")
    assert [line.partition(": ")[0] for line in lines] == ["data.train.1", "data.train.2", "data.validation"]
    assert "no field 'problem'" in lines[0]
    assert "nope.jsonl does not exist" in lines[2]
    assert TaskSource(DatasetsData(source="datasets", train=right), seed=0).tasks["validation"] == []


def test_without_validation_sets_the_first_problems_are_validated(ten_problems):
    assert [task.answer for task in TaskSource(ten_problems, seed=0).validation(3)] == ["0", "1", "2"]
