"""The verifier `math`, in this process; only what may never end runs elsewhere."""

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState
from mopdctl.verifiers.registry import run_check

OK, PARSE_ERROR, INVALID = VerdictState.OK, VerdictState.PARSE_ERROR, VerdictState.INVALID_REFERENCE


def verdict(response: str, answer: Any, **reference: Any) -> Verdict:
    return run_check(VERIFIERS["math"], Attempt(response, {"answer": answer, **reference}))


def reward(response: str, answer: Any) -> float | None:
    found = verdict(response, answer)
    assert found.state == OK, found
    return found.reward


def box(formula: str) -> str:
    return rf"So it is $\boxed{{{formula}}}$."


# huggingface/Math-Verify #44, #57: boxes were joined to one number or one set
def test_the_last_box_counts_and_no_other() -> None:
    assert reward(r"\boxed{3} ... actually \boxed{5}", 5) == 1.0
    assert reward(r"\boxed{5} ... actually \boxed{3}", 5) == 0.0
    assert reward(r"\boxed{004}. Let me check: \boxed{004}", 4) == 1.0
    assert reward(r"x = \boxed{1} or x = \boxed{2}", "1, 2") == 0.0
    assert reward(box(r"1, 2"), "2, 1") == 1.0


# marin-community/marin #9163: a broken last box must not bring back an earlier one
@pytest.mark.parametrize(
    "end", [r"\boxed{", r"\boxed{}", r"\boxed{ }", r"\boxed{\frac{1}{2}", r"\boxed{\frac{1}{}", r"\boxed{5\}"]
)
def test_a_last_box_that_cannot_be_read_is_a_parse_error(end: str) -> None:
    found = verdict(rf"\boxed{{5}} or rather {end}", 5)
    assert (found.state, found.reward) == (PARSE_ERROR, None)


@pytest.mark.parametrize(
    ("formula", "answer"),
    [
        (r"\frac12", "1/2"),
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac{1}{2}", 0.5),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("x=5", 5),
        ("5", "x=5"),
        ("1{,}000", 1000),
        (r"1\,000", 1000),
        (r"12\ 345\ 678", 12345678),
        ("2+3=5", 5),
        (r"\$12", 12),
        (r"\text{B}", "B"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        (r"\pm 3", "3, -3"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"30^\circ", 30),
        (r"9\%", 9),
        (r"9\%", "0.09"),
        ("0.333333", r"\frac13"),
        (r"\left(1, 2\right)", "(1,2)"),
        (r"[1, 2)", r"\left[1,2\right)"),
    ],
)
def test_another_spelling_of_the_same_is_right(formula: str, answer: Any) -> None:
    assert reward(box(formula), answer) == 1.0


@pytest.mark.parametrize(
    ("formula", "answer"),
    [
        ("2", 3),
        ("0.3333", r"\frac13"),
        ("3.14159", r"\pi"),
        ("y=5", "x=5"),
        ("7=5", 5),
        (r"1\,00", 100),
        ("x<3", 3),
        ("3", r"\pm 3"),
        (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),  # huggingface/Math-Verify #14
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
        ("21, 36, 82", "19, 46, 82"),
        ("5^{5^5}", 5),
        (r"\text{no}", 5),
        (r"\infty", 5),
    ],
)
def test_what_is_not_the_same_is_wrong(formula: str, answer: Any) -> None:
    assert reward(box(formula), answer) == 0.0


@pytest.mark.parametrize(
    "answer", [r"\frac{1}{2}", r"$\frac{1}{2}$", r"\(\frac{1}{2}\)", r"\boxed{\frac{1}{2}}", r"$\boxed{\frac{1}{2}}$"]
)
def test_a_gold_answer_needs_no_delimiters_and_may_have_any(answer: str) -> None:
    assert [reward(box(formula), answer) for formula in (r"\frac{2}{4}", r"\frac{1}{3}")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("(1,2)", ["(1,2)", "1,2", r"(1, \frac{4}{2})"], ["(2,1)", "[1,2]", "1<x<2", r"\{1,2\}", "(1,2,3)"]),
        ("(1,2),(3,4)", ["(1,2),(3,4)", "(3,4),(1,2)"], ["(2,1),(3,4)", "(1,2)"]),
        ("1<x<2", ["(1,2)", "1<x<2"], ["[1,2]", "(1,3)"]),
        (r"x \in (1,2)", ["(1,2)"], ["[1,2]"]),
        ("[1,2)", ["[1,2)"], ["(1,2)", "[1,2]"]),
        (r"(-\infty,2)", [r"(-\infty, 2)", "x<2"], [r"(-\infty,2]"]),
    ],
)
def test_a_pair_in_round_brackets_is_a_point_unless_the_gold_is_an_interval(
    answer: str, right: list[str], wrong: list[str]
) -> None:
    assert [formula for formula in right if reward(box(formula), answer) != 1.0] == []
    assert [formula for formula in wrong if reward(box(formula), answer) != 0.0] == []


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (12, [r"12\text{ cm}", "12 cm", r"12\,\mathrm{km/h}", r"\text{12 cm}"], [r"13\text{ cm}", r"2\text{ cm}"]),
        (
            r"12\text{ cm}",
            ["12", r"12\text{ centimeters}", "12 cm"],
            [r"12\text{ m}", "12 m^2", r"12\text{ cm}^2", "12 mm"],
        ),
        (r"12\text{ cm}^2", ["12", r"12\text{ cm}^{2}"], [r"12\text{ cm}"]),
        (r"12\text{ m}", ["12 m", "12"], ["12 cm", "12 m^2", "12x"]),
        ("12", ["12 dollars", "12 Meters"], ["12m"]),
        ("3m", ["3m"], ["3", "3x"]),  # one letter behind a number is a variable
    ],
)
def test_a_unit_counts_only_where_both_state_one(answer: Any, right: list[str], wrong: list[str]) -> None:
    assert [formula for formula in right if reward(box(formula), answer) != 1.0] == []
    assert [formula for formula in wrong if verdict(box(formula), answer).reward != 0.0] == []


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("42", 42),
        ("1/2", "0.5"),
        ("x = 7", 7),
        ("Because 3 + 4 = 7,\nthe answer is 7.", 7),
        ("Final Answer: **73**", 73),  # huggingface/Math-Verify #76
        ("The answer is $\\frac{1}{2}$ because 3 is odd.", "1/2"),
        ("Answer: (3,4)", "(3,4)"),
        ("So 6 + 1 = 7.\n#### 7", 7),
        ("We had 5 and \\(x=6\\).\nSo there are 7 apples.", 7),
        ("First \\(5\\), then \\[7\\]", 7),
        ("<think>The answer is 8, \\boxed{8}</think>The answer is 7", 7),
    ],
)
def test_without_a_box_what_is_announced_or_stands_in_the_last_line_counts(response: str, answer: Any) -> None:
    assert reward(response, answer) == 1.0
    assert reward(response, 1000) == 0.0


