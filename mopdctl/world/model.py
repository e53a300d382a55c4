"""The tiny model of the quickstart: a real Llama, small enough for two CPU cores."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_HIDDEN, _LAYERS, _INTERMEDIATE, _HEADS = 112, 3, 288, 4


def write_initial_model(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
    """Writes a randomly initialised model with the tokenizer as a Hugging Face folder."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
