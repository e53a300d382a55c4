"""Tensors of a checkpoint read by name and by rows, without a model and without what was not asked for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mopdctl.engines.weights import open_tensors, parameter_names, read_config, skeleton
from mopdctl.errors import InputError

TENSORS = {
    "matrix": torch.arange(15, dtype=torch.bfloat16).view(5, 3),
    "experts": torch.randn(4, 3, 2),
    "scale": torch.tensor([448.0, 0.5]).to(torch.float8_e4m3fn),
    "number": torch.tensor(7),
    "none": torch.zeros(0, 3),
    "mask": torch.tensor([True, False]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.flatten().view(torch.uint8) for tensor in (one.contiguous(), other.contiguous())]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def test_every_tensor_comes_as_it_is_stored(folder: Path) -> None:
    tensors = open_tensors(str(folder))
    assert tensors.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert all(same(tensors.tensor(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("name", ["matrix", "experts", "scale", "mask", "none"])
def test_rows_are_those_of_the_tensor(name: str, folder: Path) -> None:
    tensors, whole = open_tensors(str(folder)), TENSORS[name]
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 2):
            assert same(tensors.rows(name, start, stop), whole[start:stop])


@pytest.mark.parametrize("max_bytes", [1, 13, 1000])
def test_chunks_are_whole_rows_that_give_the_tensor(max_bytes: int, folder: Path) -> None:
    tensors = open_tensors(str(folder))
    for name, whole in TENSORS.items():
        chunks = list(tensors.row_chunks(name, max_bytes=max_bytes))
        assert same(torch.cat(chunks), whole) if whole.ndim and chunks else len(chunks) == min(whole.numel(), 1)
        row = whole[:1].numel() * whole.element_size() if whole.ndim else 8
        assert all(chunk.numel() * chunk.element_size() <= max(max_bytes, row) for chunk in chunks)


def test_a_file_that_was_cut_off_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"model {folder}: "):
        open_tensors(str(folder))


def test_a_dtype_that_torch_has_not_is_named(folder: Path) -> None:
    header = json.dumps({"codes": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(InputError, match="codes is stored as F4, which torch cannot hold"):
        open_tensors(str(folder))


def test_names_lead_to_the_parameters_that_transformers_makes_of_them(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_local_experts=2)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_local_experts=2
    )
    config.save_pretrained(tmp_path)
    model = skeleton(str(tmp_path), read_config(str(tmp_path)))
    names = ["w1", "w2", "w3"]
    found = parameter_names(
        model,
        [
            *(f"model.layers.0.block_sparse_moe.experts.1.{name}.weight" for name in names),
            "model.layers.0.block_sparse_moe.gate.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "mtp.fc.weight",
        ],
    )
    assert found == {
        "model.layers.0.block_sparse_moe.experts.1.w1.weight": "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.block_sparse_moe.experts.1.w2.weight": "model.layers.0.mlp.experts.down_proj",
        "model.layers.0.block_sparse_moe.experts.1.w3.weight": "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.block_sparse_moe.gate.weight": "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.q_proj.weight": "model.layers.0.self_attn.q_proj.weight",
    }
    assert all(parameter.is_meta for parameter in model.parameters())
