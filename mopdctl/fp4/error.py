"""How far a quantized matrix is from its weight: sums that add up over matrices, and what they say."""

from dataclasses import dataclass
from math import nan, sqrt

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import e2m1
from mopdctl.fp4.blocks import block_magnitudes, row_chunks
from mopdctl.fp4.quantized import BLOCK, Quantized, block_steps


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """Counts and sums in float64; `a + b` is the error of two matrices as of one."""

    elements: int
    blocks: int
    zero_blocks: int
    """Blocks of zeros, in the weight."""
    four_blocks: int
    """Blocks whose largest value is 4: what four-over-six chose over 6, and chance."""
    clipped_blocks: int
    """Blocks in which a value lies above 7 steps, so that saturation at 6 costs more than any rounding (one step)."""
    underflowed_blocks: int
    """Blocks that are zero only since they were quantized."""
    squared_error: float
    squared_weight: float
    squared_quantized: float
    product: float
    """Of weight and quantized."""

    def __add__(self, other: "QuantizationError") -> "QuantizationError":
        return QuantizationError(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def relative_mse(self) -> float:
        """The squared error over the squared weight, each summed; 0 for zeros kept as zeros."""
        return self.squared_error / self.squared_weight if self.squared_weight else 0.0

    @property
    def cosine(self) -> float:
        """Of the two as vectors; NaN if one of them is zero."""
        norms = sqrt(self.squared_weight) * sqrt(self.squared_quantized)
        return self.product / norms if norms else nan

    @property
    def four_share(self) -> float:
        """Share of `four_blocks` among those that are not zero; NaN without any."""
        other = self.blocks - self.zero_blocks
        return self.four_blocks / other if other else nan


def quantization_error(quantized: Quantized, weight_RK: Tensor) -> QuantizationError:
    """The error of a quantized matrix against its weight, from the bytes: [R, K] each.

    Raises:
        InputError: if the shapes differ.
    """
    rows, columns = weight_RK.shape
    if quantized.packed.shape != (rows, columns // 2):
        raise InputError(
            f"packed {list(quantized.packed.shape)} beside weight {list(weight_RK.shape)}: these are two matrices"
        )
    block = BLOCK[quantized.format]
    steps = block_steps(quantized.format, quantized.scales, quantized.divisor)
    counts = torch.zeros(4, dtype=torch.int64, device=weight_RK.device)
    sums = torch.zeros(4, dtype=torch.float64, device=weight_RK.device)
    for chunk in row_chunks(weight_RK):
        codes = e2m1.decode_packed(quantized.packed[chunk])
        amax = block_magnitudes(weight_RK[chunk], block).amax(0)
        largest = block_magnitudes(codes, block).amax(0)
        clipped, underflowed = amax > 7 * steps[chunk], (amax > 0) & (largest == 0)
        counts += torch.stack([each.sum() for each in (amax == 0, largest == 4, clipped, underflowed)])
        blocks = codes.view(*steps[chunk].shape, block) * steps[chunk].unsqueeze(-1)
        values, weight = blocks.flatten().double(), weight_RK[chunk].flatten().double()
        off = values - weight
        sums += torch.stack([off.dot(off), weight.dot(weight), values.dot(values), weight.dot(values)])
    return QuantizationError(rows * columns, steps.numel(), *counts.tolist(), *sums.tolist())
