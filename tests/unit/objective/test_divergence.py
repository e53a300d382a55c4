"""Every divergence against references that share nothing with it: sums of probabilities with autograd's gradient, and
decimal arithmetic with finite differences where probabilities leave the range of float64."""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.divergence import Divergence, divergence
from mopdctl.objective.entropy_aware import entropy_aware
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.jsd import jsd
from mopdctl.objective.kl import reverse_kl as reverse_kl_of_logits
from mopdctl.objective.reverse_kl import reverse_kl
from mopdctl.objective.top_k import top_k

Naive = Callable[[Tensor, Tensor], Tensor]
"""(policy probabilities [V], target probabilities [V]) -> value, differentiable."""

INF = math.inf
EXACT = {"rtol": 1e-8, "atol": 1e-10}
SINGLE = {
    "rtol": 1e-4,
    "atol": 1e-5,
}  # float32: rounding of log-probabilities up to 50, 4e-6, summed with their weights


def naive_reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def naive_forward_kl(p: Tensor, q: Tensor) -> Tensor:
    return (q * (q / p).log()).sum()


def naive_jsd(share: float) -> Naive:
    def value(p: Tensor, q: Tensor) -> Tensor:
        mixture = share * q + (1 - share) * p
        return share * (q * (q / mixture).log()).sum() + (1 - share) * (p * (p / mixture).log()).sum()

    return value


def naive_top_k(of: Naive, k: int, support: str, tail: str) -> Naive:
    def value(p: Tensor, q: Tensor) -> Tensor:
        ranked = {"student": [p], "teacher": [q], "union": [p, q]}[support]
        kept = {
            v for side in ranked for v in sorted(range(len(p)), key=lambda v, side=side: -float(side[v].detach()))[:k]
        }
        others = [v for v in range(len(p)) if v not in kept]

        def cut(x: Tensor) -> Tensor:
            inside = torch.stack([x[v] for v in kept])
            if tail == "renormalize":
                return inside / inside.sum()
            return torch.cat([inside, x[others].sum().reshape(1)]) if others else inside

        return of(cut(p), cut(q))

    return value


def naive_entropy_aware(base: Naive, weight: float, threshold: float, k: int) -> Naive:
    def value(p: Tensor, q: Tensor) -> Tensor:
        if float(-(q * q.log()).sum()) <= threshold:
            return base(p, q)
        return base(p, q) + weight * naive_top_k(naive_forward_kl, k, "teacher", "bucket")(p, q)

    return value


CASES: dict[str, tuple[Divergence, Naive]] = {
    "reverse_kl": (reverse_kl, naive_reverse_kl),
    "forward_kl": (forward_kl, naive_forward_kl),
    "jsd 0.1": (jsd(0.1), naive_jsd(0.1)),
    "jsd 0.5": (jsd(0.5), naive_jsd(0.5)),
    "jsd 0.9": (jsd(0.9), naive_jsd(0.9)),
    "entropy_aware": (entropy_aware(reverse_kl, 0.7, 0.8, 3), naive_entropy_aware(naive_reverse_kl, 0.7, 0.8, 3)),
}
for support in ("student", "teacher", "union"):
    for tail in ("bucket", "renormalize"):
        for name, of, naive in (
            ("reverse_kl", reverse_kl, naive_reverse_kl),
            ("forward_kl", forward_kl, naive_forward_kl),
            ("jsd 0.3", jsd(0.3), naive_jsd(0.3)),
        ):
            CASES[f"top_k {name} {support} {tail}"] = (
                top_k(of, 3, support=support, tail=tail),  # type: ignore[arg-type]
                naive_top_k(naive, 3, support, tail),
            )

every = pytest.mark.parametrize("case", CASES)


