"""Quantized checkpoints as models: weights dequantized once, inputs quantized on the way where the checkpoint says so.

Reads NVFP4, MXFP4 and FP8 in the compressed-tensors and ModelOpt layouts, without the packages of that name.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import GenerationConfig

from mopdctl.engines.weights import StoredTensors, checkpoint_file, open_tensors, parameter_names, skeleton
from mopdctl.errors import InputError
from mopdctl.fp4.fake import fake_quantize_activations
from mopdctl.fp4.fp8 import dequantize_fp8
from mopdctl.fp4.quantized import Quantized, dequantize

Precision = Literal["nvfp4", "mxfp4", "fp8"]

FORMATS: dict[str, Precision] = {
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "float-quantized": "fp8",
}
"""What a group of compressed-tensors calls its format, to the precision of its weights."""

ALGORITHMS = frozenset({"FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"})
"""What ModelOpt calls those that are read here."""


@dataclass(frozen=True, slots=True)
class StoredModule:
    """A quantized matrix of a checkpoint: the names of the tensors that it is made of."""

    name: str
    precision: Precision
    codes: str
    scales: str
    tensor_scale: str | None
    """Of NVFP4: `weight_global_scale`, which divides, or `weight_scale_2`, which multiplies."""
    input_scale: str | None
    """Of quantized activations: divides or multiplies likewise."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Codes, scales, and those of the other two that there are."""
        return tuple(n for n in (self.codes, self.scales, self.tensor_scale, self.input_scale) if n is not None)


def stored_modules(tensors: StoredTensors) -> dict[str, StoredModule]:
    """The quantized matrices of a checkpoint by name, told from the names and dtypes of its tensors.

    Raises InputError naming a tensor that such a matrix lacks.
    """
    found = {}
    for tensor, place in tensors.places.items():
        name, _, kind = tensor.rpartition(".")
        precision: Precision | None = None
        scale, tensor_scale, input_scale = f"{name}.weight_scale", f"{name}.weight_scale_2", f"{name}.input_scale"
        if kind == "weight_packed":
            tensor_scale, input_scale = f"{name}.weight_global_scale", f"{name}.input_global_scale"
            precision = "nvfp4" if tensor_scale in tensors.places else "mxfp4"
        elif kind == "weight" and place.dtype == torch.uint8:
            precision = "nvfp4"
        elif kind == "weight" and place.dtype == torch.float8_e4m3fn:
            precision = "fp8"
        if precision is None:
            continue
        needed = [scale, tensor_scale] if precision == "nvfp4" else [scale]
        if lost := [other for other in needed if other not in tensors.places]:
            raise InputError(f"model {tensors.path}: {tensor} without {lost[0]}; the checkpoint is incomplete")
        found[name] = StoredModule(
            name,
            precision,
            tensor,
            scale,
            tensor_scale if precision == "nvfp4" else None,
            input_scale if input_scale in tensors.places else None,
        )
    return found


def divisor_of(tensors: StoredTensors, scale: str | None) -> float | None:
    """The divisor g of NVFP4 that a tensor scale stands for; None where there is none."""
    if scale is None:
        return None
    value = tensors.tensor(scale).float().reshape(())
    return float(value if scale.endswith("_global_scale") else value.reciprocal())


def dequantized(tensors: StoredTensors, module: StoredModule, dtype: torch.dtype) -> Tensor:
    """The values [R, K] of a quantized matrix: computed in float32, rounded once to `dtype`."""
    codes, scales = tensors.tensor(module.codes), tensors.tensor(module.scales)
    if module.precision != "fp8":
        divisor = divisor_of(tensors, module.tensor_scale)
        return dequantize(Quantized(module.precision, codes, scales.view(torch.uint8), divisor), dtype)
    if scales.numel() == 1:
        return dequantize_fp8(codes, float(scales), dtype)
    if scales.shape == (len(codes), 1):  # one for each row
        return codes.float().mul_(scales.float()).to(dtype)
    return dequantize_fp8(codes, scales.float(), dtype)


def scheme_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The group of a compressed-tensors configuration that a linear layer belongs to; None if it is ignored.

    A layer's own name comes before its kind, as engines look it up.
    """
    if any(_means(pattern, name) for pattern in config.get("ignore") or []):
        return None
    groups = config["config_groups"].values()
    for group in groups:
        if any(_means(target, name) for target in group["targets"]):
            return group
    return next((group for group in groups if "Linear" in group["targets"]), None)


def _means(pattern: str, name: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else pattern == name


# ------------------------------------------------------------------------------------------------------------- loading


def is_read_here(config: Any) -> bool:
    """Whether a model's configuration is that of a checkpoint that `load_quantized` takes."""
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, dict):
        return False
    if found.get("quant_method") == "modelopt":
        return found.get("quant_algo") in ALGORITHMS
    groups = (found.get("config_groups") or {}).values()
    formats = {group.get("format") or found.get("format") for group in groups if isinstance(group, dict)}
    return found.get("quant_method") == "compressed-tensors" and bool(formats) and formats <= FORMATS.keys()


