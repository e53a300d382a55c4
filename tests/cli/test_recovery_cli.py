"""`mopdctl recovery` as its users run it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mopdctl.evals.scores import write_scores
from mopdctl.files import write_json, write_jsonl
from mopdctl.records import Score
from mopdctl.runs import Workspace

GOLDEN = Path(__file__).parent.parent / "golden" / "recovery"
NEMOTRON = ["--scores", str(GOLDEN / "nemotron_3_ultra_table5.csv"), "--before", "rlvr", "--after", "mopd2"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mopdctl", "recovery", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One benchmark of 40 documents: 10 right before, 25 after, 30 by the teacher, 20 by a merge."""
    space = Workspace(tmp_path_factory.mktemp("recovery"))
    identity = {"version": 1, "num_fewshot": 0, "prompt": "p", "generation": {}}
    for name, right in [("rlvr", 10), ("mopd", 25), ("math", 30), ("merge", 20)]:
        score = Score("gsm8k", "acc", "none", True, 100 * right / 40, None, 40, None, identity)
        samples: list[dict[str, Any]] = [
            {"benchmark": "gsm8k", "metric": "acc", "filter": "none", "doc_hash": f"{i}", "value": 100.0 * (i < right)}
            for i in range(40)
        ]
        write_scores(space.evaluation(name), name, [score], samples)
    teacher = {"model": "math", "kind": "rl", "domains": ["math"], "benchmarks": ["gsm8k"], "eval": "math"}
    write_json(space.checkpoint("mopd") / "card.json", {"teachers": {"math": teacher}})
    return space.root


def test_a_published_table_as_text_markdown_and_json() -> None:
    text, markdown, document = (run(*NEMOTRON, "--teacher", "teacher", *more) for more in ([], ["--md"], ["--json"]))
    assert [done.returncode for done in (text, markdown, document)] == [0, 0, 0]
    assert [done.stderr for done in (text, markdown, document)] == ["", "", ""]
    assert "172.7  ok" in text.stdout
    assert "| 172.7 | ok |" in markdown.stdout
    assert json.loads(document.stdout)["rows"][0]["recovery_pct"] == 172.7
    assert json.loads(document.stdout)["pooled"]["recovery_pct"] == 77.9


def test_min_recovery_prints_the_result_and_then_ends_with_3() -> None:
    assert run(*NEMOTRON, "--min-recovery", 77.9).returncode == 0
    failed = run(*NEMOTRON, "--json", "--min-recovery", 78)
    assert failed.returncode == 3
    assert failed.stderr == "error: pooled recovery is 77.9 %; --min-recovery asks for 78 %\n"
    assert json.loads(failed.stdout)["pooled"]["n_ok"] == 11


def test_no_ok_row_counts_as_below() -> None:
    done = run(*NEMOTRON, "--teacher", "rlvr", "--min-recovery", 0)
    assert done.returncode == 3
    assert done.stderr == "error: no pooled recovery, because no row is ok; --min-recovery asks for 0 %\n"


def test_evaluations_with_intervals_and_a_control_twice_the_same_bytes(workspace: Path) -> None:
    command = ("--workspace", workspace, "--before", "rlvr", "--after", "mopd", "--control", "merge", "--json")
    first, second = run(*command), run(*command)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == second.stdout
    document = json.loads(first.stdout)
    row = document["rows"][0]
    assert (row["recovery_pct"], row["gain"], row["gap"], row["status"]) == (75.0, 37.5, 50.0, "ok")
    assert row["ci_low"] < 75 < row["ci_high"] <= 100
    assert row["gain_ci_low"] < 37.5 < row["gain_ci_high"]
    assert (document["pooled"]["ci_low"], document["pooled"]["ci_high"]) == (row["ci_low"], row["ci_high"])
    control = document["controls"][0]
    assert (control["recovery_pct"], control["after_minus_control"]) == (50.0, 12.5)
    assert control["ci_low"] < 12.5 < control["ci_high"]
    assert run(*command, "--seed", 1).stdout != first.stdout


def test_what_overlap_said_of_the_student_stands_below_the_table(workspace: Path) -> None:
    space = Workspace(workspace)
    write_json(space.checkpoint("rlvr") / "card.json", {"digest": "d1"})

    def report(digest: str, share: float | None) -> dict[str, Any]:
        estimate = None if share is None else {"mean": share, "standard_error": 0.1}
        student = {"pass_at_1": estimate, "pass_at_k": estimate and {"mean": 0.75}, "k": 4}
        math = {"student": student, "advice": {"choice": "exact", "reason": ""}}
        return {"student": {"digest": digest}, "teachers": {"math": math, "another": math}}

    write_json(space.run("overlap") / "of-another-student.json", report("d2", 0.125))
    arguments = ["--before", "rlvr", "--after", "mopd", "--workspace", workspace, "--json"]
    assert json.loads(run(*arguments).stdout)["before_training"] == {}
    write_json(space.run("overlap") / "rlvr.json", report("d1", 0.25))
    document = json.loads(run(*arguments).stdout)
    expected = {"pass_at_1": 0.25, "pass_at_k": 0.75, "k": 4, "advice": "exact", "report": "rlvr"}
    assert document["before_training"] == {"math": expected}
    line = "rlvr before training, math: pass@1 25 %, pass@4 75 %, advice exact"
    assert line in document["notes"]
    assert line in run(*arguments[:-1]).stdout
    write_json(space.run("overlap") / "rlvr.json", report("d1", None))
    assert json.loads(run(*arguments).stdout)["before_training"]["math"]["pass_at_1"] is None
    for path in (space.run("overlap") / "rlvr.json", space.run("overlap") / "of-another-student.json"):
        path.unlink()


