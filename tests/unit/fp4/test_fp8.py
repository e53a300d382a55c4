import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4.fp8 import dequantize_fp8, quantize_fp8, quantize_fp8_blocks, quantize_fp8_with

Make = Callable[..., Tensor]


def test_the_scale_puts_the_largest_magnitude_at_448(matrix: Make) -> None:
    weight = matrix()
    codes, scale = quantize_fp8(weight)
    assert scale == float(weight.abs().max() / 448)
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float().abs().max() == 448
    off = (dequantize_fp8(codes, scale) - weight).abs()
    assert (off <= torch.maximum(weight.abs() * 2.0**-4, torch.tensor(scale * 2.0**-10)) * (1 + 1e-6)).all()


def test_a_scale_that_is_shared_saturates_what_lies_beyond_it() -> None:
    weight = torch.tensor([[1.0, -900.0, 448.0]])
    codes, scale = quantize_fp8(weight, 1.0)
    assert scale == 1.0
    assert codes.float().tolist() == [[1.0, -448.0, 448.0]]
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="positive and finite"):
            quantize_fp8(weight, wrong)


def test_codes_are_the_quotients_rounded_once() -> None:
    # Multiplied with the reciprocal, as CUDA does when it divides by a number, these would round the other way.
    steps = torch.arange(1, 4096, dtype=torch.float32) / 8192
    weight = torch.arange(1.0, 449.0).outer(steps)
    exact = (weight.double() / steps.double()).float().to(torch.float8_e4m3fn)
    for k in range(0, len(steps), 97):
        codes = quantize_fp8_with(weight[:, k : k + 1], float(steps[k]))
        assert torch.equal(codes.view(torch.uint8), exact[:, k : k + 1].view(torch.uint8))


@pytest.mark.gpu
def test_a_gpu_codes_the_same_to_the_byte(matrix: Make) -> None:
    weight = matrix(rows=512, columns=512)
    for divisor in range(1, 64):
        codes, scale = quantize_fp8(weight / divisor)
        of_gpu = quantize_fp8_with((weight / divisor).cuda(), scale)
        assert torch.equal(of_gpu.cpu().view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("factor", [0.0, 1e-43, 1e-30, 1e30])
def test_scales_are_normal_numbers_for_any_weight(matrix: Make, factor: float) -> None:
    weight = matrix() * factor
    codes, scale = quantize_fp8(weight)
    of_blocks, scales = quantize_fp8_blocks(weight)
    for each, by in ((codes, torch.tensor(scale)), (of_blocks, scales)):
        assert by.min() >= 2.0**-126
        assert torch.isfinite(by).all()
        assert torch.isfinite(each.float()).all()
    if factor == 0:
        assert scale == 1.0
        assert scales.tolist() == [[1.0]]
        assert dequantize_fp8(codes, scale).eq(0).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 200), st.integers(1, 300), st.floats(-30, 30))
def test_scales_of_blocks_are_the_smallest_powers_of_two_that_clip_nothing(
    seed: int, rows: int, columns: int, exponent: float
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10**exponent
    codes, scales = quantize_fp8_blocks(weight)
    assert scales.shape == (math.ceil(rows / 128), math.ceil(columns / 128))
    assert torch.frexp(scales).mantissa.eq(0.5).all()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            amax, scale = float(weight[block].abs().max()), float(scales[i, j])
            assert 224 < amax / scale <= 448
            off = (dequantize_fp8(codes, scales)[block] - weight[block]).abs()
            bound = torch.maximum(weight[block].abs() * 2.0**-4, torch.tensor(scale * 2.0**-10))
            assert (off <= bound).all()


def test_a_largest_magnitude_of_448_times_a_power_of_two_is_kept() -> None:
    for power in (-20, 0, 20):
        weight = torch.full((1, 2), 448 * 2.0**power)
        codes, scales = quantize_fp8_blocks(weight)
        assert scales.item() == 2.0**power
        assert torch.equal(dequantize_fp8(codes, scales), weight)
        _, above = quantize_fp8_blocks(torch.nextafter(weight, torch.tensor(math.inf)))
        assert above.item() == 2.0 ** (power + 1)


def test_powers_of_two_times_e2m1_are_exact_over_14_exponents() -> None:
    values = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6]) * 2.0 ** torch.arange(-14.0, 1).unsqueeze(-1)
    weight = torch.cat([values, -values], 1)
    codes, scales = quantize_fp8_blocks(weight)
    assert scales.item() == 2.0**-6
    assert torch.equal(dequantize_fp8(codes, scales), weight)


# compressed-tensors #839: values always in bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_rounded_once_to_the_dtype_asked_for(matrix: Make, dtype: torch.dtype) -> None:
    codes, scale = quantize_fp8(matrix())
    assert torch.equal(dequantize_fp8(codes, scale, dtype), (codes.float() * scale).to(dtype))
    codes, scales = quantize_fp8_blocks(matrix())
    assert torch.equal(dequantize_fp8(codes, scales, dtype), (codes.float() * scales.item()).to(dtype))


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_weights_that_are_not_finite_are_refused(matrix: Make, wrong: float) -> None:
    weight = matrix()
    weight[1, 2] = wrong
    for quantize in (quantize_fp8, quantize_fp8_blocks):
        with pytest.raises(InputError, match="no scale fits"):
            quantize(weight)
    with pytest.raises(InputError, match="a matrix of floats"):
        quantize_fp8(weight[0])
