"""Whether a JSON Schema can be used at all, whatever the value that it will be held against."""

import functools
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from typing import Any

import jsonschema.exceptions
import jsonschema.validators
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from mopdctl.verifiers.base import InvalidReferenceError

_DATA = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})


def draft_of(schema: Any) -> Any:
    """The validator class of the draft that `$schema` names, 2020-12 without one; None for one that nobody knows."""
    if not isinstance(schema, dict) or "$schema" not in schema:
        return jsonschema.validators.Draft202012Validator
    name = schema["$schema"]
    return jsonschema.validators.validator_for(schema, default=None) if isinstance(name, str) else None


def check_schema(schema: Any, draft: Any, *, patterns: bool) -> None:
    """Raises InvalidReferenceError for a schema that fails on some value, so that no response can bring that about.

    That is one that its draft does not allow, refers to what is no schema within it, or leads back to itself without
    going deeper into the value. `patterns`: whether its regular expressions will be tried, and so have to be some.
    """
    if draft is jsonschema.validators.Draft3Validator:
        raise InvalidReferenceError("draft 3 is too old")
    _check_form(schema, draft)
    contents = Resource.from_contents(schema, default_specification=DRAFT202012)
    resolver = Registry().with_resource("", contents).resolver()
    parts = list(subschemas(schema))
    known = set(map(id, parts))
    leads_to: dict[int, list[int]] = {}
    for part in parts:
        leads_to[id(part)] = list(map(id, _on_the_same_value(part)))
        for target in (part[key] for key in ("$ref", "$dynamicRef") if isinstance(part.get(key), str)):
            if not target.startswith("#"):
                raise InvalidReferenceError(f"{target!r} points outside the schema")
            try:
                found = resolver.lookup(target).contents
            except Unresolvable:
                raise InvalidReferenceError(f"{target!r} is not there") from None
            if id(found) not in known and not isinstance(found, bool):
                raise InvalidReferenceError(f"{target!r} is no schema")
            _check_form(found, draft)  # it may lie where the draft expects none
            leads_to[id(part)].append(id(found))
        if isinstance(step := part.get("multipleOf"), float) and not math.isfinite(step):
            raise InvalidReferenceError(f"multipleOf {step} is no JSON number")
        if patterns:
            _check_patterns(part)
    try:
        TopologicalSorter(leads_to).prepare()
    except CycleError:
        raise InvalidReferenceError("it leads back to itself without end") from None


@functools.cache
def exact(draft: Any) -> Any:
    """The validator class of a draft with `multipleOf` as written in decimals: 0.3 is a multiple of 0.1.

    jsonschema divides doubles (python-jsonschema/jsonschema #810), so that 0.3 / 0.1 leaves a remainder.
    """

    def multiple_of(validator: Any, step: Any, instance: Any, _schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "number") and not _is_multiple(instance, step):
            yield jsonschema.exceptions.ValidationError(f"{instance!r} is not a multiple of {step}")

    return jsonschema.validators.extend(draft, {"multipleOf": multiple_of})


def forget_drafts(schema: Any) -> None:
    """Takes `$schema` out of a checked schema and its parts, in place.

    Where jsonschema meets one, behind a `$ref` too, it goes on with its own validator of that draft.
    """
    for part in list(subschemas(schema)):
        part.pop("$schema", None)


def _is_multiple(value: float, step: float) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return _decimal(value) % _decimal(step) == 0


def _decimal(number: float) -> Fraction:
    return Fraction(number if isinstance(number, int) else repr(number))


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and every object in it that is one or may be referred to as one."""
    todo = [schema]
    while todo:
        here = todo.pop()
        if isinstance(here, list):
            todo += here
        elif isinstance(here, dict):
            yield here
            for key, value in here.items():
                if key in _BY_NAME and isinstance(value, dict):
                    todo += value.values()
                elif key not in _DATA:
                    todo.append(value)


def _check_form(schema: Any, draft: Any) -> None:
    try:
        draft.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise InvalidReferenceError(f"{error.json_path}: {error.message[:200]}") from None
    except RecursionError:
        raise InvalidReferenceError("nested too deep") from None


def _on_the_same_value(schema: dict[str, Any]) -> Iterator[Any]:
    """The parts of a schema that speak about the same value as the whole."""
    for key in ("allOf", "anyOf", "oneOf"):
        yield from schema[key] if isinstance(schema.get(key), list) else ()
    for key in ("not", "if", "then", "else"):
        yield schema.get(key)
    for key in ("dependentSchemas", "dependencies"):
        yield from schema[key].values() if isinstance(schema.get(key), dict) else ()


def _check_patterns(schema: dict[str, Any]) -> None:
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidReferenceError(f"the pattern {pattern[:100]!r}: {error}") from None
