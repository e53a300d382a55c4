"""How far a policy lies inside a teacher's support, token by token: measures to look at, never a loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from mopdctl.errors import InputError


class SupportOverlap(NamedTuple):
    """Three shares in [0, 1] for each token, all [N]."""

    top_k_overlap_N: Tensor
    student_mass_N: Tensor
    teacher_mass_N: Tensor


def support_overlap(policy_logprobs_NV: Tensor, teacher_logprobs_NV: Tensor, k: int) -> SupportOverlap:
    """How much of each one's support the other shares. S_k, T_k: the k likeliest tokens of student and teacher.

        top_k_overlap = |S_k n T_k| / k
        student_mass  = sum_{v in T_k} p_student(v)        what the student writes is what the teacher would write
        teacher_mass  = sum_{v in S_k} p_teacher(v)        what the teacher would write the student can write

    Args:
        policy_logprobs_NV: natural logs of the student's probabilities, normalised over the vocabulary.
        teacher_logprobs_NV: the teacher's after the same prefixes, same shape.
        k: tokens that count as support.

    Raises:
        InputError: k is not from 1 to V.

    Source: Rethinking OPD, arXiv 2604.13016 (overlap ratio, k = 16; the overlap holds 97-99 % of the mass in its runs).
    """
    if not 1 <= k <= policy_logprobs_NV.shape[-1]:
        raise InputError(f"top_k {k}: the vocabulary has {policy_logprobs_NV.shape[-1]} tokens; take one of 1 to that")
    student_NK, teacher_NK = (x.topk(k, dim=-1).indices for x in (policy_logprobs_NV, teacher_logprobs_NV))
    shared_NK = (student_NK.unsqueeze(-1) == teacher_NK.unsqueeze(-2)).any(-1)
    return SupportOverlap(
        shared_NK.to(policy_logprobs_NV.dtype).mean(-1),
        _mass(policy_logprobs_NV, teacher_NK),
        _mass(teacher_logprobs_NV, student_NK),
    )


def _mass(logprobs_NV: Tensor, chosen_NK: Tensor) -> Tensor:
    return torch.clamp(logprobs_NV.gather(-1, chosen_NK).exp().sum(-1), max=1.0)  # a sum of shares may round to above 1
