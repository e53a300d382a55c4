"""What the linear modules of a decoder layer get as inputs: second moments and largest magnitudes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mopdctl.errors import InputError


class Moments:
    """Of all inputs [N, K] of one module, or of several that read the same. Sums, in float32."""

    def __init__(self, *, hessian: bool) -> None:
        self.rows = 0
        """N, tokens seen; 0 for an expert that no token was routed to."""
        self.input_amax = 0.0
        """Largest magnitude; with no rows that of the expert's siblings."""
        self._hessian = hessian
        self._sum: Tensor | None = None

    @property
    def hessian_KK(self) -> Tensor | None:
        """X^T X / N; None without rows, or if only its diagonal was asked for."""
        return self._sum / self.rows if self._sum is not None and self._hessian else None

    @property
    def importance_K(self) -> Tensor | None:
        """The diagonal of X^T X / N: mean squares of the inputs; None without rows."""
        if self._sum is None:
            return None
        return (self._sum.diagonal() if self._hessian else self._sum) / self.rows

    def add(self, inputs: Tensor) -> None:
        """Takes in some inputs [..., K]. What is NaN or infinite stays visible in `input_amax`."""
        inputs_NK = inputs.detach().flatten(0, -2).float()
        if not len(inputs_NK):
            return
        self.rows += len(inputs_NK)
        amax = float(inputs_NK.abs().max())
        self.input_amax = amax if amax != amax else max(self.input_amax, amax)
        if self._hessian:
            self._sum = inputs_NK.new_zeros(inputs_NK.shape[1], inputs_NK.shape[1]) if self._sum is None else self._sum
            self._sum.addmm_(inputs_NK.T, inputs_NK)
        else:
            self._sum = inputs_NK.square().sum(0) + (0 if self._sum is None else self._sum)


@contextmanager
def collecting(
    layer: nn.Module, tensors: Mapping[str, Iterable[str]], targets: Collection[str], *, hessian: bool
) -> Iterator[dict[str, Moments]]:
    """While it is open, the inputs of a layer's modules go into their moments.

    Modules that are handed one and the same tensor share their `Moments`. Experts that transformers runs as one module
    are taken apart: each gets the rows that were routed to it.

    Args:
        layer: A decoder layer.
        tensors: Parameter of the layer to the tensors of the checkpoint that it is made of.
        targets: Names of modules in the checkpoint; of others nothing is kept.
        hessian: Keep X^T X whole, not its diagonal alone.

    Yields:
        Name of a module in the checkpoint to its moments. A module that nothing went into has none.

    Raises:
        InputError: Experts among the targets compute something that cannot be taken apart.
    """
    found: dict[str, Moments] = {}
    seen: list[tuple[Tensor, Moments]] = []

    def add(stems: list[str], inputs: Tensor) -> Moments:
        moments = found.get(stems[0]) or Moments(hessian=hessian)
        moments.add(inputs)
        found.update(dict.fromkeys(stems, moments))
        return moments

    def at_linear(stems: list[str], module: nn.Module, args: tuple[Any, ...]) -> None:
        for tensor, moments in seen:
            if tensor is args[0]:
                found.update(dict.fromkeys(stems, moments))
                return
        seen.append((args[0], add(stems, args[0])))  # holds the tensor, so that no later one can take its place

    def at_expert(stems: dict[tuple[str, int], list[str]], key: str, expert: int, inputs_NK: Tensor) -> None:
        if (key, expert) in stems and len(inputs_NK):
            add(stems[key, expert], inputs_NK)

    with ExitStack() as undo:
        undo.callback(seen.clear)
        undo.callback(layer.register_forward_pre_hook(lambda module, args: seen.clear()).remove)
        for name, module in layer.named_modules():
            stems = _stems(tensors, f"{name}.weight", targets)
            if isinstance(module, nn.Linear) and stems:
                undo.callback(module.register_forward_pre_hook(partial(at_linear, stems)).remove)
            if by_expert := _stems_by_expert(module, name, tensors, targets):
                module.forward = partial(_run_experts, module, partial(at_expert, by_expert))
                undo.callback(delattr, module, "forward")
        yield found


def _stems(tensors: Mapping[str, Iterable[str]], parameter: str, targets: Collection[str]) -> list[str]:
    stems = [name.removesuffix(".weight") for name in tensors.get(parameter, ())]
    return [stem for stem in stems if stem in targets]


def _stems_by_expert(
    module: nn.Module, name: str, tensors: Mapping[str, Iterable[str]], targets: Collection[str]
) -> dict[tuple[str, int], list[str]]:
    """Parameter and expert to the modules of the checkpoint that they hold; empty if the module is no fused experts."""
    found: dict[tuple[str, int], list[str]] = {}
    for key, parameter in module.named_parameters(recurse=False):
        for stem in _stems(tensors, f"{name}.{key}", targets) if parameter.dim() == 3 else ():
            found.setdefault((key, _expert(stem)), []).append(stem)
    known = hasattr(module, "has_gate") and not (module.has_bias or module.is_transposed)
    if found and not known:
        raise InputError(
            f"{next(iter(found.values()))[0]}: {type(module).__name__} does not run its experts as others do, so that "
            "their inputs are unknown; choose a method without calibration, or leave these experts as they are"
        )
    return found


def _expert(stem: str) -> int:
    """The number of the expert in a name such as `model.layers.0.mlp.experts.3.gate_proj`."""
    return int([part for part in stem.split(".") if part.isdigit()][-1])


def _run_experts(
    module: Any,
    record: Callable[[str, int, Tensor], None],
    hidden_NH: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What experts without biases compute, one expert at a time, with each one's inputs recorded.

    sum_k weight_k * down_k(act(gate_k x) * (up_k x)),  or down_k(act(up_k x)) where there is no gate
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    total_NH = torch.zeros_like(hidden_NH)
    for expert in range(module.num_experts):
        row, choice = torch.where(top_k_index == expert)
        inputs = hidden_NH[row]
        record(up, expert, inputs)
        inner = linear(inputs, getattr(module, up)[expert])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        record("down_proj", expert, inner)
        total_NH.index_add_(0, row, linear(inner, module.down_proj[expert]) * top_k_weights[row, choice, None])
    return total_NH


def with_unreached(found: Mapping[str, Moments], targets: Iterable[str]) -> dict[str, Moments]:
    """The moments of all targets: an expert that no token reached has none but the largest magnitude of its siblings.

    An engine that divides by an expert's input scale would otherwise divide by zero on the first token routed to it.

    Raises:
        InputError: An input was NaN or infinite, or a target is no module that runs.
    """
    largest: dict[str, float] = {}
    for stem, moments in found.items():
        if not isfinite(moments.input_amax):
            raise InputError(
                f"{stem}: its inputs hold NaN or infinity on the calibration rows; find where the model broke"
            )
        key = _siblings(stem)
        largest[key] = max(largest.get(key, 0.0), moments.input_amax)
    complete = dict(found)
    for stem in targets:
        if stem in found:
            continue
        if ".experts." not in stem:
            raise InputError(f"{stem}: did not run on the calibration rows, so that its inputs are unknown; ignore it")
        complete[stem] = Moments(hessian=False)
        complete[stem].input_amax = largest.get(_siblings(stem), 0.0)
    return complete


def _siblings(stem: str) -> str:
    """The name with its expert's number left out."""
    parts = stem.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(part for place, part in enumerate(parts) if place != numbers[-1]) if numbers else stem
