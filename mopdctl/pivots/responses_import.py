"""The importer of OpenAI Responses items: requests with their outputs, and rollouts of NeMo Gym.

A row holds `input` (items or text), or `responses_create_params` with it; then `output`, or `response` with it; and
perhaps `instructions`, `tools`, `id`, `domain`, `reward`. `{"items": [...]}` is read as an input.
"""

from collections.abc import Iterator
from typing import Any

from mopdctl.pivots.audit import Reason, UnusableError
from mopdctl.pivots.chat import chat_tools, is_cut, json_value, normal_message, refuses, reward_of, row_id
from mopdctl.pivots.responses import ConversionError, Item, grouped, is_output, item_type, message_of
from mopdctl.pivots.trajectory import Step, Trajectory

_COMPACTION = ("compaction", "compaction_summary", "compaction_trigger", "context_compaction")
_CHAT_HAS = ("message", "reasoning", "function_call", "function_call_output")
_OPEN = ("in_progress", "incomplete")


def import_responses(row: dict[str, Any], place: str) -> Iterator[Trajectory]:
    """The trajectory in a row. Raises UnusableError.

    After an item that chat messages cannot hold (a search that the server ran, a compaction) no later turn is usable,
    since its state is not known; the turns before it are.
    """
    if row.get("expected_action") is not None:
        raise UnusableError(Reason.PIVOT_ROW, "holds an 'expected_action'; export made it, select from its source")
    request = row.get("responses_create_params") or row
    if not isinstance(request, dict):
        raise UnusableError(Reason.MALFORMED, "'responses_create_params' must be an object")
    response = row.get("response") or {}
    if not isinstance(response, dict):
        raise UnusableError(Reason.MALFORMED, "'response' must be an object")
    items = _items(request.get("input") or row.get("items"), "input", "user")
    written = _items(response.get("output") or row.get("output"), "output", "assistant")
    instructions = request.get("instructions")
    if isinstance(instructions, str) and instructions:
        items = [{"type": "message", "role": "system", "content": instructions}, *items]
    if not items and not written:
        raise UnusableError(Reason.MALFORMED, "holds no items in 'input', 'items' or 'output'")
    try:
        steps = list(_steps([*items, *written], _unseen(request) or _unseen(response)))
    except ConversionError as error:
        raise UnusableError(Reason.MALFORMED, str(error)) from None
    if steps and steps[-1].message["role"] == "assistant" and (end := _ending(response or row)):
        last = steps[-1]
        steps[-1] = Step(last.message, last.unusable or end[0], last.detail or end[1])
    yield Trajectory(
        trajectory_id=row_id(row, "trajectory_id", "id") or row_id(response, "id") or place,
        steps=tuple(steps),
        tools=chat_tools(request.get("tools") or row.get("tools")),
        domain=row["domain"] if isinstance(row.get("domain"), str) else "",
        reward=reward_of(row.get("reward")),
        environment=row["environment"] if isinstance(row.get("environment"), dict) else None,
        source=place,
    )


def _items(value: Any, name: str, speaker: str) -> list[Item]:
    """The items in a field; text is one message of its speaker. Raises UnusableError."""
    items = value
    if isinstance(value, str):
        try:
            items = json_value(value, name)  # tables store items as text
        except UnusableError:
            items = None
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            return [{"type": "message", "role": speaker, "content": value}] if value else []
    if not isinstance(items, list | None) or not all(isinstance(item, dict) for item in items or ()):
        raise UnusableError(Reason.MALFORMED, f"{name!r} must be text or a list of items")
    return items or []


def _unseen(request: dict[str, Any]) -> tuple[Reason, str] | None:
    """Why the state of a request is more than its items, if it is: a server put something before them."""
    for key in ("previous_response_id", "conversation", "prompt"):
        value = request.get(key)
        # `prompt` is a stored template by its id; a table may well have a text of that name.
        named = value.get("id") if isinstance(value, dict) else value if key != "prompt" else None
        if isinstance(named, str) and named:
            return Reason.INCOMPLETE_STATE, f"goes on from a {key} that the row does not hold"
    return None


def _steps(items: list[Item], broken: tuple[Reason, str] | None) -> Iterator[Step]:
    segment: list[Item] = []
    at = 0
    for item in [*items, None]:
        if item is not None and item_type(item) in _CHAT_HAS:
            segment.append(item)
            continue
        for group in grouped(segment):
            yield _step(group, f"item {at}", broken)
            at += len(group)
        segment = []
        at += 1
        if item is not None:
            kind = item_type(item)
            reason = Reason.AFTER_COMPACTION if kind in _COMPACTION else Reason.UNSUPPORTED_ITEM
            broken = broken or (reason, f"after an item of type {kind!r}")


def _step(group: list[Item], where: str, broken: tuple[Reason, str] | None) -> Step:
    message, _ = normal_message(message_of(group, where), where)
    if not is_output(group[0]):
        return Step(message)
    if broken:
        return Step(message, *broken)
    if any(item.get("is_copied_context") for item in group):
        return Step(message, Reason.COPIED_CONTEXT)
    for item in group:
        if item.get("status") in _OPEN:
            return Step(message, Reason.UNFINISHED, f"{item_type(item)} is {item['status']}")
        if item.get("status") == "failed" or item.get("error"):
            return Step(message, Reason.ERRORED, str(item.get("error") or "failed")[:200])
    if refuses(message):
        return Step(message, Reason.REFUSAL)
    return Step(message)


def _ending(response: dict[str, Any]) -> tuple[Reason, str] | None:
    """How a response ended, if not well. It speaks of the last model call alone."""
    if response.get("error") or response.get("status") in ("failed", "cancelled"):
        return Reason.ERRORED, str(response.get("error") or response.get("status"))[:200]
    details = response.get("incomplete_details")
    why = details.get("reason") if isinstance(details, dict) else None
    if response.get("status") in _OPEN or (isinstance(why, str) and is_cut(why)):
        return Reason.UNFINISHED, str(why or response.get("status"))
    return None
