"""Tool calls: pick the right tool and fill in its arguments, each in the type that its schema asks for.

The hard half has a tool that wants a number as text.
"""

import json
from typing import Any

from mopdctl.world.examples import Example, Values

_VERBS = ("get", "find", "book", "send", "make", "stop")
_NOUNS = ("train", "hotel", "mail", "song", "task", "order", "room", "meal")
_WORDS = ("place", "person", "title")
_NUMBERS = ("days", "count")


def make(values: Values) -> Example:
    """`Please book room: place=kalo, days=3` with its tools -> `<tool_call>{"name": "book_room", ...}</tool_call>`."""
    rng = values.rng
    names: list[str] = []
    while len(names) < 2:
        name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
        if name not in names:
            names.append(name)
    number_type = rng.choice(("integer", "string"))
    chosen = rng.randrange(len(names))
    tools = [_tool(name, _schema(values, number_type if i == chosen else "integer")) for i, name in enumerate(names)]
    function = tools[chosen]["function"]
    arguments: dict[str, Any] = {}
    for parameter, schema in function["parameters"]["properties"].items():
        number = rng.randint(1, 99)
        value = values.word() if parameter in _WORDS else number
        arguments[parameter] = str(value) if schema["type"] == "string" else value
    stated = ", ".join(f"{parameter}={value}" for parameter, value in arguments.items())
    user = f"Please {function['name'].replace('_', ' ')}: {stated}"
    call = {"name": function["name"], "arguments": arguments}
    answer = f"<tool_call>{json.dumps(call)}</tool_call>"
    return Example("tools", user, answer, "tool_call", {"calls": [call]}, number_type == "integer", tuple(tools), call)


def _schema(values: Values, number_type: str) -> dict[str, Any]:
    """One or two words and a number, in any order."""
    rng = values.rng
    parameters = [*rng.sample(_WORDS, rng.randint(1, 2)), rng.choice(_NUMBERS)]
    rng.shuffle(parameters)
    return {p: {"type": number_type if p in _NUMBERS else "string"} for p in parameters}


def _tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": name.replace("_", " "),
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
