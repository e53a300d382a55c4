"""A quantized matrix: packed codes, block scales and, for NVFP4, the divisor; and what they decode to."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import e2m1
from mopdctl.fp4.blocks import check_blocks, row_chunks

Format = Literal["nvfp4", "mxfp4"]

BLOCK: dict[Format, int] = {"nvfp4": 16, "mxfp4": 32}
"""Columns that share a scale."""

SMALLEST_E4M3 = 2.0**-9  # code 1, subnormal
LARGEST_E4M3 = 448.0  # code 126


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix of R rows and K columns in four bits.

        NVFP4   value = code * (scale / divisor)      B = 16, scale E4M3
        MXFP4   value = code * 2^(scale - 127)        B = 32, scale E8M0

    Computed in float32, as compressed-tensors does.
    """

    format: Format
    packed: Tensor
    """uint8 [R, K/2], even column in the low half of a byte."""
    scales: Tensor
    """uint8 [R, K/B], the raw bytes of the block scales."""
    divisor: float | None
    """Of the scales of NVFP4: `weight_global_scale` of compressed-tensors; 1/divisor is ModelOpt's `weight_scale_2`."""


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values, [R, K]: code times step in float32, then rounded once to `dtype`."""
    packed, block = quantized.packed, BLOCK[quantized.format]
    steps = block_steps(quantized.format, quantized.scales, quantized.divisor).unsqueeze(-1)
    values = torch.empty(len(packed), 2 * packed.shape[1], dtype=dtype, device=packed.device)
    for rows in row_chunks(values):
        blocks = e2m1.decode_packed(packed[rows]).view(*steps[rows].shape[:2], block).mul_(steps[rows])
        values[rows] = blocks.flatten(1)
    return values


def quantize_with(format: Format, weight_RK: Tensor, scales: Tensor, divisor: float | None) -> Quantized:
    """Codes a matrix with block scales that are given, as they are stored.

        code = E2M1(weight / step)

    So it tells of any quantized matrix whether its codes are those of its scales.

    Args:
        format: of the scales.
        weight_RK: any float dtype and device; computed in float32. NaN is not looked for.
        scales: uint8 [R, K/B], raw bytes.
        divisor: of the scales, for NVFP4.

    Raises:
        InputError: for a width that does not fall into blocks, scales of another shape, or a divisor out of place.
    """
    check_blocks(weight_RK, BLOCK[format])
    packed = torch.empty(len(weight_RK), weight_RK.shape[1] // 2, dtype=torch.uint8, device=weight_RK.device)
    steps = _steps_of(weight_RK, format, scales, divisor)
    for rows in row_chunks(weight_RK):
        scaled = _blocks(weight_RK[rows], format) / steps[rows]
        packed[rows] = e2m1.pack(e2m1.encode(scaled).flatten(1))
    return Quantized(format, packed, scales, divisor)


def round_with(format: Format, weight_RK: Tensor, scales: Tensor, divisor: float | None) -> Tensor:
    """The values that `quantize_with` stands for, in the dtype of the weight, without the codes between."""
    check_blocks(weight_RK, BLOCK[format])
    values_RK = torch.empty(weight_RK.shape, dtype=weight_RK.dtype, device=weight_RK.device)
    steps = _steps_of(weight_RK, format, scales, divisor)
    for rows in row_chunks(weight_RK):
        scaled = _blocks(weight_RK[rows], format) / steps[rows]
        values_RK[rows] = e2m1.round_to_values_(scaled).mul_(steps[rows]).flatten(1)
    return values_RK


def _steps_of(weight_RK: Tensor, format: Format, scales: Tensor, divisor: float | None) -> Tensor:
    if scales.shape != (len(weight_RK), weight_RK.shape[1] // BLOCK[format]):
        raise InputError(
            f"scales {list(scales.shape)} beside weight {list(weight_RK.shape)}: {format} has one for each "
            f"{BLOCK[format]} columns of a row"
        )
    return block_steps(format, scales, divisor).unsqueeze(-1)


def _blocks(rows: Tensor, format: Format) -> Tensor:
    return rows.float().reshape(len(rows), -1, BLOCK[format])


def block_steps(format: Format, scales: Tensor, divisor: float | None) -> Tensor:
    """What a code of value 1 stands for in each block: scale / divisor, or 2^(scale - 127). Float32, same shape.

    Raises:
        InputError: if NVFP4 comes without a divisor that is positive and finite, or MXFP4 with one.
    """
    if format == "nvfp4":
        values = decode_e4m3(scales)
        # By a tensor: when it divides by a number, CUDA multiplies with the reciprocal, which rounds otherwise.
        return values.div_(values.new_tensor(check_divisor(divisor)))
    if divisor is not None:
        raise InputError(f"divisor {divisor}: MXFP4 has none; leave it out")
    return decode_e8m0(scales)


def check_divisor(divisor: float | None) -> float:
    """Passes on a divisor that is positive and finite as a float32.

    Raises:
        InputError: for anything else.
    """
    if divisor is None or not 0 < float(torch.tensor(divisor, dtype=torch.float32)) < float("inf"):
        raise InputError(f"divisor {divisor}: NVFP4 takes a positive, finite float32; nvfp4.divisor gives one")
    return divisor


def decode_e4m3(scales: Tensor) -> Tensor:
    """The float32 values of raw E4M3FN bytes, same shape; 0x7F and 0xFF are NaN, there is no infinity."""
    return _e4m3(scales.device).index_select(0, scales.flatten().int()).view(scales.shape)


def encode_e4m3(values: Tensor) -> Tensor:
    """The raw E4M3FN bytes nearest to the values, ties to even, clamped to +-448; same shape.

    Clamped first: what a cast makes of larger ones, NaN or 448, depends on the version of torch.
    """
    return values.float().clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e8m0(scales: Tensor) -> Tensor:
    """The float32 powers of two of raw E8M0 bytes, 2^(byte - 127), same shape; 255 is NaN."""
    bits = scales.int().bitwise_left_shift_(23)
    bits.masked_fill_(scales == 0, 0x00400000)  # 2^-127 is subnormal
    return bits.masked_fill_(scales == 255, 0x7FC00000).view(torch.float32)


@cache
def _e4m3(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
