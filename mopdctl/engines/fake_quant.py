"""Models that run on weights as FP4 holds them: a student that trains, and teachers for good.

What is quantized is what `mopdctl quantize` takes by default: the linear layers between the embedding and the head, and
the matrices of experts, but no router.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForCausalLM

from mopdctl.engines.fusing import SENSITIVE, fused_groups, routes, unknown_siblings
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.fp4 import nvfp4
from mopdctl.fp4.fake import fake_quantize
from mopdctl.fp4.quantized import BLOCK, Format

TRAINED: nvfp4.Method = "max"
"""How the scales of a student's blocks are chosen while it trains, anew whenever its weights change."""
FROZEN: dict[Format, nvfp4.Method] = {"nvfp4": "sweep", "mxfp4": "max"}
"""How those of a teacher are chosen, once. MXFP4 goes by its even rule in both."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model has a weight: a matrix [R, K], or a stack of them [E, R, K], one for each expert."""

    name: str
    """Of the parameter, as the model's state has it."""
    module: Any
    parameter: str

    @property
    def weight(self) -> nn.Parameter:
        """The weight itself, however the module reads it."""
        found: nn.Parameter = self.module._parameters[self.parameter]
        return found


def quantizable(model: Any) -> list[tuple[Place, ...]]:
    """The weights of a model that are quantized, those together that share a tensor scale.

    Raises InputError for a model without any, and for experts whose matrices are stored the other way round.
    """
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            parent = model.get_submodule(path.rpartition(".")[0])
            if module not in outer and not SENSITIVE.match(path) and not routes(parent, module):
                places[path] = Place(f"{path}.weight", module, "weight")
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and name.endswith("_proj"):
                if getattr(module, "is_transposed", False):
                    raise InputError(
                        f"model {model.name_or_path}: the experts of {type(module).__name__} are stored input by "
                        "output, which is not supported; leave the model in high precision"
                    )
                places[f"{path}.{name}"] = Place(f"{path}.{name}", module, name)
    if not places:
        raise InputError(f"model {model.name_or_path}: has no linear layers to quantize; leave it in high precision")
    columns = {path: place.weight.shape[-1] for path, place in places.items()}
    return [tuple(places[path] for path in group) for group in dict.fromkeys(fused_groups(columns).values())]


def quantized(places: Sequence[Place], weights: Sequence[Tensor], format: Format, method: nvfp4.Method) -> list[Tensor]:
    """What the weights of one group are after quantization, in their own dtype.

    The divisor of NVFP4 follows from the largest magnitude in the group; each expert has its own.

    Raises InputError naming the group for a weight that is not finite.
    """
    if weights[0].dim() == 3:
        by_expert = [quantized(places, matrices, format, method) for matrices in zip(*weights, strict=True)]
        return [torch.stack(matrices) for matrices in zip(*by_expert, strict=True)]
    try:
        amax = max(float(weight.detach().abs().max()) for weight in weights)
        divisor = nvfp4.divisor(amax, method) if format == "nvfp4" else None
        return [fake_quantize(weight.detach(), format, method=method, divisor=divisor) for weight in weights]
    except InputError as error:
        raise InputError(f"{', '.join(place.name for place in places)}: {error}") from None


def fake_quantize_weights(model: Any, format: Format) -> None:
    """From now on the model reads its weights W as FP4 holds them, Q(W), wherever it runs; it owns W as before.

        forward   y = Q(W) x           backward   dL/dW = dL/dQ(W)   (straight through)

    Parameters, their names, and so optimizers, states and checkpoints stay those of W. Scales follow W: by its largest
    magnitudes (`max`), group by group with one divisor, computed once for each change of W. A copy of the model reads
    likewise.

    Raises:
        InputError: a weight does not fall into whole blocks, or there are none; for NVFP4, an engine may fuse layers
            of an unknown kind. See `quantizable` and `unknown_siblings`.

    Source: Bengio et al., "Estimating or propagating gradients" (2013), section 4; NVIDIA, "Quantization-aware
    distillation" (2601.20088), with scales recomputed.
    """
    groups = _checked(model, format)
    for places in groups:
        group = _Group(places, format)
        for number, place in enumerate(places):
            place.module.__dict__.setdefault("_fake_quantized", {})[place.parameter] = (group, number)
    for module in {id(place.module): place.module for places in groups for place in places}.values():
        module.__class__ = _reading(type(module), tuple(module._fake_quantized))  # type: ignore[arg-type]
    _count_steps_as_writes()


