"""The chunked divergence against logits of all tokens at once, plain probabilities and autograd, in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mopdctl.errors import InputError
from mopdctl.objective import fused
from mopdctl.objective.chunked import Chunked, chunked_divergence
from mopdctl.objective.chunks import default_chunk
from mopdctl.objective.correction import correction_weight, staleness_ratio
from mopdctl.objective.divergence import Divergence
from mopdctl.objective.extrapolation import extrapolated_target
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.head import Head, head_logits
from mopdctl.objective.jsd import jsd
from mopdctl.objective.reverse_kl import reverse_kl
from mopdctl.objective.top_k import top_k
from mopdctl.objective.trust_region import trust_region_target

EXACT = {"rtol": 1e-8, "atol": 1e-10}
SINGLE = {"rtol": 1e-4, "atol": 5e-5}  # float32: rounding of logits up to 30, times hidden states and weights of 5
VOCAB = 23


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    head: Head
    target_hidden: Tensor
    target_head: Head
    tokens: Tensor
    weight: Tensor

    def receivers(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.head.weight_VH, self.head.bias_V) if x is not None]

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same numbers in another dtype, as new leaves."""

        def leaf(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().to(dtype).requires_grad_(x.requires_grad)

        def head(h: Head) -> Head:
            return replace(h, weight_VH=leaf(h.weight_VH), bias_V=leaf(h.bias_V))

        return replace(
            self,
            hidden=leaf(self.hidden),
            head=head(self.head),
            target_hidden=leaf(self.target_hidden),
            target_head=head(self.target_head),
        )

    def run(self, **settings: Any) -> Chunked:
        settings = {"weights": lambda _, rows: self.weight[rows], "vocab_size": VOCAB} | settings
        return chunked_divergence(self.hidden, self.head, self.target_hidden, self.target_head, self.tokens, **settings)


def problem(
    num_tokens: int = 9,
    *,
    seed: int = 0,
    bias: bool = True,
    scale: float = 1.0,
    softcap: float | None = None,
    padding: int = 0,
    spread: float = 1.0,
) -> Problem:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    hidden = (spread * normal(num_tokens, 5)).requires_grad_()
    weight = normal(VOCAB + padding, 5).requires_grad_()
    head = Head(weight, normal(VOCAB + padding).requires_grad_() if bias else None, scale, softcap)
    target_head = Head(normal(VOCAB, 7), normal(VOCAB) if bias else None, 1.5 * scale, softcap)
    tokens = torch.randint(VOCAB, (num_tokens,), generator=draw)
    weights = torch.rand(num_tokens, dtype=torch.float64, generator=draw) + 0.1
    return Problem(hidden, head, spread * normal(num_tokens, 7), target_head, tokens, weights)


def naive_logits(hidden: Tensor, head: Head) -> Tensor:
    logits = hidden @ head.weight_VH[:VOCAB].T
    if head.bias_V is not None:
        logits = logits + head.bias_V[:VOCAB]
    logits = head.scale * logits
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def naive_values(given: Problem) -> Tensor:
    p = torch.softmax(naive_logits(given.hidden, given.head), -1)
    q = torch.softmax(naive_logits(given.target_hidden, given.target_head), -1)
    return (p * (p / q).log()).sum(-1)


def gradients(loss: Tensor, given: Problem) -> list[Tensor]:
    return list(torch.autograd.grad(loss, given.receivers()))


def by_definition(policy_logprobs: Tensor, target_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Reverse KL under another name, so that the general path is taken."""
    return reverse_kl(policy_logprobs, target_logprobs)


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 12),
    chunk=st.sampled_from([None, 1, 2, 5, 100]),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    padding=st.sampled_from([0, 4]),
    of=st.sampled_from([reverse_kl, by_definition]),
    seed=st.integers(0, 1000),
)
def test_value_and_all_gradients_are_those_of_all_logits_at_once(
    num_tokens: int,
    chunk: int | None,
    bias: bool,
    scale: float,
    softcap: float | None,
    padding: int,
    of: Divergence,
    seed: int,
) -> None:
    # TRL #5731: a fused path that differed from its reference in value and weighting.
    given = problem(num_tokens, seed=seed, bias=bias, scale=scale, softcap=softcap, padding=padding)
    found = given.run(chunk_tokens=chunk, of=of)
    values = naive_values(given)
    loss = (given.weight * values).sum()
    torch.testing.assert_close(found.value_N, values.detach(), **EXACT)
    torch.testing.assert_close(found.loss, loss, **EXACT)
    # The incoming scalar counts too.
    for mine, naive in zip(gradients(3 * found.loss, given), gradients(3 * loss, given), strict=True):
        torch.testing.assert_close(mine, naive, **EXACT)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("of", [reverse_kl, by_definition])
def test_float32_is_within_rounding_of_float64(seed: int, of: Divergence) -> None:
    exact = problem(seed=seed, spread=2.0)
    single = exact.to(torch.float32)
    found, loss = single.run(chunk_tokens=4, of=of), (exact.weight * naive_values(exact)).sum()
    assert found.loss.dtype == found.value_N.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), loss, **SINGLE)
    for mine, naive in zip(gradients(found.loss, single), gradients(loss, exact), strict=True):
        torch.testing.assert_close(mine.double(), naive, **SINGLE)


@pytest.mark.parametrize("of", [reverse_kl, by_definition])
def test_bfloat16_operands_are_multiplied_without_rounding_the_logits(of: Divergence) -> None:
    narrow = problem(spread=3.0).to(torch.bfloat16)
    exact = narrow.to(torch.float64)
    found, loss = narrow.run(chunk_tokens=4, of=of), (exact.weight * naive_values(exact)).sum()
    # To float32's rounding of numbers that are bfloat16's: only the gradients, at the very end, are rounded.
    torch.testing.assert_close(found.loss.double(), loss.detach(), **SINGLE)
    for mine, naive in zip(gradients(found.loss, narrow), gradients(loss, exact), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), naive, rtol=2**-8, atol=1e-5)


def test_a_teacher_in_bfloat16_beside_a_policy_in_float32() -> None:
    given = problem().to(torch.float32)
    narrow = given.to(torch.bfloat16)
    mixed = replace(given, target_hidden=narrow.target_hidden, target_head=narrow.target_head)
    exact = mixed.to(torch.float64)
    torch.testing.assert_close(mixed.run().value_N.double(), naive_values(exact).detach(), **SINGLE)


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_the_streams_of_the_sampled_tokens(chunk: int | None) -> None:
    given = problem(softcap=5.0)
    found = given.run(chunk_tokens=chunk)
    at = given.tokens.unsqueeze(-1)
    policy = torch.log_softmax(naive_logits(given.hidden, given.head), -1)
    teacher = torch.log_softmax(naive_logits(given.target_hidden, given.target_head), -1)
    torch.testing.assert_close(found.policy_logprobs_N, policy.gather(1, at).squeeze(1).detach(), **EXACT)
    torch.testing.assert_close(found.target_logprobs_N, teacher.gather(1, at).squeeze(1), **EXACT)
    torch.testing.assert_close(found.entropy_N, -(policy.exp() * policy).sum(-1).detach(), **EXACT)
    streams = (found.value_N, found.policy_logprobs_N, found.target_logprobs_N, found.entropy_N)
    assert found.loss.requires_grad
    assert not any(stream.requires_grad for stream in streams)


@pytest.mark.parametrize("of", [forward_kl, jsd(0.3), top_k(reverse_kl, 5), by_definition])
def test_every_divergence_goes_through_the_heads(of: Divergence) -> None:
    given = problem(softcap=4.0, scale=0.5)
    found = given.run(of=of, chunk_tokens=4)
    policy = naive_logits(given.hidden, given.head)
    constant = torch.log_softmax(policy.detach(), -1)
    values, gradient = of(constant, torch.log_softmax(naive_logits(given.target_hidden, given.target_head), -1))
    torch.testing.assert_close(found.value_N, values, **EXACT)
    expected = torch.autograd.grad(policy, given.receivers(), given.weight.unsqueeze(-1) * gradient)
    for mine, naive in zip(gradients(found.loss, given), expected, strict=True):
        torch.testing.assert_close(mine, naive, **EXACT)


def test_a_target_gets_the_teacher_the_policy_and_the_reference() -> None:
    given, other = problem(), problem(seed=1)
    found = given.run(
        target=extrapolated_target(1.7), reference=(other.target_hidden, other.target_head), chunk_tokens=4
    )
    teacher, reference = (
        torch.log_softmax(naive_logits(side.target_hidden, side.target_head), -1) for side in (given, other)
    )
    q = torch.softmax(teacher + 0.7 * (teacher - reference), -1)
    p = torch.softmax(naive_logits(given.hidden, given.head), -1)
    values = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(found.value_N, values.detach(), **EXACT)
    expected = gradients((given.weight * values).sum(), given)
    for mine, naive in zip(gradients(found.loss, given), expected, strict=True):
        torch.testing.assert_close(mine, naive, **EXACT)
    # The teacher's own log-probability is reported, not the target's.
    own = teacher.gather(1, given.tokens.unsqueeze(-1)).squeeze(1)
    torch.testing.assert_close(found.target_logprobs_N, own, **EXACT)


def test_a_target_that_needs_the_policy_gets_it_as_a_constant() -> None:
    given = problem()
    found = given.run(target=trust_region_target(0.4), chunk_tokens=2)
    p = torch.softmax(naive_logits(given.hidden, given.head), -1)
    q = 0.4 * torch.softmax(naive_logits(given.target_hidden, given.target_head), -1) + 0.6 * p.detach()
    values = (p * (p / q).log()).sum(-1)
    expected = gradients((given.weight * values).sum(), given)
    for mine, naive in zip(gradients(found.loss, given), expected, strict=True):
        torch.testing.assert_close(mine, naive, **EXACT)


def test_equal_models_give_exactly_zero() -> None:
    given = problem(scale=1.0).to(torch.float32)
    same = replace(given, target_hidden=given.hidden.detach(), target_head=given.head)
    found = same.run(chunk_tokens=4)
    assert not found.value_N.any()
    assert not any(gradient.any() for gradient in gradients(found.loss, same))


# -------------------------------------------------------------------------------------------------------------- weights


def test_weights_are_asked_for_once_a_chunk_with_its_policy_logprobs() -> None:
    given = problem(7)
    seen: list[tuple[int, int]] = []
    logprobs: list[Tensor] = []

    def weights(policy_logprobs: Tensor, rows: slice) -> Tensor:
        assert not policy_logprobs.requires_grad
        seen.append((rows.start, rows.stop))
        logprobs.append(policy_logprobs.clone())
        return given.weight[rows]

    found = given.run(weights=weights, chunk_tokens=3)
    assert seen == [(0, 3), (3, 6), (6, 7)]
    assert torch.equal(torch.cat(logprobs), found.policy_logprobs_N)


def test_icepop_drops_what_left_the_band() -> None:
    given = problem(12, spread=2.0)
    behavior = given.run().policy_logprobs_N + torch.linspace(-2.5, 2.5, 12, dtype=torch.float64)

    def weights(policy_logprobs: Tensor, rows: slice) -> Tensor:
        return correction_weight(staleness_ratio(policy_logprobs, behavior[rows]), "icepop", 0.5, 5.0)[0] / 12

    found = given.run(weights=weights, chunk_tokens=5)
    ratio = torch.linspace(2.5, -2.5, 12, dtype=torch.float64).exp()
    kept = (ratio >= 0.5) & (ratio <= 5)
    assert 0 < int(kept.sum()) < 12
    expected = gradients((torch.where(kept, ratio, 0) * naive_values(given) / 12).sum(), given)
    for mine, naive in zip(gradients(found.loss, given), expected, strict=True):
        torch.testing.assert_close(mine, naive, rtol=1e-5, atol=1e-7)  # the ratio is float32


@pytest.mark.parametrize("of", [reverse_kl, by_definition, forward_kl])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize("side", ["hidden", "target_hidden"])
def test_a_token_of_weight_zero_contributes_nothing_whatever_it_holds(of: Divergence, poison: float, side: str) -> None:
    # TRL #5594, ms-swift #9767: 0 * NaN and masked cells of 1e9 in the loss.
    clean = problem()
    weight = clean.weight.clone()
    weight[[2, 3]] = 0.0
    clean = replace(clean, weight=weight)
    states = getattr(clean, side).detach().clone()
    states[[2, 3]] = poison
    dirty = replace(clean, **{side: states.requires_grad_(side == "hidden")})
    found, expected = dirty.run(of=of, chunk_tokens=4), clean.run(of=of, chunk_tokens=4)
    torch.testing.assert_close(found.loss, expected.loss, **EXACT)
    mine, others = gradients(found.loss, dirty), gradients(expected.loss, clean)
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    assert not mine[0][[2, 3]].any()


@pytest.mark.parametrize("of", [reverse_kl, by_definition])
def test_all_tokens_masked_give_zero_and_not_nan(of: Divergence) -> None:
    # ms-swift #4465, #8378
    given = replace(problem(), weight=torch.zeros(9, dtype=torch.float64))
    given = replace(given, target_hidden=torch.full_like(given.target_hidden, math.nan))
    found = given.run(of=of)
    assert float(found.loss.detach()) == 0
    assert not any(gradient.any() for gradient in gradients(found.loss, given))


@pytest.mark.parametrize("of", [reverse_kl, by_definition])
def test_a_target_that_is_no_number_shows_in_its_own_value_and_in_no_other(of: Divergence) -> None:
    given = problem()
    states = given.target_hidden.clone()
    states[4] = math.nan
    found = replace(given, target_hidden=states).run(of=of, chunk_tokens=6)
    finite = torch.isfinite(found.value_N)
    assert (~finite).nonzero().flatten().tolist() == [4]
    torch.testing.assert_close(found.value_N[finite], naive_values(given).detach()[finite], **EXACT)
    assert not torch.isfinite(found.loss)


@pytest.mark.parametrize("of", [reverse_kl, by_definition])
def test_a_token_that_the_teacher_rules_out_costs_infinitely_much(of: Divergence) -> None:
    given = problem()
    bias = given.target_head.bias_V.clone()
    bias[5] = -math.inf
    ruled_out = replace(given, target_head=replace(given.target_head, bias_V=bias))
    assert torch.isposinf(ruled_out.run(of=of).value_N).all()


def test_a_token_that_both_rule_out_counts_for_nothing() -> None:
    given = problem()
    cut = [head.bias_V.detach().clone() for head in (given.head, given.target_head)]
    for bias in cut:
        bias[5] = -math.inf
    policy = replace(given.head, bias_V=cut[0].requires_grad_())
    teacher = replace(given.target_head, bias_V=cut[1])
    found = replace(given, head=policy, target_head=teacher).run(chunk_tokens=4)
    others = [v for v in range(VOCAB) if v != 5]
    small = replace(
        given,
        head=replace(given.head, weight_VH=given.head.weight_VH[others], bias_V=given.head.bias_V[others]),
        target_head=replace(
            given.target_head,
            weight_VH=given.target_head.weight_VH[others],
            bias_V=given.target_head.bias_V[others],
        ),
    )
    torch.testing.assert_close(found.value_N, naive_values(small).detach(), **EXACT)
    torch.testing.assert_close(found.loss, (given.weight * naive_values(small)).sum(), **EXACT)


# ------------------------------------------------------------------------------------------------------- who gets what


def test_rows_past_the_vocabulary_get_no_gradient_and_no_probability() -> None:
    given = problem(padding=4)
    loud = given.head.weight_VH.detach().clone()
    loud[VOCAB:] = 1e6
    given = replace(given, head=replace(given.head, weight_VH=loud.requires_grad_()))
    found = given.run(chunk_tokens=4)
    torch.testing.assert_close(found.value_N, naive_values(given).detach(), **EXACT)
    _, weight, bias = gradients(found.loss, given)
    assert weight.shape == (VOCAB + 4, 5)
    assert weight[:VOCAB].any()
    assert not weight[VOCAB:].any()
    assert not bias[VOCAB:].any()


def test_a_frozen_head_costs_no_product_and_leaves_the_hidden_gradient_as_it_is() -> None:
    given = problem()
    (expected,) = torch.autograd.grad(given.run().loss, given.hidden)
    frozen = Head(given.head.weight_VH.detach(), given.head.bias_V.detach())
    adapter = replace(given, head=frozen)
    with Largest() as seen:
        found = adapter.run()
    (mine,) = torch.autograd.grad(found.loss, adapter.hidden)
    assert torch.equal(mine, expected)
    assert seen.products == 3  # two of logits, one back to the hidden states


def test_hidden_states_without_gradient_leave_the_head_its_own() -> None:
    given = problem()
    expected = torch.autograd.grad(given.run().loss, [given.head.weight_VH, given.head.bias_V])
    constant = replace(given, hidden=given.hidden.detach())
    found = torch.autograd.grad(constant.run().loss, [given.head.weight_VH, given.head.bias_V])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nothing_is_formed_where_no_gradient_is_wanted() -> None:
    given = problem()
    with torch.no_grad(), Largest() as seen:
        found = given.run()
    assert seen.products == 2
    assert not found.loss.requires_grad


def test_the_teacher_and_the_reference_are_constants() -> None:
    # TRL #6526: the teacher's projection tracked gradients. Miles #1966: gradient leaks into teacher values.
    given, other = problem(), problem(seed=1)
    states = [x.clone().requires_grad_() for x in (given.target_hidden, other.target_hidden)]
    heads = [replace(h, weight_VH=h.weight_VH.clone().requires_grad_()) for h in (given.target_head, other.target_head)]
    tracked = replace(given, target_hidden=states[0], target_head=heads[0])
    found = tracked.run(target=extrapolated_target(1.5), reference=(states[1], heads[1]))
    found.loss.backward()
    assert all(x.grad is None for x in [*states, *(head.weight_VH for head in heads)])
    reached = {edge.variable.data_ptr() for edge, _ in found.loss.grad_fn.next_functions if hasattr(edge, "variable")}
    assert reached == {x.data_ptr() for x in given.receivers()}


def test_another_teacher_gives_another_gradient() -> None:
    # AReaL's joint objective: a distillation term whose gradient does not contain the teacher.
    given = problem()
    swapped = replace(given, target_hidden=given.target_hidden.flip(0))
    (one,), (other,) = (torch.autograd.grad(each.run().loss, each.hidden) for each in (given, swapped))
    assert (one - other).abs().max() > 1e-2


def test_no_tokens_give_loss_zero_and_zero_gradients() -> None:
    given = problem(0, padding=2)
    found = given.run()
    assert float(found.loss.detach()) == 0
    assert found.value_N.shape == found.policy_logprobs_N.shape == (0,)
    hidden, weight, bias = gradients(found.loss, given)
    assert hidden.shape == (0, 5)
    assert not weight.any()
    assert not bias.any()


def test_the_gradient_is_handed_out_once() -> None:
    given = problem()
    loss = given.run().loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        loss.backward()


def test_the_gradient_of_a_parameter_is_not_copied() -> None:
    given = problem(64)
    loss = given.run().loss
    with Largest() as seen:
        loss.backward()
    assert seen.elements <= 1


def test_a_hidden_state_used_twice_adds_up() -> None:
    given = problem()
    (once,) = torch.autograd.grad(given.run().loss, given.hidden)
    (twice,) = torch.autograd.grad(given.run().loss + given.run().loss, given.hidden)
    torch.testing.assert_close(twice, 2 * once)


# --------------------------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has, and how many matrix products there were."""

    elements = 0
    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
            self.elements = max(self.elements, made.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return made


@pytest.mark.parametrize("of", [reverse_kl, by_definition])
@pytest.mark.parametrize("num_tokens", [64, 512])
def test_no_tensor_grows_with_tokens_times_vocabulary(of: Divergence, num_tokens: int) -> None:
    # NeMo-RL and TRL keep tiles of 4096 tokens; here the largest tensor is a chunk of logits whatever N is.
    given = problem(num_tokens)
    with Largest() as seen:
        given.run(of=of, chunk_tokens=16)
    bound = max(16 * VOCAB, num_tokens * 5)
    assert 16 * VOCAB <= seen.elements <= bound


@pytest.mark.parametrize(("vocab_size", "rows"), [(32_768, 128), (151_936, 64), (10**9, 64)])
def test_a_block_of_rows_fits_a_cache_unless_that_were_too_few(vocab_size: int, rows: int) -> None:
    assert fused.row_block(vocab_size, torch.device("cpu")) == rows


def test_rows_are_worked_on_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(12)
    expected = given.run(chunk_tokens=8)
    monkeypatch.setattr(fused, "_BLOCK_ELEMENTS", 3 * VOCAB)
    monkeypatch.setattr(fused, "_BLOCK_ROWS", 2)
    blocked = given.run(chunk_tokens=8)
    torch.testing.assert_close(blocked.value_N, expected.value_N, **EXACT)
    for mine, whole in zip(gradients(blocked.loss, given), gradients(expected.loss, given), strict=True):
        torch.testing.assert_close(mine, whole, **EXACT)


@pytest.mark.parametrize(
    ("vocab_size", "device", "rows"),
    [(32_768, "cpu", 256), (151_936, "cpu", 256), (1_000_000, "cpu", 40), (10**9, "cpu", 1), (151_936, "cuda", 512)],
)
def test_the_default_chunk_bounds_the_logits_of_a_chunk(vocab_size: int, device: str, rows: int) -> None:
    assert default_chunk(vocab_size, torch.device(device)) == rows


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: replace(g, hidden=g.hidden[:, :4]), "policy head: hidden states of shape"),
        (lambda g: replace(g, hidden=g.hidden[:-1]), "policy: 8 hidden states for 9 sampled tokens"),
        (lambda g: replace(g, target_hidden=g.target_hidden[:-1]), "target: 8 hidden states for 9"),
        (lambda g: replace(g, target_head=Head(g.target_head.weight_VH[:20])), "target head: 20 rows for a vocabulary"),
        (lambda g: replace(g, tokens=g.tokens + VOCAB), "in a vocabulary of 23"),
        (lambda g: replace(g, tokens=g.tokens - VOCAB), "in a vocabulary of 23"),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[[Problem], Problem], message: str) -> None:
    with pytest.raises(InputError, match=message):
        change(problem()).run()


def test_settings_that_mean_nothing_are_refused() -> None:
    given = problem()
    with pytest.raises(InputError, match="chunk_tokens 0"):
        given.run(chunk_tokens=0)
    with pytest.raises(InputError, match="a reference without a target"):
        given.run(reference=(given.target_hidden, given.target_head))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Head(torch.zeros(3)), "weight has shape"),
        (lambda: Head(torch.zeros(3, 2), torch.zeros(2)), "one per row"),
        (lambda: Head(torch.zeros(3, 2), softcap=0.0), "softcap 0"),
    ],
)
def test_a_head_that_is_none_is_refused(make: Callable[[], Head], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head_logits_are_product_bias_scale_and_softcap(softcap: float | None) -> None:
    given = problem(padding=3, scale=0.5, softcap=softcap)
    found = head_logits(given.hidden, given.head, vocab_size=VOCAB)
    torch.testing.assert_close(found, naive_logits(given.hidden, given.head), **EXACT)
