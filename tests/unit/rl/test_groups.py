"""What answers earn, and which of them train."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.config.rl import RlTrainConfig
from mopdctl.rl.groups import Rated, form_groups, overlong_penalty


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
