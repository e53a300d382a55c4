"""Patterns that pick modules by name, and the names of experts."""

import difflib
import fnmatch
import re
from collections.abc import Iterable

from mopdctl.errors import InputError


def matching(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that a pattern matches: a name, a glob, or `re:` and a regular expression matched from the beginning.

    Raises:
        InputError: the pattern is no regular expression, or matches nothing; then with the names that come nearest.
    """
    names = list(names)
    if pattern.startswith("re:"):
        try:
            compiled = re.compile(pattern[3:])
        except re.error as error:
            raise InputError(f"pattern {pattern!r}: no regular expression ({error})") from None
        found = {name for name in names if compiled.match(name)}
    elif any(character in pattern for character in "*?["):
        compiled = re.compile(fnmatch.translate(pattern))
        found = {name for name in names if compiled.match(name)}
    else:
        found = {pattern}.intersection(names)
    if not found:
        raise InputError(f"pattern {pattern!r}: matches no module; nearest: {', '.join(_nearest(pattern, names))}")
    return found


def _nearest(pattern: str, names: list[str]) -> list[str]:
    plain = re.sub(r"[*?\[\]^$\\]|re:", "", pattern).strip(".")
    by_last: dict[str, str] = {}
    for name in names:
        by_last.setdefault(name.rpartition(".")[2], name)
    close = difflib.get_close_matches(plain, names, n=2, cutoff=0.5)
    close += [by_last[last] for last in difflib.get_close_matches(plain.rpartition(".")[2], by_last, n=2, cutoff=0.5)]
    return list(dict.fromkeys(close or names))[:3]


_EXPERTS = re.compile(r"(.*\bexperts)\.\d+\.")


def experts_of(name: str) -> str | None:
    """The module that holds all experts of a layer, of one expert's module; None for a module of no expert."""
    found = _EXPERTS.match(name)
    return found.group(1) if found else None


def exactly(name: str) -> str:
    """A regular expression for a name."""
    return "^" + name.replace(".", r"\.")
