from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.store.packing import Packing, pack

CAPACITIES = st.sampled_from([base + off for base in (2, 8, 64, 1024) for off in (-1, 0, 1)])


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(CAPACITIES)
    few = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=4))  # many samples of one length
    return draw(st.lists(st.integers(1, capacity) | st.sampled_from(few), max_size=80)), capacity


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Used tokens of every bin, ascending, one sample at a time."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, space in enumerate(left) if space >= length]
        if fitting:
            left[min(fitting, key=lambda i: left[i])] -= length
        else:
            left.append(capacity - length)
    return sorted(capacity - space for space in left)


def bins_of(packing: Packing) -> list[list[int]]:
    return [packing.bin(number).tolist() for number in range(packing.num_bins)]


def used(packing: Packing, lengths: Any) -> list[int]:
    return [int(np.asarray(lengths)[packing.bin(number)].sum()) for number in range(packing.num_bins)]


@given(problems(), st.integers(0, 3))
def test_bins_are_those_of_best_fit_decreasing_one_sample_at_a_time(problem: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = problem
    packing = pack(lengths, capacity, seed=seed)
    assert sorted(used(packing, lengths)) == best_fit_decreasing(lengths, capacity)
    assert sorted(packing.order.tolist()) == list(range(len(lengths)))
    assert packing.offsets.tolist() == sorted(set(packing.offsets.tolist()))  # no empty bin
    assert packing.tokens == sum(lengths)
    assert (packing.dropped, packing.alone) == (0, 0)


@pytest.mark.parametrize("capacity", [8191, 8192, 8193])
def test_a_large_problem_too(capacity: int) -> None:
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 2000).tolist()
    packing = pack(lengths, capacity, seed=0)
    assert sorted(used(packing, lengths)) == best_fit_decreasing(lengths, capacity)


@given(problems(), st.integers(1, 3))
def test_groups_share_no_bin_and_each_is_packed_as_if_alone(problem: tuple[list[int], int], num_groups: int) -> None:
    lengths, capacity = problem
    groups = [(7 * i + length) % num_groups for i, length in enumerate(lengths)]
    packing = pack(lengths, capacity, seed=0, groups=groups)
    assert all(len({groups[i] for i in members}) == 1 for members in bins_of(packing))
    by_group = [[n for n, g in zip(lengths, groups, strict=True) if g == group] for group in range(num_groups)]
    expected = sorted(tokens for part in by_group for tokens in best_fit_decreasing(part, capacity))
    assert sorted(used(packing, lengths)) == expected


