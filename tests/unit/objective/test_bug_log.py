"""Failures that others met in public, as properties of the objectives: sampling temperature and a stale sampler."""

import math

import pytest
import torch
from torch import Tensor

from mopdctl.objective.advantage import distillation_advantage
from mopdctl.objective.correction import correction_weight, staleness_ratio
from mopdctl.objective.divergence import Divergence, divergence
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.jsd import jsd
from mopdctl.objective.kl import reverse_kl as reverse_kl_of_logits
from mopdctl.objective.reverse_kl import reverse_kl
from mopdctl.objective.top_k import top_k

POLICY = [2.0, 0.5, -1.0, 0.1, -3.0]
TEACHER = [0.3, 1.5, -0.5, -2.0, 0.0]
NO_BAND = (0.0, math.inf)


def logits(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------------------------ temperatures other than 1
# TRL #4159, verl #6240, vime #64: log-probabilities of one temperature held against those of another.
# slime #2085, #2319, verl #6867: a teacher's temperature that is accepted and ignored. Teachers and learner have none
# here: they are scored at temperature 1, and only `behavior_logprobs` are those of the tempered distribution, so that
# c_t is p_prox at temperature 1 over p_behav at the sampler's.


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_the_ratio_is_that_of_the_learner_at_temperature_1_to_the_tempered_sampler(temperature: float) -> None:
    prox_V = torch.log_softmax(logits(POLICY), -1)
    behavior_V = torch.log_softmax(logits(POLICY) / temperature, -1)
    c_V = staleness_ratio(prox_V, behavior_V).double()
    torch.testing.assert_close(c_V, prox_V.exp() / behavior_V.exp(), atol=1e-6, rtol=1e-5)
    assert bool((c_V == 1).all()) == (temperature == 1)
    # It is an importance weight: samples of the tempered sampler stand for the learner's own.
    assert float((behavior_V.exp() * c_V).sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.5])
def test_without_a_band_sampling_at_any_temperature_has_the_gradient_of_the_reverse_kl(temperature: float) -> None:
    policy_V, teacher_V = logits(POLICY).requires_grad_(), torch.log_softmax(logits(TEACHER), -1)
    logprobs_V = torch.log_softmax(policy_V, -1)
    behavior_V = torch.log_softmax(policy_V.detach() / temperature, -1)
    weight_V, _ = correction_weight(staleness_ratio(logprobs_V, behavior_V), "icepop", *NO_BAND)
    advantage_V = distillation_advantage(teacher_V, logprobs_V)
    # The expectation over the sampler, written out: each token with its probability there.
    loss = -(behavior_V.exp() * weight_V.double() * advantage_V.double() * logprobs_V).sum()
    (found_V,) = torch.autograd.grad(loss, policy_V)
    exact = reverse_kl_of_logits(policy_V, teacher_V)
    (expected_V,) = torch.autograd.grad(exact.sum(), policy_V)
    torch.testing.assert_close(found_V, expected_V, atol=1e-6, rtol=1e-5)


def test_a_band_drops_what_a_sharper_sampler_over_or_under_samples() -> None:
    # An engine and a learner that agree to the bit: the ratio is the temperature's alone, and the band does not know.
    behavior_V = torch.log_softmax(logits(POLICY) / 0.5, -1)
    prox_V = torch.log_softmax(logits(POLICY), -1)
    c_V = staleness_ratio(prox_V, behavior_V)
    _, kept_V = correction_weight(c_V, "icepop", 0.5, 5.0)
    # What is lost are tokens that the learner writes, and the sharper sampler seldom: a band wants temperature 1.
    assert kept_V.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert float((behavior_V.exp() * (1 - kept_V)).sum()) == pytest.approx(0.023, abs=1e-3)
    assert float((prox_V.exp() * (1 - kept_V)).sum()) == pytest.approx(0.144, abs=1e-3)


@pytest.mark.parametrize("of", [reverse_kl, forward_kl, jsd(0.5), top_k(reverse_kl, 2)])
def test_without_a_band_the_gate_of_a_whole_divergence_is_1_on_average(of: Divergence) -> None:
    # At one prefix the divergence is the same whatever token was sampled, so its expected weight is all that counts.
    policy_V = logits(POLICY).requires_grad_()
    behavior_V = torch.log_softmax(policy_V.detach() / 0.7, -1)
    c_V = staleness_ratio(torch.log_softmax(policy_V.detach(), -1), behavior_V)
    weight_V, _ = correction_weight(c_V, "icepop", *NO_BAND)
    value = divergence(policy_V.unsqueeze(0), logits(TEACHER).unsqueeze(0), of).sum()
    (plain_V,) = torch.autograd.grad(value, policy_V, retain_graph=True)
    (gated_V,) = torch.autograd.grad((behavior_V.exp() * weight_V.double()).sum() * value, policy_V)
    torch.testing.assert_close(gated_V, plain_V, atol=1e-6, rtol=1e-5)


# ----------------------------------------------------------------------------------------------- a stale sampler


def train_with_a_stale_sampler(
    kind: str, low: float, high: float, *, lag: int, steps: int
) -> tuple[list[float], float]:
    """The exact KL of each step, and the largest weight, of a policy whose sampler is renewed every `lag` steps."""
    generator = torch.Generator().manual_seed(0)
    teacher_V = torch.log_softmax(logits(TEACHER), -1)
    policy_V = logits([6.0, -2.0, 0.0, 1.0, -4.0])
    behavior_V, kl, largest = torch.log_softmax(policy_V, -1), [], 0.0
    for step in range(steps):
        if step % lag == 0:
            behavior_V = torch.log_softmax(policy_V, -1)
        policy_V.requires_grad_()
        logprobs_V = torch.log_softmax(policy_V, -1)
        kl.append(float((logprobs_V.exp() * (logprobs_V - teacher_V)).sum().detach()))
        drawn_N = torch.multinomial(behavior_V.exp(), 64, replacement=True, generator=generator)
        c_N = staleness_ratio(logprobs_V, behavior_V)[drawn_N]
        weight_N, _ = correction_weight(c_N, kind, low, high)  # type: ignore[arg-type]
        largest = max(largest, float(weight_N.max()))
        loss = -(weight_N * distillation_advantage(teacher_V, logprobs_V)[drawn_N] * logprobs_V[drawn_N]).mean()
        (gradient_V,) = torch.autograd.grad(loss, policy_V)
        policy_V = (policy_V - 0.3 * gradient_V).detach()
    return kl, largest


@pytest.mark.parametrize("kind", ["icepop", "tis"])
def test_a_sampler_many_steps_behind_leaves_weights_bounded_and_the_student_still_comes_to_its_teacher(
    kind: str,
) -> None:
    # Qwen3 #1799: without a bound on the ratio, long drift is amplified until the student collapses.
    kl, largest = train_with_a_stale_sampler(kind, 0.5, 5.0, lag=20, steps=400)
    assert kl[0] > 1
    assert largest <= 5.0
    assert max(kl) < 1.5 * kl[0]
    assert max(kl[-40:]) < 0.1 * kl[0]


def test_the_ratio_that_the_bound_holds_back_is_there() -> None:
    _, largest = train_with_a_stale_sampler("icepop", *NO_BAND, lag=20, steps=400)
    assert largest > 5.5
