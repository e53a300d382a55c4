"""Resumable training state: weights, optimizer moments and the step, in safetensors and JSON, never pickle.

Random streams hang on seed, step and sample id alone, so they need no state. A state folder appears whole or not.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopdctl.engines.adapters import own_weights
from mopdctl.errors import InputError
from mopdctl.files import read_json, write_json
from mopdctl.runs import building
from mopdctl.train import distributed
from mopdctl.train.optimizer import Optimizers


@contextmanager
def told_if_unwritable(place: Path) -> Iterator[None]:
    """Says in one line, as InputError naming `place`, what the system says of a write that fails: a full disk, say."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise InputError(
            f"{place}: cannot be written ({what}); make room, or check the path and its permissions"
        ) from error


def save_state(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizers: Optimizers,
    *,
    extra: dict[str, Tensor] | None = None,
    keep_last: int,
    documents: Mapping[str, Any] | None = None,
) -> None:
    """Writes `folder/step-NNNNNN` after `step` finished steps and removes all but the last `keep_last`.

    `documents` are JSON documents by file name that lie beside the weights.
    """
    if distributed.rank() == 0:
        with told_if_unwritable(folder), building(folder / f"step-{step:06d}") as target:
            save_file(_plain(own_weights(model)), target / "model.safetensors")
            save_file(_moments(model, optimizers), target / "optimizer.safetensors")
            if extra:
                copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in extra.items()}
                save_file(copies, target / "extra.safetensors")
            for name, document in (documents or {}).items():
                write_json(target / name, document)
            write_json(target / "state.json", {"schema": "mopdctl.train_state/1", "step": step})
        for old in saved_steps(folder)[:-keep_last]:
            shutil.rmtree(folder / f"step-{old:06d}")
    distributed.barrier()


def saved_steps(folder: Path) -> list[int]:
    """The steps of the complete states in `folder`, ascending."""
    return sorted(int(p.parent.name.removeprefix("step-")) for p in folder.glob("step-*/state.json"))


def load_state(folder: Path, model: torch.nn.Module, optimizers: Optimizers) -> tuple[int, dict[str, Tensor]]:
    """Restores the newest state in `folder`; returns its step and the extra tensors. (0, {}) if there is none."""
    steps = saved_steps(folder)
    if not steps:
        return 0, {}
    source = folder / f"step-{steps[-1]:06d}"
    weights = load_file(source / "model.safetensors")
    tied = {n for n, _ in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}
    foreign = sorted(weights.keys() ^ (own_weights(model).keys() - tied))
    if foreign:
        raise ValueError(f"{source}: weights of another model ({foreign[:3]} ...)")
    model.load_state_dict(weights, strict=False)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(source / "optimizer.safetensors").items():
        name, _, moment = key.rpartition("/")
        moments.setdefault(name, {})[moment] = value
    owner = {id(p): part for part in optimizers.parts for group in part.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if name in moments:
            owner[id(parameter)].state[parameter] = {k: v.to(parameter.device) for k, v in moments[name].items()}
    extra = load_file(source / "extra.safetensors") if (source / "extra.safetensors").exists() else {}
    return int(read_json(source / "state.json")["step"]), extra


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies, each storage once: a tied tensor is kept under its first name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        found[name] = tensor.detach().cpu().contiguous().clone()
    return found


def _moments(model: torch.nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value.detach().cpu().contiguous().clone()
        for name, parameter in model.named_parameters()
        for part in optimizers.parts
        for key, value in part.state.get(parameter, {}).items()
    }
