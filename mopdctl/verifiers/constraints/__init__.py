"""Instruction following: an answer passes if it meets every constraint. What nobody can check fails closed."""

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome
from mopdctl.verifiers.constraints.kinds import KINDS, check_constraint, meets
from mopdctl.verifiers.fences import answer

__all__ = ["KINDS", "constraints"]

_KEYS = {"constraints", "partial", "loose"}


def constraints(attempt: Attempt) -> Outcome:
    """1 if the answer meets all of `reference["constraints"]`, each `{"kind": ..., its parameters}`; see KINDS.

    The same kind may stand there several times, and each time counts. An empty answer meets nothing. With `"partial":
    true` the reward is the share that is met. With `"loose": true` a constraint is met too if it is without the first
    line, the last line, both, or without asterisks (the loose accuracy of IFEval, arXiv 2311.07911). Parameters that
    are null count as not given. An unknown kind, and a parameter that is unknown, missing or out of its range, is an
    InvalidReferenceError, whatever the answer.
    """
    reference = attempt.reference
    if not isinstance(reference, dict) or not isinstance(reference.get("constraints"), list):
        raise InvalidReferenceError("reference has no list 'constraints'")
    if unknown := reference.keys() - _KEYS:
        raise InvalidReferenceError(f"unknown key {min(map(str, unknown))!r}; there are {', '.join(sorted(_KEYS))}")
    if not reference["constraints"]:
        raise InvalidReferenceError("'constraints' is empty")
    for flag in ("partial", "loose"):
        if not isinstance(reference.get(flag, False), bool):
            raise InvalidReferenceError(f"{flag!r} is neither true nor false")
    wanted = [check_constraint(constraint) for constraint in reference["constraints"]]
    text = answer(attempt.response).strip()
    if not text:
        return Outcome(0.0, "empty answer")
    readings = _readings(text) if reference.get("loose") else [text]
    broken = [one for one in wanted if not any(meets(reading, one) for reading in readings)]
    share = 1 - len(broken) / len(wanted)
    detail = f"breaks {', '.join(one['kind'] for one in broken)}" if broken else ""
    return Outcome(share if reference.get("partial") else float(not broken), detail)


def _readings(text: str) -> list[str]:
    """The text as it is, without its first line, last line or both, and each of these without asterisks."""
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return [reading for reading in (*cut, *(part.replace("*", "").strip() for part in cut)) if reading]
