"""Which matrices of a checkpoint are quantized, to what, and why the others are not."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mopdctl.config.quant import Precision, QuantConfig
from mopdctl.engines.fusing import SENSITIVE, fused_groups, routes, unknown_siblings
from mopdctl.engines.weights import StoredTensors, parameter_names, read_config, skeleton
from mopdctl.errors import InputError
from mopdctl.quant.targets import experts_of, matching

_PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16}

HEAD = "the output head"


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix `<name>.weight` of the checkpoint."""

    name: str
    shape: tuple[int, int]
    precision: Precision
    kept: str
    """Why it stays as it is; empty if it is quantized."""
    fixed: bool
    """Nothing but its full name in a rule (the output head), or nothing at all, could have it quantized."""
    group: tuple[str, ...]
    """The modules that an engine fuses with it, itself included."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of every tensor of a checkpoint."""

    tensors: StoredTensors
    modules: dict[str, Module]
    """All matrices, in the order of the checkpoint."""
    tied: dict[str, str]
    """Tensors that are there a second time, each to the name under which it is kept."""
    absent: tuple[str, ...]
    """Linear layers of the model that have no matrix of their own in the checkpoint, as a tied output head."""
    fused_experts: tuple[str, ...]
    """Modules whose experts lie in one tensor; such are not quantized."""
    attention: tuple[str, ...]
    """Modules with keys and values."""

    @property
    def quantized(self) -> dict[str, Module]:
        """The modules that do not stay as they are."""
        return {name: module for name, module in self.modules.items() if module.precision != "bf16"}

    @property
    def kept(self) -> list[str]:
        """Names to ignore: modules with a matrix that stays, linear layers without one, and experts in one tensor."""
        matrices = [name for name, module in self.modules.items() if module.precision == "bf16"]
        return [*matrices, *self.absent, *(f"{experts}.0.weight" for experts in self.fused_experts)]

    @property
    def copied(self) -> list[str]:
        """Tensors that are carried over as they are."""
        quantized = self.quantized
        return [n for n in self.tensors.places if n not in self.tied and n.removesuffix(".weight") not in quantized]


def make_plan(config: QuantConfig, tensors: StoredTensors) -> Plan:
    """Decides for each matrix of a checkpoint. Reads no weights.

    Raises:
        InputError: the checkpoint is quantized already, has nothing to quantize, or a pattern matches nothing; one
            fused group or the experts of one layer would get several precisions; siblings are of a kind that is not
            known; a shape does not fall into blocks.
    """
    source = read_config(tensors.path)
    check_not_quantized(source, tensors)
    model = skeleton(tensors.path, source)
    parameters = parameter_names(model, tensors.places)
    tied = _tied(model, parameters)
    modules = _modules(model, tensors, parameters, tied, config)
    with_matrix = {parameters.get(f"{name}.weight") for name in modules}
    linear = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    absent = tuple(name for name in linear if f"{name}.weight" not in with_matrix)
    modules = _decided(modules, absent, config)
    if not any(module.precision != "bf16" for module in modules.values()):
        raise InputError(f"model {tensors.path}: nothing is left to quantize; see the patterns in `ignore` and `rules`")
    parents = {name.rpartition(".")[0] for name in modules}
    plan = Plan(
        tensors,
        modules,
        tied,
        absent,
        tuple(dict.fromkeys(n.rpartition(".")[0] for n in tensors.places if _fused_experts(n, tensors))),
        tuple(sorted(p for p in parents if f"{p}.k_proj" in modules and f"{p}.v_proj" in modules)),
    )
    _check(plan, config)
    return plan


def check_not_quantized(config: Any, tensors: StoredTensors) -> None:
    """Refuses a checkpoint whose weights are quantized, by its configuration or by what its tensors are.

    Some conversions leave scales beside the weights and say nothing in the configuration.
    """
    advice = "quantize the checkpoint that it was made of"
    if getattr(config, "quantization_config", None):
        raise InputError(f"model {tensors.path}: its weights are quantized already; {advice}")
    for name, place in tensors.places.items():
        if len(place.shape) > 1 and place.dtype not in {*_PLAIN, torch.bool, torch.int64}:
            raise InputError(f"model {tensors.path}: {name} holds {place.dtype}, so that it is quantized; {advice}")


def _tied(model: Any, parameters: Mapping[str, str]) -> dict[str, str]:
    """Tensors under whose name another one is there again, to that one's name."""
    names = {parameter: name for name, parameter in parameters.items()}
    aliases = dict(model.all_tied_weights_keys)
    return {names[a]: names[b] for a, b in aliases.items() if a in names and b in names}


