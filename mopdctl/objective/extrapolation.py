"""ExOPD: beyond the teacher, along the way that it has come from a reference model."""

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.divergence import Target, at_least_float32


def extrapolated_advantage(
    teacher_logprobs: Tensor,
    prox_logprobs: Tensor,
    reference_logprobs: Tensor | None,
    *,
    extrapolation: float,
    clip: float | None = None,
) -> Tensor:
    """The distillation advantage of generalized OPD, for sampled tokens.

        A_t = sg[ lambda (log p_teacher - log p_ref) - (log p_prox - log p_ref) ],   lambda = extrapolation
            = sg[ log p_teacher - log p_prox + (lambda - 1)(log p_teacher - log p_ref) ]

    Args:
        teacher_logprobs: log-probabilities in nats at temperature 1, any shape.
        prox_logprobs: same shape; the learner when the batch is taken.
        reference_logprobs: same shape; the model that the teacher was trained from. Needed unless lambda is 1.
        extrapolation: lambda > 0. At 1 exactly the plain advantage; below, between reference and teacher; above, beyond
            the teacher.
        clip: bound C > 0 on |A_t|; None leaves it as it is.

    Returns:
        Float32 or wider, same shape, without gradient.

    Raises:
        InputError: for a lambda that is not above 0, or one other than 1 without a reference.

    Source: G-OPD / ExOPD (2602.12125), which uses 1.25 and sees 1.5 collapse.
    """
    _check(extrapolation)
    teacher = at_least_float32(teacher_logprobs.detach())
    advantage = teacher - at_least_float32(prox_logprobs.detach())
    if extrapolation != 1.0:
        reference = at_least_float32(_given(reference_logprobs, extrapolation).detach())
        advantage = advantage + (extrapolation - 1.0) * (teacher - reference)
    return advantage if clip is None else advantage.clamp(-clip, clip)


def extrapolated_target(extrapolation: float) -> Target:
    """The distribution at which that advantage vanishes, over the whole vocabulary, for every divergence.

        log q' = log q + (lambda - 1)(log q - log ref) - log Z,   lambda = extrapolation

    Exactly the teacher at lambda = 1, where no reference is needed. What the teacher excludes stays excluded; what only
    the reference excludes is unbounded beyond the teacher (lambda > 1) and gives NaN, which the caller refuses. The
    policy is not used.

    Raises:
        InputError: for a lambda that is not above 0, and, when it is called, for a missing reference.

    Source: as `extrapolated_advantage`; the optimum of G-OPD's objective.
    """
    _check(extrapolation)

    def target(teacher_logprobs_NV: Tensor, policy_logprobs_NV: Tensor, reference_NV: Tensor | None) -> Tensor:
        teacher_NV = teacher_logprobs_NV.detach()
        if extrapolation == 1.0:
            return teacher_NV
        reference_NV = _given(reference_NV, extrapolation).detach()
        beyond_NV = teacher_NV + (extrapolation - 1.0) * (teacher_NV - reference_NV)
        return torch.log_softmax(torch.where(torch.isneginf(teacher_NV), teacher_NV, beyond_NV), dim=-1)

    return target


def _check(extrapolation: float) -> None:
    if not 0.0 < extrapolation < float("inf"):
        raise InputError(f"extrapolation {extrapolation}: must be above 0; 1 is the plain teacher, 1.25 goes beyond it")


def _given(reference: Tensor | None, extrapolation: float) -> Tensor:
    if reference is None:
        raise InputError(f"extrapolation {extrapolation} needs a reference: name the model that the teacher came from")
    return reference
