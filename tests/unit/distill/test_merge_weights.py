"""Weights read from disk: names, shapes, and what is not the plain weights of a model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopdctl.distill.merging.sources import load_into
from mopdctl.distill.merging.weights import check_shapes, open_weights
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError

Write = Callable[..., Path]


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny / "models" / "tools", tmp_path / "copy"))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(path: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        open_weights(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shards_are_one_checkpoint(tiny: Path, tmp_path: Path) -> None:
    whole = tiny / "models" / "tools"
    HFModel.load(str(whole)).model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    one, other = open_weights(str(whole)), open_weights(str(tmp_path))
    assert one.shapes == other.shapes
    assert all(one.tensor(name).equal(other.tensor(name)) for name in one.shapes)


def test_tensors_come_in_float64_as_they_lie_on_disk(copy: Path) -> None:
    plain = load_file(copy / "model.safetensors")
    edit_tensors(copy, lambda t: t.update({name: weight.bfloat16() for name, weight in t.items()}))
    found = open_weights(str(copy))
    assert found.shapes == {name: tuple(weight.shape) for name, weight in plain.items()}
    for name, weight in plain.items():
        assert found.tensor(name).dtype == torch.float64
        assert found.tensor(name).equal(weight.bfloat16().double())


def test_an_embedding_that_is_there_a_second_time_is_left_out(copy: Path) -> None:
    before = open_weights(str(copy)).shapes
    edit_tensors(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert open_weights(str(copy)).shapes == before


def test_a_head_of_its_own_is_a_tensor(write_tiny_model: Write, tmp_path: Path) -> None:
    found = open_weights(str(write_tiny_model(tmp_path / "own", tie_word_embeddings=False)))
    assert "lm_head.weight" in found.shapes


def test_an_adapter_is_refused(copy: Path) -> None:
    (copy / "adapter_config.json").write_text("{}", "utf-8")
    assert refusal(copy).startswith(f"model {copy}: is a LoRA adapter; a merge needs whole weights")


def test_quantized_weights_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "fp8"}
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    assert "its weights are quantized" in refusal(copy)


def test_pickled_weights_are_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "has no model.safetensors" in refusal(copy)


def test_a_broken_file_is_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"not safetensors")
    assert refusal(copy).startswith(f"model {copy}: ")


@pytest.mark.parametrize("name", ["../tools/model.safetensors", "gone.safetensors"])
def test_an_index_leads_nowhere_else(copy: Path, name: str) -> None:
    shutil.copytree(copy, copy.parent / "tools")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    assert f"its index names {name!r}, which is not in it" in refusal(copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(copy: Path, value: float) -> None:
    edit_tensors(copy, lambda t: t["model.norm.weight"].fill_(value))
    found = open_weights(str(copy))
    with pytest.raises(InputError, match=r"copy: model\.norm\.weight holds NaN or infinity"):
        found.tensor("model.norm.weight")


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"a": (2,), "b": (1, 3)}, r"teacher 'x': not of .* architecture \(b is \(1, 3\) in the teacher, \(1, 2\) in"),
        ({"a": (2,)}, r"\(b is missing in the teacher, \(1, 2\) in the student\)"),
        ({"a": (2,), "b": (1, 2), "c": (4,)}, r"\(c is \(4,\) in the teacher, missing in the student\)"),
    ],
)
def test_another_shape_is_refused_by_name(teacher: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_shapes("x", {"a": (2,), "b": (1, 2)}, teacher)


# ------------------------------------------------------------------------------------------------------- into the model


def test_experts_that_the_model_fuses_find_their_places(tiny_tokenizer: Any, tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    models = [Qwen3MoeForCausalLM(config) for _ in range(2)]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
        tiny_tokenizer.save_pretrained(tmp_path / str(number))
    assert {n for n, _ in models[0].named_parameters()} != set(open_weights(str(tmp_path / "0")).shapes)
    student = HFModel.load(str(tmp_path / "0"), train=True)
    other = open_weights(str(tmp_path / "1"))
    load_into(student, {name: other.tensor(name).float() for name in other.shapes})
    wanted = dict(models[1].named_parameters())
    assert {n for n, _ in student.model.named_parameters()} == wanted.keys()
    for name, weight in student.model.named_parameters():
        assert weight.equal(wanted[name]), name
        assert weight.requires_grad


def test_tied_weights_stay_tied_and_trainable(tiny: Path) -> None:
    student = HFModel.load(str(tiny / "models" / "student"), train=True)
    before = dict(student.model.named_parameters())
    other = open_weights(str(tiny / "models" / "tools"))
    load_into(student, {name: other.tensor(name).float() for name in other.shapes})
    assert student.model.get_output_embeddings().weight is student.model.get_input_embeddings().weight
    for name, weight in student.model.named_parameters():
        assert weight is before[name]  # an optimizer that holds it goes on with it
        assert weight.double().equal(other.tensor(name))


def test_tensors_that_the_model_has_not_or_lacks_are_refused(tiny: Path) -> None:
    student = HFModel.load(str(tiny / "models" / "student"), train=True)
    own = open_weights(str(tiny / "models" / "student"))
    whole = {name: own.tensor(name).float() for name in own.shapes}
    fewer = {name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}
    for wrong, name in ((fewer, r"model\.norm\.weight"), (whole | {"more": torch.ones(2)}, "more")):
        with pytest.raises(InputError, match=f"{name} on disk does not fit the model"):
            load_into(student, wrong)
