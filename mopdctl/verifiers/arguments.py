"""Comparing the arguments of two tool calls: by what they mean to the tool, not by how they are spelt."""

import json
import math
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from mopdctl.verifiers.base import levels
from mopdctl.verifiers.tool_schemas import (
    Schema,
    branches,
    canonical,
    fits_kept_in_mind,
    item_node,
    member_node,
    properties_of,
    schema_of,
)

MAX_DEPTH = 64
"""Levels of nesting that a value may have; deeper ones are refused, so that no comparison runs out of stack."""

_NEGATIONS = frozenset({"no", "not", "never", "none", "neither", "nor", "nothing", "without", "cannot"})


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How two strings are compared. ValueError for an unknown name or a threshold outside (0, 1]."""

    text: str = "exact"
    """`exact`, or `words`: enough of the words are the same, whatever their order."""
    similarity: str = "dice"
    """Of the counted words: `dice`, 2 |a and b| / (|a| + |b|), or `jaccard`, |a and b| / |a or b|; 1 for equal ones."""
    threshold: float = 0.8
    """The similarity in (0, 1] from which on two texts of words are the same."""
    casefold: bool = False
    strip: bool = False
    whitespace: bool = False
    """Whether any run of white space counts as one space."""

    def __post_init__(self) -> None:
        if self.text not in ("exact", "words"):
            raise ValueError(f"text is {self.text!r}; it has to be exact or words")
        if self.similarity not in ("dice", "jaccard"):
            raise ValueError(f"similarity is {self.similarity!r}; it has to be dice or jaccard")
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not (number and 0 < self.threshold <= 1):
            raise ValueError(f"threshold is {self.threshold!r}; it has to lie in (0, 1]")
        for name in ("casefold", "strip", "whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it has to be true or false")


EXACT = TextOptions()


def same_arguments(
    got: dict[str, Any], expected: dict[str, Any], schema: dict[str, Any] | None, options: TextOptions = EXACT
) -> tuple[bool, str]:
    """Whether two argument objects ask the tool for the same thing, and if not, the first place where they differ.

    Numbers compare by value (`1`, `1.0`), a boolean equals only a boolean, strings as `options` say. With the tool's
    JSON Schema (None: unknown) two more things hold, at every level. A parameter that is left out, given as null or
    given its default is the same, unless it is required, or the schema takes null and has another default. And a
    list's order is free where its schema says `uniqueItems: true` or `"x-order": "any"`. Whether arguments break
    their schema is not asked here.

    Values may be MAX_DEPTH deep (see `unusable`). Raises InvalidReferenceError for a schema that is none.
    """
    root = schema_of(schema) if schema is not None else None
    node = root.schema if root else None
    got, expected = canonical(got, root, node), canonical(expected, root, node)
    with fits_kept_in_mind():
        difference = _difference(got, expected, root, node, options, "")
    return not difference, difference


def same_value(a: Any, b: Any) -> bool:
    """JSON equality with numbers compared by value; a boolean equals only a boolean."""
    return not _difference(a, b, None, None, EXACT, "")


def same_text(got: str, expected: str, options: TextOptions) -> bool:
    """Whether two strings are the same under `options`.

    In mode `words` one more thing has to hold: both negate equally often ("delete" and "do not delete" share most of
    their words). The list of negating words is English.
    """
    got, expected = _prepared(got, options), _prepared(expected, options)
    if got == expected or options.text == "exact":
        return got == expected
    words, expected_words = Counter(got.split()), Counter(expected.split())
    if _negations(words) != _negations(expected_words):
        return False
    shared = (words & expected_words).total()
    total = words.total() + expected_words.total()
    if not total:
        return True
    similarity = 2 * shared / total if options.similarity == "dice" else shared / (total - shared)
    return similarity >= options.threshold


def _prepared(text: str, options: TextOptions) -> str:
    if options.casefold:
        text = text.casefold()
    if options.strip:
        text = text.strip()
    if options.whitespace:
        # Spaces at the ends are kept as one: whether they count is what `strip` says.
        core = " ".join(text.split())
        text = " " * text[:1].isspace() + core + " " * (text[-1:].isspace() and bool(core))
    return text


def _negations(words: Counter[str]) -> int:
    plain = ((word.casefold().strip(".,;:!?\"'()").replace("\u2019", "'"), count) for word, count in words.items())
    return sum(count for word, count in plain if word in _NEGATIONS or word.endswith("n't"))


def unusable(value: Any) -> str:
    """Why a JSON value cannot be compared (too deep, a number that is not finite), or an empty text."""
    for depth, level in enumerate(levels(value)):
        if depth == MAX_DEPTH:
            return f"nested deeper than {MAX_DEPTH} levels"
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                return f"{item} is no JSON number"
    return ""


def _difference(got: Any, expected: Any, root: Schema | None, node: Any, options: TextOptions, path: str) -> str:
    """Where two canonical values differ first, or an empty text."""
    if isinstance(got, bool) or isinstance(expected, bool):
        same = got is expected
    elif isinstance(got, int | float) and isinstance(expected, int | float):
        same = got == expected
    elif isinstance(got, str) and isinstance(expected, str):
        same = same_text(got, expected, options)
    elif isinstance(got, dict) and isinstance(expected, dict):
        return _object_difference(got, expected, root, node, options, path)
    elif isinstance(got, list) and isinstance(expected, list):
        return _list_difference(got, expected, root, node, options, path)
    else:
        same = got is None and expected is None
    return "" if same else f"{path or 'the value'} is {_short(got)}, not {_short(expected)}"


def _object_difference(
    got: dict[str, Any], expected: dict[str, Any], root: Schema | None, node: Any, options: TextOptions, path: str
) -> str:
    def place(key: str) -> str:
        return f"{path}.{key}" if path else key

    for key in expected:
        if key not in got:
            return f"{place(key)} is missing"
    for key in got:
        if key not in expected:
            return f"{place(key)} is not expected"
    nodes = branches(root, node, expected) if root else []
    properties = properties_of(nodes)
    for key, value in expected.items():
        difference = _difference(got[key], value, root, member_node(nodes, properties, key), options, place(key))
        if difference:
            return difference
    return ""


def _list_difference(
    got: list[Any], expected: list[Any], root: Schema | None, node: Any, options: TextOptions, path: str
) -> str:
    path = path or "the list"
    if len(got) != len(expected):
        return f"{path} has {len(got)} items, not {len(expected)}"
    nodes = branches(root, node, expected) if root else []
    if any(each.get("uniqueItems") is True or each.get("x-order") == "any" for each in nodes):
        return "" if _same_items(got, expected, root, nodes, options) else f"{path} has other items"
    for i, value in enumerate(expected):
        difference = _difference(got[i], value, root, item_node(nodes, i), options, f"{path}[{i}]")
        if difference:
            return difference
    return ""


def _same_items(
    got: list[Any], expected: list[Any], root: Schema | None, nodes: Sequence[dict[str, Any]], options: TextOptions
) -> bool:
    if options.text == "exact" and not any(isinstance(item, dict | list) for item in got + expected):
        return Counter(_key(item, options) for item in got) == Counter(_key(item, options) for item in expected)
    fits = [
        [j for j, item in enumerate(got) if not _difference(item, value, root, item_node(nodes, i), options, "")]
        for i, value in enumerate(expected)
    ]
    return len(maximum_matching(fits)) == len(expected)


def _key(value: Any, options: TextOptions) -> Hashable:
    """Equal for scalars that compare as the same."""
    if isinstance(value, str):
        return "text", _prepared(value, options)
    return type(value) if isinstance(value, bool) or value is None else "number", value


def maximum_matching(fits: Sequence[Sequence[int]]) -> dict[int, int]:
    """The largest pairing of left with right items, each used once; `fits[i]` are the right items that left i fits.

    Breadth-first augmenting paths: pairing what fits first is not enough where similarity is not transitive.
    """
    right_of: dict[int, int] = {}
    left_of: dict[int, int] = {}
    for start in range(len(fits)):
        reached_from: dict[int, int] = {}
        waiting = deque([start])
        free: int | None = None
        while waiting and free is None:
            left = waiting.popleft()
            for right in fits[left]:
                if right in reached_from:
                    continue
                reached_from[right] = left
                if right not in left_of:
                    free = right
                    break
                waiting.append(left_of[right])
        while free is not None:
            left = reached_from[free]
            before = right_of.get(left)
            right_of[left], left_of[free] = free, left
            free = before
    return right_of


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
