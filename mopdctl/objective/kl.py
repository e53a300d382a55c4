"""Kullback-Leibler divergences from the teacher, in nats: two estimates from the sampled token, and the exact value."""

import torch
from torch import Tensor

from mopdctl.objective.divergence import at_least_float32, divergence
from mopdctl.objective.reverse_kl import reverse_kl as reverse_kl_of_logprobs


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
    """The exact reverse KL of two rows of logits: `divergence.divergence` of `reverse_kl.reverse_kl`, which see.

    The gradient flows through the policy alone. Computed in float32 or wider.
    """
    return divergence(policy_logits_V, teacher_logits_V, of=reverse_kl_of_logprobs)


def entropy(logits_V: Tensor) -> Tensor:
    """The entropy of the distribution over the last dimension, in nats."""
    logprobs_V = torch.log_softmax(at_least_float32(logits_V), dim=-1)
    return -(logprobs_V.exp() * torch.where(torch.isneginf(logprobs_V), torch.zeros_like(logprobs_V), logprobs_V)).sum(
        -1
    )
