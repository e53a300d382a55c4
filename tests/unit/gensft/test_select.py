import random
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.config.gensft import SelectConfig
from mopdctl.gensft.records import Answer, Judged
from mopdctl.gensft.select import select, voted_answer

BOXED = SelectConfig().answer


def judged(
    index: int,
    score: float | None = None,
    *,
    says: str | None = None,
    state: Any = "ok",
    score_state: Any = None,
    **more: Any,
) -> Judged:
    """An answer that says `says` in a box; without a score its panel had no quorum."""
    text = "no box" if says is None else f"So \\boxed{{{says}}}."
    answer = Answer(index, state, {"role": "assistant", "content": text}, "stop", "m", {}, f"k{index}", 1, 1)
    return Judged(answer, (), score, score_state or ("no_quorum" if score is None else "ok"), **more)


def outcome(answers: list[Judged], *, reference: Judged | None = None, **config: Any) -> dict[int, str]:
    """Sample index to `kept` or the reason."""
    found = select(answers, SelectConfig(**config), reference=reference)
    kept = {j.answer.sample_index: "kept" for j in found.kept}
    return dict(sorted((kept | {j.answer.sample_index: str(reason) for j, reason in found.dropped}).items()))


def test_all_keeps_every_whole_answer_and_counts_no_votes() -> None:
    answers = [judged(1, 3.0), judged(0), judged(2, state="truncated"), judged(3, state="infra_error")]
    found = select(answers, SelectConfig(), reference=None)
    assert [j.answer.sample_index for j in found.kept] == [0, 1]
    assert found.dropped == []
    assert all(j.votes is None for j in found.kept)


def test_no_answers_select_nothing() -> None:
    for strategy in ("all", "best", "majority"):
        assert outcome([judged(0, state="empty")], strategy=strategy) == {}


def test_only_what_a_verifier_did_not_pass_is_dropped_when_verification_is_required() -> None:
    answers = [
        judged(0, verify_state="ok", reward=1.0),
        judged(1, verify_state="ok", reward=0.0),
        judged(2, verify_state="ok", reward=0.5),
        judged(3, verify_state="parse_error"),
        judged(4, verify_state="invalid_reference"),
        judged(5),
    ]
    assert outcome(answers, require_verified=True) == {
        0: "kept",
        1: "not_verified",
        2: "not_verified",
        3: "verifier_failed",
        4: "verifier_failed",
        5: "kept",
    }
    assert set(outcome(answers).values()) == {"kept"}


def test_a_score_below_the_least_is_dropped_and_a_missing_one_is_not_taken_for_a_low_one() -> None:
    answers = [judged(0, 6.9), judged(1, 7.0), judged(2)]
    assert outcome(answers, min_score=7) == {0: "below_min_score", 1: "kept", 2: "no_score"}
    assert outcome([judged(0, score_state="not_judged")], min_score=7) == {0: "kept"}


def test_a_required_score_is_required_of_those_that_a_panel_should_have_scored() -> None:
    answers = [judged(0, 1.0), judged(1), judged(2, score_state="not_judged")]
    assert outcome(answers, require_score=True) == {0: "kept", 1: "no_score", 2: "kept"}


def test_answers_have_to_beat_the_reference_where_both_have_a_score() -> None:
    answers = [judged(0, 4.0), judged(1, 5.0), judged(2, 6.0), judged(3)]
    beaten = {0: "below_reference", 1: "below_reference", 2: "kept", 3: "no_score"}
    assert outcome(answers, reference=judged(-1, 5.0), beat_reference=True) == beaten
    for reference in (None, judged(-1), judged(-1, state="truncated")):
        assert set(outcome(answers, reference=reference, beat_reference=True).values()) == {"kept"}
    assert set(outcome(answers, reference=judged(-1, 9.0)).values()) == {"kept"}


def test_best_goes_by_score_then_by_the_verifier_then_by_index() -> None:
    answers = [
        judged(0, 7.0, verify_state="parse_error"),
        judged(1, 7.0, verify_state="ok", reward=0.0),
        judged(2, 7.0, verify_state="ok", reward=1.0),
        judged(3, 7.0, verify_state="ok", reward=1.0),
        judged(4, 8.0, verify_state="ok", reward=0.0),
    ]
    order = [4, 2, 3, 1, 0]
    for keep in range(1, 6):
        found = outcome(answers, strategy="best", keep=keep)
        assert found == {i: "kept" if i in order[:keep] else "not_best" for i in range(5)}


def test_an_answer_without_a_score_is_never_best_while_a_scored_one_exists() -> None:
    answers = [judged(0), judged(1, -3.0), judged(2, verify_state="ok", reward=1.0)]
    assert outcome(answers, strategy="best", keep=3) == {0: "no_score", 1: "kept", 2: "no_score"}
    assert outcome(answers, strategy="best", min_score=0) == {0: "no_score", 1: "below_min_score", 2: "no_score"}


def test_where_nobody_has_a_score_the_best_is_the_verified_one_of_the_lowest_index() -> None:
    answers = [judged(0), judged(1, verify_state="ok", reward=1.0), judged(2, verify_state="ok", reward=1.0)]
    assert outcome(answers, strategy="best") == {0: "not_best", 1: "kept", 2: "not_best"}


def test_majority_keeps_the_best_scored_of_the_winners_and_writes_the_votes_down() -> None:
    answers = [judged(0, 9.0, says="41"), judged(1, 5.0, says="42"), judged(2, says="42"), judged(3, 8.0, says="42.0")]
    assert outcome(answers, strategy="majority") == {0: "outvoted", 1: "not_best", 2: "not_best", 3: "kept"}
    found = select(answers, SelectConfig(strategy="majority", keep=2), reference=None)
    assert [(j.answer.sample_index, j.votes) for j in found.kept] == [(1, 3), (3, 3)]
    assert [(j.answer.sample_index, j.votes) for j, _ in found.dropped] == [(0, 1), (2, 3)]


