"""More forward KL where the teacher itself hesitates."""

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.divergence import Divergence
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.kl import entropy
from mopdctl.objective.top_k import top_k


def entropy_aware(base: Divergence, weight: float = 1.0, threshold_nats: float = 0.8, k: int = 16) -> Divergence:
    """A base divergence, plus a forward KL on the teacher's likeliest tokens where the teacher's entropy is high.

        D = base(p, q) + weight * 1[ H(q) > threshold ] * FKL_k(p, q),   H(q) = -sum_v q_v log q_v

    The reverse KL alone lets a student settle on one of several continuations that the teacher holds open; the forward
    KL makes it keep them. FKL_k counts the tokens outside the top k as one more outcome (see `top_k`), so that it is a
    divergence too and zero only where the student agrees. The gate hangs on the target alone and has no gradient.

    Args:
        base: usually `reverse_kl`.
        weight: of the forward KL, above 0.
        threshold_nats: entropy of the target above which the term counts; an entropy equal to it does not. At or above
            log V it never counts, and the base is left bit for bit.
        k: how many of the target's likeliest tokens.

    Raises:
        InputError: for a weight that is not above 0.

    Source: Jin et al., "Entropy-aware on-policy distillation of language models" (2603.07079); threshold 0.8, k 16.
    """
    if not weight > 0:
        raise InputError(f"entropy_aware weight {weight}: must be above 0; leave the term out by taking the base alone")
    forward = top_k(forward_kl, k, support="teacher", tail="bucket")

    def value_and_gradient(policy_logprobs_NV: Tensor, target_logprobs_NV: Tensor) -> tuple[Tensor, Tensor]:
        value_N, gradient_NV = base(policy_logprobs_NV, target_logprobs_NV)
        open_N = entropy(target_logprobs_NV) > threshold_nats
        extra_N, extra_NV = forward(policy_logprobs_NV, target_logprobs_NV)
        # where, not a product: a term that does not count may be infinite.
        return (
            torch.where(open_N, value_N + weight * extra_N, value_N),
            torch.where(open_N.unsqueeze(-1), gradient_NV + weight * extra_NV, gradient_NV),
        )

    return value_and_gradient
