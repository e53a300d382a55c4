"""Tool calls: pick the right one of the tools on offer and fill in its arguments, by name and type.

The hard half states the arguments in another order than the tool's schema.
"""

import json
from typing import Any

from mopdctl.world.examples import Example, Values

_VERBS = ("get", "find", "book", "send", "make", "stop")
_NOUNS = ("train", "hotel", "mail", "song", "task", "order", "room", "meal")
_PARAMETERS = {"place": "string", "person": "string", "title": "string", "days": "integer", "count": "integer"}


def make(values: Values) -> Example:
    """`Please book room: days=3, place=kalo` with its tools -> `<tool_call>{"name": "book_room", ...}</tool_call>`."""
    rng = values.rng
    names: list[str] = []
    while len(names) < 2:
        name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
        if name not in names:
            names.append(name)
    tools = tuple(_tool(name, rng.sample(list(_PARAMETERS), rng.randint(1, 3))) for name in names)
    chosen = rng.choice(tools)["function"]
    arguments: dict[str, Any] = {
        parameter: values.word() if schema["type"] == "string" else rng.randint(1, 99)
        for parameter, schema in chosen["parameters"]["properties"].items()
    }
    stated = list(arguments)
    rng.shuffle(stated)
    user = f"Please {chosen['name'].replace('_', ' ')}: " + ", ".join(f"{p}={arguments[p]}" for p in stated)
    call = {"name": chosen["name"], "arguments": arguments}
    answer = f"<tool_call>{json.dumps(call)}</tool_call>"
    return Example("tools", user, answer, "tool_call", {"calls": [call]}, stated == list(arguments), tools, call)


def _tool(name: str, parameters: list[str]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": name.replace("_", " "),
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": _PARAMETERS[parameter]} for parameter in parameters},
                "required": parameters,
            },
        },
    }
