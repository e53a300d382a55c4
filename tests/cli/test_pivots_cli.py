"""`pivots` on the command line: from trajectories to rows, clear refusals, and a profile that no kill bends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mopdctl.files import read_jsonl, write_jsonl
from mopdctl.pivots import profile as profiling
from mopdctl.pivots.nemo_gym import validate_row
from mopdctl.records import Sample
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.rollouts.run import RolloutSpec
from mopdctl.runs import Workspace
from mopdctl.store.store import StoreWriter
from mopdctl.verifiers.base import Attempt
from mopdctl.verifiers.registry import VERIFIERS, run_check

Cli = Callable[..., SimpleNamespace]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {"type": "object", "properties": {key: {"type": kind}}, "required": [key]},
        },
    }
    for name, key, kind in (("find_person", "name", "string"), ("open_locker", "number", "integer"))
]


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def trajectory(number: int, person: str, locker: int, item: str) -> dict[str, Any]:
    """Three turns: where the person's locker is, what is in it, and the answer."""
    calls = (
        call(f"a{number}", "find_person", json.dumps({"name": person})),
        call(f"b{number}", "open_locker", json.dumps({"number": locker})),
    )
    return {
        "id": f"t{number}",
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": f"What does {person} have?"},
            {"role": "assistant", "content": "", "tool_calls": [calls[0]]},
            {"role": "tool", "tool_call_id": f"a{number}", "content": str(locker)},
            {"role": "assistant", "content": "", "tool_calls": [calls[1]]},
            {"role": "tool", "tool_call_id": f"b{number}", "content": item},
            {"role": "assistant", "content": item},
        ],
    }


PEOPLE = [("kalo", 3, "tode"), ("bemi", 7, "sup"), ("nari", 5, "ligo"), ("fute", 2, "wab")]


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    path = tmp_path / "trajectories.jsonl"
    write_jsonl(path, [trajectory(i, *about) for i, about in enumerate(PEOPLE)])
    return path


@pytest.fixture
def extracted(cli: Cli, trajectories: Path, tmp_path: Path) -> list[Any]:
    """Extracts; returns the end of every further command line."""
    place = ["--workspace", tmp_path / "ws"]
    done = cli("pivots", "extract", trajectories, "--out", "errands", "--domain", "errands", *place)
    assert done.code == 0, done.stderr
    return place


def folder(tmp_path: Path) -> Path:
    return tmp_path / "ws" / "pivots" / "errands"


def passed(candidate_id: str, *, learned: bool = False) -> int:
    """Of eight answers at a turn of the trajectories: all, one, or none are right."""
    number, turn = candidate_id.removeprefix("t").split("#")
    return {0: 8, 1: 8 if learned and number == "1" else 1 + int(number), 2: 0}[int(turn)]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts answers with verdicts into the store in place of a model's."""

    def prepare(*, learned: bool = False) -> None:
        def run(spec: RolloutSpec, workspace: Workspace, **_: Any) -> dict[str, Any]:
            assert isinstance(spec.prompts, tuple)
            samples = [
                Sample(
                    sample_id=f"{prompt.prompt_id}/{number}@{spec.seed}",
                    prompt_id=prompt.prompt_id,
                    group_id=prompt.prompt_id,
                    generation_index=number,
                    domain=prompt.routing["domain"],
                    teacher_id="",
                    policy_version_min=0,
                    policy_version_max=0,
                    tokens=np.array([1, 2], np.int32),
                    prompt_length=1,
                    loss_mask=np.array([False, True]),
                    behavior_logprobs=np.zeros(1, np.float32),
                    finish_reason="stop",
                    reward=float(number < passed(prompt.prompt_id, learned=learned)),
                    verdict="ok",
                    verifier="action/1",
                )
                for prompt in spec.prompts
                for number in range(spec.samples)
            ]
            with StoreWriter(workspace.rollouts(spec.name), {"tokenizer": "t"}) as writer:
                writer.commit(samples)
            return {}

        monkeypatch.setattr(profiling, "run_rollout", run)

    return prepare