def logits(seed: int, tokens: int, vocabulary: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, target = scale * torch.randn(2, tokens, vocabulary, dtype=torch.float64, generator=generator)
    return policy, target


def reference(naive: Naive, policy_NV: Tensor, target_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient row by row, in float64, with nothing but softmax and autograd."""
    leaf_NV = policy_NV.double().requires_grad_()
    target_NV = target_NV.double()
    values = [naive(leaf_NV[n].softmax(-1), target_NV[n].softmax(-1)) for n in range(len(leaf_NV))]
    value_N = torch.stack(values)
    (gradient_NV,) = torch.autograd.grad(value_N.sum(), leaf_NV)
    return value_N.detach(), gradient_NV


def ours(of: Divergence, policy_NV: Tensor, target_NV: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    leaf_NV = policy_NV.detach().clone().requires_grad_()
    value_N = divergence(leaf_NV, target_NV, of, temperature=temperature)
    (gradient_NV,) = torch.autograd.grad(value_N.sum(), leaf_NV)
    return value_N.detach(), gradient_NV


@every
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 5),
    vocabulary=st.integers(2, 30),
    scale=st.sampled_from([0.1, 2, 6]),
)
def test_value_and_gradient_are_those_of_the_naive_reference(
    case: str, seed: int, tokens: int, vocabulary: int, scale: float
) -> None:
    of, naive = CASES[case]
    policy_NV, target_NV = logits(seed, tokens, vocabulary, scale)
    for got, want in zip(ours(of, policy_NV, target_NV), reference(naive, policy_NV, target_NV), strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    # the reference sees the same float32 numbers, so that only the computation differs
    policy_NV, target_NV = policy_NV.float(), target_NV.float()
    for got, want in zip(ours(of, policy_NV, target_NV), reference(naive, policy_NV, target_NV), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, **SINGLE)


@every
def test_gradcheck(case: str) -> None:
    policy_NV, target_NV = logits(3, 4, 8)
    assert torch.autograd.gradcheck(
        lambda x: divergence(x, target_NV, CASES[case][0], temperature=0.7), policy_NV.requires_grad_()
    )


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_distributions_have_exactly_no_value_and_no_gradient(case: str, dtype: torch.dtype) -> None:
    policy_NV = logits(4, 50, 40, 5.0)[0].to(dtype)
    policy_NV[::2, 5:20] = -INF
    value_N, gradient_NV = ours(CASES[case][0], policy_NV, policy_NV.clone())
    assert value_N.tolist() == [0.0] * 50
    assert not gradient_NV.any()


@every
def test_another_target_gives_another_gradient(case: str) -> None:
    # AReaL joint KDRL: a term whose gradient does not contain the teacher
    policy_NV, target_NV = logits(5, 6, 12)
    other_NV = logits(6, 6, 12)[1]
    one, two = (ours(CASES[case][0], policy_NV, t)[1] for t in (target_NV, other_NV))
    assert ((one - two).abs().amax(-1) > 1e-3).all()


@every
def test_the_target_receives_no_gradient(case: str) -> None:
    # TRL #6526, Miles #1966: neither a gradient nor a graph behind the teacher
    policy_NV, target_NV = logits(7, 2, 9)
    policy_NV.requires_grad_()
    target_NV.requires_grad_()
    value_N = divergence(policy_NV, target_NV * 2.0, CASES[case][0])
    assert value_N.grad_fn is not None
    assert sum(function is not None for function, _ in value_N.grad_fn.next_functions) == 1  # the policy's alone
    value_N.sum().backward()
    assert target_NV.grad is None
    assert policy_NV.grad is not None


@every
def test_a_row_depends_on_no_other_row(case: str) -> None:
    policy_NV, target_NV = logits(8, 7, 33)
    together_N, together_NV = ours(CASES[case][0], policy_NV, target_NV)
    for n in range(7):
        alone_N, alone_NV = ours(CASES[case][0], policy_NV[n : n + 1], target_NV[n : n + 1])
        # not bit for bit: exp of a whole vector register and of what is left over may differ in the last place
        torch.testing.assert_close(alone_N[0], together_N[n], rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(alone_NV[0], together_NV[n], rtol=1e-12, atol=1e-15)


@every
def test_one_poisoned_row_leaves_the_others_as_they_are(case: str) -> None:
    of = CASES[case][0]
    policy_NV, target_NV = logits(9, 3, 16)
    want_N, want_NV = ours(of, policy_NV, target_NV)
    for poison in (math.nan, INF, 1e9):
        policy_NV[1], target_NV[1] = poison, poison
        value_N, gradient_NV = ours(of, policy_NV, target_NV)
        assert torch.equal(value_N[[0, 2]], want_N[[0, 2]])
        assert torch.equal(gradient_NV[[0, 2]], want_NV[[0, 2]])


@every
def test_cells_outside_a_ragged_batch_never_reach_the_gradient(case: str) -> None:
    # TRL #5594, ms-swift #9767: padding of -inf, NaN or 1e9 met 0 * x in the backward pass
    of, naive = CASES[case]
    lengths, vocabulary = [3, 7, 1], 11
    active_BT = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    policy_BTV, target_BTV = (x.reshape(3, 7, vocabulary).clone() for x in logits(10, 21, vocabulary))
    for x in (policy_BTV, target_BTV):
        x[0, 3:5], x[0, 5:], x[2, 1:] = math.nan, -INF, 1e9
    policy_BTV.requires_grad_()
    divergence(policy_BTV[active_BT], target_BTV[active_BT], of).sum().backward()
    assert policy_BTV.grad is not None
    assert not policy_BTV.grad[~active_BT].any()
    want = reference(naive, policy_BTV.detach()[active_BT], target_BTV[active_BT])[1]
    torch.testing.assert_close(policy_BTV.grad[active_BT], want, **EXACT)


@every
def test_offsets_of_the_logits_change_nothing(case: str) -> None:
    policy_NV, target_NV = logits(11, 4, 10)
    one, two = ours(CASES[case][0], policy_NV, target_NV), ours(CASES[case][0], policy_NV + 100.0, target_NV - 50.0)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@every
def test_the_gradient_of_each_token_sums_to_zero(case: str) -> None:
    policy_NV, target_NV = logits(12, 5, 25)
    sums_N = ours(CASES[case][0], policy_NV, target_NV)[1].sum(-1)
    torch.testing.assert_close(sums_N, torch.zeros(5, dtype=torch.float64), rtol=0.0, atol=1e-14)


@every
def test_the_inputs_of_a_divergence_stay_as_they_are(case: str) -> None:
    policy_NV, target_NV = (x.log_softmax(-1) for x in logits(13, 3, 10))
    kept = policy_NV.clone(), target_NV.clone()
    CASES[case][0](policy_NV, target_NV)
    assert torch.equal(policy_NV, kept[0])
    assert torch.equal(target_NV, kept[1])


@every
def test_temperature_divides_the_logits_of_both_sides(case: str) -> None:
    of, naive = CASES[case]
    policy_NV, target_NV = logits(14, 3, 10)
    value_N, gradient_NV = ours(of, policy_NV, target_NV, temperature=0.7)
    want_N, want_NV = reference(naive, policy_NV / 0.7, target_NV / 0.7)
    torch.testing.assert_close(value_N, want_N, **EXACT)
    torch.testing.assert_close(gradient_NV, want_NV / 0.7, **EXACT)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_without_a_softmax_is_refused(temperature: float) -> None:
    with pytest.raises(InputError, match="temperature"):
        divergence(torch.zeros(1, 3), torch.zeros(1, 3), reverse_kl, temperature=temperature)


# ----------------------------------------------------------------------------------- at the ends of the number range

DecimalOf = Callable[[list[Decimal], list[Decimal]], Decimal]


def decimal_kl(p: list[Decimal], q: list[Decimal]) -> Decimal:
    return sum((a * (a.ln() - b.ln()) for a, b in zip(p, q, strict=True)), Decimal(0))


def decimal_jsd(p: list[Decimal], q: list[Decimal]) -> Decimal:
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (decimal_kl(q, m) + decimal_kl(p, m)) / 2


def decimal_top_2(p: list[Decimal], q: list[Decimal]) -> Decimal:
    kept = sorted(range(len(q)), key=lambda v: -q[v])[:2]
    cut_p, cut_q = ([x[v] for v in kept] + [sum(x[v] for v in range(len(x)) if v not in kept)] for x in (p, q))
    return decimal_kl(cut_p, cut_q)


def by_decimals(of: DecimalOf, policy: list[float], target: list[float], temperature: str) -> tuple[float, list[float]]:
    """Value, and gradient by central differences of step 1e-30, in 100 digits."""
    with localcontext() as context:
        context.prec, context.Emin = 100, -(10**9)

        def softmax(z: list[Decimal]) -> list[Decimal]:
            masses = [(x / Decimal(temperature)).exp() for x in z]
            return [m / sum(masses) for m in masses]

        def value(z: list[Decimal]) -> Decimal:
            return of(softmax(z), softmax([Decimal(x) for x in target]))

        z, step = [Decimal(x) for x in policy], Decimal("1e-30")
        gradient = [
            (value([*z[:v], z[v] + step, *z[v + 1 :]]) - value([*z[:v], z[v] - step, *z[v + 1 :]])) / (2 * step)
            for v in range(len(z))
        ]
        return float(value(z)), [float(g) for g in gradient]


EXTREMES = {
    "agree": ([80.0, -80.0, 0.0, 79.99, 3.0], [80.0, -80.0, 0.0, 79.98, -3.0]),
    "opposite": ([80.0, -80.0, 0.0, 1.0, -1.0], [-80.0, 80.0, 0.0, 1.0, -1.0]),
    "one tie": ([80.0, 80.0, -80.0, -80.0, 0.0], [80.0, -80.0, 80.0, -80.0, 79.99]),
    "flat policy": ([0.0, 0.0, 0.0, 0.0, 0.0], [80.0, -80.0, 1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize(
    ("of", "decimal_of"),
    [
        (reverse_kl, decimal_kl),
        (forward_kl, lambda p, q: decimal_kl(q, p)),
        (jsd(0.5), decimal_jsd),
        (top_k(reverse_kl, 2), decimal_top_2),
    ],
    ids=["reverse_kl", "forward_kl", "jsd", "top_k"],
)
def test_temperature_001_and_logits_of_80_are_finite_and_right(
    of: Divergence, decimal_of: DecimalOf, extreme: str
) -> None:
    policy, target = EXTREMES[extreme]
    want, want_gradient = by_decimals(decimal_of, policy, target, "0.01")
    # 79.99 / 0.01 is off by up to 4e-4 in float32; probabilities multiply that, and 1/T = 100 enlarges it
    for dtype, rtol, atol, gradient_atol in ((torch.float64, 1e-8, 1e-8, 1e-8), (torch.float32, 1e-6, 4e-4, 0.04)):
        value_N, gradient_NV = ours(
            of, torch.tensor([policy], dtype=dtype), torch.tensor([target], dtype=dtype), temperature=0.01
        )
        assert float(value_N) == pytest.approx(want, rel=rtol, abs=atol)
        assert gradient_NV[0].tolist() == pytest.approx(want_gradient, rel=rtol, abs=gradient_atol)


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@every
def test_a_token_that_both_sides_exclude_might_as_well_not_exist(case: str) -> None:
    policy_NV, target_NV = logits(15, 4, 8)
    want_N, want_NV = ours(CASES[case][0], policy_NV, target_NV)
    absent = torch.full((4, 2), -INF, dtype=torch.float64)
    value_N, gradient_NV = ours(CASES[case][0], torch.cat([policy_NV, absent], -1), torch.cat([target_NV, absent], -1))
    torch.testing.assert_close(value_N, want_N, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(gradient_NV[:, :8], want_NV, rtol=1e-13, atol=1e-15)
    assert not gradient_NV[:, 8:].any()


def test_a_token_that_one_side_excludes() -> None:
    policy, target = [0.0, 1.0, -INF], [0.5, 0.2, 0.3]
    # reverse: a policy probability of zero contributes zero, and has no gradient
    value_N, gradient_NV = ours(reverse_kl, row(policy), row(target))
    shorter = row(policy[:2]).log_softmax(-1)
    want = (shorter.exp() * (shorter - row(target).log_softmax(-1)[:, :2])).sum()
    assert float(value_N) == pytest.approx(float(want), rel=1e-14)
    assert torch.isfinite(gradient_NV).all()
    assert gradient_NV[0, 2] == 0.0
    # reverse: what the policy writes and the target excludes is infinite
    assert float(reverse_kl(row(target).log_softmax(-1), row(policy).log_softmax(-1))[0]) == INF
    # forward: the same, the other way round
    assert float(forward_kl(row(policy).log_softmax(-1), row(target).log_softmax(-1))[0]) == INF
    value_N, gradient_NV = ours(forward_kl, row(target), row(policy))
    assert math.isfinite(float(value_N))
    torch.testing.assert_close(gradient_NV, row(target).softmax(-1) - row(policy).softmax(-1), **EXACT)


@pytest.mark.parametrize("swap", [False, True])
def test_jsd_stays_finite_where_one_side_excludes_a_token(swap: bool) -> None:
    one, two = row([0.0, 1.0, -INF]), row([0.5, 0.2, 0.3])
    policy, target = (two, one) if swap else (one, two)
    p, q = policy.softmax(-1), target.softmax(-1)
    m = (p + q) / 2
    want = (torch.xlogy(p, p / m).sum() + torch.xlogy(q, q / m).sum()) / 2
    value_N, gradient_NV = ours(jsd(0.5), policy, target)
    assert float(value_N) == pytest.approx(float(want), rel=1e-14)
    log_ratio = torch.where(p > 0, (p / m).log(), torch.zeros_like(p))
    torch.testing.assert_close(gradient_NV, p / 2 * (log_ratio - (p * log_ratio).sum()), **EXACT)


def test_disjoint_distributions() -> None:
    policy, target = row([0.0, 0.0, -INF, -INF]), row([-INF, -INF, 0.0, 0.0])
    assert float(ours(jsd(0.5), policy, target)[0]) == pytest.approx(math.log(2), rel=1e-15)
    assert float(divergence(policy, target, reverse_kl)) == INF
    assert float(divergence(policy, target, forward_kl)) == INF


def test_a_probability_that_underflows_counts_as_zero_on_either_side() -> None:
    # exp(-200) is 0 in float32 while its logarithm is finite: 0 * inf would be NaN
    near, out = torch.tensor([[0.0, -200.0]]), torch.tensor([[0.0, -INF]])
    for of, policy, target in ((reverse_kl, near, out), (forward_kl, out, near), (jsd(0.5), near, out)):
        value_N, gradient_NV = ours(of, policy, target)
        assert value_N.tolist() == [0.0]
        assert gradient_NV.tolist() == [[0.0, 0.0]]


@every
def test_half_precision_logits_are_widened_before_anything_is_computed(case: str) -> None:
    of, naive = CASES[case]
    policy_NV, target_NV = (x.bfloat16() for x in logits(16, 4, 20))
    value_N, gradient_NV = ours(of, policy_NV, target_NV)
    assert value_N.dtype == torch.float32
    assert gradient_NV.dtype == torch.bfloat16  # as autograd has it: the type of the leaf
    want_N, want_NV = reference(naive, policy_NV, target_NV)
    torch.testing.assert_close(value_N.double(), want_N, **SINGLE)
    torch.testing.assert_close(gradient_NV.double(), want_NV, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("of", [reverse_kl, forward_kl, jsd(0.5)])
def test_any_leading_shape_will_do(of: Divergence) -> None:
    policy_NV, target_NV = logits(17, 6, 9)
    flat_N = divergence(policy_NV, target_NV, of)
    assert torch.equal(divergence(policy_NV.view(2, 3, 9), target_NV.view(2, 3, 9), of).flatten(), flat_N)
    torch.testing.assert_close(divergence(policy_NV[0], target_NV[0], of), flat_N[0], rtol=1e-13, atol=0.0)


def test_no_tokens_give_no_values_and_a_gradient_of_that_shape() -> None:
    policy_NV = torch.zeros(0, 5, requires_grad=True)
    divergence(policy_NV, torch.zeros(0, 5), top_k(reverse_kl, 2)).sum().backward()
    assert policy_NV.grad is not None
    assert policy_NV.grad.shape == (0, 5)


def test_the_reverse_kl_of_logits_is_this_one() -> None:
    policy_NV, target_NV = logits(18, 6, 9)
    assert torch.equal(reverse_kl_of_logits(policy_NV, target_NV), divergence(policy_NV, target_NV, reverse_kl))
