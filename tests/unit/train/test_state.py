from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopdctl.config.train import TrainConfig
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import token_logprobs
from mopdctl.train.batch import TrainSequence, cut
from mopdctl.train.optimizer import Optimizers, build_optimizers
from mopdctl.train.sft import cross_entropy
from mopdctl.train.state import load_state, save_state, saved_steps
from mopdctl.train.step import accumulate

Make = Callable[..., Any]
Start = Callable[..., tuple[HFModel, Optimizers]]


@pytest.fixture
def start(make_llama: Make, tokenizer: Any) -> Start:
    def begin(*, seed: int = 0, optimizer: str = "adamw", **changes: Any) -> tuple[HFModel, Optimizers]:
        model = HFModel(make_llama(seed=seed, **changes), tokenizer)
        config = TrainConfig.model_validate({"steps": 9, "weight_decay": 0.1, "optimizer": optimizer})
        return model, build_optimizers(model, config)

    return begin


def train(model: HFModel, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        ids = [(step * 17 + 5 * j) % 100 for j in range(12)]
        rows = [TrainSequence(f"{step}", ids[:3], ids[3:], [1] * 9)]
        accumulate(
            model,
            cut(rows, reduction="token", num_micro_batches=1, pad_id=model.pad_id, device=model.device),
            cross_entropy,
        )
        optimizers.step(1e-3 * (step + 1), 1.0)


def snapshot(model: HFModel, optimizers: Optimizers) -> dict[str, Tensor]:
    """Every weight and every moment by name."""
    found = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    for name, parameter in model.model.named_parameters():
        for part in optimizers.parts:
            for key, value in part.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = value.clone()
    return found


def assert_bitwise(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].dtype != other[name].dtype] == []
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_and_moments_come_back_bit_by_bit(tmp_path: Path, start: Start, optimizer: str, tied: bool) -> None:
    model, optimizers = start(optimizer=optimizer, tie_word_embeddings=tied)
    train(model, optimizers, range(3))
    save_state(tmp_path, 3, model.model, optimizers, keep_last=1)
    other, other_optimizers = start(seed=9, optimizer=optimizer, tie_word_embeddings=tied)
    assert load_state(tmp_path, other.model, other_optimizers) == (3, {})
    assert_bitwise(snapshot(other, other_optimizers), snapshot(model, optimizers))
    assert any("/" in name for name in snapshot(other, other_optimizers))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, start: Start, optimizer: str, tied: bool
) -> None:
    straight, straight_optimizers = start(optimizer=optimizer, tie_word_embeddings=tied)
    train(straight, straight_optimizers, range(5))

    model, optimizers = start(optimizer=optimizer, tie_word_embeddings=tied)
    train(model, optimizers, range(3))
    save_state(tmp_path, 3, model.model, optimizers, keep_last=1)
    resumed, resumed_optimizers = start(seed=9, optimizer=optimizer, tie_word_embeddings=tied)
    step, _ = load_state(tmp_path, resumed.model, resumed_optimizers)
    train(resumed, resumed_optimizers, range(step, 5))
    assert_bitwise(snapshot(resumed, resumed_optimizers), snapshot(straight, straight_optimizers))


def test_tied_weights_are_still_one_tensor_after_loading(tmp_path: Path, start: Start) -> None:
    model, optimizers = start(tie_word_embeddings=True)
    save_state(tmp_path, 1, model.model, optimizers, keep_last=1)
    other, other_optimizers = start(seed=9, tie_word_embeddings=True)
    load_state(tmp_path, other.model, other_optimizers)
    assert other.model.lm_head.weight is other.model.model.embed_tokens.weight
    logits = model.model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert torch.equal(other.model(input_ids=torch.tensor([[1, 2, 3]])).logits, logits)


def test_frozen_parameters_without_moments_are_no_obstacle(tmp_path: Path, start: Start, make_llama: Make) -> None:
    model, _ = start()
    model.model.get_input_embeddings().weight.requires_grad_(False)
    optimizers = build_optimizers(model, TrainConfig(steps=9))
    train(model, optimizers, range(2))
    save_state(tmp_path, 2, model.model, optimizers, keep_last=1)
    other, _ = start(seed=9)
    other.model.get_input_embeddings().weight.requires_grad_(False)
    other_optimizers = build_optimizers(other, TrainConfig(steps=9))
    assert load_state(tmp_path, other.model, other_optimizers)[0] == 2
    assert_bitwise(snapshot(other, other_optimizers), snapshot(model, optimizers))


