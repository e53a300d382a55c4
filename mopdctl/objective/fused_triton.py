"""Reverse KL on a GPU from the bare products of both heads.

One pass reads both for all figures, one more writes the gradient in the precision in which the next products take it.
Bias, scale and softcap are applied to each logit as it is read, so that logits never lie in memory in another form than
the product left them.
"""

# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopdctl.objective.head import Head

_BLOCK = 4096
"""Logits that a program reads at a time."""
_WARPS = 8


@dataclass(frozen=True, slots=True)
class Raw:
    """The products hidden @ weight^T of one model in float32 and what makes logits of them."""

    product_CV: Tensor
    bias_V: Tensor | None
    head: Head


@dataclass(frozen=True, slots=True)
class Measured:
    """Float32, one value per row."""

    value_C: Tensor
    policy_logprobs_C: Tensor
    target_logprobs_C: Tensor
    entropy_C: Tensor
    lse_C: Tensor
    """Log-sum-exp of the policy's logits s."""
    centre_C: Tensor
    """sum_v p_v (s_v - t_v), what the gradient takes away from each s_v - t_v."""


def measure(policy: Raw, target: Raw, tokens_C: Tensor) -> Measured:
    """The figures of reverse KL, by online log-sum-exp: both products are read once.

        KL = sum p (s - t) - lse(s) + lse(t),   entropy = lse(s) - sum p s

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), Alg. 3.
    """
    count, vocab_size = policy.product_CV.shape
    figures = torch.empty(6, count, dtype=torch.float32, device=policy.product_CV.device)
    _measure_kernel[(count,)](
        *_arguments(policy),
        *_arguments(target),
        tokens_C,
        figures,
        figures.stride(0),
        vocab_size,
        **_constants(policy, target),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return Measured(*figures.unbind())


def differentiate(policy: Raw, target: Raw, measured: Measured, kept_C: Tensor, out_CV: Tensor) -> None:
    """Writes d KL / d product to `out_CV`, in its dtype, without the policy's scale.

        g = p (s - t - sum p (s - t)) (1 - (s / softcap)^2)

    A row that is not kept is 0 whatever it holds.
    """
    count, vocab_size = policy.product_CV.shape
    _differentiate_kernel[(count, triton.cdiv(vocab_size, _BLOCK))](
        *_arguments(policy),
        *_arguments(target),
        measured.lse_C,
        measured.centre_C,
        kept_C,
        out_CV,
        out_CV.stride(0),
        vocab_size,
        **_constants(policy, target),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def _arguments(raw: Raw) -> tuple[Tensor, int, Tensor, float, float]:
    # A pointer has to point somewhere also where nothing is read through it.
    bias_V = raw.product_CV if raw.bias_V is None else raw.bias_V
    return raw.product_CV, raw.product_CV.stride(0), bias_V, raw.head.scale, raw.head.softcap or 1.0


def _constants(policy: Raw, target: Raw) -> dict[str, bool]:
    return {
        "S_BIAS": policy.bias_V is not None,
        "S_SOFTCAP": policy.head.softcap is not None,
        "T_BIAS": target.bias_V is not None,
        "T_SOFTCAP": target.head.softcap is not None,
    }


@triton.jit
def _logits(products, bias_ptr, columns, inside, scale, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    z = products
    if BIAS:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    z *= scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both ends: exp gives 0 or infinity there.
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))
    return z


@triton.jit
def _measure_kernel(
    s_ptr,
    s_stride,
    s_bias_ptr,
    s_scale,
    s_softcap,
    t_ptr,
    t_stride,
    t_bias_ptr,
    t_scale,
    t_softcap,
    tokens_ptr,
    figures_ptr,
    figures_stride,
    vocab_size,
    S_BIAS: tl.constexpr,
    S_SOFTCAP: tl.constexpr,
    T_BIAS: tl.constexpr,
    T_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. The largest logit so far is one number, the sums are kept lane by lane until the end."""
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * s_stride
    t_ptr += row * t_stride
    lanes = tl.arange(0, BLOCK)
    s_max = -float("inf")
    t_max = -float("inf")
    s_sum = tl.zeros([BLOCK], tl.float32)
    t_sum = tl.zeros([BLOCK], tl.float32)
    gap_sum = tl.zeros([BLOCK], tl.float32)
    logit_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + lanes
        inside = columns < vocab_size
        s = tl.load(s_ptr + columns, mask=inside, other=0.0)
        t = tl.load(t_ptr + columns, mask=inside, other=0.0)
        s = _logits(s, s_bias_ptr, columns, inside, s_scale, s_softcap, S_BIAS, S_SOFTCAP)
        t = _logits(t, t_bias_ptr, columns, inside, t_scale, t_softcap, T_BIAS, T_SOFTCAP)
        s = tl.where(inside, s, -float("inf"))
        t = tl.where(inside, t, -float("inf"))
        s_top = tl.maximum(s_max, tl.max(s, 0))
        t_top = tl.maximum(t_max, tl.max(t, 0))
        # Where all so far is -inf, -inf - -inf would be NaN.
        s_base = tl.where(s_top == -float("inf"), 0.0, s_top)
        t_base = tl.where(t_top == -float("inf"), 0.0, t_top)
        s_shrink = tl.exp(s_max - s_base)
        s_exp = tl.exp(s - s_base)
        t_exp = tl.exp(t - t_base)
        s_sum = s_sum * s_shrink + s_exp
        t_sum = t_sum * tl.exp(t_max - t_base) + t_exp
        # A policy probability of zero contributes zero: 0 * inf would be NaN.
        gap_sum = gap_sum * s_shrink + tl.where(s_exp == 0.0, 0.0, s_exp * (s - t))
        logit_sum = logit_sum * s_shrink + tl.where(s_exp == 0.0, 0.0, s_exp * s)
        s_max = s_top
        t_max = t_top
    total = tl.sum(s_sum, 0)
    s_lse = s_max + tl.log(total)
    t_lse = t_max + tl.log(tl.sum(t_sum, 0))
    centre = tl.sum(gap_sum, 0) / total
    token = tl.load(tokens_ptr + row)
    one = token < vocab_size
    s_token = _logits(tl.load(s_ptr + token), s_bias_ptr, token, one, s_scale, s_softcap, S_BIAS, S_SOFTCAP)
    t_token = _logits(tl.load(t_ptr + token), t_bias_ptr, token, one, t_scale, t_softcap, T_BIAS, T_SOFTCAP)
    figures_ptr += row
    tl.store(figures_ptr, centre - s_lse + t_lse)
    tl.store(figures_ptr + figures_stride, s_token - s_lse)
    tl.store(figures_ptr + 2 * figures_stride, t_token - t_lse)
    tl.store(figures_ptr + 3 * figures_stride, s_lse - tl.sum(logit_sum, 0) / total)
    tl.store(figures_ptr + 4 * figures_stride, s_lse)
    tl.store(figures_ptr + 5 * figures_stride, centre)


@triton.jit
def _differentiate_kernel(
    s_ptr,
    s_stride,
    s_bias_ptr,
    s_scale,
    s_softcap,
    t_ptr,
    t_stride,
    t_bias_ptr,
    t_scale,
    t_softcap,
    lse_ptr,
    centre_ptr,
    kept_ptr,
    out_ptr,
    out_stride,
    vocab_size,
    S_BIAS: tl.constexpr,
    S_SOFTCAP: tl.constexpr,
    T_BIAS: tl.constexpr,
    T_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    out_ptr += row * out_stride
    if tl.load(kept_ptr + row):
        s = tl.load(s_ptr + row * s_stride + columns, mask=inside, other=0.0)
        t = tl.load(t_ptr + row * t_stride + columns, mask=inside, other=0.0)
        s = _logits(s, s_bias_ptr, columns, inside, s_scale, s_softcap, S_BIAS, S_SOFTCAP)
        t = _logits(t, t_bias_ptr, columns, inside, t_scale, t_softcap, T_BIAS, T_SOFTCAP)
        p = tl.exp(s - tl.load(lse_ptr + row))
        gradient = tl.where(p == 0.0, 0.0, p * (s - t - tl.load(centre_ptr + row)))
        if S_SOFTCAP:
            gradient *= 1.0 - (s / s_softcap) * (s / s_softcap)
        tl.store(out_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + columns, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=inside)
