"""GPTQ against its definition in float64, and what must hold of any result of it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import e2m1, mxfp4, nvfp4
from mopdctl.fp4.gptq import gptq
from mopdctl.fp4.quantized import BLOCK, Format, Quantized, block_steps, dequantize

FORMATS: list[Format] = ["nvfp4", "mxfp4"]


def problem(rows: int, columns: int, *, seed: int = 0, tokens: int = 400) -> tuple[Tensor, Tensor]:
    """A weight, and the Hessian of strongly correlated inputs of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(tokens, columns, generator=generator) @ mixing * torch.logspace(-1, 1, columns)
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs / tokens


def divisor_of(weight_RK: Tensor, format: Format) -> float | None:
    return nvfp4.divisor(float(weight_RK.abs().max()), "sweep") if format == "nvfp4" else None


def run(weight_RK: Tensor, hessian_KK: Tensor, format: Format, **options: Any) -> Quantized:
    return gptq(weight_RK, hessian_KK, format, divisor=divisor_of(weight_RK, format), **options)


def plain(weight_RK: Tensor, format: Format, *, method: Any = "sweep", importance_K: Tensor | None = None) -> Quantized:
    if format == "mxfp4":
        return mxfp4.quantize(weight_RK, method=method, importance_K=importance_K)
    divisor = nvfp4.divisor(float(weight_RK.abs().max()), method)
    return nvfp4.quantize(weight_RK, divisor, method=method, importance_K=importance_K)


def output_error(quantized: Quantized, weight_RK: Tensor, hessian_KK: Tensor) -> float:
    """tr(dW H dW^T), the squared error of the layer's outputs."""
    error_RK = dequantize(quantized).double() - weight_RK.double()
    return float((error_RK @ hessian_KK.double() * error_RK).sum())


def magnitudes(quantized: Quantized) -> Tensor:
    return e2m1.unpack(quantized.packed) & 7


def nearest(values: Tensor) -> Tensor:
    """The nearest value of E2M1; no ties in random data."""
    table = torch.tensor(sorted({sign * value for value in e2m1.VALUES for sign in (-1, 1)}), dtype=torch.float64)
    return table[(values.unsqueeze(-1) - table).abs().argmin(-1)]


def reference(weight_RK: Tensor, hessian_KK: Tensor, format: Format, damping: float) -> tuple[Tensor, Tensor]:
    """Scales and values of codes by the book: optimal brain surgery with the inverse itself, one column at a time."""
    hessian = hessian_KK.double()
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    scales = plain(weight_RK, format, importance_K=hessian.diagonal()).scales
    steps = block_steps(format, scales, divisor_of(weight_RK, format)).double().repeat_interleave(BLOCK[format], 1)
    weight, inverse = weight_RK.double().clone(), torch.linalg.inv(hessian)
    values = torch.zeros_like(weight)
    order = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    for k in order:
        values[:, k] = nearest(weight[:, k] / steps[:, k])
        error = (weight[:, k] - values[:, k] * steps[:, k]) / inverse[k, k]
        weight -= torch.outer(error, inverse[k])
        inverse = inverse - torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    for k in order:
        slope = (values * steps - weight_RK.double()) @ hessian[:, k]
        values[:, k] = nearest(values[:, k] - slope / (hessian[k, k] * steps[:, k]))
    return scales, values


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_codes_are_those_of_the_definition_column_by_column_in_float64(format: Format, seed: int) -> None:
    weight_RK, hessian_KK = problem(6, 64, seed=seed)
    scales, values = reference(weight_RK, hessian_KK, format, 0.02)
    found = run(weight_RK, hessian_KK, format, damping=0.02, block=24)
    assert torch.equal(found.scales, scales)
    assert torch.equal(e2m1.decode(e2m1.unpack(found.packed)).double(), values)


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 10**6), tokens=st.sampled_from([8, 60, 400]), rows=st.integers(1, 20))
def test_outputs_are_never_further_off_than_with_plain_rounding(
    format: Format, seed: int, tokens: int, rows: int
) -> None:
    weight_RK, hessian_KK = problem(rows, 64, seed=seed, tokens=tokens)
    found = output_error(run(weight_RK, hessian_KK, format), weight_RK, hessian_KK)
    for method in ("max", "sweep"):
        assert found < output_error(plain(weight_RK, format, method=method), weight_RK, hessian_KK)
    weighted = plain(weight_RK, format, importance_K=hessian_KK.diagonal())
    assert found < output_error(weighted, weight_RK, hessian_KK)


@pytest.mark.parametrize("format", FORMATS)
def test_correlated_inputs_let_most_of_the_error_be_made_up_for(format: Format) -> None:
    weight_RK, hessian_KK = problem(64, 128)
    found = output_error(run(weight_RK, hessian_KK, format), weight_RK, hessian_KK)
    assert found < 0.4 * output_error(plain(weight_RK, format), weight_RK, hessian_KK)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("factor", [0.0, 1.0, 1e-12, 1e12])
