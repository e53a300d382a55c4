"""What a verifier says of one answer."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class VerdictState(StrEnum):
    """How a verification ended. Only `ok` carries a reward; the others are states, never a score of 0."""

    OK = "ok"
    PARSE_ERROR = "parse_error"
    """The response does not have the form that was asked for."""
    INVALID_REFERENCE = "invalid_reference"
    """The reference itself is unusable: the document is at fault, not the model."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one verification."""

    state: VerdictState
    reward: float | None
    """In [0, 1] where the state is `ok`, else None."""
    verifier: str
    version: int
    detail: str = ""


class ParseError(ValueError):
    """Raised by a check when the response cannot be read at all."""


class InvalidReferenceError(ValueError):
    """Raised by a check when the reference cannot be used."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """A named, versioned check. `check(response, reference)` returns a reward in [0, 1] and a detail for a human."""

    name: str
    version: int
    check: Callable[[str, Any], tuple[float, str]]
