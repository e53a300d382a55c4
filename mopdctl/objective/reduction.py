"""Loss reduction: the weight of each token of an optimizer step, fixed before any micro-batch is cut."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token", "sequence"]


def token_coefficients(
    loss_tokens: Sequence[int],
    weights: Sequence[float],
    reduction: Reduction,
    *,
    total_tokens: int,
    total_sequences: int,
) -> list[float]:
    """One coefficient per sequence, shared by its loss tokens; the loss is the sum of coefficient times token loss.

        token:     lambda_i / N             N = loss tokens of the optimizer step
        sequence:  lambda_i / (n_i B)       n_i = loss tokens of the sequence, B = sequences of the step

    Because N and B are those of the whole optimizer step (all micro-batches, all ranks), splitting, padding and packing
    change nothing. Tokens that a correction masks stay in N and n_i. A sequence without loss tokens has coefficient 0
    and still counts in B.

    Args:
        loss_tokens: n_i per sequence.
        weights: lambda_i per sequence (the weight of its teacher).
        reduction: `token` lets long answers dominate; `sequence` gives each answer the same say.
        total_tokens: N over the optimizer step.
        total_sequences: B over the optimizer step.

    Source: `token` as released in NeMo RL (global valid tokens); `sequence` as MiMo-V2-Flash Eq. 7 (1/|y|).
    """
    if reduction == "token":
        return [weight / max(total_tokens, 1) for weight in weights]
    return [weight / (n * total_sequences) if n else 0.0 for weight, n in zip(weights, loss_tokens, strict=True)]


def first_non_finite(values_BT: Tensor, mask_BT: Tensor) -> tuple[int, int] | None:
    """Row and column of the first NaN or infinity at a position whose mask is not zero; None if there is none.

    Masked positions may hold anything: they never reach the loss.
    """
    bad = (~torch.isfinite(values_BT)) & mask_BT.bool()
    if not bad.any():
        return None
    row, column = (int(i) for i in bad.nonzero()[0])
    return row, column
