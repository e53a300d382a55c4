"""The weights of a checkpoint as they lie on disk, tensor by tensor, without a model in memory."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from mopdctl.errors import InputError

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one checkpoint by name, those left out that are tied to another."""

    path: str
    files: dict[str, Any]
    """Name of a tensor to the open safetensors file that holds it; files are mapped, so that nothing is read yet."""
    shapes: Shapes

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU: float64 if it holds floating point numbers. Raises InputError for NaN or infinity."""
        found: Tensor = self.files[name].get_tensor(name)
        if not found.is_floating_point():
            return found
        found = found.double()
        if not found.sum().isfinite():  # one pass; in float64 no sum of sound weights comes near infinity
            raise InputError(f"model {self.path}: {name} holds NaN or infinity; the checkpoint is broken")
        return found


def open_weights(path: str) -> Weights:
    """Opens the safetensors files of a folder or hub id.

    Raises InputError for a LoRA adapter, for quantized weights, and where there is no model that transformers can read.
    """
    try:
        if _file(path, "adapter_config.json"):
            raise InputError(
                f"model {path}: is a LoRA adapter; a merge needs whole weights: fold it into its base and save the "
                "result (peft: merge_and_unload)"
            )
        config = AutoConfig.from_pretrained(path)
        if getattr(config, "quantization_config", None):
            raise InputError(f"model {path}: its weights are quantized; merge the checkpoint that was quantized")
        tied = _tied(config)
        files: dict[str, Any] = {}
        for file in _weight_files(path):
            opened = safe_open(file, framework="pt")
            files |= {name: opened for name in opened.keys() if name not in tied}  # noqa: SIM118 - no mapping
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None
    return Weights(path, files, shapes)


def check_shapes(alias: str, student: Shapes, teacher: Shapes) -> None:
    """Raises InputError unless a teacher has exactly the student's tensors, by name and shape."""
    differing = sorted(n for n in student.keys() | teacher.keys() if student.get(n) != teacher.get(n))
    if differing:
        name = differing[0]
        raise InputError(
            f"teacher {alias!r}: not of the student's architecture ({name} is {teacher.get(name, 'missing')} in the "
            f"teacher, {student.get(name, 'missing')} in the student); a merge needs one architecture"
        )


def _tied(config: Any) -> Iterable[str]:
    """Names under which an embedding would be a second time; some checkpoints hold it, and nobody reads it there."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return set(model.all_tied_weights_keys)


def _weight_files(path: str) -> list[str]:
    if (index := _file(path, "model.safetensors.index.json")) is None:
        if (single := _file(path, "model.safetensors")) is None:
            raise InputError(f"model {path}: has no model.safetensors; a merge reads safetensors files alone")
        return [single]
    found = []
    for name in sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values())):
        file = _file(path, name) if Path(name).name == name else None
        if file is None:
            raise InputError(f"model {path}: its index names {name!r}, which is not in it; download it again")
        found.append(file)
    return found


def _file(path: str, name: str) -> str | None:
    """Where a file of a folder or hub id is on this disk; None if the checkpoint has no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return found
