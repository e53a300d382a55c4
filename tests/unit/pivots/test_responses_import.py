"""Rows of Responses items as trajectories."""

import json
from typing import Any

import pytest

from mopdctl.pivots.audit import Reason, UnusableError
from mopdctl.pivots.responses_import import import_responses
from mopdctl.pivots.trajectory import Trajectory

CALL = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}", "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "a.txt"}
TOOL = {"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": True}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": content}]} | more


def imported(**row: Any) -> Trajectory:
    (found,) = import_responses(row, "f.jsonl:1")
    return found


def test_a_request_and_its_output_are_one_trajectory() -> None:
    trajectory = imported(
        id="r1",
        instructions="be good",
        input="list",
        tools=[TOOL],
        output=[{"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}, CALL, RESULT, text("a.txt")],
    )
    messages = [step.message for step in trajectory.steps]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["reasoning_content"] == "t"
    assert messages[4] == {"role": "assistant", "content": "a.txt"}
    assert trajectory.trajectory_id == "r1"
    function = {key: value for key, value in TOOL.items() if key != "type"}
    assert trajectory.tools == ({"type": "function", "function": function},)


def test_a_rollout_of_nemo_gym_is_read() -> None:
    params = {"input": [{"role": "user", "content": "list"}], "tools": [TOOL]}
    trajectory = imported(
        responses_create_params=params, response={"id": "resp_1", "output": [CALL, RESULT, text("x")]}, reward=0.5
    )
    assert [step.message["role"] for step in trajectory.steps] == ["user", "assistant", "tool", "assistant"]
    assert (trajectory.reward, trajectory.trajectory_id) == (0.5, "resp_1")


@pytest.mark.parametrize("written", ["[1] is what?", "[x", "hello", '"hello"'])
def test_text_as_input_is_what_the_user_says_even_in_brackets(written: str) -> None:
    assert imported(input=written, output=[text("y")]).steps[0].message == {"role": "user", "content": written}


def test_items_as_json_text_are_items() -> None:
    steps = imported(items=json.dumps([{"role": "user", "content": "hi"}, text("ho")])).steps
    assert [step.message["content"] for step in steps] == ["hi", "ho"]


@pytest.mark.parametrize(
    ("output", "reasons"),
    [
        ([text("a", status="incomplete")], [Reason.UNFINISHED]),
        ([CALL | {"status": "in_progress"}], [Reason.UNFINISHED]),
        ([CALL | {"status": "failed"}], [Reason.ERRORED]),
        (
            [text("a"), {"role": "user", "content": "b"}, text("c", is_copied_context=True)],
            [None, None, Reason.COPIED_CONTEXT],
        ),
        ([CALL, RESULT, {"type": "compaction"}, text("b")], [None, None, Reason.AFTER_COMPACTION]),
        ([CALL, RESULT, {"type": "web_search_call"}, text("b")], [None, None, Reason.UNSUPPORTED_ITEM]),
    ],
)
def test_what_items_say_of_a_turn_is_kept(output: list[dict[str, Any]], reasons: list[Reason | None]) -> None:
    assert [step.unusable for step in imported(input="x", output=output).steps[1:]] == reasons


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"status": "completed"}, None),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, Reason.UNFINISHED),
        ({"status": "failed", "error": {"code": "server_error"}}, Reason.ERRORED),
        ({"status": "cancelled"}, Reason.ERRORED),
    ],
)
def test_how_a_response_ended_says_something_of_its_last_turn_alone(response: Any, reason: Reason | None) -> None:
    trajectory = imported(input="x", response=response | {"output": [CALL, RESULT, text("y")]})
    assert [step.unusable for step in trajectory.steps] == [None, None, None, reason]


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
        {"prompt": {"id": "pmpt_1"}},
        {"response": {"previous_response_id": "resp_1", "output": [CALL, RESULT, text("y")]}},
    ],
)
def test_turns_that_go_on_from_what_is_not_there_have_no_state(more: dict[str, Any]) -> None:
    row = {"input": "and now?", "output": [CALL, RESULT, text("y")]} | more
    assert [s.unusable for s in imported(**row).steps] == [None, Reason.INCOMPLETE_STATE, None, Reason.INCOMPLETE_STATE]


def test_a_request_that_goes_on_from_nothing_has_its_state() -> None:
    more = {"previous_response_id": None, "conversation": None, "prompt": "a column of a table"}
    assert [s.unusable for s in imported(input="x", output=[text("y")], **more).steps] == [None, None]


def test_text_as_output_is_what_the_assistant_says() -> None:
    messages = [step.message for step in imported(input="q", output="the answer").steps]
    assert messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}]


def test_columns_without_a_value_do_not_hide_those_with_one() -> None:
    empty = {"responses_create_params": None, "expected_action": None, "response": None, "tools": None}
    trajectory = imported(input=None, items=[{"role": "user", "content": "x"}], output=[text("y")], **empty)
    assert [step.message["content"] for step in trajectory.steps] == ["x", "y"]
    row = {"input": [], "output": [], "tools": [TOOL]}
    nested = imported(responses_create_params={"input": "x", "tools": None}, response={"output": [text("y")]}, **row)
    assert [step.message["content"] for step in nested.steps] == ["x", "y"]
    assert nested.tools is not None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input": "x", "expected_action": {"type": "message", "content": "y"}}, Reason.PIVOT_ROW),
        ({"input": [3]}, Reason.MALFORMED),
        ({"input": ""}, Reason.MALFORMED),
        ({"input": [{"type": "function_call", "name": "x"}]}, Reason.MALFORMED),
        ({"responses_create_params": "x"}, Reason.MALFORMED),
        ({"input": "x", "tools": [{"type": "web_search"}]}, Reason.MALFORMED),
    ],
)
def test_a_row_that_is_no_trajectory_is_refused(row: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(UnusableError) as error:
        list(import_responses(row, "p"))
    assert error.value.reason is reason
