"""The tokenizer of the tiny world: a byte-level BPE trained on its own prompts, with a chat template."""

from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mopdctl.world.data import generate
from mopdctl.world.domains import DOMAINS
from mopdctl.world.examples import SYLLABLES, Example

_SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
_MARKS = ["<tool_call>", "</tool_call>"]
_VOCABULARY = 510

# Tools come first as one line each, `name(parameter:type,...)`; the assistant's part, end token included, lies inside
# `generation`, which is what SFT trains on.
CHAT_TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}(\
{%- for name, schema in tool.function.parameters.properties.items() %}{{ name }}:{{ schema.type }}\
{%- if not loop.last %},{% endif %}{% endfor %}){% if not loop.last %};{% endif %}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|end|>{% endgeneration %}
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer on a fixed sample of training text; every call gives the same one.

    Runs of letters, single digits and runs of marks are separate pieces, so that a word unseen in training is spelled
    with known syllables.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[0-9]|[^A-Za-z0-9]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(), trainer)
    tokenizer.add_tokens(_MARKS)  # not special: the tags belong to the text of an answer
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=_SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def _parameters(example: Example) -> list[tuple[str, dict[str, str]]]:
    functions = [tool["function"] for tool in example.tools or ()]
    return [item for function in functions for item in function["parameters"]["properties"].items()]


def _sample() -> list[str]:
    # Syllables alone, often enough that they are merged before anything that crosses their borders.
    texts = [s for syllable in SYLLABLES for s in (syllable, syllable.upper())] * 3000
    for domain in DOMAINS:
        for example in islice(generate(domain, "train", seed="tokenizer"), 2000):
            texts.append(example.user)
            texts.append(example.answer)
            texts += [f"{name}:{schema['type']}" for name, schema in _parameters(example)]
    return texts
