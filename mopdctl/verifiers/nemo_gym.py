"""NeMo Gym's comparators of actions as they are, their defects included, to score data as it was scored there.

Source: NVIDIA-NeMo/Gym, `resources_servers/single_step_tool_use_with_argument_comparison` (`verification_utils.py`) and
`resources_servers/swe_pivot` (`app.py`), read in autumn 2026. What they get wrong, beside our own verifiers: tests
`test_nemo_gym.py`. The options have their names there, so that a block of a config can be copied. An empty list of
calls stands for a chat message. A response that cannot be read is a state here and 0 there.
"""

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from mopdctl.verifiers.arguments import maximum_matching
from mopdctl.verifiers.base import InvalidReferenceError, Outcome
from mopdctl.verifiers.targets import COMMAND_KEYS, PATH_KEYS, tool_category

Call = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ComparatorConfig:
    """`tool_call_comparator_config`, without the later options for single calls, which are off there by default."""

    word_count_similarity_threshold: float = 0.1
    """Of shared words over the sum of both counts: equal texts reach 0.5, and 0 lets any two texts of words pass."""
    floating_point_comparison_threshold: float = 1e-6
    parallel_tool_call_rewarding: bool = False
    """Off: calls beyond the expected ones cost nothing."""
    allow_subset: bool = False
    allow_superset: bool = False
    parallel_tool_call_reward_mode: str = "binary_strict"
    """`binary_strict`, `fractional` or `f1`."""


@dataclass(frozen=True, slots=True)
class SwePivotConfig:
    """The options of `swe_pivot`."""

    reward_mode: str = "binary"
    """`binary` or `continuous`."""
    enable_target_match: bool = True
    enable_argument_similarity: bool = True
    similarity_threshold: float = 0.4
    similarity_full_credit: float = 0.8
    enable_diff_size_shaping: bool = True
    diff_size_alpha: float = 0.1


_CHOICES = {
    "parallel_tool_call_reward_mode": ("binary_strict", "fractional", "f1"),
    "reward_mode": ("binary", "continuous"),
}


def comparator(compat: Any, options: Any, want: Sequence[Call]) -> Callable[[Sequence[Call]], Outcome]:
    """The comparator that a reference asks for under `compat`, of the calls of a response with those of `want`.

    `nemo-gym` compares arguments, `nemo-gym-swe` is `swe_pivot`. Raises InvalidReferenceError for any other name, for
    options that it does not have, and for a message that is expected of `swe_pivot`.
    """
    if compat == "nemo-gym":
        comparison = _read(ComparatorConfig(), options)
        return lambda got: compare_action(want, got, comparison)
    if compat == "nemo-gym-swe":
        pivot = _read(SwePivotConfig(), options)
        if not want:
            raise InvalidReferenceError("'nemo-gym-swe' needs a tool call to be expected")
        try:
            _lines(want[0]["arguments"].get("view_range"))
        except (OverflowError, RecursionError):
            raise InvalidReferenceError("the expected view_range is no range of lines") from None
        return lambda got: swe_pivot(want[0], got, pivot)
    raise InvalidReferenceError(f"'compat' is {compat!r}; it has to be 'nemo-gym' or 'nemo-gym-swe'")


_Config = TypeVar("_Config", ComparatorConfig, SwePivotConfig)


def _read(default: _Config, options: Any) -> _Config:
    if options is None:
        return default
    if not isinstance(options, dict):
        raise InvalidReferenceError("'match' is no object")
    known = [field.name for field in fields(default)]
    for key, value in options.items():
        if key not in known:
            raise InvalidReferenceError(f"'match' has an unknown option {key!r}; there are {', '.join(known)}")
        if key in _CHOICES:
            fits = value in _CHOICES[key]
        elif isinstance(getattr(default, key), bool):
            fits = isinstance(value, bool)
        else:
            fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
        if not fits:
            raise InvalidReferenceError(f"'match' has {key} {value!r}, which it cannot be")
    return type(default)(**options)


