"""The compressed-tensors layout, as version 0.17 reads it: the one that vLLM pins and that transformers loads.

NVFP4   weight_packed U8 [R, K/2]   weight_scale F8_E4M3 [R, K/16]   weight_global_scale F32 [1], the divisor
with quantized activations  input_global_scale F32 [1]       value = code * weight_scale / weight_global_scale
MXFP4   weight_packed U8 [R, K/2]   weight_scale U8 [R, K/32]        value = code * 2^(weight_scale - 127)
FP8     weight F8_E4M3 [R, K]       weight_scale F32 [1]             value = code * weight_scale
KV      self_attn.k_scale, self_attn.v_scale BF16 [1]
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mopdctl.config.quant import Precision
from mopdctl.fp4 import nvfp4
from mopdctl.quant.targets import exactly, experts_of
from mopdctl.quant.tensor import Fp8, QuantizedWeight
from mopdctl.quant.write import Stored

FORMATS: dict[Precision, str] = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "fp8": "float-quantized",
}
"""Precision to what `format` says."""


def stored(name: str, shape: tuple[int, int], precision: Precision, *, activations: bool) -> dict[str, Stored]:
    """See `Layout.stored`. Only NVFP4 has a scale of inputs; engines take the others at run time."""
    rows, columns = shape
    if precision == "fp8":
        return {
            f"{name}.weight": Stored(torch.float8_e4m3fn, shape),
            f"{name}.weight_scale": Stored(torch.float32, (1,)),
        }
    found = {f"{name}.weight_packed": Stored(torch.uint8, (rows, columns // 2))}
    if precision == "mxfp4":
        return found | {f"{name}.weight_scale": Stored(torch.uint8, (rows, columns // 32))}
    found |= {
        f"{name}.weight_scale": Stored(torch.float8_e4m3fn, (rows, columns // 16)),
        f"{name}.weight_global_scale": Stored(torch.float32, (1,)),
    }
    return found | ({f"{name}.input_global_scale": Stored(torch.float32, (1,))} if activations else {})


def encode(name: str, weight: QuantizedWeight, input_amax: float | None) -> dict[str, Tensor]:
    """See `Layout.encode`."""
    if isinstance(weight, Fp8):
        return {f"{name}.weight": weight.codes_RK, f"{name}.weight_scale": torch.tensor([weight.scale])}
    found = {f"{name}.weight_packed": weight.packed}
    if weight.format == "mxfp4":
        return found | {f"{name}.weight_scale": weight.scales}
    assert weight.divisor is not None
    found |= {
        f"{name}.weight_scale": weight.scales.view(torch.float8_e4m3fn),
        f"{name}.weight_global_scale": torch.tensor([weight.divisor]),
    }
    if input_amax is None:
        return found
    return found | {f"{name}.input_global_scale": torch.tensor([nvfp4.divisor(input_amax, "max")])}


def cache_scales(attention: Iterable[str]) -> dict[str, Tensor]:
    """See `Layout.cache_scales`."""
    names = [f"{module}.{which}_scale" for module in attention for which in ("k", "v")]
    return {name: torch.ones(1, dtype=torch.bfloat16) for name in names}


def quantization_config(
    quantized: Mapping[str, Precision], kept: Iterable[str], *, activations: bool, kv_cache: bool
) -> dict[str, Any]:
    """See `Layout.quantization_config`."""
    precisions = sorted(set(quantized.values()))
    groups = {}
    for number, precision in enumerate(precisions):
        chosen = [name for name, found in quantized.items() if found == precision]
        groups[f"group_{number}"] = {
            # One precision is that of every linear layer but the ignored ones; several need names.
            "targets": ["Linear"] if len(precisions) == 1 else _patterns(chosen),
            "format": FORMATS[precision],
            "weights": _weights(precision),
            "input_activations": _input_activations(precision) if activations else None,
            "output_activations": None,
        }
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[precisions[0]] if len(precisions) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _patterns(kept, parents=True),
        "kv_cache_scheme": cache if kv_cache else None,
    }


def documents(quantization_config: Mapping[str, Any]) -> dict[str, Any]:
    """None: all is in config.json."""
    return {}


def _weights(precision: Precision) -> dict[str, Any]:
    if precision == "fp8":
        return {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    if precision == "mxfp4":
        return {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        }
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }


def _input_activations(precision: Precision) -> dict[str, Any]:
    if precision == "fp8":
        return {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    # NVFP4: block scales at run time, the tensor scale from the file.
    return _weights(precision) | {"dynamic": "local" if precision == "nvfp4" else True}


def _patterns(names: Iterable[str], *, parents: bool = False) -> list[str]:
    """Names as `targets` and `ignore` take them: experts as one pattern a layer, since engines fuse all of a layer.

    Engines ask for each expert by names that a model without gates does not have, or for the module that holds them.
    """
    found: dict[str, None] = {}
    for name in names:
        if (experts := experts_of(name)) is None:
            found[name] = None
            continue
        found[f"re:{exactly(experts)}\\.\\d+\\..*"] = None
        if parents:
            found[f"re:{exactly(experts)}$"] = None
    return list(found)
