"""Rewards: plain integers without a parser, everything else through math-verify."""

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify.errors import TimeoutException

from qarl_nemo import verify
from qarl_nemo.answer_text import response_text
from qarl_nemo.verify import reward, rewards


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("46", "46"),
        (" 046\n", "46"),
        ("-5", "-05"),
        ("0", "-0"),
        ("46 -5", " 046 -005\n"),
        ("The answer is $46$.", "46"),
        (r"so \boxed{46}", "46"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        ("0.75", r"\frac{3}{4}"),
        (r"$\frac{1}{2}$", "0.5"),
        (r"\boxed{x^2+1}", "1+x^2"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$"),
        (r"\boxed{\text{east}}", r"\text{east}"),
        (r"\boxed{\$2.5}", r"\$2.50"),
        (r"\boxed{3, 1}", "$1$, $3$"),
        (r"\boxed{42.}", "42"),
        (r"so $\boxed{(3,4).}$.", "(3,4)"),
        (r"so $\boxed{5.}$, as $x_{1}$ says.", "5"),
        (r"\boxed{\text{5.}}", "5"),
        (r"\boxed{3}? No, wait: \boxed{5}", "5"),
        (r"$\boxed{3}$? No, wait: \boxed{5}", "5"),
        (r"Put it in \boxed{}: \boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{7}? No, wait: \boxed{3}, \boxed{5}", "3, 5"),
        (r"\boxed{3 \boxed{5}} is $\boxed{4}$", "4"),
        (r"\boxed{3} and \boxed{5}.", "3, 5"),
        (r"$\boxed{3}$, $\boxed{5}$", "3, 5"),
        (r"\(\boxed{3}\) and \(\boxed{5}\)", "3, 5"),
        (r"\[\boxed{x = 3} \quad \text{or} \quad \boxed{x = 5}\]", "3, 5"),
        (r"$\boxed{3}\text{, and }\boxed{5}$", "3, 5"),
        (r"$\boxed{3}$, $\boxed{4}$, and $\boxed{5}$", "3, 4, 5"),
        (r"**$\boxed{3}$** and **$\boxed{5}$**", "3, 5"),
        ("First \\boxed{3}. Then \\boxed\n{5}.", "5"),
        (r"it is \boxed{2, and \boxed{5}", "5"),
        ("The answer is 18.", "18."),
        (" True\n", "True"),
        (r"\boxed{2.5}", "2 1/2"),
        (r"\boxed{-2 1/2}", r"-\frac{5}{2}"),
        (r"\boxed{3\ 1/4}", "3.25"),
        (r"\boxed{-5}", "-$5"),
        (r"\boxed{-\$5}", "-$5"),
        (r"\boxed{1000}", "US$1,000"),
        (r"$\boxed{\begin{pmatrix} \dfrac12 \\[6pt] 3 \end{pmatrix}}$", r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}"),
        (r"$\boxed{\begin{pmatrix} 1 \\ 3 \end{pmatrix}}$", r"\begin{pmatrix} 1 \\ [0.5 em] 3 \end{pmatrix}"),
        (r"$\boxed{\frac{1}{5} \begin{pmatrix} 1 \\ 2 \end{pmatrix}}$", r"\begin{pmatrix} 1/5 \\ 2/5 \end{pmatrix}"),
        (r"$\boxed{12\,500}$", "12500"),
        (r"\boxed{1.5e3}", "1500"),
        ("The answer is 2.5e3.", "2500"),
        ("1.5e-7", "1.5e-07"),
        (r"\boxed{1.5e60}", "1.5e60"),
        (r"\boxed{1.5 \times 10^{-7}}", "1.5e-07"),
        (r"\boxed{0.00001}", "1e-05"),
        (r"\boxed{2e - 1}", "2e-1"),
        (r"so $x = 1\ 234\;567.8$.", "1234567.8"),
        (r"\boxed{12{,}500}", r"12\,500"),
        (r"\boxed{(1, \,200)}", "(1, 200)"),
        (r"$\boxed{\begin{pmatrix} 1 \\ 200 \end{pmatrix}}$", r"\begin{pmatrix} 1 \\ 200 \end{pmatrix}"),
        (r"$\boxed{1.1 \times 10^{5}}$", "110000"),
        (r"\boxed{6.02\times 10^{23}}", "6.02e23"),
        (r"\boxed{1.1 \cdot 10^{-5}}", "0.000011"),
        (r"The roots are $x_1 = \boxed{2}$ and $x_2 = \boxed{-1}$.", "-1,2"),
        (r"$x=\boxed{3}$, $y=\boxed{5}$", "(3,5)"),
        (r"First $x=\boxed{3}$. Then $y=\boxed{5}$", "5"),
        (r"$\boxed{12.5\%}$", "12.5"),
        (r"$\boxed{33\frac{1}{3}}$", r"33\frac{1}{3}\%"),
        (r"\boxed{0.5}", r"0.5\%"),
        (r"\boxed{2, \frac{1}{5000000}}", "0.0000002, 2"),
        (r"\boxed{\vphantom{\frac{1}{2}} 5}", "5"),
        (r"\boxed{6/1.5 \times 10^{2}}", "400"),
        (r"$\boxed{46_{8}}$", "46_8"),
        (r"$\boxed{46}$", "46_8"),
        (
            r"$\boxed{\begin{pmatrix} 1 & 2 \\ 1 & 1 \end{pmatrix}}$",
            r"\begin{pmatrix} 1 & 2 \\ 1 & \phantom -1 \end{pmatrix}",
        ),
    ],
)
def test_right_answers(response, answer):
    assert reward(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("47", "46"),
        ("-46", "46"),
        ("False", "True"),
        ("460", "46"),
        ("46 47", "46 48"),
        ("47", "46 47"),
        ("47 46", "46 47"),
        ("46 46", "46"),
        (r"\boxed{13}", r"12\%"),
        (r"\boxed{\frac{4}{3}}", r"\frac{3}{4}"),
        (r"\boxed{(2,1)}", "(1,2)"),
        ("0.7", r"\frac{3}{4}"),
        (r"\boxed{x^2-1}", "1+x^2"),
        (r"\boxed{\text{west}}", r"\text{east}"),
        (r"\boxed{1}", "$1$, $3$"),
        (r"\boxed{43.}", "42"),
        (r"\boxed{5}? No, wait: \boxed{3}", "5"),
        (r"\boxed{3}? No, wait: \boxed{5}", "3, 5"),
        (r"\boxed{1.5}", "2 1/2"),
        (r"\boxed{5}", "-$5"),
        (r"\boxed{5.}", "5.5"),
        (r"$\boxed{\begin{pmatrix} 1 \\[6pt] 4 \end{pmatrix}}$", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"),
        (r"$\boxed{\frac{1}{5} \begin{pmatrix} 1 \\ 2 \end{pmatrix}}$", r"\begin{pmatrix} 1/5 \\ 3/5 \end{pmatrix}"),
        (r"$\boxed{\frac{1}{5} \begin{pmatrix} 1 \\ 2 \end{pmatrix}}$", "0.0001"),
        (r"$\boxed{12\,000}$", "0"),
        (r"$\boxed{3}$, and $\boxed{5}$", "5"),
        (r"\(\boxed{3}\) and \(\boxed{5}\)", "5"),
        (r"\boxed{0.2}", "2e-1"),
        ("The answer is 2.5e3.", "2.5"),
        (r"\boxed{1.6e-07}", "1.5e-07"),
        (r"$\boxed{1.1 \times 10^5}$", "110001"),
        (r"The roots are $x_1 = \boxed{2}$ and $x_2 = \boxed{-1}$.", "-1"),
        (r"$\boxed{12.5\%}$", "12.6"),
        (r"\boxed{0.5\%}", "0.5"),
        (r"\boxed{0.5\%}", r"\frac{1}{2}"),
        (r"$\boxed{46_8}$", "46_9"),
        (r"$\boxed{46_8}$", "46_{80}"),
        (r"$\boxed{-1}$", r"\begin{pmatrix} 1 & -1 \\ 1 & \phantom -1 \end{pmatrix}"),
        (r"$\boxed{(0.0000002, 1)}$", "(0.0000003, 1)"),
        (r"$\boxed{1, 0.0000002}$", "0.0000003, 1"),
    ],
)
def test_wrong_answers(response, answer):
    assert reward(response, answer) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        " ",
        "+-*=",
        "(((((",
        r"\boxed{",
        r"\frac{1}{",
        r"\boxed{1_{" + "1" * 5000 + "}}",
        "\x00\ufffd",
        "seven",
        "$$$$",
        "1" * 6000,
        "-" * 500,
    ],
)
def test_garbage_earns_nothing_and_raises_nothing(response):
    assert reward(response, "7") == 0.0


