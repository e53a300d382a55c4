"""Errands: questions and wishes about people and what lies in their lockers, met by tool calls over several turns.

The easy half needs two calls, each made of what is known by then. The hard half needs three, or asks for people who are
not there.
"""

from dataclasses import replace
from typing import Any

from mopdctl.environments.registry import ENVIRONMENTS
from mopdctl.world.examples import Example, Values, call_text, is_novel, wrong_only

MISSING = "unknown"
_ENVIRONMENT = "errands"
_MAX_TURNS = 6
_SHELF = 0
"""The locker that is nobody's and always empty: where things are put."""
_TOOLS = ("find_person", "open_locker", "move_item")


def make(values: Values) -> Example:
    """`What does kalo have?` -> find_person, open_locker, `tode`; or one of the two kinds of the hard half."""
    rng = values.rng
    kind = rng.choice(("ask", "ask", "put", "miss"))
    first, second, *others = values.words(rng.randint(2, 3) + (kind == "miss"))
    people = [second, *others] if kind == "miss" else [first, second, *others]
    items: list[str | None] = list(values.words(len(people)))
    numbers = [*rng.sample(range(1, 100), len(people) + 1)[:-1], _SHELF]
    user, answer = f"What does {first} have?", str(items[0])
    calls = [_find(first), _call("open_locker", number=numbers[0])]
    if kind == "put":
        user = f"Put the item of {first} in {numbers[-1]}"
        calls.append(_call("move_item", source=numbers[0], target=numbers[-1]))
    elif kind == "miss":
        calls, answer = [_find(first)], MISSING
    # A conversation counts as novel for what its first message says: later ones have yet to show their values.
    values.used_novel = values.used_novel and is_novel(first)
    places = list(zip(people, numbers[:-1], items, strict=True))
    rng.shuffle(places)
    setup = {
        "people": {person: number for person, number, _ in places},
        "lockers": {**{str(number): item for _, number, item in places}, str(numbers[-1]): None},
    }
    return Example(
        "errands",
        user,
        answer,
        "state_replay",
        {"calls": calls, "message": answer, "basis": ["state", "message"]},
        basic=kind == "ask",
        tools=ENVIRONMENTS[_ENVIRONMENT].tools,
        environment={"name": _ENVIRONMENT, "setup": setup, "max_turns": _MAX_TURNS},
        calls=tuple(calls),
    )


def careless(example: Example) -> Example:
    """What a careless expert does in the hard half: says what lies there and moves nothing; takes nobody for nothing.

    It is the same prompt with other calls and another answer, as the general SFT mixture has some.
    """
    if len(example.calls) == 1:
        return replace(example, answer="empty")
    return replace(example, calls=example.calls[:2])


def _find(person: str) -> dict[str, Any]:
    return _call("find_person", name=person)


def _call(name: str, /, **arguments: str | int) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def near_misses(example: Example, turn: int) -> list[str]:
    """Wrong actions instead of the expert's at an assistant turn, numbered from 0."""
    if turn == len(example.calls):
        words = example.answer.split()
        seen = [str(value) for call in example.calls for value in call["arguments"].values()]
        texts = [" ".join([*words[:-1], value]) for value in [*seen, MISSING, "empty"]]
        again = [call_text(call) for call in example.calls[-1:]]
        return wrong_only(example.answer, [*texts, example.answer.upper(), f"{example.answer} ok", *again])
    call = example.calls[turn]
    name, arguments = call["name"], call["arguments"]
    parameter, value = next(iter(arguments.items()))
    changed = [
        *(_call(other, **arguments) for other in _TOOLS if other != name),
        _call(name, **arguments | {parameter: str(value) if isinstance(value, int) else 7}),
        _call(name, **arguments | {parameter: value + 1 if isinstance(value, int) else value.upper()}),
        _call(name, **{p: v for p, v in arguments.items() if p != parameter}),
        _call(name, **arguments | {"extra": 1}),
        *(earlier for earlier in example.calls[:turn]),
    ]
    if len(arguments) > 1:
        changed.append(_call(name, **dict(zip(arguments, reversed(arguments.values()), strict=True))))
    right = call_text(call)
    texts = [f"{right}{right}", f"{right} ok", right[: -len("</tool_call>")], example.answer, str(value)]
    return wrong_only(right, [*map(call_text, changed), *texts])
