"""What a shell command does, as far as its words tell: the programs it runs and the paths it names."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CHARS = 20_000
"""Only so much of a command is read: the reader is not linear in long words, and programs stand at the beginning."""

_PUNCTUATION = "();<>|&\n"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
# Commands that prepare the ground for what is to be done.
_PREPARING = frozenset({"cd", "pushd", "popd", "export", "set", "unset", "source", ".", "alias", "umask", "ulimit"})
# Programs that run another one, with those of their options that take a word.
_WRAPPERS: dict[str, frozenset[str]] = {
    "env": frozenset({"-u", "-C"}),
    "sudo": frozenset({"-u", "-g"}),
    "nice": frozenset({"-n"}),
    "timeout": frozenset({"-k", "-s"}),
    "time": frozenset(),
    "nohup": frozenset(),
    "command": frozenset(),
    "exec": frozenset(),
}
_SHELLS = frozenset({"bash", "sh", "zsh", "dash"})
_PATH = re.compile(r"(?:[\w.@+~-]*/)+[\w.@+-]*|[\w@+-][\w.@+-]*\.[A-Za-z]\w{0,5}")


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command."""

    verb: str
    """The program without its folder."""
    words: tuple[str, ...]
    """What follows it, unquoted; targets of redirections included."""


def commands(text: str) -> list[Command]:
    """The simple commands of a shell command line in their order: of chains, pipes, lines and groups.

    Assignments before a command (`FOO=1 pytest`) and wrappers (`env`, `sudo`, `timeout 60`, ...) are left out, and
    `bash -c "..."` is what it runs. This reads words, it does not interpret: no expansions, no loops, and an operator
    in quotes that stands alone counts as one. A quote that never closes ends the reading.
    """
    found = []
    for words in _simple_commands(text[:MAX_CHARS]):
        found += _unwrapped(words, depth=0)
    return found


def main_command(text: str) -> Command | None:
    """The first command that is not there to prepare others: `pytest` of `cd x && FOO=1 pytest`. None without any."""
    found = commands(text)
    return next((command for command in found if command.verb not in _PREPARING), found[0] if found else None)


def paths(text: str) -> set[str]:
    """The words of a command line that look like paths: with a slash, or a name with an extension.

    Those of commands that only prepare others count where there are no others: `cd /a && ls` names `/a`.
    """
    return working_paths(text) or _paths(commands(text))


def working_paths(text: str) -> set[str]:
    """The same without those of commands that only prepare others."""
    return _paths(command for command in commands(text) if command.verb not in _PREPARING)


def _paths(found: Iterable[Command]) -> set[str]:
    words = (word for command in found for word in command.words)
    return {word for word in words if _PATH.fullmatch(word) and not word.startswith("-") and word.strip("/.")}


def _simple_commands(text: str) -> list[list[str]]:
    reader = shlex.shlex(text, posix=True, punctuation_chars=_PUNCTUATION)
    reader.whitespace = " \t\r"
    reader.whitespace_split = True
    reader.commenters = ""
    found: list[list[str]] = [[]]
    try:
        for token in reader:
            if not token or not set(token) <= set(_PUNCTUATION):
                found[-1].append(token)
            elif not set(token) & set("<>"):
                found.append([])
    except ValueError:  # a quote that never closes
        if not any(found):
            found = [text.split()]
    return [words for words in found if words]


def _unwrapped(words: list[str], depth: int) -> list[Command]:
    at = 0
    while at < len(words):
        verb = words[at].rsplit("/", 1)[-1]
        if _ASSIGNMENT.match(words[at]):
            at += 1
        elif verb in _WRAPPERS:
            at += 1
            while at < len(words) and words[at].startswith("-"):
                at += 2 if words[at] in _WRAPPERS[verb] else 1
            if verb == "timeout":
                at += 1  # how long
        elif verb in _SHELLS and depth < 3 and _script_of(words[at + 1 :]) is not None:
            script = _script_of(words[at + 1 :]) or ""
            return [each for inner in _simple_commands(script) for each in _unwrapped(inner, depth + 1)]
        else:
            return [Command(verb, tuple(words[at + 1 :]))] if verb else []
    return []


def _script_of(words: list[str]) -> str | None:
    """The script of `-c SCRIPT`, `-lc SCRIPT`, ..."""
    for i, word in enumerate(words[:-1]):
        if not word.startswith("-"):
            return None
        if not word.startswith("--") and word.endswith("c"):
            return words[i + 1]
    return None
