"""Factors on lambda: closed forms, bounds and mean, and that the order of teachers means nothing."""

import math
import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.objective.balance import Spread, pooled, share_factors, sigma_factors, spread

ROUNDING = 1e-12
LOW, HIGH = 1 / 16, 16.0

values = st.lists(st.floats(-30, 30), max_size=12)


# ------------------------------------------------------------------------------------------------------------- spreads


def test_spread_by_hand() -> None:
    found = spread(torch.tensor([1.0, 2.0, 6.0]))
    assert found == Spread(3, 3.0, 4.0 + 1.0 + 9.0)
    assert found.sigma_nats == math.sqrt(14 / 3)


def test_nothing_has_no_spread() -> None:
    assert spread(torch.zeros(0)) == pooled([]) == pooled([Spread(0, 0.0, 0.0)]) == Spread(0, 0.0, 0.0)
    assert Spread(0, 0.0, 0.0).sigma_nats == 0.0


@given(st.lists(values, min_size=1, max_size=6).filter(lambda parts: any(parts)))
def test_parts_have_the_spread_of_the_whole(parts: list[list[float]]) -> None:
    whole = np.concatenate([np.array(part, np.float64) for part in parts])
    found = pooled(spread(torch.tensor(part, dtype=torch.float64)) for part in parts)
    assert found.count == len(whole)
    assert found.mean_nats == pytest.approx(whole.mean(), abs=1e-12)
    assert found.sigma_nats == pytest.approx(whole.std(), rel=1e-9, abs=1e-7)