def compare_action(want: Sequence[Call], got: Sequence[Call], config: ComparatorConfig) -> Outcome:
    """The argument comparator on the expected action and the response's.

    Arguments are objects or, as there, JSON texts. Raises ValueError for an expected text that is no JSON.
    """
    if not want:
        return Outcome(float(not got), "" if not got else "a tool call where a message is expected")
    if not got:
        return Outcome(0.0, "no tool call")
    if len(want) == len(got) == 1:
        why = call_difference(want[0], got[0], config)
        return Outcome(float(not why), why)
    counted, subset = config.parallel_tool_call_rewarding, config.allow_subset
    if counted and ((len(got) < len(want) and not subset) or (len(got) > len(want) and not config.allow_superset)):
        return Outcome(0.0, "the number of calls differs")
    fits = [[j for j, call in enumerate(got) if not call_difference(expected, call, config)] for expected in want]
    matched = len(maximum_matching(fits))
    required = min(len(want), len(got)) if counted and subset else len(want)
    if counted and config.parallel_tool_call_reward_mode == "f1":
        reward = 2 * matched / (len(want) + len(got))
    elif counted and config.parallel_tool_call_reward_mode == "fractional":
        reward = matched / required
    else:
        reward = float(matched == required)
    return Outcome(reward, "" if reward == 1 else f"{matched} of {len(want)} calls match")


def call_difference(want: Call, got: Call, config: ComparatorConfig) -> str:
    """Why the argument comparator tells two calls apart, or an empty text."""
    if want["name"] != got["name"]:
        return f"calls {got['name']!r} instead of {want['name']!r}"
    expected, actual = want["arguments"], got["arguments"]
    expected = json.loads(expected) if isinstance(expected, str) else expected
    if isinstance(actual, str):
        try:
            actual = json.loads(actual)
        except ValueError:
            return "the arguments are no JSON"
    return "" if same_value(expected, actual, config) else f"arguments of {want['name']!r} differ"


def same_value(expected: Any, actual: Any, config: ComparatorConfig) -> bool:
    """Recursive equality as the argument comparator sees it.

    The type of `actual` has to be that of `expected` or, as with true for an integer, a subtype of it.
    """
    if not isinstance(actual, type(expected)):
        return False
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(same_value(expected[k], actual[k], config) for k in expected)
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(
            same_value(a, b, config) for a, b in zip(expected, actual, strict=True)
        )
    if isinstance(expected, float):
        return bool(abs(actual - expected) < config.floating_point_comparison_threshold)
    if isinstance(expected, str):
        return _same_text(expected, actual, config.word_count_similarity_threshold)
    return bool(expected == actual)


def _same_text(expected: str, actual: str, threshold: float) -> bool:
    words, actual_words = Counter(expected.lower().split()), Counter(actual.lower().split())
    count, actual_count = words.total(), actual_words.total()
    if count < 2 or actual_count < 2:
        return expected == actual
    return (words & actual_words).total() / (count + actual_count) >= threshold


# ----------------------------------------------------------------------------------------------------------- swe_pivot

_MAX_SIMILARITY_CHARS = 2000
_COMMAND_FLOOR = 0.3
_LARGE_EDIT_CHARS = 500
_PATHS = re.compile(r"(?:^|[\s='\"(])((?:/[\w.-]+)+|\.\.?/[\w./-]+|[\w.-]+/[\w./-]+)")


def swe_pivot(expected: Call, got: Sequence[Call], config: SwePivotConfig) -> Outcome:
    """The layered verifier of coding actions: tool, target, similarity and, where continuous, the size of the edit.

    Only the first call of the response counts.
    """
    if not got:
        return Outcome(0.0, "no tool call")
    mine = got[0]
    if not _same_tool(mine["name"], expected["name"]):
        return Outcome(0.0, f"calls {mine['name']!r} instead of {expected['name']!r}")
    kind = tool_category(expected["name"])  # that of both
    try:
        same = not config.enable_target_match or swe_target(kind, mine["arguments"], expected["arguments"])
    except (OverflowError, RecursionError):  # whatever is raised gives 0 there
        return Outcome(0.0, "a view_range that cannot be read")
    if not same:
        return Outcome(0.0, "another target")
    reward = 1.0
    if config.enable_argument_similarity:
        similarity = swe_similarity(kind, mine["arguments"], expected["arguments"])
        low, full = config.similarity_threshold, config.similarity_full_credit
        if similarity < full:
            if config.reward_mode == "binary" or similarity < low:
                return Outcome(0.0, f"similarity {similarity:.3f}")
            reward = 0.5 + 0.5 * (similarity - low) / (full - low)
    if config.enable_diff_size_shaping and config.reward_mode == "continuous" and kind == "edit":
        size = min(len(_edit_content(mine["arguments"])) / _LARGE_EDIT_CHARS, 1.0)
        reward *= 1 - config.diff_size_alpha * size
    return Outcome(reward)


