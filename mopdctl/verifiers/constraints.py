"""Instruction following: a response passes if it meets every constraint. An unknown constraint fails closed."""

from collections.abc import Callable
from typing import Any

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome


def constraints(attempt: Attempt) -> Outcome:
    """1 if the response meets all of `reference["constraints"]`, each `{"kind": ..., its parameters}`."""
    reference = attempt.reference
    if not isinstance(reference, dict) or not isinstance(reference.get("constraints"), list):
        raise InvalidReferenceError("reference has no list 'constraints'")
    if not reference["constraints"]:
        raise InvalidReferenceError("'constraints' is empty")
    for constraint in reference["constraints"]:
        _check(constraint)
    for constraint in reference["constraints"]:
        if not _meets(attempt.response.strip(), constraint):
            return Outcome(0.0, f"breaks {constraint['kind']}")
    return Outcome(1.0, "")


def _check(constraint: Any) -> None:
    """Raises InvalidReferenceError unless the kind is known and has just the parameters that it needs."""
    kind = constraint.get("kind") if isinstance(constraint, dict) else constraint
    if not isinstance(constraint, dict) or not isinstance(kind, str) or kind not in KINDS:
        raise InvalidReferenceError(f"unknown constraint {kind!r}")
    _, needs = KINDS[kind]
    if constraint.keys() - {"kind"} != needs.keys():
        raise InvalidReferenceError(f"constraint {kind!r} needs {', '.join(needs)}")
    for name, allowed in needs.items():
        value = constraint[name]
        if allowed is dict:
            _check(value)
        elif not (type(value) is allowed if isinstance(allowed, type) else value in allowed):
            raise InvalidReferenceError(f"constraint {kind!r}: {name} cannot be {value!r}")
    if constraint.get("separator") == "":
        raise InvalidReferenceError(f"constraint {kind!r}: separator is empty")


def _meets(response: str, constraint: dict[str, Any]) -> bool:
    check, _ = KINDS[constraint["kind"]]
    return check(response, **{name: value for name, value in constraint.items() if name != "kind"})


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
    return _meets(response[len(before) : len(response) - len(after)].strip(), inner)


KINDS: dict[str, tuple[Callable[..., bool], dict[str, type | tuple[str, ...]]]] = {
    "items": (_items, {"separator": str, "count": int}),
    "only_word": (_only_word, {"word": str, "separator": str}),
    "case": (_case, {"case": ("upper", "lower")}),
    "starts_with": (_starts_with, {"text": str}),
    "ends_with": (_ends_with, {"text": str}),
    "between": (_strip_around, {"before": str, "after": str, "inner": dict}),
}
"""Kind to its check and its parameters: their types, or the words that are allowed."""
