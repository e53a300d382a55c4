"""Backbone and head give a model's own logits, or the model is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from mopdctl.engines.head import hidden_states, output_head
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import active_hidden, active_logits, lay_out
from mopdctl.errors import InputError
from mopdctl.objective.head import head_logits

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    made = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
        "tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64)),
        "bias": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
        "logit_scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
        "logits_scaling": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
        # Initialised so that the logits reach the cap, else a forgotten one would not show.
        "softcap": lambda: Gemma2ForCausalLM(
            Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=1.5, initializer_range=0.5)
        ),
    }
    return made[kind]().eval()


KINDS = ["llama", "tied", "gpt2", "bias", "logit_scale", "logits_scaling", "softcap"]


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_head_give_the_models_own_logits(kind: str) -> None:
    model = build(kind)
    head = output_head(model)
    ids = torch.tensor([[5, 9, 31, 7, 7, 12]])
    with torch.no_grad():
        found = head_logits(hidden_states(model, input_ids=ids)[0], head, vocab_size=40)
        torch.testing.assert_close(found, model(input_ids=ids).logits[0], atol=1e-5, rtol=1e-5)
    if kind == "softcap":
        assert head.softcap == 1.5
        assert float(found.abs().max()) > 1.0
    assert head.scale == (0.25 if kind in ("logit_scale", "logits_scaling") else 1.0)
    assert (head.bias_V is not None) == (kind == "bias")


@pytest.mark.parametrize("kind", ["logit_scale", "logits_scaling", "softcap"])
def test_a_model_that_bends_its_logits_in_another_way_is_refused(kind: str) -> None:
    model = build(kind)
    name = {"logit_scale": "logit_scale", "logits_scaling": "logits_scaling", "softcap": "final_logit_softcapping"}
    neutral = None if kind == "softcap" else 1.0
    inner, value = model.forward, getattr(model.config, name[kind])

    def forward(*args: Any, **kwargs: Any) -> Any:
        """What the model does with a setting that nobody else knows of."""
        setattr(model.config, name[kind], value)
        out = inner(*args, **kwargs)
        setattr(model.config, name[kind], neutral)
        return out

    model.forward = forward
    setattr(model.config, name[kind], neutral)
    with pytest.raises(InputError, match="does more to its logits than product"):
        output_head(model)


def test_active_hidden_states_are_those_behind_the_active_logits() -> None:
    model = build("llama")
    layout = lay_out([[3, 4], [9]], [[5, 6, 7], [8]], pad_id=0, device=torch.device("cpu"))
    active_BR = torch.tensor([[True, False, True], [True, False, False]])
    with torch.no_grad():
        logits_NV = active_logits(model, layout, active_BR, vocab_size=40)
        hidden_NH = active_hidden(model, layout, active_BR)
    assert hidden_NH.shape == (3, 16)  # masked rows never reach a head
    torch.testing.assert_close(head_logits(hidden_NH, output_head(model), vocab_size=40), logits_NV)


def test_hidden_states_come_back_in_order_one_row_per_active_token(
    make_llama: Callable[..., Any], tokenizer: Any
) -> None:
    tiny_model = HFModel(make_llama(), tokenizer, batch_size=2)
    pairs = [((5, 6, 7), (8, 9)), ((4,), (3, 2, 1, 9)), ((11, 12), (30,))]
    masks = [[1, 1], [1, 0, 0, 1], [1]]
    found = tiny_model.hidden_states(pairs, masks)
    assert [len(states_NH) for states_NH in found] == [2, 2, 1]
    scores = tiny_model.score(pairs)
    for (_, response), mask, states_NH, row in zip(pairs, masks, found, scores, strict=True):
        logits_NV = head_logits(states_NH, tiny_model.head, vocab_size=tiny_model.vocab_size)
        active = [t for t, on in enumerate(mask) if on]
        logprobs_N = torch.log_softmax(logits_NV, -1)[range(len(active)), [response[t] for t in active]]
        assert logprobs_N.tolist() == pytest.approx([row[t] for t in active], abs=1e-5)
