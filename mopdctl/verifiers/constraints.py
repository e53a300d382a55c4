"""Instruction following: a response passes if it meets every constraint. An unknown constraint fails closed."""

from collections.abc import Callable
from typing import Any

from mopdctl.verifiers.base import InvalidReferenceError


def constraints(response: str, reference: Any) -> tuple[float, str]:
    """1 if the response meets all of `reference["constraints"]`, each `{"kind": ..., its parameters}`."""
    if not isinstance(reference, dict) or not reference.get("constraints"):
        raise InvalidReferenceError("reference has no 'constraints'")
    for constraint in reference["constraints"]:
        parameters = dict(constraint)
        kind = parameters.pop("kind", None)
        if kind not in KINDS:
            raise InvalidReferenceError(f"unknown constraint {kind!r}")
        if not KINDS[kind](response.strip(), **parameters):
            return 0.0, f"breaks {kind}"
    return 1.0, ""


def _items(response: str, *, separator: str, count: int) -> bool:
    """Exactly `count` non-empty items between separators."""
    items = response.split(separator)
    return len(items) == count and all(item.strip() for item in items)


def _only_word(response: str, *, word: str, separator: str) -> bool:
    """Every item is `word`, in any case."""
    return all(item.strip().casefold() == word.casefold() for item in response.split(separator))


def _case(response: str, *, case: str) -> bool:
    """All cased letters are `upper` or `lower`."""
    return response.isupper() if case == "upper" else response.islower()


def _starts_with(response: str, *, text: str) -> bool:
    return response.startswith(text)


def _ends_with(response: str, *, text: str) -> bool:
    return response.endswith(text)


def _strip_around(response: str, *, before: str, after: str, inner: dict[str, Any]) -> bool:
    """What stands between `before` and `after` meets the `inner` constraint."""
    if len(response) < len(before) + len(after) or not (response.startswith(before) and response.endswith(after)):
        return False
    return constraints(response[len(before) : len(response) - len(after)], {"constraints": [inner]})[0] == 1.0


KINDS: dict[str, Callable[..., bool]] = {
    "items": _items,
    "only_word": _only_word,
    "case": _case,
    "starts_with": _starts_with,
    "ends_with": _ends_with,
    "between": _strip_around,
}
