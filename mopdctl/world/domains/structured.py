"""Structured output: named fields to one JSON object. The longest answers of this world.

The hard half has a field with several values, which becomes an array.
"""

import json
from typing import Any

from mopdctl.world.examples import Example, Values

_WORD_FIELDS = ("name", "city", "team", "color", "pet")
_NUMBER_FIELDS = ("age", "level", "score")


def make(values: Values) -> Example:
    """`JSON: name=kalo, age=41, pet=bemi+tode` -> `{"name": "kalo", "age": 41, "pet": ["bemi", "tode"]}`."""
    rng = values.rng
    words = rng.sample(_WORD_FIELDS, rng.randint(2, 4))
    fields = words + rng.sample(_NUMBER_FIELDS, rng.randint(1, 3))
    several = rng.choice(words) if rng.random() < 0.5 else None
    rng.shuffle(fields)
    record: dict[str, Any] = {}
    for field in fields:
        if field == several:
            record[field] = values.words(rng.randint(2, 3))
        else:
            record[field] = values.word() if field in words else rng.randint(1, 99)
    stated = (f"{field}={'+'.join(v) if isinstance(v, list) else v}" for field, v in record.items())
    user = "JSON: " + ", ".join(stated)
    return Example("structured", user, json.dumps(record), "json_equal", {"value": record}, basic=several is None)
