"""MXFP4: E2M1 codes in blocks of 32 columns, a power of two as the scale of each."""

from typing import Literal

import torch
from torch import Tensor

from mopdctl.fp4.blocks import (
    block_magnitudes,
    check_blocks,
    check_finite,
    importance_of_columns,
    least_error,
    row_chunks,
)
from mopdctl.fp4.quantized import Quantized, block_steps, quantize_with

BLOCK = 32

Rule = Literal["even", "floor", "rceil", "ceil"]
Method = Literal["max", "sweep"]

_WINDOW = (0, -1, 1)
_LARGEST_CODE = 254  # 255 is NaN


def quantize(
    weight_RK: Tensor, *, rule: Rule = "even", method: Method = "max", importance_K: Tensor | None = None
) -> Quantized:
    """Chooses the exponent of every block and codes the matrix with it.

    See `choose_scales` for rules and methods. Arithmetic in float32 whatever the dtype; temporary memory is bounded.

    Args:
        weight_RK: any float dtype and device, K a multiple of 32.
        rule: how the exponent follows from the largest magnitude.
        method: whether its neighbours are tried.
        importance_K: weights of squared errors for `sweep`, the second moments of the layer's inputs.

    Raises:
        InputError: for NaN or infinite weights, or another width.
    """
    scales = choose_scales(weight_RK, rule=rule, method=method, importance_K=importance_K)
    return quantize_with("mxfp4", weight_RK, scales, None)


def choose_scales(
    weight_RK: Tensor, *, rule: Rule = "even", method: Method = "max", importance_K: Tensor | None = None
) -> Tensor:
    """The scales of the blocks, uint8 [R, K/32]: exponent plus 127; 0, the smallest, for a block of zeros.

        max |w| = m 2^k, 1 <= m < 2
        floor:   k - 2                    clips up to 8 to 6
        even:    one more for m >= 1.75   clips up to 7 to 6; activations in vLLM and compressed-tensors
        rceil:   one more for m > 1.5     never clips; ModelOpt
        ceil:    one more for m > 1       never clips, wastes range

    The method `max` takes the exponent e of the rule, `sweep` what rounds the block with the least squared error of
    e - 1, e, e + 1. From 1.75 * 2^127 on a weight may become 2^128, which float32 does not hold.

    Arguments and errors as of `quantize`. Source: OCP Microscaling Formats specification 1.0, section 6.3 (floor).
    """
    check_blocks(weight_RK, BLOCK)
    scales = torch.empty(len(weight_RK), weight_RK.shape[1] // BLOCK, dtype=torch.uint8, device=weight_RK.device)
    window = torch.tensor(_WINDOW, dtype=torch.int16, device=weight_RK.device).view(-1, 1, 1)
    importance = None if importance_K is None else importance_of_columns(importance_K, weight_RK.shape[1], BLOCK)
    for rows in row_chunks(weight_RK):
        magnitudes = block_magnitudes(weight_RK[rows], BLOCK)
        amax = check_finite(magnitudes.amax(0))
        of_rule = _scale(amax, rule)
        if method == "max":
            scales[rows] = of_rule
            continue
        candidates = (of_rule + window).clamp_(0, _LARGEST_CODE).to(torch.uint8)
        best = least_error(magnitudes, amax, block_steps("mxfp4", candidates, None), importance)
        scales[rows] = candidates.gather(0, best.unsqueeze(0)).squeeze(0)
    return scales


def _scale(amax: Tensor, rule: Rule) -> Tensor:
    half, exponent = torch.frexp(amax)  # half = m / 2, exponent = k + 1
    if rule == "even":
        exponent = exponent + (half >= 0.875)
    elif rule != "floor":
        exponent = exponent + (half > (0.75 if rule == "rceil" else 0.5))
    return (exponent + 124).clamp_(0, _LARGEST_CODE).masked_fill_(amax == 0, 0).to(torch.uint8)