@pytest.fixture
def profiled(
    cli: Cli, extracted: list[Any], answers: Callable[..., None], write_tiny_model: Callable[..., Path], tmp_path: Path
) -> list[Any]:
    write_tiny_model(tmp_path / "ws" / "checkpoints" / "student", max_position_embeddings=1024)
    answers()
    done = cli("pivots", "profile", "errands", "--model", "student", *extracted, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["states"] == {"ok": 96}
    return extracted


# ------------------------------------------------------------------------------------------------------------- extract


def test_every_turn_becomes_a_candidate_and_is_counted(cli: Cli, extracted: list[Any], tmp_path: Path) -> None:
    found = [row for _, row in read_jsonl(folder(tmp_path) / "candidates.jsonl")]
    assert [row["candidate_id"] for row in found] == [f"t{i}#{turn}" for i in range(4) for turn in range(3)]
    assert {row["domain"] for row in found} == {"errands"}
    manifest = json.loads((folder(tmp_path) / "manifest.json").read_text())
    assert (manifest["trajectories"], manifest["turns"], manifest["skipped"]["count"]) == (4, 12, 0)
    assert manifest["by"]["action"] == {"function_call": 8, "message": 4}
    assert manifest["by"]["depth"] == {"0": 4, "1": 4, "2": 4}
    assert manifest["by"]["tool"] == {"(message)": 4, "find_person": 4, "open_locker": 4}


def test_extracting_the_same_again_changes_nothing_and_something_else_is_refused(
    cli: Cli, extracted: list[Any], trajectories: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in folder(tmp_path).glob("*.json*")}
    again = ["pivots", "extract", trajectories, "--out", "errands", *extracted]
    assert json.loads(cli(*again, "--domain", "errands", "--json").stdout)["candidates"] == 12
    assert {path.name: path.read_bytes() for path in folder(tmp_path).glob("*.json*")} == before
    other = cli(*again)
    assert (other.code, other.stdout) == (2, "")
    assert "other trajectories or options have this name; use another name" in other.stderr


def test_a_turn_that_is_no_candidate_is_in_the_audit_with_its_reason(
    cli: Cli, tmp_path: Path, trajectories: Path
) -> None:
    rows = [trajectory(i, *about) for i, about in enumerate(PEOPLE[:2])]
    rows[1]["messages"][3]["tool_calls"][0]["function"]["arguments"] = '{"number": '
    write_jsonl(trajectories, rows)
    done = cli("pivots", "extract", trajectories, "--out", "errands", "--workspace", tmp_path / "ws", "--json")
    document = json.loads(done.stdout)
    audit = [row for _, row in read_jsonl(folder(tmp_path) / "skipped.jsonl")]
    assert document["turns"] == document["candidates"] + document["skipped"] == 6
    assert len(audit) == document["skipped"] >= 1
    assert document["by"]["skip_reason"]["invalid_arguments"] == 1
    assert {"trajectory_id": "t1", "turn": 1, "reason": "invalid_arguments"}.items() <= audit[0].items()
    assert audit[0]["place"] == f"{trajectories}:2"


def test_how_answers_are_compared_goes_from_the_extraction_into_the_rows(
    cli: Cli, trajectories: Path, tmp_path: Path
) -> None:
    place = ["--workspace", tmp_path / "ws"]
    options = ["--match", "content=words", "--match", "threshold=0.8"]
    assert cli("pivots", "extract", trajectories, "--out", "errands", *options, *place).code == 0
    for format in ("rl", "nemo-gym"):
        out = tmp_path / f"{format}.jsonl"
        assert cli("pivots", "export", "errands", "--format", format, "--all", "--out", out, *place).code == 0
    prompts = read_prompts(tmp_path / "rl.jsonl", ())
    assert [p.reference["match"] for p in prompts] == [{"content": "words", "threshold": 0.8}] * 12
    states = [run_check(VERIFIERS["action"], Attempt(text, prompts[2].reference)).reward for text in ("tode", "sup")]
    assert states == [1, 0]
    assert not any("match" in row["expected_action"] for _, row in read_jsonl(tmp_path / "nemo-gym.jsonl"))


def test_rows_that_cannot_be_read_stop_nothing_and_are_told(cli: Cli, trajectories: Path, tmp_path: Path) -> None:
    turn = '{"role": "user", "content": "q"%s}, {"role": "assistant", "content": "a"%s}'
    rows = [
        '{"messages": [{"role": "exit"}]}',
        '{"input": [{"type": "web_search_call"}]}',
        '{"id": "a\\ud800", "messages": [%s]}' % (turn % ("", "")),
        '{"messages": [%s]}' % (turn % (', "x\\ud800": 1', "")),
        '{"messages": [%s]}' % (turn % ("", ', "error": "bad \\ud800"')),
    ]
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(rows) + "\n" + trajectories.read_text())
    done = cli("pivots", "extract", path, "--out", "errands", "--workspace", tmp_path / "ws", "--json")
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["candidates"], report["skipped"]) == (13, 1)
    assert report["by"]["unread_trajectories"] == {"malformed": 1, "no_turn": 2}
    skipped = [row for _, row in read_jsonl(folder(tmp_path) / "skipped.jsonl")]
    assert [(row["place"].rpartition(":")[2], row["reason"]) for row in skipped] == [
        ("1", "no_turn"),
        ("2", "no_turn"),
        ("3", "malformed"),
        ("5", "errored"),
    ]
    assert [skipped[2]["trajectory_id"], skipped[3]["detail"]] == ["a?", "bad ?"]
    notes = [row["detail"] for _, row in read_jsonl(folder(tmp_path) / "notes.jsonl")]
    assert "x? of a message (1)" in notes


