"""The next action: does an assistant's turn take the one that is expected, a tool call (or several) or a message?"""

from typing import Any

from mopdctl.verifiers import nemo_gym
from mopdctl.verifiers.arguments import TextOptions, same_text
from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome, ParseError
from mopdctl.verifiers.documents import parse_json
from mopdctl.verifiers.fences import without_reasoning
from mopdctl.verifiers.matching import Call, Match, check_expected, compare_calls, read_match
from mopdctl.verifiers.tool_call import read_turn
from mopdctl.verifiers.tool_schemas import tool_schemas

_KEYS = {
    "function_call": {"name", "arguments"},
    "function_call_batch": {"calls"},
    "message": {"content"},
}
_BOOKKEEPING = {"id", "call_id", "status"}  # of an item of the Responses API


def action(attempt: Attempt) -> Outcome:
    """Whether the response takes the expected action.

    The reference is a NeMo Gym `expected_action`, one of

    - `{"type": "function_call", "name": ..., "arguments": JSON text or object}`
    - `{"type": "function_call_batch", "calls": [{"name", "arguments"}, ...]}`
    - `{"type": "message", "content": ...}`

    and may have `match` (see `matching.Match`) and `compat` (`nemo-gym`, `nemo-gym-swe`; see `nemo_gym`).

    A message where a call is expected gives 0, and the other way round. Where a message is expected any message gives
    1, unless `match.content` asks for a comparison. What is said before a call is no part of it. Calls are compared as
    a multiset: a call too many or too few is wrong, also beside a single expected call. Reasoning is cut off. A
    response with neither text nor call, and a call that is malformed or cut off, is a ParseError.
    """
    reference = attempt.reference
    kind, want = _expected(reference)
    compat = reference.get("compat")
    if compat is not None:
        compare = nemo_gym.comparator(compat, reference.get("match"), want)
        return compare(_turn(attempt.response)[1])
    match = read_match(reference.get("match"), content=True)
    schemas = tool_schemas(attempt.tools)
    check_expected(want, schemas, match)
    message, got = _turn(attempt.response)
    if kind == "message":
        if got:
            return Outcome(0.0, f"calls {got[0]['name']!r} where a message is expected")
        return _compared(message, reference["content"], match)
    if not got:
        return Outcome(0.0, f"a message where a call of {want[0]['name']!r} is expected")
    return compare_calls(got, want, schemas, match, ordered=False)


def _turn(response: str) -> tuple[str, list[Call]]:
    message, calls = read_turn(without_reasoning(response))
    if not message and not calls:
        raise ParseError("neither a message nor a tool call")
    return message, calls


def _compared(message: str, expected: str, match: Match) -> Outcome:
    if match.content is None:
        return Outcome(1.0)
    text = match.text
    options = TextOptions(match.content, text.similarity, text.threshold, text.casefold, text.strip, text.whitespace)
    same = same_text(message, expected.strip(), options)
    return Outcome(float(same), "" if same else "the message differs from the expected one")


def _expected(reference: Any) -> tuple[str, list[Call]]:
    """The kind of the expected action and its calls. InvalidReferenceError where it cannot be read."""
    kind = reference.get("type") if isinstance(reference, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise InvalidReferenceError(f"reference has no 'type' out of {', '.join(_KEYS)}")
    known = _KEYS[kind] | {"type", "match", "compat"} | _BOOKKEEPING
    if unknown := sorted(str(key) for key in reference.keys() - known):
        raise InvalidReferenceError(f"a {kind} has no key {unknown[0]!r}")
    if kind == "message":
        if not isinstance(reference.get("content"), str):
            raise InvalidReferenceError("'content' of the expected message is no text")
        return kind, []
    calls = [reference] if kind == "function_call" else reference.get("calls")
    if not isinstance(calls, list) or not calls:
        raise InvalidReferenceError("'calls' is no list of calls")
    return kind, [_expected_call(call) for call in calls]


def _expected_call(call: Any) -> Call:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        raise InvalidReferenceError("an expected call has no name")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ParseError as error:
            raise InvalidReferenceError(f"the arguments of the expected {name!r} are {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidReferenceError(f"the arguments of the expected {name!r} are no JSON object")
    return {"name": name, "arguments": arguments}
