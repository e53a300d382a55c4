from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState
from mopdctl.verifiers.abstention import LABELS, PHRASES, non_hallucination
from mopdctl.verifiers.base import Outcome, Verifier
from mopdctl.verifiers.registry import run_check


def verdict(response: str, **reference: Any) -> Verdict:
    return run_check(VERIFIERS["abstention"], Attempt(response, reference))


def judged(response: str, **reference: Any) -> tuple[str, float | None]:
    found = verdict(response, **reference)
    assert found.state == VerdictState.OK, found
    return found.label, found.reward


def test_an_answer_is_correct_abstained_or_wrong() -> None:
    assert judged("Paris", answer="Paris") == ("correct", 1.0)
    assert judged("I don't know.", answer="Paris") == ("abstained", 0.5)
    assert judged("London", answer="Paris") == ("wrong", 0.0)
    assert judged("<think>Paris? I don't know.</think>Paris", answers=["Lutetia", "Paris"]) == ("correct", 1.0)


@pytest.mark.parametrize(
    "response",
    [
        *PHRASES,
        "I DON\u2019T KNOW",
        "I'm sorry, but I don't know the answer to that question.",
        "Unfortunately, I am not sure!",
        r"\boxed{\text{I don't know}}",
        "I don't  \n know. Sorry, I do not know.",
        "There is not enough information to answer this question.",
    ],
)
def test_a_phrase_in_any_dress_abstains(response: str) -> None:
    assert judged(response, answer="Paris") == ("abstained", 0.5)


@pytest.mark.parametrize(
    "response",
    [
        "I don't know, but Paris.",
        "Paris. I'm not sure.",
        "I don't know. Maybe London?",
        "I do not know: 7",
        r"I don't know, \boxed{Paris}",
        "I don't know A",
    ],
)
def test_an_answer_that_abstains_and_answers_is_wrong(response: str) -> None:
    found = verdict(response, answer="Paris")
    assert (found.label, found.reward, found.detail) == ("wrong", 0.0, "abstains and answers")


def test_a_phrase_is_found_as_whole_words_only() -> None:
    assert judged("The unknowns", answer="The unknowns", abstain=["unknown"]) == ("correct", 1.0)
    assert judged("Unknown", answer="Paris", abstain=["unknown"]) == ("abstained", 0.5)
    assert judged("I don't know", answer="Paris", abstain=["unknown"]) == ("wrong", 0.0)


def test_the_inner_verifier_judges_with_the_rest_of_the_reference() -> None:
    assert judged("paris", answer="Paris", normalise=["casefold"]) == ("correct", 1.0)
    assert judged(r"\boxed{\frac12}", verifier="math", answer="0.5") == ("correct", 1.0)
    assert judged(r"\boxed{3}", verifier="math", answer="0.5") == ("wrong", 0.0)
    constraints = [{"kind": "no_commas"}, {"kind": "case", "case": "upper"}]
    partly = {"verifier": "constraints", "constraints": constraints, "partial": True}
    assert judged("no", **partly) == ("wrong", 0.0)
    assert judged("NO", **partly) == ("correct", 1.0)


def test_a_response_that_the_inner_verifier_cannot_read_stays_a_parse_error() -> None:
    found = verdict("seven", verifier="integer", answer=7)
    assert (found.state, found.reward, found.label) == (VerdictState.PARSE_ERROR, None, "")
    assert verdict("", answer="Paris").state == VerdictState.PARSE_ERROR
    assert verdict("<think>Paris", answer="Paris").state == VerdictState.PARSE_ERROR


