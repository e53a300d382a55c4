"""The reverse KL: what the policy writes must be likely for the target (mode seeking)."""

from torch import Tensor


def reverse_kl(policy_logprobs_NV: Tensor, target_logprobs_NV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(policy || target) over the whole vocabulary, and its gradient with respect to the policy's logits.

        KL  = sum_v p_v (log p_v - log q_v)
        g_v = p_v (log p_v - log q_v - KL)

    A target probability of zero where the policy has mass gives +inf, as it should; a policy probability of zero, also
    one that underflows, contributes zero.

    Args:
        policy_logprobs_NV: log p, normalised, constant, float32 or float64.
        target_logprobs_NV: log q, the same.

    Returns:
        (value_N in nats, gradient_NV).

    Source: DeepSeek-V4 report, section 5.1.2, Eq. 29; Nemotron 3 Ultra report, Eq. 1, at each student prefix.
    """
    probability_NV = policy_logprobs_NV.exp()
    difference_NV = policy_logprobs_NV - target_logprobs_NV
    # Also where log p is finite but p underflows: 0 * inf would be NaN.
    difference_NV.masked_fill_(probability_NV == 0, 0.0)
    value_N = (probability_NV * difference_NV).sum(dim=-1)
    return value_N, difference_NV.sub_(value_N.unsqueeze(-1)).mul_(probability_NV)
