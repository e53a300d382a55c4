"""Kullback-Leibler divergences from the teacher, in nats: two estimates from the sampled token, and the exact value."""

from typing import Any

import torch
from torch import Tensor


def kl_k1(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """The unbiased one-sample estimate of KL(p_theta || p_teacher); single tokens may be negative.

        k1_t = log p_theta(y_t) - log p_teacher(y_t),   y_t ~ p_theta

    A metric, never a loss: its own gradient does not contain the teacher. Source: Schulman, "Approximating KL
    divergence" (2020).
    """
    return policy_logprobs - teacher_logprobs


def kl_k3(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """The unbiased, non-negative, lower-variance one-sample estimate of KL(p_theta || p_teacher).

        k3_t = exp(d_t) - 1 - d_t,   d_t = log p_teacher(y_t) - log p_theta(y_t),   y_t ~ p_theta

    Source: Schulman, "Approximating KL divergence" (2020).
    """
    difference = teacher_logprobs - policy_logprobs
    return torch.expm1(difference) - difference


def reverse_kl(policy_logits_V: Tensor, teacher_logits_V: Tensor) -> Tensor:
    """The exact reverse KL over the whole vocabulary, the last dimension.

        KL_t = sum_v p_theta(v | s_t) [ log p_theta(v | s_t) - log p_teacher(v | s_t) ]

    The gradient flows through the policy alone. A teacher probability of zero where the policy has mass gives +inf, as
    it should; a policy probability of zero contributes zero. Computed in float32 or wider.

    Source: DeepSeek-V4 report, section 5.1.2, Eq. 29; Nemotron 3 Ultra report, Eq. 1, at each student prefix.
    """
    teacher_V = _at_least_float32(teacher_logits_V.detach())
    kl: Tensor = _ReverseKL.apply(_at_least_float32(policy_logits_V), teacher_V)  # type: ignore[no-untyped-call]
    return kl


class _ReverseKL(torch.autograd.Function):
    """The reverse KL with its gradient in closed form: dKL / dz_v = p_v (log p_v - log q_v - KL).

    It is exactly zero where policy and teacher are equal; the gradient that autograd composes leaves rounding there,
    which Adam would divide by its own size.
    """

    @staticmethod
    def forward(ctx: Any, policy_logits_V: Tensor, teacher_logits_V: Tensor) -> Tensor:
        policy_V = torch.log_softmax(policy_logits_V, dim=-1)
        probability_V = policy_V.exp()
        # Also where log p is finite but p underflows: 0 * inf would be NaN.
        difference_V = policy_V - torch.log_softmax(teacher_logits_V, dim=-1)
        difference_V = torch.where(probability_V == 0, torch.zeros_like(policy_V), difference_V)
        kl = (probability_V * difference_V).sum(dim=-1)
        ctx.save_for_backward(probability_V, difference_V, kl)
        return kl

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probability_V, difference_V, kl = ctx.saved_tensors
        return gradient.unsqueeze(-1) * probability_V * (difference_V - kl.unsqueeze(-1)), None


def entropy(logits_V: Tensor) -> Tensor:
    """The entropy of the distribution over the last dimension, in nats."""
    logprobs_V = torch.log_softmax(_at_least_float32(logits_V), dim=-1)
    return -(logprobs_V.exp() * torch.where(torch.isneginf(logprobs_V), torch.zeros_like(logprobs_V), logprobs_V)).sum(
        -1
    )


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
