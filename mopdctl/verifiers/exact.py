"""Exact match after whitespace is normalised, and equality of integers."""

import re
from typing import Any

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome, ParseError

_INTEGER = re.compile(r"\s*[+-]?\d{1,30}\s*", re.ASCII)


def exact_match(attempt: Attempt) -> Outcome:
    """1 if the response equals `reference["answer"]` once runs of whitespace are one space and the ends are trimmed."""
    expected = _field(attempt.reference, "answer")
    if not isinstance(expected, str | int | float):
        raise InvalidReferenceError(f"'answer' is a {type(expected).__name__}, not text or a number")
    got, want = " ".join(attempt.response.split()), " ".join(str(expected).split())
    return Outcome(float(got == want), "" if got == want else f"expected {want!r}")


def integer(attempt: Attempt) -> Outcome:
    """1 if the response is one integer equal to `reference["answer"]`. Anything beside the number is a parse error."""
    answer = _field(attempt.reference, "answer")
    if isinstance(answer, bool) or not isinstance(answer, int | str) or not _INTEGER.fullmatch(str(answer)):
        raise InvalidReferenceError(f"'answer' {answer!r} is not an integer")
    expected = int(answer)
    if not _INTEGER.fullmatch(attempt.response):
        raise ParseError("not one integer")
    got = int(attempt.response)
    return Outcome(float(got == expected), "" if got == expected else f"expected {expected}")


def _field(reference: Any, key: str) -> Any:
    if not isinstance(reference, dict) or key not in reference:
        raise InvalidReferenceError(f"reference has no {key!r}")
    return reference[key]
