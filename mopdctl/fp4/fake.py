"""Fake quantization: the values of FP4 in the dtype of the weight, with a gradient that passes straight through."""

from typing import Any

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import mxfp4, nvfp4
from mopdctl.fp4.blocks import largest_magnitude
from mopdctl.fp4.quantized import Format, round_with


def fake_quantize(
    weight_RK: Tensor,
    format: Format,
    *,
    method: nvfp4.Method = "max",
    divisor: float | None = None,
    rule: mxfp4.Rule = "even",
) -> Tensor:
    """What quantizing and dequantizing make of a matrix, in its own dtype; the gradient is that of the identity.

        forward: code * step        backward: d weight = d output

    Args:
        weight_RK: any float dtype and device; computed in float32.
        format: of the values.
        method: how block scales are chosen; `46` is of NVFP4 alone.
        divisor: of NVFP4; left out, that of the weight's own largest magnitude.
        rule: of MXFP4.

    Raises:
        InputError: for NaN or infinite weights, a width that does not fall into blocks, or `46` or a divisor for MXFP4.

    Source: the straight-through estimator, Bengio et al. (1308.3432).
    """
    weight = weight_RK.detach()
    if format == "mxfp4":
        if method == "46":
            raise InputError("method 46: chooses scales of NVFP4; MXFP4 takes max or sweep")
        scales = mxfp4.choose_scales(weight, rule=rule, method=method)
    else:
        if divisor is None:
            divisor = nvfp4.divisor(largest_magnitude(weight), method)
        scales = nvfp4.choose_scales(weight, divisor, method=method)
    values_RK: Tensor = _StraightThrough.apply(weight_RK, round_with(format, weight, scales, divisor))  # type: ignore[no-untyped-call]
    return values_RK


def fake_quantize_activations(x_NK: Tensor, format: Format, divisor: float | None = None) -> Tensor:
    """The same of activations: scales from the largest magnitude of every block, as an engine finds them at run time.

    Args:
        x_NK: any leading dimensions.
        format: of the values; MXFP4 by the rule of the engines' kernels, `even`.
        divisor: the calibrated one of NVFP4, `input_global_scale`; left out, that of this input.

    Errors as of `fake_quantize`.
    """
    return fake_quantize(x_NK.reshape(-1, x_NK.shape[-1]), format, divisor=divisor).view(x_NK.shape)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
