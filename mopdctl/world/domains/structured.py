"""Structured output: named fields to one JSON object. The longest answers of this world.

The hard half has more than five fields.
"""

import json
from typing import Any

from mopdctl.world.examples import Example, Values

_WORD_FIELDS = ("name", "city", "team", "color", "pet")
_NUMBER_FIELDS = ("age", "level", "score")


def make(values: Values) -> Example:
    """`JSON: name=kalo, age=41, city=bremi` -> `{"name": "kalo", "age": 41, "city": "bremi"}`."""
    rng = values.rng
    fields = rng.sample(_WORD_FIELDS, rng.randint(2, 5)) + rng.sample(_NUMBER_FIELDS, rng.randint(1, 3))
    rng.shuffle(fields)
    record: dict[str, Any] = {f: values.word() if f in _WORD_FIELDS else rng.randint(1, 99) for f in fields}
    user = "JSON: " + ", ".join(f"{field}={value}" for field, value in record.items())
    return Example("structured", user, json.dumps(record), "json_equal", {"value": record}, basic=len(fields) <= 5)
