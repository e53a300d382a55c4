"""Every assistant turn of a trajectory as a pivot candidate, or the reason why it is none."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopdctl.files import fingerprint
from mopdctl.pivots.audit import Note, Reason, Skip
from mopdctl.pivots.candidates import BATCH, FUNCTION_CALL, MESSAGE, Candidate, action_tool
from mopdctl.pivots.chat import text_of
from mopdctl.pivots.formats import read_trajectories
from mopdctl.pivots.leaks import find_leak, reused_ids, split_reasoning
from mopdctl.pivots.trajectory import Step, Trajectory, linked
from mopdctl.records import Message
from mopdctl.verifiers.base import ParseError
from mopdctl.verifiers.documents import parse_json
from mopdctl.verifiers.fences import TOOL_CALL_OPEN, without_reasoning
from mopdctl.verifiers.tool_call import TOOL_CALL_CLOSE

NoteTaker = Callable[[Note], None]


def extract_files(
    paths: Iterable[Path],
    *,
    format: str | None = None,
    min_reward: float | None = None,
    note: NoteTaker = lambda note: None,
) -> Iterator[Candidate | Skip]:
    """The candidates of trajectory files; see `extract` and `formats.read_trajectories`.

    A document that gives no trajectory is one Skip without a turn. Raises InputError as `read_trajectories` does.
    """
    yield from extract(read_trajectories(paths, format=format), min_reward=min_reward, note=note)


def extract(
    trajectories: Iterable[Trajectory | Skip],
    *,
    min_reward: float | None = None,
    note: NoteTaker = lambda note: None,
) -> Iterator[Candidate | Skip]:
    """One Candidate or Skip for every assistant message, in order; a Skip among the trajectories is passed on.

    A turn is a candidate if the source calls it one whole model call that ended well, its state asks for something and
    is complete (each earlier call has its result), its action can be written down, and its state does not give the
    action away (`leaks`). Of candidates with the same state, tools and action, whatever their call ids, the first is
    taken. An errored turn that was retried at once is in no later state.

    A trajectory without an assistant message is a Skip without a turn. A trajectory id that comes again gets a suffix.
    Memory holds one trajectory, and a digest a candidate.

    Args:
        trajectories: As from `read_trajectories`.
        min_reward: Least reward of a trajectory; None takes all. One whose source gives no reward is taken.
        note: Gets what was unusual but no reason to skip.
    """
    seen: set[bytes] = set()
    names: set[str] = set()
    for trajectory in trajectories:
        if isinstance(trajectory, Skip):
            yield trajectory
            continue
        name, number = trajectory.trajectory_id, 1
        while name in names:
            number += 1
            name = f"{trajectory.trajectory_id}~{number}"
        names.add(name)
        for found in trajectory.notes:
            note(Note(name, found.kind, found.place, found.detail))
        if number > 1:
            note(Note(name, "trajectory_id_repeated", trajectory.source, "an earlier trajectory has this id"))
        if not any(_is_assistant(step) for step in trajectory.steps):
            yield Skip(name, None, Reason.NO_TURN, trajectory.source, "no message is an assistant's")
            continue
        low = min_reward is not None and trajectory.reward is not None and trajectory.reward < min_reward
        yield from _turns(trajectory, name, low, seen, note)


@dataclass(slots=True)
class _State:
    """What was said before a turn."""

    reused: frozenset[str]
    """Call ids of the source that do not identify a call."""
    tool_names: frozenset[str] | None
    raw: list[Message] = field(default_factory=list)
    """With the call ids of the source."""
    messages: list[Message] = field(default_factory=list)
    """With call ids that are unique."""
    open_calls: set[str] = field(default_factory=set)
    """Calls without a result."""
    unlinked: bool = False
    """Whether a result is that of no call."""
    asked: bool = False
    numbers: dict[str, int] = field(default_factory=dict)
    """Call ids to their order: states that differ in ids alone are the same."""
    digest: bytes = b""
    """Of all messages; each one is added to it, so that a long trajectory is not hashed once a turn."""

    def add(self, raw: Message, message: Message) -> None:
        for call in message.get("tool_calls", ()):
            self.open_calls.add(call["id"])
            self.numbers[call["id"]] = len(self.numbers)
        plain = message
        if message["role"] == "tool":
            call_id = message.get("tool_call_id", "")
            self.unlinked = self.unlinked or call_id not in self.open_calls
            self.open_calls.discard(call_id)
            plain = message | {"tool_call_id": self.numbers.get(call_id, call_id)}
        elif "tool_calls" in message:
            plain = message | {"tool_calls": [call["function"] for call in message["tool_calls"]]}
        self.asked = self.asked or message["role"] in ("user", "tool")
        self.raw.append(raw)
        self.messages.append(message)
        self.digest = _digest(self.digest, plain)


def _turns(
    trajectory: Trajectory, name: str, low_reward: bool, seen: set[bytes], note: NoteTaker
) -> Iterator[Candidate | Skip]:
    steps, tools = trajectory.steps, trajectory.tools
    retried = [
        step.unusable is Reason.ERRORED and after is not None and _is_assistant(after)
        for step, after in zip(steps, [*steps[1:], None], strict=True)
    ]
    kept = [step for step, again in zip(steps, retried, strict=True) if not again]
    raw = [step.message for step in kept]
    messages, notes = linked(raw, name, trajectory.source)
    for found in notes:
        note(found)
    state = _State(reused_ids(raw), frozenset(tool["function"]["name"] for tool in tools) if tools else None)
    tools_digest = fingerprint(tools)
    at = turn = 0  # in `kept`; of the assistant
    for step, again in zip(steps, retried, strict=True):
        if _is_assistant(step):
            action = action_of(step.message)
            continues = not again and at + 1 < len(kept) and _is_assistant(kept[at + 1])
            problem = _problem(step, action, state, continues)
            if low_reward:
                problem = Reason.LOW_REWARD, f"reward {trajectory.reward}"
            if problem is None:
                identity = _digest(state.digest, [tools_digest, action])
                problem = (Reason.DUPLICATE, "") if identity in seen else None
                seen.add(identity)
            if problem is not None:
                reason, detail = problem
                yield Skip(name, turn, reason, trajectory.source, detail, action["type"], action_tool(action))
            else:
                yield Candidate(
                    candidate_id=f"{name}#{turn}",
                    trajectory_id=name,
                    turn=turn,
                    messages=tuple(state.messages),
                    tools=tools,
                    action=action,
                    domain=trajectory.domain,
                    environment=trajectory.environment,
                    source=trajectory.source,
                )
            turn += 1
        if not again:
            state.add(raw[at], messages[at])
            at += 1


def _is_assistant(step: Step) -> bool:
    return bool(step.message["role"] == "assistant")


def action_of(message: Message) -> dict[str, Any]:
    """What an assistant message does: its calls if it has any, else its text without the reasoning.

    Arguments stay the text they are; whether they are JSON is not asked.
    """
    calls = [dict(call["function"]) for call in message.get("tool_calls", ())]
    if len(calls) == 1:
        return {"type": FUNCTION_CALL, **calls[0]}
    if calls:
        return {"type": BATCH, "calls": calls}
    return {"type": MESSAGE, "content": split_reasoning(message)[1]}


def _problem(step: Step, action: dict[str, Any], state: _State, continues: bool) -> tuple[Reason, str] | None:
    """Why a turn is no candidate, the cause nearest to the source first."""
    if step.unusable is not None:
        return step.unusable, step.detail
    if not state.asked:
        return Reason.NO_PROMPT, "no user message or result before it"
    if leak := find_leak(state.raw, step.message, reused=state.reused):
        return Reason.LEAK, leak
    if continues or state.messages[-1]["role"] == "assistant":
        return Reason.SPLIT_MODEL_CALL, "an assistant message beside it"
    if state.open_calls:
        return Reason.INCOMPLETE_CALLS, f"{len(state.open_calls)} earlier calls have no result"
    if state.unlinked:
        return Reason.INCOMPLETE_CALLS, "an earlier result has no call"
    if action["type"] == MESSAGE:
        return _message_problem(step.message, action["content"])
    for call in action.get("calls", [action]):
        if problem := _arguments_problem(call["arguments"]):
            return Reason.INVALID_ARGUMENTS, f"arguments of {call['name']!r} {problem}"
        if state.tool_names is not None and call["name"] not in state.tool_names:
            return Reason.UNKNOWN_TOOL, f"{call['name']!r} was not offered"
    return None


def _message_problem(message: Message, text: str) -> tuple[Reason, str] | None:
    content = message["content"]
    if not isinstance(content, str) and any(part["type"] != "text" for part in content):
        return Reason.NOT_TEXT, "content parts other than text"
    if not text.strip():
        said = text_of(content).strip() or message.get("reasoning_content")
        return Reason.UNFINISHED, "reasoning alone" if said else "neither text nor a call"
    if TOOL_CALL_OPEN in text or TOOL_CALL_CLOSE in text:
        return Reason.INLINE_TOOL_CALL, "a call written in the text; give it in 'tool_calls'"
    try:
        whole = without_reasoning(text) == text
    except ParseError:
        whole = False
    return None if whole else (Reason.INLINE_REASONING, "a tag of reasoning in the text")


def _arguments_problem(text: str) -> str:
    try:
        value = parse_json(text)
    except ParseError as error:
        return f"are {error}"
    # A fence around JSON is fine in an answer, but no arguments.
    return "" if isinstance(value, dict) and text.lstrip().startswith("{") else "are no JSON object"


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
