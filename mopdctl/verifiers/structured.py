"""Structured output: the response must be one JSON document equal to the reference in values and types."""

import json
from typing import Any

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome, ParseError


def json_equal(attempt: Attempt) -> Outcome:
    """1 if the response is JSON equal to `reference["value"]`: key order is free; `1`, `1.0` and `true` all differ.

    One Markdown fence around the document is allowed. Duplicate keys and trailing text are parse errors.
    """
    reference = attempt.reference
    if not isinstance(reference, dict) or "value" not in reference:
        raise InvalidReferenceError("reference has no 'value'")
    got = parse_json(attempt.response)
    same = _equal(got, reference["value"])
    return Outcome(float(same), "" if same else "differs from the reference")


def parse_json(text: str) -> Any:
    """One strict JSON document. Raises ParseError for anything else, duplicate keys and NaN included."""
    try:
        return json.loads(_unfenced(text), object_pairs_hook=_no_duplicates, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"not JSON: {error}") from None


def _unfenced(text: str) -> str:
    """What stands between the two lines of a Markdown fence, if the whole text is one. Linear, unlike a regex here."""
    stripped = text.strip()
    opening, _, rest = stripped.partition("\n")
    body = rest.removesuffix("```")
    closed = body != rest and "\n" in body[len(body.rstrip()) :]
    return body if closed and opening.rstrip() in ("```", "```json") else text


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("duplicate key")
    return dict(pairs)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _equal(a: Any, b: Any) -> bool:
    """Equality of JSON values and types: `True`, `1` and `1.0` are three different things. As deep as both are."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
