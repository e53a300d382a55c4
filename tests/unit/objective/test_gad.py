"""The discriminator's loss and what it pays, against their equations in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.objective.gad import adversarial_rewards, bradley_terry_loss, pair_accuracy
from mopdctl.objective.group import group_advantages

SCORES = st.lists(st.floats(-30, 30), min_size=2, max_size=8)


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@given(SCORES, st.floats(-30, 30))
def test_the_loss_and_its_gradient_are_their_closed_forms(teacher: list[float], student: float) -> None:
    teacher_P, student_P = float64(*teacher), float64(*[student] * len(teacher))
    loss_P = bradley_terry_loss(teacher_P, student_P)
    loss_P.sum().backward()
    margins = [score - student for score in teacher]
    # log(1 + e^-m), written so that neither side overflows
    expected = [max(-m, 0) + math.log1p(math.exp(-abs(m))) for m in margins]
    slope = [-1 / (1 + math.exp(m)) for m in margins]
    assert loss_P.tolist() == pytest.approx(expected, abs=1e-12)
    assert teacher_P.grad is not None
    assert student_P.grad is not None
    assert teacher_P.grad.tolist() == pytest.approx(slope, abs=1e-12)
    assert student_P.grad.tolist() == pytest.approx([-s for s in slope], abs=1e-12)


def test_autograd_agrees_with_finite_differences() -> None:
    assert torch.autograd.gradcheck(bradley_terry_loss, (float64(0.3, -2.0, 5.0), float64(0.3, 1.0, -4.0)))


def test_a_pair_without_a_margin_costs_log_2() -> None:
    assert bradley_terry_loss(torch.tensor([1.5]), torch.tensor([1.5])).tolist() == pytest.approx([math.log(2)])


def test_a_margin_of_any_size_gives_a_finite_loss() -> None:
    teacher_P = torch.tensor([1e4, -1e4], requires_grad=True)
    loss_P = bradley_terry_loss(teacher_P, torch.zeros(2))
    loss_P.sum().backward()
    assert teacher_P.grad is not None
    assert loss_P.tolist() == [0.0, 1e4]
    assert teacher_P.grad.tolist() == [0.0, -1.0]


def test_half_precision_scores_give_a_float32_loss() -> None:
    scores_P = torch.tensor([0.5], dtype=torch.bfloat16)
    assert bradley_terry_loss(scores_P, scores_P).dtype == torch.float32


def test_an_equal_pair_counts_as_half_told_apart() -> None:
    assert pair_accuracy(torch.tensor([2.0, 0.0, -0.1])).tolist() == [1.0, 0.5, 0.0]


@given(SCORES, st.floats(-30, 30))
def test_the_teachers_score_leaves_group_advantages_as_they_are(scores: list[float], teacher: float) -> None:
    paid = adversarial_rewards(scores, [teacher] * len(scores))
    assert paid == [score - teacher for score in scores]
    plain = group_advantages(scores, scale="none")
    assert group_advantages(paid, scale="none") == pytest.approx(plain, abs=1e-12)


@given(st.floats(-30, 30))
def test_the_bound_does_not_feel_a_shift_of_all_scores(shift: float) -> None:
    found = adversarial_rewards([shift - 5, shift - 1, shift + 4], [shift] * 3, clip=2.0)
    assert found == pytest.approx([-2.0, -1.0, 2.0])


def test_answers_beyond_the_bound_earn_exactly_the_same() -> None:
    assert adversarial_rewards([-9.0, -7.0], [0.0, 0.0], clip=2.0) == [-2.0, -2.0]
