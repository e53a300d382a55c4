"""The README is true: its commands run, its configuration loads."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from mopdctl.config.base import load_config, parse
from mopdctl.config.distill import Anchor, DistillTrainConfig
from mopdctl.config.rl import RlConfig
from mopdctl.config.sft import SftConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.overlap import advice
from mopdctl.environments.registry import begin
from mopdctl.verifiers import VERIFIERS, Attempt
from mopdctl.verifiers.registry import run_check

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    return str(text)


def blocks(language: str, title: str | None = None) -> list[str]:
    text = README if title is None else section(title)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def documents(title: str) -> list[Any]:
    return [YAML(typ="safe").load(text) for text in blocks("yaml", title)]


def commands(title: str | None = None) -> list[str]:
    return [line for block in blocks("bash", title) for line in block.splitlines() if line.strip()]


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
    (document,) = documents("Your own models")
    config = parse(TeachersFile, document, source="README.md")
    assert config.train.learning_rate == 2e-6
    assert config.teachers["self"].kind == "self"


def test_the_file_that_trains_for_four_bits_loads() -> None:
    (document,) = documents("Quantize for serving")
    config = parse(TeachersFile, document, source="README.md")
    assert config.train.student_quant == "nvfp4"
    assert config.student == config.teachers["itself"].model


def over(document: Any, other: Any) -> Any:
    """One document laid over another, mapping by mapping."""
    if not (isinstance(document, dict) and isinstance(other, dict)):
        return other
    return document | {key: over(document.get(key), value) for key, value in other.items()}


def test_the_family_in_the_readme_is_the_sample_and_takes_every_other_part() -> None:
    family, warmed, mixed, adapted = documents("Merging teachers")
    assert (ROOT / "sample_data/family/teachers.yaml").read_text("utf-8") in README
    config = parse(TeachersFile, family, source="README.md")
    assert {teacher.model for teacher in config.teachers.values()} == {"arithmetic", "tools", "rlvr"}
    train = parse(TeachersFile, over(family, warmed), source="README.md").train
    assert train.warm_up is not None
    assert (train.warm_start, train.warm_up.samples, train.balance.mode) == ("merge", 4, "share")
    assert train.balance.target_shares.keys() == config.teachers.keys()
    teachers = parse(TeachersFile, over(family, mixed), source="README.md").teachers
    assert {alias: teacher.gives for alias, teacher in teachers.items() if teacher.is_black_box} == {
        "chat": "answers",
        "style": "discriminator",
    }
    assert {teachers[alias].tier for alias in ("frontier", "arithmetic")} == {1, 2}
    adapter = parse(TeachersFile, over(family, adapted), source="README.md")
    assert (adapter.teachers["tools"].base, adapter.train.lora is not None) == ("rlvr", True)


def test_every_setting_in_the_table_of_objectives_exists() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| [^|]+ \| (`[^|]+) \| [^|]+ \| [^|]+ \|$", section("Merging teachers"), re.MULTILINE
    )
    assert len(rows) == 11
    for settings in rows:
        for setting in re.findall(r"`([^`]+)`", settings):
            name, _, value = setting.partition(": ")
            part, _, inner = name.partition(".")
            assert part in DistillTrainConfig.model_fields
            assert not inner or inner in Anchor.model_fields
            if value:
                parse(DistillTrainConfig, {"steps": 1, "objective": "exact"} | {name: value}, source=setting)


def test_the_thresholds_of_the_advice_are_those_in_the_readme() -> None:
    warm_up, sampled, exact = re.findall(
        r"^\| `(?:warm-up first|sampled|exact)` \| .*$", section("Merging teachers"), re.MULTILINE
    )
    limits = (advice.WARM_UP_BELOW_MASS, advice.WARM_UP_BELOW_OVERLAP, advice.WARM_UP_FROM_IMPOSSIBLE)
    assert re.findall(r"([\d.]+) %", warm_up) == [f"{100 * limit:g}" for limit in limits]
    assert re.findall(r"(\d+) %", sampled) == []
    assert re.findall(r"(\d+) %", exact) == [
        f"{100 * limit:.0f}" for limit in (advice.EXACT_FROM_MASS, advice.EXACT_FROM_OVERLAP)
    ]


def test_the_rl_file_in_the_readme_is_the_sample_and_takes_the_judge() -> None:
    document, with_judge = documents("RL on verifiable rewards")
    assert (ROOT / "sample_data/rl/rl.yaml").read_text("utf-8") in README
    config = parse(RlConfig, document, source="README.md")
    assert config.environments["lookup"].weight == 2
    judge = parse(RlConfig, document | with_judge, source="README.md").environments["chat"].judge
    assert judge is not None
    assert (judge.verifier_weight, judge.weight) == (3, 1)


def test_the_table_of_verifiers_names_all_of_them_with_their_versions() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", section("Verifiers"), re.MULTILINE)
    assert [(name, int(version)) for name, version in rows] == [(v.name, v.version) for v in VERIFIERS.values()]


def test_the_row_with_an_environment_can_be_answered_as_it_says() -> None:
    (text,) = blocks("json", "Tool environments")
    row = json.loads(text)
    environment, state = begin(row["environment"])
    turns: list[dict[str, Any]] = []
    for call in row["reference"]["calls"]:
        turns.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        turns.append({"role": "tool", "content": environment.call(state, call["name"], call["arguments"])})
    assert [turn["content"] for turn in turns[1::2]] == ["3", "tode"]
    for said, reward in (("tode", 1.0), ("kalo", 0.0)):
        attempt = Attempt(
            said,
            row["reference"],
            tuple(row["messages"]),
            tuple(row["tools"]),
            row["environment"],
            (*turns, {"role": "assistant", "content": said}),
        )
        assert run_check(VERIFIERS[row["verifier"]], attempt).reward == reward


def test_verifiers_of_a_task_are_found_to_judge_rightly() -> None:
    (command,) = commands("Verifiers")
    done = run(f"{command} --task arithmetic", ROOT, "--json")
    assert done.returncode == 0, done.stderr
    (task,) = json.loads(done.stdout)["tasks"]
    assert task["failures"] == []
    assert task["documents"] == task["gold"] == 500


def test_the_other_files_of_the_tours_load_and_every_expert_turn_is_a_candidate(tmp_path: Path) -> None:
    for model, path in ((SftConfig, "rl/student.yaml"), (RlConfig, "pivots/rl.yaml")):
        load_config(model, ROOT / "sample_data" / path)
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    done = run(commands("PivotRL")[0], tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert (manifest["trajectories"], manifest["turns"], manifest["candidates"]) == (40, 117, 117)


def test_the_published_table_is_recomputed() -> None:
    (command,) = [c for c in commands() if "--scores" in c]
    done = run(command, ROOT, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["benchmark"]: row["recovery_pct"] for row in json.loads(done.stdout)["rows"]}
    assert rows["IMOAnswerBench (no tools)"] == 51.3
    assert rows["Terminal Bench 2.0"] == 172.7


@pytest.mark.slow
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


@pytest.mark.slow
def test_teachers_write_sft_data_for_their_own_prompts(
    tiny: Path, teachers_document: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (command,) = re.findall(r"`(mopdctl gen-sft --from-teachers [^`]+)`", section("Synthetic SFT data"))
    (tmp_path / "teachers.yaml").write_text(json.dumps(teachers_document()), "utf-8")
    done = run(command, tmp_path, "--json", "--set", "select=[]")
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert (document["name"], document["complete"], document["requests"]) == ("teachers-answers", True, 24 * 4)
    assert document["stages"]["generate"] == "96 in, 96 out"
    assert document["rows"]["train"] > 0
    assert document["domains"].keys() <= {"arithmetic", "structured", "tools"}


def useful_groups(run_folder: Path, environment: str) -> list[int]:
    """Groups of each step whose answers differ in what they earned."""
    steps = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [step["rl/groups"].get(environment, {}).get("useful", 0) for step in steps]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tours_of_rl_and_pivots_work_offline(tmp_path: Path) -> None:
    for name in ("rl", "pivots"):
        shutil.copytree(ROOT / "sample_data" / name, tmp_path / "sample_data" / name)
    (tmp_path / "mopdctl").symlink_to(ROOT / "mopdctl")
    tours = [*commands("RL on verifiable rewards"), *commands("PivotRL")]
    assert len(tours) == 9
    shown = {}
    for command in tours:
        done = run(command, tmp_path)
        assert done.returncode == 0, (command, done.stderr[-2000:])
        shown[command] = done.stdout
    workspace = tmp_path / "workspace"
    for name in ("sample-student", "sample-rl", "sample-agent"):
        assert json.loads((workspace / "checkpoints" / name / "card.json").read_text("utf-8"))["name"] == name
    whole, pivots = (useful_groups(workspace / "runs" / name, "errands") for name in ("sample-rl", "sample-agent"))
    assert sum(useful_groups(workspace / "runs/sample-rl", "lookup")) > 0
    assert 0 < sum(whole) < 16
    assert sum(pivots[:3]) > 9  # of 36 groups; later it knows most of them
    assert sum(pivots[:3]) > sum(pivots[-3:])
    assert "abstention/1, state_replay/1" in shown["mopdctl store inspect sample-rl"]
    selection = json.loads((workspace / "pivots/sample-errands/selection.json").read_text("utf-8"))
    assert selection["alarm"] is None
    assert selection["kept"] + sum(selection["dropped"].values()) == selection["candidates"] == 117
    rows = (workspace / "data/sample-pivots.jsonl").read_text("utf-8").splitlines()
    assert len(rows) == selection["kept"] > 3
    assert {json.loads(row)["verifier"] for row in rows} == {"action"}
    again = run(f"{commands('Verifiers')[0]}", tmp_path)
    assert again.returncode == 0, again.stderr


SPECIALISTS = ("arithmetic", "instructions", "structured", "tools")
TEACHERS = (*SPECIALISTS, "errands")


def check_story(document: dict[str, Any]) -> None:
    """What the quickstart promises: RL that helps, teachers that gain and forget, one student with most of it."""
    scores, recovery = document["scores"], document["recovery"]
    before = scores["rlvr"]
    assert max(before[domain] - scores["student"][domain] for domain in before) >= 10
    for domain in TEACHERS:
        assert scores[domain][domain] >= before[domain] + (25 if domain in SPECIALISTS else 2)
        again = scores.get(f"{domain}-2")
        assert again is None or again[domain] >= scores["mopd1"][domain] + 5
    forgot = [d for d in SPECIALISTS if any(scores[d][o] <= before[o] - 10 for o in before if o != d)]
    assert len(forgot) >= 2
    ok = [row for row in recovery["rows"] if row["status"] == "ok"]
    assert {row["benchmark"] for row in ok} == set(TEACHERS)
    assert all(row["recovery_pct"] >= 60 for row in ok)
    assert recovery["pooled"]["recovery_pct"] >= 80
    assert not any(row["gain_ci_high"] < 0 for row in recovery["rows"])
    assert all(control["ci_low"] > 0 for control in recovery["controls"])
    (kept,) = document["retention"]["checkpoints"]
    assert kept["median_pct"] >= 95


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_quickstart_tells_the_story_and_the_tour_goes_on_from_it(tmp_path: Path) -> None:
    done = run("mopdctl quickstart", tmp_path, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    check_story(document)
    again = run("mopdctl quickstart", tmp_path, "--json")
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads(again.stdout)["recovery"] == document["recovery"]
    shutil.copytree(ROOT / "sample_data/family", tmp_path / "sample_data/family")
    titles = ("Your own models", "Merging teachers", "Quantize for serving", "Rollouts")
    tour = [c for title in titles for c in commands(title)]
    tour = [c for c in tour if "--scores" not in c]
    assert len(tour) == 24
    shown = {}
    for command in tour:
        done = run(command, tmp_path)
        assert done.returncode == 0, (command, done.stderr[-2000:])
        shown[command] = done.stdout
    assert "arithmetic" in shown[next(c for c in tour if "recovery" in c)]
    assert re.search(r"arithmetic +arithmetic +\d+", shown["mopdctl store inspect mopd2"])
    looked, ranked = (shown[c] for c in tour if " overlap " in c)
    assert re.search(r"^zero test: student against self: nothing differs", looked, re.MULTILINE)
    assert re.search(r"^advice: (warm-up first|sampled|exact) - ", looked, re.MULTILINE)
    assert re.search(r"^suggested: (arithmetic|second) - ", ranked, re.MULTILINE)
    assert (tmp_path / "overlap.svg").read_text("utf-8").startswith("<svg")
    made = {path.name for path in (tmp_path / "workspace/checkpoints").glob("family.*")}
    kinds = ("merge", "linear", "ties", "seqkd", "only-arithmetic", "only-tools", "rl")
    assert made == {f"family.{kind}" for kind in kinds}
    assert "retention" in shown[next(c for c in tour if "--quantized" in c)].lower()
    assert (tmp_path / "mopd2-fp4.md").read_text("utf-8").startswith("#")
    mixed = json.loads((tmp_path / "workspace/checkpoints/mopd2-mixed/config.json").read_text("utf-8"))
    assert mixed["quantization_config"]["format"] == "mixed-precision"
    compared = shown[next(c for c in tour if "family.seqkd" in c and "recovery" in c)]
    assert "family.merge" in compared
    assert "family.seqkd" in compared
