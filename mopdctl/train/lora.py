"""The model that a run trains: all of its weights, or an adapter over them."""

from pathlib import Path

import torch
from peft import LoraConfig
from torch import nn

from mopdctl.config.lora import Lora
from mopdctl.config.train import Dtype
from mopdctl.engines.adapters import AdaptedModel, SharedBase
from mopdctl.engines.base import stream_seed
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError


def load_student(path: str, lora: Lora | None, *, dtype: Dtype, seed: int, batch_size: int = 256) -> HFModel:
    """What a trainer trains, from a folder or hub id: every weight in float32, or with `lora` an adapter in float32.

    The weights under an adapter are frozen and held in `dtype`. It begins as the checkpoint to the bit (B = 0), with
    an A that hangs on `seed` alone, so that every process has the same. Raises InputError as `HFModel.load` and
    `add_lora` do.
    """
    if lora is None:
        return HFModel.load(path, dtype=dtype, train=True, batch_size=batch_size)
    return add_lora(HFModel.load(path, dtype=dtype, batch_size=batch_size), lora, path=path, seed=seed)


def add_lora(base: HFModel, lora: Lora, *, path: str, seed: int) -> AdaptedModel:
    """Puts a trainable LoRA over `base`, which is frozen. `path` is what the adapter's file will name as its base.

    `.shared.without_adapter()` of what comes back is the base alone, in the same memory.

    Raises:
        InputError: a name in `target_modules` fits no inner linear layer.
    """
    targets = _targets(base, lora)
    folder = Path(path).expanduser()
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder.resolve()) if folder.is_dir() else path,
    )
    with torch.random.fork_rng():
        torch.manual_seed(stream_seed(seed, "lora") % 2**63)
        student = SharedBase(base).train(config)
    student.model.train()
    return student


def _targets(base: HFModel, lora: Lora) -> list[str]:
    """Ends of names of inner linear layers."""
    outer = (base.model.get_input_embeddings(), base.model.get_output_embeddings())
    inner = [n for n, m in base.model.named_modules() if isinstance(m, nn.Linear) and m not in outer]
    ends = sorted({name.rpartition(".")[2] for name in inner})
    if lora.target_modules == "all-linear":
        return ends
    for target in lora.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in inner):
            raise InputError(
                f"model {base.model.name_or_path}: lora.target_modules names {target!r}, which is no inner linear "
                f"layer; it has {', '.join(ends)}"
            )
    return list(lora.target_modules)
