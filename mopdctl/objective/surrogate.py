"""The clipped policy-gradient surrogate."""

import torch
from torch import Tensor


def clipped_surrogate(
    policy_logprobs: Tensor, prox_logprobs: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The per-token PPO objective (to be maximised) and which tokens the clip holds.

        r_t = p_theta(y_t | s_t) / p_prox(y_t | s_t)
        J_t = min( r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t )

    Args:
        policy_logprobs: log-probabilities under the current policy; carries the gradient.
        prox_logprobs: same shape; treated as constant. With one optimizer step per batch it is the current policy
            itself, r_t is 1 and the clip does nothing: only the gradient A_t * grad log p_theta is left.
        advantage: same shape, constant.
        clip_low: eps below 1, in (0, 1].
        clip_high: eps above 1, greater than 0.

    Returns:
        (J, clipped): J in float32 with gradient; clipped is 1.0 where the clipped branch is the smaller one, and the
        token so has no gradient.

    Source: Nemotron 3 Ultra report, section 3.3.1, Eq. 3 without m_t c_t, which the caller multiplies.
    """
    ratio = torch.exp(policy_logprobs.float() - prox_logprobs.float().detach())
    advantage = advantage.detach()
    plain = ratio * advantage
    bounded = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantage
    return torch.minimum(plain, bounded), (bounded < plain).float().detach()