def test_a_response_that_is_given_up_earns_nothing_and_is_not_shown(monkeypatch, caplog):
    def give_up(*_args, **_kwargs):
        raise TimeoutException

    monkeypatch.setattr(math_verify.parser, "extract_target_from_pred", give_up)
    assert reward("a response that takes too long", "7") == 0.0
    assert not caplog.records


def test_a_response_that_loops_in_line_ends_keeps_its_answer():
    assert reward("It is 5" + "\n" * 60_000 + "x", "5") == 1.0
    assert reward("It is 6" + " \n" * 30_000 + "x", "5") == 0.0


def test_plain_integers_need_no_parser(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("the parser ran")

    monkeypatch.setattr(math_verify, "parse", refuse)
    assert reward("123", "0123") == 1.0
    assert reward("124", "0123") == 0.0
    with pytest.raises(AssertionError, match="the parser ran"):
        reward("123 apples", "124")


# math-verify cannot read "-012" without dollars, so zero padding is compared for what it can read: no minus sign.
@settings(max_examples=150, deadline=None)
@given(st.integers(-2000, 2000), st.integers(-2000, 2000), st.booleans(), st.integers(1, 5))
def test_the_fast_path_agrees_with_math_verify_on_integers(value, other, equal, width):
    response, answer = str(value) if value < 0 else f"{value:0{width}d}", str(value if equal else other)
    judged = math_verify.verify(math_verify.parse(f"${answer}$"), math_verify.parse(response))
    assert reward(response, answer) == float(judged)


def test_several_processes_say_what_one_says_in_the_same_order(monkeypatch):
    responses = [rf"{number} and so on, \boxed{{{number % 3}}}" for number in range(12)] + ["5", "5"]
    answers = ["1"] * 12 + ["5", "6"]
    expected = [float(number % 3 == 1) for number in range(12)] + [1.0, 0.0]
    assert rewards(responses, answers) == expected
    monkeypatch.setattr(verify, "_WORTH_SHARING", 1)
    monkeypatch.setattr(verify, "_verified", None)  # nothing is parsed here
    monkeypatch.setattr(verify, "_MOST_PROCESSES", 2)
    verify._workers.cache_clear()
    try:
        assert rewards(responses, answers) == expected
        workers = verify._workers()
        workers[0].kill()
        with pytest.raises(RuntimeError, match="a process that verifies answers ended with code -9"):
            rewards(responses, answers)
        # Their input's end is theirs.
        workers[1].stdin.close()
        assert workers[1].wait(timeout=60) == 0
    finally:
        verify._workers.cache_clear()


def test_small_numbers_are_compared_by_their_own_digits():
    answer = r"3.5 \times 10^{-19}"
    for right in (answer, r"35 \times 10^{-20}", r"x = 3.5 \cdot 10^{-19} \text{ m}", r"3.501 \times 10^{-19}"):
        assert reward(rf"It is $\boxed{{{right}}}$.", answer) == 1.0
    for wrong in ("0", r"3.5 \times 10^{-27}", r"3.6 \times 10^{-19}", r"-3.5 \times 10^{-19}"):
        assert reward(rf"It is $\boxed{{{wrong}}}$.", answer) == 0.0
    assert reward(r"It is $\boxed{0.333333}$.", r"\frac{1}{3}") == 1.0
    assert reward(r"It is $\boxed{-0.0000004}$.", "0.0") == 0.0
    assert reward(r"It is $\boxed{\sqrt{2}\sqrt{2} - 2}$.", "0.0") == 1.0


@pytest.mark.parametrize(
    "number", ["1.5e999999", "1.5E9999999", "1e99999999", "1.5E9999999x", "2E-99999999", r"1.5 \times 10^{999999999}"]
)
def test_no_exponent_takes_for_ever(number):
    """The parser computes such a number in one go, which its limit of time does not interrupt."""
    assert reward(rf"\boxed{{{number}}}", "5") == 0.0
    assert reward(r"\boxed{5}", number) == 0.0


def test_a_long_gap_between_boxes_is_read_once():
    """Read in two ways it would take minutes, beside math-verify's own limit of time."""
    for gap in ("$$", ", ", r"\quad "):
        assert response_text(rf"\boxed{{1}}{gap * 200_000}x \boxed{{2}}").startswith("{1}")
