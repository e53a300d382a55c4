"""What is special to the divergences over a few tokens; values and gradients are in test_divergence.py."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.objective.divergence import Divergence, divergence
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.jsd import jsd
from mopdctl.objective.reverse_kl import reverse_kl
from mopdctl.objective.top_k import top_k

SUPPORTS: list[Any] = ["student", "teacher", "union"]
TAILS: list[Any] = ["bucket", "renormalize"]
KINDS = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd(0.3)}


def logprobs(seed: int, vocabulary: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, target = (2 * torch.randn(2, 6, vocabulary, dtype=torch.float64, generator=generator)).log_softmax(-1)
    return policy, target


def rows(*probabilities: list[float]) -> list[Tensor]:
    return [torch.tensor([p], dtype=torch.float64).log() for p in probabilities]


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


P, Q = [0.4, 0.3, 0.2, 0.06, 0.04], [0.1, 0.35, 0.05, 0.3, 0.2]


@pytest.mark.parametrize(
    ("support", "tail", "want"),
    [
        ("student", "bucket", kl([0.4, 0.3, 0.3], [0.1, 0.35, 0.55])),
        ("teacher", "bucket", kl([0.3, 0.06, 0.64], [0.35, 0.3, 0.35])),
        ("union", "bucket", kl([0.4, 0.3, 0.06, 0.24], [0.1, 0.35, 0.3, 0.25])),
        ("student", "renormalize", kl([4 / 7, 3 / 7], [10 / 45, 35 / 45])),
        ("teacher", "renormalize", kl([30 / 36, 6 / 36], [35 / 65, 30 / 65])),
        ("union", "renormalize", kl([40 / 76, 30 / 76, 6 / 76], [10 / 75, 35 / 75, 30 / 75])),
    ],
)
def test_values_by_hand_of_the_two_likeliest_tokens(support: Any, tail: Any, want: float) -> None:
    value, _ = top_k(reverse_kl, 2, support=support, tail=tail)(*rows(P, Q))
    assert float(value) == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [12, 13, 10**6])
def test_all_tokens_as_candidates_are_the_full_divergence_bit_for_bit(
    kind: str, support: Any, tail: Any, k: int
) -> None:
    policy, target = logprobs(0)
    got, want = top_k(KINDS[kind], k, support=support, tail=tail)(policy, target), KINDS[kind](policy, target)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_union_that_covers_the_vocabulary_is_the_full_divergence(kind: str) -> None:
    # the student's six likeliest tokens are the teacher's six least likely: nothing is outside
    policy = torch.arange(12.0).double().log_softmax(-1).unsqueeze(0)
    target = policy.flip(-1)
    for tail in TAILS:
        got, want = top_k(KINDS[kind], 6, support="union", tail=tail)(policy, target), KINDS[kind](policy, target)
        torch.testing.assert_close(got[0], want[0], rtol=1e-14, atol=0.0)
        torch.testing.assert_close(got[1], want[1], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_with_the_bucket_it_grows_with_k_up_to_the_full_divergence(kind: str, support: Any, seed: int) -> None:
    policy, target = logprobs(seed)
    values = torch.stack([top_k(KINDS[kind], k, support=support)(policy, target)[0] for k in range(1, 13)])
    assert (values >= -1e-14).all()
    assert (values.diff(dim=0) >= -1e-12).all()


def test_one_token_renormalized_is_refused_and_with_the_bucket_it_is_not() -> None:
    # Rethinking-OPD #22: a simplex of one token has nothing to learn
    for support in SUPPORTS:
        with pytest.raises(ValueError, match="k=1 with tail=renormalize"):
            top_k(reverse_kl, 1, support=support, tail="renormalize")
    assert float(top_k(reverse_kl, 1)(*rows(P, Q))[0]) == pytest.approx(kl([0.3, 0.7], [0.35, 0.65]), rel=1e-13)


@pytest.mark.parametrize("k", [0, -3])
def test_no_candidates_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        top_k(reverse_kl, k)


def test_renormalized_it_has_no_gradient_outside_its_candidates_and_with_the_bucket_it_has() -> None:
    policy, target = logprobs(1)
    outside = torch.ones_like(policy, dtype=torch.bool).scatter(-1, target.topk(3).indices, False)
    assert not top_k(reverse_kl, 3, tail="renormalize")(policy, target)[1][outside].any()
    assert (top_k(reverse_kl, 3, tail="bucket")(policy, target)[1][outside] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_tiny_rest_keeps_its_digits(dtype: torch.dtype) -> None:
    # 1 - sum of the two candidates is 0, or rounding noise, in either type: the rest is about e^-60 and e^-50
    policy = torch.tensor([[0.0, 0.0, -60.0, -61.0]], dtype=dtype)
    target = torch.tensor([[0.0, 0.0, -50.0, -50.5]], dtype=dtype)
    rest_policy, rest_target = (math.exp(-60) + math.exp(-61)) / 2, (math.exp(-50) + math.exp(-50.5)) / 2
    want = rest_policy * (math.log(rest_policy) - math.log(rest_target))
    value, gradient = top_k(reverse_kl, 2)(policy.log_softmax(-1), target.log_softmax(-1))
    share = math.exp(-60) / (math.exp(-60) + math.exp(-61))
    # log 2 is rounded in log_softmax, and with it the two candidates: what is looked at is the rest's gradient
    assert float(gradient[0, 2]) == pytest.approx(share * want, rel=1e-5)
    assert abs(float(value)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_rest_without_any_mass_adds_nothing(kind: str) -> None:
    policy, target = (torch.tensor([x], dtype=torch.float64) for x in ([0.3, 0.9], [1.0, -0.4]))
    absent = torch.full((1, 3), -math.inf, dtype=torch.float64)
    want = KINDS[kind](policy.log_softmax(-1), target.log_softmax(-1))
    longer = [torch.cat([x, absent], dim=-1).log_softmax(-1) for x in (policy, target)]
    for support in SUPPORTS:
        value, gradient = top_k(KINDS[kind], 2, support=support)(*longer)
        torch.testing.assert_close(value, want[0], rtol=1e-14, atol=0.0)
        torch.testing.assert_close(gradient[:, :2], want[1], rtol=1e-13, atol=1e-15)
        assert gradient[:, 2:].tolist() == [[0.0, 0.0, 0.0]]


def optimised(of: Divergence, policy: Tensor, target: Tensor, kept: Tensor) -> list[float]:
    """The student's mass on the tokens `kept` over 200 steps of Adam."""
    leaf = policy.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], lr=0.05)
    masses = []
    for _ in range(200):
        optimizer.zero_grad()
        divergence(leaf, target, of).sum().backward()
        optimizer.step()
        masses.append(float(leaf.detach().softmax(-1)[0, kept].sum()))
    return masses


