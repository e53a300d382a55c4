"""What an answer did: its calls are run again on a fresh state, which must end like that of the expected calls."""

from typing import Any

from mopdctl.environments.base import SetupError, ToolError
from mopdctl.environments.registry import begin, result_of
from mopdctl.verifiers.arguments import same_value
from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome
from mopdctl.verifiers.exact import nfkc
from mopdctl.verifiers.tool_call import is_call
from mopdctl.verifiers.turns import Turn, parse_turn, turn_of

BASIS = ("state", "message", "calls")


def state_replay(attempt: Attempt) -> Outcome:
    """1 if all that `reference["basis"]` names is as expected.

    The reference is `{"calls": [{"name", "arguments"}, ...], "message": text or null, "basis": [...]}`:

    - `state`: the calls of the answer leave the environment as the expected calls do, whatever the way there;
    - `message`: the last turn calls nothing and says `message`, but for case, spaces, and a full stop at the end;
    - `calls`: the answer makes exactly the expected calls, failing ones included, in order.

    Without a basis, `state` counts, and `message` where there is one. A call that the environment refuses changes
    nothing, in the replay as it did in the conversation; the calls of a last turn count, though nobody told their
    results. An expected call that it refuses, an unknown environment and a setup that it does not take make the
    reference invalid.
    """
    expected, message, basis = _reference(attempt.reference)
    turns = [turn_of(m) for m in attempt.turns if m.get("role") == "assistant"] or [parse_turn(attempt.response)]
    gold = _gold_snapshot(attempt.environment, expected)
    environment, state = begin(attempt.environment)
    made = [call for turn in turns for call in turn.calls]
    for call in made:
        result_of(environment, state, call.name, call.arguments)
    found = {
        "state": "" if same_value(environment.snapshot(state), gold) else "differs from that after the expected calls",
        "message": "" if message is None else _message_fault(turns[-1], message),
        "calls": "" if _same_calls([(c.name, c.arguments) for c in made], expected) else "differ from the expected",
    }
    failed = [f"{part}: {found[part]}" for part in basis if found[part]]
    ignored = [f"{part} (not in the basis): {found[part]}" for part in BASIS if found[part] and part not in basis]
    says = ["failed " + "; ".join(failed)] if failed else []
    return Outcome(float(not failed), "; ".join([f"basis {', '.join(basis)}", *says, *ignored]))


def _reference(reference: Any) -> tuple[list[tuple[str, dict[str, Any]]], str | None, list[str]]:
    """Expected calls, message and basis. Raises InvalidReferenceError."""
    if not isinstance(reference, dict) or not set(reference) <= {"calls", "message", "basis"}:
        raise InvalidReferenceError('a reference has the keys "calls", "message" and "basis" alone')
    calls, message = reference.get("calls"), reference.get("message")
    if not isinstance(calls, list):
        raise InvalidReferenceError("reference has no list 'calls'")
    for call in calls:
        if not is_call(call):
            raise InvalidReferenceError('\'calls\' needs calls of exactly the keys "name" and "arguments"')
    if message is not None and not isinstance(message, str):
        raise InvalidReferenceError("'message' is neither text nor null")
    basis = reference.get("basis")
    if basis is None:
        basis = ["state"] if message is None else ["state", "message"]
    if not isinstance(basis, list) or not basis or any(part not in BASIS for part in basis):
        raise InvalidReferenceError(f"'basis' is a list of {', '.join(BASIS)}")
    if "message" in basis and message is None:
        raise InvalidReferenceError("'basis' names the message, and there is none")
    return [(call["name"], call["arguments"]) for call in calls], message, [part for part in BASIS if part in basis]


def _gold_snapshot(document: Any, calls: list[tuple[str, dict[str, Any]]]) -> Any:
    """The state after the expected calls. Raises InvalidReferenceError if one of them fails."""
    try:
        environment, state = begin(document)
    except SetupError as error:
        raise InvalidReferenceError(str(error)) from None
    for number, (name, arguments) in enumerate(calls):
        try:
            environment.call(state, name, arguments)
        except ToolError as error:
            raise InvalidReferenceError(f"expected call {number} ({name}) fails: {error}") from None
    return environment.snapshot(state)


def _message_fault(last: Turn, expected: str) -> str:
    """What is wrong with the last turn as an answer; empty if nothing is."""
    if last.calls:
        return "the answer never came, the last turn calls tools"
    if _plain(last.content) != _plain(expected):
        return f"{last.content[:80]!r} instead of {expected[:80]!r}"
    return ""


def _plain(text: str) -> str:
    return " ".join(nfkc(text).casefold().split()).removesuffix(".").rstrip()


def _same_calls(made: list[tuple[str, Any]], expected: list[tuple[str, dict[str, Any]]]) -> bool:
    return len(made) == len(expected) and all(
        mine == theirs and same_value(arguments, wanted)
        for (mine, arguments), (theirs, wanted) in zip(made, expected, strict=True)
    )
