"""What the chat model without weights writes: instances of JSON schemas, in five formats, and sentences."""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

Draw = Callable[[], float]
"""The next of an answer's random numbers, in [0, 1)."""

_MAX_ITEMS = 100
"""Most items of an array and characters of a string, whatever a schema asks for."""

_FENCED = re.compile(r"```json\s*\n(.*?)\n\s*```", re.DOTALL)
_FORMAT = re.compile(r"\b(YAML|XML|TOML|CSV)\b", re.IGNORECASE)


def structured(asked: str, draw: Draw) -> str | None:
    """An instance of the schema in a ```json block, in the format named outside it; None where there are not both."""
    block = _FENCED.search(asked) if "```json" in asked else None
    if block is None:
        return None
    outside = asked.replace(block[0], "")
    named = _FORMAT.search(outside)  # before JSON: "as YAML, by this JSON schema" asks for YAML
    if named is None and "json" not in outside.lower():
        return None
    try:
        schema = json.loads(block[1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return None
    return _WRITERS[named[1].upper() if named else "JSON"](instance(schema, draw))


def instance(schema: Mapping[str, Any], draw: Draw) -> Any:
    """A value of a JSON schema's type, within its enum and bounds; a keyword that is not named here has no effect."""
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return pick(draw, schema["enum"])
    kinds = schema.get("type")
    match next((kind for kind in kinds if kind != "null"), "null") if isinstance(kinds, list) else kinds:
        case "object":
            properties = schema.get("properties")
            return {
                key: instance(part if isinstance(part, Mapping) else {}, draw)
                for key, part in (properties.items() if isinstance(properties, Mapping) else ())
            }
        case "array":
            least = _bound(schema, "minItems", 1)
            size = int(min(_MAX_ITEMS, least + draw() * (1 + _bound(schema, "maxItems", least + 2) - least)))
            items = schema.get("items")
            return [instance(items if isinstance(items, Mapping) else {}, draw) for _ in range(size)]
        case "boolean":
            return draw() < 0.5
        case "null":
            return None
        case "integer":
            low = math.ceil(_bound(schema, "minimum", _bound(schema, "exclusiveMinimum", 0) + 1))
            high = math.floor(_bound(schema, "maximum", _bound(schema, "exclusiveMaximum", low + 100) - 1))
            return min(low, high) + int(draw() * max(1, high - low + 1))
        case "number":
            least = _bound(schema, "minimum", _bound(schema, "exclusiveMinimum", 0))
            most = _bound(schema, "maximum", _bound(schema, "exclusiveMaximum", least + 100))
            return min(most, max(least, round(least + (most - least) * (0.1 + 0.8 * draw()), 3)))
    return _string(schema, draw)


def _bound(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else default


def _string(schema: Mapping[str, Any], draw: Draw) -> str:
    day = f"20{10 + int(20 * draw())}-0{1 + int(9 * draw())}-{10 + int(19 * draw())}"
    name = f"{pick(draw, _ADJECTIVES)} {pick(draw, NOUNS)}"
    formats = {
        "date": day,
        "date-time": f"{day}T08:30:00Z",
        "email": f"{name.replace(' ', '.')}@example.org",
        "uri": f"https://example.org/{name.replace(' ', '/')}",
    }
    text = formats.get(str(schema.get("format")), name)
    least = min(_MAX_ITEMS, int(_bound(schema, "minLength", 0)))
    return text.ljust(least, "x")[: max(0, int(_bound(schema, "maxLength", 1e6)))]


# ------------------------------------------------------------------------------------------------------------- formats

# Not one of the words that YAML reads as something else. ASCII, or [a-z] would match the dotted capital I of Turkish.
_BARE = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)\Z)[a-z_][a-z0-9_-]*", re.IGNORECASE | re.ASCII)


def _scalar(value: Any) -> str:
    """JSON, which YAML reads too, and TOML where it is neither null nor an object."""
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _scalar(key)


def _yaml(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield f"{indent}{_key(key)}:"
            yield from _yaml(item, indent + "  ")
        elif isinstance(item, list) and item:
            yield f"{indent}{_key(key)}:"
            yield from (f"{indent}  - {_scalar(one)}" for one in item)
        else:
            yield f"{indent}{_key(key)}: {_scalar(item)}"


def _toml(value: Mapping[str, Any]) -> Iterator[str]:
    pairs = [(key, item) for key, item in value.items() if item is not None]  # TOML has no null
    yield from (f"{_key(key)} = {_toml_value(item)}" for key, item in pairs if not isinstance(item, dict))
    for key, item in pairs:
        if isinstance(item, dict):
            yield f"\n[{_key(key)}]"
            yield from (f"{_key(k)} = {_toml_value(v)}" for k, v in item.items() if v is not None)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    return f"[{', '.join(map(_toml_value, value))}]" if isinstance(value, list) else _scalar(value)


def _xml(value: Any, name: str, indent: str = "") -> Iterator[str]:
    tag = re.sub(r"\A(?![A-Za-z_])", "_", re.sub(r"[^A-Za-z0-9_.-]", "_", name))
    if isinstance(value, dict | list):
        yield f"{indent}<{tag}>"
        for key, item in value.items() if isinstance(value, dict) else (("item", item) for item in value):
            yield from _xml(item, key, indent + "  ")
        yield f"{indent}</{tag}>"
    else:
        yield f"{indent}<{tag}>{escape(_plain(value))}</{tag}>"


def _plain(value: Any) -> str:
    """A value where there are no types: text as it is, lists joined, null empty."""
    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    return value if isinstance(value, str) else "" if value is None else _scalar(value)


def _csv(value: Mapping[str, Any]) -> str:
    """A header and one row; the fields of an object get columns of their own, `address.city`."""
    row: dict[str, Any] = {}
    for key, item in value.items():
        row |= {f"{key}.{k}": v for k, v in item.items()} if isinstance(item, dict) else {key: item}
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([list(row), [_plain(item) for item in row.values()]])
    return text.getvalue().rstrip("\n")


_WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "JSON": lambda value: json.dumps(value, ensure_ascii=False, indent=2),
    "YAML": lambda value: "\n".join(_yaml(value)) or "{}",
    "TOML": lambda value: "\n".join(_toml(value)).lstrip("\n"),
    "XML": lambda value: "\n".join(_xml(value, "document")),
    "CSV": _csv,
}

# --------------------------------------------------------------------------------------------------------------- words


def pick(draw: Draw, things: Sequence[Any]) -> Any:
    """One of some things."""
    return things[int(draw() * len(things))]


def _length(mean: float, draw: Draw) -> float:
    return mean * (0.5 + draw())


def prose(asked: str, mean_words: float, draw: Draw) -> str:
    """English sentences of `mean_words` words on the average, the first about a word of what was asked."""
    words = _length(mean_words, draw)
    named = _NAMED.findall(asked[:400])
    sentences = [f'As for "{pick(draw, named)}", {_clause(draw)}.' if named else sentence(draw)]
    so_far = len(sentences[0].split())
    while so_far < words - 5:  # half a sentence, so that the mean is met
        sentences.append(sentence(draw))
        so_far += sentences[-1].count(" ") + 1
    return " ".join(sentences)


def sentence(draw: Draw) -> str:
    """An English sentence."""
    form = draw()
    if form < 0.5:
        return f"The {pick(draw, _ADJECTIVES)}{_clause(draw)[3:]} {pick(draw, _ENDS)}."
    if form < 0.75:
        return f"{pick(draw, _ENDS).capitalize()}, {_clause(draw)}."
    return f"{_clause(draw).capitalize()}, and {_clause(draw)}."


def _clause(draw: Draw) -> str:
    return f"the {pick(draw, NOUNS)} {pick(draw, _VERBS)} {pick(draw, _OBJECTS)}"


def german(mean_words: float, draw: Draw) -> str:
    """German sentences of `mean_words` words on the average."""
    sentences = max(2, round(_length(mean_words, draw) / 9))
    return " ".join(" ".join(pick(draw, part) for part in _GERMAN) + "." for _ in range(sentences))


_NAMED = re.compile(r"\b[A-Za-z]{6,}\b")
_ADJECTIVES, NOUNS, _VERBS, _ENDS = (
    line.strip().split("|")
    for line in """
small|quiet|bright|narrow|wooden|early|simple|heavy|common|gentle|steady|curious|distant|patient|clear|careful|golden|\
broken|hidden|modern|northern|open|rapid|silver|sturdy|tall|warm|young|fresh|plain
garden|river|teacher|bridge|letter|engine|market|window|kitchen|village|harbour|doctor|planet|picture|forest|method|\
question|record|winter|station|reader|island|painter|number|valley|journey|teapot|lantern|signal|captain|basket|theory|\
sailor|museum|ladder|orchard|compass|student|meadow|carpenter|blanket|archive|pattern|machine|neighbour|recipe|clock|\
mountain|farmer|library
follows|carries|explains|repairs|describes|measures|crosses|supports|compares|finds|keeps|paints|brings|reaches|opens|\
answers|holds|improves|changes|protects|counts|remembers|visits|shows|joins
before noon|in the spring|after a short walk|with great care|near the old wall|for many years|at the end of the day|\
without any noise|on most days|from one side to the other|every second week|in a few steps|under the same roof|\
by the light of a lamp|during a long evening|with the help of a friend|as the notes say|a little later
""".strip().splitlines()
)
_OBJECTS = [f"the {adjective} {noun}" for adjective in _ADJECTIVES for noun in NOUNS]
_GERMAN = (
    ("Der alte Lehrer", "Die junge Gärtnerin", "Das kleine Dorf", "Ein ruhiger Nachbar", "Die neue Brücke"),
    ("zeigt", "beschreibt", "verbindet", "erklärt", "findet", "verändert"),
    ("den langen Weg", "die einfache Frage", "das große Fenster", "den schönen Garten", "die schwere Aufgabe"),
    ("am frühen Morgen", "nach einer kurzen Pause", "ohne jede Eile", "im nächsten Frühling", "mit großer Geduld"),
)
REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "I'm sorry, but I am unable to help with that request.",
)
