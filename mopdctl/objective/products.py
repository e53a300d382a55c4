"""The three matrix products of a head, into float32 or wider whatever the operands are.

A product of bfloat16 operands that is itself rounded to bfloat16 is off by up to 2^-9 of a logit, several percent of a
probability. CUDA multiplies narrow operands into float32 in hardware; elsewhere they are widened, the weight in tiles.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_TILE_ROWS = 8192
"""Rows of a weight that are widened at a time."""


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Float64 if any is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def operand_dtype(hidden_NH: Tensor, weight_VH: Tensor) -> torch.dtype:
    """The dtype that hidden states and weight are multiplied in.

    On CUDA bfloat16 where the hidden states are, or an autocast to it is on, as for any linear layer. Otherwise float32
    or wider.
    """
    if hidden_NH.device.type == "cuda":
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        if autocast or hidden_NH.dtype == torch.bfloat16:
            return torch.bfloat16
    return wide_dtype(hidden_NH, weight_VH)


def project(hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
    """Writes hidden @ weight^T into `out`."""
    if hidden_CH.dtype == weight_VH.dtype == out_CV.dtype:
        torch.mm(hidden_CH, weight_VH.t(), out=out_CV)
    elif _in_hardware(hidden_CH, weight_VH):
        torch.mm(hidden_CH, weight_VH.t(), out_dtype=out_CV.dtype, out=out_CV)
    else:
        hidden_CH = hidden_CH.to(out_CV.dtype)
        for tile in _tiles(weight_VH):
            torch.mm(hidden_CH, weight_VH[tile].to(out_CV.dtype).t(), out=out_CV[:, tile])


def pull_back(gradient_CV: Tensor, weight_VH: Tensor) -> Tensor:
    """The product gradient @ weight, [C, H], float32 or wider."""
    dtype = wide_dtype(gradient_CV, weight_VH)
    if gradient_CV.dtype == weight_VH.dtype == dtype:
        return torch.mm(gradient_CV, weight_VH)
    if _in_hardware(gradient_CV, weight_VH):
        return torch.mm(gradient_CV, weight_VH, out_dtype=dtype)
    total_CH = torch.zeros(len(gradient_CV), weight_VH.shape[1], dtype=dtype, device=weight_VH.device)
    for tile in _tiles(weight_VH):
        total_CH.addmm_(gradient_CV[:, tile].to(dtype), weight_VH[tile].to(dtype))
    return total_CH


def accumulate(total_VH: Tensor, gradient_CV: Tensor, hidden_CH: Tensor, *, first: bool) -> None:
    """Adds gradient^T @ hidden to `total`, which is float32 or wider; overwrites it if `first`."""
    left_VC, beta = gradient_CV.t(), 0 if first else 1
    if _in_hardware(gradient_CV, hidden_CH):
        torch.addmm(total_VH, left_VC, hidden_CH, out_dtype=total_VH.dtype, beta=beta, out=total_VH)
    else:
        total_VH.addmm_(left_VC.to(total_VH.dtype), hidden_CH.to(total_VH.dtype), beta=beta)


def _in_hardware(a: Tensor, b: Tensor) -> bool:
    return a.device.type == "cuda" and a.dtype == b.dtype == torch.bfloat16


def _tiles(weight_VH: Tensor) -> Iterator[slice]:
    rows = len(weight_VH)
    return (slice(start, min(start + _TILE_ROWS, rows)) for start in range(0, rows, _TILE_ROWS))
