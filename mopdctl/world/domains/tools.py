"""Tool calls: pick the right tool and fill in its arguments, each in the type that its schema asks for.

The hard half has a tool that wants a number as text.
"""

from typing import Any

from mopdctl.world.examples import Example, Values, call_text, wrong_only

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
    reference, basic = {"calls": [call]}, number_type == "integer"
    return Example("tools", user, call_text(call), "tool_call", reference, basic, tuple(tools), call)


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


def near_misses(example: Example) -> list[str]:
    """Another tool, a wrong type or value, an argument too few or too many, and calls that are not just that call."""
    call = example.reference["calls"][0]
    name, arguments = call["name"], call["arguments"]
    number = next(parameter for parameter in arguments if parameter in _NUMBERS)
    word = next(parameter for parameter in arguments if parameter in _WORDS)
    stated = arguments[number]
    other = next(tool["function"]["name"] for tool in example.tools or () if tool["function"]["name"] != name)
    changed = [
        {"name": other, "arguments": arguments},
        *(
            {"name": name, "arguments": found}
            for found in (
                arguments | {number: int(stated) if isinstance(stated, str) else str(stated)},
                arguments | {number: type(stated)(int(stated) + 1)},
                arguments | {word: arguments[word].upper()},
                arguments | {word: stated, number: arguments[word]},
                {parameter: value for parameter, value in arguments.items() if parameter != word},
                arguments | {"extra": True},
            )
        ),
    ]
    right = example.answer
    texts = [f"{right}{right}", f"{right} ok", right[: -len("</tool_call>")], str(arguments[word])]
    return wrong_only(right, [*map(call_text, changed), *texts])
