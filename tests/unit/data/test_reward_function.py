"""A reward function by its import path: found beside the user, called with what it takes, and blamed by name."""

import sys

import pytest

from qarl_nemo.data.reward_function import RewardFunction

SOURCE = """
LIMIT = 3

def score(response, answer):
    return response == answer

def with_record(response, answer, record):
    return record["level"] / 2

class Judge:
    @staticmethod
    def score(response, answer, *, bonus=1):
        return 2 * bonus

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": (solution_str == ground_truth) + extra_info["index"], "acc": data_source == "gsm8k"}

def with_own_name(response, answer, fields):
    return fields["level"] / 2

def record_if_any(response, answer, record=None):
    return record["level"] / 2

def with_option(response, answer, strict=False):
    return 3 if strict is False else 4

def above(response, answer):
    return int(response) - int(answer)

def above_with_record(response, answer, record):
    return int(response) - int(answer)

def verls_above(solution_str, ground_truth):
    return int(solution_str) - int(ground_truth)

def needs_more(data_source, solution_str, ground_truth, threshold): return 1
def one(response): return 1
def fails(response, answer): return {}[answer]
def no_score(response, answer): return {"acc": 1.0}
def not_a_number(response, answer): return float("nan")
def too_low(response, answer): return -1e30
def nothing(response, answer): pass
def leaves(response, answer): exit()
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the user's module, which is the current one."""
    (tmp_path / "own_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("import nowhere_to_be_found")
    (tmp_path / "leaving_rewards.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    sys.modules.pop("own_rewards", None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("score", 1.0),
        ("with_record", 2.5),
        ("with_own_name", 2.5),
        ("record_if_any", 2.5),
        ("with_option", 3.0),
        ("Judge.score", 2.0),
        ("compute_score", 8.0),
    ],
)
def test_it_is_called_with_what_it_takes(path, value):
    assert RewardFunction(f"own_rewards:{path}")("46", "46", {"level": 5, "extra_info": {"index": 7}}) == value


@pytest.mark.parametrize("path", ["above", "above_with_record", "verls_above"])
def test_it_is_told_which_text_is_the_response(path):
    assert RewardFunction(f"own_rewards:{path}")("50", "46", {}) == 4.0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_rewards.score", "must be module:function"),
        ("own_rewards.py:score", "module own_rewards.py cannot be imported"),
        ("./own_rewards:score", "must be module:function"),
        ("own_reward:score", "own_reward cannot be imported, ModuleNotFoundError.* current folder and on PYTHONPATH"),
        ("broken_rewards:score", "No module named 'nowhere_to_be_found'"),
        ("leaving_rewards:score", "leaving_rewards cannot be imported, SystemExit: 3"),
        ("own_rewards:scores", "own_rewards has no 'scores'; it has score, with_record, Judge"),
        ("own_rewards:LIMIT", "is int, which cannot be called"),
        ("own_rewards:needs_more", r"takes \(data_source, .* or as verl's with data_source, solution_str"),
        ("own_rewards:one", r"takes \(response\); it is called with response and answer, or"),
    ],
)
def test_what_cannot_be_called_is_refused_at_the_start(path, said):
    with pytest.raises(ValueError, match=said):
        RewardFunction(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "failed with KeyError: '46' for the answer '46' and the response 'so 46'"),
        ("nothing", "returned None for the answer '46' .*; it must be a number of at most 1e.18 in size, or a mapping"),
        ("no_score", "returned {'acc': 1.0} for the answer '46' .*, or a mapping whose `score` is one$"),
        ("leaves", "failed with SystemExit"),
        ("not_a_number", "returned nan"),
        ("too_low", r"returned -1e\+30"),
    ],
)
def test_a_function_that_fails_is_named_with_what_it_saw(name, said):
    with pytest.raises(ValueError, match=said):
        RewardFunction(f"own_rewards:{name}")("so 46", "46", {})
