"""A student that trains an adapter: what begins, what moves, what is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopdctl.config.lora import Lora
from mopdctl.config.train import TrainConfig
from mopdctl.engines.adapters import AdaptedModel, own_weights
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.train.batch import TrainSequence, cut
from mopdctl.train.lora import add_lora, load_student
from mopdctl.train.optimizer import Optimizers, build_optimizers
from mopdctl.train.sft import cross_entropy
from mopdctl.train.step import accumulate

Make = Callable[..., Any]
PAIRS = [((3, 4 + i), tuple(range(10 + i, 16 + 2 * i))) for i in range(3)]
LORA = Lora(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(make_llama: Make, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base"
    make_llama(tie_word_embeddings=True).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def student(folder: Path, lora: Lora = LORA, *, seed: int = 0, dtype: Any = "float32") -> AdaptedModel:
    found = load_student(str(folder), lora, dtype=dtype, seed=seed)
    assert isinstance(found, AdaptedModel)
    return found


def optimizers(model: HFModel) -> Optimizers:
    return build_optimizers(model, TrainConfig(steps=9, weight_decay=0.1))


def train(model: HFModel, optimizer: Optimizers, steps: range) -> None:
    for step in steps:
        ids = [(step * 17 + 5 * j) % 100 for j in range(12)]
        rows = [TrainSequence(f"{step}", ids[:3], ids[3:], [1] * 9)]
        accumulate(
            model,
            cut(rows, reduction="token", num_micro_batches=1, pad_id=model.pad_id, device=model.device),
            cross_entropy,
        )
        optimizer.step(1e-2, 1.0)


def parts(model: HFModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of the adapter's weights and of all others."""
    state = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    return {n: t for n, t in state.items() if ".lora_" in n}, {n: t for n, t in state.items() if ".lora_" not in n}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_without_lora_all_weights_train(folder: Path) -> None:
    model = load_student(str(folder), None, dtype="float32", seed=0)
    assert type(model) is HFModel
    assert all(p.requires_grad for p in model.model.parameters())


def test_it_begins_as_the_checkpoint_to_the_bit(folder: Path) -> None:
    assert student(folder).score(PAIRS) == HFModel.load(str(folder)).score(PAIRS)


def test_the_beginning_hangs_on_the_seed_alone(folder: Path) -> None:
    torch.manual_seed(1)
    one = parts(student(folder))[0]
    torch.manual_seed(2)
    before = torch.get_rng_state()
    other = parts(student(folder))[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert same(one, other)
    assert not same(one, parts(student(folder, seed=1))[0])


def test_all_linear_is_every_linear_layer_but_the_head(folder: Path) -> None:
    adapter, rest = parts(student(folder))
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {len(t) for n, t in adapter.items() if "lora_A" in n} == {4}
    assert "lm_head.weight" in rest


def test_modules_that_are_named_are_the_only_ones(folder: Path) -> None:
    adapter, _ = parts(student(folder, Lora(rank=2, target_modules=["v_proj"])))
    assert len(adapter) == 2 * 2
    assert all("v_proj" in name for name in adapter)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "query", "norm"])
def test_a_module_that_is_no_inner_linear_layer_is_refused(folder: Path, target: str) -> None:
    with pytest.raises(InputError) as caught:
        student(folder, Lora(target_modules=["q_proj", target]))
    assert f"lora.target_modules names {target!r}" in str(caught.value)
    assert "it has down_proj, gate_proj, k_proj" in str(caught.value)


