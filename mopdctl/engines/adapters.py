"""LoRA adapters over base weights that are in memory once.

A peft folder (`adapter_config.json`, `adapter_model.safetensors`) names its base. To whoever samples or scores, each
adapter is an `HFModel` of its own; those over one base share its weights, and each is on in its `computing()` alone.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from mopdctl.engines.head import backbone, output_head
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import read_json, write_json
from mopdctl.objective.head import Head
from mopdctl.runs import Workspace, checkpoint_digest, model_identity

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Of every name in a peft file."""
_SUPPORTED = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "modules_to_save"),
    *("use_dora", "init_lora_weights", "lora_bias", "bias"),
}
"""Settings of peft that are followed; an adapter that uses another is refused."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Ways to begin a LoRA that move part of the base weights into it: they would change the base for all others too."""


# ------------------------------------------------------------------------------------------------------------ on disk


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights of a model lie."""

    model: str
    """Full weights, those under the adapter if there is one: a folder or hub id, as `HFModel.load` takes it."""
    adapter: Path | None = None
    """A peft folder."""

    @property
    def path(self) -> str:
        """What was asked for: the adapter if there is one."""
        return self.model if self.adapter is None else str(self.adapter)

    @property
    def identity(self) -> str | dict[str, str]:
        """The digest of the checkpoint (or the hub id as it is); with an adapter, its digest and that of its base."""
        if self.adapter is None:
            return model_identity(self.model)
        return {"adapter": checkpoint_digest(self.adapter), "base": model_identity(self.model)}


def find_source(model: str, workspace: Workspace, *, relative_to: Path, base: str | None = None) -> Source:
    """What to load for a model argument: a name in the workspace, a folder relative to `relative_to`, or a hub id.

    A peft folder is an adapter over `base`, or else over the base that it names: a folder relative to itself, then
    whatever a model argument may be. Reads no weights.

    Raises:
        InputError: there is no such model or base, the base is an adapter, or `base` is given for full weights.
    """
    path = workspace.resolve_model(model, relative_to=relative_to)
    if not (Path(path) / _CONFIG).is_file():
        if base is not None:
            raise InputError(f"model {model!r}: `base` is given, but it is no adapter (has no {_CONFIG}); leave it out")
        return Source(path)
    named = base or _read_config(Path(path)).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise InputError(f"adapter {path}: {_CONFIG} names no base model; give it as `base`")
    try:
        beside = Path(path) / named
        found = str(beside) if not base and beside.is_dir() else workspace.resolve_model(named, relative_to=relative_to)
    except InputError as error:
        raise InputError(f"adapter {path}: no base, {error}; give it as `base`") from None
    if (Path(found) / _CONFIG).is_file():
        raise InputError(f"adapter {path}: its base {found} is an adapter too; merge that one into its own base first")
    return Source(found, Path(path))


def _read_config(folder: Path) -> dict[str, Any]:
    document = read_json(folder / _CONFIG)
    if not isinstance(document, dict):
        raise InputError(f"{folder / _CONFIG}: no JSON object; give a folder that peft wrote")
    return document


def _lora_config(folder: Path) -> LoraConfig:
    """The configuration of an adapter. Raises InputError for one that uses what we do not follow."""
    document = _read_config(folder)
    if document.get("peft_type") != "LORA":
        raise InputError(f"adapter {folder}: is of type {document.get('peft_type')}; only LORA can be loaded")
    defaults = vars(LoraConfig())
    known = {field.name for field in fields(LoraConfig)}
    foreign = sorted(
        name
        for name, value in document.items()
        if name not in _SUPPORTED and value and (name not in known or value != _plain(defaults.get(name)))
    )
    if foreign:
        raise InputError(f"adapter {folder}: uses {foreign[0]}, which is not supported; merge it into its base first")
    if document.get("bias", "none") != "none":
        raise InputError(f"adapter {folder}: trains biases of its base, which others may share; merge it into its base")
    start = document.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InputError(f"adapter {folder}: {start} changes the base weights; save it as a plain LoRA with peft")
    followed = {name: value for name, value in document.items() if name in _SUPPORTED and name in known}
    # Dropout is off whatever it was trained with: a teacher gives one answer.
    return LoraConfig(**followed | {"lora_dropout": 0.0, "init_lora_weights": True, "inference_mode": True})


def _plain(value: Any) -> Any:
    """A default of peft as JSON has it."""
    return vars(value) if hasattr(value, "__dict__") else value


# ---------------------------------------------------------------------------------------------------------- in memory


class SharedBase:
    """Base weights and the adapters over them, of which at most one is on at a time."""

    def __init__(self, base: HFModel) -> None:
        """Takes the base over: from the first frozen adapter on it computes only through what is made here."""
        self.model: Any = base.model
        self._base = base
        self._loaded: dict[Path, AdaptedModel] = {}
        self._layers: list[Any] = []
        self._on: str | None = None
        self._inside = 0
        self.trained: str | None = None
        """The adapter that trains, if one does. It is on wherever nothing else is asked for."""

    def without_adapter(self) -> "AdaptedModel":
        """The base alone, to the bit what it was before there were adapters."""
        return self._view(None, self._base.tokenizer)

    def load(self, folder: Path) -> "AdaptedModel":
        """A frozen adapter from a peft folder, with the tokenizer in it if it has one; a second time the same object.

        Raises InputError for anything but a complete LoRA of this base in safetensors.
        """
        key = folder.resolve()
        if key not in self._loaded:
            if not (folder / _WEIGHTS).is_file():
                raise InputError(f"adapter {folder}: has no {_WEIGHTS}; save it in that format (no pickle is read)")
            name, config = f"adapter{len(self._loaded)}", _lora_config(folder)
            try:
                tensors = load_file(folder / _WEIGHTS)
                self._inject(config, name)
                _fill(self.model, name, tensors)
                has_own = (folder / "tokenizer_config.json").is_file()
                tokenizer = AutoTokenizer.from_pretrained(str(folder)) if has_own else self._base.tokenizer
            except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
                why = f"the file lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
                raise InputError(f"adapter {folder}: does not fit its base {self._name}: {why}") from None
            self.model.requires_grad_(False)
            if len(self._loaded) == 0:
                backbone(self.model).register_forward_pre_hook(self._refuse_outside())
            self._loaded[key] = self._view(name, tokenizer)
        return self._loaded[key]

    def train(self, config: LoraConfig) -> "AdaptedModel":
        """A new adapter that trains, in float32 where the base is in less; the base is frozen."""
        self._inject(config, "default")
        self.trained = "default"
        self._switch_to("default")
        return self._view("default", self._base.tokenizer)

    @contextmanager
    def on(self, adapter: str | None) -> Iterator[None]:
        """The adapter is on for the block (None: none is), and after it again what was before."""
        before = self._on
        self._inside += 1
        self._switch(adapter)
        try:
            yield
        finally:
            self._switch(before)
            self._inside -= 1

    @property
    def _name(self) -> str:
        return str(self.model.name_or_path)

    def _view(self, adapter: str | None, tokenizer: Any) -> "AdaptedModel":
        return AdaptedModel(self, adapter, tokenizer, dtype=self._base.dtype, batch_size=self._base.batch_size)

    def _inject(self, config: LoraConfig, name: str) -> None:
        self.model.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")  # that is the idea
            inject_adapter_in_model(config, self.model, adapter_name=name)
        self.model.train(self.model.training)
        self._layers = [m for m in self.model.modules() if isinstance(m, LoraLayer | ModulesToSaveWrapper)]
        for parameter_name, parameter in self.model.named_parameters():
            if ".lora_" in parameter_name and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        self._switch_to(self.trained)

    def _switch(self, adapter: str | None) -> None:
        if adapter != self._on:
            self._switch_to(adapter)

    def _switch_to(self, adapter: str | None) -> None:
        for layer in self._layers:
            lacks_it = adapter is None or (
                isinstance(layer, ModulesToSaveWrapper) and adapter not in layer.modules_to_save
            )
            # inference_mode: peft would else ask for gradients of whatever it switches on
            layer.set_adapter([] if lacks_it else [adapter], inference_mode=adapter != self.trained)
        self._on = adapter

    def _refuse_outside(self) -> Callable[..., None]:
        def refuse(*_: Any) -> None:
            if not self._inside:
                raise RuntimeError(f"{self._name}: several adapters share it; run it inside `computing()` of one")

        return refuse


class AdaptedModel(HFModel):
    """One adapter over base weights that it may share with others, or that base without any."""

    def __init__(
        self, shared: SharedBase, adapter: str | None, tokenizer: Any, *, dtype: torch.dtype, batch_size: int
    ) -> None:
        with shared.on(adapter):  # an adapter may have an output layer of its own
            super().__init__(shared.model, tokenizer, dtype=dtype, batch_size=batch_size)
        self.shared = shared
        self.adapter = adapter

    def computing(self) -> AbstractContextManager[Any]:
        """The context in which this model runs: its adapter on, and autocast where the precision asks for it."""
        return self._computing()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with self.shared.on(self.adapter), super().computing():
            yield

    @cached_property
    def head(self) -> Head:
        """As `HFModel.head`. Raises InputError if the adapter reaches into the head."""
        with self.computing():
            return output_head(self.model)

    def save(self, folder: Path) -> None:
        """Writes the merged weights as a plain Hugging Face folder, and the adapter alone to `folder/adapter`.

        W + scaling * B A in float32, the base in memory untouched. Raises InputError for an adapter that does more
        than that. Source: Hu et al., "LoRA" (2021), Eq. 3.
        """
        self.model.save_pretrained(folder, state_dict=merged_weights(self.model, self._own))
        write_json(folder / "config.json", read_json(folder / "config.json") | {"dtype": "float32"})
        self.tokenizer.save_pretrained(folder)
        self.save_adapter(folder / "adapter")

    def save_adapter(self, folder: Path) -> None:
        """Writes the adapter as a peft folder."""
        self.model.peft_config[self._own].save_pretrained(folder)
        document = read_json(folder / _CONFIG)
        if isinstance(document["target_modules"], list):  # a set in memory
            document["target_modules"].sort()
        write_json(folder / _CONFIG, document)
        found = get_peft_model_state_dict(self.model, adapter_name=self._own, save_embedding_layers=False)
        save_file({_PREFIX + n: t.detach().cpu().contiguous() for n, t in found.items()}, folder / _WEIGHTS)

    @property
    def _own(self) -> str:
        if self.adapter is None:
            raise InputError(f"model {self.model.name_or_path}: has no adapter to write; copy the base itself")
        return self.adapter


def _fill(model: Any, adapter: str, tensors: dict[str, Tensor]) -> None:
    """Puts the weights of a file into an injected adapter. Raises ValueError unless they are all of it and no more."""
    given = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    found: Any = set_peft_model_state_dict(model, given, adapter_name=adapter)
    missing = [n for n in found.missing_keys if f".{adapter}." in n or n.endswith(f".{adapter}")]
    if missing:
        raise ValueError(f"the file lacks {missing[0].replace(f'.{adapter}', '')}")
    if found.unexpected_keys:
        raise ValueError(f"{found.unexpected_keys[0].replace(f'.{adapter}', '')} of the file has no place in it")


@torch.no_grad()
def merged_weights(model: Any, adapter: str) -> dict[str, Tensor]:
    """The weights that a model without adapters needs to be this one, by its names, in float32 on the CPU.

    Raises InputError for an adapter that is not a sum of products on inner linear layers.
    """
    layers: dict[str, Any] = {
        name: m for name, m in model.named_modules() if isinstance(m, LoraLayer) and _has(m, adapter)
    }
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    is_plain = not any(isinstance(m, ModulesToSaveWrapper) for m in model.modules()) and all(
        isinstance(layer.get_base_layer(), nn.Linear)
        and not (layer in outer or layer.lora_variant or layer.lora_bias[adapter])
        for layer in layers.values()
    )
    if not is_plain:
        raise InputError(f"model {model.name_or_path}: only a plain LoRA of inner linear layers can be merged")
    merged: dict[str, Tensor] = {}
    copies: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights stay one tensor, so that they are written once
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            place = (tensor.data_ptr(), tensor.shape)
            if place not in copies:
                copies[place] = (tensor.float() if tensor.is_floating_point() else tensor).cpu()
            merged[name.replace(".base_layer.", ".")] = copies[place]
    for name, layer in layers.items():
        delta = layer.get_delta_weight(adapter)
        merged[f"{name}.weight"] = (layer.get_base_layer().weight.float() + delta.float()).cpu()
    return merged


def _has(layer: LoraLayer, adapter: str) -> bool:
    return adapter in layer.lora_A or adapter in layer.lora_embedding_A


def own_weights(model: Any) -> dict[str, Tensor]:
    """What a resumable state must hold of a model: all of it, or of a model that trains an adapter the adapter alone.

    The frozen base under an adapter is the checkpoint that the run names, by its digest.
    """
    state: dict[str, Tensor] = model.state_dict()
    if not hasattr(model, "peft_config"):
        return state
    return {name: tensor for name, tensor in state.items() if ".lora_" in name}
