import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.train.order import draw_mixture, rows_of_step


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 5))
def test_every_row_is_used_once_before_any_is_used_again(num_rows: int, batch_size: int, seed: int) -> None:
    steps = -(-3 * num_rows // batch_size)
    used = [r for s in range(steps) for r in rows_of_step(s, num_rows=num_rows, batch_size=batch_size, seed=seed)]
    for epoch in range(3):
        assert sorted(used[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    counts = Counter(used)
    assert max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 8))
def test_the_step_alone_says_which_rows_come_next(step: int, num_rows: int, batch_size: int) -> None:
    straight = [rows_of_step(s, num_rows=num_rows, batch_size=batch_size, seed=3) for s in range(step + 1)]
    assert rows_of_step(step, num_rows=num_rows, batch_size=batch_size, seed=3) == straight[-1]


def test_the_batch_size_cuts_one_and_the_same_order() -> None:
    def first_rows(batch_size: int) -> list[int]:
        return [r for s in range(24 // batch_size) for r in rows_of_step(s, num_rows=10, batch_size=batch_size, seed=1)]

    assert first_rows(1) == first_rows(2) == first_rows(4) == first_rows(24)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    epochs = [tuple(rows_of_step(e, num_rows=50, batch_size=50, seed=0)) for e in range(3)]
    assert len(set(epochs)) == 3
    assert tuple(rows_of_step(0, num_rows=50, batch_size=50, seed=1)) not in epochs


def test_every_row_is_as_likely_to_come_first() -> None:
    firsts = Counter(rows_of_step(0, num_rows=5, batch_size=1, seed=s)[0] for s in range(2000))
    # five standard deviations of 400 out of 2000
    assert all(abs(firsts[row] - 400) < 5 * (2000 * 0.2 * 0.8) ** 0.5 for row in range(5))


def test_the_order_is_the_same_in_another_process() -> None:
    code = "from mopdctl.train.order import rows_of_step; print(rows_of_step(2, num_rows=9, batch_size=4, seed=7))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(rows_of_step(2, num_rows=9, batch_size=4, seed=7))


@pytest.mark.parametrize("batch_size", [7, 20])
def test_a_batch_larger_than_the_data_repeats_no_row_within_an_epoch(batch_size: int) -> None:
    rows = rows_of_step(0, num_rows=6, batch_size=batch_size, seed=0)
    assert len(rows) == batch_size
    assert sorted(rows[:6]) == list(range(6))


parts = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.5, 1.0, 2.0, 3.0])), min_size=1, max_size=4)


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 3))
def test_a_mixture_of_one_part_is_the_order_of_steps(step: int, num_rows: int, seed: int) -> None:
    drawn = draw_mixture(4 * (step + 1), [num_rows], [0.7], seed)
    assert drawn[4 * step :].tolist() == rows_of_step(step, num_rows=num_rows, batch_size=4, seed=seed)


@given(parts, st.integers(1, 80), st.integers(1, 80))
def test_a_longer_draw_begins_with_the_shorter_one(found: list[tuple[int, float]], one: int, more: int) -> None:
    sizes, weights = [n for n, _ in found], [w for _, w in found]
    longer = draw_mixture(one + more, sizes, weights, 3)
    assert len(longer) == one + more
    assert longer[:one].tolist() == draw_mixture(one, sizes, weights, 3).tolist()


@given(parts, st.integers(1, 100))
def test_parts_take_turns_by_weight_and_use_each_row_once_before_any_again(
    found: list[tuple[int, float]], count: int
) -> None:
    sizes, weights = [n for n, _ in found], [w for _, w in found]
    drawn = draw_mixture(count, sizes, weights, 0).tolist()
    begin = 0
    for size, weight in found:
        mine = [r - begin for r in drawn if begin <= r < begin + size]
        assert abs(len(mine) - count * weight / sum(weights)) <= len(found)
        for epoch in range(0, len(mine), size):
            assert len(set(mine[epoch : epoch + size])) == len(mine[epoch : epoch + size])
        begin += size


def test_parts_of_equal_weight_alternate() -> None:
    drawn = draw_mixture(12, [6, 6], [1.0, 1.0], 0)
    assert [int(r >= 6) for r in drawn] == [0, 1] * 6
    assert [int(r) for r in drawn[::2]] != [int(r) - 6 for r in drawn[1::2]]  # each has an order of its own