def test_rows_may_be_compared_as_nemo_gym_does(cli: Cli, trajectories: Path, tmp_path: Path) -> None:
    place = ["--workspace", tmp_path / "ws"]
    assert cli("pivots", "extract", trajectories, "--out", "errands", "--compat", "nemo-gym", *place).code == 0
    for format in ("rl", "nemo-gym"):
        out = tmp_path / f"{format}.jsonl"
        assert cli("pivots", "export", "errands", "--format", format, "--all", "--out", out, *place).code == 0
    prompts = read_prompts(tmp_path / "rl.jsonl", ())
    assert {p.reference["compat"] for p in prompts} == {"nemo-gym"}
    expected = prompts[0].reference
    call = f'<tool_call>{{"name": "{expected["name"]}", "arguments": {expected["arguments"]}}}</tool_call>'
    # A second call beside the expected one: theirs passes it, ours does not.
    theirs, ours = (
        run_check(VERIFIERS["action"], Attempt(call + call, {k: v for k, v in expected.items() if k not in drop}))
        for drop in ((), ("compat",))
    )
    assert (theirs.reward, ours.reward) == (1, 0)
    assert not any("compat" in row["expected_action"] for _, row in read_jsonl(tmp_path / "nemo-gym.jsonl"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("contents=words", "--match: 'match' has an unknown option 'contents'"),
        ("threshold=7", "--match: 'match'"),
        ("threshold=x", "--match: "),
        ("words", "--match words: write KEY=VALUE"),
        ("threshold=" + "[" * 200 + "]" * 200, "--match threshold: nested deeper than 100 levels"),
        ("threshold=" + "[" * 100_000, "--match threshold: nested too deep"),
        ("threshold=NaN", "--match: "),
    ],
)
def test_an_option_of_the_comparison_that_nobody_knows_is_refused(
    cli: Cli, trajectories: Path, tmp_path: Path, option: str, message: str
) -> None:
    done = cli("pivots", "extract", trajectories, "--out", "x", "--match", option, "--workspace", tmp_path / "ws")
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no candidate"), ('{"messages": [{"role": "user", "content": "x"}]}\n', "holds no candidate")],
)
def test_a_file_without_a_candidate_is_an_error_and_leaves_no_set(
    cli: Cli, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    done = cli("pivots", "extract", tmp_path / "t.jsonl", "--out", "errands", "--workspace", tmp_path / "ws")
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr
    assert not list(folder(tmp_path).glob("*.json*"))


# -------------------------------------------------------------------------------------------- profile, select, export


def test_a_profile_says_what_the_model_got_at_every_turn(cli: Cli, profiled: list[Any], tmp_path: Path) -> None:
    rows = [row for _, row in read_jsonl(folder(tmp_path) / "profiles" / "student" / "profile.jsonl")]
    assert {row["candidate_id"]: row["mean"] for row in rows} == {
        f"t{i}#{turn}": passed(f"t{i}#{turn}") / 8 for i in range(4) for turn in range(3)
    }
    assert all(row["variance"] == pytest.approx(row["mean"] * (1 - row["mean"])) for row in rows)
    again = json.loads(cli("pivots", "profile", "errands", "--model", "student", *profiled, "--json").stdout)
    assert (again["candidates"], again["rollouts"], again["mixed"]) == (12, 96, 4)


def test_what_is_selected_can_be_exported_and_read(cli: Cli, profiled: list[Any], tmp_path: Path) -> None:
    done = cli("pivots", "select", "errands", "--lambda-diff", 0.5, *profiled, "--json")
    assert (done.code, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["dropped"] == {"all_fail": 4, "all_pass": 4, "too_easy": 1}
    assert (report["kept"], report["keep_rate_pct"], report["alarm"], report["lambda_diff"]) == (3, 25.0, None, 0.5)
    assert report["sensitivity"] == {"0.4": 3, "0.5": 3, "0.6": 4, "0.7": 4, "0.8": 4, "0.9": 4}
    assert report["profile"]["config"]["rollouts"] == 8
    kept = [row for _, row in read_jsonl(folder(tmp_path) / "selected.jsonl")]
    assert [(row["candidate_id"], row["mean"]) for row in kept] == [("t0#1", 0.125), ("t1#1", 0.25), ("t2#1", 0.375)]
    assert all(row["mean_low"] < row["mean"] < row["mean_high"] for row in kept)
    out = tmp_path / "pivots.jsonl"
    assert cli("pivots", "export", "errands", "--format", "rl", "--out", out, *profiled).code == 0
    prompts = read_prompts(out, ("domain",))
    assert [(p.prompt_id, p.verifier, p.reference["name"]) for p in prompts] == [
        (f"t{i}#1", "action", "open_locker") for i in range(3)
    ]
    gym = tmp_path / "gym.jsonl"
    assert cli("pivots", "export", "errands", "--format", "nemo-gym", "--out", gym, *profiled).code == 0
    rows = [row for _, row in read_jsonl(gym)]
    assert [validate_row(row) for row in rows] == [[], [], []]
    assert [row["pass_rate"] for row in rows] == [0.125, 0.25, 0.375]


def test_an_empty_selection_is_no_export(cli: Cli, profiled: list[Any], tmp_path: Path) -> None:
    done = cli("pivots", "select", "errands", "--lambda-diff", 0.1, *profiled)
    assert done.code == 0
    assert done.stderr.startswith("alarm: none of 12 candidates")
    done = cli("pivots", "export", "errands", "--format", "rl", "--out", tmp_path / "p.jsonl", *profiled)
    assert done.code == 2
    assert "the selection is empty" in done.stderr


def test_random_turns_are_the_control_and_need_no_selection(cli: Cli, extracted: list[Any], tmp_path: Path) -> None:
    drawn = []
    for seed in (0, 0, 1):
        out = tmp_path / "random.jsonl"
        done = cli(
            "pivots", "export", "errands", "--format", "rl", "--random", 5, "--seed", seed, "--out", out, *extracted
        )
        assert done.code == 0, done.stderr
        drawn.append([prompt.prompt_id for prompt in read_prompts(out, ("domain",))])
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 5


def test_too_large_a_share_raises_an_alarm_but_is_no_failure(cli: Cli, profiled: list[Any], tmp_path: Path) -> None:
    path = folder(tmp_path) / "profiles" / "student"
    rows = [row | {"rewards": [1.0] + [0.0] * 7} for _, row in read_jsonl(path / "profile.jsonl")]
    write_jsonl(path / "profile.jsonl", rows)
    document = json.loads((path / "profile.json").read_text())
    from mopdctl.files import file_digest, write_json

    write_json(path / "profile.json", document | {"digest": file_digest(path / "profile.jsonl")})
    done = cli("pivots", "select", "errands", "--lambda-diff", 0.6, *profiled, "--json")
    assert done.code == 0
    assert json.loads(done.stdout)["keep_rate_pct"] == 100
    assert done.stderr.startswith("alarm: 100.0 % of the candidates are advantageous")


def test_a_newer_profile_drops_what_was_learned_since(
    cli: Cli, profiled: list[Any], answers: Callable[..., None], write_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "ws" / "checkpoints" / "policy", noise=0.1, max_position_embeddings=1024)
    answers(learned=True)
    assert cli("pivots", "profile", "errands", "--model", "policy", *profiled).code == 0
    choice = ["pivots", "select", "errands", "--lambda-diff", 0.6, *profiled]
    assert "choose with --profile (policy, student)" in cli(*choice).stderr
    done = cli(*choice, "--profile", "student", "--fresh", "policy", "--json")
    report = json.loads(done.stdout)
    assert (report["kept"], report["dropped"]["fresh_all_pass"]) == (3, 1)
    assert (report["profile"]["label"], report["fresh"]["label"]) == ("student", "policy")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["select", "errand", "--lambda-diff", 0.6], "no candidates there; did you mean 'errands'?"),
        (["select", "errands", "--lambda-diff", 0.6], "has no finished profiles; make one with"),
        (["select", "errands", "--lambda-diff", 1.5], "--lambda-diff 1.5: a mean reward"),
        (["select", "errands"], "Missing option '--lambda-diff'"),
        (["profile", "errands", "--model", "nobody"], "model 'nobody'"),
        (
            ["profile", "errands", "--model", "nobody", "--temperature", 0],
            "--temperature 0.0: must be a number above 0",
        ),
        (["export", "errands", "--format", "rl", "--out", "p.jsonl"], "nothing is selected yet"),
        (["export", "errands", "--format", "rl", "--out", "p.csv", "--all"], "give it the ending .jsonl"),
        (["export", "errands", "--format", "rl", "--out", "p.jsonl", "--batches"], "are for --format nemo-gym"),
        (["export", "errands", "--format", "rl", "--out", "p.jsonl", "--all", "--random", 3], "give one of them"),
        (["export", "../x", "--format", "rl", "--out", "p.jsonl"], "use 1-100 letters"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    cli: Cli, extracted: list[Any], command: list[Any], message: str
) -> None:
    done = cli("pivots", *command, *extracted)
    assert (done.code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.replace("│", " ").split())


# ------------------------------------------------------------------------------------------------------- with a model


def wait_for(process: "subprocess.Popen[bytes]", ready: Callable[[], bool]) -> bool:
    """Whether the process still ran when what is waited for came to be."""
    while process.poll() is None:
        if ready():
            return True
        time.sleep(0.005)
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_profile_that_was_killed_time_and_again_equals_the_straight_one_to_the_byte(tmp_path: Path) -> None:
    import mopdctl.world
    from mopdctl.world.data import generate
    from mopdctl.world.trajectories import trajectory_row

    examples = islice(generate("tools", "train", seed=0), 24)
    write_jsonl(tmp_path / "t.jsonl", [trajectory_row(example, f"t{i}") for i, example in enumerate(examples)])

    def command(workspace: str, *words: object) -> list[str]:
        place = ("--workspace", tmp_path / workspace)
        return [sys.executable, "-m", "mopdctl", "pivots", *map(str, (*words, *place))]

    def profile(workspace: str) -> list[str]:
        options = ("--model", "base", "--max-new-tokens", 48, "--batch-size", 32, "--rollouts", 8)
        return command(workspace, "profile", "set", *options)

    for workspace in ("straight", "killed"):
        base = Path(mopdctl.world.__file__).parent / "base"
        shutil.copytree(base, tmp_path / workspace / "checkpoints" / "base")
        subprocess.run(command(workspace, "extract", tmp_path / "t.jsonl", "--out", "set"), check=True)
    subprocess.run(profile("straight"), check=True)
    place = tmp_path / "killed" / "pivots" / "set" / "profiles" / "base"
    log = tmp_path / "killed" / "rollouts" / "set.profile-base" / "wal"

    def logged(size: int) -> Callable[[], bool]:
        return lambda: log.is_dir() and sum(path.stat().st_size for path in log.iterdir()) > size

    kills = 0
    moments = [place.is_dir, logged(0), logged(20_000), logged(60_000), lambda: (place / "profile.jsonl").is_file()]
    for ready in moments:
        process = subprocess.Popen(profile("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if wait_for(process, ready):
            os.kill(process.pid, signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
    subprocess.run(profile("killed"), check=True)
    assert kills >= 4
    straight = tmp_path / "straight" / "pivots" / "set" / "profiles" / "base"
    for name in ("profile.jsonl", "profile.json", "config.json"):
        assert (place / name).read_bytes() == (straight / name).read_bytes(), name
    document = json.loads((place / "profile.json").read_text())
    assert document["states"]["ok"] > 0
    assert sum(document["states"].values()) == 24 * 8
