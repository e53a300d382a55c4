import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.objective.kl import entropy, kl_k1, kl_k3, reverse_kl

INF = math.inf
LOGITS = st.lists(st.floats(-20, 20), min_size=5, max_size=5)


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kl_by_hand(policy: list[float], teacher: list[float]) -> float:
    """In Python floats, term by term, with the textbook conventions for zero probabilities."""

    def probabilities(logits: list[float]) -> list[float]:
        top = max(logits)
        masses = [math.exp(x - top) for x in logits]
        return [m / math.fsum(masses) for m in masses]

    p, q = probabilities(policy), probabilities(teacher)
    return math.fsum(a * (math.log(a) - math.log(b)) if b else INF for a, b in zip(p, q, strict=True) if a)


@given(LOGITS, LOGITS)
def test_k1_and_k3_have_the_exact_kl_as_expectation(policy: list[float], teacher: list[float]) -> None:
    policy_V, teacher_V = (torch.log_softmax(float64(x), dim=-1) for x in (policy, teacher))
    exact = kl_by_hand(policy, teacher)
    for estimate in (kl_k1, kl_k3):
        expectation = float((policy_V.exp() * estimate(policy_V, teacher_V)).sum())
        # k3 sums p * exp(log q - log p), whose terms reach 1 however small p is: float64 rounding of numbers up to 40
        assert expectation == pytest.approx(exact, rel=1e-10, abs=1e-12)


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative(policy: float, teacher: float) -> None:
    assert float(kl_k3(float64([policy]), float64([teacher]))) >= 0.0
    assert float(kl_k3(torch.tensor([policy]), torch.tensor([teacher]))) >= 0.0


def test_single_token_estimates_by_hand() -> None:
    policy, teacher = float64([-1.0, -0.5, -2.0]), float64([-2.0, -0.5, -1.0])
    assert kl_k1(policy, teacher).tolist() == [1.0, 0.0, -1.0]
    assert kl_k3(policy, teacher).tolist() == pytest.approx([math.exp(-1.0), 0.0, math.e - 2.0], rel=1e-15)


@given(LOGITS, LOGITS)
def test_reverse_kl_in_float64_equals_the_value_by_hand(policy: list[float], teacher: list[float]) -> None:
    got = float(reverse_kl(float64(policy), float64(teacher)))
    assert got == pytest.approx(kl_by_hand(policy, teacher), rel=1e-12, abs=1e-14)


def test_reverse_kl_keeps_float64_and_widens_half_precision() -> None:
    policy, teacher = float64([0.3, -1.2, 2.0]), float64([1.1, 0.2, -0.7])
    assert reverse_kl(policy, teacher).dtype == torch.float64
    narrow = reverse_kl(policy.bfloat16(), teacher.bfloat16())
    assert narrow.dtype == torch.float32
    # the inputs are rounded to bfloat16, the computation is not
    wide = kl_by_hand(policy.bfloat16().tolist(), teacher.bfloat16().tolist())
    assert float(narrow) == pytest.approx(wide, rel=1e-6)


@pytest.mark.parametrize(
    ("policy", "teacher", "expected"),
    [
        ([0.0, 1.0, -INF], [0.5, 0.2, 0.3], None),  # a policy probability of zero contributes zero
        ([0.0, 1.0, -INF], [0.5, 0.2, -INF], None),  # zero on both sides contributes zero
        ([0.0, 1.0, 2.0], [0.5, 0.2, -INF], INF),  # the teacher excludes a token that the policy writes
        ([0.0, -INF, -INF], [0.0, -INF, -INF], 0.0),
    ],
)
def test_reverse_kl_at_probabilities_of_zero(policy: list[float], teacher: list[float], expected: float | None) -> None:
    want = kl_by_hand(policy, teacher) if expected is None else expected
    assert float(reverse_kl(float64(policy), float64(teacher))) == pytest.approx(want, rel=1e-12)


def test_a_policy_probability_that_underflows_counts_as_zero() -> None:
    # exp(-200) is 0 in float32 while log p = -200 is not -inf, and 0 * inf would be NaN.
    policy = torch.tensor([0.0, -200.0], requires_grad=True)
    value = reverse_kl(policy, torch.tensor([0.0, -INF]))
    value.backward()
    assert value.item() == 0.0
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("teacher", [[0.5, 0.2, 0.3], [0.5, 0.2, -INF]])
def test_gradient_of_the_reverse_kl_is_finite_where_the_policy_has_probability_zero(teacher: list[float]) -> None:
    policy = float64([0.0, 1.0, -INF]).requires_grad_()
    reverse_kl(policy, float64(teacher)).backward()
    # the same as without the third token: it has no mass
    short = float64([0.0, 1.0]).requires_grad_()
    teacher_V = torch.log_softmax(float64(teacher), dim=-1)[:2]
    p = torch.log_softmax(short, dim=-1)
    (p.exp() * (p - teacher_V)).sum().backward()
    assert policy.grad is not None
    assert short.grad is not None
    torch.testing.assert_close(policy.grad[:2], short.grad, rtol=1e-12, atol=1e-15)
    assert policy.grad[2] == 0.0


def test_no_gradient_flows_into_the_teacher() -> None:
    policy, teacher = torch.zeros(3, requires_grad=True), torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    reverse_kl(policy, teacher).backward()
    assert teacher.grad is None
    assert policy.grad is not None


@given(LOGITS)
def test_a_distribution_has_no_kl_from_itself(logits: list[float]) -> None:
    assert float(reverse_kl(float64(logits), float64(logits))) == 0.0


def test_reverse_kl_does_not_depend_on_the_offset_of_the_logits() -> None:
    policy, teacher = float64([0.3, -1.2, 2.0]), float64([1.1, 0.2, -0.7])
    assert float(reverse_kl(policy + 100, teacher - 50)) == pytest.approx(float(reverse_kl(policy, teacher)), rel=1e-12)


def test_entropy_by_hand() -> None:
    half = float64([0.5, 0.25, 0.25]).log()
    assert float(entropy(half)) == pytest.approx(1.5 * math.log(2), rel=1e-15)
    assert float(entropy(torch.zeros(7))) == pytest.approx(math.log(7), rel=1e-6)  # float32
    assert float(entropy(float64([3.0, 3.0, -INF]))) == pytest.approx(math.log(2), rel=1e-15)
    assert float(entropy(float64([0.0, -INF]))) == 0.0


def test_entropy_is_taken_over_the_last_dimension() -> None:
    rows = torch.stack([float64([0.0, 0.0]), float64([0.0, math.log(3.0)])])
    by_hand = [math.log(2), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))]
    assert entropy(rows).tolist() == pytest.approx(by_hand, rel=1e-14)
