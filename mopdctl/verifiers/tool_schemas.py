"""The JSON Schemas of the tools that a prompt offers: reading them, checking arguments, spelling out defaults."""

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jsonschema.exceptions
import jsonschema.validators
import referencing

from mopdctl.verifiers.base import InvalidReferenceError
from mopdctl.verifiers.schemas import check_schema, draft_of, exact, forget_drafts, subschemas

_NOTHING = object()
_KNOWN_FITS: ContextVar[dict[tuple[int, int], bool] | None] = ContextVar("known fits", default=None)


@dataclass(frozen=True, slots=True)
class Schema:
    """A checked schema of a tool's parameters."""

    schema: dict[str, Any]
    validator: Any

    def violation(self, value: Any) -> str:
        """The first thing in which a value breaks the schema, with its place, or an empty text."""
        try:
            with fits_kept_in_mind():
                error = next(self.validator.iter_errors(value), None)
        except OverflowError:
            return "a number is too large for its schema"
        if error is None:
            return ""
        place = ".".join(str(part) for part in error.absolute_path)
        return f"{place}: {error.message[:200]}" if place else str(error.message[:200])

    def takes(self, node: Any, value: Any) -> bool:
        """Whether a value fits one part of the schema."""
        return not isinstance(node, dict) or not Schema(node, self.validator.evolve(schema=node)).violation(value)


@contextlib.contextmanager
def fits_kept_in_mind() -> Iterator[None]:
    """Within it, whether a value fits a branch of a choice is found out once; both have to stay alive.

    Without it, a choice of branches that each hold that choice again costs two to the power of the value's depth.
    """
    token = None if _KNOWN_FITS.get() is not None else _KNOWN_FITS.set({})
    try:
        yield
    finally:
        if token is not None:
            _KNOWN_FITS.reset(token)


def tool_schemas(tools: Sequence[dict[str, Any]] | None) -> dict[str, Schema] | None:
    """Tool name to the schema of its parameters, from OpenAI function schemas (Chat Completions or Responses style).

    None if the prompt offers no tools: then nothing is known about them. A tool without `parameters` takes none.
    Raises InvalidReferenceError for a tool without a name or with a schema that is none: the document is at fault.
    """
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise InvalidReferenceError("the prompt's tools are no list")
    found = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise InvalidReferenceError("a tool of the prompt has no name")
        schema = function.get("parameters")
        try:
            found[name] = schema_of({"type": "object", "additionalProperties": False} if schema is None else schema)
        except InvalidReferenceError as error:
            raise InvalidReferenceError(f"tool {name!r}: {error}") from None
    return found


def schema_of(schema: Any) -> Schema:
    """A JSON Schema (2020-12 unless it names another draft), checked. Raises InvalidReferenceError if it is unusable.

    See `schemas.check_schema`; defaults that hold one another without end are unusable too. Not checked in arguments:
    `pattern`, `patternProperties` and `format`, since a regular expression out of a document can run for ever;
    `unevaluatedProperties` and `unevaluatedItems`.
    """
    if not isinstance(schema, dict):
        raise InvalidReferenceError("the parameters are no JSON Schema object")
    return _checked(json.dumps(schema))


@functools.lru_cache(maxsize=512)
def _checked(text: str) -> Schema:
    schema = json.loads(text)
    draft = draft_of(schema) or jsonschema.validators.Draft202012Validator
    try:
        check_schema(schema, draft, patterns=False)
    except InvalidReferenceError as error:
        raise InvalidReferenceError(f"no usable JSON Schema: {error}") from None
    forget_drafts(schema)
    # An empty registry: without one, jsonschema would fetch what a reference names.
    found = Schema(schema, _bounded(draft)(schema, registry=referencing.Registry()))
    try:
        for part in subschemas(schema):
            canonical({}, found, part)
    except RecursionError:
        raise InvalidReferenceError("no usable JSON Schema: its defaults hold one another without end") from None
    return found


@functools.cache
def _bounded(draft: Any) -> Any:
    """The validator of a draft, without what can run for ever."""

    def passes(_validator: Any, _keyword: Any, _instance: Any, _schema: Any) -> Iterator[Any]:
        return iter(())

    def additional(validator: Any, keyword: Any, instance: Any, schema: Any) -> Any:
        check = passes if "patternProperties" in schema else draft.VALIDATORS["additionalProperties"]
        return check(validator, keyword, instance, schema)

    def unique(_validator: Any, keyword: Any, instance: Any, _schema: Any) -> Iterator[Any]:
        if keyword is True and isinstance(instance, list):
            texts = {json.dumps(_spelled(item), sort_keys=True) for item in instance}
            if len(texts) != len(instance):
                yield jsonschema.exceptions.ValidationError("has an item twice")

    def fits(validator: Any, branch: Any, instance: Any) -> bool:
        known, key = _KNOWN_FITS.get(), (id(instance), id(branch))
        if known is None:
            return bool(validator.evolve(schema=branch).is_valid(instance))
        if key not in known:
            known[key] = bool(validator.evolve(schema=branch).is_valid(instance))
        return known[key]

    def any_of(validator: Any, choices: Any, instance: Any, _schema: Any) -> Iterator[Any]:
        if not any(fits(validator, branch, instance) for branch in choices):
            yield jsonschema.exceptions.ValidationError("fits none of the choices")

    def one_of(validator: Any, choices: Any, instance: Any, _schema: Any) -> Iterator[Any]:
        count = sum(fits(validator, branch, instance) for branch in choices)
        if count != 1:
            yield jsonschema.exceptions.ValidationError(f"fits {count or 'none'} of the choices, not one")

    skipped = ("pattern", "patternProperties", "unevaluatedProperties", "unevaluatedItems")
    return jsonschema.validators.extend(
        exact(draft),
        {
            **dict.fromkeys(skipped, passes),
            "additionalProperties": additional,
            "uniqueItems": unique,
            "anyOf": any_of,
            "oneOf": one_of,
        },
    )


