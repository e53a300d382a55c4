"""The messages and tools of a candidate row: how to get at them, and whether they fit together."""

from collections.abc import Mapping
from typing import Any

from mopdctl.gensft.answers import is_json_object, text_of

Row = Mapping[str, Any]

# Which turn may follow which.
_FOLLOWS = {
    "the beginning": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant", "assistant with calls"),
    "assistant": ("user",),
    "assistant with calls": ("tool",),
    "tool": ("tool", "assistant", "assistant with calls"),
}


def messages_of(row: Row) -> list[Mapping[str, Any]]:
    """The messages of a row that are objects."""
    messages = row.get("messages")
    return [m for m in messages if isinstance(m, Mapping)] if isinstance(messages, list | tuple) else []


def answer_of(row: Row) -> list[Mapping[str, Any]]:
    """Every assistant message after the last one from the user."""
    messages = messages_of(row)
    start = max((number for number, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    return [message for message in messages[start + 1 :] if message.get("role") == "assistant"]


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a message."""
    return text_of(message.get("content"))


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning of a message."""
    return text_of(message.get("reasoning_content"))


def calls_of(message: Mapping[str, Any]) -> list[Any]:
    """The tool calls of a message."""
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple) else []


def function_of(entry: Any) -> Mapping[str, Any]:
    """The `function` of a tool or tool call; empty if it has none."""
    function = entry.get("function") if isinstance(entry, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def arguments_of(call: Any) -> str:
    """The arguments of a tool call, as text."""
    return text_of(function_of(call).get("arguments"))


def role_order(row: Row) -> str | None:
    """Why the turns are in an order that templates do not take, or None; the last must be the assistant's."""
    messages = row.get("messages")
    if not isinstance(messages, list | tuple) or not messages:
        return "no messages"
    before = "the beginning"
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        turn = "assistant with calls" if role == "assistant" and calls_of(message) else role
        if turn not in _FOLLOWS[before]:
            return f"message {number} is {'of no role' if role is None else role}, after {before}"
        before = turn
    return None if before in ("assistant", "assistant with calls") else f"the last message is {before}"


def tool_pairing(row: Row) -> str | None:
    """Why calls and results do not belong together, or None."""
    tools = row.get("tools")
    known = [function_of(tool).get("name") for tool in tools] if isinstance(tools, list | tuple) else []
    waiting: list[str] = []
    messages = messages_of(row)
    for number, message in enumerate(messages):
        if message.get("role") == "tool":
            if (call_id := message.get("tool_call_id")) not in waiting:
                return f"message {number} is the result of no open call ({call_id!r})"
            waiting.remove(call_id)
            continue
        if waiting:
            return f"no result for the call {waiting[0]!r}"
        for call in calls_of(message):
            name, call_id = function_of(call).get("name"), call.get("id") if isinstance(call, Mapping) else None
            if not isinstance(call_id, str) or not call_id:
                return f"message {number} calls {name!r} without an id"
            if call_id in waiting:
                return f"message {number} has two calls with the id {call_id!r}"
            if name not in known:
                return f"message {number} calls {name!r}, which is not among the tools"
            if not is_json_object(arguments_of(call)):
                return f"message {number}: the arguments of {name!r} are not the text of a JSON object"
            waiting.append(call_id)
    # A row may end with calls, but not with the results of some of them.
    return f"no result for the call {waiting[0]!r}" if waiting and messages[-1].get("role") == "tool" else None


def tool_schema(row: Row) -> str | None:
    """Why the tools are no list of functions, or None."""
    tools = row.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        return f"'tools' is a {type(tools).__name__} where a list is needed"
    names = set()
    for number, tool in enumerate(tools):
        function = function_of(tool)
        name = function.get("name")
        if not isinstance(name, str) or not name or tool.get("type", "function") != "function":
            return f"tool {number} is no function with a name"
        if name in names:
            return f"two tools are called {name!r}"
        names.add(name)
        parameters = function.get("parameters") or {}
        # A property without a schema (null) is common and allows any value.
        if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties") or {}, Mapping):
            return f"the parameters of tool {name!r} are no object schema"
    return None
