"""The forward KL: what is likely for the target must be likely for the policy (mass covering)."""

from torch import Tensor


def forward_kl(policy_logprobs_NV: Tensor, target_logprobs_NV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target || policy) over the whole vocabulary, and its gradient with respect to the policy's logits.

        KL  = sum_v q_v (log q_v - log p_v)
        g_v = p_v - q_v

    A policy probability of zero where the target has mass gives +inf, as it should; a target probability of zero
    contributes zero to the value.

    Args:
        policy_logprobs_NV: log p, normalised, constant, float32 or float64.
        target_logprobs_NV: log q, the same.

    Returns:
        (value_N in nats, gradient_NV).

    Source: Hinton et al., "Distilling the knowledge in a neural network" (2015), here at each prefix that the student
    wrote, as in Agarwal et al., "On-policy distillation of language models" (2306.13649).
    """
    probability_NV = target_logprobs_NV.exp()
    difference_NV = target_logprobs_NV - policy_logprobs_NV
    # Also where log q is finite but q underflows: 0 * inf would be NaN.
    difference_NV.masked_fill_(probability_NV == 0, 0.0)
    value_N = difference_NV.mul_(probability_NV).sum(dim=-1)
    return value_N, policy_logprobs_NV.exp().sub_(probability_NV)
