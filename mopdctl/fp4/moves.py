"""From one low-precision format to another without rounding, where the numbers fit; where they do not, counted.

E4M3 holds every power of two from 2^-9 to 2^8, and every E2M1 value times 2^-8 to 2^6. So a matrix of power-of-two
scales moves exactly as long as those scales lie close enough together: 17 exponents for the scales of NVFP4 over a
matrix, 14 for the values of FP8 within a block of 128 x 128. Zeros fit anywhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import e2m1
from mopdctl.fp4.blocks import row_chunks
from mopdctl.fp4.fp8 import SIDE, dequantize_fp8, quantize_fp8_blocks
from mopdctl.fp4.quantized import BLOCK, Quantized, decode_e8m0, dequantize, encode_e4m3

_BIAS = 127
_TOP, _BOTTOM = 8, -9  # exponents of the largest and the smallest power of two in E4M3
_LARGEST_SHIFT = 126  # of a divisor whose reciprocal is a normal float32, see nvfp4.divisor


@dataclass(frozen=True, slots=True)
class Losses:
    """What a move could not keep; `a + b` is that of two matrices."""

    blocks: int
    """Blocks of the new format that hold a value other than zero."""
    rounded_blocks: int
    """Those in which values had to be rounded to the nearest of the new format."""
    elements: int
    changed_elements: int
    """Those whose value is another than before: not all that were rounded are."""

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def top_exponent(quantized: Quantized) -> int | None:
    """The largest exponent of an MXFP4 matrix among blocks that hold a value; None if it holds none.

    Raises:
        InputError: for another format, and for a scale that is NaN.
    """
    _check_mxfp4(quantized)
    top: int | None = None
    for rows in row_chunks(quantized.packed):
        present = quantized.scales[rows][_holds_a_value(quantized.packed[rows], BLOCK["mxfp4"])]
        if present.numel():
            top = max(int(present.max()) - _BIAS, -_BIAS if top is None else top)
    return top


def mxfp4_to_nvfp4(quantized: Quantized, top: int | None) -> tuple[Quantized, Losses]:
    """MXFP4 as NVFP4: the codes as they are, every block of 32 as two of 16.

        divisor = 2^(8 - top)        scale_j = 2^(k_j - top + 8)        k_j exponent of block j

    Exact iff top - k_j <= 17 in every block that holds a value. In others the scale is the smallest, 2^-9, and values
    are rounded half to even. A block of zeros has scale 2^-9.

    Args:
        quantized: MXFP4, [R, K].
        top: the largest exponent, as of `top_exponent`; of all matrices that an engine fuses into one (q/k/v, gate/up),
            so that they share the divisor. None if they hold no value.

    Raises:
        InputError: for another format, a scale that is NaN, and a `top` below an exponent of this matrix.

    Source: what ModelOpt calls `cast_mxfp4_to_nvfp4`; E8M0 of the OCP MX specification 1.0, section 5.4.1.
    """
    own = top_exponent(quantized)
    if own is not None and (top is None or top < own):
        raise InputError(f"top exponent {top}: below {own}, that of the matrix; take the largest of the fused group")
    shift = 0 if top is None else min(_TOP - top, _LARGEST_SHIFT)
    half = BLOCK["nvfp4"]
    packed = torch.empty_like(quantized.packed)
    scales = torch.empty(len(packed), 2 * packed.shape[1] // half, dtype=torch.uint8, device=packed.device)
    losses = Losses(0, 0, 0, 0)
    for rows in row_chunks(packed):
        codes = quantized.packed[rows].clone()
        exponents = quantized.scales[rows].repeat_interleave(BLOCK["mxfp4"] // half, dim=-1).int() + (shift - _BIAS)
        present = _holds_a_value(codes, half)
        kept = torch.where(present, exponents.clamp(min=_BOTTOM), _BOTTOM)
        scales[rows] = encode_e4m3(decode_e8m0((kept + _BIAS).to(torch.uint8)))
        low = present & (exponents < _BOTTOM)
        blocks = codes.view(len(codes), -1, half // 2)
        before = e2m1.decode(e2m1.unpack(blocks[low]))
        before = torch.ldexp(before, (exponents - _BOTTOM)[low].clamp(min=-60).unsqueeze(-1))  # 2^-60 rounds to 0 too
        rounded = e2m1.encode(before)
        blocks[low] = e2m1.pack(rounded)
        packed[rows] = codes
        changed = int((e2m1.decode(rounded) != before).sum())
        losses += Losses(int(present.sum()), int(low.sum()), 2 * codes.numel(), changed)
    return Quantized("nvfp4", packed, scales, 2.0**shift), losses


def fp4_to_fp8(quantized: Quantized) -> tuple[Tensor, Tensor, Losses]:
    """FP4 as E4M3 in blocks of 128 x 128 with a power of two as the scale of each, the smallest that clips nothing.

    Exact for MXFP4 where the exponents of what a block holds lie at most 14 apart: 6 * 2^k becomes 384, and
    1.5 * 2^(k - 14) is 3 * 2^-9. NVFP4 fits only where its steps are powers of two. What does not fit is rounded to the
    nearest value.

    Returns:
        float8_e4m3fn codes [R, K], scales, float32 [ceil(R/128), ceil(K/128)], and what could not be kept.

    Raises:
        InputError: for a scale that is NaN, and for values beyond float32.

    Source: DeepSeek-V4 trains on FP8 copies of FP4 experts made so.
    """
    rows, columns = len(quantized.packed), 2 * quantized.packed.shape[1]
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=quantized.packed.device)
    scales = torch.empty(-(-rows // SIDE), -(-columns // SIDE), device=quantized.packed.device)
    losses = Losses(0, 0, 0, 0)
    for start in range(0, rows, SIDE):
        band = slice(start, min(start + SIDE, rows))
        part = Quantized(quantized.format, quantized.packed[band], quantized.scales[band], quantized.divisor)
        before = dequantize(part)
        codes[band], scales[start // SIDE : start // SIDE + 1] = found = quantize_fp8_blocks(before)
        changed = dequantize_fp8(*found) != before
        blocks = [slice(left, left + SIDE) for left in range(0, columns, SIDE)]
        losses += Losses(
            blocks=sum(bool(before[:, block].any()) for block in blocks),
            rounded_blocks=sum(bool(changed[:, block].any()) for block in blocks),
            elements=before.numel(),
            changed_elements=int(changed.sum()),
        )
    return codes, scales, losses


def _holds_a_value(packed: Tensor, block: int) -> Tensor:
    """Per block, whether a code is other than zero of either sign: [R, K/B] bool."""
    return packed.bitwise_and(0x77).reshape(len(packed), -1, block // 2).amax(-1) > 0


def _check_mxfp4(quantized: Quantized) -> None:
    if quantized.format != "mxfp4":
        raise InputError(f"format {quantized.format}: only MXFP4 moves to NVFP4")
    broken = int((quantized.scales == 255).sum())
    if broken:
        raise InputError(f"MXFP4 scale byte 255 (NaN) in {broken} blocks: find where the checkpoint broke")
