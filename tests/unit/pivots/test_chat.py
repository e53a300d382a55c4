"""Rows of chat messages as trajectories."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.pivots.audit import Reason, UnusableError
from mopdctl.pivots.chat import import_chat, normal_message
from mopdctl.pivots.trajectory import Trajectory, linked


def imported(messages: Any, **row: Any) -> Trajectory:
    (found,) = import_chat({"messages": messages, **row}, "f.jsonl:1")
    return found


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def call(name: str = "ls", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | more


def test_every_spelling_of_a_message_becomes_one() -> None:
    spellings = [
        {"role": "assistant", "content": "a", "reasoning": "r"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "thinking": "r"},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": None, "refusal": None},
    ]
    one = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert [normal_message(message, "m") for message in spellings] == [(one, [])] * 3
    calls = [call(arguments={"a": "é"}, id=7), {"name": "ls", "arguments": '{"a":1}'}, call(arguments=None)]
    normal, _ = normal_message({"role": "assistant", "tool_calls": calls}, "m")
    assert normal["content"] == ""
    assert [c["id"] for c in normal["tool_calls"]] == ["7", "", ""]
    assert [c["function"]["arguments"] for c in normal["tool_calls"]] == ['{"a": "é"}', '{"a":1}', "{}"]


@given(st.text())
def test_arguments_that_are_text_stay_as_they_are(text: str) -> None:
    normal, _ = normal_message(assistant(tool_calls=[call(arguments=text)]), "m")
    assert normal["tool_calls"][0]["function"]["arguments"] == text


def test_the_normal_form_is_its_own_normal_form() -> None:
    message = assistant(
        content=[{"type": "text", "text": "a"}, {"type": "image", "source": {}}],
        reasoning="r",
        tool_calls=[call(arguments=[1], id="x", index=0)],
        mood="good",
    )
    normal, extra = normal_message(message, "m")
    assert extra == ["mood", "tool_calls.index"]
    assert normal_message(normal, "m") == (normal, [])


def test_the_function_api_before_tools_is_read() -> None:
    trajectory = imported(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "r"},
        ]
    )
    messages, _ = linked([step.message for step in trajectory.steps], "t", "p")
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == "call_1_0"


def test_a_row_with_json_text_in_its_columns_is_read() -> None:
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    trajectory = imported(
        json.dumps([{"role": "user", "content": "x"}]),
        id=4,
        tools=json.dumps(tools),
        domain="shell",
        reward=1,
        environment='{"name": "errands", "setup": {}}',
    )
    assert trajectory.trajectory_id == "4"
    assert trajectory.tools == tuple(tools)
    assert (trajectory.domain, trajectory.reward) == ("shell", 1.0)
    assert trajectory.environment == {"name": "errands", "setup": {}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_copied_context": True}, Reason.COPIED_CONTEXT),
        ({"error": "429 Too Many Requests"}, Reason.ERRORED),
        ({"finish_reason": "content_filter"}, Reason.ERRORED),
        ({"finish_reason": "length", "tool_calls": [call(arguments='{"p')]}, Reason.UNFINISHED),
        ({"stop_reason": "max_tokens", "content": "and th"}, Reason.UNFINISHED),
        ({"refusal": "I cannot help."}, Reason.REFUSAL),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, Reason.REFUSAL),
        ({"extra": {"response": {"choices": [{"finish_reason": "length"}]}}}, Reason.UNFINISHED),
        ({"content": "fine", "finish_reason": "stop"}, None),
    ],
)
def test_what_the_source_says_of_a_turn_is_kept(fields: dict[str, Any], reason: Reason | None) -> None:
    trajectory = imported([{"role": "user", "content": "x"}, assistant(**fields)])
    assert trajectory.steps[1].unusable is reason


@pytest.mark.parametrize(("reward", "expected"), [(1, 1.0), (0.5, 0.5), (float("nan"), None), ("1", None)])
def test_a_reward_is_a_number_or_nothing(reward: Any, expected: float | None) -> None:
    assert imported([{"role": "user", "content": "x"}], reward=reward).reward == expected


def test_turns_after_a_compaction_are_marked() -> None:
    turn = assistant(content="a")
    user = {"role": "user", "content": "x"}
    trajectory = imported([user, turn, {"role": "user", "content": "summary", "is_compact_summary": True}, turn])
    assert [step.unusable for step in trajectory.steps] == [None, None, None, Reason.AFTER_COMPACTION]


def test_a_mini_swe_agent_log_is_read_without_its_bookkeeping() -> None:
    document = {
        "trajectory_format": "mini-swe-agent-1.1",
        "instance_id": "django__django-1",
        "info": {"exit_status": "Submitted"},
        "messages": [
            {"role": "system", "content": "You are"},
            {"role": "user", "content": "fix"},
            {"role": "assistant", "content": "```bash\nls\n```", "extra": {"actions": ["ls"], "cost": 0.1}},
            {"role": "user", "content": "<returncode>0</returncode>", "extra": {"returncode": 0}},
            {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
        ],
    }
    (trajectory,) = import_chat(document, "x.traj.json#0")
    assert trajectory.trajectory_id == "django__django-1"
    assert [step.message["role"] for step in trajectory.steps] == ["system", "user", "assistant", "user"]
    assert all(step.message.keys() == {"role", "content"} for step in trajectory.steps)
    assert {note.detail for note in trajectory.notes} == {"extra of a message (2)", "role 'exit' of a message (1)"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one"),
        ("[{", "not JSON"),
        ([{"content": "x"}], "message 0 has no 'role'"),
        ([{"role": "gpt", "content": "x"}], "'gpt'"),
        ([{"role": "user", "content": 3}], "neither text nor a list"),
        ([assistant(tool_calls=[{"id": "a"}])], "no function with a name"),
        ([assistant(tool_calls=[call(id=[1])])], "id that is a list"),
        ([assistant(tool_calls="ls")], "must be a list"),
        ([assistant(reasoning_content=["x"])], "no text as its reasoning"),
    ],
)
def test_a_malformed_row_is_refused_with_what_is_wrong(messages: Any, said: str) -> None:
    with pytest.raises(UnusableError, match=said) as error:
        imported(messages)
    assert error.value.reason is Reason.MALFORMED


def result(content: str, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({"tool_call_id": call_id} if call_id else {})


def test_calls_without_ids_get_their_results_in_order() -> None:
    calls = [call(id=""), call(id="")]
    messages, notes = linked([assistant(tool_calls=calls), result("a"), result("b")], "t", "p")
    assert [c["id"] for c in messages[0]["tool_calls"]] == ["call_0_0", "call_0_1"]
    assert [m["tool_call_id"] for m in messages[1:]] == ["call_0_0", "call_0_1"]
    assert {note.kind for note in notes} == {"id_missing", "linked_by_order"}


def test_ids_that_repeat_become_unique_together_with_their_results() -> None:
    turn = [assistant(tool_calls=[call(id="c")]), result("r", "c")]
    messages, notes = linked([*turn, *turn, *turn], "t", "p")
    assert [m["tool_calls"][0]["id"] for m in messages[::2]] == ["c", "c~2", "c~3"]
    assert [m["tool_call_id"] for m in messages[1::2]] == ["c", "c~2", "c~3"]
    assert [(note.kind, note.detail) for note in notes] == [("id_repeated", "call id 'c' comes again (2)")]


def test_a_result_of_no_call_stays_and_is_noted() -> None:
    messages, notes = linked([assistant(tool_calls=[call(id="c")]), result("r", "d")], "t", "p")
    assert messages[1]["tool_call_id"] == "d"
    assert [note.kind for note in notes] == ["unlinked_result"]
