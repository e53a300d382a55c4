"""The mixture of two distributions, in logarithms."""

import math

import torch
from torch import Tensor


def log_mixture_over_policy(gap: Tensor, teacher_share: float) -> Tensor:
    """How far a mixture lies above the policy, from the gap g = log q - log p alone.

        log( (w q + (1-w) p) / p ) = log( w e^g + 1 - w ),   w = teacher_share in [0, 1]

    Exactly 0 at g = 0 or w = 0, exactly g at w = 1; never below log(1-w); does not overflow. Same shape and dtype.
    """
    if teacher_share in (0.0, 1.0):
        return gap if teacher_share else torch.zeros_like(gap)
    return _log_mixture(gap, teacher_share, 1.0 - teacher_share)


def log_mixture(policy_logprobs: Tensor, teacher_logprobs: Tensor, teacher_share: float) -> Tensor:
    """The logarithm of a mixture of policy and teacher.

        log M = log( w q + (1-w) p ),   w = teacher_share in [0, 1]

    Equal to both where they are equal bit for bit, to the teacher at w = 1 and to the policy at w = 0; -inf where both
    are. Any shape, without gradient.
    """
    policy_logprobs, teacher_logprobs = policy_logprobs.detach(), teacher_logprobs.detach()
    if teacher_share in (0.0, 1.0):
        return teacher_logprobs if teacher_share else policy_logprobs
    policy_share = 1.0 - teacher_share
    gap = teacher_logprobs - policy_logprobs
    gap.masked_fill_(teacher_logprobs == policy_logprobs, 0.0)  # -inf on both sides would be NaN
    # Seen from the larger of the two, so that nothing infinite is added to its opposite.
    above_policy = policy_logprobs + _log_mixture(gap.clamp(max=0.0), teacher_share, policy_share)
    above_teacher = teacher_logprobs + _log_mixture((-gap).clamp(max=0.0), policy_share, teacher_share)
    return torch.where(gap > 0, above_teacher, above_policy)


def _log_mixture(gap: Tensor, share: float, rest: float) -> Tensor:
    """log( share e^gap + rest ), share + rest = 1; both are given, for 1 - share loses the digits of a small rest."""
    # log1p keeps small values whole; near -1 it would cancel, and far above exp would overflow.
    excess = share * torch.expm1(torch.clamp(gap, max=50.0))
    far = torch.logaddexp(gap + math.log(share), torch.full_like(gap, math.log(rest)))
    return torch.where((excess > -0.5) & (gap < 50.0), torch.log1p(excess), far)