def load_quantized(path: str, config: Any, *, dtype: torch.dtype) -> Any:
    """A quantized checkpoint as a transformers model on the CPU, its weights in `dtype`.

    Keys and values are kept as they are, whatever the checkpoint says of its cache.

    Raises:
        InputError: the checkpoint is incomplete, or has experts with quantized inputs that run in a way of their own.
    """
    tensors = open_tensors(path)
    modules = stored_modules(tensors)
    plain = deepcopy(config)
    block = plain.quantization_config
    del plain.quantization_config
    parts = {name for module in modules.values() for name in module.tensors}
    names = [name for name in tensors.places if name not in parts and not name.endswith((".k_scale", ".v_scale"))]
    state = {name: tensors.tensor(name) for name in names}
    state |= {f"{name}.weight": dequantized(tensors, module, dtype) for name, module in modules.items()}
    model, found = type(skeleton(path, plain)).from_pretrained(
        None, config=plain, state_dict=state, dtype=dtype, output_loading_info=True
    )
    if wrong := sorted(str(name) for key in ("missing_keys", "mismatched_keys") for name in found[key]):
        raise InputError(f"model {path}: {wrong[0]} is missing or of another shape; the checkpoint is incomplete")
    model.name_or_path = model.config.name_or_path = path
    if checkpoint_file(path, "generation_config.json"):
        model.generation_config = GenerationConfig.from_pretrained(path)
    quantize_inputs(model, {name: _input_rounding(tensors, block, module) for name, module in modules.items()})
    return model


Rounding = Callable[[Tensor], Tensor]


def _input_rounding(tensors: StoredTensors, block: Mapping[str, Any], module: StoredModule) -> Rounding | None:
    """What the inputs of a module go through; None if they stay as they are."""
    if block["quant_method"] == "modelopt":
        if module.input_scale is None:
            return None
        if module.precision == "fp8":
            return partial(_round_fp8, scale=float(tensors.tensor(module.input_scale)))
    elif not (scheme_of(block, module.name) or {}).get("input_activations"):
        return None
    elif module.precision == "fp8":
        return _round_fp8
    if module.precision == "nvfp4" and module.input_scale is None:
        raise InputError(
            f"model {tensors.path}: {module.name} has quantized inputs and no scale for them; quantize it again"
        )
    divisor = divisor_of(tensors, module.input_scale)
    return partial(fake_quantize_activations, format=module.precision, divisor=divisor)


def _round_fp8(inputs: Tensor, scale: float | None = None) -> Tensor:
    """E4M3 with one scale for all, or with that of each token."""
    values = inputs.float()
    scales = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448 if scale is None else torch.tensor(scale)
    rounded = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    return inputs + (rounded.to(inputs.dtype) - inputs).detach()


def quantize_inputs(model: Any, roundings: Mapping[str, Rounding | None]) -> None:
    """From now on the inputs of some modules, by their names in the checkpoint, go through a rounding."""
    chosen = {f"{name}.weight": rounding for name, rounding in roundings.items() if rounding is not None}
    experts: dict[str, dict[tuple[str, int], Rounding]] = {}
    for name, parameter in parameter_names(model, chosen).items():
        path, _, last = parameter.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(_round_first, chosen[name]))
        else:
            number = int(re.findall(r"\.experts\.(\d+)\.", name)[-1])
            experts.setdefault(path, {})[last, number] = chosen[name]
    for path, by_expert in experts.items():
        module = model.get_submodule(path)
        if not hasattr(module, "has_gate") or module.has_bias or module.is_transposed:
            raise InputError(
                f"model {model.name_or_path}: {type(module).__name__} runs its experts in a way of its own, so that "
                "their inputs cannot be quantized here; use the checkpoint with an engine that can (vLLM)"
            )
        module.forward = partial(run_experts, module, partial(_round_expert, by_expert))


def _round_first(rounding: Rounding, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (rounding(args[0]), *args[1:])


def _round_expert(found: Mapping[tuple[str, int], Rounding], key: str, expert: int, inputs_NK: Tensor) -> Tensor:
    return found[key, expert](inputs_NK)


def run_experts(
    module: Any,
    enter: Callable[[str, int, Tensor], Tensor],
    hidden_NH: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What experts without biases compute, one expert at a time, each input handed through `enter` first.

    sum_k weight_k * down_k(act(gate_k x) * (up_k x)),  or down_k(act(up_k x)) where there is no gate
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    total_NH = torch.zeros_like(hidden_NH)
    for expert in range(module.num_experts):
        row, choice = torch.where(top_k_index == expert)
        if not len(row):
            continue
        inner = linear(enter(up, expert, hidden_NH[row]), getattr(module, up)[expert])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        found = linear(enter("down_proj", expert, inner), module.down_proj[expert])
        total_NH.index_add_(0, row, (found * top_k_weights[row, choice, None]).to(total_NH.dtype))
    return total_NH
