"""The tensors of a checkpoint as they lie on disk, by name, without a model in memory."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import cached_file

from mopdctl.errors import InputError

Shapes = dict[str, tuple[int, ...]]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that a safetensors file may name and that torch can hold."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies: `start` is the byte in the file at which its elements begin, row by row."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of one checkpoint by name. None is read before it is asked for.

    They are read, not mapped: the pages of a mapped file count as memory of the process for as long as it is open.
    """

    path: str
    places: dict[str, Place]

    @property
    def shapes(self) -> Shapes:
        """Name to shape."""
        return {name: place.shape for name, place in self.places.items()}

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU, in the dtype in which it is stored."""
        place = self.places[name]
        return self._read(name, place.start, place.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor with at least one dimension."""
        place = self.places[name]
        row_bytes = prod(place.shape[1:]) * place.dtype.itemsize
        shape = (min(stop, place.shape[0]) - start, *place.shape[1:])
        return self._read(name, place.start + start * row_bytes, shape)

    def row_chunks(self, name: str, *, max_bytes: int) -> Iterator[Tensor]:
        """A tensor in pieces of whole rows, each at most `max_bytes` or one row; one without dimensions as it is."""
        place = self.places[name]
        if not place.shape:
            yield self.tensor(name)
            return
        step = max(1, max_bytes // max(1, prod(place.shape[1:]) * place.dtype.itemsize))
        for start in range(0, place.shape[0], step):
            yield self.rows(name, start, start + step)

    def _read(self, name: str, start: int, shape: tuple[int, ...]) -> Tensor:
        place = self.places[name]
        found = torch.empty(prod(shape), dtype=place.dtype)
        with place.file.open("rb") as file:
            file.seek(start)
            if file.readinto(found.view(torch.uint8).numpy().data) != found.numel() * place.dtype.itemsize:
                raise InputError(f"{place.file}: ends within {name}; download it again")
        return found.view(shape)


def open_tensors(path: str) -> StoredTensors:
    """Finds the tensors in the safetensors files of a folder or hub id.

    Raises InputError where there are none, or where a file is broken or its index names one that is missing.
    """
    try:
        places = {name: place for file in _weight_files(path) for name, place in _places(Path(file))}
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None
    return StoredTensors(path, places)


def _places(file: Path) -> Iterator[tuple[str, Place]]:
    with safe_open(file, framework="pt"):  # checks that the header is sound and covers the file
        pass
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise InputError(f"{file}: {name} is stored as {entry['dtype']}, which torch cannot hold")
        start = 8 + length + entry["data_offsets"][0]
        yield name, Place(file, start, DTYPES[entry["dtype"]], tuple(entry["shape"]))


def _weight_files(path: str) -> list[str]:
    if (index := checkpoint_file(path, "model.safetensors.index.json")) is None:
        if (single := checkpoint_file(path, "model.safetensors")) is None:
            raise InputError(f"model {path}: has no model.safetensors; weights are read from safetensors files alone")
        return [single]
    found = []
    for name in sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values())):
        file = checkpoint_file(path, name) if Path(name).name == name else None
        if file is None:
            raise InputError(f"model {path}: its index names {name!r}, which is not in it; download it again")
        found.append(file)
    return found


def checkpoint_file(path: str, name: str) -> str | None:
    """Where a file of a folder or hub id is on this disk; None if the checkpoint has no such file.

    Raises InputError where there is no such folder or hub id, or the hub cannot be reached.
    """
    try:
        found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None
    return found


def read_config(path: str) -> Any:
    """The configuration of a model. Raises InputError where transformers can read none."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None


def skeleton(path: str, config: Any) -> Any:
    """The causal model of a configuration, without weights. Raises InputError where transformers has none for it."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None


def parameter_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Tensor of a checkpoint to the parameter of the model that transformers makes of it, alone or with others.

    They differ where a model fuses what its checkpoints hold apart (experts) or was renamed. A tensor that the model
    has no use for, such as those of layers for multi-token prediction, is left out.
    """
    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = {}
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state:  # a pattern may fit a name that was never to be renamed
            target, _ = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target in state:
            found[name] = target
    return found
