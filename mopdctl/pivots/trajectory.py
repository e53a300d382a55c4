"""The one record that every trajectory format becomes: chat messages in order, with what the source says of each."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mopdctl.pivots.audit import Note, Reason
from mopdctl.records import Message


@dataclass(frozen=True, slots=True)
class Step:
    """One message of a trajectory."""

    message: Message
    """In the normal form of `chat.normal_message`."""
    unusable: Reason | None = None
    """Of an assistant message, why the source itself rules it out as an action; None if it does not."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One run of an agent."""

    trajectory_id: str
    steps: tuple[Step, ...]
    tools: tuple[dict[str, Any], ...] | None
    """All that were offered, as OpenAI function schemas."""
    domain: str = ""
    reward: float | None = None
    """What the source scored the run; None if it says nothing."""
    environment: dict[str, Any] | None = None
    source: str = ""
    """`file:line` or `file#index`."""
    notes: tuple[Note, ...] = ()


def linked(messages: Iterable[Message], trajectory_id: str, place: str) -> tuple[list[Message], list[Note]]:
    """The messages with call ids that are there, unique, and shared by each call and its result.

    A result without an id is that of the first call still open; a call without one is named after its place. An id
    that comes again gets a suffix, and so does the result that follows. A result that belongs to no call stays as it
    is. Each of these is a note.
    """
    found: list[Message] = []
    counts: Counter[tuple[str, str]] = Counter()
    taken: set[str] = set()
    waiting: dict[str, list[str]] = defaultdict(list)  # id in the source -> ids here of its calls without a result
    for number, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            renamed = []
            for index, call in enumerate(calls):
                name = call["id"] or f"call_{number}_{index}"
                if not call["id"]:
                    counts["id_missing", "calls without an id got one"] += 1
                elif name in taken:
                    counts["id_repeated", f"call id {call['id']!r} comes again"] += 1
                unique = _unique(name, taken)
                waiting[call["id"]].append(unique)
                renamed.append(call | {"id": unique})
            message = message | {"tool_calls": renamed}
        elif message["role"] == "tool":
            said = message.get("tool_call_id", "")
            key = said if said or waiting[""] else next((name for name, ids in waiting.items() if ids), "")
            if waiting[key]:
                if not said:
                    counts["linked_by_order", "results without an id went to the calls before them in order"] += 1
                message = message | {"tool_call_id": waiting[key].pop(0)}
            else:
                counts["unlinked_result", f"result for {said!r}, which no open call has"] += 1
        found.append(message)
    return found, [Note(trajectory_id, kind, place, f"{text} ({n})") for (kind, text), n in counts.items()]


def _unique(name: str, taken: set[str]) -> str:
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}~{number}"
    taken.add(unique)
    return unique
