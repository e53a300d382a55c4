"""Tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, compared by name and arguments."""

import json
import re
from contextlib import suppress
from typing import Any

from mopdctl.verifiers import nemo_gym
from mopdctl.verifiers.arguments import unusable
from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome, ParseError
from mopdctl.verifiers.documents import parse_json
from mopdctl.verifiers.fences import TOOL_CALL_OPEN, without_reasoning
from mopdctl.verifiers.matching import check_expected, compare_calls, read_match
from mopdctl.verifiers.tool_schemas import tool_schemas

TOOL_CALL_CLOSE = "</tool_call>"

_BEFORE_OBJECT = re.compile(r"\s*(?:```(?:json)?[^\S\n]*\n\s*)?(?=\{)")
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


def tool_call(attempt: Attempt) -> Outcome:
    """1 if the response makes exactly the calls of `reference["calls"]` and says nothing else.

    Arguments are compared as `arguments.same_arguments` says, with the schemas of `attempt.tools` where there are some;
    a call of an unknown tool or with arguments that break its schema is wrong. More keys of the reference:

    - `ordered` (default true): whether the calls have to come in their order. Calls that act on something rarely
      commute, so that freedom is asked for.
    - `match`: see `matching.Match`, without `content`.
    - `compat`: `nemo-gym` or `nemo-gym-swe`: see `nemo_gym`; `match` then holds that comparator's own options, and the
      order is free.

    Reasoning is cut off (see `fences.without_reasoning`). Wanted calls that the tools forbid are an
    InvalidReferenceError.
    """
    reference = attempt.reference
    if not isinstance(reference, dict) or not isinstance(reference.get("calls"), list):
        raise InvalidReferenceError("reference has no list 'calls'")
    known = ("calls", "ordered", "match", "compat")
    if unknown := sorted(str(key) for key in reference.keys() - set(known)):
        raise InvalidReferenceError(f"reference has an unknown key {unknown[0]!r}; there are {', '.join(known)}")
    want, ordered, compat = reference["calls"], reference.get("ordered", True), reference.get("compat")
    if not want or not all(is_call(call) for call in want):
        raise InvalidReferenceError('\'calls\' needs calls of exactly the keys "name" and "arguments"')
    if not isinstance(ordered, bool):
        raise InvalidReferenceError("'ordered' has to be true or false")
    if compat is not None:
        compare = nemo_gym.comparator(compat, reference.get("match"), want)
        return compare(parse_tool_calls(without_reasoning(attempt.response)))
    match = read_match(reference.get("match"), content=False)
    schemas = tool_schemas(attempt.tools)
    check_expected(want, schemas, match)
    got = parse_tool_calls(without_reasoning(attempt.response))
    return compare_calls(got, want, schemas, match, ordered=ordered)


def read_turn(response: str) -> tuple[str, list[dict[str, Any]]]:
    """What an assistant's turn says (stripped) and the calls after it; either may be empty.

    Raises ParseError for text after a call, or for a call that is malformed or cut off.
    """
    start = response.find(TOOL_CALL_OPEN)
    if start < 0:
        if TOOL_CALL_CLOSE in response:
            raise ParseError(f"{TOOL_CALL_CLOSE} without {TOOL_CALL_OPEN}")
        return response.strip(), []
    return response[:start].strip(), parse_tool_calls(response[start:])


def parse_tool_calls(response: str) -> list[dict[str, Any]]:
    """The calls in a response that holds nothing else. Raises ParseError for text around them or a malformed call."""
    calls = []
    rest = response.strip()
    at = 0
    while at < len(rest):
        if not rest.startswith(TOOL_CALL_OPEN, at):
            raise ParseError("text outside <tool_call>...</tool_call>")
        begin = at + len(TOOL_CALL_OPEN)
        end = call_end(rest, begin)
        if end < 0:
            raise ParseError("a tool call never ends")
        calls.append(parse_call(rest[begin:end]))
        at = end + len(TOOL_CALL_CLOSE)
        while at < len(rest) and rest[at].isspace():
            at += 1
    if not calls:
        raise ParseError("no tool call")
    return calls


def call_end(text: str, begin: int) -> int:
    """Where the tag stands that closes the call whose JSON begins at `begin`; -1 if there is none.

    A tag within a string of a sound JSON object is data. Where there is no such object, the first tag closes the call.
    """
    if start := _BEFORE_OBJECT.match(text, begin):
        with suppress(ValueError, RecursionError):
            _, begin = _DECODER.raw_decode(text, start.end())
    return text.find(TOOL_CALL_CLOSE, begin)


def parse_call(text: str) -> dict[str, Any]:
    """The call that stands between two tags. Raises ParseError for anything else."""
    call = parse_json(text)
    if not isinstance(call, dict) or not is_call(call):
        raise ParseError('a call needs exactly the keys "name" (a text) and "arguments" (an object)')
    if problem := unusable(call["arguments"]):
        raise ParseError(f"arguments of {call['name']!r}: {problem}")
    return call


def is_call(call: Any) -> bool:
    """Whether this is `{"name": text, "arguments": object}` and nothing else."""
    return (
        isinstance(call, dict)
        and set(call) == {"name", "arguments"}
        and isinstance(call["name"], str)
        and isinstance(call["arguments"], dict)
    )
