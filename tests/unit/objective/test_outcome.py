import math

import pytest
import torch

from mopdctl.errors import InputError
from mopdctl.objective.advantage import distillation_advantage
from mopdctl.objective.group import group_advantages
from mopdctl.objective.outcome import outcome_mixed_advantage


def over_tokens(outcomes: list[float], lengths: list[int]) -> torch.Tensor:
    """One number per answer, at each of its tokens."""
    return torch.tensor(outcomes).repeat_interleave(torch.tensor(lengths))


def test_the_outcome_of_an_answer_is_added_at_each_of_its_tokens() -> None:
    # two answers of 3 and 2 tokens, rewards 1 and 0: group advantages +1 and -1
    outcomes = group_advantages([1.0, 0.0], epsilon=0.0)
    assert outcomes == [1.0, -1.0]
    distillation = torch.tensor([0.5, -2.0, 0.0, 1.0, 0.25])
    mixed = outcome_mixed_advantage(distillation, over_tokens(outcomes, [3, 2]), alpha=0.5)
    assert mixed.tolist() == [1.0, -1.5, 0.5, 0.5, -0.25]


def test_naive_reference_over_ragged_answers() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, outcomes, alpha = [1, 7, 0, 3], [0.3, -1.25, 9.0, 0.8], 0.37
    teacher, prox = torch.randn(2, 11, generator=generator)
    mixed = outcome_mixed_advantage(distillation_advantage(teacher, prox), over_tokens(outcomes, lengths), alpha=alpha)
    answer_of = [i for i, n in enumerate(lengths) for _ in range(n)]
    want = [float(teacher[t].double() - prox[t].double()) + alpha * outcomes[answer_of[t]] for t in range(11)]
    assert mixed.tolist() == pytest.approx(want, rel=1e-6, abs=1e-6)  # float32
    double = outcome_mixed_advantage((teacher - prox).double(), over_tokens(outcomes, lengths).double(), alpha=alpha)
    assert double.dtype == torch.float64


def test_alpha_zero_is_the_distillation_advantage_bit_for_bit_whatever_the_outcome() -> None:
    distillation = torch.tensor([0.1, -3.0, 1e-30])
    for outcome in (1.0, math.nan, math.inf):
        assert torch.equal(outcome_mixed_advantage(distillation, torch.full((3,), outcome), alpha=0.0), distillation)


def test_a_group_of_equal_rewards_leaves_the_distillation_advantage() -> None:
    distillation = torch.tensor([0.1, -3.0, 7.0])
    outcome = over_tokens(group_advantages([1.0, 1.0, 1.0]), [1, 1, 1])
    assert torch.equal(outcome_mixed_advantage(distillation, outcome, alpha=2.0), distillation)


def test_another_teacher_gives_another_advantage_and_so_does_another_outcome() -> None:
    outcome, distillation = over_tokens([1.0], [3]), torch.tensor([0.1, -3.0, 7.0])
    mixed = outcome_mixed_advantage(distillation, outcome, alpha=0.5)
    assert (outcome_mixed_advantage(distillation + 1.0, outcome, alpha=0.5) != mixed).all()
    assert (outcome_mixed_advantage(distillation, -outcome, alpha=0.5) != mixed).all()


def test_the_expected_gradient_is_that_of_both_terms() -> None:
    # a vocabulary of five, an outcome that depends on the token: -grad [KL(p || q)] + alpha grad E[outcome]
    generator = torch.Generator().manual_seed(1)
    logits, teacher, outcome = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    teacher = teacher.log_softmax(-1)

    def gradient_of(term: str) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        policy = leaf.log_softmax(-1)
        if term == "sampled":
            mixed = outcome_mixed_advantage(teacher - policy.detach(), outcome, alpha=0.7)
            objective = (policy.detach().exp() * mixed * policy).sum()
        else:
            p = leaf.softmax(-1)
            objective = -(p * (p / teacher.exp()).log()).sum() + 0.7 * (p * outcome).sum()
        (gradient,) = torch.autograd.grad(objective, leaf)
        return gradient

    torch.testing.assert_close(gradient_of("sampled"), gradient_of("exact"), rtol=1e-8, atol=1e-12)


def test_no_gradient_flows_through() -> None:
    distillation, outcome = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    for alpha in (0.0, 1.0):
        assert not outcome_mixed_advantage(distillation, outcome, alpha=alpha).requires_grad


@pytest.mark.parametrize("alpha", [-0.1, math.nan])
def test_an_alpha_below_zero_is_refused(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha"):
        outcome_mixed_advantage(torch.zeros(1), torch.zeros(1), alpha=alpha)
