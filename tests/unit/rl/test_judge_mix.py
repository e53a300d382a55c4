"""What an answer earns of verifier and judge together."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.config.judge import JudgeReward
from mopdctl.config.rl import RlEnvironment
from mopdctl.records import Sample
from mopdctl.rl.judge_mix import mixed
from mopdctl.store.rows import verdict_problem

SERVER = {"base_url": "http://host/v1", "model": "m"}
SAMPLE = Sample(
    "s", "p", "g", 0, "poems", "", 0, 0,
    tokens=np.array([1, 2], np.int32),
    prompt_length=1,
    loss_mask=np.array([False, True]),
    behavior_logprobs=np.zeros(1, np.float32),
    finish_reason="stop",
)  # fmt: skip


def settings(**changes: Any) -> JudgeReward:
    return JudgeReward.model_validate(SERVER | changes)


def verified(reward: float | None, verdict: str = "ok", **more: Any) -> Sample:
    return replace(SAMPLE, reward=reward, verdict=verdict, verifier="exact_match/2", **more)


def kept(sample: Sample) -> tuple[Any, ...]:
    """The columns of a verdict, which the store takes."""
    row = {name: getattr(sample, name) for name in ("reward", "verdict", "verifier", "verdict_label")}
    assert verdict_problem(row) is None
    return tuple(row.values())


def test_the_weights_say_what_each_of_the_two_counts() -> None:
    judge = settings(weight=3, verifier_weight=1)
    assert kept(mixed(verified(1.0), judge, 0.5)) == (0.625, "ok", "mix:exact_match/2+judge/2", None)
    assert kept(mixed(verified(0.0, verdict_label="wrong"), judge, 1.0))[::3] == (0.75, "wrong")


def test_without_a_verifier_the_judge_is_all() -> None:
    judge = settings(verifier_weight=0)
    assert kept(mixed(SAMPLE, judge, 0.25)) == (0.25, "ok", "judge/2", None)
    assert kept(mixed(SAMPLE, judge, None)) == (None, "infra_error", "judge/2", "judge_error")
    lost = replace(SAMPLE, finish_reason="tool_lost")
    assert kept(mixed(lost, judge, None)) == (None, "infra_error", "judge/2", "tool_lost")


def test_an_answer_that_nobody_could_compare_has_no_reward_rather_than_the_verifiers_part() -> None:
    found = kept(mixed(verified(1.0), settings(), None))
    assert found == (None, "infra_error", "mix:exact_match/2+judge/2", "judge_error")


@pytest.mark.parametrize("state", ["parse_error", "timeout", "infra_error", "invalid_reference"])
def test_no_judge_pays_for_an_answer_that_the_verifier_gave_no_reward(state: str) -> None:
    assert kept(mixed(verified(None, state), settings(), 1.0)) == (None, state, "exact_match/2", None)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e300), st.floats(1e-300, 1e300))
def test_the_mix_lies_between_its_parts(verifier: float, judge: float, verifier_weight: float, weight: float) -> None:
    sample = mixed(verified(verifier), settings(weight=weight, verifier_weight=verifier_weight), judge)
    reward = kept(sample)[0]
    low, high = (judge, judge) if verifier_weight == 0 else sorted((verifier, judge))
    assert low - 1e-6 <= reward <= high + 1e-6


def test_an_environment_has_a_teacher_or_a_judge() -> None:
    with pytest.raises(ValueError, match="give either teacher or judge"):
        RlEnvironment.model_validate({"prompts": "p.jsonl", "teacher": "t", "judge": SERVER})
    for judge, asks in ((None, True), (SERVER, True), (SERVER | {"verifier_weight": 0}, False)):
        assert RlEnvironment.model_validate({"prompts": "p.jsonl", "judge": judge}).asks_verifier is asks
