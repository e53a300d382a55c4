"""The importer of ATIF 1.0 to 1.8, the Agent Trajectory Interchange Format of Harbor (RFC 0001).

Lenient: what breaks an invariant of the format is noted and read as far as it says something. One step of an agent is
one model call unless `llm_call_count` says otherwise; its observation follows as tool results, or as user messages
where the agent called no tool (terminus-2 writes its commands as text).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mopdctl.pivots.audit import Note, Reason, UnusableError
from mopdctl.pivots.chat import (
    arguments_text,
    chat_tools,
    finish_reason,
    is_cut,
    normal_content,
    reward_of,
    row_id,
)
from mopdctl.pivots.trajectory import Step, Trajectory
from mopdctl.records import Message

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_ROOT = {
    "schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics",
    "continued_trajectory_ref", "extra", "subagent_trajectories",
}  # fmt: skip
_AGENT_ONLY = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}
_STEP = _AGENT_ONLY | {
    "step_id", "timestamp", "source", "message", "observation", "is_copied_context", "llm_call_count", "extra"
}  # fmt: skip
_CALL = {"tool_call_id", "function_name", "arguments", "extra"}
_RESULT = {"source_call_id", "content", "subagent_trajectory_ref", "extra"}
# How loggers that do not use `extra.context_management` tell of it in a system step amid the run.
_COMPACTED = re.compile(r"\bcompact(ed|ion|ing)?\b|\bcontext summari[sz]", re.IGNORECASE)

_Found = Counter[tuple[str, str]]


def import_atif(row: dict[str, Any], place: str) -> Iterator[Trajectory]:
    """The trajectory of a document, and those that are embedded in it. Raises UnusableError for the first.

    An embedded one that cannot be read is a note of its parent.
    """
    yield from _trajectories(row, place, parent="")


def _trajectories(row: dict[str, Any], place: str, parent: str) -> Iterator[Trajectory]:
    own = row_id(row, "trajectory_id", "session_id")
    trajectory_id = "/".join(part for part in (parent, own) if part) or place
    found: _Found = Counter()
    steps = _steps(row, found)
    agent = row.get("agent")
    if not isinstance(agent, dict):
        found["no_agent", "document without an 'agent'"] += 1
    extra = row.get("extra")
    children: list[Trajectory] = []
    embedded = row.get("subagent_trajectories") or []
    if not isinstance(embedded, list):
        raise UnusableError(Reason.MALFORMED, "'subagent_trajectories' must be a list")
    for number, child in enumerate(embedded):
        try:
            if not isinstance(child, dict):
                raise UnusableError(Reason.MALFORMED, "is no object")
            named = child if row_id(child, "trajectory_id") else child | {"trajectory_id": f"embedded-{number}"}
            children += _trajectories(named, place, trajectory_id)
        except UnusableError as error:
            found["embedded_unread", f"embedded trajectory {number}: {error}"] += 1
    notes = [Note(trajectory_id, kind, place, f"{text} ({n})") for (kind, text), n in found.items()]
    yield Trajectory(
        trajectory_id=trajectory_id,
        steps=tuple(steps),
        tools=chat_tools(agent.get("tool_definitions") if isinstance(agent, dict) else None),
        reward=reward_of(extra.get("reward")) if isinstance(extra, dict) else None,
        source=place,
        notes=tuple(notes),
    )
    yield from children


def _steps(row: dict[str, Any], found: _Found) -> list[Step]:
    version = row.get("schema_version")
    if not isinstance(version, str) or not re.fullmatch(r"ATIF-v1\.[0-8]", version):
        if isinstance(version, str) and not version.startswith("ATIF-v1."):
            raise UnusableError(Reason.UNKNOWN_VERSION, f"schema_version {version!r}; ATIF-v1.0 to 1.8 are known")
        found["unknown_version", f"schema_version {version!r} read as ATIF-v1.8"] += 1
    _note_extra(row, _ROOT, "document", found)
    raw = row.get("steps")
    if not isinstance(raw, list) or not raw:
        raise UnusableError(Reason.MALFORMED, "'steps' must be a list with at least one step")
    steps: list[Step] = []
    ids: set[str] = set()
    acted = broken = False
    for number, step in enumerate(raw):
        where = f"step {number + 1}"
        source = step.get("source") if isinstance(step, dict) else None
        if not isinstance(source, str) or source not in _ROLES:
            raise UnusableError(Reason.MALFORMED, f"{where} has none of the sources {', '.join(_ROLES)}")
        if step.get("step_id") != number + 1:
            found["step_id", "step ids do not count from 1 by 1"] += 1
        _note_extra(step, _STEP, "step", found)
        agent = source == "agent"
        if not agent and (misplaced := sorted(key for key in _AGENT_ONLY if step.get(key) is not None)):
            found["agent_only_field", f"{misplaced[0]!r} on a step that is not the agent's"] += 1
        broken = broken or _compacts(step, acted)
        message = _message(step, where, ids, found)
        steps.append(Step(message, *_unusable(step, broken)) if agent else Step(message))
        steps += [Step(result) for result in _results(step, message, where, found)]
        acted = acted or agent
    return steps


def _message(step: dict[str, Any], where: str, ids: set[str], found: _Found) -> Message:
    role = _ROLES[step["source"]]
    if "message" not in step:
        found["no_message", "steps without a 'message' read as empty"] += 1
    message: Message = {"role": role, "content": normal_content(step.get("message"), role, where)}
    if role != "assistant":
        return message
    if isinstance(reasoning := step.get("reasoning_content"), str) and reasoning:
        message["reasoning_content"] = reasoning
    calls = step.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UnusableError(Reason.MALFORMED, f"{where}: 'tool_calls' must be a list")
    made = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("function_name"), str) or not call["function_name"]:
            raise UnusableError(Reason.MALFORMED, f"{where} has a call without a function_name")
        _note_extra(call, _CALL, "tool call", found)
        call_id = row_id(call, "tool_call_id")
        if call_id and call_id in ids:
            found["tool_call_id_repeated", f"tool_call_id {call_id!r} comes again"] += 1
        ids.add(call_id)
        function = {"name": call["function_name"], "arguments": arguments_text(call.get("arguments"))}
        made.append({"id": call_id, "type": "function", "function": function})
    return message | {"tool_calls": made} if made else message


def _results(step: dict[str, Any], message: Message, where: str, found: _Found) -> Iterator[Message]:
    """The messages that a step's observation becomes."""
    observation = step.get("observation") or {}
    results = observation.get("results") if isinstance(observation, dict) else None
    if not isinstance(results, list | None) or not all(isinstance(result, dict) for result in results or ()):
        raise UnusableError(Reason.MALFORMED, f"{where}: 'observation' must hold a list 'results'")
    own = [call["id"] for call in message.get("tool_calls", ())]
    sources = [row_id(result, "source_call_id") for result in results or ()]
    # As many results without an id as calls without a result: they are meant for each other, in order.
    in_order = sources.count("") == sum(not call_id or call_id not in sources for call_id in own)
    for result, source in zip(results or (), sources, strict=True):
        _note_extra(result, _RESULT, "result", found)
        role = "tool" if source or (own and in_order) else "user"
        content = normal_content(result.get("content"), role, where)
        if source:
            if source not in own:
                found["unlinked_result", "results whose source_call_id is no call of their step"] += 1
            yield {"role": "tool", "content": content, "tool_call_id": source}
        elif role == "tool":
            yield {"role": "tool", "content": content}
        elif content:
            if own:
                found["unlinked_result", "results without a source_call_id beside calls read as user messages"] += 1
            yield {"role": "user", "content": content}


