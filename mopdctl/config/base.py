"""The strict base model and the YAML loader that all configuration files share."""

import difflib
import io
import re
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from mopdctl.errors import InputError
from mopdctl.files import read_text


class Strict(BaseModel):
    """Base of every configuration model: unknown keys are refused, values are frozen, docstrings become help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


ModelT = TypeVar("ModelT", bound=Strict)

MOST_DEPTH = 100
MOST_VALUES = 100_000
"""Of a configuration: levels of nesting, and values."""


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises InputError for a syntax error, a duplicate key or anything but a mapping."""
    yaml = YAML(typ="safe", pure=True)
    text = read_text(path)
    try:
        document = yaml.load(io.StringIO(text))
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        problem = str(error.problem).split(" with value")[0].replace("found ", "")
        raise InputError(f"{path}:{line}: {problem}; keep one of the two") from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise InputError(f"{path}:{line}: not YAML ({error.problem})") from None
    except YAMLError as error:
        raise InputError(f"{path}: not YAML ({str(error).splitlines()[0]})") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:  # `2026-02-31`, `!!bool x`, a list in a key, depth
        raise InputError(f"{path}: not YAML ({type(error).__name__}: {error})") from None
    if document is None:
        raise InputError(f"{path}: is empty; a mapping of keys to values is needed")
    document = _tree(document, str(path))
    if not isinstance(document, dict):
        raise InputError(f"{path}: holds {type(document).__name__}, not a mapping of keys to values")
    return document


def _tree(document: Any, source: str) -> Any:
    """A YAML document written out, what stands under two names twice, with whole characters.

    Raises InputError for one that holds itself, is nested deeper than MOST_DEPTH or holds more than MOST_VALUES: a few
    lines whose names stand for each other can be larger than any memory.
    """
    count = 0

    def copy(value: Any, around: tuple[int, ...]) -> Any:
        nonlocal count
        count += 1
        if count > MOST_VALUES:
            raise InputError(f"{source}: holds more than {MOST_VALUES:,} values, those behind aliases counted")
        if isinstance(value, str):
            return _whole_characters(value, source)
        if not isinstance(value, dict | list | tuple):
            return value
        if id(value) in around:
            raise InputError(f"{source}: holds itself (an alias inside of what it names); write the value out")
        if len(around) == MOST_DEPTH:
            raise InputError(f"{source}: is nested deeper than {MOST_DEPTH} levels")
        around = (*around, id(value))
        if isinstance(value, dict):
            return {copy(key, around): copy(item, around) for key, item in value.items()}
        items = [copy(item, around) for item in value]
        return items if isinstance(value, list) else tuple(items)

    return copy(document, ())


def _whole_characters(value: str, source: str) -> str:
    """Joins the halves of characters that a JSON writer escaped as pairs. Raises InputError for a half alone."""
    try:
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise InputError(f"{source}: holds half a character (a lone surrogate)") from None


def parse(model: type[ModelT], document: dict[str, Any], *, source: str) -> ModelT:
    """Validates `document` against `model`. Raises InputError with the first problem in `source`, in one line."""
    try:
        return model.model_validate(_tree(document, source))
    except ValidationError as error:
        raise InputError(f"{source}: {_first_problem(model, error)}") from None


def load_config(model: type[ModelT], path: Path) -> ModelT:
    """Loads and validates one YAML file."""
    return parse(model, load_yaml(path), source=str(path))


def _first_problem(model: type[BaseModel], error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    # A misspelt key is missing under its right name too; what was written says more than what was not.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in problem["loc"]) or "(top level)"
    if not where.isprintable():  # a key may hold a line break
        where = where.encode("unicode_escape").decode()
    if problem["type"] == "extra_forbidden":
        known = _known_keys(model, problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"unknown key {where!r}; {hint}"
    if problem["type"] == "missing":
        return f"key {where!r} is missing"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if problem["type"] == "list_type":
        message = "must be a list, e.g. [a, b]"
    given = problem["input"]
    # A text is shown where a few words are allowed, and nowhere else: it may be a secret in the wrong place.
    if isinstance(given, int | float) or (problem["type"] == "literal_error" and len(str(given)) <= 60):
        message = f"{message}, not {given!r}"
        near = difflib.get_close_matches(str(given), re.findall(r"'([^']+)'", problem["msg"]), n=1, cutoff=0.5)
        message += f"; did you mean {near[0]!r}?" if near else ""
    return f"{where}: {message}"


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The field names of the model that `path` leads to, following nested models, dicts and lists."""
    found: Any = model
    for part in path:
        found = _below(found, part)
    return sorted({name for m in _models_in(found) for name in m.model_fields})


def _below(annotation: Any, part: int | str) -> Any:
    """The type of what lies under `part`: a field of a model, a value of a dict, an item of a list; None if unknown."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return field.annotation if field else None
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, list):
        return arguments[-1]
    return next((found for a in arguments if (found := _below(a, part)) is not None), None)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in getattr(annotation, "__args__", ()) for m in _models_in(argument)]
