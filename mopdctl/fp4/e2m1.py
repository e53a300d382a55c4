"""E2M1, the four-bit float of NVFP4 and MXFP4: one sign bit, two of exponent, one of mantissa. No infinity, no NaN.

    code & 7   0   1    2   3    4   5   6   7
    value      0   0.5  1   1.5  2   3   4   6        code & 8: the sign

Rounding rests on a number added that is so large that its float32 neighbours lie as far apart as those of E2M1: the
processor then rounds to them, half to even. They are 0.5 apart below 2, 1 below 4, 2 above: half a binade each.
"""

from functools import cache

import torch
from torch import Tensor

from mopdctl.errors import InputError

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = VALUES[-1]

_MAGIC = 1.5 * 2**22  # in [2^22, 2^23) float32 are 0.5 apart; from the middle of it a sum with either sign stays inside
_EXPONENT = 0x7F800000  # the exponent bits of a float32
_ONE, _FOUR = 0x3F800000, 0x40800000  # the bits of 1.0 and 4.0


def encode(values: Tensor) -> Tensor:
    """The codes of the nearest values, ties to the even code, magnitudes above 6 as 6.

    Args:
        values: any shape and float dtype; rounded in float32. What is NaN gets some code: refuse it before.

    Returns:
        uint8 codes, same shape. A negative value that rounds to zero keeps its sign, code 8; -0.0 gets code 0.

    Source: OCP Microscaling Formats specification 1.0, section 5.3.3 (FP4 E2M1).
    """
    magnitudes = values.float() + 0.0  # makes -0.0 a positive zero
    codes = magnitudes.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
    magnitudes.abs_().clamp_(max=LARGEST)
    binade = _binade(magnitudes)
    # The last bits of the sum count the neighbours from zero; each binade begins two codes above the one below.
    codes.add_(magnitudes.add_(binade, alpha=_MAGIC).view(torch.int32).bitwise_and_(7))
    return codes.add_(binade.view(torch.int32).sub_(_ONE).bitwise_right_shift_(22)).to(torch.uint8)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of uint8 codes below 16, same shape; exact in every float dtype."""
    return _values(codes.device).index_select(0, codes.flatten().int()).view(codes.shape).to(dtype)


def round_to_values(values: Tensor) -> Tensor:
    """The nearest values, ties to the even code, saturated at 6: `decode(encode(values))`, without codes.

    Float32, same shape.
    """
    return round_to_values_(values.to(torch.float32, copy=True))


def round_to_values_(values: Tensor) -> Tensor:
    """The same of float32, in place."""
    binade = _binade(values)
    return values.add_(binade, alpha=_MAGIC).sub_(binade, alpha=_MAGIC).clamp_(-LARGEST, LARGEST)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, [..., K] to [..., K/2]: the even column in the low half, the odd one in the high half.

    The order in which compressed-tensors, ModelOpt, torchao and gpt-oss store them.

    Raises:
        InputError: if K is odd.
    """
    if codes.shape[-1] % 2:
        raise InputError(f"codes of shape {list(codes.shape)}: two go into a byte; the last dimension must be even")
    # 0x0h0l, the even column first in memory. Flat: a single row of a transposed matrix calls itself contiguous.
    pairs = codes.contiguous().flatten().view(torch.int16)
    return pairs.bitwise_or(pairs.bitwise_right_shift(4)).to(torch.uint8).view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack(packed: Tensor) -> Tensor:
    """The codes of packed bytes, [..., K/2] to [..., K]; undoes `pack`."""
    pairs = packed.to(torch.int16)
    return pairs.bitwise_or(pairs.bitwise_left_shift(4)).bitwise_and_(0x0F0F).view(torch.uint8)


def decode_packed(packed: Tensor) -> Tensor:
    """The values of packed bytes, [..., K/2] to float32 [..., K]: `decode(unpack(packed))`, but faster."""
    pairs = _pairs(packed.device).index_select(0, packed.flatten().int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def _binade(values: Tensor) -> Tensor:
    """1.0 below 2, 2.0 below 4, else 4.0."""
    return values.view(torch.int32).bitwise_and(_EXPONENT).clamp_(_ONE, _FOUR).view(torch.float32)


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float32, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two float32 values of every byte, seen as one number of 64 bits."""
    return _values(device)[unpack(torch.arange(256, dtype=torch.uint8, device=device)).int()].view(torch.int64)