@given(problems(), st.integers(1, 9))
def test_alignment_counts_lengths_rounded_up(problem: tuple[list[int], int], align: int) -> None:
    lengths, capacity = problem
    padded = [-(-length // align) * align for length in lengths]
    packing = pack(lengths, capacity, seed=0, align=align, over_long="drop")
    fitting = [length for length in padded if length <= capacity]
    assert sorted(used(packing, padded)) == best_fit_decreasing(fitting, capacity)
    assert packing.dropped == len(padded) - len(fitting)


@given(problems(), st.integers(1, 9), st.integers(0, 2))
def test_bins_are_made_a_multiple_by_moving_single_samples(
    problem: tuple[list[int], int], multiple_of: int, over: int
) -> None:
    lengths, capacity = problem[0] + [problem[1] + 1] * over, problem[1]
    plain = pack(lengths, capacity, seed=0, over_long="alone")
    wanted = -(-plain.num_bins // multiple_of) * multiple_of
    if wanted > len(lengths):
        with pytest.raises(InputError, match=f"{len(lengths)} samples cannot fill {wanted} bins"):
            pack(lengths, capacity, seed=0, multiple_of=multiple_of, over_long="alone")
        return
    packing = pack(lengths, capacity, seed=0, multiple_of=multiple_of, over_long="alone")
    assert packing.num_bins == wanted
    assert sorted(packing.order.tolist()) == list(range(len(lengths)))
    assert all(len(members) >= 1 for members in bins_of(packing))
    assert sum(tokens > capacity for tokens in used(packing, lengths)) == over == packing.alone
    singles = sum(len(members) == 1 for members in bins_of(packing))
    assert singles >= wanted - plain.num_bins


def test_samples_move_out_of_the_fullest_bins() -> None:
    lengths = [8, 2, 5, 4, 3, 3]  # bins of 10, 9 and 6 tokens
    assert sorted(used(pack(lengths, 10, seed=0), lengths)) == [6, 9, 10]
    assert sorted(used(pack(lengths, 10, seed=0, multiple_of=4), lengths)) == [2, 6, 8, 9]
    assert sorted(used(pack(lengths, 10, seed=0, multiple_of=5), lengths)) == [2, 4, 5, 6, 8]


@given(problems(), st.integers(0, 3), st.integers(1, 4))
def test_the_seed_alone_makes_the_order(problem: tuple[list[int], int], seed: int, align: int) -> None:
    lengths, capacity = problem
    first = pack(lengths, capacity, seed=seed, align=align, over_long="alone")
    again = pack(np.array(lengths, np.int32), capacity, seed=seed, align=align, over_long="alone")
    assert bins_of(first) == bins_of(again)


def test_another_seed_shuffles_bins_and_equal_lengths_anew() -> None:
    made = [bins_of(pack([5] * 100, 10, seed=seed)) for seed in range(3)]
    assert made[0] != made[1] != made[2] != made[0]
    partners = [{frozenset(members) for members in bins} for bins in made]
    assert partners[0] != partners[1] != partners[2] != partners[0]
    assert partners[0] != {frozenset((i, i + 1)) for i in range(0, 100, 2)}


def test_long_samples_do_not_come_first() -> None:
    lengths = np.random.default_rng(0).integers(1, 1001, 20_000)
    packing = pack(lengths, 1000, seed=0)
    longest = lengths[packing.order[packing.offsets[:-1]]]
    place = np.arange(packing.num_bins)
    assert abs(np.corrcoef(place, longest)[0, 1]) < 0.04  # four standard errors for 10,000 bins


def test_no_samples_take_no_bins() -> None:
    packing = pack([], 16, seed=0, multiple_of=8, groups=np.empty(0, np.int32))
    assert (packing.num_bins, packing.order.tolist(), packing.offsets.tolist()) == (0, [], [0])
    assert packing.fill is None


@pytest.mark.parametrize("others", [[], [3, 4, 2]])
def test_an_over_long_sample_is_an_error_or_dropped_or_alone(others: list[int]) -> None:
    lengths = [*others, 9]
    with pytest.raises(InputError, match=rf"1 of {len(lengths)} samples are longer than the capacity of 8 .* has 9:"):
        pack(lengths, 8, seed=0)
    dropped = pack(lengths, 8, seed=0, over_long="drop")
    assert sorted(dropped.order.tolist()) == list(range(len(others)))
    assert (dropped.dropped, dropped.alone) == (1, 0)
    alone = pack(lengths, 8, seed=0, over_long="alone")
    assert [len(others)] in bins_of(alone)
    assert (alone.dropped, alone.alone, alone.num_bins) == (0, 1, dropped.num_bins + 1)
    assert alone.fill == dropped.fill == (9 / 16 if others else None)


def test_a_sample_that_only_alignment_makes_too_long_says_so() -> None:
    with pytest.raises(InputError, match="rounded up to a multiple of 4"):
        pack([9], 10, seed=0, align=4)


def test_fill_counts_alignment_as_empty() -> None:
    assert pack([3, 3, 3], 8, seed=0, align=4).fill == 9 / 16
    assert pack([3, 3, 3], 9, seed=0).fill == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [4, 0, -1]}, "2 below 1, first 0 of sample 1"),
        ({"lengths": [1.5]}, "whole numbers"),
        ({"lengths": [[1]]}, "whole numbers"),
        ({"lengths": [True]}, "whole numbers"),
        ({"capacity": 0}, "capacity: 0"),
        ({"capacity": 1 << 31}, "capacity: 2147483648"),
        ({"align": 0}, "align: 0"),
        ({"multiple_of": -1}, "multiple_of: -1"),
        ({"over_long": "cut"}, "over_long: 'cut'"),
        ({"groups": [0]}, "groups"),
        ({"groups": [0, -1]}, "groups"),
        ({"groups": [0, 1 << 16]}, "groups"),
        ({"groups": [0, 0.5]}, "groups"),
    ],
)
def test_senseless_input_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"lengths": [1, 2], "capacity": 8, "seed": 0} | change
    with pytest.raises(InputError, match=message):
        pack(**arguments)


def log_normal(generator: np.random.Generator, mean: float, most: int) -> Any:
    return np.clip(np.exp(generator.normal(np.log(mean) - 0.5, 1.0, 50_000)).astype(int), 16, most)


@pytest.mark.parametrize(
    ("name", "capacity", "bar"),
    [("rollouts", 16384, 0.9995), ("rollouts", 32768, 0.9995), ("reasoning", 16384, 0.9995), ("uniform", 8192, 0.995)],
)
def test_rollout_like_lengths_fill_their_bins(name: str, capacity: int, bar: float) -> None:
    generator = np.random.default_rng(0)
    if name == "uniform":  # the hard one: two a bin
        lengths = generator.integers(int(0.3 * capacity), int(0.7 * capacity), 50_000)
    else:
        lengths = log_normal(generator, 1500 if name == "rollouts" else 5000, 16384)
    if name == "reasoning":
        lengths = np.where(generator.random(50_000) < 0.3, 16384, lengths)
    packing = pack(lengths, capacity, seed=0)
    assert packing.fill is not None
    assert packing.fill >= bar
    assert packing.fill == pytest.approx(lengths.sum() / packing.num_bins / capacity)
