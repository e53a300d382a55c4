"""Group advantages: closed forms, and what holds for all rewards."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.objective.group import Baseline, Scale, group_advantages, has_zero_variance

REWARDS = st.lists(st.floats(-2, 2, allow_nan=False), min_size=2, max_size=16)


@given(REWARDS, st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["std", "none"]))
def test_they_sum_to_zero(rewards: list[float], baseline: Baseline, scale: Scale) -> None:
    found = group_advantages(rewards, baseline=baseline, scale=scale)
    assert abs(math.fsum(found)) <= 1e-9 * max(1.0, *map(abs, found))


@given(REWARDS, st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["std", "none"]))
def test_a_better_answer_never_has_the_smaller_advantage(
    rewards: list[float], baseline: Baseline, scale: Scale
) -> None:
    found = group_advantages(rewards, baseline=baseline, scale=scale)
    pairs = sorted(zip(rewards, found, strict=True))
    assert all(a <= b + 1e-12 for (_, a), (_, b) in pairwise(pairs))


@given(st.floats(-2, 2, allow_nan=False), st.integers(2, 9))
def test_equal_rewards_have_exactly_no_advantage(reward: float, size: int) -> None:
    # A mean of equal numbers is not always that number: 0.1 seven times is one example.
    rewards = [reward] * size
    assert has_zero_variance(rewards)
    assert group_advantages(rewards) == [0.0] * size


def test_mean_and_population_deviation() -> None:
    # mean 0.25, deviation sqrt(3)/4
    found = group_advantages([1.0, 0.0, 0.0, 0.0], epsilon=0)
    assert found == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale="none") == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_leave_one_out_compares_with_the_others() -> None:
    found = group_advantages([1.0, 0.5, 0.0], baseline="leave_one_out", scale="none")
    assert found == pytest.approx([1 - 0.25, 0.5 - 0.5, 0 - 0.75])


def test_epsilon_bounds_a_tiny_deviation() -> None:
    found = group_advantages([0.5, 0.5 + 1e-9], epsilon=1e-6)
    assert max(map(abs, found)) < 1e-3


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_an_answer_alone_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 2 rewards"):
        group_advantages(rewards)
