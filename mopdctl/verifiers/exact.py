"""Exact match after a named normalisation, and equality of integers."""

import re
import unicodedata
from typing import Any

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome, ParseError
from mopdctl.verifiers.fences import answer as final_answer

_INTEGER = re.compile(r"\s*[+-]?\d{1,30}\s*", re.ASCII)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b\s*", re.IGNORECASE)

NORMALISATIONS = ("nfkc", "casefold", "punctuation", "articles", "whitespace", "strip")
"""In the order in which they apply, whatever the order in the reference."""
_DEFAULT = ["whitespace", "strip"]
_MOST_COMBINING = 30


def exact_match(attempt: Attempt) -> Outcome:
    """1 if the answer equals `reference["answer"]`, or one of `reference["answers"]`, once both are normalised.

    `reference["normalise"]` lists what is done to both, by default `whitespace` (a run becomes one space) and `strip`.
    Further ones: `nfkc`, `casefold`, `punctuation` (goes, except a sign or a point before a number and marks between
    digits: 3.5 is not 35, and neither -5 nor .5 is 5) and `articles` (a, an, the go). Reasoning before the answer does
    not count.
    """
    steps = _steps(attempt.reference)
    wanted = [_wanted(text, steps) for text in accepted_answers(attempt.reference)]
    got = normalised(final_answer(attempt.response), steps)
    if got in wanted:
        return Outcome(1.0)
    return Outcome(0.0, f"expected {wanted[0]!r}" if len(wanted) == 1 else f"expected one of {wanted!r}")


def integer(attempt: Attempt) -> Outcome:
    """1 if the answer is one integer equal to `reference["answer"]`. Anything beside the number is a parse error."""
    answer = field(attempt.reference, "answer")
    if isinstance(answer, bool) or not isinstance(answer, int | str) or not _INTEGER.fullmatch(str(answer)):
        raise InvalidReferenceError(f"'answer' {answer!r} is not an integer")
    expected = int(answer)
    response = final_answer(attempt.response)
    if not _INTEGER.fullmatch(response):
        raise ParseError("not one integer")
    got = int(response)
    return Outcome(float(got == expected), "" if got == expected else f"expected {expected}")


def accepted_answers(reference: Any) -> list[str]:
    """`answer` (text or a number) or the list `answers`, as texts. Raises InvalidReferenceError."""
    if isinstance(reference, dict) and "answer" in reference and "answers" in reference:
        raise InvalidReferenceError("reference has both 'answer' and 'answers'")
    if isinstance(reference, dict) and "answers" in reference:
        name, found = "answers", reference["answers"]
        if not isinstance(found, list) or not found:
            raise InvalidReferenceError("'answers' is not a list of at least one answer")
    else:
        name, found = "answer", [field(reference, "answer")]
    for answer in found:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise InvalidReferenceError(f"{name!r} is or holds a {type(answer).__name__}, not text or a number")
    return [str(answer) for answer in found]


def field(reference: Any, key: str) -> Any:
    """`reference[key]`. Raises InvalidReferenceError if there is none."""
    if not isinstance(reference, dict) or key not in reference:
        raise InvalidReferenceError(f"reference has no {key!r}")
    return reference[key]


def normalised(text: str, steps: list[str]) -> str:
    """`text` after the named NORMALISATIONS."""
    if "nfkc" in steps:
        text = nfkc(text)
    if "casefold" in steps:
        text = text.casefold()
    if "punctuation" in steps:
        text = _without_punctuation(text)
    if "articles" in steps:
        text = _ARTICLE.sub("", text)
    if "whitespace" in steps:
        text = re.sub(r"\s+", " ", text)
    return text.strip() if "strip" in steps else text


def nfkc(text: str) -> str:
    """NFKC of the text, made stream-safe first (UAX #15, D4): a long run of combining marks takes quadratic time."""
    if text.isascii():
        return text
    safe, run = [], 0
    for mark in text:
        run = run + 1 if unicodedata.combining(mark) else 0
        if run > _MOST_COMBINING:
            safe.append("\u034f")
            run = 1
        safe.append(mark)
    return unicodedata.normalize("NFKC", "".join(safe))


def _steps(reference: Any) -> list[str]:
    if not isinstance(reference, dict) or reference.get("normalise") is None:
        return _DEFAULT
    steps = reference["normalise"]
    for step in steps if isinstance(steps, list) else [steps]:
        if not isinstance(steps, list) or step not in NORMALISATIONS:
            raise InvalidReferenceError(f"'normalise' has {step!r}; it lists any of {', '.join(NORMALISATIONS)}")
    return list(steps)


def _wanted(text: str, steps: list[str]) -> str:
    wanted = normalised(text, steps)
    if text.strip() and not wanted.strip():
        raise InvalidReferenceError(f"nothing is left of the answer {text!r} once it is normalised")
    return wanted


def _without_punctuation(text: str) -> str:
    return "".join(mark for at, mark in enumerate(text) if unicodedata.category(mark)[0] != "P" or _in_number(text, at))


def _in_number(text: str, at: int) -> bool:
    """Whether a mark belongs to a number: between digits, or as its sign, its point or both in front of it."""
    before, after = text[at - 1 : at], text[at + 1 : at + 2]
    if text[at] == "-" and after == ".":
        after = text[at + 2 : at + 3]
    return after.isdigit() and (before.isdigit() or (text[at] in "-." and not before.isalnum()))