def quantize(workspace: Path, name: str, right: range) -> None:
    """Evaluation `name` of the checkpoint mopd after quantization: right on these of the 40 documents."""
    identity = {"version": 1, "num_fewshot": 0, "prompt": "p", "generation": {}}
    score = Score("gsm8k", "acc", "none", True, 100 * len(right) / 40, None, 40, None, identity)
    samples: list[dict[str, Any]] = [
        {"benchmark": "gsm8k", "metric": "acc", "filter": "none", "doc_hash": f"{i}", "value": 100.0 * (i in right)}
        for i in range(40)
    ]
    write_scores(Workspace(workspace).evaluation(name), name, [score], samples)


def test_retention_of_a_quantized_checkpoint_stands_under_the_table(workspace: Path) -> None:
    quantize(workspace, "mopd-nvfp4", range(4, 26))  # 25 right before: 4 of them lost, another one found
    for name, length in (("mopd", 100), ("mopd-nvfp4", 106)):
        row = {
            "doc_hash": "0",
            "filter": "none",
            "arguments": {"gen_args_0": {"arg_0": "q", "arg_1": {"until": []}}},
            "resps": [["x" * length]],
        }
        folder = Workspace(workspace).evaluation(name) / "lm_eval"
        write_jsonl(folder / "samples_gsm8k_2026-11-28T23-23-30.073564.jsonl", [row])
    command = ["--workspace", workspace, "--before", "rlvr", "--after", "mopd", "--quantized", "mopd-nvfp4"]
    text, markdown, document = (run(*command, *more) for more in ([], ["--md"], ["--json"]))
    assert [done.stderr for done in (text, markdown, document)] == ["", "", ""]
    found = json.loads(document.stdout)
    row = found["retention"]["rows"][0]
    assert (row["full"], row["quantized"], row["retention_pct"], row["status"]) == (62.5, 55.0, 88.0, "ok")
    assert (row["test"], row["worse"], row["better"], row["p_value"]) == ("mcnemar", 4, 1, 0.375)
    assert row["ci_low"] < 88 < row["ci_high"]
    assert row["length_ratio"] == 1.06
    without = json.loads(run(*command[:-2], "--json").stdout)
    assert without["retention"] is None
    assert {key: value for key, value in found.items() if key != "retention"} == {
        key: value for key, value in without.items() if key != "retention"
    }
    assert "mopd-nvfp4: median retention 88.0 % (rows: 1)" in text.stdout
    assert "| mopd-nvfp4 | gsm8k | acc,none | 40 |" in markdown.stdout
    assert text.stdout.startswith(run(*command[:-2]).stdout.rstrip("\n"))


def test_a_quantized_column_of_a_table_is_no_control() -> None:
    done = run(*NEMOTRON, "--teacher", "teacher", "--control", "sft", "--quantized", "mopd1", "--json")
    document = json.loads(done.stdout)
    assert [control["name"] for control in document["controls"]] == ["sft"]
    rows = document["retention"]["rows"]
    assert (len(rows), rows[0]["retention_pct"], rows[0]["p_value"]) == (11, 94.1, None)  # 50.8 of 54.0
    assert document["pooled"]["recovery_pct"] == 77.9


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--scores", "absent.csv"], "absent.csv: no such file; check the path"),
        ([*NEMOTRON[:2], "--before", "rlrv", "--after", "mopd2"], "no column 'rlrv'; did you mean 'rlvr'?"),
        ([*NEMOTRON, "--control", "merge"], "no column 'merge'; columns: benchmark, sft, rlvr, mopd1, mopd2, teacher"),
        ([*NEMOTRON, "--json", "--md"], "--json and --md: choose one"),
        ([*NEMOTRON, "--min-gap", "nan"], "--min-gap needs a number of 0 or more"),
        (["--before", "rlvr"], "--before and --after: name two evaluations, or pass --scores FILE"),
        (
            ["--before", "rlvr", "--after", "mopd3"],
            "evals/mopd3: no evaluation of that name (there are: math, merge, mopd",
        ),
        (
            ["--before", "rlvr", "--after", "merge"],
            "checkpoints/merge/card.json: names no teachers; pass --teachers FILE",
        ),
        (["--before", "../rlvr", "--after", "mopd"], "name '../rlvr': use 1-100 letters"),
        (["--before", "rlvr", "--after", "mopd", "--quantized", "no"], "evals/no: no evaluation of that name"),
        ([*NEMOTRON, "--quantized", "nvfp4"], "no column 'nvfp4'"),
    ],
)
def test_bad_input_is_one_line_and_2(workspace: Path, arguments: list[str], problem: str) -> None:
    done = run("--workspace", workspace, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_begins_with_one_sentence_and_shows_three_examples() -> None:
    shown = run("--help").stdout
    assert "Show what each teacher passed on: (after - before) / (teacher - before)" in shown
    assert shown.count("  mopdctl recovery --") == 3
