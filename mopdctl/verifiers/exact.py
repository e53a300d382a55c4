"""Exact match after whitespace is normalised, and equality of integers."""

import re
from typing import Any

from mopdctl.verifiers.base import InvalidReferenceError, ParseError


def exact_match(response: str, reference: Any) -> tuple[float, str]:
    """1 if `response` equals `reference["answer"]` once runs of whitespace are one space and the ends are trimmed."""
    expected = _field(reference, "answer")
    got, want = " ".join(response.split()), " ".join(str(expected).split())
    return float(got == want), "" if got == want else f"expected {want!r}"


def integer(response: str, reference: Any) -> tuple[float, str]:
    """1 if `response` is one integer equal to `reference["answer"]`. Anything beside the number is a parse error."""
    expected = int(_field(reference, "answer"))
    if not re.fullmatch(r"\s*[+-]?\d{1,30}\s*", response, re.ASCII):
        raise ParseError("not one integer")
    got = int(response)
    return float(got == expected), "" if got == expected else f"expected {expected}"


def _field(reference: Any, key: str) -> Any:
    if not isinstance(reference, dict) or key not in reference:
        raise InvalidReferenceError(f"reference has no {key!r}")
    return reference[key]
