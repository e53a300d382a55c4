"""What a verifier is: (prompt, response, reference) to a reward in [0, 1], or a state that says why there is none."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

from mopdctl.records import Message
from mopdctl.verifiers.limits import LimitError

MOST_DEPTH = 100
"""Levels of nesting of what comes as JSON: references, tools, environments, structured answers."""


class VerdictState(StrEnum):
    """How a verification ended. Only `ok` carries a reward; the others are states, never a score of 0."""

    OK = "ok"
    PARSE_ERROR = "parse_error"
    """The response does not have the form that was asked for."""
    TIMEOUT = "timeout"
    """The check of this response ran past its limit of time, memory, stack, processes or output."""
    INFRA_ERROR = "infra_error"
    """The machinery failed: neither the model nor the document is at fault."""
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
    """What gated the reward, for a human."""
    label: str = ""
    """A class of outcome, where the verifier knows some, e.g. `correct`, `abstained`, `wrong`."""


class Outcome(NamedTuple):
    """What a check found of a response that it could read."""

    reward: float
    """In [0, 1]."""
    detail: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One response, what it answers, and what it is held against. Plain JSON values: it crosses process borders."""

    response: str
    """The text to check. Of a conversation with tools, the assistant's last message."""
    reference: Any = None
    messages: tuple[Message, ...] = ()
    """The prompt."""
    tools: tuple[dict[str, Any], ...] | None = None
    """The tools that the prompt offered, as OpenAI function schemas."""
    environment: dict[str, Any] | None = None
    """The prompt's tool environment, `{"name": ..., "setup": ...}`."""
    turns: tuple[Message, ...] = ()
    """Everything after the prompt as chat messages, where there were several turns; else empty."""


class ParseError(ValueError):
    """Raised by a check when the response cannot be read at all."""


class InvalidReferenceError(ValueError):
    """Raised by a check when the reference cannot be used."""


def check_depth(attempt: Attempt) -> None:
    """Raises InvalidReferenceError for a document, and LimitError for turns, nested deeper than MOST_DEPTH.

    So that whatever runs out of stack later does so because of the response.
    """
    document = (attempt.reference, attempt.tools, attempt.environment, attempt.messages)
    if any(deeper_than(value, MOST_DEPTH) for value in document):
        raise InvalidReferenceError(f"nested deeper than {MOST_DEPTH} levels")
    if deeper_than(attempt.turns, MOST_DEPTH):
        raise LimitError(f"memory: turns nested deeper than {MOST_DEPTH} levels")


def deeper_than(value: Any, depth: int) -> bool:
    """Whether anything in a JSON value lies in more than `depth` lists and objects."""
    return any(True for _ in islice(levels(value), depth + 1, None))


def levels(value: Any) -> Iterator[list[Any]]:
    """A JSON value, then what lies in it one level deeper, and so on. Takes no stack, however deep it is."""
    level = [value]
    while level:
        yield level
        level = [
            inner
            for item in level
            if isinstance(item, dict | list | tuple)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]


@dataclass(frozen=True, slots=True)
class Verifier:
    """A named, versioned check."""

    name: str
    version: int
    check: Callable[[Attempt], Outcome]
    """Raises ParseError, InvalidReferenceError or LimitError; see `registry.run_check` for other exceptions.

    Whether the reference can be used is decided before the response is read: no response can make it look invalid.
    """
    isolated: bool = False
    """Whether it may hang or eat memory on some input, so that it only ever runs in a worker that can be killed."""
