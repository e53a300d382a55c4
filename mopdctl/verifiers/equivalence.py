"""Whether two mathematical texts mean the same: the one place that knows math-verify and sympy.

Both may run for ever or eat all memory on some input; nothing here stops them (math-verify's own alarm works in main
threads only: huggingface/Math-Verify #50, #55). Whoever calls this runs in a process that can be killed.
"""

import dataclasses
import functools
import logging
from typing import Any, NamedTuple

from mopdctl.verifiers.limits import LimitError

_RELATIVE_TOLERANCE = 1e-5
"""math-verify compares with absolute tolerance at times, so that 1/2004! equals 1/2006! (#14). 0.333333 stays 1/3."""


class Reading(NamedTuple):
    """One mathematical text as the library read it."""

    expression: Any
    is_set: bool
    """Whether it is written with braces, as a set without order."""


def read_latex(text: str) -> Reading | None:
    """A formula, with no delimiters around it; None if it cannot be read, or has no value (0/0)."""
    return _reading(f"${text}$", text)


def read_prose(text: str) -> Reading | None:
    """The last number or arithmetic expression in a line of plain text; None if there is none."""
    return _reading(text, "")


def same(gold: Reading, answer: Reading, *, point: bool) -> bool:
    """Whether the answer means what the gold means. With `point`, pairs in round brackets are points, not intervals.

    Raises RuntimeError where the library fails, LimitError where it runs out of memory or stack.
    """
    import sympy

    library = _library()
    expressions = [gold.expression, answer.expression]
    if isinstance(answer.expression, sympy.Eq) and _far_apart(answer.expression.lhs, answer.expression.rhs):
        return False  # 7 = 5 is not 5
    if point:
        if answer.is_set and not gold.is_set:
            return False
        expressions = [_points(expression) for expression in expressions]
    try:
        equal = library.verify(
            *expressions, allow_set_relation_comp=not point, timeout_seconds=None, raise_on_error=True
        )
    except (MemoryError, RecursionError) as error:
        raise LimitError(f"memory: {type(error).__name__} while comparing") from None
    except Exception as error:
        raise RuntimeError(f"math-verify: {type(error).__name__}: {error}"[:300]) from None
    return bool(equal) and not _far_apart(*expressions)


@functools.cache
def _library() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarm is off, which is meant
    return math_verify


@functools.cache
def _extraction() -> list[Any]:
    latex = _library().LatexExtractionConfig()
    # With units on, the library drops whatever looks like one, so that 3m equals 3.
    bare = dataclasses.replace(latex.normalization_config, units=False)
    return [dataclasses.replace(latex, normalization_config=bare), _library().ExprExtractionConfig()]


def _reading(text: str, formula: str) -> Reading | None:
    import sympy

    found = _library().parse(
        text, _extraction(), fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    if not found or isinstance(found[0], str) or found[0].has(sympy.nan, sympy.zoo):
        return None
    return Reading(found[0], formula.replace("\\left", "").lstrip().startswith("\\{"))


def _points(expression: Any) -> Any:
    """The expression with open intervals, also in a set of them, as pairs: `(1,2)` is read as an interval."""
    import sympy

    if isinstance(expression, sympy.Interval) and expression.left_open and expression.right_open:
        return sympy.Tuple(expression.start, expression.end)
    if isinstance(expression, sympy.FiniteSet) and any(isinstance(item, sympy.Interval) for item in expression.args):
        return expression.func(*(_points(item) for item in expression.args))
    return expression


def _far_apart(one: Any, other: Any) -> bool:
    """Whether two numbers surely differ. False for anything but two plain numbers."""
    import sympy

    if not all(isinstance(x, sympy.Expr) and x.is_number and not x.has(sympy.UnevaluatedExpr) for x in (one, other)):
        return False  # percentages are unevaluated: 9 % may be written as 9
    difference, size = sympy.Abs(one - other).evalf(30), sympy.Max(sympy.Abs(one), sympy.Abs(other)).evalf(30)
    return bool(difference.is_Float and size.is_Float and difference > _RELATIVE_TOLERANCE * size)
