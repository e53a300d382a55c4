"""The kinds of constraint: each declared once, with its check, its parameters, their types and ranges."""

import functools
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

from mopdctl.verifiers.base import InvalidReferenceError, ParseError
from mopdctl.verifiers.constraints import prose
from mopdctl.verifiers.documents import parse_json


@dataclass(frozen=True, slots=True)
class Param:
    """What a parameter may be: a type (`str`, `int`, `list` of texts, `dict` for a constraint) or one of some words."""

    allowed: type | tuple[str, ...]
    least: int = 1
    """The smallest whole number; the shortest text; the fewest texts."""
    most: int | None = None
    required: bool = True


@dataclass(frozen=True, slots=True)
class Kind:
    """A check of a text that is not blank, trimmed, called with the parameters that were given."""

    check: Callable[..., bool]
    params: dict[str, Param]


def check_constraint(constraint: Any) -> dict[str, Any]:
    """The constraint without nulls. Raises InvalidReferenceError unless kind and parameters are as KINDS declares."""
    kind = constraint.get("kind") if isinstance(constraint, dict) else constraint
    if not isinstance(constraint, dict) or not isinstance(kind, str) or kind not in KINDS:
        raise InvalidReferenceError(f"unknown constraint {kind!r}"[:200])
    given = {name: value for name, value in constraint.items() if value is not None and name != "kind"}
    params = KINDS[kind].params
    needed = {name for name, param in params.items() if param.required}
    if given.keys() - params.keys() or needed - given.keys():
        optional = [f"{name} (optional)" for name in params if name not in needed]
        raise InvalidReferenceError(f"constraint {kind!r} needs {', '.join([*sorted(needed), *optional]) or 'nothing'}")
    if {"min", "max"} <= params.keys() and not given.keys() & {"min", "max"}:
        raise InvalidReferenceError(f"constraint {kind!r} needs min or max")
    for name, value in given.items():
        if not _fits(value, params[name]):
            raise InvalidReferenceError(f"constraint {kind!r}: {name} cannot be {value!r}"[:200])
        if params[name].allowed is dict:
            given[name] = check_constraint(value)
    if "min" in params and given.get("min", 0) > given.get("max", float("inf")):
        raise InvalidReferenceError(f"constraint {kind!r}: min is more than max")
    if kind == "language" and given["language"] not in _identifier().labels:
        raise InvalidReferenceError(f"constraint {kind!r}: {given['language']!r} is no language that can be identified")
    return {"kind": kind, **given}


def meets(text: str, constraint: dict[str, Any]) -> bool:
    """Whether a text, trimmed, meets a constraint that `check_constraint` returned. An empty one meets none."""
    parameters = {name: value for name, value in constraint.items() if name != "kind"}
    return bool(text) and KINDS[constraint["kind"]].check(text, **parameters)


def _fits(value: Any, param: Param) -> bool:
    if isinstance(param.allowed, tuple):
        return value in param.allowed
    if type(value) is not param.allowed:
        return False
    if isinstance(value, list) and not all(isinstance(text, str) and text.strip() for text in value):
        return False
    if not isinstance(value, int | str | list):
        return True  # a constraint, which is checked by itself
    size = value if isinstance(value, int) else len(value)
    return size >= param.least and (param.most is None or size <= param.most)


def _counted(count: Callable[..., int | Sized], **params: Param) -> Kind:
    """A kind that asks for at least `min` and at most `max` of something."""

    def check(response: str, /, **given: Any) -> bool:
        fewest, most = given.pop("min", 0), given.pop("max", float("inf"))
        found = count(response, **given)
        return bool(fewest <= (found if isinstance(found, int) else len(found)) <= most)

    bounds = {"min": Param(int, required=False), "max": Param(int, least=0, required=False)}
    return Kind(check, params | bounds)


def _items(text: str, *, separator: str, count: int) -> bool:
    """Exactly `count` non-empty items between separators."""
    items = text.split(separator)
    return len(items) == count and all(item.strip() for item in items)


def _only_word(text: str, *, word: str, separator: str) -> bool:
    """Every item is `word`, in any case."""
    return all(item.strip().casefold() == word.casefold() for item in text.split(separator))


def _case(text: str, *, case: str) -> bool:
    """All cased letters are `upper` or `lower`, and there is one."""
    return text.isupper() if case == "upper" else text.islower()


def _starts_with(response: str, *, text: str) -> bool:
    return response.startswith(text)


def _ends_with(response: str, *, text: str) -> bool:
    return response.endswith(text)


def _between(text: str, *, before: str, after: str, inner: dict[str, Any]) -> bool:
    """What stands between `before` and `after` meets the `inner` constraint."""
    if len(text) < len(before) + len(after) or not (text.startswith(before) and text.endswith(after)):
        return False
    return meets(text[len(before) : len(text) - len(after)].strip(), inner)


def _keywords(text: str, *, words: list[str]) -> bool:
    """Each of the words or phrases stands there, whole, in any case."""
    return all(prose.phrase(text, word) for word in words)


def _forbidden(text: str, *, words: list[str]) -> bool:
    """None of the words or phrases stands there, whole, in any case."""
    return not any(prose.phrase(text, word) for word in words)


def _no_commas(text: str) -> bool:
    """No comma: neither `,` nor that of Chinese, Japanese or Arabic."""
    return not any(comma in text for comma in ",\uff0c\u3001\u060c")


