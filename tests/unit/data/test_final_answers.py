"""Final answers of worked solutions, as GSM8K and MATH write them."""

import pytest

from qarl_nemo.data.answers import answer_text, final_answer


@pytest.mark.parametrize(
    ("text", "answer_format", "answer"),
    [
        (" 46\n", "plain", "46"),
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "hash", "72"),
        ("#### 1\nno:\n#### -1,234,567 ", "hash", "-1234567"),
        ("#### 10,5", "hash", "10,5"),  # no thousands
        (r"so $x=\boxed{\frac{1}{2}}$.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{ 2 } ", "boxed", "2"),
        (r"\fbox{3}", "boxed", "3"),
        (r"it is $\boxed 5$.", "boxed", "5"),
        (r"\boxed{\{1,2\}}", "boxed", r"\{1,2\}"),
        (r"\boxed{]-\infty,3\}}", "boxed", r"]-\infty,3\}"),
        (
            r"\boxed{\left\{\begin{array}{l}x=1\\y=2\end{array}\right.}",
            "boxed",
            r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.",
        ),
    ],
)
def test_the_answer_is_found(text, answer_format, answer):
    assert final_answer(text, answer_format) == answer


@pytest.mark.parametrize(
    ("text", "answer_format", "said"),
    [
        ("72", "hash", "no ####"),
        ("72 ####  ", "hash", "is empty"),
        ("72", "boxed", r"no \\boxed"),
        (r"\boxed{\frac{1}{2}", "boxed", "has no end"),
        (r"\boxed{}", "boxed", "is empty"),
        (" ", "plain", "is empty"),
    ],
)
def test_a_solution_without_one_is_refused(text, answer_format, said):
    with pytest.raises(ValueError, match=said):
        final_answer(text, answer_format)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1e5 ", "1e5 "),
        (27.0, "27"),
        (100.0, "100"),
        (-0.5, "-0.5"),
        (1e20, "1" + "0" * 20),
        (1e-05, "0.00001"),
        (10**40 + 1, f"1{'0' * 39}1"),
    ],
)
def test_a_number_is_written_as_answers_are(value, text):
    assert answer_text(value) == text


@pytest.mark.parametrize("value", [None, True, [1], float("nan"), float("-inf")])
def test_what_is_no_answer_has_no_text(value):
    assert answer_text(value) is None


def test_only_commas_between_thousands_are_left_out():
    assert final_answer("#### 1,234,567", "hash") == "1234567"
    assert final_answer("#### 1,2345", "hash") == "1,2345"