def test_extra_tensors_come_back_bit_by_bit_even_where_two_share_memory(tmp_path: Path, start: Start) -> None:
    model, optimizers = start()
    row = torch.arange(6, dtype=torch.float64) / 7
    extra = {"row": row, "same": row, "column": row.view(3, 2).T, "empty": torch.zeros(0), "count": torch.tensor(7)}
    save_state(tmp_path, 1, model.model, optimizers, extra=extra, keep_last=1)
    _, found = load_state(tmp_path, model.model, optimizers)
    assert_bitwise(found, extra)


def test_a_run_without_a_state_begins_at_step_zero_with_its_own_weights(tmp_path: Path, start: Start) -> None:
    model, optimizers = start()
    before = snapshot(model, optimizers)
    assert load_state(tmp_path / "none", model.model, optimizers) == (0, {})
    assert_bitwise(snapshot(model, optimizers), before)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_only_the_newest_states_are_kept(tmp_path: Path, start: Start, keep_last: int) -> None:
    model, optimizers = start()
    for step in (2, 4, 100, 1_000_000):
        train(model, optimizers, range(step, step + 1))
        save_state(tmp_path, step, model.model, optimizers, keep_last=keep_last)
    assert saved_steps(tmp_path) == [2, 4, 100, 1_000_000][-keep_last:]
    assert len(list(tmp_path.iterdir())) == keep_last
    other, other_optimizers = start(seed=9)
    assert load_state(tmp_path, other.model, other_optimizers)[0] == 1_000_000
    assert_bitwise(snapshot(other, other_optimizers), snapshot(model, optimizers))


def test_a_state_that_was_never_finished_is_ignored(tmp_path: Path, start: Start) -> None:
    model, optimizers = start()
    train(model, optimizers, range(1))
    save_state(tmp_path, 1, model.model, optimizers, keep_last=1)
    saved = snapshot(model, optimizers)
    # what a kill leaves: a temporary folder, and a state whose last file was never written
    for name, files in {".step-000002.building": ("model.safetensors", "state.json"), "step-000003": ("x",)}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(b"half")
    train(model, optimizers, range(1, 3))
    assert saved_steps(tmp_path) == [1]
    assert load_state(tmp_path, model.model, optimizers)[0] == 1
    assert_bitwise(snapshot(model, optimizers), saved)
    # and the next save is not hindered by the leftovers
    save_state(tmp_path, 2, model.model, optimizers, keep_last=2)
    assert saved_steps(tmp_path) == [1, 2]


def test_a_failed_save_leaves_the_older_state_and_no_rubbish(tmp_path: Path, start: Start) -> None:
    model, optimizers = start()
    save_state(tmp_path, 1, model.model, optimizers, keep_last=1)
    unsaveable = {"sparse": torch.eye(3).to_sparse()}
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        save_state(tmp_path, 2, model.model, optimizers, extra=unsaveable, keep_last=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert load_state(tmp_path, model.model, optimizers)[0] == 1


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"intermediate_size": 64}, {"tie_word_embeddings": True}],
    ids=str,
)
def test_the_state_of_another_model_is_refused(tmp_path: Path, start: Start, changes: dict[str, Any]) -> None:
    model, optimizers = start()
    save_state(tmp_path, 1, model.model, optimizers, keep_last=1)
    other, other_optimizers = start(**changes)
    with pytest.raises((ValueError, RuntimeError)):
        load_state(tmp_path, other.model, other_optimizers)


def test_a_state_without_an_output_head_is_refused_by_a_model_that_has_one(tmp_path: Path, start: Start) -> None:
    model, optimizers = start(tie_word_embeddings=True)
    save_state(tmp_path, 1, model.model, optimizers, keep_last=1)
    other, other_optimizers = start(tie_word_embeddings=False)
    with pytest.raises(ValueError, match="lm_head"):
        load_state(tmp_path, other.model, other_optimizers)


def test_a_loaded_model_scores_like_the_saved_one(tmp_path: Path, start: Start) -> None:
    model, optimizers = start()
    train(model, optimizers, range(2))
    save_state(tmp_path, 2, model.model, optimizers, keep_last=1)
    other, other_optimizers = start(seed=9)
    load_state(tmp_path, other.model, other_optimizers)
    tokens = torch.tensor([5, 6, 7, 8])
    one, two = (
        token_logprobs(m.model(input_ids=tokens.unsqueeze(0)).logits[0, :-1], tokens[1:]) for m in (model, other)
    )
    assert torch.equal(one, two)
