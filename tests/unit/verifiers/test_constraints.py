from typing import Any

import pytest

from mopdctl.verifiers import VerdictState, verify


def reward(response: str, *constraints: dict[str, Any]) -> float | None:
    verdict = verify("constraints", response, {"constraints": list(constraints)})
    assert verdict.state == VerdictState.OK, verdict
    return verdict.reward


ITEMS = {"kind": "items", "separator": ";", "count": 3}
WORD = {"kind": "only_word", "word": "ja", "separator": ","}
UPPER, LOWER = {"kind": "case", "case": "upper"}, {"kind": "case", "case": "lower"}
STARTS, ENDS = {"kind": "starts_with", "text": "Dear"}, {"kind": "ends_with", "text": "Bye."}
BETWEEN = {"kind": "between", "before": "<<", "after": ">>", "inner": UPPER}


@pytest.mark.parametrize(
    ("constraint", "meets", "breaks"),
    [
        (ITEMS, ["a;b;c", " a ; b ;c\n"], ["a;b", "a;b;c;d", "a;;c", "a;b;", "", "a,b,c", "a; ;c"]),
        (WORD, ["ja", "ja,JA, Ja "], ["nein", "ja,nein", "ja,", "", "jaja", "ja ja"]),
        (UPPER, ["ABC", "A1, B?", " \u00dcBER\n"], ["ABc", "abc", "123", ""]),
        (LOWER, ["abc", "a1, b?", "stra\u00dfe"], ["aBc", "ABC", "123", ""]),
        (STARTS, ["Dear", "Dear all", "  Dear all"], ["dear all", "My Dear", "", "Dea"]),
        (ENDS, ["Bye.", "So. Bye.", "Bye.\n"], ["Bye", "Bye. Now", "", "bye."]),
        (BETWEEN, ["<<ABC>>", "<<A>>>>"], ["<<abc>>", "ABC", "<<ABC>", "<ABC>>", "<<ABC>> x", "<<", "<<>>", "<<>"]),
    ],
    ids=lambda x: x["kind"] if isinstance(x, dict) else None,
)
def test_each_kind_on_responses_that_meet_and_break_it(
    constraint: dict[str, Any], meets: list[str], breaks: list[str]
) -> None:
    assert [r for r in meets if reward(r, constraint) != 1.0] == []
    assert [r for r in breaks if reward(r, constraint) != 0.0] == []


def test_marks_that_overlap_do_not_count_twice() -> None:
    quotes = {"kind": "between", "before": '"', "after": '"', "inner": LOWER}
    assert reward('"a"', quotes) == 1.0
    assert reward('"', quotes) == 0.0


def test_every_constraint_has_to_be_met_and_the_broken_one_is_named() -> None:
    assert reward("Dear all. Bye.", STARTS, ENDS) == 1.0
    verdict = verify("constraints", "Dear all.", {"constraints": [STARTS, ENDS]})
    assert (verdict.reward, verdict.detail) == (0.0, "breaks ends_with")


@pytest.mark.parametrize(
    "constraints",
    [
        [{"kind": "no_such"}],
        [{}],
        [{"kind": None}],
        [{"kind": ["case"]}],
        [{"kind": "case"}],
        [{"kind": "case", "case": "upper", "strict": True}],
        [{"kind": "case", "case": "title"}],
        [{"kind": "case", "case": "UPPER"}],
        [{"kind": "items", "separator": "", "count": 1}],
        [{"kind": "items", "separator": ";", "count": "3"}],
        [{"kind": "only_word", "word": "ja", "separator": ""}],
        [{"kind": "starts_with", "text": 5}],
        [{"kind": "between", "before": "<<", "after": ">>", "inner": {"kind": "no_such"}}],
        [{"kind": "between", "before": "<<", "after": ">>", "inner": "upper"}],
        [],
        "case",
        ["case"],
        [None],
        {"kind": "case", "case": "upper"},
        None,
    ],
    ids=str,
)
def test_a_constraint_that_nobody_can_check_is_blamed_whatever_the_response(constraints: Any) -> None:
    for response in ("<<ABC>>", "abc", ""):
        verdict = verify("constraints", response, {"constraints": constraints})
        assert (verdict.state, verdict.reward) == (VerdictState.INVALID_REFERENCE, None)


@pytest.mark.parametrize("order", [(LOWER, {"kind": "no_such"}), ({"kind": "no_such"}, LOWER)])
def test_an_unknown_constraint_beside_a_broken_one_is_blamed_in_any_order(order: tuple[dict[str, Any], ...]) -> None:
    verdict = verify("constraints", "ABC", {"constraints": list(order)})
    assert verdict.state == VerdictState.INVALID_REFERENCE


@pytest.mark.parametrize("reference", [None, {}, [], "case", {"answer": 1}])
def test_a_reference_without_constraints_is_blamed(reference: Any) -> None:
    assert verify("constraints", "ABC", reference).state == VerdictState.INVALID_REFERENCE


def test_checking_leaves_the_reference_as_it_was() -> None:
    reference = {"constraints": [dict(BETWEEN), dict(UPPER)]}
    verify("constraints", "<<ABC>>", reference)
    assert reference == {"constraints": [BETWEEN, UPPER]}
