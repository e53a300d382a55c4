"""What holds for every command before it does any work: it starts light, and its help helps."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mopdctl.cli.app import app

HEAVY = ("torch", "transformers", "vllm", "datasets", "lm_eval", "polars", "numpy")

# Asks for help as a user does and reports, after each step, what was loaded.
PROBE = """
import contextlib, io, json, sys
heavy, commands = json.loads(sys.argv[1])
from mopdctl.cli.app import app
loaded = {"import mopdctl.cli.app": [name for name in heavy if name in sys.modules]}
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        with contextlib.suppress(SystemExit):
            app([*command, "--help"])
    assert "Usage" in shown.getvalue(), (command, shown.getvalue())
    loaded[" ".join(command + ["--help"])] = [name for name in heavy if name in sys.modules]
print(json.dumps(loaded))
"""


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (words, command) for every command, those inside groups included; not the groups themselves."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from walk(child, (*path, name))


COMMANDS = dict(walk(get_command(app)))
every_command = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


def help_of(words: tuple[str, ...]) -> str:
    outcome = CliRunner().invoke(app, [*words, "--help"], prog_name="mopdctl")
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def examples(text: str) -> list[str]:
    """The example command lines of a help text, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.split("\n") if line.strip().startswith("mopdctl ")]


def test_help_loads_no_heavy_module() -> None:
    commands = [[], *(list(words) for words in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([HEAVY, commands])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert {step: names for step, names in loaded.items() if names} == {}
    assert "recovery --help" in loaded


def test_root_help_lists_every_command() -> None:
    text = help_of(())
    listed = {line.split()[0] for line in text.split("\n") if line.startswith("  ")}
    assert {words[0] for words in COMMANDS} <= listed


@every_command
def test_help_begins_with_one_sentence(words: tuple[str, ...]) -> None:
    first = COMMANDS[words].help.split("\n\n")[0].strip()
    assert re.fullmatch(r"[A-Z].*\.", first, flags=re.DOTALL), first
    assert not re.search(r"[.!?]\s+[A-Z]", first), f"more than one sentence: {first}"


@every_command
def test_help_has_two_examples(words: tuple[str, ...]) -> None:
    lines = examples(help_of(words))
    assert len(lines) >= 2, "lines that begin with `mopdctl `, kept apart by a line that holds only \\b"
    assert all(shlex.split(line)[1 : 1 + len(words)] == list(words) for line in lines[:2]), lines


@every_command
def test_examples_use_options_that_exist(words: tuple[str, ...]) -> None:
    known = {option for parameter in COMMANDS[words].params for option in parameter.opts + parameter.secondary_opts}
    for line in examples(help_of(words)):
        parts = shlex.split(line, comments=True)
        parts = parts[: parts.index("--")] if "--" in parts else parts  # what follows is another command
        if parts[1 : 1 + len(words)] == list(words):
            used = {part.split("=")[0] for part in parts if part.startswith("--")}
            assert used <= known, f"{line}: no such option {sorted(used - known)}"


def test_version_is_on_stdout() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert outcome.exit_code == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", outcome.stdout)
