"""The outcome of an answer beside the teacher's word on each of its tokens."""

from torch import Tensor

from mopdctl.errors import InputError


def outcome_mixed_advantage(advantage: Tensor, outcome_advantage: Tensor, *, alpha: float) -> Tensor:
    """The distillation advantage of each token, plus that of the answer's outcome.

        A_t = sg[ log p_teacher(y_t) - log p_prox(y_t) ] + alpha * A_ORM

    Args:
        advantage: the first term, of `distillation_advantage` or one of its variants; any shape.
        outcome_advantage: A_ORM at each token, same shape: the group-relative advantage of the whole answer (see
            `group.group_advantages`, more than one answer a prompt), the same at all of its tokens.
        alpha: weight >= 0 of the outcome. At 0 exactly the first term.

    Returns:
        Same shape and type as `advantage`, without gradient.

    Raises:
        InputError: for a negative alpha.

    Source: MiMo-V2-Flash, Eq. 9; the paper gives no alpha.
    """
    if not alpha >= 0:
        raise InputError(f"outcome alpha {alpha}: must be 0 or above; a negative one would reward wrong answers")
    if alpha == 0:
        return advantage.detach().clone()
    return (advantage + alpha * outcome_advantage.to(advantage.dtype)).detach()
