"""People, their lockers, and what lies in them: the smallest world in which an answer takes several calls."""

from dataclasses import dataclass
from typing import Any

from mopdctl.environments.base import SetupError, ToolError

_KINDS: dict[str, type] = {"string": str, "integer": int}
_PARAMETERS = {
    "find_person": {"name": "string"},
    "open_locker": {"number": "integer"},
    "move_item": {"source": "integer", "target": "integer"},
}
_PURPOSE = {
    "find_person": "The number of a person's locker, or unknown.",
    "open_locker": "The item in a locker, or empty.",
    "move_item": "Moves the item of one locker into another, which has to be empty.",
}


@dataclass(slots=True)
class State:
    """Who has which locker, and what is in each."""

    people: dict[str, int]
    lockers: dict[int, str | None]


class Errands:
    """Setup: `{"people": {"kalo": 3, "bemi": 7}, "lockers": {"3": "tode", "7": null}}`.

    A person has a locker, and a locker holds an item or nothing. Results are the number of a locker, the name of an
    item, `unknown` for a person who is not there, and `empty`.
    """

    name = "errands"
    version = 1
    tools: tuple[dict[str, Any], ...] = tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": _PURPOSE[name],
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in parameters.items()},
                    "required": list(parameters),
                },
            },
        }
        for name, parameters in _PARAMETERS.items()
    )

    def start(self, setup: Any) -> State:
        """See `Environment.start`."""
        if not isinstance(setup, dict) or set(setup) != {"people", "lockers"}:
            raise SetupError("a setup of errands has exactly the keys 'people' and 'lockers'")
        people, lockers = setup["people"], setup["lockers"]
        if not isinstance(people, dict) or not isinstance(lockers, dict):
            raise SetupError("'people' and 'lockers' are mappings")
        items: dict[int, str | None] = {}
        for key, item in lockers.items():
            if not (isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key[:18])) == key):
                raise SetupError(f"locker {key!r} is not a plain number")
            if item is not None and (not _is_word(item) or item == "empty"):
                raise SetupError(f"locker {key} holds {item!r}, which is neither null nor the name of an item")
            items[int(key)] = item
        numbers: dict[str, int] = {}
        for person, locker in people.items():
            number = _integer(locker)
            if not _is_word(person):
                raise SetupError(f"person {person!r} has no proper name")
            if number not in items:
                raise SetupError(f"person {person!r} has locker {locker!r}, which is not there")
            numbers[person] = number
        return State(numbers, items)

    def call(self, state: State, name: str, arguments: dict[str, Any]) -> str:
        """See `Environment.call`. `3.0` is the integer 3; a boolean or a text is none."""
        values = _checked(name, arguments)
        if name == "find_person":
            number = state.people.get(values["name"])
            return "unknown" if number is None else str(number)
        if absent := [key for key, number in values.items() if number not in state.lockers]:
            raise ToolError(f"{absent[0]} is no locker that is there")
        if name == "open_locker":
            return state.lockers[values["number"]] or "empty"
        source, target = values["source"], values["target"]
        item = state.lockers[source]
        if item is None:
            raise ToolError(f"locker {source} is empty")
        if state.lockers[target] is not None:
            raise ToolError(f"locker {target} is full")
        state.lockers[source], state.lockers[target] = None, item
        return item

    def snapshot(self, state: State) -> dict[str, Any]:
        """See `Environment.snapshot`."""
        return {
            "people": dict(sorted(state.people.items())),
            "lockers": {str(number): item for number, item in sorted(state.lockers.items())},
        }


def _checked(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, integers as int. Raises ToolError for a call that the tools do not describe."""
    parameters = _PARAMETERS.get(name)
    if parameters is None:
        raise ToolError(f"there is no tool {_short(name)}; the tools are {', '.join(_PARAMETERS)}")
    if missing := [key for key in parameters if key not in arguments]:
        raise ToolError(f"{name} needs {' and '.join(missing)}")
    if unknown := [key for key in arguments if key not in parameters]:
        raise ToolError(f"{name} takes no {_short(unknown[0])}")
    values = {key: _integer(v) if parameters[key] == "integer" else v for key, v in arguments.items()}
    for key, value in values.items():
        if not isinstance(value, _KINDS[parameters[key]]):
            raise ToolError(f"{key} of {name} has to be of type {parameters[key]}")
    return values


def _integer(value: Any) -> Any:
    """A whole number as int; anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value == value // 1 else None


def _short(text: str) -> str:
    """What a model wrote, in a message to it: in ASCII, the first 40 characters."""
    return ascii(text[:40])


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and value.strip() != ""
