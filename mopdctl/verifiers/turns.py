"""An assistant's turn, as text or as a chat message: what it says and which tools it calls, sound calls or not."""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mopdctl.records import Message
from mopdctl.verifiers.base import ParseError
from mopdctl.verifiers.documents import parse_json
from mopdctl.verifiers.fences import TOOL_CALL_OPEN, without_reasoning
from mopdctl.verifiers.tool_call import TOOL_CALL_CLOSE, call_end, parse_call


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as it was written."""

    name: str
    """Empty where what was written is no call."""
    arguments: Any
    """A mapping in a sound call, else whatever was written."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an assistant."""

    reasoning: str | None
    """Without its tags; None where there was none, not even an empty block."""
    content: str
    """The rest without the calls, trimmed."""
    calls: tuple[WrittenCall, ...]

    def message(self, first_call: int) -> Message:
        """The turn as a chat message, whose calls have ids from `call_id(first_call)` on.

        It has `reasoning_content`, be it empty, where reasoning was cut off: see `turn_of`.
        """
        found: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {"id": call_id(n), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for n, c in enumerate(self.calls, start=first_call)
            ]
        return found


def call_id(number: int) -> str:
    """The id of call `number` of a conversation: nine letters and digits, as some chat templates demand."""
    return f"call{number:05d}"


def parse_turn(text: str) -> Turn:
    """Takes a turn apart. What is in reasoning is no call; one whose JSON is broken or cut off is kept as text.

    Where the reasoning ends is as in `fences.without_reasoning`; one that never ends is all there is.
    """
    try:
        rest = without_reasoning(text)
    except ParseError:
        rest = ""
    cut = text[: len(text) - len(rest)]
    reasoning = cut.strip().removeprefix("<think>").removesuffix("</think>").strip() if cut else None
    content, calls = _without_calls(rest)
    return Turn(reasoning, content, calls)


def _without_calls(rest: str) -> tuple[str, tuple[WrittenCall, ...]]:
    said, calls, at = [], [], 0
    while (begin := rest.find(TOOL_CALL_OPEN, at)) >= 0:
        said.append(rest[at:begin])
        begin += len(TOOL_CALL_OPEN)
        end = call_end(rest, begin)
        calls.append(_written(rest[begin:] if end < 0 else rest[begin:end]))
        at = len(rest) if end < 0 else end + len(TOOL_CALL_CLOSE)
    said.append(rest[at:])
    return "".join(said).strip(), tuple(calls)


def turn_of(message: Message) -> Turn:
    """The turn in an assistant's chat message, its calls in `tool_calls` or in the text.

    Beside `reasoning_content` the content is what remained without reasoning: none is cut off a second time.
    """
    content, reasoning = message.get("content"), message.get("reasoning_content")
    text = content if isinstance(content, str) else ""
    turn = Turn(reasoning, *_without_calls(text)) if isinstance(reasoning, str) else parse_turn(text)
    listed = message.get("tool_calls")
    if not isinstance(listed, list) or not listed:
        return turn
    return Turn(turn.reasoning, turn.content, tuple(map(_listed, listed)))


def _listed(call: Any) -> WrittenCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        return WrittenCall("", json.dumps(call))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ParseError):
            return WrittenCall(name, parse_json(arguments))
    return WrittenCall(name, arguments)


def _written(text: str) -> WrittenCall:
    try:
        call = parse_call(text)
    except ParseError:
        return WrittenCall("", text)
    return WrittenCall(call["name"], call["arguments"])
