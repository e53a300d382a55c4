"""Tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, compared by name and arguments."""

from typing import Any

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome, ParseError
from mopdctl.verifiers.structured import parse_json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def tool_call(attempt: Attempt) -> Outcome:
    """1 if the response makes exactly the calls of `reference["calls"]`, in order.

    Arguments must have equal keys; numbers compare by value (`3` equals `3.0`, but not `true` and not `"3"`).
    """
    reference = attempt.reference
    if not isinstance(reference, dict) or not isinstance(reference.get("calls"), list):
        raise InvalidReferenceError("reference has no list 'calls'")
    want = reference["calls"]
    if not want or not all(_is_call(call) for call in want):
        raise InvalidReferenceError('\'calls\' needs calls of exactly the keys "name" and "arguments"')
    got = parse_tool_calls(attempt.response)
    if len(got) != len(want):
        return Outcome(0.0, f"{len(got)} calls instead of {len(want)}")
    for mine, theirs in zip(got, want, strict=True):
        if mine["name"] != theirs["name"]:
            return Outcome(0.0, f"calls {mine['name']!r} instead of {theirs['name']!r}")
        if not same_value(mine["arguments"], theirs["arguments"]):
            return Outcome(0.0, f"arguments of {mine['name']!r} differ")
    return Outcome(1.0, "")


def parse_tool_calls(response: str) -> list[dict[str, Any]]:
    """The calls in a response that holds nothing else. Raises ParseError for text around them or a malformed call."""
    calls = []
    rest = response.strip()
    at = 0
    while at < len(rest):
        end = rest.find(_CLOSE, at)
        if not rest.startswith(_OPEN, at) or end < 0:
            raise ParseError("text outside <tool_call>...</tool_call>")
        calls.append(parse_json(rest[at + len(_OPEN) : end]))
        at = end + len(_CLOSE)
        while at < len(rest) and rest[at].isspace():
            at += 1
    if not calls:
        raise ParseError("no tool call")
    if not all(_is_call(call) for call in calls):
        raise ParseError('a call needs exactly the keys "name" and "arguments"')
    return calls


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and set(call) == {"name", "arguments"} and isinstance(call["arguments"], dict)


def same_value(a: Any, b: Any) -> bool:
    """JSON equality with numbers compared by value; a boolean equals only a boolean."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)
