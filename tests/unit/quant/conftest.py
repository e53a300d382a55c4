"""Tiny checkpoints of several architectures, in bfloat16, and quantizing them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """Writes a tiny model of a type (`llama`, `qwen3`, `qwen3_moe`, ...) once; nothing may write into its folder."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made: dict[str, Path] = {}

    def write(kind: str, **changes: Any) -> Path:
        key = kind + json.dumps(changes, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            ids = {"vocab_size": len(tiny_tokenizer), "eos_token_id": tiny_tokenizer.eos_token_id, "pad_token_id": 0}
            experts = EXPERTS if "moe" in kind else {}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                config = CONFIG_MAPPING[kind](**SHAPE | ids | experts | changes)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(made[key])
            tiny_tokenizer.save_pretrained(made[key])
        return made[key]

    return write


@pytest.fixture
def editable(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint with some tensors changed: name to what to put there, None to take it out."""
    from safetensors.torch import load_file, save_file

    def copy(kind: str, tensors: dict[str, Any] | None = None, *, name: str = "copy", **changes: Any) -> Path:
        folder = Path(shutil.copytree(checkpoint(kind, **changes), tmp_path / name))
        found = {k: v for k, v in (load_file(folder / "model.safetensors") | (tensors or {})).items() if v is not None}
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return copy


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., Path]:
    """Quantizes a checkpoint in a workspace of the test; returns the folder of the result."""
    from mopdctl.config.quant import QuantConfig
    from mopdctl.quant.run import quantize_model
    from mopdctl.runs import Workspace

    def run(model: Path, name: str = "out", **settings: Any) -> Path:
        config = QuantConfig.model_validate({"model": str(model), "name": name} | settings)
        return quantize_model(config, Workspace(tmp_path / "workspace"), base=tmp_path)

    return run


@pytest.fixture
def planned() -> Callable[..., Any]:
    """The plan for a checkpoint."""
    from mopdctl.config.quant import QuantConfig
    from mopdctl.engines.weights import open_tensors
    from mopdctl.quant.plan import make_plan

    def plan(model: Path, **settings: Any) -> Any:
        config = QuantConfig.model_validate({"model": str(model), "name": "out"} | settings)
        return make_plan(config, open_tensors(str(model)))

    return plan
