"""Mathematical answers: which part of a response is its final answer, and whether that equals the gold answer.

Only ever run in a worker that can be killed: see `equivalence`, which compares.
"""

import re
from typing import NamedTuple

from mopdctl.verifiers import equivalence
from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome, ParseError
from mopdctl.verifiers.equivalence import Reading
from mopdctl.verifiers.exact import accepted_answers
from mopdctl.verifiers.fences import answer as final_answer

_MOST_CHARACTERS = 2_000  # of a formula; longer ones take the parser minutes and are no answers
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_ANNOUNCED = re.compile(r"\banswer(?:\s+is\b|\s*:)\s*:?", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(((?:[^\\]|\\(?!\)))+)\\\)|\\\[((?:[^\\]|\\(?!\]))+)\\\]")
_WORD = re.compile(r"[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_NOT_A_POINT = re.compile(
    r"[\[\]<>]|\\(?:infty|cup|cap|in|leq?|geq?|lt|gt|l?brack|r?brack|setminus)(?![A-Za-z])|\u221e"
)
_GROUPED = re.compile(r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))")
_POWER = r"(\^(?:\d|\{-?\d\}))?\s*\.?\s*\Z"
_UNIT = re.compile(r"(?<=[\d})])(?:[\s~]|\\[,;:! ])*\\(?:text|textrm|mathrm|mbox|textit)\s*\{([^{}]*)\}\s*" + _POWER)
_PLAIN_UNIT = re.compile(r"(?<=\d)\s*([A-Za-z]+(?:/[A-Za-z]+)?)" + _POWER)
_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "millimeter": "mm", "millimetre": "mm",
    "kilometer": "km", "kilometre": "km", "inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "mile": "mi",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg", "liter": "l",
    "litre": "l", "dollar": "usd", "cent": "c", "degree": "deg", "day": "d", "square cm": "cm^2", "sq cm": "cm^2",
}  # fmt: skip
_PLAIN_UNITS = frozenset({*_UNITS, *_UNITS.values(), "km/h", "m/s", "mph"})


class _Formula(NamedTuple):
    """A final answer, taken apart."""

    reading: Reading
    unit: str
    """In one spelling; empty where none is stated."""
    text: str


def math_answer(attempt: Attempt) -> Outcome:
    r"""1 if the final answer means the same as `reference["answer"]`, or as one of `reference["answers"]`.

    The final answer is the content of the last `\boxed{}`; without a box, what the last "answer is" or "answer:"
    announces; else the last line, marks of a heading apart (`#### 42`). There the last formula counts (after an
    announcement the first), else the last number. An earlier box never counts, not even where the last one is empty or
    cannot be read, which is a parse error.

    - Several values belong into one box: `\boxed{1, 2}`.
    - `(1,2)` is a point. It is an interval only where the gold is one by its spelling: `[1,2)`, `(-\infty,2)`,
      `x \in (1,2)`, `1<x<2`, a union.
    - A unit counts where gold and answer both state one: `12\text{ cm}` equals 12 and not `12\text{ m}`. Units are
      not converted. A percentage equals its number and its value: 9 % is 9 and 0.09.
    - A decimal equals a fraction to six decimals. `1\,000` is a thousand.
    - An equation counts for its right side, unless it is one of two numbers that differ.

    A gold that cannot be read is an InvalidReferenceError.
    """
    golds = [_gold(text) for text in accepted_answers(attempt.reference)]
    got = _answer(final_answer(attempt.response), frozenset(gold.unit for gold in golds))
    for gold in golds:
        unit_fits = not gold.unit or not got.unit or gold.unit == got.unit
        point = not _NOT_A_POINT.search(gold.text)
        if unit_fits and equivalence.same(gold.reading, got.reading, point=point):
            return Outcome(1.0)
    expected = " or ".join(gold.text for gold in golds)
    return Outcome(0.0, f"read {got.text!r}, expected {expected!r}"[:300])


