from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import mxfp4, nvfp4
from mopdctl.fp4.fake import fake_quantize, fake_quantize_activations
from mopdctl.fp4.quantized import Format, dequantize

Make = Callable[..., Tensor]
FORMATS: list[Format] = ["nvfp4", "mxfp4"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["max", "46", "sweep"])
def test_forward_is_the_dequantized_weight_in_its_dtype(matrix: Make, method: nvfp4.Method, dtype: torch.dtype) -> None:
    weight = matrix("tails").to(dtype)
    divisor = nvfp4.divisor(float(weight.abs().max()), method)
    found = fake_quantize(weight, "nvfp4", method=method)
    assert found.dtype == dtype
    assert torch.equal(found, dequantize(nvfp4.quantize(weight, divisor, method=method), dtype))
    if method != "46":
        for rule in ("even", "floor", "rceil", "ceil"):
            expected = dequantize(mxfp4.quantize(weight, rule=rule, method=method), dtype)
            assert torch.equal(fake_quantize(weight, "mxfp4", method=method, rule=rule), expected)


def test_a_divisor_that_is_given_is_used(matrix: Make) -> None:
    weight = matrix()
    divisor = nvfp4.divisor(3 * float(weight.abs().max()), "max")
    found = fake_quantize(weight, "nvfp4", divisor=divisor)
    assert torch.equal(found, dequantize(nvfp4.quantize(weight, divisor, method="max")))
    assert not torch.equal(found, fake_quantize(weight, "nvfp4"))


@pytest.mark.parametrize("format", FORMATS)
def test_the_gradient_passes_straight_through(matrix: Make, format: Format) -> None:
    weight = matrix().requires_grad_()
    x, upstream = matrix(seed=1), matrix(rows=8, columns=8, seed=2)
    (x @ fake_quantize(weight, format).t() * upstream).sum().backward()
    assert torch.equal(weight.grad, upstream.t() @ x)
    # clipped weights too: the estimator knows no edge
    divisor = 1e6
    (gradient,) = torch.autograd.grad(fake_quantize(weight, "nvfp4", divisor=divisor).sum(), weight)
    assert gradient.eq(1).all()


@pytest.mark.parametrize("format", FORMATS)
def test_activations_keep_their_shape_and_gradient(matrix: Make, format: Format) -> None:
    x = matrix(rows=6).view(2, 3, 128).requires_grad_()
    found = fake_quantize_activations(x, format)
    assert torch.equal(found.view(6, 128), fake_quantize(x.detach().view(6, 128), format))
    (gradient,) = torch.autograd.grad((found * found.detach()).sum(), x)
    assert torch.equal(gradient, found.detach())


def test_activations_use_the_divisor_of_the_calibration_and_saturate_beyond_it() -> None:
    x = torch.full((1, 32), 2.0)
    x[0, 16:] = 0.5
    divisor = nvfp4.divisor(1.0, "max")
    assert fake_quantize_activations(x, "nvfp4", divisor).tolist() == [[1.0] * 16 + [0.5] * 16]


# compressed-tensors #595: experts that only ever saw zeros
@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format: Format) -> None:
    assert fake_quantize_activations(torch.zeros(2, 3, 32), format).eq(0).all()
    assert fake_quantize(torch.zeros(2, 32), format).eq(0).all()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_quantized_already_stays_as_it_is(matrix: Make, format: Format) -> None:
    once = fake_quantize(matrix("tails"), format)
    # MXFP4: what was rounded up to 8 halves may belong to the next exponent, whose values hold it as well
    assert torch.equal(fake_quantize(once, format, divisor=None if format == "mxfp4" else _divisor(matrix)), once)


def _divisor(matrix: Make) -> float:
    return nvfp4.divisor(float(matrix("tails").abs().max()), "max")


def test_what_makes_no_sense_is_refused(matrix: Make) -> None:
    with pytest.raises(InputError, match="MXFP4 takes max or sweep"):
        fake_quantize(matrix(), "mxfp4", method="46")
    with pytest.raises(InputError, match="MXFP4 has none"):
        fake_quantize(matrix(), "mxfp4", divisor=1.0)
    broken = matrix()
    broken[0, 0] = float("nan")
    for format in FORMATS:
        with pytest.raises(InputError, match="NaN"):
            fake_quantize(broken, format)
