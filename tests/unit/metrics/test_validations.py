"""A validation's answers: written, read from both engines' files, and two arms paired problem by problem."""

import json

import numpy as np
import pytest

from qarl_nemo.files import FileError
from qarl_nemo.metrics.estimate import Estimate, mean_of
from qarl_nemo.metrics.report.validation import validation_tables
from qarl_nemo.metrics.validations import paired, read_rewards, validation_files, write_validation
from support.validations import answers, make_arm, nemo_rl_lines

RIGHT = {"BF16": [1, 1, 1, 0, 1, 0], "QaRL": [1, 1, 0, 0, 1, 0], "rollout-only": [1, 0, 0, 0, 0, 0]}


def test_what_was_written_is_read(tmp_path):
    path = write_validation(tmp_path, 100, answers([1, 0, 1]))
    assert validation_files(tmp_path) == {100: path}
    assert list(read_rewards(path).values()) == [1, 0, 1]


def test_several_answers_to_a_problem_are_averaged(tmp_path):
    rows = answers([1, 0])
    path = write_validation(tmp_path, 1, [*rows, {**rows[0], "reward": 0.0}])
    assert list(read_rewards(path).values()) == [0.5, 0.0]


def test_the_same_prompt_in_two_sets_is_two_problems(tmp_path):
    rows = answers([1]) + answers([0], dataset="other")
    assert len(read_rewards(write_validation(tmp_path, 1, rows))) == 2


def test_a_paired_difference_has_less_error_than_the_means():
    generator = np.random.default_rng(0)
    hardness = generator.random(400)
    one = {("", str(i)): float(h < 0.5) for i, h in enumerate(hardness)}
    other = {("", str(i)): float(h < 0.45) for i, h in enumerate(hardness)}
    difference = paired(one, other)
    values = np.array(list(one.values())) - np.array(list(other.values()))
    assert difference.value == pytest.approx(values.mean())
    assert difference.standard_error == pytest.approx(values.std(ddof=1) / 20)
    assert difference.standard_error < 0.5 * mean_of(one.values()).standard_error
    # Whoever pairs an answer with another problem's loses what pairing gains.
    shuffled = dict(zip(other, generator.permutation(list(other.values())), strict=True))
    assert paired(one, shuffled).standard_error > 1.2 * mean_of(one.values()).standard_error


def test_problems_of_one_arm_alone_do_not_count():
    assert paired({("", "a"): 0.0, ("", "b"): 1.0}, {("", "b"): 0.0, ("", "c"): 1.0}) == Estimate(1.0, None)
    assert np.isnan(paired({("", "a"): 1.0}, {("", "b"): 0.0}).value)


def test_nemo_rl_s_answers_are_read_without_steps_that_were_taken_again(tmp_path):
    for start, step, right in (("exp_001", 20, [1, 1]), ("exp_001", 30, [0, 0]), ("exp_002", 20, [1, 0])):
        folder = tmp_path / start
        (folder / "tensorboard").mkdir(parents=True, exist_ok=True)
        (folder / f"val_data_step{step}.jsonl").write_text(nemo_rl_lines(right))
    files = validation_files(tmp_path)
    assert list(files) == [20]
    assert list(read_rewards(files[20]).values()) == [1, 0]


@pytest.mark.parametrize(
    "line", ['{"dataset": "a", "prompt": "p"}', '{"rewards": [], "content": [[]]}', '{"rewards": 1}']
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps(answers([1])[0]) + "\n" + line + "\n")
    with pytest.raises(FileError, match="line 2 is damaged"):
        read_rewards(path)


def test_arms_stand_beside_each_other_on_their_newest_common_validation(tmp_path):
    arms = [make_arm(tmp_path, name, {50: [0] * 6, 100: right}) for name, right in RIGHT.items()]
    write_validation(arms[0].runs[0].path, 150, answers([1] * 6))
    (table,) = validation_tables(arms)
    assert (table["step"], table["columns"]) == (100, ["BF16", "QaRL"])
    assert [row["reward"] for row in table["rows"]] == ["66.7 ± 21.1", "50.0 ± 22.4", "16.7 ± 16.7"]
    last = table["rows"][-1]
    assert [cell["text"] for cell in last["cells"]] == ["-50.0 ± 22.4", "-33.3 ± 21.1"]
    assert [cell["bold"] for cell in last["cells"]] == [True, False]


def test_seeds_that_all_arms_have_are_averaged(tmp_path):
    one = make_arm(tmp_path, "one", {10: [1, 0]}, {10: [1, 1]}, {10: [0, 0]})
    other = make_arm(tmp_path, "other", {10: [0, 0]}, {10: [1, 0]})
    (table,) = validation_tables([one, other])
    assert table["seeds"] == 2
    assert [row["reward"] for row in table["rows"]] == ["75.0 ± 25.0", "25.0 ± 25.0"]


def test_a_problem_that_a_seed_was_not_asked_does_not_count(tmp_path):
    one = make_arm(tmp_path, "one", {10: [1, 0]}, {10: [1]})
    other = make_arm(tmp_path, "other", {10: [0, 0]}, {10: [1, 0]})
    first, second = validation_tables([one, other])[0]["rows"]
    assert (first["reward"], first["num_problems"]) == ("100.0", 1)
    assert second["cells"][0]["text"] == "-50.0"


def test_no_table_without_two_arms_or_a_common_step(tmp_path):
    one, other = make_arm(tmp_path, "one", {10: [1]}), make_arm(tmp_path, "other", {20: [1]})
    assert validation_tables([one]) == validation_tables([one, other]) == []


def test_one_question_to_two_models_is_one_problem(tmp_path):
    asked = {"role": "user", "content": "1 + 1"}
    conversations = [[asked, {"role": "assistant", "content": text}] for text in ("so 2", "so 3")]
    lines = [
        json.dumps({"content": [messages], "rewards": [reward]})
        for messages, reward in zip(conversations, (1.0, 0.0), strict=True)
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    assert list(read_rewards(tmp_path / "answers.jsonl").values()) == [0.5]


def test_one_question_under_two_system_prompts_is_two_problems(tmp_path):
    asked = [
        [{"role": "system", "content": text}, {"role": "user", "content": "1 + 1"}] for text in ("Think.", "Answer.")
    ]
    lines = [json.dumps({"content": [messages], "rewards": [1.0]}) for messages in asked]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    assert len(read_rewards(tmp_path / "answers.jsonl")) == 2
