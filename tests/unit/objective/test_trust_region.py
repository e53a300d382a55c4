import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.advantage import distillation_advantage
from mopdctl.objective.divergence import divergence
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.jsd import jsd
from mopdctl.objective.mixture import log_mixture, log_mixture_over_policy
from mopdctl.objective.reverse_kl import reverse_kl
from mopdctl.objective.trust_region import trust_region_advantage, trust_region_target

INF = math.inf
GAPS = st.floats(-700, 700)


def logits(seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, teacher = scale * torch.randn(2, 6, 12, dtype=torch.float64, generator=generator)
    return policy, teacher


def advantage(gap: float, alpha: float, dtype: torch.dtype = torch.float64) -> float:
    teacher, prox = torch.tensor([gap], dtype=dtype), torch.zeros(1, dtype=dtype)
    return float(trust_region_advantage(teacher, prox, alpha=alpha))


@settings(deadline=None)
@given(GAPS, st.floats(0.001, 0.999))
def test_advantage_is_the_log_of_the_mixture_over_the_policy(gap: float, alpha: float) -> None:
    assert advantage(gap, alpha) == pytest.approx(math.log(alpha * math.exp(gap) + 1 - alpha), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(st.floats(-80, 80), st.floats(0.001, 0.999))
def test_advantage_in_float32(gap: float, alpha: float) -> None:
    gap = float(torch.tensor(gap))
    want = math.log(alpha * math.exp(gap) + 1 - alpha)
    # near -1 the mixture halves at most before the other formula takes over: a few roundings of 6e-8
    assert advantage(gap, alpha, torch.float32) == pytest.approx(want, rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(-100, 0, width=32), min_size=2, max_size=8))
def test_alpha_one_is_the_plain_advantage_and_alpha_zero_is_zero_exactly(values: list[float]) -> None:
    teacher, prox = torch.tensor(values), torch.tensor(values[::-1])
    assert torch.equal(trust_region_advantage(teacher, prox, alpha=1.0), distillation_advantage(teacher, prox))
    clipped = trust_region_advantage(teacher, prox, alpha=1.0, clip=5.0)
    assert torch.equal(clipped, distillation_advantage(teacher, prox, clip=5.0))
    assert not trust_region_advantage(teacher, prox, alpha=0.0).any()


@settings(deadline=None)
@given(GAPS, st.floats(0.001, 0.999))
def test_advantage_is_bounded_below_has_the_sign_of_the_gap_and_is_no_larger(gap: float, alpha: float) -> None:
    a = advantage(gap, alpha)
    assert a >= math.log1p(-alpha) - 1e-12
    assert abs(a) <= abs(gap) + 1e-12
    assert a * gap >= 0.0
    assert advantage(0.0, alpha) == 0.0


@pytest.mark.parametrize("alpha", [1e-12, 0.2, 0.5, 0.9, 1 - 1e-9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_bound_is_reached_and_not_passed_however_unlikely_the_token(alpha: float, dtype: torch.dtype) -> None:
    for gap in (-1e4, -INF):
        assert advantage(gap, alpha, dtype) == pytest.approx(math.log1p(-alpha), rel=1e-6)


def test_a_large_gap_does_not_overflow() -> None:
    for dtype in (torch.float64, torch.float32):
        assert advantage(1e4, 0.2, dtype) == pytest.approx(1e4 + math.log(0.2), rel=1e-6)


def test_a_tiny_share_keeps_its_digits() -> None:
    assert advantage(1.0, 1e-14) == pytest.approx(1e-14 * math.expm1(1.0), rel=1e-9, abs=0.0)


def test_no_gradient_flows_through_the_advantage() -> None:
    teacher, prox = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    for alpha in (0.0, 0.3, 1.0):
        assert not trust_region_advantage(teacher, prox, alpha=alpha).requires_grad


def test_half_precision_scores_are_subtracted_in_float32() -> None:
    teacher, prox = torch.tensor([-0.99609375]).bfloat16(), torch.tensor([-128.0]).bfloat16()
    assert float(trust_region_advantage(teacher, prox, alpha=1.0)) == 127.00390625


# ------------------------------------------------------------------------------------------------- as a target


@settings(max_examples=30, deadline=None)
@example(0, 3e-11, 8.0)  # 1 - (1 - alpha) has lost digits of alpha
@given(st.integers(0, 2**31), st.floats(0.0, 1.0), st.sampled_from([0.1, 2.0, 8.0]))
def test_target_is_the_mixture_of_the_probabilities(seed: int, alpha: float, scale: float) -> None:
    policy, teacher = (x.log_softmax(-1) for x in logits(seed, scale))
    target = trust_region_target(alpha)(teacher, policy, None)
    torch.testing.assert_close(target.exp(), alpha * teacher.exp() + (1 - alpha) * policy.exp(), rtol=1e-10, atol=0.0)
    torch.testing.assert_close(target.logsumexp(-1), torch.zeros(6).double(), rtol=0.0, atol=1e-13)


def test_alpha_one_is_the_teacher_and_alpha_zero_the_policy_bit_for_bit() -> None:
    policy, teacher = (x.log_softmax(-1) for x in logits(0))
    assert torch.equal(trust_region_target(1.0)(teacher, policy, None), teacher)
    assert torch.equal(trust_region_target(0.0)(teacher, policy, None), policy)


@pytest.mark.parametrize("of", [reverse_kl, forward_kl, jsd(0.5)])
def test_alpha_zero_leaves_no_value_and_no_gradient(of: object) -> None:
    policy, teacher = (x.log_softmax(-1) for x in logits(1))
    value, gradient = of(policy, trust_region_target(0.0)(teacher, policy, None))  # type: ignore[operator]
    assert not value.any()
    assert not gradient.any()


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.999])
def test_equal_distributions_stay_equal_bit_for_bit(alpha: float) -> None:
    for dtype in (torch.float64, torch.float32):
        policy = logits(2)[0].to(dtype).log_softmax(-1)
        policy[0, 0] = -INF
        assert torch.equal(trust_region_target(alpha)(policy.clone(), policy, None), policy)


def test_value_and_gradient_treat_the_policy_in_the_mixture_as_constant() -> None:
    policy, teacher = logits(3)
    leaf = policy.clone().requires_grad_()
    ours = leaf.log_softmax(-1)
    target = trust_region_target(0.3)(teacher.log_softmax(-1), ours, None)
    assert not target.requires_grad
    value = divergence(leaf, target, reverse_kl)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    other = policy.clone().requires_grad_()
    p, mixture = other.softmax(-1), 0.3 * teacher.softmax(-1) + 0.7 * policy.softmax(-1)
    naive = (p * (p / mixture).log()).sum(-1)
    (naive_gradient,) = torch.autograd.grad(naive.sum(), other)
    torch.testing.assert_close(value, naive, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gradient, naive_gradient, rtol=1e-8, atol=1e-10)
    swapped = trust_region_target(0.3)(logits(4)[1].log_softmax(-1), ours, None)
    other_gradient = reverse_kl(policy.log_softmax(-1), swapped)[1]
    assert (other_gradient - gradient).abs().amax(-1).min() > 1e-3


def test_the_expected_gradient_of_sampled_tokens_is_that_of_the_exact_objective() -> None:
    policy, teacher = (x.log_softmax(-1) for x in logits(5))
    advantage_NV = trust_region_advantage(teacher, policy, alpha=0.2)
    p = policy.exp()
    # sum_y p(y) A(y) grad log p(y), with d log p(y) / d z_v = 1[y = v] - p_v
    expected = p * advantage_NV - p * (p * advantage_NV).sum(-1, keepdim=True)
    exact = reverse_kl(policy, trust_region_target(0.2)(teacher, policy, None))[1]
    torch.testing.assert_close(expected, -exact, rtol=1e-8, atol=1e-12)
    # what the region is for: the pull of a hopeless token is bounded, that of the plain advantage is not
    teacher[:, 0] = -500.0
    assert float(trust_region_advantage(teacher, policy, alpha=0.2).min()) >= math.log(0.8) - 1e-12


def test_a_token_that_one_or_both_exclude() -> None:
    policy = torch.tensor([0.5, 0.5, 0.0, 0.0]).double().log()
    teacher = torch.tensor([0.5, 0.0, 0.5, 0.0]).double().log()
    assert log_mixture(policy, teacher, 0.2).exp().tolist() == pytest.approx([0.5, 0.4, 0.1, 0.0], rel=1e-14)
    assert torch.isfinite(reverse_kl(policy, log_mixture(policy, teacher, 0.2))[0])  # the plain one is infinite
    assert float(log_mixture_over_policy(torch.tensor(-INF), 1.0)) == -INF


def test_far_apart_logprobs_mix_without_overflow() -> None:
    policy, teacher = torch.tensor([-16000.0, -1e-7, -300.0]), torch.tensor([-1e-7, -16000.0, -500.0])
    want = [math.log(0.2), math.log(0.8), -300.0 + math.log(0.8)]
    assert log_mixture(policy, teacher, 0.2).tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("alpha", [-0.01, 1.01, math.nan])
def test_an_alpha_that_is_no_share_is_refused(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha"):
        trust_region_target(alpha)
    with pytest.raises(InputError, match="alpha"):
        trust_region_advantage(torch.zeros(1), torch.zeros(1), alpha=alpha)