@pytest.mark.parametrize(
    ("error", "state"), [(MemoryError(), VerdictState.TIMEOUT), (OSError("gone"), VerdictState.INFRA_ERROR)]
)
def test_an_inner_verifier_that_fails_gives_no_label(
    error: Exception, state: VerdictState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(attempt: Attempt) -> Outcome:
        if attempt.response:
            raise error
        return Outcome(0.0)

    monkeypatch.setitem(VERIFIERS, "failing", Verifier("failing", 1, fail))
    found = verdict("Paris", verifier="failing", answer="Paris")
    assert (found.state, found.reward, found.label) == (state, None, "")


def test_where_there_is_no_answer_abstaining_is_correct_and_every_answer_wrong() -> None:
    assert judged("I don't know", answerable=False) == ("correct", 1.0)
    assert judged("Paris", answerable=False) == ("wrong", 0.0)
    assert judged("I don't know, Paris", answerable=False) == ("wrong", 0.0)
    assert verdict(" ", answerable=False).state == VerdictState.PARSE_ERROR


def test_rewards_are_those_of_the_reference() -> None:
    rewards = {"correct": 0.9, "abstained": 0.2, "wrong": 0.1}
    found = [judged(text, answer="Paris", rewards=rewards)[1] for text in ("Paris", "I don't know", "London")]
    assert found == [0.9, 0.2, 0.1]


REWARDS = {"correct": 1, "abstained": 0.5, "wrong": 0}


@pytest.mark.parametrize(
    "reference",
    [
        {"answer": "a", "rewards": REWARDS | change}
        for change in (
            {"correct": 1.1},
            {"wrong": -0.1},
            {"abstained": 1},
            {"abstained": 0.2, "wrong": 0.3},
            {"correct": float("nan")},
            {"correct": float("inf")},
            {"correct": 10**400},
            {"correct": "1"},
            {"correct": True},
            {"correct": None},
            {"abstain": 0.5},
        )
    ]
    + [
        {},
        {"answer": "a", "rewards": {"correct": 1}},
        {"answer": "a", "rewards": [1, 0.5, 0]},
        {"answer": "a", "abstain": []},
        {"answer": "a", "abstain": "I don't know"},
        {"answer": "a", "abstain": ["?"]},
        {"answer": "a", "abstain": [None]},
        {"answer": "a", "verifier": "no_such"},
        {"answer": "a", "verifier": "abstention"},
        {"answer": "a", "verifier": ["math"]},
        {"answer": "a", "verifier": "integer"},
        {"answer": "a", "answerable": "no"},
        {"answer": "a", "answerable": False},
        {"answer": "I don't know"},
        {"answers": ["Paris", "I'm not sure, Rome"]},
    ],
    ids=str,
)
def test_a_reference_that_cannot_be_used_is_blamed_whatever_the_response(reference: dict[str, Any]) -> None:
    for response in ("a", "I don't know", "", "<think>"):
        found = verdict(response, **reference)
        assert (found.state, found.reward) == (VerdictState.INVALID_REFERENCE, None)
        assert found.detail


def test_a_model_that_always_abstains_hallucinates_nothing_and_knows_nothing() -> None:
    found = non_hallucination(["abstained"] * 4)
    assert (found.non_hallucination, found.accuracy) == (1.0, 0.0)
    assert found.counts == {"correct": 0, "abstained": 4, "wrong": 0, "unjudged": 0}


def test_answers_that_nobody_could_judge_are_counted_and_in_no_share() -> None:
    found = non_hallucination(["correct", "wrong", "abstained", "correct", "", ""])
    assert (found.non_hallucination, found.accuracy) == (0.75, 0.5)
    assert found.counts == {"correct": 2, "abstained": 1, "wrong": 1, "unjudged": 2}
    nothing = non_hallucination(["", ""])
    assert (nothing.non_hallucination, nothing.accuracy, nothing.counts["unjudged"]) == (None, None, 2)
    with pytest.raises(ValueError, match="label 'right' is none of"):
        non_hallucination(["right"])


@given(st.lists(st.sampled_from([*LABELS, ""]), max_size=20))
def test_shares_and_counts_agree(labels: list[str]) -> None:
    found = non_hallucination(labels)
    assert sum(found.counts.values()) == len(labels)
    if found.accuracy is not None and found.non_hallucination is not None:
        assert 0 <= found.accuracy <= found.non_hallucination <= 1
