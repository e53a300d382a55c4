"""The generalized Jensen-Shannon divergence: bounded, and between the two KLs by the teacher's share in the mixture."""

from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.divergence import Divergence
from mopdctl.objective.mixture import log_mixture
from mopdctl.objective.reverse_kl import reverse_kl


def jsd(teacher_share: float) -> Divergence:
    """The generalized JSD with the teacher's share named, for others call it `beta` in opposite directions.

        M   = w q + (1-w) p,   w = teacher_share
        J   = w KL(q || M) + (1-w) KL(p || M)
        g_v = (1-w) p_v (log p_v - log M_v - KL(p || M))

    p is the policy, q the target. M moves with the policy; its own derivatives cancel, which leaves (1-w) times the
    gradient of the reverse KL to a constant M. Never above the entropy of (w, 1-w), log 2 at w = 1/2.

    Limits: J / w -> KL(q || p), the forward KL, as w -> 0; J / (1-w) -> KL(p || q), the reverse KL, as w -> 1. J itself
    vanishes at both ends: a share near one of them wants a weight to match.

    Args:
        teacher_share: w, strictly between 0 and 1.

    Raises:
        InputError: for a share outside, where J is 0 for any two distributions.

    Source: Agarwal et al., "On-policy distillation of language models" (2306.13649), generalized JSD; the closed form
    is ours.
    """
    if not 0.0 < teacher_share < 1.0:
        raise InputError(
            f"jsd teacher_share {teacher_share}: must lie strictly between 0 and 1; use forward_kl or reverse_kl for "
            "the two ends"
        )

    def value_and_gradient(policy_logprobs_NV: Tensor, target_logprobs_NV: Tensor) -> tuple[Tensor, Tensor]:
        mixture_NV = log_mixture(policy_logprobs_NV, target_logprobs_NV, teacher_share)
        teacher_N, _ = reverse_kl(target_logprobs_NV, mixture_NV)  # KL(q || M)
        policy_N, gradient_NV = reverse_kl(policy_logprobs_NV, mixture_NV)
        value_N = teacher_share * teacher_N + (1.0 - teacher_share) * policy_N
        return value_N, gradient_NV.mul_(1.0 - teacher_share)

    return value_and_gradient
