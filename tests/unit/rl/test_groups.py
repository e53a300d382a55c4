"""What answers earn, and which of them train."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.config.rl import RlTrainConfig
from mopdctl.records import Sample
from mopdctl.rl.groups import Rated, checks_that_failed, form_groups, overlong_penalty, rate


def settings(**train: Any) -> RlTrainConfig:
    return RlTrainConfig.model_validate({"steps": 1, **train})


def rated(group: str, *earned: float | None, environment: str = "math") -> list[Rated]:
    return [
        Rated(f"{group}/{i}", group, environment, value, value, "ok" if value is not None else "infra_error")
        for i, value in enumerate(earned)
    ]


def test_a_group_without_variance_is_skipped_and_counted() -> None:
    everyone = [*rated("a", 1, 1, 1), *rated("b", 1, 0, 0), *rated("c", 0, 0, 0), *rated("d", 0.5, 0.5)]
    found = form_groups(everyone, settings())
    assert sorted(found.advantages) == ["b/0", "b/1", "b/2"]
    assert found.useful == 1
    assert found.metrics["rl/groups"] == {"math": {"all_best": 1, "useful": 1, "all_worst": 1, "all_equal": 1}}
    assert found.metrics["rl/useful_share"] == {"math": 0.25}


def test_keep_leaves_it_in_the_denominator_with_no_advantage() -> None:
    found = form_groups([*rated("a", 1, 1), *rated("b", 1, 0)], settings(zero_variance="keep", scale="none"))
    assert found.advantages == {"a/0": 0.0, "a/1": 0.0, "b/0": 0.5, "b/1": -0.5}
    assert found.useful == 1


def test_an_answer_without_a_reward_is_no_score_and_moves_no_baseline() -> None:
    found = form_groups(rated("a", 1, None, 0), settings(scale="none"))
    assert found.advantages == {"a/0": 0.5, "a/2": -0.5}
    assert found.metrics["rl/states"] == {"math": {"ok": 2, "infra_error": 1}}
    assert found.metrics["rl/reward"] == {"math": 0.5}


def test_one_answer_that_earned_something_is_nothing_to_compare() -> None:
    found = form_groups(rated("a", 1, None, None), settings())
    assert not found.advantages
    assert found.metrics["rl/groups"] == {"math": {"too_small": 1}}


def test_an_environment_where_nothing_could_be_checked_has_no_reward_rather_than_zero() -> None:
    found = form_groups(rated("a", None, None), settings())
    assert found.metrics["rl/reward"] == {"math": None}
    assert found.metrics["rl/earned"] == {"math": None}


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=5), min_size=1, max_size=6))
def test_every_group_is_counted_once_and_each_sums_to_zero(groups: list[list[float | None]]) -> None:
    everyone = [one for i, earned in enumerate(groups) for one in rated(str(i), *earned)]
    found = form_groups(reversed(everyone), settings(scale="none"))
    assert sum(found.metrics["rl/groups"]["math"].values()) == len(groups)
    for i in range(len(groups)):
        own = [a for sample_id, a in found.advantages.items() if sample_id.startswith(f"{i}/")]
        assert sum(own) == pytest.approx(0, abs=1e-12)
        assert not own or any(own)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (60, 0), (70, -0.25), (80, -0.5), (100, -1), (120, -1)])
def test_the_soft_punishment_is_linear_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, budget=100, buffer=40) == pytest.approx(penalty)


def test_soft_and_its_buffer_come_together() -> None:
    for bad in ({"overlong": "soft"}, {"overlong_buffer": 8}):
        with pytest.raises(ValueError, match="soft needs overlong_buffer"):
            settings(**bad)


# ------------------------------------------------------------------------------------------------------ what one earns


def sample(reward: float | None, verdict: str | None, *, finish_reason: str = "stop", length: int = 4) -> Sample:
    return Sample(
        "s", "p", "g", 0, "math", "", 0, 0,
        tokens=np.arange(1 + length, dtype=np.int32),
        prompt_length=1,
        loss_mask=np.arange(1 + length) > 0,
        behavior_logprobs=np.zeros(length, np.float32),
        finish_reason=finish_reason,
        reward=reward,
        verdict=verdict,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "verdict", "train", "earned"),
    [
        (0.5, "ok", {}, 0.5),
        (None, "parse_error", {}, 0.0),
        (None, "parse_error", {"state_rewards": {"parse_error": None}}, None),
        (None, "timeout", {"state_rewards": {"timeout": 0.25}}, 0.25),
        (None, "infra_error", {}, None),
        (None, "invalid_reference", {}, None),
        (None, None, {}, None),
    ],
)
def test_a_state_earns_what_the_configuration_says_and_a_broken_check_nothing(
    reward: float | None, verdict: str | None, train: dict[str, Any], earned: float | None
) -> None:
    found = rate(sample(reward, verdict), settings(**train), budget=10)
    assert (found.earned, found.reward, found.state) == (earned, reward, verdict or "unverified")


@pytest.mark.parametrize("finish_reason", ["length", "max_turns"])
@pytest.mark.parametrize(
    ("train", "earned", "state"),
    [
        ({}, 1.0, "ok"),
        ({"overlong": "fail"}, 0.0, "ok"),
        ({"overlong": "mask"}, None, "masked"),
        ({"overlong": "soft", "overlong_buffer": 8}, 0.75, "ok"),
    ],
)
def test_overlong_answers_are_treated_as_asked(
    finish_reason: str, train: dict[str, Any], earned: float | None, state: str
) -> None:
    found = rate(sample(1.0, "ok", finish_reason=finish_reason), settings(**train), budget=10)
    assert (found.earned, found.state, found.verdict) == (earned, state, "ok")


OVERLONG: list[dict[str, Any]] = [{"overlong": o} for o in ("score", "fail", "mask")] + [
    {"overlong": "soft", "overlong_buffer": 8}
]


@pytest.mark.parametrize("verdict", ["infra_error", "invalid_reference", None])
@pytest.mark.parametrize("train", OVERLONG)
@pytest.mark.parametrize("finish_reason", ["stop", "length", "max_turns", "tool_lost"])
def test_an_answer_that_nobody_could_check_earns_nothing_however_it_ended(
    verdict: str | None, train: dict[str, Any], finish_reason: str
) -> None:
    assert rate(sample(None, verdict, finish_reason=finish_reason), settings(**train), budget=4).earned is None


@pytest.mark.parametrize("verdict", ["parse_error", "timeout"])
def test_fail_gives_0_to_an_overlong_answer_that_its_check_could_not_finish(verdict: str) -> None:
    train = settings(overlong="fail", state_rewards={"parse_error": None, "timeout": 0.5})
    for finish_reason in ("length", "max_turns"):
        found = rate(sample(None, verdict, finish_reason=finish_reason), train, budget=4)
        assert (found.earned, found.state) == (0.0, verdict)


@pytest.mark.parametrize("train", OVERLONG)
def test_a_lost_tool_result_is_told_as_what_it_is(train: dict[str, Any]) -> None:
    found = rate(sample(None, "infra_error", finish_reason="tool_lost"), settings(**train), budget=4)
    assert (found.earned, found.state, found.verdict) == (None, "infra_error", "infra_error")


# ------------------------------------------------------------------------------------------ a step that nobody checked


def said(*verdicts: str, environment: str = "math") -> list[Rated]:
    return [Rated(f"{environment}/{i}", "g", environment, None, None, v, verdict=v) for i, v in enumerate(verdicts)]


# NVIDIA-NeMo/RL #2394: training went on without rewards
@pytest.mark.parametrize("state", ["infra_error", "invalid_reference", "timeout", ""])
def test_a_step_in_which_no_answer_could_be_checked_is_told_with_its_states(state: str) -> None:
    everyone = [*said(state, "infra_error"), *said(state, state, environment="code")]
    found = checks_that_failed(everyone)
    assert sum(found["math"].values()) == sum(found["code"].values()) == 2
    assert found["code"] == {state or "unverified": 2}


@pytest.mark.parametrize("state", ["ok", "parse_error"])
def test_one_answer_that_was_checked_is_enough(state: str) -> None:
    assert checks_that_failed([*said("infra_error", "infra_error"), *said(state, environment="code")]) == {}
    assert checks_that_failed([]) == {}


def test_a_masked_answer_that_was_checked_counts_as_checked() -> None:
    train = settings(overlong="mask")
    for verdict, failed in (("ok", {}), ("infra_error", {"math": {"infra_error": 1}})):
        one = rate(sample(1.0 if verdict == "ok" else None, verdict, finish_reason="length"), train, budget=4)
        assert one.state == "masked"
        assert checks_that_failed([one]) == failed
