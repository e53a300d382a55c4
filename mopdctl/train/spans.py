"""Where in the rendered text of a conversation the assistant's own words stand, which are what is trained."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

from mopdctl.errors import InputError

Messages = list[dict[str, Any]]
Span = tuple[int, int]
"""Begin and end of a piece of text, in characters."""


class ChatModel(Protocol):
    """What is needed to turn messages into tokens: a model, or its tokenizer and end tokens alone."""

    @property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends an answer."""


def check_control_tokens(model: ChatModel, messages: Sequence[dict[str, Any]], tools: Any, place: str) -> None:
    """Raises InputError for text that the tokenizer would read as control tokens, which only the template may write.

    The assistant's own text may hold tokens that are special to some tokenizers, think tags for one, but no end token.
    """
    special, ends = _control_tokens(model.tokenizer, model.eos_ids)
    parts: list[tuple[str, Any, re.Pattern[str]]] = [("'tools'", tools, special)]
    for number, message in enumerate(messages):
        assistant = message["role"] == "assistant"
        parts.append((f"message {number}", message, ends if assistant else special))
    for part, value, forbidden in parts:
        for text in _strings(value):
            if found := forbidden.search(text):
                raise InputError(
                    f"{place}: {part} holds the control token {found[0]!r} as text; remove it or drop the row"
                )


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any, eos_ids: frozenset[int]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds the special tokens in a text, and the end tokens among them."""
    special = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    special |= {str(t): tokenizer.convert_tokens_to_ids(t) for t in tokenizer.all_special_tokens}
    ends = [token for token, number in special.items() if number in eos_ids]
    return _any_of(special), _any_of(ends)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _render(model: ChatModel, messages: Messages, tools: Any, *, prompt: bool) -> str:
    return str(model.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))


def spans_by_prefix(
    model: ChatModel, messages: Messages, tools: Any, place: str, loss_on: str
) -> tuple[str, list[Span]]:
    """Spans from rendering up to each assistant turn, where the text ends. Raises InputError if the template moves."""
    text = ""
    answers: list[Span] = []
    for end, message in enumerate(messages, start=1):
        if message["role"] != "assistant":
            continue
        before = _render(model, messages[: end - 1], tools, prompt=True) if end > 1 else ""
        after = _render(model, messages[:end], tools, prompt=False)
        if not before or not before.startswith(text) or not after.startswith(before):
            raise InputError(
                f"{place}: the chat template rewrites earlier turns or the assistant speaks first, so the loss mask is "
                "unknown; use a template with {% generation %} tags"
            )
        answers.append((len(before), len(after)))
        text = after
    return text, answers[-1:] if loss_on == "last_assistant" else answers


def spans_by_tags(model: ChatModel, messages: Messages, tools: Any, place: str, loss_on: str) -> tuple[str, list[Span]]:
    """Spans from the template's `{% generation %}` blocks, without what the generation prompt has of them."""
    text, spans = _tagged(model, messages, tools)
    if loss_on == "last_assistant":
        last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        spans = spans[len(_tagged(model, messages[:last], tools)[1]) if last else 0 :]
    inserted = _generation_prompt(model, messages, tools)
    return text, [(_after_prompt(text, begin, end, inserted), end) for begin, end in spans]


def _tagged(model: ChatModel, messages: Messages, tools: Any) -> tuple[str, list[Span]]:
    """The rendered text and where its generation blocks lie.

    `apply_chat_template` gives these as a token mask only, which loses characters of several tokens at an edge and
    trains on all that follows a block whose last character is in no token.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=model.tokenizer.get_chat_template(tools=tools),
        return_assistant_tokens_mask=True,
        **model.tokenizer.special_tokens_map,
    )
    return texts[0], spans[0]


def _generation_prompt(model: ChatModel, messages: Messages, tools: Any) -> str:
    """What the template writes to make the assistant speak, read off the first answer to a user; "" without one."""
    pairs = pairwise(messages)
    end = next((i for i, (m, n) in enumerate(pairs, 1) if m["role"] == "user" and n["role"] == "assistant"), 0)
    if not end:
        return ""
    prompt, plain = (_render(model, messages[:end], tools, prompt=flag) for flag in (True, False))
    return prompt[len(plain) :] if prompt.startswith(plain) else ""


def _after_prompt(text: str, begin: int, end: int, prompt: str) -> int:
    """Where the assistant's own part of a block begins that may hold the end of the generation prompt."""
    for length in range(len(prompt), 0, -1):  # of the prompt, `length` characters lie in the block
        start = begin + length - len(prompt)
        if length <= end - begin and start >= 0 and text.startswith(prompt, start):
            return begin + length
    return begin
