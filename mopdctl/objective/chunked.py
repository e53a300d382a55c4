"""Divergences over the whole vocabulary from hidden states and heads, in memory that does not grow with the tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.chunks import Figures, Job, Side, Weights, default_chunk, torch_chunks, triton_chunks
from mopdctl.objective.divergence import Divergence, Target
from mopdctl.objective.fused import rows_of
from mopdctl.objective.head import Head, check_head
from mopdctl.objective.products import accumulate, pull_back, wide_dtype
from mopdctl.objective.reverse_kl import reverse_kl


@dataclass(frozen=True, slots=True)
class Chunked:
    """What `chunked_divergence` gives. All but the loss is constant."""

    loss: Tensor
    """Scalar: the sum over tokens of weight times value."""
    value_N: Tensor
    """The divergence of each token in nats, also of those with weight 0."""
    policy_logprobs_N: Tensor
    """Of the sampled tokens."""
    target_logprobs_N: Tensor
    """The teacher's own, of the sampled tokens."""
    entropy_N: Tensor
    """The policy's, in nats."""


def chunked_divergence(
    hidden_NH: Tensor,
    head: Head,
    target_hidden_NG: Tensor,
    target_head: Head,
    tokens_N: Tensor,
    *,
    weights: Weights,
    of: Divergence = reverse_kl,
    target: Target | None = None,
    reference: tuple[Tensor, Head] | None = None,
    vocab_size: int,
    chunk_tokens: int | None = None,
) -> Chunked:
    """The weighted sum of a divergence between two models, without the logits of all tokens ever being there.

        loss = sum_n weight_n D( softmax(head(hidden_n)), target_n )

    The gradient is formed in the forward pass, chunk by chunk, from the closed form g_n = d D_n / d logits_n:

        d loss / d hidden_n = weight_n g_n W,    d loss / d W = sum_n weight_n g_n^T hidden_n

    so that extra memory is that of `chunk_tokens` x V logits of each model. The backward pass multiplies what was
    formed by the scalar that comes in; it runs once.

    Args:
        hidden_NH: last hidden states of the N loss-active tokens, as the head takes them. Receives a gradient if it
            requires one.
        head: the policy's. Its weight and bias receive a gradient if they require one (a frozen head costs none). Rows
            past `vocab_size` are no tokens: they get gradient 0 and no probability.
        target_hidden_NG: the teacher's, of the same tokens; constant.
        target_head: the teacher's; constant. Its width may differ.
        tokens_N: ids of the sampled tokens.
        weights: gives the constant weight of each token once the policy's log-probabilities are known, e.g. IcePop's
            m_t c_t times the loss coefficient. A token with weight exactly 0 adds nothing to loss and gradient,
            whatever its hidden states hold (NaN, 1e9).
        of: which divergence.
        target: makes the distribution to match out of the teacher's; None matches the teacher itself.
        reference: hidden states and head of the frozen model that `target` is given, if it takes one.
        vocab_size: tokens of the vocabulary, V.
        chunk_tokens: rows per chunk; None takes what `default_chunk` says.

    Returns:
        `Chunked`, in float32, or float64 if an operand is. Where the target is not finite the value is not either,
        nor is the loss unless the token's weight is 0: refuse such a sample before the backward pass.

    Raises:
        InputError: shapes, devices, vocabulary or sampled tokens do not fit each other.

    Source: DeepSeek-V4 report, section 5.1.2, for the whole vocabulary from cached hidden states of the teacher.
    """
    reference_side = [] if reference is None else [("reference", *reference)]
    sides = [("policy", hidden_NH, head), ("target", target_hidden_NG, target_head), *reference_side]
    _check(sides, tokens_N, vocab_size=vocab_size, chunk_tokens=chunk_tokens, has_target=target is not None)
    dtype = wide_dtype(*(tensor for _, hidden, side_head in sides for tensor in (hidden, side_head.weight_VH)))
    policy, teacher, *others = (Side.of(hidden, h, vocab_size) for _, hidden, h in sides)
    chunk = chunk_tokens or default_chunk(vocab_size, hidden_NH.device)
    job = Job(
        policy=policy,
        teacher=teacher,
        reference=others[0] if others else None,
        tokens_N=tokens_N,
        weights=weights,
        rows=rows_of(of, target),
        in_triton=hidden_NH.device.type == "cuda" and of is reverse_kl and target is None and dtype == torch.float32,
        chunk=min(chunk, max(len(tokens_N), 1)),
        dtype=dtype,
    )
    receivers = [hidden_NH, head.weight_VH, head.bias_V]
    if not torch.is_grad_enabled():  # or the gradient would be formed for nobody
        receivers = [None if x is None else x.detach() for x in receivers]
    return Chunked(*_FormedInForward.apply(*receivers, job))  # type: ignore[no-untyped-call]


