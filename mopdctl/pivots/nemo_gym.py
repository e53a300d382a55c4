"""Rows for NeMo Gym's single-step tool-use environment, and the rules that they keep.

Source: NVIDIA-NeMo/Gym, `.agents/skills/nemo-gym-pivot-datasets` (row contract and validator) and the server
`single_step_tool_use_with_argument_comparison`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from mopdctl.errors import InputError
from mopdctl.pivots.candidates import BATCH, FUNCTION_CALL, Candidate, check_action
from mopdctl.pivots.responses import chat_to_responses

AGENT = "single_step_tool_use_with_argument_comparison_agent"
"""The agent of that environment's shipped configurations."""


def gym_row(candidate: Candidate, *, agent: str, figures: dict[str, Any] | None = None) -> dict[str, Any]:
    """One candidate as a row. `figures` (of `selected_row`) become the pass-rate fields of NVIDIA's own releases.

    Raises InputError where the messages have no form as Responses items.
    """
    row: dict[str, Any] = {
        "responses_create_params": {
            "input": [_completed(item) for item in chat_to_responses(list(candidate.messages))],
            "tools": [_tool(tool) for tool in candidate.tools or ()],
            # With `false` a server cuts all calls but the first, and a model that makes too many would pass.
            "parallel_tool_calls": True,
            "tool_choice": "auto",
        },
        "expected_action": _expected(candidate.action),
        "agent_ref": {"type": "responses_api_agents", "name": agent},
        "pivot_id": candidate.candidate_id,
        "trajectory_id": candidate.trajectory_id,
        "depth": candidate.turn,
    }
    if figures:
        passed, total = figures["passed"], figures["rollouts"]
        row |= {"pass_rate": passed / total, "pass_rate_total": total, "pass_rate_passed": passed}
    return row


def _completed(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"status": "completed"} if item.get("type") == "function_call" else item


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A chat tool as Responses writes it: flat, with the two keys that are required there."""
    function = tool.get("function", tool)
    empty = {"type": "object", "properties": {}}
    made = {key: value for key, value in function.items() if value is not None}
    return {
        "type": "function",
        **made,
        "parameters": made.get("parameters", empty),
        "strict": made.get("strict", False),
    }


def _expected(action: dict[str, Any]) -> dict[str, Any]:
    """The action with each call of a batch typed; a batch of one is the call itself, as the server reads answers.

    How calls are compared is the server's configuration there, not the row's.
    """
    if action["type"] != BATCH:
        return {key: value for key, value in action.items() if key not in ("match", "compat")}
    calls = [{"type": FUNCTION_CALL, "name": call["name"], "arguments": call["arguments"]} for call in action["calls"]]
    return calls[0] if len(calls) == 1 else {"type": BATCH, "calls": calls}


def validate_row(row: Any) -> list[str]:
    """What keeps a row from being used there, in words; empty for a good row.

    The request: `input` not empty, `tools` a list, `parallel_tool_calls` a boolean, `tool_choice` "auto", nothing null;
    calls before the action completed, each with one output after it of the same `call_id`. The action: one of three
    kinds, no batch of one, arguments a JSON object as text, tools that the request offers. The agent: type and name.
    """
    if not isinstance(row, dict):
        return ["not an object"]
    problems = [f"no {key!r}" for key in ("responses_create_params", "expected_action", "agent_ref") if key not in row]
    if problems:
        return problems
    params, action, agent = row["responses_create_params"], row["expected_action"], row["agent_ref"]
    if not isinstance(agent, dict) or agent.get("type") != "responses_api_agents" or not _text(agent.get("name")):
        problems.append('agent_ref: needs the type "responses_api_agents" and a name')
    if not isinstance(params, dict):
        return [*problems, "responses_create_params: not an object"]
    return [*problems, *_request(params), *_action(action, params)]


def _request(params: dict[str, Any]) -> Iterator[str]:
    for key in sorted(key for key, value in params.items() if value is None):
        yield f"{key}: is null; leave it out"
    if params.get("tool_choice") != "auto":
        yield f'tool_choice: {params.get("tool_choice")!r} in place of "auto"'
    if not isinstance(params.get("parallel_tool_calls"), bool):
        yield "parallel_tool_calls: not a boolean"
    tools = params.get("tools")
    if not isinstance(tools, list):
        yield "tools: not a list"
    elif not all(
        isinstance(tool, dict) and tool.get("type") == "function" and _text(tool.get("name")) for tool in tools
    ):
        yield 'tools: each needs the type "function" and a name'
    items = params.get("input")
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        yield "input: not a list of at least one item"
    else:
        yield from _calls(items)


def _calls(items: list[dict[str, Any]]) -> Iterator[str]:
    waiting = Counter[str]()
    seen = set[str]()
    for number, item in enumerate(items):
        place, call_id = f"input item {number}", str(item.get("call_id"))
        if item.get("type") == "function_call":
            if (
                not _text(item.get("call_id"))
                or not _text(item.get("name"))
                or not isinstance(item.get("arguments"), str)
            ):
                yield f"{place}: a call needs 'call_id', 'name' and 'arguments' as text"
            if item.get("status") != "completed":
                yield f"{place}: a call before the action is not completed"
            if call_id in seen:
                yield f"{place}: call_id {call_id!r} a second time"
            seen.add(call_id)
            waiting[call_id] += 1
        elif item.get("type") == "function_call_output":
            if not waiting[call_id]:
                yield f"{place}: an output for call_id {call_id!r}, which no call before it has open"
            else:
                waiting[call_id] -= 1
    for call_id in +waiting:
        yield f"call {call_id!r} has no output"


def _action(action: Any, params: dict[str, Any]) -> Iterator[str]:
    try:
        check_action(action, "expected_action")
    except InputError as error:
        yield str(error)
        return
    calls = action["calls"] if action["type"] == BATCH else [action] if action["type"] == FUNCTION_CALL else []
    if action["type"] == BATCH and len(calls) == 1:
        yield "expected_action: a batch of one call; use a function_call"
    if any(call.get("type") != FUNCTION_CALL for call in calls):
        yield "expected_action: a call of a batch without its type"
    tools = params.get("tools")
    known = {tool.get("name") for tool in tools if isinstance(tool, dict)} if isinstance(tools, list) else set()
    for name in sorted({call["name"] for call in calls} - known):
        yield f"expected_action: calls {name!r}, which is not among the tools"


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