# NVIDIA-NeMo/Skills #461
def test_a_missing_answer_is_a_third_state_and_never_a_vote() -> None:
    tie = [judged(0, says="Y"), judged(1, says="N"), judged(2)]
    for min_votes in (1, 2):
        assert outcome(tie, strategy="majority", min_votes=min_votes) == {
            0: "no_majority",
            1: "no_majority",
            2: "no_answer_found",
        }
    missing = [judged(0, says="Y"), judged(1), judged(2), judged(3, says=" "), judged(4, says="Y")]
    assert outcome(missing, strategy="majority") == {
        0: "kept",
        1: "no_answer_found",
        2: "no_answer_found",
        3: "no_answer_found",
        4: "not_best",
    }
    found = select(missing, SelectConfig(strategy="majority"), reference=None)
    assert found.kept[0].votes == 2
    assert [j.votes for j, _ in found.dropped] == [None, None, None, 2]


def test_too_few_votes_are_no_majority() -> None:
    assert outcome([judged(0, says="Y")], strategy="majority") == {0: "no_majority"}
    assert outcome([judged(0, says="Y")], strategy="majority", min_votes=1) == {0: "kept"}


def test_votes_count_whatever_else_is_wrong_with_an_answer_but_not_if_it_is_cut_off() -> None:
    wrong = {"verify_state": "ok", "reward": 0.0}
    answers = [judged(0, says="1", **wrong), judged(1, says="1", **wrong), judged(2, says="2")]
    assert outcome(answers, strategy="majority", require_verified=True) == {
        0: "not_verified",
        1: "not_verified",
        2: "outvoted",
    }
    cut = [judged(0, says="1"), judged(1, says="1", state="truncated"), judged(2, says="2")]
    assert set(outcome(cut, strategy="majority").values()) == {"no_majority"}


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        ("\\boxed{42}", Decimal(42)),
        ("\\boxed{42.0}", Decimal(42)),
        ("\\boxed{4.2e1}", Decimal(42)),
        ("\\boxed{ +42. }", Decimal(42)),
        ("\\boxed{4.2E+1}", Decimal(42)),
        ("\\boxed{.5}", Decimal("0.5")),
        ("\\boxed{-0}", Decimal(0)),
        ("first \\boxed{1}, then \\boxed{2}", Decimal(2)),
        ("\\boxed{ New \n YORK }", "new york"),
        ("\\boxed{1/2}", "1/2"),
        ("\\boxed{1,000}", "1,000"),
        ("\\boxed{nan}", "nan"),
        ("\\boxed{1e99999999999999999999}", "1e99999999999999999999"),
        ("\\boxed{٣}", "٣"),
        ("\\boxed{}", None),
        ("\\boxed{1} \\boxed{}", None),
        ("42", None),
        ("", None),
    ],
)
def test_a_vote_is_the_last_match_and_plain_numbers_compare_by_value(text: str, vote: Any) -> None:
    assert voted_answer(text, BOXED) == vote
    assert type(voted_answer(text, BOXED)) is type(vote)


def test_numbers_that_differ_in_any_digit_are_different_answers() -> None:
    assert voted_answer("\\boxed{0.1}", BOXED) != voted_answer("\\boxed{0.10000000000000000001}", BOXED)


def test_the_pattern_can_be_another_and_its_group_may_stay_empty() -> None:
    pattern = r"answer:(?: (\w+))?"
    assert voted_answer("answer: Yes", pattern) == "yes"
    assert voted_answer("answer:", pattern) is None


SCORES = st.none() | st.sampled_from([1.0, 2.0, 3.0])
VERIFIED = st.sampled_from([(None, None), ("ok", 0.0), ("ok", 1.0), ("parse_error", None)])


@st.composite
def answer_lists(draw: st.DrawFn) -> list[Judged]:
    made = []
    for index in range(draw(st.integers(0, 7))):
        verify_state, reward = draw(VERIFIED)
        says = draw(st.sampled_from(["1", "1.0", "2", None]))
        state = draw(st.sampled_from(["ok", "ok", "ok", "truncated"]))
        made.append(judged(index, draw(SCORES), says=says, state=state, verify_state=verify_state, reward=reward))
    return made


CONFIGS = st.builds(
    SelectConfig,
    strategy=st.sampled_from(["all", "best", "majority"]),
    keep=st.integers(1, 3),
    min_score=st.none() | st.just(2.0),
    min_votes=st.integers(1, 3),
    require_verified=st.booleans(),
    require_score=st.booleans(),
    beat_reference=st.booleans(),
)


@given(answer_lists(), CONFIGS, SCORES, st.randoms(use_true_random=False))
def test_every_whole_answer_is_kept_or_dropped_once_whatever_their_order(
    answers: list[Judged], config: SelectConfig, score: float | None, shuffler: random.Random
) -> None:
    reference = judged(-1, score)
    found = select(answers, config, reference=reference)
    indices = [j.answer.sample_index for j in found.kept] + [j.answer.sample_index for j, _ in found.dropped]
    assert sorted(indices) == [j.answer.sample_index for j in answers if j.answer.state == "ok"]
    if config.strategy != "all":
        assert len(found.kept) <= config.keep
    shuffled = shuffler.sample(answers, len(answers))
    assert select(shuffled, config, reference=reference) == found
