"""What verifiers say of samples: only `ok` carries a reward, whatever goes wrong is a state, nobody is passed over."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.run import FakeText
from mopdctl.rollouts.verdicts import Trouble, check_verifiable, judge, verdict_columns, verdicts_on, with_verdict
from mopdctl.store import rows, schema
from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState
from mopdctl.verifiers.registry import run_check


class InProcess:
    """A pool without processes, which remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Attempt]] = []

    def check(self, asked: list[tuple[str, Attempt]]) -> list[Verdict]:
        self.asked += asked
        return [run_check(VERIFIERS[name], attempt) for name, attempt in asked]


class Scripted:
    """A pool that gives verdicts as it was told."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)

    def check(self, asked: list[tuple[str, Attempt]]) -> list[Verdict]:
        assert len(asked) == len(self.verdicts)
        return self.verdicts


def prompt(number: int, **changes: Any) -> Prompt:
    fields: dict[str, Any] = {"messages": ({"role": "user", "content": f"question {number}"},), "tools": None}
    return Prompt(prompt_id=f"p{number}", routing={}, place=f"file:{number}", **fields | changes)


def sample(number: int, response: list[int], **changes: Any) -> Sample:
    """An answer of the fake engine to prompt `number`, whose text is its tokens as numbers."""
    fields: dict[str, Any] = {
        "sample_id": f"p{number}/0@0",
        "prompt_id": f"p{number}",
        "group_id": f"p{number}",
        "generation_index": 0,
        "domain": "",
        "teacher_id": "",
        "policy_version_min": 0,
        "policy_version_max": 0,
        "tokens": np.array([9, 9, *response], np.int32),
        "prompt_length": 2,
        "loss_mask": np.array([False, False, *[True] * len(response)]),
        "behavior_logprobs": np.zeros(len(response), np.float32),
        "finish_reason": "stop",
    }
    return Sample(**fields | changes)


def by_id(*prompts: Prompt) -> dict[str, Prompt]:
    return {p.prompt_id: p for p in prompts}


def exact(reference: Any) -> dict[str, Any]:
    return {"verifier": "exact_match", "reference": {"answer": reference}}


VERSION = VERIFIERS["exact_match"].version


def test_an_answer_is_held_against_the_reference_of_its_own_prompt_without_its_end_token() -> None:
    prompts = by_id(
        prompt(1, **exact("5 6")), prompt(2, **exact("5 6")), prompt(3, verifier="integer", reference={"answer": 7})
    )
    given = [sample(3, [7, 0]), sample(2, [6, 5, 0]), sample(1, [5, 6, 0])]
    found = judge(given, prompts, FakeText(), InProcess())
    assert [(s.sample_id, s.verdict, s.reward) for s in found] == [
        ("p3/0@0", "ok", 1.0),
        ("p2/0@0", "ok", 0.0),
        ("p1/0@0", "ok", 1.0),
    ]
    assert [s.verifier for s in found[1:]] == [f"exact_match/{VERSION}"] * 2
    assert [s.tokens.tolist() for s in found] == [s.tokens.tolist() for s in given]


def test_the_verifier_sees_prompt_tools_and_reference() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    pool = InProcess()
    judge([sample(1, [5, 0])], by_id(prompt(1, tools=tools, **exact("5"))), FakeText(), pool)
    messages = ({"role": "user", "content": "question 1"},)
    assert pool.asked == [("exact_match", Attempt("5", {"answer": "5"}, messages, tools, None, ()))]


def test_nobody_is_asked_about_an_answer_to_a_prompt_without_a_verifier() -> None:
    given, pool = [sample(1, [5, 0]), sample(2, [5, 0])], InProcess()
    found = judge(given, by_id(prompt(1), prompt(2, **exact("5"))), FakeText(), pool)
    assert found[0] is given[0]
    assert (found[0].verdict, found[1].verdict, len(pool.asked)) == (None, "ok", 1)


@pytest.mark.parametrize("reason", ["length", "max_turns"])
def test_a_truncated_answer_is_checked_as_it_is_unless_told_otherwise(reason: str) -> None:
    given = [sample(1, [5], finish_reason=reason), sample(1, [5, 0])]
    prompts = by_id(prompt(1, **exact("5")))
    assert [s.reward for s in judge(given, prompts, FakeText(), InProcess())] == [1.0, 1.0]
    left = judge(given, prompts, FakeText(), InProcess(), truncated=False)
    assert [(s.verdict, s.reward) for s in left] == [(None, None), ("ok", 1.0)]


def test_a_lost_tool_result_is_nobodys_score() -> None:
    pool = InProcess()
    (found,) = verdicts_on(
        [sample(1, [5], finish_reason="tool_lost")], by_id(prompt(1, **exact("5"))), FakeText(), pool
    )
    assert found == Verdict(
        VerdictState.INFRA_ERROR, None, "exact_match", VERSION, "the result of a tool call was lost"
    )
    assert pool.asked == []


@pytest.mark.parametrize("state", [s for s in VerdictState if s is not VerdictState.OK])
def test_a_failed_check_is_a_state_and_no_score(state: VerdictState) -> None:
    scored = sample(1, [5, 0], reward=1.0, verdict="ok", verifier="exact_match/0", verdict_label="correct")
    verdict = Verdict(state, None, "exact_match", 1, "why")
    (found,) = judge([scored], by_id(prompt(1, **exact("5"))), FakeText(), Scripted(verdict))
    assert [getattr(found, name) for name in schema.VERDICT] == [None, state.value, "exact_match/1", None]


# huggingface/Repo2RLEnv #76: details beside a reward broke those who read flat numbers
def test_what_is_kept_of_a_verdict_is_flat_and_without_its_detail() -> None:
    verdict = Verdict(VerdictState.OK, 0.5, "constraints", 3, '{"nested": {"rewards": [1, 0]}}', "partial")
    assert verdict_columns(verdict) == {
        "reward": 0.5,
        "verdict": "ok",
        "verifier": "constraints/3",
        "verdict_label": "partial",
    }
    assert tuple(verdict_columns(verdict)) == schema.VERDICT


@given(st.floats(0, 1))
@settings(deadline=None)
def test_a_reward_is_the_same_in_memory_and_in_the_store(reward: float) -> None:
    judged = with_verdict(sample(1, [5, 0]), Verdict(VerdictState.OK, reward, "x", 1))
    rows.check(judged)
    (kept,) = rows.meta_table([judged], file="payload/x", groups=[1])["reward"].to_pylist()
    assert judged.reward == kept == float(np.float32(reward))


def test_a_sample_of_an_unknown_prompt_is_an_error_and_not_left_out() -> None:
    with pytest.raises(KeyError, match="p2"):
        judge([sample(2, [5, 0])], by_id(prompt(1)), FakeText(), InProcess())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verifier": "exactmatch", "reference": "5"}, "file:2: verifier 'exactmatch' is none of exact_match, "),
        ({"verifier": ["exact_match"], "reference": "5"}, "file:2: verifier ['exact_match'] is none of exact_match, "),
        ({"verifier": "constraints", "reference": 5}, "file:2: "),
        ({"verifier": "json_equal"}, "file:2: "),
    ],
)
def test_a_prompt_that_nobody_can_check_is_named(changes: dict[str, Any], message: str) -> None:
    prompts = [prompt(0), prompt(1, **exact("5")), prompt(2, **changes)]
    with pytest.raises(InputError) as refused:
        check_verifiable(prompts, InProcess())
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    check_verifiable(prompts[:2], InProcess())


def test_what_came_to_no_result_is_counted_with_an_example(make_samples: Callable[[int], list[Sample]]) -> None:
    trouble = Trouble()
    verdicts = [
        Verdict(VerdictState.OK, 1.0, "x", 1),
        Verdict(VerdictState.TIMEOUT, None, "x", 1, "over\n5 s"),
        Verdict(VerdictState.PARSE_ERROR, None, "x", 1, "no number"),
        None,
        Verdict(VerdictState.TIMEOUT, None, "x", 1, "over 1 GB"),
        Verdict(VerdictState.INFRA_ERROR, None, "x", 1, "died"),
    ]
    trouble.see(make_samples(3), verdicts[:3])
    trouble.see([replace(s, sample_id=f"later-{i}") for i, s in enumerate(make_samples(3))], verdicts[3:])
    assert trouble.lines() == [
        "2 answers ended as timeout, the first p1/0@0: over 5 s",
        "1 answers ended as infra_error, the first later-2: died",
    ]


@pytest.fixture
def make_samples() -> Callable[[int], list[Sample]]:
    return lambda count: [sample(number, [5, 0]) for number in range(count)]
