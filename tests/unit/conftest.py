"""A tokenizer and a model small enough to compare with hand-made references, in float64 where a test needs it."""

import string
from collections.abc import Callable
from typing import Any

import pytest

# `[` and `]` stand where generation tags may go.
CHATML = """\
{%- if tools %}<|im_start|>system{{ '\\n' }}{{ tools | tojson }}<|im_end|>{{ '\\n' }}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}{{ '\\n' }}
{%- if message.role == 'assistant' %}[{{ message.content or '' }}
{%- for call in message.tool_calls or () %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}<|im_end|>]{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"""


@pytest.fixture(scope="session")
def chatml() -> str:
    """A ChatML template without generation tags: each turn is `<|im_start|>role`, text, `<|im_end|>`, a line break."""
    return CHATML.replace("[", "").replace("]", "")


@pytest.fixture(scope="session")
def tagged_chatml() -> str:
    """The same template with the assistant's text and end token inside generation tags."""
    return CHATML.replace("[", "{% generation %}").replace("]", "{% endgeneration %}")


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer of printable ASCII characters, three merges and three special tokens: 106 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(*, chat_template: str | None = None, metaspace: bool = False) -> Any:
        merges = [("t", "h"), ("th", "e"), ("a", "n")]
        characters = [*string.printable, *(["\u2581"] if metaspace else []), *("".join(pair) for pair in merges)]
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(characters)}, merges))
        if metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<|pad|>",
            eos_token="<|im_end|>",
            additional_special_tokens=["<|im_start|>"],
            chat_template=chat_template,
            clean_up_tokenization_spaces=False,
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def make_llama(tokenizer: Any) -> Callable[..., Any]:
    """Makes a two-layer Llama of width 32, with weights large enough that its distributions are far from uniform."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)  # threads only get into each other's way at this size, tenfold on a busy machine

    def make(*, seed: int = 0, vocab_size: int | None = None, **changes: Any) -> Any:
        config = LlamaConfig(
            **{
                "vocab_size": vocab_size or len(tokenizer),
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
            | changes
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LlamaForCausalLM(config).eval()

    return make
