"""The distillation advantage."""

import torch
from torch import Tensor


def distillation_advantage(teacher_logprobs: Tensor, prox_logprobs: Tensor, *, clip: float | None = None) -> Tensor:
    """How much more the teacher likes each sampled token than the proximal policy does.

        A_t = sg[ log p_teacher(y_t | s_t) - log p_prox(y_t | s_t) ]

    Args:
        teacher_logprobs: log-probabilities in nats at temperature 1, any shape.
        prox_logprobs: same shape; the learner when the batch is taken.
        clip: bound C > 0 that limits A_t to [-C, C]; None leaves it as it is.

    Returns:
        float32, same shape, without gradient. Non-finite input gives non-finite output: select loss-active tokens
        first and refuse non-finite scores there (see `first_non_finite`).

    Source: Nemotron 3 Ultra report, section 3.3.1, Eq. 2; the clip is that of Ma et al. (5) and the released Ultra
    recipe (20).
    """
    advantage = (teacher_logprobs.float() - prox_logprobs.float()).detach()
    return advantage if clip is None else torch.clamp(advantage, -clip, clip)
