"""ATIF documents as trajectories: lenient, with a note for whatever breaks the format."""

from typing import Any

import pytest

from mopdctl.pivots.atif import import_atif
from mopdctl.pivots.audit import Reason, UnusableError
from mopdctl.pivots.trajectory import Trajectory

USER = {"source": "user", "message": "fix it"}


def document(*steps: dict[str, Any], **fields: Any) -> dict[str, Any]:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    agent = {"name": "a", "version": "1"}
    return {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": agent, "steps": numbered} | fields


def imported(*steps: dict[str, Any], **fields: Any) -> Trajectory:
    return next(import_atif(document(*steps, **fields), "t.json#0"))


def agent(message: str = "", calls: list[str] | None = None, results: Any = None, **fields: Any) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": message} | fields
    if calls:
        step["tool_calls"] = [{"tool_call_id": c, "function_name": "ls", "arguments": {"p": "é"}} for c in calls]
    if results is not None:
        step["observation"] = {"results": results}
    return step


def kinds(trajectory: Trajectory) -> set[str]:
    return {note.kind for note in trajectory.notes}


@pytest.mark.parametrize("minor", range(9))
def test_every_version_from_1_0_to_1_8_is_read_without_a_note(minor: int) -> None:
    results = [{"source_call_id": "c2", "content": "b"}, {"source_call_id": "c1", "content": "a"}]
    trajectory = imported(
        {"source": "system", "message": "be good"},
        USER,
        agent("Looking.", ["c1", "c2"], results, reasoning_content="why"),
        agent("Done."),
        schema_version=f"ATIF-v1.{minor}",
    )
    assert trajectory.notes == ()
    messages = [step.message for step in trajectory.steps]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert messages[2]["reasoning_content"] == "why"
    assert messages[2]["tool_calls"][1] == {
        "id": "c2",
        "type": "function",
        "function": {"name": "ls", "arguments": '{"p": "é"}'},
    }
    assert messages[3] == {"role": "tool", "content": "b", "tool_call_id": "c2"}
    assert trajectory.trajectory_id == "s"


def test_tools_of_the_agent_are_the_tools_of_the_trajectory() -> None:
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    trajectory = imported(USER, agent("x"), agent={"name": "a", "version": "1", "tool_definitions": tools})
    assert trajectory.tools == tuple(tools)


def test_an_observation_beside_no_call_is_what_the_user_says_next() -> None:
    trajectory = imported(USER, agent('{"commands": []}', results=[{"content": "$ "}]), agent("done"))
    assert trajectory.steps[2].message == {"role": "user", "content": "$ "}
    assert trajectory.notes == ()


def test_results_without_ids_are_linked_if_there_is_one_for_each_call() -> None:
    both = imported(USER, agent("", ["c1", "c2"], [{"content": "a"}, {"content": "b"}]))
    assert [step.message["role"] for step in both.steps[2:]] == ["tool", "tool"]
    # letta-ai/trajectory #46
    shared = imported(USER, agent("", ["c1", "c2"], [{"content": "a"}]))
    assert [step.message["role"] for step in shared.steps[2:]] == ["user"]
    assert kinds(shared) == {"unlinked_result"}


def test_a_result_for_a_call_of_no_step_is_a_note() -> None:
    trajectory = imported(USER, agent("", ["c1"], [{"source_call_id": "zz", "content": "a"}]))
    assert kinds(trajectory) == {"unlinked_result"}
    assert trajectory.steps[2].message["tool_call_id"] == "zz"


def test_broken_invariants_are_notes() -> None:
    results = [{"source_call_id": "c1", "content": "a", "mood": 1}]
    trajectory = imported(
        {"source": "user", "message": "x", "step_id": 9, "reasoning_content": "mine"},
        agent("", ["c1"], results, colour="red"),
        agent("", ["c1"], results),
        {"source": "agent"},
        schema_version="ATIF-v1.9",
        color="blue",
        agent=None,
    )
    assert kinds(trajectory) == {
        "step_id",
        "agent_only_field",
        "extra_field",
        "tool_call_id_repeated",
        "no_message",
        "unknown_version",
        "no_agent",
    }
    extra = {note.detail for note in trajectory.notes if note.kind == "extra_field"}
    assert extra == {"'mood' of a result (2)", "'colour' of a step (1)", "'color' of a document (1)"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_copied_context": True}, Reason.COPIED_CONTEXT),
        ({"llm_call_count": 0}, Reason.NOT_A_MODEL_CALL),
        ({"llm_call_count": 3}, Reason.SEVERAL_MODEL_CALLS),
        ({"llm_call_count": 1}, None),
        ({"extra": {"error": "overloaded"}}, Reason.ERRORED),
        ({"extra": {"stop_reason": "max_tokens"}}, Reason.UNFINISHED),
        ({"metrics": {"extra": {"finish_reason": "length"}}}, Reason.UNFINISHED),
        ({"metrics": {"extra": {"finish_reason": "stop"}}, "is_copied_context": False}, None),
    ],
)
def test_what_a_step_says_of_itself_is_kept(fields: dict[str, Any], reason: Reason | None) -> None:
    assert imported(USER, agent("x", **fields)).steps[1].unusable is reason


