import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.objective.correction import correction_weight
from mopdctl.objective.reduction import Reduction, first_non_finite, token_coefficients


def test_token_reduction_by_hand() -> None:
    got = token_coefficients([2, 3, 5], [1.0, 1.0, 2.0], "token", total_tokens=20, total_sequences=6)
    assert got == [1 / 20, 1 / 20, 2 / 20]


def test_sequence_reduction_by_hand() -> None:
    got = token_coefficients([2, 4, 5], [1.0, 3.0, 1.0], "sequence", total_tokens=20, total_sequences=6)
    assert got == [1 / 12, 3 / 24, 1 / 30]


def test_losses_of_two_answers_under_both_reductions() -> None:
    losses = [[1.0, 3.0], [6.0, 6.0, 6.0, 6.0]]  # means 2 and 6

    def loss(reduction: Reduction) -> float:
        coefficients = token_coefficients([2, 4], [1.0, 1.0], reduction, total_tokens=6, total_sequences=2)
        return math.fsum(c * x for c, row in zip(coefficients, losses, strict=True) for x in row)

    assert loss("token") == pytest.approx((1 + 3 + 6 * 4) / 6, rel=1e-15)
    assert loss("sequence") == pytest.approx((2 + 6) / 2, rel=1e-15)


def test_a_sequence_without_loss_tokens_weighs_nothing_and_counts_as_a_sequence() -> None:
    got = token_coefficients([4, 0], [1.0, 1.0], "sequence", total_tokens=4, total_sequences=2)
    assert got == [1 / 8, 0.0]


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_a_batch_without_any_loss_token_is_no_division_by_zero(reduction: Reduction) -> None:
    got = token_coefficients([0, 0], [1.0, 1.0], reduction, total_tokens=0, total_sequences=2)
    assert all(math.isfinite(c) for c in got)


def test_tokens_masked_by_the_correction_stay_in_the_denominator() -> None:
    weight, mask = correction_weight(torch.tensor([1.0, 9.0, 1.0, 0.1]), "icepop", 0.5, 5.0)
    assert mask.sum() == 2
    (coefficient,) = token_coefficients([4], [1.0], "token", total_tokens=4, total_sequences=1)
    assert float((coefficient * weight * torch.full((4,), 8.0)).sum()) == 4.0  # 2 of 4 tokens, not 2 of 2


@given(
    st.lists(st.tuples(st.integers(1, 500), st.sampled_from(["a", "b"])), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from(["token", "sequence"]),
)
def test_coefficients_do_not_depend_on_how_the_step_is_split(
    rows: list[tuple[int, str]], cut: int, reduction: Reduction
) -> None:
    counts, weights = [n for n, _ in rows], [1.0 if teacher == "a" else 2.5 for _, teacher in rows]
    totals = {"total_tokens": sum(counts), "total_sequences": len(counts)}
    whole = token_coefficients(counts, weights, reduction, **totals)
    parts = token_coefficients(counts[:cut], weights[:cut], reduction, **totals)
    parts += token_coefficients(counts[cut:], weights[cut:], reduction, **totals)
    assert parts == whole


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_sequence_reduction_gives_each_answer_the_same_share(counts: list[int]) -> None:
    totals = {"total_tokens": sum(counts), "total_sequences": len(counts)}
    shares = [
        n * c
        for n, c in zip(counts, token_coefficients(counts, [1.0] * len(counts), "sequence", **totals), strict=True)
    ]
    assert shares == pytest.approx([1 / len(counts)] * len(counts), rel=1e-12)


def test_first_non_finite_is_the_first_in_reading_order() -> None:
    values = torch.tensor([[0.0, 1.0, 2.0], [3.0, math.nan, math.inf], [-math.inf, 0.0, 0.0]])
    assert first_non_finite(values, torch.ones(3, 3)) == (1, 1)
    assert first_non_finite(values, torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]])) == (1, 2)
    assert first_non_finite(values, torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]])) == (2, 0)


def test_non_finite_values_at_masked_positions_are_of_no_interest() -> None:
    values = torch.tensor([[0.0, math.nan], [math.inf, 1e38]])
    assert first_non_finite(values, torch.tensor([[1, 0], [0, 1]])) is None
    assert first_non_finite(torch.zeros(2, 2), torch.ones(2, 2)) is None
