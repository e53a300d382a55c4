"""Correction of the mismatch between the policy that sampled and the learner: staleness and engine differences."""

from typing import Literal

import torch
from torch import Tensor

Correction = Literal["icepop", "tis", "none"]


def staleness_ratio(prox_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """The ratio of the proximal to the behaviour policy.

        c_t = sg[ p_prox(y_t | s_t) / p_behav(y_t | s_t) ]

    Float32, same shape, without gradient. Source: Nemotron 3 Ultra report, section 3.3.1, Eq. 2.
    """
    return torch.exp(prox_logprobs.float() - behavior_logprobs.float()).detach()


def icepop_mask(c: Tensor, low: float, high: float) -> Tensor:
    """The IcePop mask, 1 inside the band and 0 outside; both ends belong to it.

        m_t = 1[ low <= c_t <= high ]

    Source: IcePop (Ring team, September 2025), default band [0.5, 5]. `m_t * c_t` is IcePop's M(c_t).
    """
    return ((c >= low) & (c <= high)).float()


def correction_weight(c: Tensor, kind: Correction, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The weight that multiplies a token's term, and the mask of tokens that are kept.

        icepop:  m_t c_t               tokens outside [low, high] get weight 0
        tis:     clamp(c_t, low, high) truncated importance sampling: nothing is dropped
        none:    1                     no correction

    A masked token keeps its place in the loss denominator. Same shape as `c`, float32, without gradient. `c_t` is in
    the weight already: never multiply by it again.

    Source: Nemotron 3 Ultra report, section 3.3.1, Eq. 3; `tis` as in the released Ultra recipe ([0.2, 5]).
    """
    if kind == "icepop":
        mask = icepop_mask(c, low, high)
        return torch.where(mask.bool(), c, torch.zeros_like(c)), mask
    if kind == "tis":
        return torch.clamp(c, low, high), torch.ones_like(c)
    return torch.ones_like(c), torch.ones_like(c)
