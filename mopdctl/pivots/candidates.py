"""Pivot candidates: one assistant turn of a trajectory, as the state before it and the action that was taken."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import read_jsonl, writing
from mopdctl.records import Message

FUNCTION_CALL, BATCH, MESSAGE = "function_call", "function_call_batch", "message"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One decision of an expert: what it saw and what it did."""

    candidate_id: str
    """`<trajectory_id>#<turn>`, unique in its file."""
    trajectory_id: str
    turn: int
    """Number of the assistant turn in its trajectory, from 0."""
    messages: tuple[Message, ...]
    """The state: everything before the action, as chat messages."""
    tools: tuple[dict[str, Any], ...] | None
    """All tools of the trajectory, as OpenAI function schemas."""
    action: dict[str, Any]
    """`{"type": "function_call", "name", "arguments": JSON text}`, `{"type": "function_call_batch", "calls": [...]}` or
    `{"type": "message", "content"}`; with `match` options of the verifier `action` where they were asked for."""
    domain: str = ""
    environment: dict[str, Any] | None = None
    source: str = ""
    """`file:line` or `file#index`."""


def action_tool(action: dict[str, Any]) -> str:
    """The tool that an action calls; of a batch its tools in order, joined by `+`; `(message)` for a message."""
    if action["type"] == BATCH:
        return "+".join(call["name"] for call in action["calls"])
    return str(action["name"]) if action["type"] == FUNCTION_CALL else "(message)"


def write_candidates(path: Path, candidates: Iterable[Candidate]) -> int:
    """Writes one JSON object a line, the file whole, one candidate in memory at a time; returns how many."""
    count = 0
    with writing(path) as file:
        for candidate in candidates:
            row = {key: value for key, value in asdict(candidate).items() if value is not None}
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            count += 1
    return count


def read_candidates(path: Path) -> Iterator[Candidate]:
    """The candidates in a file that `write_candidates` made, in order.

    Raises InputError naming file and line for one that cannot be used, or whose id came before.
    """
    places: dict[str, str] = {}
    for line, row in read_jsonl(path):
        place = f"{path}:{line}"
        candidate = _candidate(row, place)
        first = places.setdefault(candidate.candidate_id, place)
        if first != place:
            raise InputError(f"{place}: candidate {candidate.candidate_id!r} stands at {first} already; extract anew")
        yield candidate


def _candidate(row: dict[str, Any], place: str) -> Candidate:
    unknown = sorted(row.keys() - {field.name for field in fields(Candidate)})
    if unknown:
        raise InputError(f"{place}: a candidate has no field {unknown[0]!r}")
    for key in ("candidate_id", "trajectory_id"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise InputError(f"{place}: needs text in {key!r}")
    turn = row.get("turn")
    if not isinstance(turn, int) or isinstance(turn, bool) or turn < 0:
        raise InputError(f"{place}: 'turn' must be a whole number from 0")
    if row["candidate_id"] != f"{row['trajectory_id']}#{turn}":
        raise InputError(f"{place}: 'candidate_id' must be trajectory and turn, {row['trajectory_id']}#{turn}")
    messages = row.get("messages")
    if not _objects(messages) or not all(isinstance(message.get("role"), str) for message in messages or ()):
        raise InputError(f"{place}: 'messages' must be a list of at least one message, each with a 'role'")
    tools = row.get("tools")
    if tools is not None and not (tools == [] or _objects(tools)):
        raise InputError(f"{place}: 'tools' must be a list of function schemas")
    check_action(row.get("action"), place)
    if not isinstance(row.get("environment"), dict | None):
        raise InputError(f"{place}: 'environment' must be an object")
    for key in ("domain", "source"):
        if not isinstance(row.get(key, ""), str):
            raise InputError(f"{place}: {key!r} must be text")
    return Candidate(**row | {"messages": tuple(messages or ()), "tools": tuple(tools) if tools is not None else None})


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def check_action(action: Any, place: str) -> None:
    """Raises InputError if `action` is not one of the three kinds, or calls a tool with anything but a JSON object."""
    kind = action.get("type") if isinstance(action, dict) else None
    if kind == MESSAGE:
        if not isinstance(action.get("content"), str):
            raise InputError(f"{place}: a 'message' action needs text in 'content'")
    elif kind == FUNCTION_CALL:
        _check_call(action, place)
    elif kind == BATCH:
        if not _objects(action.get("calls")):
            raise InputError(f"{place}: a 'function_call_batch' action needs a list 'calls'")
        for call in action["calls"]:
            _check_call(call, place)
    else:
        raise InputError(f"{place}: 'action' needs a 'type' of {FUNCTION_CALL}, {BATCH} or {MESSAGE}")


def _check_call(call: dict[str, Any], place: str) -> None:
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise InputError(f"{place}: a call of 'action' has no 'name'")
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InputError(f"{place}: the arguments of {call['name']!r} in 'action' must be a JSON object as text")
