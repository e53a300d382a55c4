"""Against bytes that compressed-tensors and ModelOpt wrote, where theirs are right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import e2m1, mxfp4, nvfp4
from mopdctl.fp4.quantized import Format, Quantized, block_steps, decode_e4m3, dequantize, round_with

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden" / "fp4" / "vectors.json").read_text(encoding="utf-8")
)["cases"]

EXACT = ["gauss", "gauss_bf16", "ties_scale1", "zero_blocks", "fused_q", "fused_k"]
NEAR = ["tiny", "huge", "mx_exponent_boundaries", *EXACT]
FINITE = [name for name in CASES if name not in ("has_inf", "has_nan")]
FUSED = ["fused_q", "fused_k"]


def floats(words: str | list[str]) -> Tensor:
    rows = [words] if isinstance(words, str) else words
    bits = [[int.from_bytes(bytes.fromhex(row[i : i + 8]), signed=True) for i in range(0, len(row), 8)] for row in rows]
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def raw(rows: list[str]) -> Tensor:
    return torch.tensor([list(bytes.fromhex(row)) for row in rows], dtype=torch.uint8)


def weight_of(name: str) -> Tensor:
    return floats(CASES[name]["input"])


def library(name: str, of: str) -> dict[str, Tensor]:
    fields = CASES[name]["libraries"][of]
    return {key: (raw if key in ("packed", "scale") else floats)(value) for key, value in fields.items()}


def quantize(name: str, method: nvfp4.Method = "max") -> Quantized:
    weight = weight_of(name)
    return nvfp4.quantize(weight, nvfp4.divisor(float(weight.abs().max()), method), method=method)


def amax_of(name: str, block: int) -> Tensor:
    return weight_of(name).abs().unflatten(-1, (-1, block)).amax(-1)


def same_but_at_ties(found: Quantized, packed: Tensor, weight: Tensor) -> None:
    """Equal magnitudes, but where a value lies half way between two within 1e-6."""
    codes, theirs = e2m1.unpack(found.packed) & 7, e2m1.unpack(packed) & 7
    block = weight.shape[1] // found.scales.shape[1]
    steps = block_steps(found.format, found.scales, found.divisor).double().repeat_interleave(block, 1)
    scaled = (weight.double().abs() / steps)[codes != theirs]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    assert ((scaled.unsqueeze(-1) - ties).abs() <= 1e-6 * ties).any(-1).all()


# --------------------------------------------------------------------------------------------------------- NVFP4


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("of", ["ct_nvfp4a16", "modelopt_nvfp4"])
def test_codes_are_theirs_to_the_byte(name: str, of: str) -> None:
    found, theirs = quantize(name), library(name, of)
    assert torch.equal(found.packed, theirs["packed"])
    ours = amax_of(name, 16) > 0  # a block of zeros has a scale by our own rule
    assert torch.equal(found.scales[ours], theirs["scale"][ours])
    assert (found.scales[~ours] == 0x01).all()
    if of == "ct_nvfp4a16":
        assert found.divisor == theirs["global_scale"].item()
    else:
        assert 1 / found.divisor == pytest.approx(theirs["weight_scale_2"].item(), rel=1e-7)


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("of", ["ct_nvfp4a16", "modelopt_nvfp4"])
def test_codes_are_theirs_but_at_ties(name: str, of: str) -> None:
    same_but_at_ties(quantize(name), library(name, of)["packed"], weight_of(name))


def test_where_scales_underflow_codes_are_those_of_modelopt() -> None:
    # compressed-tensors makes 0.125 of what rounds to 0, ModelOpt the smallest scale, as we do
    found, theirs = quantize("scale_underflow"), library("scale_underflow", "modelopt_nvfp4")
    assert torch.equal(found.packed, theirs["packed"])
    assert torch.equal(found.scales, theirs["scale"])
    assert (found.scales == 0x01).sum() == 15
    assert (library("scale_underflow", "ct_nvfp4a16")["packed"] != found.packed).any()


# llm-compressor #1869: shards of one layer with a divisor each
@pytest.mark.parametrize("name", FUSED)
def test_matrices_that_are_fused_share_the_divisor_of_the_largest(name: str) -> None:
    amax = max(float(weight_of(each).abs().max()) for each in FUSED)
    found = nvfp4.quantize(weight_of(name), nvfp4.divisor(amax, "max"), method="max")
    theirs, modelopt = library(name, "ct_nvfp4a16_fused"), library(name, "modelopt_nvfp4_fused")
    assert found.divisor == theirs["global_scale"].item()
    for each in (theirs, modelopt):
        assert torch.equal(found.packed, each["packed"])
        assert torch.equal(found.scales, each["scale"])


# modular #6600: the divisor taken for a multiplier
@pytest.mark.parametrize("name", ["gauss", "fused_q"])
def test_values_are_theirs_to_the_bit(name: str) -> None:
    theirs = library(name, "ct_nvfp4a16")
    read = Quantized("nvfp4", theirs["packed"], theirs["scale"], theirs["global_scale"].item())
    assert torch.equal(dequantize(read), theirs["deq_f32"])


def test_zeros_follow_our_rule_and_not_theirs() -> None:
    found = quantize("zeros")
    assert found.divisor == 1.0
    assert (found.scales == 0x01).all()
    assert (found.packed == 0).all()
    assert library("zeros", "modelopt_nvfp4")["weight_scale_2"].item() == 0
    assert decode_e4m3(library("zeros", "modelopt_nvfp4")["scale"]).isnan().all()


def test_subnormal_weights_keep_what_others_lose() -> None:
    weight = weight_of("subnormal").double()
    found = quantize("subnormal")
    off = (dequantize(found).double() - weight).square().sum() / weight.square().sum()
    assert off < 0.03
    theirs = library("subnormal", "ct_nvfp4a16")
    read = Quantized("nvfp4", theirs["packed"], theirs["scale"], theirs["global_scale"].item())
    assert (dequantize(read) == 0).all()


@pytest.mark.parametrize("name", ["gauss", "gauss_bf16", "zero_blocks", *FUSED])
def test_four_over_six_is_that_of_modelopt(name: str) -> None:
    found, theirs = quantize(name, "46"), library(name, "modelopt_46")
    assert torch.equal(found.packed & 0x77, theirs["packed"] & 0x77)
    ours = amax_of(name, 16) > 0
    assert torch.equal(found.scales[ours], theirs["scale"][ours])


@pytest.mark.parametrize("name", ["gauss", "gauss_bf16", "zero_blocks", "scale_underflow", "ties_scale1", *FUSED])
def test_the_sweep_finds_what_one_over_all_126_scales_finds(name: str) -> None:
    found, theirs = quantize(name, "sweep"), library(name, "modelopt_sweep")
    assert torch.equal(found.scales, theirs["scale"])
    same_but_at_ties(found, theirs["packed"], weight_of(name))


# ModelOpt's sweep: squared errors of weights around 1e30 and 1e-30 are beyond float32, and scale number 0 wins
@pytest.mark.parametrize("name", ["huge", "tiny"])
def test_the_sweep_finds_good_scales_where_squares_leave_float32(name: str) -> None:
    weight, theirs = weight_of(name).double(), library(name, "modelopt_sweep")
    read = Quantized("nvfp4", theirs["packed"], theirs["scale"], 1 / theirs["weight_scale_2"].item())

    def error(quantized: Quantized) -> float:
        return float((dequantize(quantized).double() - weight).square().sum() / weight.square().sum())

    assert error(read) > 0.99
    assert error(quantize(name, "sweep")) < error(quantize(name, "46")) < error(quantize(name, "max")) < 0.01


# --------------------------------------------------------------------------------------------------------- MXFP4


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("rule", ["even", "floor", "rceil", "ceil"])
def test_exponents_are_those_of_exact_arithmetic(name: str, rule: mxfp4.Rule) -> None:
    assert torch.equal(
        mxfp4.choose_scales(weight_of(name), rule=rule), raw(CASES[name]["libraries"]["ocp_exponents"][rule])
    )


@pytest.mark.parametrize("name", FINITE)
def test_mxfp4_is_theirs_to_the_byte(name: str) -> None:
    found, theirs = mxfp4.quantize(weight_of(name)), library(name, "ct_mxfp4a16")
    sane = amax_of(name, 32) < 1.75 * 2.0**127  # theirs breaks above
    assert torch.equal(found.scales[sane], theirs["scale"][sane])
    codes = [packed.unflatten(-1, (-1, 16))[sane] for packed in (found.packed, theirs["packed"])]
    assert torch.equal(*codes)
    assert sane.sum() >= sane.numel() - 1


# --------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("name", ["has_inf", "has_nan"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_what_is_not_finite_is_refused(name: str, format: Format) -> None:
    weight = weight_of(name)
    with pytest.raises(InputError, match="NaN or infinite weights"):
        nvfp4.quantize(weight, 1.0) if format == "nvfp4" else mxfp4.quantize(weight)
    with pytest.raises(InputError, match="no scale fits"):
        nvfp4.divisor(float(weight.abs().max()), "max")


@pytest.mark.parametrize("name", FINITE)
def test_rounding_without_codes_gives_the_same_values(name: str) -> None:
    weight = weight_of(name)
    for found in (quantize(name), mxfp4.quantize(weight)):
        assert torch.equal(round_with(found.format, weight, found.scales, found.divisor), dequantize(found))
