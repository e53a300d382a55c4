import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.advantage import distillation_advantage
from mopdctl.objective.divergence import divergence
from mopdctl.objective.extrapolation import extrapolated_advantage, extrapolated_target
from mopdctl.objective.reverse_kl import reverse_kl

INF = math.inf


def logits(seed: int, scale: float = 2.0) -> list[Tensor]:
    """Of the policy, the teacher and the reference."""
    generator = torch.Generator().manual_seed(seed)
    return list(scale * torch.randn(3, 6, 12, dtype=torch.float64, generator=generator))


def logprobs(seed: int, scale: float = 2.0) -> list[Tensor]:
    return [x.log_softmax(-1) for x in logits(seed, scale)]


def test_advantage_by_hand() -> None:
    teacher, prox, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0]), torch.tensor([-2.0, -4.0])
    # 1.25 * (log q - log ref) - (log p - log ref)
    advantage = extrapolated_advantage(teacher, prox, reference, extrapolation=1.25)
    assert advantage.tolist() == [1.25 * 1.0 + 1.0, 1.25 * 2.0 - 3.0]
    clipped = extrapolated_advantage(teacher, prox, reference, extrapolation=1.25, clip=0.4)
    assert clipped.tolist() == pytest.approx([0.4, -0.4])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 3.0))
def test_advantage_is_that_of_the_paper(seed: int, extrapolation: float) -> None:
    policy, teacher, reference = logprobs(seed)
    want = extrapolation * (teacher - reference) - (policy - reference)
    got = extrapolated_advantage(teacher, policy, reference, extrapolation=extrapolation)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    single = extrapolated_advantage(teacher.float(), policy.float(), reference.float(), extrapolation=extrapolation)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), want, rtol=1e-5, atol=1e-5)  # roundings of numbers up to 40


def test_lambda_one_is_the_plain_objective_bit_for_bit_and_needs_no_reference() -> None:
    policy, teacher, reference = (x.float() for x in logprobs(0))
    for given_reference in (None, reference, torch.full_like(reference, math.nan)):
        advantage = extrapolated_advantage(teacher, policy, given_reference, extrapolation=1.0)
        assert torch.equal(advantage, distillation_advantage(teacher, policy))
        assert torch.equal(extrapolated_target(1.0)(teacher, policy, given_reference), teacher)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.25, 0.5, 1.25, 1.5, 3.0]))
def test_target_is_the_normalised_geometric_extrapolation(seed: int, extrapolation: float) -> None:
    policy, teacher, reference = logprobs(seed, 1.0)
    target = extrapolated_target(extrapolation)(teacher, policy, reference)
    unnormalised = teacher.exp() ** extrapolation / reference.exp() ** (extrapolation - 1)
    torch.testing.assert_close(target.exp(), unnormalised / unnormalised.sum(-1, keepdim=True), rtol=1e-8, atol=0.0)


def test_a_reference_equal_to_the_teacher_leaves_the_teacher() -> None:
    policy, teacher, _ = logprobs(1)
    target = extrapolated_target(1.7)(teacher, policy, teacher.clone())
    torch.testing.assert_close(target, teacher, rtol=0.0, atol=1e-14)
    advantage = extrapolated_advantage(teacher, policy, teacher.clone(), extrapolation=1.7)
    assert torch.equal(advantage, teacher - policy)


def test_value_and_gradient_towards_the_target() -> None:
    policy, teacher, reference = logits(2)
    leaf = policy.clone().requires_grad_()
    p, q, r = leaf.softmax(-1), teacher.softmax(-1), reference.softmax(-1)
    tilted = q**1.25 / r**0.25
    naive = (p * (p * tilted.sum(-1, keepdim=True) / tilted).log()).sum(-1)
    (want,) = torch.autograd.grad(naive.sum(), leaf)
    target = extrapolated_target(1.25)(teacher.log_softmax(-1), policy.log_softmax(-1), reference.log_softmax(-1))
    value = divergence(leaf, target, reverse_kl)
    torch.testing.assert_close(value, naive, rtol=1e-8, atol=1e-10)
    (got,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    _, other_teacher, other_reference = logprobs(3)
    for t, r in ((other_teacher, reference.log_softmax(-1)), (teacher.log_softmax(-1), other_reference)):
        other = reverse_kl(policy.log_softmax(-1), extrapolated_target(1.25)(t, policy, r))[1]
        assert (other - got).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("extrapolation", [0.5, 1.0, 1.25])
def test_the_expected_gradient_of_sampled_tokens_is_that_of_the_exact_objective(extrapolation: float) -> None:
    policy, teacher, reference = logprobs(4)
    advantage = extrapolated_advantage(teacher, policy, reference, extrapolation=extrapolation)
    p = policy.exp()
    # sum_y p(y) A(y) grad log p(y), with d log p(y) / d z_v = 1[y = v] - p_v
    expected = p * advantage - p * (p * advantage).sum(-1, keepdim=True)
    exact = reverse_kl(policy, extrapolated_target(extrapolation)(teacher, policy, reference))[1]
    torch.testing.assert_close(expected, -exact, rtol=1e-8, atol=1e-12)


def test_teacher_reference_and_old_policy_receive_no_gradient() -> None:
    # Miles #1966
    policy, teacher, reference = (x.requires_grad_() for x in logprobs(5))
    for extrapolation in (1.0, 1.25):
        assert not extrapolated_advantage(teacher, policy, reference, extrapolation=extrapolation).requires_grad
        assert not extrapolated_target(extrapolation)(teacher, policy, reference).requires_grad


def test_what_the_teacher_excludes_stays_excluded() -> None:
    teacher = torch.tensor([0.5, 0.5, 0.0, 0.0]).double().log()
    reference = torch.tensor([0.25, 0.5, 0.25, 0.0]).double().log()
    target = extrapolated_target(2.0)(teacher, teacher, reference)
    # q^2 / r = (1, 0.5, 0, -)
    assert target.exp().tolist() == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0], rel=1e-14)


def test_what_only_the_reference_excludes_is_no_number_beyond_the_teacher() -> None:
    teacher, reference = torch.tensor([0.5, 0.5]).double().log(), torch.tensor([1.0, 0.0]).double().log()
    assert torch.isnan(extrapolated_target(1.25)(teacher, teacher, reference)).any()
    # on the way to the teacher it is excluded, as in the reference
    assert extrapolated_target(0.5)(teacher, teacher, reference).tolist() == [0.0, -INF]


@pytest.mark.parametrize("extrapolation", [0.0, -1.0, INF, math.nan])
def test_a_lambda_out_of_range_is_refused(extrapolation: float) -> None:
    with pytest.raises(InputError, match="extrapolation"):
        extrapolated_target(extrapolation)
    with pytest.raises(InputError, match="extrapolation"):
        extrapolated_advantage(torch.zeros(1), torch.zeros(1), torch.zeros(1), extrapolation=extrapolation)


def test_a_missing_reference_is_refused() -> None:
    with pytest.raises(InputError, match="needs a reference"):
        extrapolated_target(1.25)(torch.zeros(1, 1), torch.zeros(1, 1), None)
    with pytest.raises(InputError, match="needs a reference"):
        extrapolated_advantage(torch.zeros(1), torch.zeros(1), None, extrapolation=1.25)
