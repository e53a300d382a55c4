"""The anchor's gradient, with its expectation taken exactly over a small vocabulary."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mopdctl.objective.anchor import sampled_anchor
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.kl import kl_k1, kl_k3
from mopdctl.objective.reverse_kl import reverse_kl

LOGITS, REFERENCE = (
    torch.tensor(x, dtype=torch.float64) for x in ([0.3, -1.2, 2.0, 0.0, -0.4], [1.1, 0.2, -0.7, 0.5, -2.0])
)


def expected_gradient(term: Callable[[Tensor, Tensor], Tensor], reference: Tensor = REFERENCE) -> Tensor:
    """Of E over y ~ policy (constant, as a sampler is) of the term at y, with respect to the policy's logits."""
    leaf = LOGITS.clone().requires_grad_()
    policy = leaf.log_softmax(-1)
    (gradient,) = torch.autograd.grad((policy.detach().exp() * term(policy, reference.log_softmax(-1))).sum(), leaf)
    return gradient


def exact(of: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    return of(LOGITS.log_softmax(-1), REFERENCE.log_softmax(-1))[1]


# verl #2953, OpenRLHF #1309, #1101: an unbiased value is not an unbiased gradient
def test_the_expected_gradient_is_that_of_the_kl_from_the_policy_to_the_reference() -> None:
    torch.testing.assert_close(expected_gradient(sampled_anchor), exact(reverse_kl), rtol=1e-12, atol=1e-14)
    assert exact(reverse_kl).abs().max() > 0.1


def test_k3_in_a_loss_has_the_gradient_of_the_other_direction_and_k1_has_none() -> None:
    torch.testing.assert_close(expected_gradient(kl_k3), exact(forward_kl), rtol=1e-12, atol=1e-14)
    assert (expected_gradient(kl_k3) - exact(reverse_kl)).abs().max() > 0.05
    assert expected_gradient(kl_k1).abs().max() < 1e-15


def test_sampled_tokens_give_that_gradient_on_average() -> None:
    draws = 200_000
    tokens = torch.multinomial(LOGITS.softmax(-1), draws, replacement=True, generator=torch.Generator().manual_seed(0))
    leaf = LOGITS.clone().requires_grad_()
    sampled_anchor(leaf.log_softmax(-1)[tokens], REFERENCE.log_softmax(-1)[tokens]).mean().backward()
    # one standard error is below max |gap| / sqrt(draws) = 0.005; k3 would be off by 0.07
    torch.testing.assert_close(leaf.grad, exact(reverse_kl), rtol=0.0, atol=0.02)


def test_value_and_gradient_by_hand() -> None:
    policy = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    value = sampled_anchor(policy, torch.tensor([-3.0, -0.5, -1.0], dtype=torch.float64))
    assert value.tolist() == [2.0, 0.0, 0.5]
    value.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [2.0, 0.0, -1.0]


def test_a_policy_equal_to_its_anchor_has_exactly_no_value_and_no_gradient() -> None:
    policy = LOGITS.float().log_softmax(-1).requires_grad_()
    value = sampled_anchor(policy, policy.detach().clone())
    value.sum().backward()
    assert policy.grad is not None
    assert not value.any()
    assert not policy.grad.any()


def test_another_reference_gives_another_gradient_and_the_reference_receives_none() -> None:
    one, two = expected_gradient(sampled_anchor), expected_gradient(sampled_anchor, -REFERENCE)
    assert (one - two).abs().max() > 0.1
    policy, reference = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    sampled_anchor(policy, reference).sum().backward()
    assert reference.grad is None


def test_gradcheck() -> None:
    policy = LOGITS.log_softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sampled_anchor(x, REFERENCE.log_softmax(-1)), policy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_are_subtracted_in_float32(dtype: torch.dtype) -> None:
    policy, reference = torch.tensor([-0.99609375]).to(dtype), torch.tensor([-128.0]).to(dtype)
    value = sampled_anchor(policy, reference)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(127.00390625**2 / 2, rel=1e-6)
