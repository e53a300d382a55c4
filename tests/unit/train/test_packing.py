"""What packs hold, and that a pack gives the loss and the gradient of its sequences run separately (float64)."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import check_keeps_apart, lay_out_pack
from mopdctl.errors import InputError
from mopdctl.objective.reduction import Reduction
from mopdctl.train.batch import TrainSequence, cut, cut_packs
from mopdctl.train.packing import Packs, pack_rows
from mopdctl.train.sft import cross_entropy
from mopdctl.train.step import Accumulated, accumulate

Make = Callable[..., Any]

# ----------------------------------------------------------------------------------------------------------- the packs


def packed(
    lengths: list[int], *, capacity: int, num_packs: int, prompts: list[int] | None = None, seed: int = 0
) -> Packs:
    """Packs rows drawn in their own order, again and again."""
    numbers = prompts or list(range(len(lengths)))
    order = np.tile(np.arange(len(lengths)), num_packs + 1)
    found = pack_rows(
        order, np.array(lengths), np.array(numbers, np.uint64), capacity=capacity, num_packs=num_packs, seed=seed
    )
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=30), st.integers(1, 8))
def test_no_pack_is_empty_overfull_or_holds_a_prompt_twice(rows: list[tuple[int, int]], num_packs: int) -> None:
    lengths, prompts = [n for n, _ in rows], [p for _, p in rows]
    packs = packed(lengths, capacity=40, num_packs=num_packs, prompts=prompts)
    assert len(packs.offsets) == num_packs + 1
    for group in map(packs.group, range(num_packs)):
        assert 1 <= sum(lengths[r] for r in group) <= 40
        assert len({prompts[r] for r in group}) == len(group)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 8))
def test_rows_are_taken_in_the_order_in_which_they_are_drawn_and_none_is_skipped(
    lengths: list[int], num_packs: int
) -> None:
    packs = packed(lengths, capacity=40, num_packs=num_packs)
    full, rest = divmod(len(packs.rows), len(lengths))
    assert Counter(packs.rows.tolist()) == Counter(full * list(range(len(lengths))) + list(range(rest)))


def test_a_row_goes_into_the_fullest_pack_that_it_fits_into() -> None:
    # 6 opens a pack, 5 another, 3 fits both and belongs beside 6; 5 then fills the second one exactly
    packs = packed([6, 5, 3, 5, 1], capacity=10, num_packs=2)
    assert sorted(sorted(packs.group(n).tolist()) for n in range(2)) == [[0, 2, 4], [1, 3]]


def test_short_rows_fill_packs_almost_wholly() -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 20_000)
    order = np.arange(20_000)
    packs = pack_rows(order, lengths, order.astype(np.uint64), capacity=2048, num_packs=900, seed=0)
    assert packs is not None
    assert lengths[packs.rows].sum() / (900 * 2048) > 0.97


def test_packs_come_in_seeded_random_order() -> None:
    one, same, other = (packed([4] * 50, capacity=8, num_packs=20, seed=seed) for seed in (1, 1, 2))
    assert one.rows.tolist() == same.rows.tolist()
    assert one.rows.tolist() != other.rows.tolist()
    assert sorted(one.rows.tolist()) == sorted(other.rows.tolist())
    assert one.rows.tolist() != sorted(one.rows.tolist())


def test_an_order_that_ends_before_the_packs_are_full_packs_nothing() -> None:
    prompts = np.arange(3, dtype=np.uint64)
    assert pack_rows(np.arange(3), np.array([2, 2, 2]), prompts, capacity=10, num_packs=1, seed=0) is None


# --------------------------------------------------------------------------------------------------- loss and gradient


def qwen2(tokenizer: Any, **changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**sizes(tokenizer) | changes))


def qwen3(tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**sizes(tokenizer), head_dim=8))


def sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }


@pytest.fixture(params=["llama", "qwen2", "qwen2 sliding window", "qwen3"])
def model(request: pytest.FixtureRequest, make_model64: Make, tokenizer: Any) -> HFModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if request.param == "llama":
            found: HFModel = make_model64()
            return found
        window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        made = (
            qwen3(tokenizer) if request.param == "qwen3" else qwen2(tokenizer, **window if "s" in request.param else {})
        )
    return HFModel(made.double().eval(), tokenizer, dtype=torch.float64)


# (prompt length, loss mask): three rows of very different length among others, one with context inside its answer
ROWS = [(3, [1] * 60), (1, [1]), (20, [0, 1, 1, 0, 0, 1]), (2, [1, 1]), (7, [1] * 11), (1, [0, 0, 1])]


def sequences() -> list[TrainSequence]:
    found = []
    for i, (prompt, mask) in enumerate(ROWS):
        prompt_ids = [(13 * i + 7 * j) % 100 for j in range(prompt)]
        found.append(TrainSequence(f"s{i}", prompt_ids, [(29 * i + 11 * j + 5) % 100 for j in range(len(mask))], mask))
    return found


def run(model: HFModel, micro_batches: Any) -> tuple[Accumulated, dict[str, Tensor]]:
    model.model.zero_grad(set_to_none=True)
    result = accumulate(model, micro_batches, cross_entropy)
    found = {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}
    model.model.zero_grad(set_to_none=True)
    return result, found


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("packs", [[[0, 1, 2, 3, 4, 5]], [[0, 1, 2]], [[1, 0], [5, 4, 3, 2]], [[2], [1, 3]]], ids=str)
def test_a_pack_has_the_loss_and_the_gradient_of_its_sequences(
    model: HFModel, packs: list[list[int]], reduction: Reduction
) -> None:
    rows = sequences()
    used = [rows[i] for pack in packs for i in pack]
    apart = cut(used, reduction=reduction, num_micro_batches=len(used), pad_id=model.pad_id, device=model.device)
    one, one_gradient = run(model, apart)
    other, other_gradient = run(
        model, cut_packs([[rows[i] for i in p] for p in packs], reduction=reduction, device=model.device)
    )
    assert other.loss == pytest.approx(one.loss, abs=1e-10)
    assert other.tokens == one.tokens
    assert one_gradient.keys() == other_gradient.keys()
    assert all(g.abs().max() > 1e-3 for g in one_gradient.values())
    for name, gradient in one_gradient.items():
        assert (other_gradient[name] - gradient).abs().max() < 1e-8, name


def test_a_pack_has_the_logits_of_its_sequences(model: HFModel) -> None:
    whole = [[*s.prompt_ids, *s.response_ids] for s in sequences()]
    layout = lay_out_pack(whole, device=model.device)
    with torch.no_grad():
        together = model.model(
            input_ids=layout.input_ids_BT, position_ids=layout.position_ids_BT, use_cache=False
        ).logits[0]
        apart = torch.cat([model.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in whole])
    assert (together - apart).abs().max() < 1e-10


def test_streams_of_a_pack_go_back_to_their_samples(model64: HFModel) -> None:
    from mopdctl.train.step import Policy, TokenLoss, token_loss

    rows = [
        TrainSequence(
            s.sample_id, s.prompt_ids, s.response_ids, s.loss_mask, streams={"x": [float(i)] * len(s.loss_mask)}
        )
        for i, s in enumerate(sequences())
    ]

    def algorithm(policy: Policy, micro_batch: Any) -> TokenLoss:
        return token_loss(policy.logits_NV.sum(-1), micro_batch, streams={"x": micro_batch.streams["x"]})

    result = accumulate(model64, cut_packs([rows[:4], rows[4:]], reduction="token", device=model64.device), algorithm)
    assert result.streams["x"] == {f"s{i}": [float(i)] * sum(s.loss_mask) for i, s in enumerate(rows)}


def test_a_sequence_without_a_prompt_is_no_part_of_a_pack(model64: HFModel) -> None:
    rows = [TrainSequence("a", [1], [2], [1]), TrainSequence("b", [], [2], [1])]
    with pytest.raises(ValueError, match="another sequence"):
        cut_packs([rows], reduction="token", device=model64.device)


# -------------------------------------------------------------------------------------- models that keep them apart


def test_models_that_keep_packed_sequences_apart_are_accepted(model: HFModel) -> None:
    check_keeps_apart(model.model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_kind_of_attention_without_extra_packages_keeps_them_apart(make_llama: Make, attention: str) -> None:
    llama = make_llama()
    llama.set_attn_implementation(attention)
    check_keeps_apart(llama)


def test_a_recurrent_model_is_refused_in_one_line(tokenizer: Any) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(InputError, match=r"MambaForCausalLM takes no `position_ids`.*`packing: none`$"):
        check_keeps_apart(MambaForCausalLM(config))


def test_a_model_of_attention_and_convolutions_is_refused_in_one_line(tokenizer: Any) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(**sizes(tokenizer), layer_types=["conv", "full_attention"])
    with pytest.raises(InputError, match=r"Lfm2ForCausalLM mixes sequences of one row.*`packing: none`$"):
        check_keeps_apart(Lfm2ForCausalLM(config))


def test_a_model_that_takes_positions_but_no_hint_from_them_is_refused_in_one_line(tokenizer: Any) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(InputError, match=r"FalconForCausalLM mixes sequences of one row.*`packing: none`$"):
        check_keeps_apart(FalconForCausalLM(config))
