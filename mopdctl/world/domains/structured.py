"""Structured output: named fields to one JSON object. The longest answers of this world.

The hard half has a field that is answered with yes or no, which becomes a boolean.
"""

import json
from typing import Any

from mopdctl.world.examples import Example, Values, wrong_only

_WORD_FIELDS = ("name", "city", "team", "color", "pet")
_NUMBER_FIELDS = ("age", "level", "score")


def make(values: Values) -> Example:
    """`JSON: name=kalo, age=41, pet=yes` -> `{"name": "kalo", "age": 41, "pet": true}`."""
    rng = values.rng
    words = rng.sample(_WORD_FIELDS, rng.randint(3, 5))
    fields = words + rng.sample(_NUMBER_FIELDS, rng.randint(1, 3))
    flag = rng.choice(words) if rng.random() < 0.5 else None
    rng.shuffle(fields)
    record: dict[str, Any] = {}
    for field in fields:
        if field == flag:
            record[field] = rng.random() < 0.5
        else:
            record[field] = values.word() if field in words else rng.randint(1, 99)
    shown = {True: "yes", False: "no"}
    stated = (f"{field}={shown[v] if isinstance(v, bool) else v}" for field, v in record.items())
    user = "JSON: " + ", ".join(stated)
    return Example("structured", user, json.dumps(record), "json_equal", {"value": record}, basic=flag is None)


def near_misses(example: Example) -> list[str]:
    """A wrong type or case, a field too few or too many, two values swapped, a text that is not one JSON document."""
    record = example.reference["value"]
    last = list(record)[-1]
    number = next(field for field, value in record.items() if type(value) is int)
    word = next(field for field, value in record.items() if isinstance(value, str))
    changed = [
        record | {number: str(record[number])},
        record | {number: record[number] + 1},
        record | {word: record[word].upper()},
        record | {word: record[number], number: record[word]},
        {field: value for field, value in record.items() if field != last},
        record | {"extra": True},
        record | {field: "yes" if value else "no" for field, value in record.items() if isinstance(value, bool)},
        [record],
    ]
    texts = [f"{example.answer} ok", example.answer[:-1], example.user]
    return wrong_only(example.answer, [*map(json.dumps, changed), *texts])
