"""The gradient of the sampled-token objective, with its expectation taken exactly over a vocabulary of five.

The advantage and the surrogate are computed in float32: its rounding, 6e-8 of numbers up to about 5, is what the
tolerance of 2e-6 leaves room for. Everything else here is float64.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mopdctl.objective.advantage import distillation_advantage
from mopdctl.objective.correction import Correction, correction_weight, staleness_ratio
from mopdctl.objective.kl import reverse_kl
from mopdctl.objective.surrogate import clipped_surrogate

POLICY = [0.3, -1.2, 2.0, 0.0, -0.4]
TEACHER = [1.1, 0.2, -0.7, 0.5, -2.0]
OTHER_TEACHER = [-1.0, 0.9, 0.4, -0.3, 1.6]
BEHAVIOR = [0.1, -0.9, 1.7, 0.4, -0.1]

FLOAT32 = {"rtol": 0.0, "atol": 2e-6}


def logprobs(logits: list[float]) -> Tensor:
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=-1)


def expected_gradient(
    policy: list[float], teacher: list[float], behavior: list[float], kind: Correction, low: float, high: float
) -> Tensor:
    """Gradient with respect to the policy's logits of E[ weight * J ] over y ~ behaviour, with theta = prox."""
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    policy_V = torch.log_softmax(logits, dim=-1)
    prox_V, behavior_V = policy_V.detach(), logprobs(behavior)
    advantage_V = distillation_advantage(logprobs(teacher), prox_V)
    surrogate_V, _ = clipped_surrogate(policy_V, prox_V, advantage_V, clip_low=0.2, clip_high=0.28)
    weight_V, _ = correction_weight(staleness_ratio(prox_V, behavior_V), kind, low, high)
    (behavior_V.exp() * weight_V * surrogate_V).sum().backward()
    assert logits.grad is not None
    return logits.grad


def exact_gradient(policy: list[float], teacher: list[float]) -> Tensor:
    """The same of -KL(policy || teacher), by the closed form -p_v (log p_v - log q_v - KL)."""
    policy_V, teacher_V = logprobs(policy), logprobs(teacher)
    difference_V = policy_V - teacher_V
    kl = (policy_V.exp() * difference_V).sum()
    return -policy_V.exp() * (difference_V - kl)


@pytest.mark.parametrize("teacher", [TEACHER, OTHER_TEACHER])
def test_expected_gradient_of_sampled_tokens_is_that_of_the_reverse_kl(teacher: list[float]) -> None:
    sampled = expected_gradient(POLICY, teacher, POLICY, "none", 0.0, 1.0)
    torch.testing.assert_close(sampled, exact_gradient(POLICY, teacher), **FLOAT32)
    assert exact_gradient(POLICY, teacher).abs().max() > 0.1


def test_gradient_of_the_exact_objective_is_the_closed_form() -> None:
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    (-reverse_kl(logits, torch.tensor(TEACHER, dtype=torch.float64))).backward()
    torch.testing.assert_close(logits.grad, exact_gradient(POLICY, TEACHER), rtol=0.0, atol=1e-14)


def test_another_teacher_gives_another_gradient() -> None:
    one = expected_gradient(POLICY, TEACHER, POLICY, "none", 0.0, 1.0)
    two = expected_gradient(POLICY, OTHER_TEACHER, POLICY, "none", 0.0, 1.0)
    assert (one - two).abs().max() > 0.1


def test_a_student_equal_to_its_teacher_has_zero_gradient_at_every_token() -> None:
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    policy_V = torch.log_softmax(logits, dim=-1)
    advantage_V = distillation_advantage(policy_V.detach(), policy_V.detach())
    assert advantage_V.tolist() == [0.0] * 5
    for v in range(5):
        surrogate_V, _ = clipped_surrogate(policy_V, policy_V.detach(), advantage_V, clip_low=0.2, clip_high=0.28)
        (gradient,) = torch.autograd.grad(surrogate_V[v], logits, retain_graph=True)
        assert gradient.tolist() == [0.0] * 5


def test_icepop_with_an_infinite_band_recovers_the_on_policy_gradient_from_a_stale_sampler() -> None:
    stale = expected_gradient(POLICY, TEACHER, BEHAVIOR, "icepop", 0.0, float("inf"))
    torch.testing.assert_close(stale, exact_gradient(POLICY, TEACHER), **FLOAT32)
    uncorrected = expected_gradient(POLICY, TEACHER, BEHAVIOR, "none", 0.0, 1.0)
    assert (uncorrected - exact_gradient(POLICY, TEACHER)).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["icepop", "tis"])
def test_every_correction_equals_none_on_policy(kind: Correction) -> None:
    corrected = expected_gradient(POLICY, TEACHER, POLICY, kind, 0.5, 5.0)
    assert torch.equal(corrected, expected_gradient(POLICY, TEACHER, POLICY, "none", 0.5, 5.0))


def test_tokens_outside_the_band_have_no_gradient_and_the_others_keep_theirs() -> None:
    # Only token 1 is masked: the sampler gave it ten times the probability that the policy gives.
    behavior_V = logprobs(POLICY).clone()
    behavior_V[1] += torch.log(torch.tensor(10.0, dtype=torch.float64))
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    policy_V = torch.log_softmax(logits, dim=-1)
    advantage_V = distillation_advantage(logprobs(TEACHER), policy_V.detach())
    surrogate_V, _ = clipped_surrogate(policy_V, policy_V.detach(), advantage_V, clip_low=0.2, clip_high=0.28)
    weight_V, mask_V = correction_weight(staleness_ratio(policy_V.detach(), behavior_V), "icepop", 0.5, 5.0)
    assert mask_V.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    for v in range(5):
        (gradient,) = torch.autograd.grad(weight_V[v] * surrogate_V[v], logits, retain_graph=True)
        by_hand = advantage_V[v].double() * ((torch.arange(5) == v).double() - policy_V.detach().exp())
        torch.testing.assert_close(gradient, by_hand if v != 1 else torch.zeros(5, dtype=torch.float64), **FLOAT32)


def test_only_the_policy_receives_a_gradient() -> None:
    policy, prox, teacher, behavior = (
        torch.tensor(values, requires_grad=True) for values in (POLICY, TEACHER, OTHER_TEACHER, BEHAVIOR)
    )
    advantage = distillation_advantage(teacher, prox)
    weight, mask = correction_weight(staleness_ratio(prox, behavior), "icepop", 0.0, 100.0)
    surrogate, clipped = clipped_surrogate(policy, prox, advantage, clip_low=0.2, clip_high=0.28)
    (weight * surrogate).sum().backward()
    assert policy.grad is not None
    assert (policy.grad != 0).any()
    assert [prox.grad, teacher.grad, behavior.grad] == [None, None, None]
    assert not any(t.requires_grad for t in (advantage, weight, mask, clipped))


def test_fifty_steps_up_the_expected_gradient_bring_the_student_to_its_teacher() -> None:
    policy = torch.tensor(POLICY, dtype=torch.float64)
    teacher = torch.tensor(TEACHER, dtype=torch.float64)
    values = [float(reverse_kl(policy, teacher))]
    for _ in range(50):
        policy = policy + 2.0 * expected_gradient(policy.tolist(), TEACHER, policy.tolist(), "icepop", 0.5, 5.0)
        values.append(float(reverse_kl(policy, teacher)))
    assert all(later <= earlier for earlier, later in pairwise(values))
    assert values[0] > 1.0
    assert values[-1] < 0.01
