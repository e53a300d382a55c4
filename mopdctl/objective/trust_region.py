"""The trust-region teacher: a mixture of teacher and policy, so that one token can pull down only so far."""

from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.divergence import Target, at_least_float32
from mopdctl.objective.mixture import log_mixture, log_mixture_over_policy


def trust_region_advantage(
    teacher_logprobs: Tensor, prox_logprobs: Tensor, *, alpha: float, clip: float | None = None
) -> Tensor:
    """The distillation advantage against the mixture of teacher and proximal policy, for sampled tokens.

        A_t = log( alpha e^{g_t} + 1 - alpha ),   g_t = sg[ log p_teacher(y_t) - log p_prox(y_t) ]

    Never below log(1 - alpha), however little the teacher likes the token; never above g_t where that is positive, and
    of the sign of g_t. Exactly g_t at alpha = 1, exactly 0 at alpha = 0.

    Args:
        teacher_logprobs: log-probabilities in nats at temperature 1, any shape.
        prox_logprobs: same shape; the learner when the batch is taken.
        alpha: share of the teacher in [0, 1].
        clip: bound C > 0 on |A_t|, after the mixture; None leaves it as it is.

    Returns:
        Float32 or wider, same shape, without gradient. Metrics of the raw gap come from the log-probabilities, not
        from here.

    Raises:
        InputError: for an alpha outside [0, 1].

    Source: NeMo RL, trust-region on-policy distillation (TROPD); its example is alpha = 0.2.
    """
    _check(alpha)
    gap = (at_least_float32(teacher_logprobs) - at_least_float32(prox_logprobs)).detach()
    advantage = log_mixture_over_policy(gap, alpha)
    return advantage if clip is None else advantage.clamp(-clip, clip)


def trust_region_target(alpha: float) -> Target:
    """The same mixture as a target over the whole vocabulary, for every divergence.

        log q' = log( alpha q + (1 - alpha) sg[p] )

    The policy in it is a constant. Exactly the teacher at alpha = 1; exactly the policy at alpha = 0, which leaves
    value and gradient 0. The reference is not used.

    Raises:
        InputError: for an alpha outside [0, 1].

    Source: as `trust_region_advantage`, which is log q' - log p at the sampled token.
    """
    _check(alpha)

    def target(teacher_logprobs_NV: Tensor, policy_logprobs_NV: Tensor, reference_NV: Tensor | None) -> Tensor:
        return log_mixture(policy_logprobs_NV, teacher_logprobs_NV, alpha)

    return target


def _check(alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise InputError(f"trust region alpha {alpha}: the teacher's share must lie in [0, 1]; 1 is the plain teacher")
