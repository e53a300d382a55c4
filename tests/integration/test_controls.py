"""`distill --controls`: what a run has to beat, on the budget that it has."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from mopdctl.config.lora import Lora
from mopdctl.config.teachers import load_teachers
from mopdctl.files import read_jsonl, write_json, write_jsonl
from mopdctl.pipeline.controls import controls_of
from mopdctl.runs import Workspace, read_card, read_metrics
from mopdctl.store.store import Store

Cli = Callable[..., SimpleNamespace]
pytestmark = pytest.mark.slow  # every test trains

Document = Callable[..., dict[str, Any]]
KINDS = ["merge", "linear", "ties", "seqkd", "only-arithmetic", "only-structured", "only-tools", "rl"]


@pytest.fixture
def teachers(tiny: Path, tmp_path: Path, teachers_document: Document) -> Path:
    """A `teachers.yaml` beside prompts that anyone may get right: two steps of six prompts, two answers each."""
    rows = [row for _, row in read_jsonl(tiny / "prompts.jsonl")]
    bounds = [{"max": 99}, {"min": 1}]
    write_jsonl(
        tmp_path / "prompts.jsonl",
        [
            row
            | {"verifier": "constraints"}
            | {"reference": {"constraints": [{"kind": "letter", "letter": "e", **bounds[i % 2]}]}}
            for i, row in enumerate(rows)
        ],
    )
    train = {"steps": 2, "batch_size": 6, "samples_per_prompt": 2, "max_new_tokens": 48}
    write_json(tmp_path / "teachers.yaml", teachers_document("run", **train) | {"prompts": "prompts.jsonl"})
    return tmp_path / "teachers.yaml"


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text("utf-8"))
    change(document)
    write_json(path, document)


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that was made, with its time."""
    found = (p for kind in ("checkpoints", "runs", "rollouts") for p in (folder / kind).rglob("*"))
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in found if p.is_file() and p.name != ".lock"}


def test_all_controls_are_made_on_the_budget_of_the_run_and_made_once(
    cli: Cli, tiny: Path, teachers: Path, tmp_path: Path
) -> None:
    place = Workspace(tmp_path / "w")
    arguments = ["distill", "--teachers", teachers, "--workspace", place.root, "--controls", "--json"]
    done = cli(*arguments)
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert list(document["controls"]) == [f"run.{kind}" for kind in KINDS]
    assert not any(what.startswith("not made") for what in document["controls"].values())
    cards = {kind: read_card(place.checkpoint(f"run.{kind}")) for kind in KINDS}
    assert {kind: cards[kind]["algorithm"] for kind in ("seqkd", "only-tools")} == {
        "seqkd": "seqkd",
        "only-tools": "mopd/sampled",
    }
    student = load_file(tiny / "models" / "student" / "model.safetensors")
    weights = {kind: load_file(place.checkpoint(f"run.{kind}") / "model.safetensors") for kind in KINDS}
    name = "model.layers.0.mlp.up_proj.weight"
    assert len({tuple(w[name].flatten().tolist()) for w in [student, *weights.values()]}) == len(KINDS) + 1
    # the run: two steps of twelve answers. SeqKD and the students of one teacher: the same; so does RL, in groups
    for kind in ("seqkd", "only-arithmetic", "only-structured", "only-tools"):
        assert [row["step"] for row in read_metrics(place.run(f"run.{kind}"))] == [0, 1]
    for kind in ("only-arithmetic", "only-structured", "only-tools", "rl"):
        store = Store(place.rollouts(f"run.{kind}"))
        assert Counter(s.policy_version_min for s in store.scan()) == {0: 12, 1: 12}
        if kind != "rl":
            assert {s.teacher_id for s in store.scan()} == {kind.removeprefix("only-")}
    assert {s.reward for s in Store(place.rollouts("run.rl")).scan()} <= {0.0, 1.0}
    assert len({s.group_id for s in Store(place.rollouts("run.rl")).scan()}) == 12
    before = files(place.root)
    again = cli(*arguments)
    assert json.loads(again.stdout) == document
    assert files(place.root) == before


def test_a_prompt_without_a_verifier_takes_the_control_by_rl_away_and_a_dry_run_says_so(
    cli: Cli, teachers: Path, tmp_path: Path
) -> None:
    rows = [row for _, row in read_jsonl(tmp_path / "prompts.jsonl")]
    del rows[4]["verifier"], rows[4]["reference"]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    place = tmp_path / "w"
    done = cli("distill", "--teachers", teachers, "--workspace", place, "--controls", "--dry-run", "--json")
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)["controls"]
    assert list(found) == [f"run.{kind}" for kind in KINDS]
    assert found["run.rl"] == f"not made: {tmp_path / 'prompts.jsonl'}:5 names no verifier"
    assert [name for name, what in found.items() if what.startswith("not made")] == ["run.rl"]
    assert not place.exists()


def test_scales_of_merges_are_chosen_where_there_are_held_out_prompts(cli: Cli, teachers: Path, tmp_path: Path) -> None:
    edit(teachers, lambda d: d["train"].update(eval_prompts="prompts.jsonl", eval_size=1))
    done = cli("distill", "--teachers", teachers, "--workspace", tmp_path / "w", "--controls", "--dry-run", "--json")
    found = json.loads(done.stdout)["controls"]
    assert found["run.ties"] == "weights merged by ties, scales chosen on held-out prompts"


def test_teachers_without_weights_or_with_prompts_of_their_own_have_the_other_controls(
    cli: Cli, teachers: Path, tmp_path: Path
) -> None:
    rows = [row for _, row in read_jsonl(tmp_path / "prompts.jsonl")]
    own = [{k: v for k, v in row.items() if k != "domain"} for row in rows if row["domain"] == "tools"]
    write_jsonl(tmp_path / "own.jsonl", own)
    write_jsonl(tmp_path / "prompts.jsonl", [row for row in rows if row["domain"] != "tools"])
    write_jsonl(tmp_path / "said.jsonl", [{"prompt_id": f"structured/{i}", "answer": "be"} for i in range(8)])
    edit(teachers, lambda d: d["teachers"]["tools"].update(prompts="own.jsonl"))
    box = {"domains": ["structured"], "gives": "answers", "answers": "said.jsonl"}
    edit(teachers, lambda d: d["teachers"].update(structured=box))
    place = Workspace(tmp_path / "w")
    controls = {c.name: c for c in controls_of(load_teachers(teachers), place, base=tmp_path)}
    assert list(controls) == [f"run.{kind}" for kind in KINDS]
    for kind in ("merge", "linear", "ties"):
        assert controls[f"run.{kind}"].run is None
        assert controls[f"run.{kind}"].missing.startswith("teacher 'structured': is known by its answers alone; ")
    assert controls["run.seqkd"].what == "SFT on the teachers' answers, without structured"
    for kind in ("seqkd", "only-structured", "only-tools", "rl"):
        made = controls[f"run.{kind}"].run
        assert made is not None
        assert made(lambda step, row: None) == place.checkpoint(f"run.{kind}")


def test_a_control_that_would_be_another_comparison_is_not_made(teachers: Path, tmp_path: Path) -> None:
    def missing(**changes: Any) -> dict[str, str]:
        config = load_teachers(teachers)
        config = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        return {c.name: c.missing for c in controls_of(config, Workspace(tmp_path / "w"), base=tmp_path) if not c.run}

    assert missing() == {}
    assert list(missing(lora=Lora())) == ["run.rl"]
    assert "`train.lora`" in missing(lora=Lora())["run.rl"]
