"""Strict readers of JSON, YAML, XML, TOML and CSV into JSON values. Whatever is malformed or a trap is a ParseError."""

import csv
import datetime
import io
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

from ruamel.yaml import YAML
from ruamel.yaml import events as kinds
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from mopdctl.verifiers.base import MOST_DEPTH, ParseError, deeper_than
from mopdctl.verifiers.fences import unfenced

MOST_CHARACTERS = 100_000

LANGUAGES = {"json": ("json",), "yaml": ("yaml", "yml"), "xml": ("xml",), "toml": ("toml",), "csv": ("csv",)}
"""Format to what a fence around it may be tagged with."""


def read(text: str, form: str) -> Any:
    """One document of a format in LANGUAGES as JSON values, at most MOST_CHARACTERS long and MOST_DEPTH deep.

    YAML is 1.2 without anchors, aliases, tags, directives and merge keys. Dates and times in YAML are text as written,
    those in TOML in ISO form. XML is `{root: content}`: an element without attributes and children is its text,
    trimmed; any other an object of `@attribute`s, children by name (a list where a name repeats) and, where there is
    text too, `#text`; DOCTYPE is refused, so that there are no entities of its own. CSV is a list of objects by the
    names in the header; all is text.
    """
    if len(text) > MOST_CHARACTERS:
        raise ParseError(f"{len(text):,} characters, more than {MOST_CHARACTERS:,}")
    if not text.strip():
        raise ParseError("empty")
    try:
        return _plain(_READERS[form](text), 0)
    except ParseError:
        raise
    except (ValueError, RecursionError, csv.Error, expat.ExpatError) as error:
        raise ParseError(f"not {form.upper()}: {_short(error)}") from None


def parse_json(text: str) -> Any:
    """One strict JSON document, a Markdown fence around it allowed. Raises ParseError for anything else.

    Duplicate keys, NaN, numbers beyond a double and more than MOST_DEPTH levels are refused.
    """
    try:
        found = _json(unfenced(text, "optional", LANGUAGES["json"]))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, ParseError) else ParseError(f"not JSON: {error}") from None
    if deeper_than(found, MOST_DEPTH):
        raise ParseError(f"deeper than {MOST_DEPTH}")
    return found


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_refuse, parse_float=_finite)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("duplicate key")
    return dict(pairs)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("a number beyond a double")
    return number


class _DatesAreText(SafeConstructor):
    pass


_DatesAreText.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _yaml(text: str) -> Any:
    try:
        _check_yaml_events(YAML(typ="safe", pure=True).parse(text))
        yaml = YAML(typ="safe", pure=True)
        yaml.Constructor = _DatesAreText
        return yaml.load(text)
    except YAMLError as error:
        raise ParseError(f"not YAML: {_short(error)}") from None


def _check_yaml_events(events: Any) -> None:
    """Refuses what makes a small text large or gives it a type of its own, before anything is built."""
    depth = 0
    for event in events:
        if isinstance(event, kinds.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ParseError("YAML anchors and aliases are refused")
        if getattr(event, "tag", None) is not None:
            raise ParseError(f"YAML tags are refused ({_short(event.tag)})")
        if isinstance(event, kinds.DocumentStartEvent) and (event.version or event.tags):
            raise ParseError("YAML directives are refused")
        if isinstance(event, kinds.ScalarEvent) and event.value == "<<" and not event.style:
            raise ParseError("YAML merge keys are refused")
        depth += isinstance(event, kinds.CollectionStartEvent) - isinstance(event, kinds.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise ParseError(f"deeper than {MOST_DEPTH}")


@dataclass(slots=True)
class _Element:
    """An XML element that is still open."""

    content: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)
    """The names of children that are a list already: a value is never one itself."""


def _xml(text: str) -> Any:
    # The standard library's tree builder expands entities; expat itself tells of a DOCTYPE before it reads one.
    parser = expat.ParserCreate(encoding="utf-8")
    parser.buffer_text = True
    stack = [_Element({})]

    def start(name: str, attributes: dict[str, str]) -> None:
        if len(stack) > MOST_DEPTH:
            raise ParseError(f"deeper than {MOST_DEPTH}")
        stack.append(_Element({f"@{key}": value for key, value in attributes.items()}))

    def end(name: str) -> None:
        element, parent = stack.pop(), stack[-1]
        said = "".join(element.texts).strip()
        if element.content and said:
            element.content["#text"] = said
        value: Any = element.content or said
        if name not in parent.content:
            parent.content[name] = value
        elif name in parent.repeated:
            parent.content[name].append(value)
        else:
            parent.content[name] = [parent.content[name], value]
            parent.repeated.add(name)

    def doctype(*_: Any) -> None:
        raise ParseError("XML with a DOCTYPE is refused")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = lambda data: stack[-1].texts.append(data)
    parser.StartDoctypeDeclHandler = doctype
    parser.Parse(text.strip().encode("utf-8"), True)
    return stack[0].content


def csv_header(text: str) -> list[str]:
    """The first row of a CSV that `read` has read."""
    return _csv_rows(text)[0]


def _csv_rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text.strip("\r\n"), newline=""), strict=True))


def _csv(text: str) -> list[dict[str, str]]:
    header, *rows = _csv_rows(text)
    if not all(name.strip() for name in header) or len(set(header)) != len(header):
        raise ParseError("the header of the CSV has an empty or repeated name")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ParseError(f"row {number} of the CSV has {len(row)} fields, the header {len(header)}")
    return [dict(zip(header, row, strict=True)) for row in rows]


_READERS: dict[str, Callable[[str], Any]] = {
    "json": _json,
    "yaml": _yaml,
    "xml": _xml,
    "toml": tomllib.loads,
    "csv": _csv,
}


def _plain(value: Any, depth: int) -> Any:
    """`value` in JSON types. Raises ParseError for what has none, or lies too deep."""
    if depth > MOST_DEPTH:
        raise ParseError(f"deeper than {MOST_DEPTH}")
    if isinstance(value, dict):
        if unnamed := [key for key in value if not isinstance(key, str)]:
            raise ParseError(f"the key {_short(unnamed[0])} is not text; it needs quotes")
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        raise ParseError(f"{value} is not a number of JSON")
    return value


def _short(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + "..."