@torch.no_grad()
def quantize_weights(model: HFModel, path: str, format: Format) -> None:
    """Replaces the weights of a model that was loaded from `path` by what FP4 makes of the checkpoint's.

    Scales are chosen from the weights as they lie on disk, whatever precision the model was loaded in: it becomes the
    checkpoint that `mopdctl quantize` writes (with `--method max` for MXFP4), loaded in that precision.

    Raises:
        InputError: the checkpoint is quantized already, or a weight does not fall into whole blocks.
    """
    found = AutoConfig.from_pretrained(path)
    if getattr(found, "quantization_config", None):
        raise InputError(f"model {path}: its weights are quantized already; leave out `quant`")
    precise = model.model
    if model.dtype != torch.float32 and found.dtype != model.dtype:
        precise = AutoModelForCausalLM.from_pretrained(path, dtype="auto", use_safetensors=True)
    for places, sources in zip(_checked(model.model, format), quantizable(precise), strict=True):
        weights = [place.weight.to(model.device) for place in sources]
        for place, value in zip(places, quantized(places, weights, format, FROZEN[format]), strict=True):
            place.weight.copy_(value)


def _checked(model: Any, format: Format) -> list[tuple[Place, ...]]:
    groups = quantizable(model)
    for place in (place for places in groups for place in places):
        if place.weight.shape[-1] % BLOCK[format]:
            raise InputError(
                f"model {model.name_or_path}: {place.name} has {place.weight.shape[-1]} columns, and {format} needs a "
                f"multiple of {BLOCK[format]}; leave the model in high precision"
            )
    columns = {place.name.removesuffix(".weight"): place.weight.shape[-1] for places in groups for place in places}
    if format == "nvfp4" and (siblings := unknown_siblings(columns)):
        raise InputError(
            f"model {model.name_or_path}: {', '.join(siblings)} may read one input, and an engine that fuses them "
            "keeps one scale, which scales of their own are not; take mxfp4, or leave the model in high precision"
        )
    return groups


class _Group:
    """Weights that share a tensor scale, and what they are in FP4 as long as none of them changes."""

    def __init__(self, places: tuple[Place, ...], format: Format) -> None:
        self._places, self._format = places, format
        self._versions: list[tuple[int, int]] = []
        self._values: list[Tensor] = []

    def read(self, number: int) -> Tensor:
        weights = [place.weight for place in self._places]
        versions = [(weight.data_ptr(), weight._version) for weight in weights]
        if versions != self._versions:
            self._values = []  # the old values go before the new ones come
            self._values = quantized(self._places, weights, self._format, TRAINED)
            self._versions = versions
        found: Tensor = _StraightThrough.apply(weights[number], self._values[number])
        return found


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@cache
def _reading(kind: type, names: tuple[str, ...]) -> type:
    """A subclass whose parameters `names` are read in FP4. The parameters themselves are where they were."""

    def attribute(name: str) -> property:
        def read(module: Any) -> Tensor:
            group, number = module._fake_quantized[name]
            found: Tensor = group.read(number)
            return found

        return property(read)

    return type(f"FakeQuantized{kind.__name__}", (kind,), {name: attribute(name) for name in names})


@cache
def _count_steps_as_writes() -> None:
    """From now on a step of any optimizer raises the version of the parameters that it changes.

    Writes to a tensor do; the fused step of AdamW (torch 2.11 to 2.13) does not, and values kept for the old weights
    would pass for those of the new ones.
    """

    def raise_versions(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        changed = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch.autograd.graph.increment_version(changed)

    register_optimizer_step_post_hook(raise_versions)
