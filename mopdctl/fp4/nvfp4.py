"""NVFP4: E2M1 codes in blocks of 16 columns, an E4M3 scale each, and one float32 divisor for the matrix."""

from math import inf
from typing import Literal

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4.blocks import (
    block_magnitudes,
    check_blocks,
    check_finite,
    importance_of_columns,
    least_error,
    row_chunks,
)
from mopdctl.fp4.e2m1 import LARGEST
from mopdctl.fp4.quantized import (
    LARGEST_E4M3,
    SMALLEST_E4M3,
    Quantized,
    block_steps,
    check_divisor,
    encode_e4m3,
    quantize_with,
)

BLOCK = 16

Method = Literal["max", "46", "sweep"]

WINDOW = (0, *range(-4, 0), *range(1, 8))
"""Scales that `sweep` tries, as distances in E4M3 from that of `max`, which wins among equals.

8 above is twice that scale. Twice a scale that clips nothing leaves a block a part of the values that it had.
"""

WEIGHTED_WINDOW = (0, *range(-8, 0), *range(1, 8))
"""With importance, for it may pay to clip what is large and does not count."""

_LARGEST_CODE = 126
_LARGEST_DIVISOR = 2.0**126  # its reciprocal, which engines multiply by, is the smallest normal float32


def divisor(amax: float, method: Method) -> float:
    """The divisor g that puts the scale of the largest block at the top of E4M3.

        max, sweep:   g = 448 * 6 / amax
        46:           g = 256 * 6 / amax, so that 1.5 times that scale is one too

    Args:
        amax: largest magnitude of the matrix, or of all those that an engine fuses into one (q/k/v, gate/up): they
            share one divisor.
        method: by which the scales of the blocks will be chosen.

    Returns:
        A float32, at most 2^126; 1.0 for a matrix of zeros.

    Raises:
        InputError: if `amax` is negative, infinite or NaN.

    Source: NVIDIA, "Pretraining large language models with NVFP4" (2509.25149), two-level scaling; 256 from "Four Over
    Six" (2512.02010).
    """
    if not 0 <= float(torch.tensor(amax, dtype=torch.float32)) < inf:
        raise InputError(f"largest magnitude {amax}: the weight holds NaN or infinite values; no scale fits them")
    if amax == 0:
        return 1.0
    top = 256.0 if method == "46" else LARGEST_E4M3
    quotient = torch.tensor(top * LARGEST, dtype=torch.float32) / torch.tensor(amax, dtype=torch.float32)
    return min(_LARGEST_DIVISOR, float(quotient))


def quantize(
    weight_RK: Tensor, divisor: float, *, method: Method = "sweep", importance_K: Tensor | None = None
) -> Quantized:
    """Chooses the scale of every block and codes the matrix with it, as it is stored.

    See `choose_scales` for the methods. Arithmetic in float32 whatever the dtype; temporary memory is bounded.

    Args:
        weight_RK: any float dtype and device, K a multiple of 16.
        divisor: from `divisor`, of the method.
        method: how scales are chosen.
        importance_K: weights of squared errors for `46` and `sweep`, the second moments of the layer's inputs.

    Raises:
        InputError: for NaN or infinite weights, or another width.
    """
    scales = choose_scales(weight_RK, divisor, method=method, importance_K=importance_K)
    return quantize_with("nvfp4", weight_RK, scales, divisor)


def choose_scales(
    weight_RK: Tensor, divisor: float, *, method: Method = "sweep", importance_K: Tensor | None = None
) -> Tensor:
    """The scales of the blocks, uint8 [R, K/16]; 2^-9, the smallest, for a block of zeros.

        s(v) = E4M3( clamp(g max|w| / v, 2^-9, 448) )

        max:     s(6)
        46:      s(6) or s(4)
        sweep:   s(6), one of the 4 scales below it (8 with importance), or of the 7 above

    The last two take what rounds the block with the least squared error.

    Arguments and errors as of `quantize`. Source: "Four Over Six" (2512.02010); the sweep is ModelOpt's over all 126
    scales, confined to those that can win (cf. ScaleSweep, 2606.07618).
    """
    check_blocks(weight_RK, BLOCK)
    check_divisor(divisor)
    scales = torch.empty(len(weight_RK), weight_RK.shape[1] // BLOCK, dtype=torch.uint8, device=weight_RK.device)
    importance = None if importance_K is None else importance_of_columns(importance_K, weight_RK.shape[1], BLOCK)
    window = torch.tensor(WINDOW if importance is None else WEIGHTED_WINDOW, dtype=torch.int16, device=weight_RK.device)
    for rows in row_chunks(weight_RK):
        magnitudes = block_magnitudes(weight_RK[rows], BLOCK)
        amax = check_finite(magnitudes.amax(0))
        largest = _scale(amax, LARGEST, divisor)
        if method == "max":
            scales[rows] = largest
            continue
        if method == "46":
            candidates = torch.stack([largest, _scale(amax, 4.0, divisor)])
        else:
            candidates = (largest + window.view(-1, 1, 1)).clamp_(1, _LARGEST_CODE).to(torch.uint8)
        best = least_error(magnitudes, amax, block_steps("nvfp4", candidates, divisor), importance)
        scales[rows] = candidates.gather(0, best.unsqueeze(0)).squeeze(0)
    return scales


def _scale(amax: Tensor, value: float, divisor: float) -> Tensor:
    """The scale under which the largest magnitude of a block becomes `value`."""
    return encode_e4m3((amax / amax.new_tensor(value)).mul_(divisor).clamp_(SMALLEST_E4M3, LARGEST_E4M3))