def _modules(
    model: Any,
    tensors: StoredTensors,
    parameters: Mapping[str, str],
    tied: Mapping[str, str],
    config: QuantConfig,
) -> dict[str, Module]:
    """All matrices, those that can be quantized with the default precision."""
    found: dict[str, Module] = {}
    for tensor, place in tensors.places.items():
        name = tensor.removesuffix(".weight")
        if len(place.shape) == 2 and name != tensor and tensor not in tied and place.dtype in _PLAIN:
            why = _kept(model, name, parameters.get(tensor))
            shape = (place.shape[0], place.shape[1])
            found[name] = Module(name, shape, "bf16" if why else config.format, why, bool(why), (name,))
    columns = {name: module.shape[1] for name, module in found.items() if not module.fixed}
    groups = fused_groups(columns, config.fused)
    return {name: replace(module, group=groups.get(name, (name,))) for name, module in found.items()}


def _kept(model: Any, name: str, parameter: str | None) -> str:
    """Why a matrix is not quantized unless told to; empty if it is."""
    if re.match(r"(.*\.)?mtp\.", name):
        return "multi-token prediction"
    if parameter is None:
        return "not of the model that transformers knows"
    path, _, _ = parameter.rpartition(".")
    module = model.get_submodule(path)
    if module is model.get_output_embeddings():
        return HEAD
    if isinstance(module, nn.Linear):
        if SENSITIVE.match(name):
            return "sensitive"
        return "router" if routes(model.get_submodule(path.rpartition(".")[0]), module) else ""
    if experts_of(f"{name}.") and model.get_parameter(parameter).ndim == 3:
        return ""
    return type(module).__name__


def _decided(modules: dict[str, Module], absent: tuple[str, ...], config: QuantConfig) -> dict[str, Module]:
    """The modules with the precisions that `ignore` and `rules` give them."""
    names = [*modules, *absent]
    decided: dict[str, Module] = {}
    for pattern in config.ignore:
        for name in matching(pattern, names) & modules.keys():
            decided.setdefault(name, replace(modules[name], precision="bf16", kept=f"ignored by {pattern}"))
    for rule in config.rules:
        found = matching(rule.match, names)
        free = {name for name in found & modules.keys() if _may_change(modules[name], rule.match)}
        if rule.precision != "bf16" and not free:
            name = sorted(found)[0]
            why = modules[name].kept if name in modules else "tied to another one, which no engine reads quantized"
            raise InputError(f"rule {rule.match!r}: nothing that it matches can be quantized ({name}: {why})")
        for name in free:
            kept = f"rule {rule.match}" if rule.precision == "bf16" else ""
            decided.setdefault(name, replace(modules[name], precision=rule.precision, kept=kept))
    return {name: decided.get(name, module) for name, module in modules.items()}


def _may_change(module: Module, pattern: str) -> bool:
    return not module.fixed or (module.kept == HEAD and module.name == pattern)


def _check(plan: Plan, config: QuantConfig) -> None:
    scaled = [name for name, module in plan.quantized.items() if module.precision in ("nvfp4", "fp8")]
    parents = {name.rpartition(".")[0] for name in scaled}
    free = {name: m.shape[1] for name, m in plan.modules.items() if not m.fixed or m.precision != "bf16"}
    siblings = unknown_siblings({n: k for n, k in free.items() if n.rpartition(".")[0] in parents}, config.fused)
    if siblings:
        lasts = ", ".join(name.rpartition(".")[2] for name in siblings)
        raise InputError(
            f"{siblings[0].rpartition('.')[0]}: {lasts} may read one input, and an engine that fuses them keeps one "
            f"scale; say so in a recipe (`fused: [[{lasts}]]`, which is safe if they are not) or leave them as they "
            "are (--ignore)"
        )
    layers: dict[str, list[str]] = {}
    for name, module in plan.modules.items():
        if experts := experts_of(name):
            layers.setdefault(experts, []).append(name)
        _check_alike(plan, module.group, "an engine fuses them into one")
        block = {"nvfp4": 16, "mxfp4": 32}.get(module.precision, 1)
        if module.shape[1] % block:
            raise InputError(
                f"{name}: {module.shape[1]} columns are no multiple of {block}, the block of {module.precision}; leave "
                f"it as it is (--ignore {name})"
            )
    for experts, names in layers.items():
        _check_alike(plan, names, f"an engine runs all of {experts} at once")


def _check_alike(plan: Plan, names: list[str] | tuple[str, ...], why: str) -> None:
    counts = Counter(plan.modules[name].precision for name in names)
    if len(counts) > 1:
        examples = {plan.modules[name].precision: name for name in names}
        said = ", ".join(f"{name} {precision}" for precision, name in sorted(examples.items()))
        raise InputError(f"{said}: {why}, so that they need one precision; match all of them, or none")


def _fused_experts(tensor: str, tensors: StoredTensors) -> bool:
    return len(tensors.places[tensor].shape) == 3 and tensor.split(".")[-2:-1] == ["experts"]