@pytest.mark.parametrize(
    ("kind", "support"),
    [("reverse_kl", "student"), ("reverse_kl", "teacher"), ("reverse_kl", "union"), ("jsd", "teacher")],
)
def test_200_steps_do_not_empty_the_candidates(kind: str, support: Any) -> None:
    # verl #5041, Rethinking-OPD #15, #18
    policy, target = (torch.tensor([x], dtype=torch.float64) for x in ([0.0, 0.2, 0.4, 0.6], [3.0, 2.5, -1.0, -2.0]))
    kept = target.topk(2).indices[0]
    start, goal = (float(x.softmax(-1)[0, kept].sum()) for x in (policy, target))
    masses = optimised(top_k(KINDS[kind], 2, support=support), policy, target, kept)
    assert min(masses) > start
    assert masses[-1] == pytest.approx(goal, abs=0.02)


def test_the_same_200_steps_on_a_sum_without_the_rest_do_empty_them() -> None:
    # the defect that the test above looks for, so that it is known to see it
    def truncated(policy: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        leaf = policy.clone().requires_grad_()
        with torch.enable_grad():
            probability = leaf.softmax(-1)[:, kept]
            value = (probability * (probability.log() - target[:, kept])).sum(-1)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), gradient

    target = torch.tensor([[3.0, 2.5, -1.0, -2.0]], dtype=torch.float64)
    kept = target.topk(2).indices[0]
    # started at the teacher itself, where nothing should move
    assert optimised(truncated, target, target, kept)[-1] < float(target.softmax(-1)[0, kept].sum()) - 0.1
    stays = optimised(top_k(reverse_kl, 2), target, target, kept)
    assert stays == [float(target.softmax(-1)[0, kept].sum())] * 200


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("tail", TAILS)
def test_the_gradient_points_towards_the_teacher(support: Any, tail: Any) -> None:
    # Miles #2362: a top-k KL as a scalar advantage of the sampled token has expected gradient 0, for
    # sum_y p(y) A grad log p(y) = A grad 1. Ours goes through every candidate.
    policy, target = logprobs(2)
    value, gradient = top_k(reverse_kl, 4, support=support, tail=tail)(policy, target)
    assert gradient.norm(dim=-1).min() > 0.01
    leaf = policy.clone().requires_grad_()
    (policy.exp() * value.unsqueeze(-1) * leaf.log_softmax(-1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().max() < 1e-14  # the defect itself
    lower, _ = top_k(reverse_kl, 4, support=support, tail=tail)((policy - 1e-3 * gradient).log_softmax(-1), target)
    torch.testing.assert_close((value - lower) / 1e-3, gradient.square().sum(-1), rtol=0.02, atol=0.0)
    if tail == "bucket":  # downhill for the full divergence too
        full = reverse_kl(policy, target)[1]
        assert ((full * gradient).sum(-1) > 0).all()
