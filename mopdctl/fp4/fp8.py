"""E4M3 as a format of weights of its own: one scale for the matrix, or one for 128 x 128 values."""

from math import inf

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4.blocks import check_blocks, check_finite, largest_magnitude, row_chunks
from mopdctl.fp4.quantized import LARGEST_E4M3

SIDE = 128
"""Rows and columns of a block."""

_SMALLEST_EXPONENT = -126  # of a normal float32


def quantize_fp8(weight_RK: Tensor, scale: float | None = None) -> tuple[Tensor, float]:
    """E4M3 with one scale for the matrix.

        scale = max |weight| / 448        value = code * scale

    Args:
        weight_RK: any float dtype and device; computed in float32.
        scale: another one, of several matrices that share it. What it does not reach saturates.

    Returns:
        float8_e4m3fn codes [R, K], and the scale, a float32 of at least 2^-126: 1.0 for a matrix of zeros.

    Raises:
        InputError: for NaN or infinite weights, or a scale that is not positive and finite.
    """
    check_blocks(weight_RK, 1)
    amax = largest_magnitude(weight_RK)
    if not amax < inf:
        raise InputError(f"largest magnitude {amax}: the weight holds NaN or infinite values; no scale fits them")
    if scale is None:
        quotient = torch.tensor(amax, dtype=torch.float32) / LARGEST_E4M3
        scale = max(2.0**_SMALLEST_EXPONENT, float(quotient)) if amax else 1.0
    elif not 0 < scale < inf:
        raise InputError(f"scale {scale}: must be positive and finite; leave it out to take that of the weight")
    return quantize_fp8_with(weight_RK, scale), scale


def quantize_fp8_with(weight_RK: Tensor, scale: float) -> Tensor:
    """The float8_e4m3fn codes [R, K] under a scale that is given, as it is stored; on every device the same.

    So it tells of any quantized matrix whether its codes are those of its scale. Neither is checked.
    """
    codes_RK = torch.empty(weight_RK.shape, dtype=torch.float8_e4m3fn, device=weight_RK.device)
    # By a tensor: when it divides by a number, CUDA multiplies with the reciprocal, which rounds otherwise.
    step = torch.tensor(scale, dtype=torch.float32, device=weight_RK.device)
    for rows in row_chunks(weight_RK):
        codes_RK[rows] = _nearest(weight_RK[rows].float() / step)
    return codes_RK


def quantize_fp8_blocks(weight_RK: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 with a power of two as the scale of each 128 x 128 values; those at the right and lower edge may be smaller.

        scale = 2^ceil(log2(max |weight| / 448))        value = code * scale

    Returns:
        float8_e4m3fn codes [R, K], and scales, float32 [ceil(R/128), ceil(K/128)] of at least 2^-126: 1.0 for a block
        of zeros.

    Raises:
        InputError: for NaN or infinite weights.

    Source: the 128 x 128 blocks of DeepSeek-V3 (2412.19437, section 3.3.2).
    """
    check_blocks(weight_RK, 1)
    rows, columns = weight_RK.shape
    codes_RK = torch.empty(weight_RK.shape, dtype=torch.float8_e4m3fn, device=weight_RK.device)
    scales = torch.empty(-(-rows // SIDE), -(-columns // SIDE), dtype=torch.float32, device=weight_RK.device)
    for i in range(len(scales)):
        band = slice(i * SIDE, min((i + 1) * SIDE, rows))
        values = weight_RK[band].float()
        amax = check_finite(torch.stack([values[:, k : k + SIDE].abs().max() for k in range(0, columns, SIDE)]))
        half, exponent = torch.frexp(amax)  # 448 is 0.875 * 2^9
        exponent = (exponent - 9 + (half > 0.875)).clamp_(min=_SMALLEST_EXPONENT)
        scales[i] = torch.ldexp(torch.ones_like(amax), exponent).masked_fill_(amax == 0, 1.0)
        codes_RK[band] = _nearest(values / scales[i].repeat_interleave(SIDE)[:columns])
    return codes_RK, scales


def dequantize_fp8(codes_RK: Tensor, scale: float | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values, [R, K]: code times scale in float32, rounded once to `dtype`. One scale, or one for 128 x 128."""
    if isinstance(scale, Tensor) and scale.dim() == 2:
        rows, columns = codes_RK.shape
        scale = scale.repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]
    return codes_RK.float().mul_(scale).to(dtype)


def _nearest(values: Tensor) -> Tensor:
    return values.clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
