"""Does the state before an action give the action away?

The state must end before the turn: nothing of the turn itself may be in it. What came earlier may say the same thing
(the user dictates the command, a retry runs it again, a final answer quotes a result); that is no leak. So:

- `copied_action`: the state ends with the action itself (a context that was logged twice).
- `logged_before`: the state holds a call with the id, name and arguments of one of the action's. An id is believed
  only if its trajectory never gives it to two different calls (many loggers count from `call_0` in every turn).
- `result_before_call`: the state holds the result of one of the action's calls.
- `open_turn`: the assistant messages that the state ends with, which nothing separates from the action, say its
  arguments, its text or its reasoning.
- `own_reasoning`: the reasoning of the turn stands in a message that somebody else wrote. An assistant may think the
  same thought in two turns.

Texts count from 32 characters; a shorter one may be there by chance. However white space is written, and however the
same arguments are, they are the same.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from mopdctl.pivots.chat import text_of
from mopdctl.records import Message
from mopdctl.verifiers.base import levels

TELLING_CHARS = 32


def find_leak(state: Sequence[Message], action: Message, *, reused: frozenset[str]) -> str:
    """The kind of leak as named above, empty if there is none.

    Args:
        state: The messages before the turn, in normal form, with the ids that the source gave.
        action: The assistant message of the turn, likewise.
        reused: Ids that do not stand for one call; see `reused_ids`.
    """
    if state and state[-1]["role"] == "assistant" and signature(state[-1]) == signature(action):
        return "copied_action"
    if kind := _known_id(state, action, reused):
        return kind
    start = len(state)
    while start and state[start - 1]["role"] == "assistant":
        start -= 1
    reasoning = split_reasoning(action)[0]
    told = [reasoning, split_reasoning(action)[1]]
    told += [text for _, (_, arguments) in _calls([action]) for text in _spellings(arguments)]
    if any(_says(message, text) for message in state[start:] for text in told):
        return "open_turn"
    if any(_says(message, reasoning) for message in state if message["role"] != "assistant"):
        return "own_reasoning"
    return ""


def reused_ids(messages: Sequence[Message]) -> frozenset[str]:
    """The call ids that stand for two calls that differ."""
    seen: dict[str, tuple[str, str]] = {}
    return frozenset(key for key, call in _calls(messages) if key and not _same_call(seen.setdefault(key, call), call))


def signature(message: Message) -> tuple[Any, ...]:
    """What an assistant message says and calls, whatever its ids and its reasoning."""
    calls = tuple((name, _canonical(arguments)) for _, (name, arguments) in _calls([message]))
    return " ".join(split_reasoning(message)[1].split()), calls


def split_reasoning(message: Message) -> tuple[str, str]:
    """The reasoning of an assistant message, in its own field and in a think block that opens its text; and the rest.

    A block that is not closed is all reasoning. Texts that a template opened for the model have only the closing tag.
    """
    text, field = text_of(message["content"]), message.get("reasoning_content", "")
    opened = text.lstrip().startswith("<think>")
    if "</think>" in text if opened else "\n</think>" in text:
        block, _, rest = text.partition("</think>")
    elif opened:
        block, rest = text, ""
    else:
        return field, text
    block = block.strip().removeprefix("<think>").strip()
    return "\n".join(part for part in (field, block) if part), rest.lstrip("\n")


def _known_id(state: Sequence[Message], action: Message, reused: frozenset[str]) -> str:
    own = {key: call for key, call in _calls([action]) if key and key not in reused}
    if any(key in own and _same_call(call, own[key]) for key, call in _calls(state)):
        return "logged_before"
    if any(message.get("tool_call_id") in own for message in state if message["role"] == "tool"):
        return "result_before_call"
    return ""


def _calls(messages: Sequence[Message]) -> list[tuple[str, tuple[str, str]]]:
    return [
        (call["id"], (call["function"]["name"], call["function"]["arguments"]))
        for message in messages
        for call in message.get("tool_calls", ())
    ]


def _same_call(one: tuple[str, str], other: tuple[str, str]) -> bool:
    return one == other or (one[0] == other[0] and _canonical(one[1]) == _canonical(other[1]))


def _canonical(arguments: str) -> str:
    """One spelling of all texts that are the same JSON; a text that is none stays as it is."""
    try:
        return json.dumps(json.loads(arguments, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _spellings(arguments: str) -> Iterator[str]:
    """The text of arguments, and how others are likely to write the same."""
    yield arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return
    for separators in ((", ", ": "), (",", ":")):
        yield json.dumps(value, ensure_ascii=False, separators=separators)
    yield _canonical(arguments)


def _says(message: Message, text: str) -> bool:
    words = text.split()
    plain = " ".join(words)
    if len(plain) < TELLING_CHARS:
        return False
    longest = max(words, key=len)  # Most messages lack it: they are long, and need not be normalised.
    return any(longest in said and plain in " ".join(said.split()) for said in _spoken(message))


def _spoken(message: Message) -> Iterator[str]:
    content = message["content"]
    if isinstance(content, str):
        yield content
    else:
        # Of a part of whatever type, and what several parts of text say together.
        yield "".join(part["text"] for part in content if isinstance(part.get("text"), str))
        yield from (said for level in levels(content) for said in level if isinstance(said, str))
    yield message.get("reasoning_content", "")
    for _, (_, arguments) in _calls([message]):
        yield from _spellings(arguments)