@given(st.lists(values, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_parts_changes_no_bit(parts: list[list[float]], order: random.Random) -> None:
    spreads = [spread(torch.tensor(part, dtype=torch.float64)) for part in parts]
    shuffled = order.sample(spreads, len(spreads))
    assert pooled(shuffled) == pooled(spreads)


# --------------------------------------------------------------------------------------------------------------- sigma


def test_sigma_factors_by_hand() -> None:
    # Deviations 1 and 3 about the same mean 0: sigma_all^2 = (2 * 1 + 2 * 9) / 4 = 5.
    spreads = {"a": spread(torch.tensor([1.0, -1.0])), "b": spread(torch.tensor([3.0, -3.0]))}
    found = sigma_factors(spreads, low=0.25, high=4.0)
    assert found == {"a": pytest.approx(math.sqrt(5)), "b": pytest.approx(math.sqrt(5) / 3)}
    assert sigma_factors(spreads, low=0.9, high=1.5) == {"a": 1.5, "b": 0.9}


def naive_dn_mopd(log_ratios: Mapping[str, list[float]], low: float, high: float) -> dict[str, float]:
    """w_d = clip(sigma_all / sigma_d, low, high) with population deviations of all tokens at once."""
    everything = np.concatenate([np.array(v, np.float64) for v in log_ratios.values()])
    return {d: float(np.clip(everything.std() / np.array(v).std(), low, high)) for d, v in log_ratios.items()}


def test_sigma_factors_are_those_of_a_naive_reference() -> None:
    random_numbers = np.random.default_rng(0)
    for _ in range(50):
        # The mean of the log-ratios, minus the KL, differs by teacher and counts in sigma_all.
        found = {
            name: list(random_numbers.normal(random_numbers.normal(), random_numbers.uniform(0.02, 3), size=size))
            for name, size in zip("abcd", random_numbers.integers(2, 300, size=4), strict=True)
        }
        spreads = {
            name: pooled([spread(torch.tensor(v[:1])), spread(torch.tensor(v[1:]))]) for name, v in found.items()
        }
        assert sigma_factors(spreads, low=0.25, high=4) == pytest.approx(naive_dn_mopd(found, 0.25, 4), rel=1e-9)


def test_a_teacher_without_spread_has_factor_one() -> None:
    # The student as its own teacher; a single token.
    spreads = {"self": spread(torch.zeros(5)), "one": spread(torch.tensor([2.0])), "a": spread(torch.tensor([0.0, 4]))}
    found = sigma_factors(spreads, low=0.25, high=4.0)
    assert found["self"] == found["one"] == 1.0
    assert found["a"] < 1.0
    assert sigma_factors({"self": spread(torch.zeros(5))}, low=0.25, high=4.0) == {"self": 1.0}


def test_all_log_ratios_in_another_unit_give_the_same_sigma_factors() -> None:
    parts = {"a": [0.5, 1.0, -2.0], "b": [0.25, 0.0, 0.125]}
    one, other = (
        sigma_factors({k: spread(torch.tensor(v).double() * unit) for k, v in parts.items()}, low=0.01, high=100)
        for unit in (1.0, 8.0)
    )
    assert one == pytest.approx(other, rel=ROUNDING)


# --------------------------------------------------------------------------------------------------------------- share


def step(
    before: Mapping[str, float],
    norms: Mapping[str, float],
    targets: Mapping[str, float],
    weights: Mapping[str, float],
    memory: float = 0.0,
) -> dict[str, float]:
    return share_factors(before, norms, targets, weights, memory=memory, low=LOW, high=HIGH)


def shares(factors: Mapping[str, float], norms: Mapping[str, float]) -> dict[str, float]:
    total = sum(factors[d] * norms[d] for d in norms)
    return {d: factors[d] * norms[d] / total for d in norms}


EQUAL = {"a": 1.0, "b": 1.0}


def test_undamped_shares_are_the_targets_at_once_and_the_mean_stays_one() -> None:
    found = step(EQUAL, {"a": 6.0, "b": 2.0}, EQUAL, EQUAL)
    # w_a : w_b = 1/6 : 1/2 with mean 1
    assert found == {"a": pytest.approx(0.5, rel=ROUNDING), "b": pytest.approx(1.5, rel=ROUNDING)}
    found = step(EQUAL, {"a": 6.0, "b": 2.0}, {"a": 3.0, "b": 1.0}, EQUAL)
    assert found == {"a": pytest.approx(1.0, rel=ROUNDING), "b": pytest.approx(1.0, rel=ROUNDING)}


def test_the_mean_is_weighted_by_lambda() -> None:
    found = step(EQUAL, {"a": 6.0, "b": 2.0}, EQUAL, {"a": 1.0, "b": 3.0})
    # w_a = c/6, w_b = c/2, w_a + 3 w_b = 4
    assert found == {"a": pytest.approx(0.4, rel=ROUNDING), "b": pytest.approx(1.2, rel=ROUNDING)}


def test_memory_halves_the_distance_in_logarithms() -> None:
    # From ratio 1 to ratio w_b / w_a = 9, half of the way in logarithms: 3.
    found = step(EQUAL, {"a": 9.0, "b": 1.0}, EQUAL, EQUAL, memory=0.5)
    assert found == {"a": pytest.approx(0.5, rel=ROUNDING), "b": pytest.approx(1.5, rel=ROUNDING)}


def test_damped_steps_converge_to_the_targets() -> None:
    norms, targets, weights = {"a": 10.0, "b": 1.0, "c": 3.0}, {"a": 1.0, "b": 2.0, "c": 1.0}, {"a": 1, "b": 2, "c": 1}
    factors = dict.fromkeys(norms, 1.0)
    for _ in range(50):
        factors = step(factors, norms, targets, weights, memory=0.5)
    assert shares(factors, norms) == pytest.approx({"a": 0.25, "b": 0.5, "c": 0.25}, rel=1e-9)


def test_a_teacher_without_a_measured_gradient_keeps_its_factor() -> None:
    before = {"a": 0.5, "b": 1.0, "c": 1.5}
    weights, targets = dict.fromkeys(before, 1.0), dict.fromkeys(before, 1.0)
    found = step(before, {"a": 3.0, "c": 1.0}, targets, weights)
    assert found == {"a": pytest.approx(0.5), "b": 1.0, "c": pytest.approx(1.5)}
    assert step(before, {"a": 0.0, "b": 0.0}, targets, weights) == before
    assert step(before, {}, targets, weights) == before
    # One alone has nobody to share with.
    assert step(before, {"b": 7.0}, targets, weights) == pytest.approx(before, rel=ROUNDING)


def test_a_factor_that_would_leave_its_bounds_stays_there_and_the_others_make_the_mean() -> None:
    names = [f"t{i}" for i in range(40)]
    ones = dict.fromkeys(names, 1.0)
    found = step(ones, ones | {"t0": 1e-6, "t1": 1e6}, ones, ones)
    assert (found["t0"], found["t1"]) == (HIGH, LOW)
    assert [found[n] for n in names[2:]] == pytest.approx([(40 - HIGH - LOW) / 38] * 38, rel=ROUNDING)


teachers = st.lists(
    st.tuples(
        st.floats(1e-6, 1e6),  # norm
        st.floats(0.01, 100),  # target
        st.floats(0.05, 20),  # lambda
        st.booleans(),  # measured
    ),
    min_size=1,
    max_size=7,
)


def columns(
    rows: list[tuple[float, float, float, bool]],
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    named = {f"t{i}": row for i, row in enumerate(rows)}
    return (
        {n: row[0] for n, row in named.items() if row[3]},
        {n: row[1] for n, row in named.items()},
        {n: row[2] for n, row in named.items()},
    )


@given(teachers, st.sampled_from([0.0, 0.5, 0.9]), st.integers(1, 4))
def test_factors_stay_in_their_bounds_with_mean_one(
    rows: list[tuple[float, float, float, bool]], memory: float, steps: int
) -> None:
    norms, targets, weights = columns(rows)
    factors = dict.fromkeys(weights, 1.0)
    for _ in range(steps):
        factors = step(factors, norms, targets, weights, memory)
        assert all(LOW <= w <= HIGH for w in factors.values())
    mean = math.fsum(weights[n] * w for n, w in factors.items()) / math.fsum(weights.values())
    assert mean == pytest.approx(1.0, rel=1e-11)


@given(teachers, st.randoms(use_true_random=False))
def test_the_order_of_teachers_and_the_unit_of_norms_mean_nothing(
    rows: list[tuple[float, float, float, bool]], order: random.Random
) -> None:
    norms, targets, weights = columns(rows)
    ones = dict.fromkeys(weights, 1.0)
    found = step(ones, norms, targets, weights, 0.5)

    def shuffled(values: dict[str, float]) -> dict[str, float]:
        return dict(order.sample(sorted(values.items()), len(values)))

    # Bit for bit.
    assert step(shuffled(ones), shuffled(norms), shuffled(targets), shuffled(weights), 0.5) == found
    in_another_unit = step(ones, {n: 1e3 * x for n, x in norms.items()}, targets, weights, 0.5)
    assert in_another_unit == pytest.approx(found, rel=1e-9)


@given(teachers)
def test_without_bounds_in_the_way_shares_are_exact(rows: list[tuple[float, float, float, bool]]) -> None:
    norms, targets, weights = columns(rows)
    ones = dict.fromkeys(weights, 1.0)
    found = share_factors(ones, norms, targets, weights, memory=0.0, low=1e-30, high=1e30)
    total = sum(targets[n] for n in norms)
    assert shares(found, norms) == pytest.approx({n: targets[n] / total for n in norms}, rel=1e-9)
