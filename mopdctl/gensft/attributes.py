"""Prompts from tables of attributes: every axis in exactly the shares that were asked for, their combination random."""

import json
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from mopdctl.config.gensft import Attributes
from mopdctl.engines.base import stream_seed
from mopdctl.errors import InputError

# What an expression on wrong data raises while a template runs; the template is the user's, so the fault is too.
_RENDERING = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class MadePrompt:
    """One combination of attributes and the prompt that the template makes of it."""

    number: int
    """From 0; the template's `n`."""
    prompt: str
    difficulty: float | None
    """The number of the axis `difficulty`; None if there are no numbers."""
    values: dict[str, str]
    """Axis to value."""


def make_prompts(attributes: Attributes) -> Iterator[MadePrompt]:
    """Makes `attributes.count` prompts; the same ones every time.

    Each axis is laid out in its exact quotas, shuffled by a random stream of its own, and the axes are zipped: the
    shares of an axis hold to one row, and no axis depends on another. The template sees, for each axis, its value (or
    what `tables` holds for it), the bare word as `{axis}_name`, and the row number `n`.

    Raises InputError, before anything is made, for what `check_attributes` finds; then for a row that the template
    cannot render or leaves empty.
    """
    template = check_attributes(attributes)
    return _make(attributes, template)


def _make(attributes: Attributes, template: Template) -> Iterator[MadePrompt]:
    columns = {axis: _shuffled(counts, axis, attributes.seed) for axis, counts in expected(attributes).items()}
    for number in range(attributes.count):
        values = {axis: words[int(order[number])] for axis, (words, order) in columns.items()}
        prompt = _render(template, _context(attributes, values, number))
        yield MadePrompt(number, prompt, attributes.difficulty.get(values.get("difficulty", "")), values)


def expected(attributes: Attributes) -> dict[str, dict[str, int]]:
    """Axis to value to number of rows: the shares of `count` in whole rows, by largest remainder.

    Of equal remainders the value that stands first gets the row. Raises InputError for weights that are no shares.
    """
    return {axis: _quotas(axis, weights, attributes.count) for axis, weights in attributes.axes.items()}


def check_attributes(attributes: Attributes) -> Template:
    """The compiled template. Raises InputError for a broken one, an unknown variable, or tables that fit no axis."""
    expected(attributes)
    for axis, table in attributes.tables.items():
        _known(f"tables.{axis}", table.keys(), attributes.axes.get(axis))
    if attributes.difficulty:
        _known("difficulty", attributes.difficulty.keys(), attributes.axes.get("difficulty"))
        for value in attributes.axes["difficulty"]:
            if not 0 <= attributes.difficulty.get(value, math.nan) <= 1:
                raise InputError(f"attributes: difficulty.{value}: needs a number from 0 to 1")
    names = [name for axis in attributes.axes for name in (axis, f"{axis}_name")] + ["n"]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"attributes: the template would see two things as {twice[0]!r}; rename the axis")
    environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    try:
        unknown = find_undeclared_variables(environment.parse(attributes.prompt)) - environment.globals.keys()
        if missing := sorted(unknown - set(names)):
            raise InputError(
                f"attributes: prompt line {_line_of(attributes.prompt, missing[0])}: {missing[0]!r} is no axis; "
                f"the template sees {', '.join(names)}"
            )
        return environment.from_string(attributes.prompt)
    except TemplateSyntaxError as error:
        raise InputError(f"attributes: prompt line {error.lineno}: not a Jinja template ({error.message})") from None
    except TemplateError as error:  # an unknown filter
        raise InputError(f"attributes: prompt: not a Jinja template ({error.message})") from None


def _known(where: str, values: Any, axis: dict[str, float] | None) -> None:
    if axis is None:
        raise InputError(f"attributes: {where}: there is no such axis; name one of 'axes'")
    if unknown := sorted(values - axis.keys()):
        raise InputError(f"attributes: {where}.{unknown[0]}: no value of that axis; it has {', '.join(axis)}")


def _quotas(axis: str, weights: dict[str, float], count: int) -> dict[str, int]:
    # As written in decimal: 0.1 + 0.2 is 0.3 here, so that a tie is a tie.
    shares = {value: Fraction(str(weight)) for value, weight in weights.items()}
    total = sum(shares.values())
    if not total > 0 or min(shares.values()) < 0:
        raise InputError(f"attributes: axes.{axis}: weights must not be negative, and one must be above 0")
    exact = {value: share * count / total for value, share in shares.items()}
    quotas = {value: math.floor(rows) for value, rows in exact.items()}
    by_remainder = sorted(exact, key=lambda value: quotas[value] - exact[value])  # stable: the first of equals wins
    for value in by_remainder[: count - sum(quotas.values())]:
        quotas[value] += 1
    return quotas


def _shuffled(counts: dict[str, int], axis: str, seed: int) -> tuple[list[str], np.ndarray[Any, Any]]:
    """The values of an axis, and for each row the index of its value."""
    generator = np.random.Generator(np.random.Philox(key=stream_seed(seed, "attributes", axis)))
    return list(counts), generator.permutation(np.repeat(np.arange(len(counts), dtype=np.int32), list(counts.values())))


def _context(attributes: Attributes, values: dict[str, str], number: int) -> dict[str, Any]:
    seen = {axis: attributes.tables.get(axis, {}).get(value, value) for axis, value in values.items()}
    return seen | {f"{axis}_name": value for axis, value in values.items()} | {"n": number}


def _render(template: Template, context: dict[str, Any]) -> str:
    try:
        prompt = template.render(context)
    except _RENDERING as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"attributes: prompt line {lines[-1] if lines else '?'}: fails in row {context['n']} ({reason})"
        ) from None
    if not prompt.strip():
        raise InputError(f"attributes: the prompt of row {context['n']} is empty; the template must say something")
    return prompt


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as it would stand in a file. Jinja's own filter sorts the keys and escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def _line_of(template: str, name: str) -> int:
    return next((number for number, line in enumerate(template.split("\n"), start=1) if name in line), 1)
