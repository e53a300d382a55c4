"""Expert trajectories: what the gold calls of an example look like as a conversation with its environment.

Each of an expert's turns is a decision point: the conversation so far, and the action that follows.
"""

import json
from typing import Any

from mopdctl.environments.registry import begin
from mopdctl.records import Message
from mopdctl.world.examples import Example, call_text


def expert_turns(example: Example) -> list[Message]:
    """Everything after the prompt: one call a turn with its result, then the last message; or the only answer.

    Raises ToolError or SetupError where the environment does not go along: the domain that made the example is broken.
    """
    if example.environment is None:
        return [example.assistant()]
    environment, state = begin(example.environment)
    turns: list[Message] = []
    for number, call in enumerate(example.calls, start=1):
        call_id = f"call_{number}"
        request = {"id": call_id, "type": "function", "function": call}
        turns.append({"role": "assistant", "content": "", "tool_calls": [request]})
        result = environment.call(state, call["name"], call["arguments"])
        turns.append({"role": "tool", "tool_call_id": call_id, "content": result})
    return [*turns, example.assistant()]


def trajectory_row(example: Example, row_id: str) -> dict[str, Any]:
    """A row of a file of trajectories: the conversation from the prompt on, its tools and its environment."""
    return {
        "id": row_id,
        "domain": example.domain,
        "messages": [{"role": "user", "content": example.user}, *expert_turns(example)],
        "tools": list(example.tools or ()),
        "environment": example.environment,
    }


def decision_points(example: Example) -> list[tuple[list[Message], Message]]:
    """Each assistant turn of the expert, with the conversation before it."""
    conversation = [{"role": "user", "content": example.user}, *expert_turns(example)]
    return [(conversation[:i], turn) for i, turn in enumerate(conversation) if turn["role"] == "assistant"]


def action_of(turn: Message) -> dict[str, Any]:
    """What verifier `action` holds another answer against: the call of this turn, or its text word by word."""
    if not turn.get("tool_calls"):
        return {"type": "message", "content": turn["content"], "match": {"content": "exact"}}
    (call,) = turn["tool_calls"]
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}


def action_text(turn: Message) -> str:
    """An assistant turn as a model of this world writes it."""
    calls = turn.get("tool_calls") or ()
    return "".join([turn["content"], *(call_text(call["function"]) for call in calls)])
