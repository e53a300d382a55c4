"""Structured output: the response must be one JSON document equal to the reference in values and types."""

import json
import re
from typing import Any

from mopdctl.verifiers.base import InvalidReferenceError, ParseError

_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)


def json_equal(response: str, reference: Any) -> tuple[float, str]:
    """1 if the response is JSON equal to `reference["value"]`: key order is free; `1`, `1.0` and `true` all differ.

    One Markdown fence around the document is allowed. Duplicate keys and trailing text are parse errors.
    """
    if not isinstance(reference, dict) or "value" not in reference:
        raise InvalidReferenceError("reference has no 'value'")
    got = parse_json(response)
    same = _typed(got) == _typed(reference["value"])
    return float(same), "" if same else "differs from the reference"


def parse_json(text: str) -> Any:
    """One strict JSON document. Raises ParseError for anything else, duplicate keys and NaN included."""
    fenced = _FENCE.fullmatch(text)
    try:
        return json.loads(fenced.group(1) if fenced else text, object_pairs_hook=_no_duplicates, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"not JSON: {error}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("duplicate key")
    return dict(pairs)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _typed(value: Any) -> Any:
    """The value with its JSON types made explicit, so that `True`, `1` and `1.0` are three different things."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return (type(value).__name__, value)
