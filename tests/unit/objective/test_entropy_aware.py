"""What is special to the entropy-aware objective; values and gradients against references are in test_divergence.py."""

import math

import pytest
import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.entropy_aware import entropy_aware
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.jsd import jsd
from mopdctl.objective.reverse_kl import reverse_kl
from mopdctl.objective.top_k import top_k


def logprobs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, target = (2 * torch.randn(2, 40, 12, dtype=torch.float64, generator=generator)).log_softmax(-1)
    return policy, target


def test_the_forward_kl_counts_where_the_teachers_entropy_is_above_the_threshold_and_nowhere_else() -> None:
    policy, target = logprobs(0)
    entropy_N = -(target.exp() * target).sum(-1)
    threshold = 1.2
    open_N = entropy_N > threshold
    assert 5 < int(open_N.sum()) < 35
    value, gradient = entropy_aware(reverse_kl, 0.5, threshold, 4)(policy, target)
    base, extra = reverse_kl(policy, target), top_k(forward_kl, 4, support="teacher")(policy, target)
    assert torch.equal(value[~open_N], base[0][~open_N])
    assert torch.equal(gradient[~open_N], base[1][~open_N])
    assert torch.equal(value[open_N], base[0][open_N] + 0.5 * extra[0][open_N])
    assert torch.equal(gradient[open_N], base[1][open_N] + 0.5 * extra[1][open_N])


def test_the_gate_is_the_teachers_entropy_not_the_students() -> None:
    flat, sharp = torch.full((1, 4), -math.log(4)).double(), torch.tensor([[0.97, 0.01, 0.01, 0.01]]).double().log()
    hesitating = entropy_aware(reverse_kl, 1.0, 0.8, 2)
    assert torch.equal(hesitating(flat, sharp)[0], reverse_kl(flat, sharp)[0])
    assert float(hesitating(sharp, flat)[0]) > float(reverse_kl(sharp, flat)[0]) + 0.1


def test_an_entropy_equal_to_the_threshold_does_not_count() -> None:
    target = torch.tensor([[0.0, 0.0, -math.inf]]).double().log_softmax(-1)
    policy = torch.tensor([[0.1, 0.3, 0.6]]).double().log()
    entropy = float(-(target[:, :2].exp() * target[:, :2]).sum())
    for threshold, counts in ((entropy, False), (math.nextafter(entropy, 0.0), True)):
        value = entropy_aware(jsd(0.5), 1.0, threshold, 2)(policy, target)[0]
        assert bool(value > jsd(0.5)(policy, target)[0]) is counts


@pytest.mark.parametrize("base", [reverse_kl, jsd(0.5)])
def test_a_threshold_that_no_entropy_exceeds_leaves_the_base_bit_for_bit(base: object) -> None:
    policy, target = logprobs(1)
    for got, want in zip(
        entropy_aware(base, 1.0, math.log(12), 4)(policy, target),  # type: ignore[arg-type]
        base(policy, target),  # type: ignore[operator]
        strict=True,
    ):
        assert torch.equal(got, want)


def test_all_tokens_and_a_threshold_below_zero_add_the_whole_forward_kl() -> None:
    policy, target = logprobs(2)
    value, gradient = entropy_aware(reverse_kl, 1.0, -1.0, 12)(policy, target)
    reverse, forward = reverse_kl(policy, target), forward_kl(policy, target)
    assert torch.equal(value, reverse[0] + forward[0])
    assert torch.equal(gradient, reverse[1] + forward[1])


def test_an_infinite_forward_kl_behind_a_shut_gate_is_not_seen() -> None:
    target = torch.tensor([[0.99, 0.01, 0.0]], dtype=torch.float64).log()
    policy = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64).log()
    value, gradient = entropy_aware(reverse_kl, 1.0, 0.8, 2)(policy, target)
    assert float(value) == pytest.approx(-math.log(0.99), rel=1e-12)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_a_weight_that_is_not_above_zero_is_refused(weight: float) -> None:
    with pytest.raises(InputError, match="weight"):
        entropy_aware(reverse_kl, weight)
