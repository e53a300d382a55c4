"""Names, dtypes and configurations: those that compressed-tensors 0.17 and vLLM read, and nothing that they refuse."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file

from mopdctl.engines.fp4 import FORMATS, scheme_of
from mopdctl.files import read_json
from mopdctl.fp4.fp8 import quantize_fp8
from mopdctl.quant.check_config import ARGUMENTS, SCHEME
from mopdctl.quant.layouts import LAYOUTS, compressed_tensors
from mopdctl.quant.moments import Moments
from mopdctl.quant.tensor import fp8_scale, quantize_weight
from mopdctl.quant.write import Stored

Make = Callable[..., Path]

NAME = "model.layers.0.mlp.up_proj"
FP8_E4M3, U8, F32 = torch.float8_e4m3fn, torch.uint8, torch.float32


def dicts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from dicts(item)


@pytest.mark.parametrize(
    ("layout", "precision", "activations", "expected"),
    [
        (
            "compressed-tensors",
            "nvfp4",
            True,
            {
                "weight_packed": (U8, (6, 32)),
                "weight_scale": (FP8_E4M3, (6, 4)),
                "weight_global_scale": (F32, (1,)),
                "input_global_scale": (F32, (1,)),
            },
        ),
        ("compressed-tensors", "mxfp4", True, {"weight_packed": (U8, (6, 32)), "weight_scale": (U8, (6, 2))}),
        ("compressed-tensors", "fp8", True, {"weight": (FP8_E4M3, (6, 64)), "weight_scale": (F32, (1,))}),
        (
            "modelopt",
            "nvfp4",
            True,
            {
                "weight": (U8, (6, 32)),
                "weight_scale": (FP8_E4M3, (6, 4)),
                "weight_scale_2": (F32, ()),
                "input_scale": (F32, ()),
            },
        ),
        (
            "modelopt",
            "fp8",
            True,
            {"weight": (FP8_E4M3, (6, 64)), "weight_scale": (F32, ()), "input_scale": (F32, ())},
        ),
        (
            "modelopt",
            "nvfp4",
            False,
            {"weight": (U8, (6, 32)), "weight_scale": (FP8_E4M3, (6, 4)), "weight_scale_2": (F32, ())},
        ),
    ],
)
def test_tensors_have_the_names_dtypes_and_shapes_of_the_layout(
    layout: Any, precision: Any, activations: bool, expected: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    # Model-Optimizer #2038: scales of half the size, and names that engines do not know
    weight = torch.randn(6, 64)
    stored = LAYOUTS[layout].stored(NAME, (6, 64), precision, activations=activations)
    made = quantize_weight(weight, precision, float(weight.abs().max()))
    encoded = LAYOUTS[layout].encode(NAME, made, 3.0 if activations else None)
    assert stored == {f"{NAME}.{last}": Stored(*found) for last, found in expected.items()}
    assert {name: Stored(tensor.dtype, tuple(tensor.shape)) for name, tensor in encoded.items()} == stored


def test_modelopt_stores_the_reciprocals_of_compressed_tensors_and_the_same_codes() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    amax = float(weight.abs().max())
    one = LAYOUTS["compressed-tensors"].encode(NAME, quantize_weight(weight, "nvfp4", amax), 3.0)
    made = quantize_weight(weight, "nvfp4", amax, reciprocal=True)
    other = LAYOUTS["modelopt"].encode(NAME, made, 3.0)
    assert float(other[f"{NAME}.weight_scale_2"]) == pytest.approx(amax / 2688, rel=1e-6)
    assert float(one[f"{NAME}.weight_global_scale"]) == pytest.approx(2688 / amax, rel=1e-6)
    assert float(other[f"{NAME}.input_scale"]) == pytest.approx(3 / 2688, rel=1e-6)
    assert float(one[f"{NAME}.input_global_scale"]) == pytest.approx(2688 / 3, rel=1e-6)
    same = one[f"{NAME}.weight_packed"] == other[f"{NAME}.weight"]
    assert same.float().mean() > 0.995  # near-ties may fall either way
    # what is read back of the reciprocal is what the codes were chosen for
    assert float(other[f"{NAME}.weight_scale_2"].reciprocal()) == made.divisor  # type: ignore[union-attr]


@pytest.mark.parametrize("amax", [0.0, 1e-30, 0.1234567, 448.0, 3.3e38])
def test_fp8_scales_are_the_same_number_in_bfloat16_and_saturate_nothing(amax: float) -> None:
    scale = fp8_scale(amax)
    assert scale > 0
    assert float(torch.tensor(scale).bfloat16()) == scale
    assert amax / scale <= 448.0000001
    if amax > 1e-30:
        assert scale <= amax / 448 * (1 + 2**-7)


def test_fp8_beside_the_scale_of_a_group_is_as_of_one_matrix() -> None:
    weight = torch.randn(8, 32)
    made = quantize_weight(weight, "fp8", 448.0)
    codes, scale = quantize_fp8(torch.cat([weight, torch.full((1, 32), 448.0)]))
    assert made.scale == scale == 1.0  # type: ignore[union-attr]
    assert torch.equal(made.codes_RK.view(U8), codes[:8].view(U8))  # type: ignore[union-attr]


def test_an_expert_that_no_token_reached_gets_a_scale_of_its_inputs() -> None:
    # vllm #45212, Model-Optimizer #2438: no scale, or the reciprocal of zero
    unreached = Moments(hessian=False)
    weight = torch.randn(6, 64)
    made = quantize_weight(weight, "nvfp4", 3.0, method="gptq", inputs=unreached)
    for layout in LAYOUTS.values():
        found = [t for name, t in layout.encode(NAME, made, unreached.input_amax).items() if "input" in name]
        assert len(found) == 1
        assert bool(found[0].isfinite().all())
        assert bool((found[0] > 0).all())


# ------------------------------------------------------------------------------------------------------- configuration


def test_the_known_keys_are_those_of_the_pinned_package() -> None:
    assert QuantizationArgs.model_fields.keys() == ARGUMENTS
    assert QuantizationScheme.model_fields.keys() == SCHEME


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("precisions", [["nvfp4"], ["mxfp4"], ["fp8"], ["nvfp4", "fp8"], ["nvfp4", "mxfp4", "fp8"]])
def test_the_pinned_package_takes_the_configuration(precisions: list[Any], activations: bool) -> None:
    quantized = {f"model.layers.{n}.mlp.up_proj": precision for n, precision in enumerate(precisions)}
    block = compressed_tensors.quantization_config(quantized, ["lm_head"], activations=activations, kv_cache=True)
    parsed = QuantizationConfig.model_validate(json.loads(json.dumps(block)))
    assert parsed.format == (
        block["format"] if len(precisions) > 1 else next(iter(block["config_groups"].values()))["format"]
    )
    assert (block["format"] == "mixed-precision") == (len(precisions) > 1)
    for group in parsed.config_groups.values():
        assert isinstance(group, QuantizationScheme)
        assert (group.input_activations is not None) == activations
    for name, precision in quantized.items():
        scheme = scheme_of(block, name)
        assert scheme is not None
        assert FORMATS[scheme["format"]] == precision
    assert scheme_of(block, "lm_head") is None


def test_provenance_lies_beside_the_configuration(checkpoint: Make, quantized: Callable[..., Path]) -> None:
    # llm-compressor: files by other methods have the same configuration, and readers refuse further keys in it
    folders = {method: quantized(checkpoint("llama"), method, method=method) for method in ("max", "46")}
    blocks = [read_json(folder / "config.json")["quantization_config"] for folder in folders.values()]
    assert blocks[0] == blocks[1]
    assert all(found.keys() <= ARGUMENTS for group in dicts(blocks[0]) if "num_bits" in group for found in [group])
    for method, folder in folders.items():
        told = read_json(folder / "mopdctl_quantization.json")
        assert told["settings"]["method"] == method
        assert len(told["source"]) == 32
        assert told["versions"]["mopdctl"]
        assert len(told["modules"]) == 14
        assert all(0 < module["relative_mse"] < 0.02 for module in told["modules"].values())


def test_ignored_experts_are_named_as_experts_and_as_their_parent(
    checkpoint: Make, quantized: Callable[..., Path]
) -> None:
    # vllm #27608: names of experts alone did not reach the fused module
    folder = quantized(checkpoint("qwen3_moe"), ignore=["*.layers.1.mlp.experts.*"], method="max")
    ignore = read_json(folder / "config.json")["quantization_config"]["ignore"]
    means = lambda name: [p for p in ignore if (re.match(p[3:], name) if p.startswith("re:") else p == name)]  # noqa: E731
    for name in ("experts", "experts.0.gate_proj", "experts.3.down_proj"):
        assert means(f"model.layers.1.mlp.{name}"), name
        assert not means(f"model.layers.0.mlp.{name}"), name
    assert means("model.layers.1.mlp.gate")


def test_experts_are_targets_by_names_that_models_without_gates_do_not_have(
    checkpoint: Make, quantized: Callable[..., Path]
) -> None:
    rules = [{"match": "*.self_attn.*", "precision": "fp8"}]
    folder = quantized(checkpoint("qwen3_moe"), rules=rules, method="max")
    block = read_json(folder / "config.json")["quantization_config"]
    for name in ("0.gate_proj", "0.up_proj", "0.down_proj"):  # what vLLM asks for, of every model
        scheme = scheme_of(block, f"model.layers.0.mlp.experts.{name}")
        assert scheme is not None
        assert FORMATS[scheme["format"]] == "nvfp4"


@pytest.mark.parametrize(("layout", "dtype"), [("compressed-tensors", torch.bfloat16), ("modelopt", torch.float32)])
def test_scales_of_keys_and_values_are_where_engines_look_for_them(
    layout: str, dtype: torch.dtype, checkpoint: Make, quantized: Callable[..., Path]
) -> None:
    # vllm #37214, #38303: KeyError for k_scale under another name
    folder = quantized(checkpoint("llama"), kv_cache="fp8", layout=layout, method="max")
    found = {n: t for n, t in load_file(folder / "model.safetensors").items() if n.endswith(("k_scale", "v_scale"))}
    middle = {"compressed-tensors": ("", ""), "modelopt": ("k_proj.", "v_proj.")}[layout]
    names = {f"model.layers.{n}.self_attn.{m}{w}_scale" for n in range(2) for m, w in zip(middle, "kv", strict=True)}
    assert found.keys() == names
    assert all(tensor.dtype == dtype and float(tensor) == 1 for tensor in found.values())
    assert read_json(folder / "config.json")["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


def test_modelopt_says_it_in_both_of_its_files(checkpoint: Make, quantized: Callable[..., Path]) -> None:
    folder = quantized(checkpoint("qwen3_moe"), layout="modelopt", ignore=["*.layers.1.mlp.experts.*"], method="max")
    block = read_json(folder / "config.json")["quantization_config"]
    older = read_json(folder / "hf_quant_config.json")["quantization"]
    assert (block["quant_method"], block["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert older["quant_algo"] == "W4A16_NVFP4"
    assert older["exclude_modules"] == block["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts*"} <= set(block["ignore"])
