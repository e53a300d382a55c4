"""The layout of NVIDIA ModelOpt's exports, as vLLM reads it. Engines load no MXFP4 in it.

    NVFP4   weight U8 [R, K/2]      weight_scale F8_E4M3 [R, K/16]      weight_scale_2 F32 ()
            with quantized activations  input_scale F32 ()              value = code * weight_scale * weight_scale_2
    FP8     weight F8_E4M3 [R, K]   weight_scale F32 ()   input_scale F32 ()            value = code * weight_scale
    KV      self_attn.k_proj.k_scale, self_attn.v_proj.v_scale F32 ()

All scales are multipliers, the reciprocals of what compressed-tensors stores.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mopdctl import __version__
from mopdctl.config.quant import Precision
from mopdctl.fp4 import nvfp4
from mopdctl.quant.targets import experts_of
from mopdctl.quant.tensor import Fp8, QuantizedWeight, fp8_scale
from mopdctl.quant.write import Stored


def stored(name: str, shape: tuple[int, int], precision: Precision, *, activations: bool) -> dict[str, Stored]:
    """See `Layout.stored`."""
    rows, columns = shape
    scalar = Stored(torch.float32, ())
    if precision == "fp8":
        found = {f"{name}.weight": Stored(torch.float8_e4m3fn, shape), f"{name}.weight_scale": scalar}
    else:
        found = {
            f"{name}.weight": Stored(torch.uint8, (rows, columns // 2)),
            f"{name}.weight_scale": Stored(torch.float8_e4m3fn, (rows, columns // 16)),
            f"{name}.weight_scale_2": scalar,
        }
    return found | ({f"{name}.input_scale": scalar} if activations else {})


def encode(name: str, weight: QuantizedWeight, input_amax: float | None) -> dict[str, Tensor]:
    """See `Layout.encode`."""
    if isinstance(weight, Fp8):
        found = {f"{name}.weight": weight.codes_RK, f"{name}.weight_scale": torch.tensor(weight.scale)}
        if input_amax is not None:
            found[f"{name}.input_scale"] = torch.tensor(fp8_scale(input_amax))
        return found
    assert weight.divisor is not None
    found = {
        f"{name}.weight": weight.packed,
        f"{name}.weight_scale": weight.scales.view(torch.float8_e4m3fn),
        f"{name}.weight_scale_2": torch.tensor(weight.divisor).reciprocal(),
    }
    if input_amax is not None:
        found[f"{name}.input_scale"] = torch.tensor(nvfp4.divisor(input_amax, "max")).reciprocal()
    return found


def cache_scales(attention: Iterable[str]) -> dict[str, Tensor]:
    """See `Layout.cache_scales`."""
    names = [f"{module}.{which}_proj.{which}_scale" for module in attention for which in ("k", "v")]
    return {name: torch.tensor(1.0) for name in names}


def quantization_config(
    quantized: Mapping[str, Precision], kept: Iterable[str], *, activations: bool, kv_cache: bool
) -> dict[str, Any]:
    """See `Layout.quantization_config`."""
    algorithms: dict[Precision, str] = {"nvfp4": "NVFP4" if activations else "W4A16_NVFP4", "fp8": "FP8"}
    precisions = sorted(set(quantized.values()))
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": algorithms[precisions[0]] if len(precisions) == 1 else "MIXED_PRECISION",
        "ignore": _patterns(kept),
        "producer": {"name": "mopdctl", "version": __version__},
    }
    if len(precisions) == 1:
        group = {"targets": ["Linear"], "weights": _values(precisions[0])}
        if activations:
            group["input_activations"] = _values(precisions[0])
        config["config_groups"] = {"group_0": group}
    else:
        config["quantized_layers"] = {
            name: {"quant_algo": algorithms[precision]} | ({"group_size": 16} if precision == "nvfp4" else {})
            for name, precision in quantized.items()
        }
    if "nvfp4" in precisions:
        config["group_size"] = 16
    return config | ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if kv_cache else {})


def documents(quantization_config: Mapping[str, Any]) -> dict[str, Any]:
    """The older form of the same configuration, in a file of its own, which engines look for as well."""
    older = {
        "quant_algo": quantization_config["quant_algo"],
        "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in quantization_config else None,
        "group_size": quantization_config.get("group_size"),
        "exclude_modules": quantization_config["ignore"],
    }
    if "quantized_layers" in quantization_config:
        older["quantized_layers"] = quantization_config["quantized_layers"]
    return {"hf_quant_config.json": {"producer": quantization_config["producer"], "quantization": older}}


def _values(precision: Precision) -> Any:
    if precision == "fp8":
        return {"dynamic": False, "num_bits": 8, "type": "float"}
    return {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def _patterns(names: Iterable[str]) -> list[str]:
    """Names as wildcards: all experts of a layer as one, since engines fuse them."""
    return list(dict.fromkeys(f"{experts}*" if (experts := experts_of(name)) else name for name in names))
