"""Comparing the tool calls of a response with those that were wanted, under the options of a reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mopdctl.verifiers.arguments import EXACT, TextOptions, maximum_matching, same_arguments, unusable
from mopdctl.verifiers.base import InvalidReferenceError, Outcome
from mopdctl.verifiers.targets import same_target
from mopdctl.verifiers.tool_schemas import Schema, canonical

Call = dict[str, Any]
"""`{"name": text, "arguments": object}`"""

Schemas = Mapping[str, Schema] | None
"""By tool name; None where the prompt offers no tools, so that nothing is known about them."""


@dataclass(frozen=True, slots=True)
class Match:
    """The options under `match` of a reference."""

    arguments: str = "exact"
    """`exact` | `words` (strings by their words) | `name_only` | `target` (coding tools: see `targets.same_target`)."""
    text: TextOptions = EXACT
    content: str | None = None
    """Of a message that is expected: None (any message will do), `exact` or `words`."""
    reward: str = "binary"
    """`binary` (1 if every call is matched and none is left over, else 0), `fraction` (matched calls over the larger
    number of calls, so that surplus calls cost) or `f1` (2 matched / (expected + got))."""


def read_match(raw: Any, *, content: bool) -> Match:
    """The options of a reference; `content`: whether it may expect a message. InvalidReferenceError for any other."""
    if raw is None:
        return Match()
    if not isinstance(raw, dict):
        raise InvalidReferenceError("'match' is no object")
    text_keys = {field.name for field in fields(TextOptions)} - {"text"}
    known = text_keys | {"arguments", "reward"} | ({"content"} if content else set())
    if unknown := sorted(str(key) for key in raw.keys() - known):
        raise InvalidReferenceError(
            f"'match' has an unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}"
        )
    arguments = _one_of(raw, "arguments", ("exact", "words", "name_only", "target"), "exact")
    try:
        text = TextOptions(
            text="words" if arguments == "words" else "exact", **{key: raw[key] for key in text_keys if key in raw}
        )
    except ValueError as error:
        raise InvalidReferenceError(f"'match': {error}") from None
    return Match(
        arguments=arguments or "exact",
        text=text,
        content=_one_of(raw, "content", (None, "exact", "words"), None),
        reward=_one_of(raw, "reward", ("binary", "fraction", "f1"), "binary") or "binary",
    )


def _one_of(raw: dict[str, Any], key: str, allowed: Sequence[str | None], default: str | None) -> str | None:
    value = raw.get(key, default)
    if value not in allowed:
        names = ", ".join("null" if name is None else name for name in allowed)
        raise InvalidReferenceError(f"'match' has {key} {value!r}; it has to be one of {names}")
    return default if value is None else str(value)


def check_expected(calls: Sequence[Call], schemas: Schemas, match: Match) -> None:
    """Raises InvalidReferenceError for a wanted call that the prompt's own tools do not allow: nobody could make it."""
    for call in calls:
        if match.arguments == "target":
            same_target(call, call)
        problem = unusable(call["arguments"]) or _refusal(call, schemas)
        if problem:
            raise InvalidReferenceError(f"the expected call of {call['name']!r}: {problem}")


def _refusal(call: Call, schemas: Schemas) -> str:
    """Why the tools do not allow a call, or an empty text. Nulls of optional parameters count as left out."""
    if schemas is None:
        return ""
    schema = schemas.get(call["name"])
    if schema is None:
        return f"unknown tool {call['name']!r}"
    return schema.violation(canonical(call["arguments"], schema, schema.schema))


def compare_calls(
    got: Sequence[Call], want: Sequence[Call], schemas: Schemas, match: Match, *, ordered: bool
) -> Outcome:
    """How far a response makes the calls of `want` (checked by `check_expected`), each call of the response used once.

    `ordered`: whether the n-th call has to be the n-th wanted one; otherwise the two are compared as multisets, by the
    largest pairing of calls that match. A call of an unknown tool, or with arguments that break the tool's schema,
    matches nothing. The detail names the first wanted call that is not made, or the first call too many.
    """
    if match.reward == "binary" and len(got) != len(want):
        return Outcome(0.0, f"{len(got)} calls instead of {len(want)}")
    refusals = [_refusal(call, schemas) for call in got]
    problems = [
        [
            _problem(got[j], refusals[j], expected, schemas, match) if not ordered or i == j else None
            for j in range(len(got))
        ]
        for i, expected in enumerate(want)
    ]
    pairs = maximum_matching([[j for j, problem in enumerate(row) if problem == ""] for row in problems])
    matched = len(pairs)
    complete = matched == len(got) == len(want)
    if match.reward == "fraction":
        reward = matched / max(len(got), len(want))
    elif match.reward == "f1":
        reward = 2 * matched / (len(got) + len(want))
    else:
        reward = float(complete)
    if complete:
        return Outcome(reward)
    if matched == len(want) or len(got) < len(want):
        return Outcome(reward, f"{len(got)} calls instead of {len(want)}")
    missed = next(i for i in range(len(want)) if i not in pairs)
    return Outcome(reward, _nearest(problems[missed], [call["name"] for call in got], want[missed]["name"]))


def _nearest(problems: Sequence[str | None], names: Sequence[str], name: str) -> str:
    """Why no call is the wanted one: of the calls that come into question, one of the same tool before others."""
    reasons = [(names[j] != name, j, problem) for j, problem in enumerate(problems) if problem]
    return min(reasons)[2] if reasons else f"{name!r} is called too seldom"


def _problem(got: Call, refusal: str, expected: Call, schemas: Schemas, match: Match) -> str:
    """Why one call is not the other, or an empty text."""
    name = expected["name"]
    if match.arguments == "target":
        return refusal or same_target(got, expected)[1]
    if got["name"] != name:
        return f"calls {got['name']!r} instead of {name!r}" + f" ({refusal})" * bool(refusal)
    if refusal:
        return f"arguments of {name!r}: {refusal}"
    if match.arguments == "name_only":
        return ""
    schema = schemas[name].schema if schemas is not None else None
    _, why = same_arguments(got["arguments"], expected["arguments"], schema, match.text)
    return f"arguments of {name!r} differ: {why}" if why else ""