def _gold(text: str) -> _Formula:
    try:
        boxed = _last_box(text)
    except ParseError as error:
        raise InvalidReferenceError(f"the answer {text[:100]!r}: {error}") from None
    formula = text if boxed is None else boxed
    if match := _FORMULA.fullmatch(formula.strip()):
        formula = match[match.lastindex or 0]
    taken = _taken_apart(formula, frozenset())
    if taken is None:
        raise InvalidReferenceError(f"the answer {text[:100]!r} cannot be read as mathematics")
    return taken


def _answer(response: str, units: frozenset[str]) -> _Formula:
    """The final answer. Raises ParseError. `units` are those of the gold answers, for `_taken_apart`."""
    boxed = _last_box(response)
    if boxed is not None:
        taken = _taken_apart(boxed, units)
        if taken is None:
            raise ParseError(f"the last box holds {boxed[:100]!r}, which cannot be read as mathematics")
        return taken
    line, announced = _last_line(response)
    formulas = [match[match.lastindex or 0] for match in _FORMULA.finditer(line)]
    if formulas:
        taken = _taken_apart(formulas[0 if announced else -1], units)
    elif _WORD.search(_COMMAND.sub(" ", line)):
        reading = equivalence.read_prose(line)
        taken = None if reading is None else _Formula(reading, "", line)
    else:
        taken = _taken_apart(line, units)
    if taken is None:
        raise ParseError("no answer that can be read as mathematics")
    return taken


def _last_line(response: str) -> tuple[str, bool]:
    """The text that holds the answer where there is no box, and whether "answer is" or "answer:" announced it."""
    announcements = list(_ANNOUNCED.finditer(response))
    tail = response[announcements[-1].end() :] if announcements else ""
    lines = [line for line in (tail if tail.strip() else response).split("\n") if line.strip()]
    if not lines:
        raise ParseError("empty")
    line = (lines[0] if tail.strip() else lines[-1])[-_MOST_CHARACTERS:].replace("**", "").strip()
    return line.lstrip("#> ").removesuffix(".").strip(), bool(tail.strip())


def _last_box(text: str) -> str | None:
    r"""What is in the last `\boxed{}`, or None if there is no box. Raises ParseError if that box is empty or open."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    begin = boxes[-1].end() + 1
    depth, at = 1, begin
    while at < len(text):
        if text[at] == "\\":
            at += 1  # what follows is escaped
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                break
        at += 1
    if depth:
        raise ParseError("the last box is not closed")
    if not text[begin:at].strip():
        raise ParseError("the last box is empty")
    return text[begin:at].strip()


def _taken_apart(formula: str, units: frozenset[str]) -> _Formula | None:
    """Value and unit, or None if there is no value. A lone letter behind a number is a unit only if one of `units`."""
    if len(formula) > _MOST_CHARACTERS:
        return None
    formula = _GROUPED.sub("", " ".join(formula.replace("\\$", " ").replace("$", " ").split()))
    if formula.startswith("\\text{") and formula.find("}") == len(formula) - 1 and formula[6:7].isdigit():
        formula = formula[6:-1]  # a number with its unit, all set as text
    unit = _UNIT.search(formula) or _plain_unit(formula, units)
    stated = _spelled(unit[1], unit[2]) if unit else ""
    bare = formula[: unit.start()] if unit and stated else formula
    reading = equivalence.read_latex(bare) if bare.strip() else None
    return None if reading is None else _Formula(reading, stated, formula)


def _plain_unit(formula: str, units: frozenset[str]) -> re.Match[str] | None:
    found = _PLAIN_UNIT.search(formula)
    if found is None:
        return None
    known = found[1] in _PLAIN_UNITS or found[1].casefold().removesuffix("s") in _UNITS
    return found if (known and len(found[1]) > 1) or _spelled(found[1], found[2]) in units else None


def _spelled(unit: str, power: str | None) -> str:
    """A unit in one spelling: `centimeters` and `cm` are the same."""
    name = " ".join(unit.split()).rstrip(".")
    singular = name.casefold().removesuffix("s")
    power = (power or "").translate({ord("{"): None, ord("}"): None})
    return _UNITS.get(name.casefold(), _UNITS.get(singular, singular if len(singular) > 2 else name)) + power