@pytest.mark.parametrize(
    "response", ["", " \n", "no idea", "?", "The answer is", "<think>\\boxed{5}", box("x" * 3000), box(r"\frac{0}{0}")]
)
def test_a_response_with_nothing_to_read_is_a_parse_error(response: str) -> None:
    found = verdict(response, 5)
    assert (found.state, found.reward) == (PARSE_ERROR, None)


@pytest.mark.parametrize(
    "answer", [r"\frac{1}{", "???", "", " ", r"\boxed{5", r"\boxed{}", "]1,2[", r"\frac{0}{0}", None, True, ["5"]]
)
def test_a_gold_answer_that_cannot_be_read_blames_the_reference(answer: Any) -> None:
    for response in (box("5"), "", "<think>"):
        found = verdict(response, answer)
        assert (found.state, found.reward) == (INVALID, None)


def test_one_of_several_gold_answers_is_enough() -> None:
    found = [run_check(VERIFIERS["math"], Attempt(box(x), {"answers": ["5", "7"]})).reward for x in ("5", "7", "6")]
    assert found == [1.0, 1.0, 0.0]


def test_the_detail_of_a_wrong_answer_says_what_was_read() -> None:
    assert verdict(box("3"), 5).detail == "read '3', expected '5'"


# huggingface/Math-Verify #50, #55, huggingface/trl #5281: its alarm raises outside the main thread
def test_it_works_in_a_thread_that_is_not_the_main_one() -> None:
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.append(verdict(box("5"), 5)))
    thread.start()
    thread.join()
    assert [(one.state, one.reward) for one in found] == [(OK, 1.0)]


@settings(max_examples=60, deadline=None)
@given(st.fractions(-1000, 1000, max_denominator=99), st.fractions(-1000, 1000, max_denominator=99))
def test_a_fraction_equals_just_itself(one: Any, other: Any) -> None:
    formula = rf"\frac{{{one.numerator}}}{{{one.denominator}}}"
    assert reward(box(formula), str(one)) == 1.0
    assert reward(box(formula), str(other)) == float(one == other)


@settings(max_examples=60, deadline=None)
@given(st.text(r"\{}$()[]^_12x+-=,<. bo", max_size=25) | st.text(max_size=25))
def test_no_response_makes_it_fail_otherwise_than_by_its_form(text: str) -> None:
    for response in (text, box(text)):
        assert verdict(response, 5).state in (OK, PARSE_ERROR), response


def test_it_never_runs_but_in_a_worker() -> None:
    assert VERIFIERS["math"].isolated


# huggingface/Math-Verify #65, areal-project/AReaL #1426: a power tower hung for ever and drained the pool
@pytest.mark.slow
@pytest.mark.parametrize("formula", ["5^{(5^{(5^5)})}", "(10^9)!"])
def test_a_number_too_large_to_write_is_a_timeout_and_the_next_answer_is_judged(formula: str) -> None:
    from mopdctl.verifiers.pool import Limits, VerifierPool

    with VerifierPool(workers=1, limits=Limits(seconds=10)) as pool:
        reference = {"answer": 5}
        tower, plain = pool.check([("math", Attempt(box(formula), reference)), ("math", Attempt(box("5"), reference))])
    assert (tower.state, tower.reward) == (VerdictState.TIMEOUT, None)
    assert (plain.state, plain.reward) == (OK, 1.0)
