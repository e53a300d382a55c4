"""The fused rows of reverse KL against the definition, in plain torch."""

import math

import pytest
import torch
from torch import Tensor

from mopdctl.objective import fused
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.fused import RowFigures, rows_of
from mopdctl.objective.reverse_kl import reverse_kl

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def by_definition(policy_logprobs: Tensor, target_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    return reverse_kl(policy_logprobs, target_logprobs)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def both(s: Tensor, t: Tensor) -> tuple[RowFigures, Tensor, RowFigures, Tensor]:
    """(figures, gradient) of the fused rows, then of the definition."""
    tokens = torch.arange(len(s)) % s.shape[1]
    out = []
    for of in (reverse_kl, by_definition):
        policy, target = s.clone(), t.clone()
        figures = rows_of(of, None)(policy, target, None, tokens)
        torch.testing.assert_close(policy, s, equal_nan=True, rtol=0, atol=0)
        out += [figures, target]
    return tuple(out)


def assert_same(s: Tensor, t: Tensor, tolerance: dict[str, float] = EXACT) -> RowFigures:
    mine, gradient, naive, naive_gradient = both(s, t)
    for name in ("value_C", "policy_logprobs_C", "target_logprobs_C", "entropy_C"):
        torch.testing.assert_close(getattr(mine, name), getattr(naive, name), equal_nan=True, **tolerance)
    torch.testing.assert_close(gradient, naive_gradient, equal_nan=True, **tolerance)
    return mine


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("shape", [(1, 2), (7, 50), (3, 1000)])
def test_fused_rows_are_the_definition(shape: tuple[int, int], spread: float) -> None:
    assert_same(spread * normal(*shape), spread * normal(*shape, seed=1))


def test_the_fused_rows_are_taken_for_plain_reverse_kl_and_nothing_else() -> None:
    assert isinstance(rows_of(reverse_kl, None), fused._ReverseKL)
    others = [rows_of(forward_kl, None), rows_of(by_definition, None), rows_of(reverse_kl, lambda q, p, r: q)]
    assert not any(isinstance(other, fused._ReverseKL) for other in others)


def test_logits_at_both_ends_of_a_sharp_temperature() -> None:
    s = torch.where(normal(5, 40) > 0, 80.0, -80.0).double() / 0.01
    t = torch.where(normal(5, 40, seed=1) > 0, 80.0, -80.0).double() / 0.01
    found = assert_same(s, t)
    assert torch.isfinite(found.value_C).all()


def test_a_common_shift_of_the_logits_changes_nothing() -> None:
    s, t = normal(4, 30), normal(4, 30, seed=1)
    one, gradient, _, _ = both(s, t)
    shifted, shifted_gradient, _, _ = both(s + 40, t - 25)
    torch.testing.assert_close(shifted.value_C, one.value_C, **EXACT)
    torch.testing.assert_close(shifted_gradient, gradient, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rows_give_exactly_zero(dtype: torch.dtype) -> None:
    s = (5 * normal(6, 999)).to(dtype)
    found, gradient, _, _ = both(s, s)
    assert not found.value_C.any()
    assert not gradient.any()


def test_zero_probabilities_on_either_side_or_both() -> None:
    s, t = normal(5, 9), normal(5, 9, seed=1)
    s[0, 2] = s[1, 3] = t[1, 3] = t[2, 4] = -math.inf
    t[3, 0] = math.nan
    found = assert_same(s, t)
    finite = torch.isfinite(found.value_C)
    assert finite.tolist() == [True, True, False, False, True]


def test_a_row_depends_on_no_other() -> None:
    s, t = normal(4, 9), normal(4, 9, seed=1)
    expected, gradient, _, _ = both(s, t)
    t[2] = math.nan
    found, beside, _, _ = both(s, t)
    kept = [0, 1, 3]
    torch.testing.assert_close(found.value_C[kept], expected.value_C[kept], **EXACT)
    torch.testing.assert_close(beside[kept], gradient[kept], **EXACT)


def test_scratch_is_taken_once_and_serves_shorter_blocks() -> None:
    rows = fused._ReverseKL()
    tokens = torch.zeros(4, dtype=torch.long)
    for count in (4, 2, 4):
        s, t = normal(count, 9, seed=count), normal(count, 9, seed=9)
        found = rows(s, t.clone(), None, tokens[:count])
        naive = rows_of(by_definition, None)(s, t.clone(), None, tokens[:count])
        torch.testing.assert_close(found.value_C, naive.value_C, **EXACT)
    assert len(rows._scratch[0]) == 4
