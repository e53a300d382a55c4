"""Structured output: one well-formed document that fits its schema and equals the expected content."""

import functools
import json
import re
from typing import Any

import jsonschema.exceptions
from referencing import Registry
from referencing.exceptions import Unresolvable

from mopdctl.verifiers import documents
from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome
from mopdctl.verifiers.documents import parse_json
from mopdctl.verifiers.fences import FENCE_RULES, answer, unfenced
from mopdctl.verifiers.schemas import check_schema, draft_of, exact, forget_drafts

__all__ = ["json_equal", "parse_json", "structured"]

_KEYS = {"format", "schema", "value", "columns", "fence"}
_TYPED_BY_SCHEMA = ("xml", "csv")
_INTEGER = re.compile(r"-?\d{1,30}", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?(?:[eE][+-]?\d{1,2})?", re.ASCII)


def json_equal(attempt: Attempt) -> Outcome:
    """1 if the answer is JSON equal to `reference["value"]`: key order is free; `1`, `1.0` and `true` all differ.

    One Markdown fence around the document is allowed. Duplicate keys and trailing text are parse errors.
    """
    reference = attempt.reference
    if not isinstance(reference, dict) or "value" not in reference:
        raise InvalidReferenceError("reference has no 'value'")
    got = parse_json(answer(attempt.response))
    same = equal(got, reference["value"])
    return Outcome(float(same), "" if same else "differs from the reference")


def structured(attempt: Attempt) -> Outcome:
    """1 if the answer is one document of `reference["format"]` that fulfils everything else in the reference.

    `schema`: JSON Schema of the document as `documents.read` maps it (draft 2020-12 unless `$schema` says otherwise;
    `format` in a schema is not checked). XML and CSV know only text, so that there a text is read as the `integer`,
    `number`, `boolean` or `null` that `type` asks for, and one element as an `array` of one; only `type`, `properties`
    and `items` are followed for this. `value`: the whole content, types included, key order free. `columns`: the header
    of a CSV, in order. `fence`: one of FENCE_RULES, `optional` if not given.

    Raises ParseError for what is malformed; InvalidReferenceError for a schema that is invalid or points elsewhere.
    """
    reference = _checked(attempt.reference)
    form, schema = reference["format"], reference.get("schema", True)
    validator = _validator(json.dumps(schema))
    text = unfenced(answer(attempt.response), reference.get("fence", "optional"), documents.LANGUAGES[form])
    document = documents.read(text, form)
    if "columns" in reference and (header := documents.csv_header(text)) != reference["columns"]:
        return Outcome(0.0, f"columns {header}, expected {reference['columns']}"[:300])
    if form in _TYPED_BY_SCHEMA:
        document = _typed(document, schema)
    if broken := _breaks(document, validator):
        return Outcome(0.0, broken)
    if "value" in reference and not equal(document, reference["value"]):
        return Outcome(0.0, "differs from the expected value")
    return Outcome(1.0)


def equal(a: Any, b: Any) -> bool:
    """Equality of JSON values and types: `True`, `1` and `1.0` are three different things. As deep as both are."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _checked(reference: Any) -> dict[str, Any]:
    """The reference. Raises InvalidReferenceError unless every key is known and usable, whatever the response."""
    if not isinstance(reference, dict) or not isinstance(reference.get("format"), str):
        raise InvalidReferenceError("reference has no 'format'")
    if unknown := reference.keys() - _KEYS:
        raise InvalidReferenceError(f"unknown key {min(map(str, unknown))!r}; there are {', '.join(sorted(_KEYS))}")
    if reference["format"] not in documents.LANGUAGES:
        raise InvalidReferenceError(f"format {reference['format']!r} is none of {', '.join(documents.LANGUAGES)}")
    if "fence" in reference and reference["fence"] not in FENCE_RULES:
        raise InvalidReferenceError(f"fence {reference['fence']!r} is none of {', '.join(FENCE_RULES)}")
    if "columns" in reference:
        columns = reference["columns"]
        if reference["format"] != "csv" or not isinstance(columns, list) or not columns:
            raise InvalidReferenceError("'columns' is for csv, and a list of names")
        if not all(isinstance(name, str) for name in columns):
            raise InvalidReferenceError("'columns' holds something that is not text")
    return reference


@functools.lru_cache(maxsize=128)
def _validator(text: str) -> Any:
    """The validator of a schema, given as JSON text. Raises InvalidReferenceError."""
    schema: Any = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise InvalidReferenceError("'schema' is not a JSON Schema")
    draft = draft_of(schema)
    if draft is None:
        raise InvalidReferenceError("schema: $schema names no known draft")
    try:
        check_schema(schema, draft, patterns=True)
    except InvalidReferenceError as error:
        raise InvalidReferenceError(f"schema: {error}"[:300]) from None
    forget_drafts(schema)
    # The default registry would fetch what it does not know; an empty one knows only what is in the schema.
    return exact(draft)(schema, registry=Registry())


def _breaks(document: Any, validator: Any) -> str:
    """Where and how the document breaks the schema, empty if it does not."""
    try:
        found = jsonschema.exceptions.best_match(validator.iter_errors(document))
    except Unresolvable as error:  # e.g. behind an `$id` within the schema
        raise InvalidReferenceError(f"schema: {error}"[:300]) from None
    return "" if found is None else f"{found.json_path}: {found.message}"[:300]


def _typed(value: Any, schema: Any) -> Any:
    """`value`, all text, with the types that `schema` asks for at each place. What cannot be read so stays text."""
    if not isinstance(schema, dict):
        return value
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if isinstance(value, list):
        return [_typed(item, schema.get("items")) for item in value]
    if "array" in types and not (isinstance(value, str) and "string" in types) and "object" not in types:
        return [_typed(value, schema.get("items"))]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return {key: _typed(item, properties.get(key)) for key, item in value.items()}
    for kind in types:
        if kind == "string":
            return value
        if kind == "integer" and _INTEGER.fullmatch(value):
            return int(value)
        if kind == "number" and _NUMBER.fullmatch(value):
            return int(value) if _INTEGER.fullmatch(value) else float(value)
        if kind == "boolean" and value in ("true", "false"):
            return value == "true"
        if kind == "null" and value == "":
            return None
    return value