def _json_only(text: str) -> bool:
    """The whole text is one JSON document; a fence around it is allowed."""
    try:
        parse_json(text)
    except ParseError:
        return False
    return True


def _postscript(text: str, *, marker: str) -> bool:
    """In the last paragraph a line begins with the marker and has words behind it."""
    found = [line for line in prose.lines(prose.paragraphs(text)[-1]) if line.startswith(marker)]
    return any(prose.words(line[len(marker) :]) for line in found)


def _quoted(text: str) -> bool:
    """Quotation marks around the whole text, straight or curly, with words in between."""
    pairs = ('""', "\u201c\u201d", "\u00ab\u00bb", "\u201e\u201c")
    return len(text) > 2 and text[0] + text[-1] in pairs and bool(prose.words(text))


def _repeats(response: str, *, text: str) -> bool:
    """The answer begins with the text, word for word, and goes on behind it."""
    return response.startswith(text.strip()) and bool(prose.words(response[len(text.strip()) :]))


def _two_responses(text: str, *, separator: str) -> bool:
    """Two answers with a separator between them, not the same."""
    parts = [part.strip() for part in text.split(separator)]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _paragraph_starts(text: str, *, paragraph: int, word: str) -> bool:
    """Paragraph number `paragraph`, from 1, begins with the word, in any case."""
    found = prose.paragraphs(text)
    return len(found) >= paragraph and _first_word(found[paragraph - 1], word=word)


def _first_word(text: str, *, word: str) -> bool:
    return [found.casefold() for found in prose.words(text)[:1]] == [word.casefold()]


def _last_word(text: str, *, word: str) -> bool:
    return [found.casefold() for found in prose.words(text)[-1:]] == [word.casefold()]


def _one_of(text: str, *, choices: list[str]) -> bool:
    """The whole answer is one of the choices, a final dot apart."""
    return text.removesuffix(".") in [choice.strip().removesuffix(".") for choice in choices]


def _language(text: str, *, language: str) -> bool:
    """No language is more likely, and there are letters. An identifier that fails is an error, never a pass."""
    return any(map(str.isalpha, text)) and bool(_identifier().rank(text[:4_000])[0][0] == language)


@functools.cache
def _identifier() -> Any:
    """The language identifier; the first call loads its model, which takes a second."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _letter_count(text: str, *, letter: str) -> int:
    return text.lower().count(letter.lower())


def _occurrences(response: str, *, text: str) -> int:
    return response.count(text)


def _keyword_count(text: str, *, word: str) -> int:
    return prose.phrase(text, word)


def _digit_count(text: str) -> int:
    return sum(map(str.isdigit, text))


def _questions(text: str) -> list[str]:
    return [sentence for sentence in prose.sentences(text) if "?" in sentence[-3:] or "\uff1f" in sentence[-2:]]


_TEXT, _MAYBE_EMPTY, _NUMBER, _TEXTS = Param(str), Param(str, least=0), Param(int), Param(list)

KINDS: dict[str, Kind] = {
    # how much of something
    "words": _counted(prose.words),
    "sentences": _counted(prose.sentences),
    "paragraphs": _counted(prose.paragraphs, separator=Param(str, required=False)),
    "lines": _counted(prose.lines),
    "characters": _counted(len),
    "bullets": _counted(prose.bullets),
    "numbered_items": _counted(prose.numbered_items),
    "headings": _counted(prose.headings),
    "sections": _counted(prose.sections, marker=_TEXT),
    "highlights": _counted(prose.highlights),
    "placeholders": _counted(prose.placeholders),
    "titles": _counted(prose.titles),
    "capital_words": _counted(prose.capital_words),
    "keyword": _counted(_keyword_count, word=_TEXT),
    "letter": _counted(_letter_count, letter=Param(str, most=1)),
    "digits": _counted(_digit_count),
    "questions": _counted(_questions),
    "occurrences": _counted(_occurrences, text=_TEXT),
    # what is there and what is not
    "keywords": Kind(_keywords, {"words": _TEXTS}),
    "forbidden_words": Kind(_forbidden, {"words": _TEXTS}),
    "no_commas": Kind(_no_commas, {}),
    "postscript": Kind(_postscript, {"marker": _TEXT}),
    # the form of the whole
    "case": Kind(_case, {"case": Param(("upper", "lower"))}),
    "starts_with": Kind(_starts_with, {"text": _TEXT}),
    "ends_with": Kind(_ends_with, {"text": _TEXT}),
    "first_word": Kind(_first_word, {"word": _TEXT}),
    "last_word": Kind(_last_word, {"word": _TEXT}),
    "paragraph_starts": Kind(_paragraph_starts, {"paragraph": _NUMBER, "word": _TEXT}),
    "between": Kind(_between, {"before": _MAYBE_EMPTY, "after": _MAYBE_EMPTY, "inner": Param(dict)}),
    "items": Kind(_items, {"separator": _TEXT, "count": _NUMBER}),
    "only_word": Kind(_only_word, {"word": _TEXT, "separator": _TEXT}),
    "one_of": Kind(_one_of, {"choices": _TEXTS}),
    "quoted": Kind(_quoted, {}),
    "json_only": Kind(_json_only, {}),
    "repeats": Kind(_repeats, {"text": _TEXT}),
    "two_responses": Kind(_two_responses, {"separator": _TEXT}),
    "language": Kind(_language, {"language": _TEXT}),
}
"""Kind to its check and its parameters. Kinds with `min` and `max` need one of them at least."""
