"""`mopdctl eval`: what `--limit` says of all tasks and of some."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Cli = Callable[..., SimpleNamespace]


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ("", {"arithmetic": None, "tools": None}),
        ("--limit 5", {"arithmetic": 5, "tools": 5}),
        ("--limit tools=3", {"arithmetic": None, "tools": 3}),
        ("--limit tools=3 --limit 5", {"arithmetic": 5, "tools": 3}),
    ],
)
def test_a_limit_is_for_all_tasks_or_for_one(
    cli: Cli, tiny: Path, tmp_path: Path, options: str, limits: dict[str, Any]
) -> None:
    model = tiny / "models" / "student"
    rest = ["--tasks", "arithmetic,tools", "--workspace", tmp_path, "--dry-run", "--json"]
    done = cli("eval", "trial", "--model", model, *options.split(), *rest)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["tasks"] == limits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--limit 0", "--limit 0: needs a number from 1"),
        ("--limit many", "--limit many: "),
        ("--limit tools=", "--limit tools=: "),
        ("--limit 5 --limit 6", "--limit 6: "),
        ("--limit lookup=5", "limit: names lookup"),
    ],
)
def test_other_limits_are_refused(cli: Cli, tiny: Path, tmp_path: Path, options: str, said: str) -> None:
    model = tiny / "models" / "student"
    done = cli("eval", "trial", "--model", model, *options.split(), "--tasks", "tools", "--workspace", tmp_path)
    assert done.code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_command_of_a_stage_asks_for_what_the_stage_runs(tmp_path: Path) -> None:
    from mopdctl.cli.evaluate import _limit
    from mopdctl.runs import Workspace
    from mopdctl.world.story import _eval

    for limits in ({"tools": 500}, {"arithmetic": 200, "tools": 500, "lookup": 200}):
        words = shlex.split(_eval(Workspace(tmp_path), "mopd1", limits).command)
        given = [words[place + 1] for place, word in enumerate(words) if word == "--limit"]
        tasks = words[words.index("--tasks") + 1].split(",")
        found = _limit(given, tasks)
        assert (dict.fromkeys(tasks, found) if isinstance(found, int) else found) == limits