def _unusable(step: dict[str, Any], broken: bool) -> tuple[Reason | None, str]:
    if step.get("is_copied_context"):
        return Reason.COPIED_CONTEXT, ""
    if broken:
        return Reason.AFTER_COMPACTION, ""
    count = step.get("llm_call_count")
    if count == 0:
        return Reason.NOT_A_MODEL_CALL, "llm_call_count 0"
    if isinstance(count, int) and count > 1:
        return Reason.SEVERAL_MODEL_CALLS, f"llm_call_count {count}"
    metrics = step.get("metrics")
    for extra in (step.get("extra"), metrics.get("extra") if isinstance(metrics, dict) else None):
        if isinstance(extra, dict):
            if error := extra.get("error") or extra.get("is_error"):
                return Reason.ERRORED, str(error)[:200]
            if is_cut(finish := finish_reason(extra)):
                return Reason.UNFINISHED, f"finish_reason {finish}"
    return None, ""


def _compacts(step: dict[str, Any], acted: bool) -> bool:
    """Whether the context that the model sees is another one from this step on."""
    extra = step.get("extra")
    if isinstance(extra, dict) and "context_management" in extra:
        return True
    if not acted or step["source"] != "system":
        return False
    return bool(_COMPACTED.search(json.dumps([step.get("message"), extra], ensure_ascii=False).replace("_", " ")))


def _note_extra(value: dict[str, Any], known: set[str], what: str, found: _Found) -> None:
    for key in value.keys() - known:
        found["extra_field", f"{key!r} of a {what}"] += 1