@pytest.mark.parametrize(
    "boundary",
    [
        {"source": "system", "message": "x", "extra": {"context_management": {"type": "compaction"}}},
        {"source": "system", "message": "Performed context summarization and handoff to continue task."},
        {"source": "system", "message": "<manual compaction>", "is_copied_context": True},
        {"source": "system", "message": "x", "extra": {"turn_kind": "manual_compaction"}},
    ],
)
def test_turns_after_a_compaction_are_marked_and_those_before_are_not(boundary: dict[str, Any]) -> None:
    trajectory = imported(USER, agent("a"), boundary, {"source": "user", "message": "summary"}, agent("b"))
    assert [step.unusable for step in trajectory.steps] == [None, None, None, None, Reason.AFTER_COMPACTION]


def test_a_system_prompt_that_speaks_of_compaction_marks_nothing() -> None:
    trajectory = imported({"source": "system", "message": "Context compaction is on."}, USER, agent("a"))
    assert trajectory.steps[2].unusable is None


def test_embedded_trajectories_stand_on_their_own() -> None:
    child = document(USER, agent("found"), trajectory_id="search", schema_version="ATIF-v1.7")
    nameless = document(USER, agent("x"))
    parent = document(USER, agent("done"), subagent_trajectories=[child, nameless, {"steps": []}])
    found = list(import_atif(parent, "p"))
    assert [t.trajectory_id for t in found] == ["s", "s/search", "s/embedded-1"]
    assert [t.steps[1].message["content"] for t in found] == ["done", "found", "x"]
    assert kinds(found[0]) == {"embedded_unread"}


@pytest.mark.parametrize(
    ("fields", "reason", "said"),
    [
        ({"schema_version": "ATIF-v2.0"}, Reason.UNKNOWN_VERSION, "ATIF-v2.0"),
        ({"steps": []}, Reason.MALFORMED, "at least one step"),
        ({"steps": [{"source": "robot"}]}, Reason.MALFORMED, "step 1 has none of the sources"),
        ({"steps": [agent("", results="x")]}, Reason.MALFORMED, "a list 'results'"),
        ({"steps": [{"source": "agent", "tool_calls": [{}]}]}, Reason.MALFORMED, "without a function_name"),
        ({"steps": [{"source": "user", "message": 4}]}, Reason.MALFORMED, "neither text nor"),
    ],
)
def test_a_document_that_cannot_be_read_is_refused(fields: dict[str, Any], reason: Reason, said: str) -> None:
    with pytest.raises(UnusableError, match=said) as error:
        list(import_atif(document(USER) | fields, "p"))
    assert error.value.reason is reason
