"""What stands between two turns of the assistant: the results of its calls, as the chat template writes them.

Found for any template by rendering a made-up conversation with and without the results. What the model wrote is never
rendered or tokenized again, and what a tool returned never becomes a control token.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product, starmap
from typing import Any

from mopdctl.errors import InputError
from mopdctl.records import Message
from mopdctl.train.data import template_errors
from mopdctl.train.spans import ChatModel
from mopdctl.verifiers.turns import call_id

_LEAD: Message = {"role": "user", "content": "question"}
_MARKS = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})
"""Tokens that are part of what an assistant says, also where a tokenizer calls them special."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What kind of made-up turn a template takes: templates are picky, each in its own way."""

    parallel: bool
    """All calls in it, or only the first; some refuse several calls and yet take several results."""
    reasoning: bool
    """Some write an empty think block into the last turn alone, unless there is reasoning."""
    content: str | None
    text_arguments: bool
    """The arguments of a call as JSON text, not as a mapping."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """How results get into the context of one tokenizer's conversations."""

    chat: ChatModel
    tools: Sequence[dict[str, Any]] | None
    variables: Mapping[str, Any]
    """Variables of the chat template that the prompt is rendered with."""
    shape: Shape
    place: str
    """Whose prompt it is, for messages."""

    def token_ids(self, names: Sequence[str], results: Sequence[str]) -> tuple[int, ...]:
        """The tokens between the end token of a turn and the next turn, which is told the results of its calls.

        Raises InputError if the template does not take them.
        """
        hidden, words = _hide(_control_tokens(self.chat.tokenizer), results)
        end, text = self._text(names, hidden)
        pieces = re.split(f"({'|'.join(words)})", text) if words else [text]
        ids: list[int] = []
        for piece in pieces:
            ids += self._plain_ids(words[piece]) if piece in words else self._ids(end, piece)
        return tuple(ids)

    def shows_results(self) -> bool:
        """Whether the results of two parallel calls stand in the text, in order. Raises as `token_ids`."""
        text = self._text(["first_tool", "second_tool"], ["first result", "second result"])[1]
        return 0 <= text.find("first result") < text.find("second result")

    def _text(self, names: Sequence[str], results: Sequence[str]) -> tuple[str, str]:
        """The end token after which the template goes on, and what it writes from there to the next turn."""
        arguments: Any = json.dumps({}) if self.shape.text_arguments else {}
        calls = [
            {"id": call_id(n), "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, name in enumerate(names if self.shape.parallel else names[:1])
        ]
        told: list[Message] = [
            {"role": "tool", "tool_call_id": call_id(n), "name": name, "content": result}
            for n, (name, result) in enumerate(zip(names, results, strict=True))
        ]
        turn: Message = {"role": "assistant", "content": self.shape.content, "tool_calls": calls}
        if self.shape.reasoning:
            turn["reasoning_content"] = "thought"
        with template_errors(self.place):
            lead, before = self._render([_LEAD]), self._render([_LEAD, turn])
            after = self._render([_LEAD, turn, *told], prompt=True)
            ends = self.chat.tokenizer.convert_ids_to_tokens(sorted(self.chat.eos_ids))
        found, end = max(((before.rfind(end), end) for end in ends), default=(-1, ""))
        cut = found + len(end)
        if found < len(lead) or not before.startswith(lead):
            raise InputError(
                f"{self.place}: the chat template writes no end token after a turn that calls tools, or rewrites the "
                "question before it, so that an answer cannot go on behind results"
            )
        if not after.startswith(before[:cut]):
            raise InputError(
                f"{self.place}: the chat template rewrites a turn when the results of its calls are added, so that an "
                "answer cannot go on behind them; `mopdctl doctor template` shows more"
            )
        return end, after[cut:]

    def _render(self, messages: list[Message], *, prompt: bool = False) -> str:
        return str(
            self.chat.tokenizer.apply_chat_template(
                messages,
                tools=list(self.tools) if self.tools else None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.variables,
            )
        )

    def _ids(self, end: str, text: str) -> list[int]:
        """Tokens of a text that follows an end token: some tokenizers mark the beginning of a text of its own."""
        ids: list[int] = self.chat.tokenizer(end + text, add_special_tokens=False)["input_ids"]
        if ids[0] not in self.chat.eos_ids:
            raise InputError(f"{self.place}: the tokenizer does not read {end!r} as the end token that it is")
        return ids[1:]

    def _plain_ids(self, text: str) -> list[int]:
        """Tokens that spell a text, even if there is a control token of that name."""
        return list(self.chat.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def find_bridge(
    chat: ChatModel, tools: Sequence[dict[str, Any]] | None, variables: Mapping[str, Any], *, place: str
) -> Bridge:
    """The bridge for prompts like that at `place`, in the first shape of a call that the template takes.

    Raises InputError if it takes none, drops results, or rewrites what stands before them.
    """
    refused: InputError | None = None
    for shape in starmap(Shape, product((True, False), (False, True), ("", None), (False, True))):
        bridge = Bridge(chat, tools, variables, shape, place)
        try:
            if bridge.shows_results():
                return bridge
        except InputError as error:
            refused = refused or error
    raise refused or InputError(
        f"{place}: the chat template leaves out the results of tools, so an answer cannot go on behind them; "
        "use one that writes messages of the role 'tool'"
    )


def turn_text(chat: ChatModel, token_ids: Sequence[int]) -> str:
    """What a turn says: its tokens without end tokens and special ones, tags of calls and reasoning left in."""
    silent = _silent_ids(chat.tokenizer, chat.eos_ids)
    ids = [token for token in token_ids if token not in silent]
    return str(chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=8)
def _special(tokenizer: Any) -> dict[int, str]:
    found = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return found | dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))


@lru_cache(maxsize=8)
def _silent_ids(tokenizer: Any, eos_ids: frozenset[int]) -> frozenset[int]:
    return eos_ids | {number for number, token in _special(tokenizer).items() if token not in _MARKS}


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any) -> re.Pattern[str]:
    longest_first = sorted(_special(tokenizer).values(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _hide(pattern: re.Pattern[str], texts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The texts with a word of its own for each match, one that no template rewrites, and the matches by word."""
    words: dict[str, str] = {}
    fresh: Iterator[str] = (f"hidden{n}word" for n in count())
    taken = "\n".join(texts)

    def hide(match: re.Match[str]) -> str:
        word = next(word for word in fresh if word not in taken)
        words[word] = match[0]
        return word

    return [pattern.sub(hide, text) for text in texts], words
