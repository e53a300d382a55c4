"""Structured output: named fields to one JSON object. The longest answers of this world.

The hard half has a field that is answered with yes or no, which becomes a boolean.
"""

import json
from typing import Any

from mopdctl.world.examples import Example, Values

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
