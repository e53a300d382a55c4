"""One weight, quantized: by which method, with whose largest magnitude, and how far off it came out."""

from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor

from mopdctl.config.quant import ExponentRule, Method, Precision
from mopdctl.fp4 import mxfp4, nvfp4
from mopdctl.fp4.blocks import row_chunks
from mopdctl.fp4.error import quantization_error
from mopdctl.fp4.fp8 import dequantize_fp8, quantize_fp8_with
from mopdctl.fp4.gptq import gptq
from mopdctl.fp4.quantized import LARGEST_E4M3, Quantized
from mopdctl.quant.moments import Moments


@dataclass(frozen=True, slots=True)
class Fp8:
    """A matrix in E4M3 with one scale: value = code * scale."""

    codes_RK: Tensor
    scale: float


QuantizedWeight = Quantized | Fp8


def quantize_weight(
    weight_RK: Tensor,
    precision: Precision,
    amax: float,
    *,
    method: Method = "max",
    rule: ExponentRule = "even",
    inputs: Moments | None = None,
    reciprocal: bool = False,
) -> QuantizedWeight:
    """The weight in the precision.

    Args:
        weight_RK: any float dtype and device; computed in float32.
        precision: not `bf16`.
        amax: largest magnitude of all weights that share a tensor scale with this one.
        method: for FP4. `gptq` without a Hessian (an expert that no row of the calibration reached) is `sweep`.
        rule: for MXFP4.
        inputs: what calibration found of what the layer reads. `sweep` weighs errors by its second moments.
        reciprocal: the divisor of NVFP4 will be stored as its reciprocal; codes are then chosen for what is read back.
    """
    if precision == "fp8":
        scale = fp8_scale(amax)
        return Fp8(quantize_fp8_with(weight_RK, scale), scale)
    hessian_KK = inputs.hessian_KK if inputs is not None and method == "gptq" else None
    chosen: nvfp4.Method = "sweep" if method == "gptq" else method
    divisor = None
    if precision == "nvfp4":
        divisor = nvfp4.divisor(amax, chosen)
        if reciprocal:
            divisor = float(torch.tensor(divisor).reciprocal().reciprocal())
    if hessian_KK is not None:
        return gptq(weight_RK, hessian_KK, "nvfp4" if precision == "nvfp4" else "mxfp4", divisor=divisor)
    importance_K = None if inputs is None or chosen != "sweep" else inputs.importance_K
    if divisor is not None:
        return nvfp4.quantize(weight_RK, divisor, method=chosen, importance_K=importance_K)
    return mxfp4.quantize(
        weight_RK, rule=rule, method="sweep" if chosen == "sweep" else "max", importance_K=importance_K
    )


def fp8_scale(amax: float) -> float:
    """The scale of a matrix in E4M3: amax / 448, rounded up to bfloat16; 1 for zeros.

    Readers keep it in the model's dtype. Rounded up, no code saturates, and all of them multiply by the same number.
    """
    if amax == 0:
        return 1.0
    wanted = torch.tensor(amax / LARGEST_E4M3).clamp(min=2.0**-126)
    found = wanted.bfloat16()
    if float(found) < float(wanted):
        found = (found.view(torch.int16) + 1).view(torch.bfloat16)
    return float(found)


def statistics(weight: QuantizedWeight, source_RK: Tensor) -> dict[str, Any]:
    """How far a quantized weight is from what it was made of, as JSON: sums that add up over weights, and ratios."""
    if isinstance(weight, Quantized):
        error = quantization_error(weight, source_RK)
        ratios = {"relative_mse": error.relative_mse, "cosine": error.cosine, "four_share": error.four_share}
        return asdict(error) | {name: None if isnan(value) else value for name, value in ratios.items()}
    sums = torch.zeros(4, dtype=torch.float64, device=source_RK.device)
    for rows in row_chunks(source_RK):
        values = dequantize_fp8(weight.codes_RK[rows], weight.scale).double()
        source = source_RK[rows].double()
        pairs = ((values - source, values - source), (source, source), (values, values), (source, values))
        sums += torch.stack([(a * b).sum() for a, b in pairs])
    names = ("squared_error", "squared_weight", "squared_quantized", "product")
    found = dict(zip(names, sums.tolist(), strict=True))
    norms = (found["squared_weight"] * found["squared_quantized"]) ** 0.5
    return (
        {"elements": source_RK.numel()}
        | found
        | {
            "relative_mse": found["squared_error"] / found["squared_weight"] if found["squared_weight"] else 0.0,
            "cosine": found["product"] / norms if norms else None,
        }
    )
