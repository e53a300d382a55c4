"""A causal language model that runs one decoder layer at a time and is never whole in memory.

It is built without weights. What lies outside the decoder layers is read once, a layer when its turn comes.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from mopdctl.engines.weights import StoredTensors, parameter_names, read_config
from mopdctl.errors import InputError

LayerCall = tuple[tuple[Any, ...], dict[str, Any]]
"""What a decoder layer is called with beside its hidden states: positions, masks, rotary embeddings."""


class LayerwiseModel:
    """A model whose decoder layers hold weights between `load` and `drop` alone. Computes in float32."""

    def __init__(self, tensors: StoredTensors, device: torch.device) -> None:
        """Builds the model of a checkpoint, and reads what lies outside the decoder layers and the head.

        Raises:
            InputError: There is not one list of decoder layers, or a tensor is missing.
        """
        self._tensors, self.device = tensors, device
        config = read_config(tensors.path)
        with _parameters_without_storage():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
        self._model = model.eval().requires_grad_(False)
        self._base = model.base_model
        stacks = [
            name
            for name, child in self._base.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == config.get_text_config().num_hidden_layers
        ]
        if len(stacks) != 1:
            raise self._refusal(f"has {len(stacks)} lists of decoder layers")
        self.layers: list[nn.Module] = list(getattr(self._base, stacks[0]))
        self._root = "" if self._base is model else f"{model.base_model_prefix}."
        self._prefixes = [f"{self._root}{stacks[0]}.{number}." for number in range(len(self.layers))]
        self._sources: dict[str, tuple[str, ...]] = {}
        for name, parameter in parameter_names(model, tensors.places).items():
            self._sources[parameter] = (*self._sources.get(parameter, ()), name)
        in_layers = tuple(self._prefixes)
        self._fill([n for n in model.state_dict() if n.startswith(self._root) and not n.startswith(in_layers)], {})
        for module in model.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to(device)
        self._in_tuples = False  # what layers return: hidden states or, in some models, a tuple that begins with them
        try:
            self._probe()
        except InputError as refusal:
            self._in_tuples = True
            try:
                self._probe()
            except (InputError, TypeError, AttributeError):  # the two latter if a tuple is taken for a tensor
                raise refusal from None

    @property
    def head(self) -> tuple[str, ...]:
        """The head's name in the checkpoint; empty if it shares the table of the embeddings."""
        head = self._model.get_output_embeddings()
        names = [name for name, module in self._model.named_modules() if module is head]
        return tuple(stem.removesuffix(".weight") for name in names for stem in self._sources.get(f"{name}.weight", ()))

    @property
    def width(self) -> int:
        """H, of the hidden states."""
        return int(self._model.get_input_embeddings().weight.shape[1])

    @property
    def vocab_size(self) -> int:
        """V, rows of the head."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    def tensors(self, number: int) -> dict[str, tuple[str, ...]]:
        """Parameter of layer `number`, as the layer calls it, to the tensors of the checkpoint that it is made of."""
        prefix = self._prefixes[number]
        return {name[len(prefix) :]: names for name, names in self._sources.items() if name.startswith(prefix)}

    def load(self, number: int, replaced: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Gives layer `number` its weights, those in `replaced` (by name in the checkpoint) in place of the file's."""
        prefix = self._prefixes[number]
        self._fill([name for name in self._model.state_dict() if name.startswith(prefix)], replaced or {})
        return self.layers[number]

    def drop(self, number: int) -> None:
        """Takes the weights of layer `number` out of memory."""
        for module in self.layers[number].modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    def embed(self, ids_BT: Tensor) -> tuple[Tensor, list[LayerCall]]:
        """The hidden states [B, T, H] that enter the first layer, and what each layer is called with beside them."""
        seen, _ = self._pass_through(ids_BT)
        return seen[0][0], [call for _, call in seen]

    def finish(self, ids_BT: Tensor, hidden_BTH: Tensor) -> Tensor:
        """What enters the head [B, T, H], made of the last layer's output: mostly a norm."""
        return self._pass_through(ids_BT, hidden_BTH)[1]

    def load_head(self) -> None:
        """Reads what `logits` needs beside `finish`."""
        self._model.tie_weights()
        state, in_layers = self._model.state_dict(), tuple(self._prefixes)
        self._fill([name for name, value in state.items() if value.is_meta and not name.startswith(in_layers)], {})

    def logits(self, ids_1T: Tensor, hidden_1TH: Tensor, places_N: Tensor) -> Tensor:
        """The logits [N, V] at some places of a row, made of the last layer's output; a gradient gets through."""
        with self._handing_on(hidden_1TH):
            found: Tensor = self._model(input_ids=ids_1T, use_cache=False, logits_to_keep=places_N).logits
        return found[0]

    def _pass_through(
        self, ids_BT: Tensor, last_BTH: Tensor | None = None
    ) -> tuple[list[tuple[Tensor, LayerCall]], Tensor]:
        """Runs all but the decoder layers, which hand on what they get; the last one gives `last_BTH` if there is one.

        Raises InputError if anything happens to the hidden states between two layers: running layer by layer would
        leave it out.
        """
        with self._handing_on(last_BTH) as seen:
            final_BTH = self._base(input_ids=ids_BT, use_cache=False).last_hidden_state
        if len(seen) != len(self.layers):
            raise self._refusal(f"runs {len(seen)} of its {len(self.layers)} decoder layers")
        return seen, final_BTH

    @contextmanager
    def _handing_on(self, last_BTH: Tensor | None) -> Iterator[list[tuple[Tensor, LayerCall]]]:
        """Decoder layers do nothing while it is open; yields what each has got so far."""
        seen: list[tuple[Tensor, LayerCall]] = []

        def forward(number: int, *args: Any, **kwargs: Any) -> Any:
            hidden_BTH = args[0] if args else kwargs.pop("hidden_states")
            if number != len(seen) or (seen and hidden_BTH is not seen[0][0]):
                raise self._refusal("does something to its hidden states between two decoder layers")
            seen.append((hidden_BTH, (args[1:], kwargs)))
            result = last_BTH if last_BTH is not None and number == len(self.layers) - 1 else hidden_BTH
            return (result,) if self._in_tuples else result

        for number, layer in enumerate(self.layers):
            layer.forward = partial(forward, number)
        try:
            yield seen
        finally:
            for layer in self.layers:
                del layer.forward

    def _probe(self) -> None:
        ids_BT = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        if self._pass_through(ids_BT)[1].shape[:-1] != ids_BT.shape:
            raise self._refusal("does something to its hidden states after the last decoder layer")

    def _fill(self, parameters: Iterable[str], replaced: Mapping[str, Tensor]) -> None:
        wanted = list(parameters)
        names = [name for parameter in wanted for name in self._sources.get(parameter, ())]
        found, _ = convert_and_load_state_dict_in_model(
            self._model,
            {name: replaced[name] if name in replaced else self._tensors.tensor(name) for name in names},
            LoadStateDictConfig(
                device_map={"": self.device},
                dtype=torch.float32,
                weight_mapping=get_model_conversion_mapping(self._model),
            ),
        )
        self._model.requires_grad_(False)
        state = self._model.state_dict()
        unfit = [name for name, *_ in found.mismatched_keys] + list(found.conversion_errors)
        if broken := unfit + [name for name in wanted if state[name].is_meta]:
            raise InputError(
                f"model {self._tensors.path}: the tensors of {broken[0]} are missing or of another shape; "
                "is the checkpoint complete?"
            )

    def _refusal(self, what: str) -> InputError:
        kind = type(self._model).__name__
        return InputError(
            f"model {self._tensors.path}: {kind} {what}, so that it cannot run layer by layer; choose a method without "
            "calibration"
        )


def run_layer(layer: nn.Module, hidden_BTH: Tensor, call: LayerCall) -> Tensor:
    """The hidden states [B, T, H] that leave a decoder layer."""
    args, kwargs = call
    found = layer(hidden_BTH, *args, **kwargs)
    leaving: Tensor = found[0] if isinstance(found, tuple) else found
    return leaving


@contextmanager
def _parameters_without_storage() -> Iterator[None]:
    """Models that are built while it is open have parameters on the meta device.

    Buffers are not: rotary frequencies and the like are in no file and must be computed.
    """
    register = nn.Module.register_parameter

    def without_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = without_storage  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
