"""Does the state before an action give the action away?

The state must end before the turn: nothing of the turn itself may be in it. What came earlier may say the same thing
(the user dictates the command, a retry runs it again, a final answer quotes a result); that is no leak. So:

- `copied_action`: the state ends with the action itself (a context that was logged twice).
- `logged_before`: the state holds a call with the id, name and arguments of one of the action's. Ids are believed only
  in a trajectory that never gives one id to two different calls (many loggers count from `call_0` in every turn).
- `result_before_call`: the state holds the result of one of the action's calls.
- `open_turn`: the assistant messages that the state ends with, which nothing separates from the action, say its
  arguments, its text or its reasoning.
- `own_reasoning`: the reasoning of the turn stands in a message that somebody else wrote. An assistant may think the
  same thought in two turns.

Texts count from 32 characters; a shorter one may be there by chance.
"""

from collections.abc import Sequence
from typing import Any

from mopdctl.pivots.chat import text_of
from mopdctl.records import Message

TELLING_CHARS = 32


def find_leak(state: Sequence[Message], action: Message, *, ids_identify: bool) -> str:
    """The kind of leak as named above, empty if there is none.

    Args:
        state: The messages before the turn, in normal form, with the ids that the source gave.
        action: The assistant message of the turn, likewise.
        ids_identify: Whether an id stands for one call; see `ids_identify`.
    """
    if state and state[-1]["role"] == "assistant" and signature(state[-1]) == signature(action):
        return "copied_action"
    if ids_identify and (kind := _known_id(state, action)):
        return kind
    start = len(state)
    while start and state[start - 1]["role"] == "assistant":
        start -= 1
    reasoning = split_reasoning(action)[0]
    told = [reasoning, *(call["function"]["arguments"] for call in action.get("tool_calls", ()))]
    told.append(split_reasoning(action)[1])
    if any(_says(message, text) for message in state[start:] for text in told):
        return "open_turn"
    if any(_says(message, reasoning) for message in state if message["role"] != "assistant"):
        return "own_reasoning"
    return ""


def ids_identify(messages: Sequence[Message]) -> bool:
    """Whether no call id stands for two calls that differ."""
    seen: dict[str, tuple[str, str]] = {}
    return all(seen.setdefault(key, call) == call for key, call in _calls(messages) if key)


def signature(message: Message) -> tuple[Any, ...]:
    """What an assistant message says and calls, whatever its ids and its reasoning."""
    calls = tuple(call for _, call in _calls([message]))
    return split_reasoning(message)[1].strip(), calls


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


def _known_id(state: Sequence[Message], action: Message) -> str:
    own = {key: call for key, call in _calls([action]) if key}
    called = dict(_calls(state))
    if any(called.get(key) == call for key, call in own.items()):
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


def _says(message: Message, text: str) -> bool:
    if len(text) < TELLING_CHARS:
        return False
    spoken = [text_of(message["content"]), message.get("reasoning_content", "")]
    spoken += [arguments for _, (_, arguments) in _calls([message])]
    return any(text in said for said in spoken)