def _spelled(value: Any) -> Any:
    """The value with every number in one spelling: `1.0` as `1`."""
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def resolved(root: Schema, node: Any) -> list[dict[str, Any]]:
    """The schemas that hold together at `node`: itself, what it refers to, and the parts of `allOf`."""
    return branches(root, node, _NOTHING)


def branches(root: Schema, node: Any, value: Any) -> list[dict[str, Any]]:
    """The schemas that speak about `value` at `node`: as `resolved`, and of each choice the branch that it fits.

    Where it fits none, the first branch of its JSON type: it may fit once its optional nulls are dropped.
    """
    found: list[dict[str, Any]] = []
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if not isinstance(here, dict) or any(here is each for each in found):
            continue
        found.append(here)
        if "$ref" in here:
            waiting.append(_target(root.schema, here["$ref"]))
        waiting.extend(here.get("allOf", ()))
        if value is not _NOTHING:
            waiting.extend(_choice(root, here.get(choice, ()), value) for choice in ("anyOf", "oneOf"))
    return found


def _choice(root: Schema, options: Sequence[Any], value: Any) -> Any:
    fitting = next((option for option in options if root.takes(option, value)), None)
    if fitting is not None:
        return fitting
    kind = "object" if isinstance(value, dict) else "array"
    return next((option for option in options if _kind(root, option) == kind), None)


def _kind(root: Schema, node: Any) -> Any:
    return next((each["type"] for each in resolved(root, node) if "type" in each), None)


def _target(schema: Any, reference: Any) -> Any:
    """What a reference within the schema points at; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    here = schema
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and key in here:
            here = here[key]
        elif isinstance(here, list) and key.isdecimal() and int(key) < len(here):
            here = here[int(key)]
        else:
            return None
    return here


def canonical(value: Any, root: Schema | None, node: Any) -> Any:
    """The value with defaults spelled out and the nulls of optional parameters dropped.

    What counts as left out: see `arguments.same_arguments`. `node` is the part of the schema `root` that speaks about
    the value.
    """
    if root is None:
        return value
    with fits_kept_in_mind():
        return _canonical(value, root, node)


def _canonical(value: Any, root: Schema, node: Any) -> Any:
    if not isinstance(value, dict | list):
        return value
    nodes = branches(root, node, value)
    if isinstance(value, list):
        return [_canonical(item, root, item_node(nodes, i)) for i, item in enumerate(value)]
    properties = properties_of(nodes)
    required = {name for each in nodes for name in each.get("required", ())}
    found: dict[str, Any] = {}
    for name, item in value.items():
        if item is None and name in properties and name not in required and not _null_counts(root, properties[name]):
            continue
        found[name] = _canonical(item, root, member_node(nodes, properties, name))
    for name, inner in properties.items():
        default = _default(root, inner)
        if name not in found and name not in required and default is not None:
            found[name] = _canonical(default, root, inner)
    return found


def properties_of(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The properties that schemas which hold together name, each with the first schema that it has."""
    found: dict[str, Any] = {}
    for each in nodes:
        for name, inner in each.get("properties", {}).items():
            found.setdefault(name, inner)
    return found


def member_node(nodes: Sequence[dict[str, Any]], properties: dict[str, Any], name: str) -> Any:
    """The schema of a member, None if there is none."""
    if name in properties:
        return properties[name]
    return next((each["additionalProperties"] for each in nodes if "additionalProperties" in each), None)


def item_node(nodes: Sequence[dict[str, Any]], i: int) -> Any:
    """The schema of item number i of a list, None if there is none."""
    for each in nodes:
        items = each.get("items")
        by_position = items if isinstance(items, list) else each.get("prefixItems", [])  # a list in drafts before 2020
        if i < len(by_position):
            return by_position[i]
        if isinstance(items, dict):
            return items
    return None


def _default(root: Schema, node: Any) -> Any:
    return next((each["default"] for each in resolved(root, node) if each.get("default") is not None), None)


def _null_counts(root: Schema, node: Any) -> bool:
    """Whether null says something that leaving the parameter out does not."""
    return _default(root, node) is not None and root.takes(node, None)
