"""The README is true: its commands run, its configuration loads."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mopdctl.config.base import parse
from mopdctl.config.teachers import TeachersFile

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


def run(command: str, cwd: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    assert words[0] == "mopdctl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "mopdctl", *words[1:], *extra], cwd=cwd, env=environment, text=True, capture_output=True
    )


def test_two_commands_do_all_the_set_up() -> None:
    assert "pip install -e . && mopdctl quickstart" in commands()
    assert "pip install -e '.[test]' && pytest" in commands()


def test_every_command_in_a_block_is_known_to_this_test() -> None:
    known = {"pip", "mopdctl"}
    assert {shlex.split(command)[0] for command in commands()} <= known


def test_the_teachers_file_in_the_readme_loads() -> None:
    from ruamel.yaml import YAML

    (text,) = blocks("yaml")
    config = parse(TeachersFile, YAML(typ="safe").load(text), source="README.md")
    assert config.train.learning_rate == 2e-6
    assert config.teachers["self"].kind == "self"


def test_the_published_table_is_recomputed() -> None:
    (command,) = [c for c in commands() if "--scores" in c]
    done = run(command, ROOT, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["benchmark"]: row["recovery_pct"] for row in json.loads(done.stdout)["rows"]}
    assert rows["IMOAnswerBench (no tools)"] == 51.3
    assert rows["Terminal Bench 2.0"] == 172.7


def test_the_tour_of_generated_data_works_offline(tmp_path: Path) -> None:
    tour = [c for c in commands() if "gen-sft" in c]
    assert len(tour) == 3
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    shown = []
    for command in tour:
        done = run(command.replace("-- mopdctl", f"-- {shlex.quote(sys.executable)} -m mopdctl"), tmp_path)
        assert done.returncode == 0, (command, done.stderr[-2000:])
        shown.append(done.stdout)
    assert "examples" in shown[0]
    assert "rows of 3 seeds" in shown[1]
    manifest = json.loads((tmp_path / "workspace/datasets/sample-sft/manifest.json").read_text("utf-8"))
    assert manifest["complete"]
    assert sum(manifest["rows"].values()) > 40
    dropped = {reason for stage in manifest["stages"] for reason in stage["dropped"]}
    assert {"benchmark_questions", "refusal"} <= dropped
    assert (tmp_path / "workspace/datasets/sample-sft/quarantine/seeds.jsonl").read_bytes().count(b"\n") == 1


def check_story(document: dict[str, Any]) -> None:
    """What the quickstart promises: specialists that gain and forget, one student with most of it, beaten controls."""
    scores, recovery = document["scores"], document["recovery"]
    specialists = ("arithmetic", "instructions", "structured", "tools")
    for domain in specialists:
        assert scores[domain][domain] >= scores["student"][domain] + 25
        again = scores.get(f"{domain}-2")
        assert again is None or again[domain] >= scores["mopd1"][domain] + 5
    forgot = [
        d for d in specialists if any(scores[d][o] <= scores["student"][o] - 10 for o in scores["student"] if o != d)
    ]
    assert len(forgot) >= 2
    ok = [row for row in recovery["rows"] if row["status"] == "ok"]
    assert {row["benchmark"] for row in ok} == set(specialists)
    assert all(row["recovery_pct"] >= 60 for row in ok)
    assert recovery["pooled"]["recovery_pct"] >= 80
    assert not any(row["gain_ci_high"] < 0 for row in recovery["rows"])
    assert all(control["ci_low"] > 0 for control in recovery["controls"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quickstart_tells_the_story_and_the_tour_goes_on_from_it(tmp_path: Path) -> None:
    done = run("mopdctl quickstart", tmp_path, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    check_story(document)
    again = run("mopdctl quickstart", tmp_path, "--json")
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads(again.stdout)["recovery"] == document["recovery"]
    tour = [c for c in commands() if re.search(r"workspace/|trial|mopdctl store|student-rollouts", c)]
    assert len(tour) == 8
    shown = {}
    for command in tour:
        done = run(command, tmp_path)
        assert done.returncode == 0, (command, done.stderr[-2000:])
        shown[command] = done.stdout
    assert "arithmetic" in shown[next(c for c in tour if "recovery" in c)]
    assert re.search(r"arithmetic +arithmetic +\d+", shown["mopdctl store inspect mopd2"])