def _same_tool(got: str, want: str) -> bool:
    category = tool_category(got)
    return got.lower() == want.lower() or (category is not None and category == tool_category(want))


def swe_target(kind: str | None, got: dict[str, Any], want: dict[str, Any]) -> bool:
    """Level 1: the same file (last two parts), sub-command and lines, or the same first word and a path in common.

    Lines are taken as half-open, and -1 as the number -1. Raises OverflowError or RecursionError for a `view_range`
    with an infinite line or a text nested too deep.
    """
    path, expected_path = first_of(got, PATH_KEYS), first_of(want, PATH_KEYS)
    if kind == "edit":
        editor, expected_editor = str(got.get("command", "")), str(want.get("command", ""))
        if editor and expected_editor and editor != expected_editor:
            return False
        if path and expected_path and _suffix(path, 2) != _suffix(expected_path, 2):
            return False
        return not editor == expected_editor == "view" or _covers(got.get("view_range"), want.get("view_range"))
    if kind == "bash":
        return _same_command(first_of(got, COMMAND_KEYS), first_of(want, COMMAND_KEYS))
    if kind in ("search", "read") and path and expected_path:
        return _suffix(path, 3) == _suffix(expected_path, 3)
    return True


def first_of(arguments: dict[str, Any], keys: tuple[str, ...]) -> str:
    """The first argument of these names as a stripped text, null as `None`; else an empty one."""
    return next((str(arguments[key]).strip() for key in keys if key in arguments), "")


def _suffix(path: str, parts: int) -> str:
    return "/".join(path.strip("/").split("/")[-parts:])


def _covers(got: Any, want: Any) -> bool:
    mine, expected = _lines(got), _lines(want)
    if not (mine and expected):
        return True
    shared = max(0, min(mine[1], expected[1]) - max(mine[0], expected[0]))
    return shared / max(1, expected[1] - expected[0]) >= 0.8


def _lines(raw: Any) -> tuple[int, int] | None:
    try:
        lines = json.loads(raw) if isinstance(raw, str) else raw
        return (int(lines[0]), int(lines[1])) if isinstance(lines, list) and len(lines) == 2 else None
    except (ValueError, TypeError):
        return None


def _same_command(got: str, want: str) -> bool:
    verb, expected_verb = command_verb(got), command_verb(want)
    if verb and expected_verb and verb != expected_verb:
        return False
    suffixes, expected_suffixes = _path_suffixes(got), _path_suffixes(want)
    if suffixes and expected_suffixes and not suffixes & expected_suffixes:
        return False
    return not (got and want) or _similarity(got, want) >= _COMMAND_FLOOR


def command_verb(command: str) -> str:
    """The first word without its folder, whatever it is: `cd`, or an assignment."""
    words = command.split(maxsplit=1)
    return words[0].rsplit("/", 1)[-1] if words else ""


def _path_suffixes(command: str) -> set[str]:
    found = (path for path in _PATHS.findall(command) if not path.startswith("--") and len(path) > 2)
    return {_suffix(path.rstrip("/"), 3) for path in found} - {""}


def swe_similarity(kind: str | None, got: dict[str, Any], want: dict[str, Any]) -> float:
    """Level 2: difflib's ratio of commands or of what is written into a file; 1 where there is nothing to compare."""
    if kind == "bash":
        command, expected_command = first_of(got, COMMAND_KEYS), first_of(want, COMMAND_KEYS)
        return _similarity(command, expected_command) if command and expected_command else 1.0
    if kind != "edit":
        return 1.0
    pairs = [(str(got.get(key, "")), str(want.get(key, ""))) for key in ("old_str", "new_str")]
    if any(mine for mine, _ in pairs) and any(expected for _, expected in pairs):
        return min(_filled_similarity(mine, expected) for mine, expected in pairs)
    return _filled_similarity(_edit_content(got), _edit_content(want))


def _filled_similarity(got: str, want: str) -> float:
    return _similarity(got, want) if got and want else float(got == want)


def _similarity(got: str, want: str) -> float:
    return difflib.SequenceMatcher(None, got[:_MAX_SIMILARITY_CHARS], want[:_MAX_SIMILARITY_CHARS]).ratio()


def _edit_content(arguments: dict[str, Any]) -> str:
    if "new_str" in arguments:
        return f"{arguments.get('old_str', '')}\n{arguments['new_str']}"
    return next((str(arguments[key]) for key in ("patch", "diff", "content", "file_text") if key in arguments), "")