def test_inputs_that_are_not_correlated_leave_plain_rounding(format: Format, factor: float) -> None:
    weight_RK, _ = problem(8, 64)
    found, expected = run(weight_RK, factor * torch.eye(64), format), plain(weight_RK, format)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(dequantize(found), dequantize(expected))


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_whose_input_is_always_zero_is_rounded_to_nearest(format: Format) -> None:
    weight_RK, hessian_KK = problem(8, 64)
    dead = [0, 5, 40]
    hessian_KK[dead] = 0
    hessian_KK[:, dead] = 0
    found = run(weight_RK, hessian_KK, format)
    steps = block_steps(format, found.scales, divisor_of(weight_RK, format)).repeat_interleave(BLOCK[format], 1)
    expected = e2m1.round_to_values(weight_RK / steps) * steps
    assert torch.equal(dequantize(found)[:, dead], expected[:, dead])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_each_other(format: Format) -> None:
    weight_RK, hessian_KK = problem(8, 64)
    whole, divisor = run(weight_RK, hessian_KK, format), divisor_of(weight_RK, format)
    halves = [gptq(half, hessian_KK, format, divisor=divisor) for half in weight_RK.split(4)]
    assert torch.equal(whole.packed, torch.cat([half.packed for half in halves]))
    assert torch.equal(whole.scales, torch.cat([half.scales for half in halves]))


@pytest.mark.parametrize("format", FORMATS)
def test_neither_size_nor_dtype_nor_order_of_work_changes_a_code(
    format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_RK, hessian_KK = problem(8, 64)
    weight_RK = weight_RK.bfloat16()
    expected = run(weight_RK.float(), hessian_KK, format)
    assert torch.equal(run(weight_RK, hessian_KK, format).packed, expected.packed)
    assert torch.equal(run(weight_RK, 2.0**40 * hessian_KK, format).packed, expected.packed)
    assert torch.equal(run(weight_RK, hessian_KK, format, block=1).packed, expected.packed)
    assert torch.equal(run(2.0**-60 * weight_RK.float(), hessian_KK, format).packed, expected.packed)
    monkeypatch.setattr("mopdctl.fp4.gptq._ELEMENTS", 3 * 64)
    assert torch.equal(run(weight_RK, hessian_KK, format).packed, expected.packed)


@pytest.mark.parametrize("format", FORMATS)
def test_a_hessian_of_fewer_tokens_than_columns_gives_numbers(format: Format) -> None:
    weight_RK, hessian_KK = problem(8, 64, tokens=1)
    assert torch.isfinite(dequantize(run(weight_RK, hessian_KK, format))).all()
    # The more damping, the less is made up for: in the end nothing but the weighted rounding of each column is left.
    errors = [
        output_error(run(weight_RK, hessian_KK, format, damping=damping), weight_RK, hessian_KK)
        for damping in (0.001, 1.0, 1000.0)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.05 * errors[2]


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format: Format) -> None:
    weight_RK, hessian_KK = problem(8, 64)
    weight_RK[:, :32] = 0
    hessian_KK[:32, 32:] = hessian_KK[32:, :32] = 0  # else their codes could make up for errors elsewhere
    found = run(weight_RK, hessian_KK, format)
    assert not magnitudes(found)[:, :32].any()
    assert magnitudes(found)[:, 32:].any()
    nothing = run(torch.zeros(4, 64), hessian_KK, format)
    assert not magnitudes(nothing).any()
    assert torch.equal(nothing.scales, plain(torch.zeros(4, 64), format).scales)


@pytest.mark.parametrize(
    ("hessian_KK", "said"),
    [
        (torch.eye(32), r"\[32, 32\] for 64 columns"),
        (torch.eye(64) * float("nan"), "finite"),
        (torch.eye(64) * float("inf"), "finite"),
    ],
)
def test_a_hessian_that_fits_no_weight_is_refused(hessian_KK: Tensor, said: str) -> None:
    with pytest.raises(InputError, match=said):
        gptq(torch.ones(2, 64), hessian_KK, "mxfp4")


def test_a_weight_or_divisor_that_no_format_takes_is_refused() -> None:
    with pytest.raises(InputError, match="multiple of 16"):
        gptq(torch.ones(2, 24), torch.eye(24), "nvfp4", divisor=1.0)
    with pytest.raises(InputError, match="divisor None"):
        gptq(torch.ones(2, 32), torch.eye(32), "nvfp4")
    with pytest.raises(InputError, match="NaN or infinite"):
        gptq(torch.full((2, 32), float("nan")), torch.eye(32), "mxfp4")