class _FormedInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, job: Job) -> tuple[Tensor, ...]:
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with torch.autocast(hidden_NH.device.type, enabled=False):
            figures, gradients = _form(job, hidden=needs_hidden, weight=needs_weight, bias=needs_bias)
        shaped = zip(gradients, (hidden_NH, weight_VH, bias_V), strict=True)
        ctx.gradients = [None if g is None or x is None else _padded(g, x) for g, x in shaped]
        constant = (figures.value_N, figures.policy_logprobs_N, figures.target_logprobs_N, figures.entropy_N)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return figures.loss(), *constant

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # In place, and given away: a weight's gradient is too large to be there twice.
        if ctx.gradients is None:
            raise RuntimeError("chunked_divergence: the gradient was formed once and has been handed out already")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(gradient.to(g.dtype)) for g in gradients), None


def _form(
    job: Job, *, hidden: bool, weight: bool, bias: bool
) -> tuple[Figures, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """All figures, and the gradients that are asked for."""
    policy, num_tokens, width = job.policy, len(job.tokens_N), job.policy.weight_VH.shape[1]
    device, vocab_size = policy.hidden_NH.device, len(policy.weight_VH)
    figures = Figures(*(torch.empty(num_tokens, dtype=job.dtype, device=device) for _ in range(5)))
    made = torch.empty if num_tokens else torch.zeros  # the first chunk overwrites
    hidden_gradient = made(num_tokens, width, dtype=policy.hidden_NH.dtype, device=device) if hidden else None
    weight_gradient = made(vocab_size, width, dtype=job.dtype, device=device) if weight else None
    bias_gradient = made(vocab_size, dtype=job.dtype, device=device) if bias else None
    for chunk, gradient_CV in (triton_chunks if job.in_triton else torch_chunks)(job, figures):
        first = chunk.start == 0
        factor_C1 = (figures.weight_N[chunk] * policy.head.scale).unsqueeze(-1)
        if hidden_gradient is not None:
            hidden_gradient[chunk] = pull_back(gradient_CV, policy.weight_VH).mul_(factor_C1)
        if weight_gradient is not None:
            # A dropped row is 0 in the gradient already, but 0 * NaN would be NaN.
            hidden_CH = (policy.hidden_NH[chunk] * factor_C1).masked_fill_(factor_C1 == 0, 0.0)
            accumulate(weight_gradient, gradient_CV, hidden_CH.to(gradient_CV.dtype), first=first)
        if bias_gradient is not None:
            accumulate(bias_gradient.unsqueeze(-1), gradient_CV, factor_C1.to(gradient_CV.dtype), first=first)
    return figures, (hidden_gradient, weight_gradient, bias_gradient)


def _padded(gradient: Tensor, like: Tensor) -> Tensor:
    """In the dtype and with all rows of what it is the gradient of."""
    if len(gradient) == len(like):
        return gradient.to(like.dtype)
    padded = torch.zeros_like(like)
    padded[: len(gradient)] = gradient
    return padded


def _check(
    sides: list[tuple[str, Tensor, Head]],
    tokens_N: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int | None,
    has_target: bool,
) -> None:
    if chunk_tokens is not None and chunk_tokens < 1:
        raise InputError(f"chunk_tokens {chunk_tokens}: a chunk holds at least one token; give 1 or more, or None")
    if len(sides) == 3 and not has_target:
        raise InputError("a reference without a target that takes it; give `target`, or leave the reference out")
    for whose, hidden, head in sides:
        check_head(hidden, head, vocab_size=vocab_size, whose=whose)
        if len(hidden) != len(tokens_N):
            raise InputError(
                f"{whose}: {len(hidden)} hidden states for {len(tokens_N)} sampled tokens; give one for each"
            )
        if not hidden.device == head.weight_VH.device == tokens_N.device:
            raise InputError(
                f"{whose}: hidden states on {hidden.device}, head on {head.weight_VH.device}, sampled tokens on "
                f"{tokens_N.device}; bring them to one device"
            )
    if len(tokens_N) and not 0 <= int(tokens_N.min()) <= int(tokens_N.max()) < vocab_size:
        raise InputError(
            f"sampled tokens from {int(tokens_N.min())} to {int(tokens_N.max())} in a vocabulary of {vocab_size}; "
            "score with the tokenizer that they were sampled with"
        )