@pytest.mark.parametrize(
    "bad", [{"dropout": 0.1}, {"rank": 0}, {"alpha": 0}, {"target_modules": []}, {"target_modules": "all"}, {"r": 8}]
)
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Lora.model_validate(bad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_moves(folder: Path, dtype: str) -> None:
    model = student(folder, dtype=dtype)
    before = parts(model)
    optimizer = optimizers(model)
    trained = {id(p) for p in optimizer.parameters}
    assert trained == {id(p) for n, p in model.model.named_parameters() if ".lora_" in n}
    assert {p.dtype for p in optimizer.parameters} == {torch.float32}
    train(model, optimizer, range(3))
    after = parts(model)
    assert same(before[1], after[1])
    assert all(not torch.equal(before[0][name], tensor) for name, tensor in after[0].items())
    # TRL #6530: what trains is what samples and scores
    change = [
        abs(a - b)
        for x, y in zip(model.score(PAIRS), HFModel.load(str(folder)).score(PAIRS), strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert max(change) > 0.05


def test_the_gradient_is_the_chain_rule_through_the_product(make_model64: Make) -> None:
    # d loss / d A = s B^T G and d loss / d B = s G A^T, with G = d loss / d W of the merged weights
    ids = [(5 * j) % 100 for j in range(12)]
    rows = [TrainSequence("0", ids[:3], ids[3:], [1] * 9)]

    def run(model: HFModel) -> None:
        accumulate(
            model,
            cut(rows, reduction="token", num_micro_batches=1, pad_id=model.pad_id, device=model.device),
            cross_entropy,
        )

    model = add_lora(make_model64(), Lora(rank=3, alpha=6), path="base", seed=0)
    for name, parameter in model.model.named_parameters():
        if ".lora_" in name:
            assert parameter.dtype == torch.float64
            with torch.no_grad():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    run(model)
    whole = make_model64()
    whole.model.requires_grad_(True)
    pairs = {}
    for name, layer in model.model.named_modules():
        if hasattr(layer, "lora_A"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            pairs[name] = a, b
            with torch.no_grad():
                whole.model.get_submodule(name).weight.add_(2.0 * b @ a)
    run(whole)
    assert len(pairs) == 14
    for name, (a, b) in pairs.items():
        gradient = whole.model.get_submodule(name).weight.grad
        torch.testing.assert_close(a.grad, 2.0 * b.T @ gradient, atol=1e-10, rtol=1e-8)
        torch.testing.assert_close(b.grad, 2.0 * gradient @ a.T, atol=1e-10, rtol=1e-8)


def test_recomputed_activations_give_the_same_gradient(folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        model = student(folder)
        if checkpointing:
            model.model.gradient_checkpointing_enable()
        train(model, optimizers(model), range(3))
        found.append(parts(model)[0])
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-6, rtol=1e-5)


def test_the_base_alone_is_there_in_the_same_memory_and_frozen(folder: Path) -> None:
    model = student(folder)
    reference = model.shared.without_adapter()
    optimizer = optimizers(model)
    train(model, optimizer, range(2))
    untouched = HFModel.load(str(folder))
    assert reference.model is model.model
    assert reference.score(PAIRS) == untouched.score(PAIRS)
    # Between a forward pass and its backward pass the reference may run: nothing of the adapter's gradient is lost.
    ids = torch.tensor([[3, 4, 5, 6]])
    gradients = []
    for interrupted in (False, True):
        with model.computing():
            loss = model.model(input_ids=ids).logits.square().mean()
        if interrupted:
            # TRL #5862: a frozen model that shares modules with the student does not put it into evaluation mode
            reference.score(PAIRS)
            assert model.model.training
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None})
        model.model.zero_grad(set_to_none=True)
    assert same(*gradients)
    assert len(gradients[0]) == 28
    assert all(p.requires_grad for p in optimizer.parameters)


def test_the_head_is_the_frozen_one(folder: Path) -> None:
    model = student(folder)
    assert model.head.weight_VH is model.model.get_output_embeddings().weight
    assert not model.head.weight_VH.requires_grad


def test_a_resumable_state_holds_the_adapter_alone_and_is_exact(folder: Path, tmp_path: Path) -> None:
    straight = student(folder)
    optimizer = optimizers(straight)
    train(straight, optimizer, range(2))
    kept = own_weights(straight.model)
    assert kept.keys() == parts(straight)[0].keys()
    save_file({n: t.clone() for n, t in kept.items()}, tmp_path / "state.safetensors")
    assert sum(t.numel() for t in kept.values()) < 0.5 * sum(p.numel() for p in straight.model.parameters())

    resumed = student(folder, seed=5)  # the state takes the place of whatever it began with
    assert not resumed.model.load_state_dict(load_file(tmp_path / "state.safetensors"), strict=False).unexpected_keys
    assert same(parts(resumed)[0], parts(straight)[0])
    assert resumed.score(PAIRS) == straight.score(PAIRS)


def test_a_model_without_an_adapter_is_kept_whole(folder: Path) -> None:
    model = HFModel.load(str(folder), train=True)
    assert own_weights(model.model).keys() == model.model.state_dict().keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_student_needs_nothing_but_transformers(folder: Path, tmp_path: Path, dtype: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = student(folder, dtype=dtype)
    train(model, optimizers(model), range(3))
    model.save(tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "adapter"} <= names
    assert "adapter_config.json" not in names  # transformers would take the whole folder for an adapter

    # the base as it lies in memory, plus s B A in float64: in float32 nothing of a small change is rounded away
    base = HFModel.load(str(folder), dtype=dtype).model.state_dict()
    layers = {n: m for n, m in model.model.named_modules() if hasattr(m, "lora_A")}
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied, so that it is there once
    for name, tensor in weights.items():
        expected = base[name].double()
        if (layer := layers.get(name.removesuffix(".weight"))) is not None:
            a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
            expected = expected + 2.0 * b @ a
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), expected.detach(), atol=1e-6, rtol=0)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype == torch.float32
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "out" / "adapter"), adapter_name="x"
    )
    ids = torch.tensor([[3, 4, 5, 6]])
    if dtype == "float32":
        with torch.no_grad(), model.computing():
            ours_BTV, plain_BTV, theirs_BTV = (m(input_ids=ids).logits for m in (model.model.eval(), plain, theirs))
        torch.testing.assert_close(plain_BTV, ours_BTV, atol=5e-5, rtol=0)
        torch.testing.assert_close(theirs_BTV, ours_BTV, atol=5e-5, rtol=0)


def test_the_adapters_file_is_the_same_bytes_each_time_and_names_its_base(folder: Path, tmp_path: Path) -> None:
    model = student(folder)
    for name in ("one", "two"):
        model.save_adapter(tmp_path / name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    text = (tmp_path / "one" / "adapter_config.json").read_text("utf-8")
    assert f'"base_model_name_or_path": "{folder.resolve()}"' in text
    assert text.index('"down_proj"') < text.index('"gate_proj"') < text.index('"k_proj"') < text.index('"o_proj"')


def test_a_stale_sampler_is_a_copy_with_its_own_adapter(folder: Path) -> None:
    from mopdctl.train.loop import snapshot_of

    model = student(folder)
    optimizer = optimizers(model)
    train(model, optimizer, range(2))
    snapshot, before = snapshot_of(model, {}), model.score(PAIRS)
    train(model, optimizer, range(2, 4))
    assert snapshot.score(PAIRS) == before
    assert model.score(PAIRS) != before
