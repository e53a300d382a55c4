import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import e2m1, mxfp4, nvfp4
from mopdctl.fp4.error import quantization_error
from mopdctl.fp4.quantized import Quantized, dequantize, encode_e4m3

Make = Callable[..., Tensor]


def quantize(weight: Tensor, method: nvfp4.Method = "max") -> Quantized:
    return nvfp4.quantize(weight, nvfp4.divisor(float(weight.abs().max()), method), method=method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_the_dequantized_matrix(matrix: Make, dtype: torch.dtype) -> None:
    weight = matrix("tails").to(dtype)
    for found in (quantize(weight), mxfp4.quantize(weight)):
        error = quantization_error(found, weight)
        values, exact = dequantize(found).double(), weight.double()
        assert error.elements == 8 * 128
        assert error.blocks == found.scales.numel()
        assert error.squared_error == pytest.approx(float((values - exact).square().sum()), rel=1e-12)
        assert error.relative_mse == pytest.approx(
            float((values - exact).square().sum() / exact.square().sum()), rel=1e-12
        )
        cosine = torch.nn.functional.cosine_similarity(values.flatten(), exact.flatten(), dim=0)
        assert error.cosine == pytest.approx(float(cosine), rel=1e-12)


def test_blocks_are_counted_by_what_became_of_them() -> None:
    codes = torch.zeros(1, 5 * 16, dtype=torch.uint8)
    weight = torch.zeros(1, 5 * 16)
    codes[0, 0], weight[0, 0] = 14, -4.1  # the largest value is 4
    codes[0, 16], weight[0, 16] = 7, 7.01  # clipped
    codes[0, 32], weight[0, 32] = 7, 7.0  # half a gap, no more than rounding
    weight[0, 48] = -1e-30  # nothing left
    scales = encode_e4m3(torch.ones(1, 5))  # the last is zero, and was
    error = quantization_error(Quantized("nvfp4", e2m1.pack(codes), scales, 1.0), weight)
    assert (error.blocks, error.zero_blocks, error.four_blocks) == (5, 1, 1)
    assert (error.clipped_blocks, error.underflowed_blocks) == (1, 1)
    assert error.four_share == 1 / 4
    assert error.squared_error == pytest.approx(0.1**2 + 1.01**2 + 1, rel=1e-6)


def test_max_clips_and_loses_nothing_but_blocks_below_the_smallest_scale(matrix: Make) -> None:
    weight = matrix("tails", rows=32)
    error = quantization_error(quantize(weight), weight)
    assert (error.clipped_blocks, error.underflowed_blocks, error.zero_blocks) == (0, 0, 0)
    weight = weight.clamp(-0.1, 0.1)
    weight[0, 0] = 1e6
    error = quantization_error(quantize(weight), weight)
    assert error.underflowed_blocks == 32 * 8 - 1
    assert error.relative_mse < 1e-6  # of the one value that counts
    # compressed-tensors: by one divisor for matrices of unlike magnitude
    small = nvfp4.quantize(weight, 1e6, method="max")
    assert quantization_error(small, weight).clipped_blocks == 32 * 8


def test_46_ends_blocks_at_4_as_often_as_it_does_in_public(matrix: Make) -> None:
    weight = matrix(rows=64, columns=512)
    assert quantization_error(quantize(weight, "46"), weight).four_share == pytest.approx(0.45, abs=0.05)
    assert quantization_error(quantize(weight, "max"), weight).four_share == 0


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_huge_and_tiny_weights_have_the_error_of_others(matrix: Make, factor: float) -> None:
    plain, scaled = (quantization_error(quantize(w), w) for w in (matrix(), matrix() * factor))
    assert scaled.relative_mse == pytest.approx(plain.relative_mse, rel=0.01)
    assert scaled.cosine == pytest.approx(plain.cosine, rel=1e-4)


def test_zeros_have_no_error_and_no_direction() -> None:
    error = quantization_error(quantize(torch.zeros(2, 32)), torch.zeros(2, 32))
    assert (error.relative_mse, error.zero_blocks, error.underflowed_blocks) == (0.0, 4, 0)
    assert math.isnan(error.cosine)
    assert math.isnan(error.four_share)


def test_errors_of_two_matrices_add_up_to_that_of_both(matrix: Make) -> None:
    weight = matrix("tails", rows=16)
    divisor = nvfp4.divisor(float(weight.abs().max()), "sweep")

    def of(rows: Tensor) -> tuple[float, ...]:
        error = quantization_error(nvfp4.quantize(rows, divisor), rows)
        return error.blocks, error.four_blocks, error.relative_mse, error.cosine

    halves = [quantization_error(nvfp4.quantize(rows, divisor), rows) for rows in (weight[:5], weight[5:])]
    both = halves[0] + halves[1]
    assert of(weight) == pytest.approx((both.blocks, both.four_blocks, both.relative_mse, both.cosine), rel=1e-12)


def test_another_matrix_is_refused(matrix: Make) -> None:
    with pytest.raises(InputError, match="two matrices"):
        quantization_error(quantize(matrix()), matrix(columns=64))
