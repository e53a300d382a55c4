"""`distill` on the command line: every option reaches the run; nonsense ends in one line before anything is written."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from mopdctl.cli.distill import distill
from mopdctl.config.teachers import TeachersFile, load_teachers
from mopdctl.files import read_json, read_jsonl, write_json, write_jsonl
from mopdctl.runs import read_metrics

Cli = Callable[..., SimpleNamespace]
Document = dict[str, Any]
Change = Callable[[Document], Any]


@pytest.fixture
def folder(tmp_path: Path, tiny: Path, teachers_document: Callable[..., Document]) -> Path:
    """A folder with a good `teachers.yaml` for a case to spoil, and files that it may name."""
    rows = [row for _, row in read_jsonl(tiny / "prompts.jsonl")]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    write_jsonl(tmp_path / "own.jsonl", [row for row in rows if row["domain"] == "tools"])
    said = [{"prompt_id": f"structured/{i}", "answer": "x"} for i in range(8)]
    write_jsonl(tmp_path / "said.jsonl", said)
    write_jsonl(tmp_path / "few.jsonl", said[:3])
    document = teachers_document(top={"prompts": "prompts.jsonl"}, steps=1, batch_size=6, max_new_tokens=6)
    write_json(tmp_path / "teachers.yaml", document)
    return tmp_path


def edit(folder: Path, change: Change) -> None:
    document = json.loads((folder / "teachers.yaml").read_text("utf-8"))
    change(document)
    write_json(folder / "teachers.yaml", document)


# ------------------------------------------------------------------------------------------------------------- options

# Parameter of the command: (what is given, the key that it changes, the value that the run then has).
OPTIONS: dict[str, tuple[list[str], str, Any]] = {
    "name": (["--name", "other"], "name", "other"),
    "student": (["--student", "elsewhere"], "student", "elsewhere"),
    "prompts": (["--prompts", "/there/prompts.jsonl"], "prompts", "/there/prompts.jsonl"),
    "steps": (["--steps", "7"], "train.steps", 7),
    "batch_size": (["--batch-size", "5"], "train.batch_size", 5),
    "learning_rate": (["--learning-rate", "0.5"], "train.learning_rate", 0.5),
    "eval_every": (["--eval-every", "3"], "train.eval_every", 3),
    "warmup": (["--warmup", "4"], "train.warm_up.steps", 4),
    "student_quant": (["--student-quant", "nvfp4"], "train.student_quant", "nvfp4"),
    "seed": (["--seed", "9"], "train.seed", 9),
    "settings": (["--set", "train.trust_region=0.25"], "train.trust_region", 0.25),
}
NOT_OF_THE_RUN = {"teachers", "controls", "workspace", "as_json", "dry_run"}


def flat(document: Document, prefix: str = "") -> Document:
    found: Document = {}
    for key, value in document.items():
        inner = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def test_every_option_of_the_command_is_looked_at_here() -> None:
    assert inspect.signature(distill).parameters.keys() == OPTIONS.keys() | NOT_OF_THE_RUN


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_what_it_says_and_nothing_else(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    # ms-swift #9711, #9841: flags that are not passed through
    seen: list[TeachersFile] = []

    def plan(config: TeachersFile, *_: Any, **__: Any) -> Document:
        seen.append(config)
        return {}

    monkeypatch.setattr("mopdctl.distill.plan.plan_distill", plan)
    edit(folder, lambda d: d["train"].update(eval_prompts="dev.jsonl"))
    arguments, key, value = OPTIONS[option]
    ended = cli("distill", "--teachers", folder / "teachers.yaml", "--dry-run", *arguments)
    assert ended.code == 0, ended.stderr
    before = flat(load_teachers(folder / "teachers.yaml").model_dump(mode="json"))
    after = flat(seen[0].model_dump(mode="json"))
    assert after[key] == value != before.get(key)
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    defaults = {k for k in after if k.startswith("train.warm_up.")} if option == "warmup" else set()
    assert {key} <= changed <= {key} | defaults


def test_a_warm_up_of_the_command_line_is_that_of_the_file(cli: Cli, folder: Path) -> None:
    edit(
        folder,
        lambda d: d["train"].update(
            max_new_tokens=32, batch_size=12, warm_up={"wrong": "keep", "samples": 4, "steps": 1}
        ),
    )
    assert (
        cli("distill", "--teachers", folder / "teachers.yaml", "--workspace", folder / "one", "--warmup", 2).code == 0
    )
    edit(folder, lambda d: d["train"]["warm_up"].update(steps=2))
    assert cli("distill", "--teachers", folder / "teachers.yaml", "--workspace", folder / "two").code == 0
    one, two = (load_file(folder / w / "checkpoints" / "merged" / "model.safetensors") for w in ("one", "two"))
    assert all(one[name].equal(tensor) for name, tensor in two.items())
    for where in ("one", "two"):
        assert [row["step"] for row in read_metrics(folder / where / "runs" / "merged" / "warm-up")] == [0, 1]
        assert len(read_metrics(folder / where / "runs" / "merged")) == 1


@pytest.mark.parametrize(
    "train",
    [{"objective": "exact", "teacher_hidden": "store"}, {"lora": {"rank": 2}}, {"balance": {"mode": "observe"}}],
    ids=["store", "lora", "observe"],
)
def test_a_dry_run_writes_nothing_and_a_run_prints_one_document_and_a_line_a_step(
    cli: Cli, folder: Path, train: Document
) -> None:
    edit(folder, lambda d: d["train"].update(train))
    arguments = ["distill", "--teachers", folder / "teachers.yaml", "--workspace", folder / "w", "--json"]
    before = sorted(folder.rglob("*"))
    plan = cli(*arguments, "--dry-run")
    assert (plan.code, plan.stderr) == (0, "")
    assert sorted(folder.rglob("*")) == before
    done = cli(*arguments)
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads(plan.stdout) | {"checkpoint": str(folder / "w" / "checkpoints" / "merged")}
    assert done.stderr.count("\n") == 1
    assert "merged 1/1" in done.stderr
    assert read_json(folder / "w" / "checkpoints" / "merged" / "teacher_manifest.json")["teachers"].keys() == {
        "arithmetic",
        "structured",
        "tools",
    }


# ----------------------------------------------------------------------------------------------------------- bad input


def train(**values: Any) -> Change:
    return lambda document: document["train"].update(values)


def teacher(alias: str = "structured", **values: Any) -> Change:
    return lambda document: document["teachers"].setdefault(alias, {}).update(values)


def instead(alias: str = "structured", **values: Any) -> Change:
    return lambda document: document["teachers"].update({alias: {"domains": [alias], **values}})


def all_of(*changes: Change) -> Change:
    def change(document: Document) -> None:
        for one in changes:
            one(document)

    return change


def second(tier: int, **tiers: Any) -> Change:
    """Another teacher of arithmetic in a tier, and what `tiers:` says."""
    other = instead("other", model="nowhere", tier=tier)
    fix = teacher("other", domains=["arithmetic"])
    return all_of(other, fix, lambda d: d.update(tiers=tiers) if tiers else None)


# what is wrong: (what spoils the configuration, what the one line says)
CASES: dict[str, tuple[Change, str]] = {
    "a clip without an advantage": (train(objective="exact", advantage_clip=1.0), "`advantage_clip` needs"),
    "a direction without a vocabulary": (train(divergence="jsd"), "`divergence` needs `objective: exact` or `top_k`"),
    "hidden states for one token": (train(teacher_hidden="store"), "`teacher_hidden` needs"),
    "chunks of one token": (train(chunk_tokens=4), "`chunk_tokens` needs"),
    "no chunks": (train(objective="exact", chunk_tokens=0), "chunk_tokens"),
    "undecided teachers for one token": (train(entropy_aware_weight=0.1), "`entropy_aware_weight` needs"),
    "candidates of the whole": (train(objective="exact", top_k=4), "`top_k` needs `objective: top_k`"),
    "a support of the whole": (train(objective="exact", top_k_support="union"), "`top_k_support` needs"),
    # Rethinking-OPD: k = 1 renormalized is always 0
    "one candidate renormalized": (train(objective="top_k", top_k=1, top_k_tail="renormalize"), "is 0 whatever"),
    "no candidate": (train(objective="top_k", top_k=0), "top_k"),
    "a share without a mixture": (train(objective="exact", jsd_teacher_share=0.4), "needs `divergence: jsd`"),
    "all of the mixture": (train(objective="exact", divergence="jsd", jsd_teacher_share=1.0), "jsd_teacher_share"),
    "no trust": (train(trust_region=0.0), "trust_region"),
    "more than the teacher alone": (train(trust_region=1.5), "trust_region"),
    "a backward extrapolation": (train(extrapolation=-1.0), "extrapolation"),
    "a reference without a use": (train(reference="nowhere"), "`reference` needs"),
    "a reference that is not there": (train(reference="nowhere", extrapolation=1.5), "model 'nowhere'"),
    "rewards without groups": (train(outcome_weight=0.5), "`outcome_weight` needs"),
    "rewards for a divergence": (
        train(outcome_weight=0.5, samples_per_prompt=2, objective="exact"),
        "`outcome_weight` needs",
    ),
    "an adapter with Muon": (train(lora={"rank": 2}, optimizer="muon"), "`lora` needs"),
    "an adapter on a merge": (train(lora={"rank": 2}, warm_start="merge"), "`lora` needs"),
    "an adapter with dropout": (train(lora={"dropout": 0.1}), "must be 0"),
    "an adapter on nothing": (train(lora={"target_modules": ["nosuch"]}), "lora.target_modules names 'nosuch'"),
    "an anchor without data": (train(anchor={"sft_weight": 0.1}), "sft_weight and sft_data need each other"),
    "data without an anchor": (train(anchor={"sft_data": "prompts.jsonl"}), "sft_weight and sft_data need each other"),
    "an anchor that is not there": (
        train(anchor={"sft_weight": 1.0, "sft_data": "no.jsonl"}),
        "no.jsonl: no such file",
    ),
    "an anchor without answers": (train(anchor={"sft_weight": 1.0, "sft_data": "prompts.jsonl"}), "prompts.jsonl:1: "),
    "shares in no mode": (
        train(balance={"target_shares": {"tools": 1.0}}),
        "target_shares means nothing in mode fixed",
    ),
    "a share of nobody": (
        train(balance={"mode": "share", "target_shares": {"toolz": 1.0}}),
        "target_shares: 'toolz' is no teacher",
    ),
    "no share for two": (
        train(balance={"mode": "share", "target_shares": {"tools": 1.0}}),
        "no share for teacher 'arithmetic'",
    ),
    "a spread that nobody knows": (train(objective="exact", balance={"mode": "sigma"}), "mode sigma needs"),
    "weights of draws for one": (teacher(sampling_weight=1.0), "give it to all or none"),
    "a warm-up that keeps more than it asks": (train(warm_up={"steps": 1, "keep": 2}), "keep is above samples"),
    "a warm-up share of nobody": (train(warm_up={"steps": 1, "shares": {"toolz": 1.0}}), "'toolz' is no teacher"),
    "a warm-up without steps": (train(warm_up={"samples": 2}), "train.warm_up.steps"),
    "a merge of what has no weights": (
        all_of(train(warm_start="merge"), instead(gives="answers", answers="said.jsonl", wrong_answers="keep")),
        "a merge needs weights",
    ),
    "a black box without answers": (instead(gives="answers"), "needs either `answers`, a file, or `model`"),
    "answers of one that scores": (teacher(answers="said.jsonl"), "belong to a black box"),
    "answers that are not there": (instead(gives="answers", answers="no.jsonl"), "no.jsonl: no such file"),
    "prompts without an answer": (
        instead(gives="answers", answers="few.jsonl"),
        "teacher 'structured' has no usable answer to prompt 'structured/3', nor to 4 others of 8",
    ),
    "a discriminator without groups": (instead(gives="discriminator", answers="said.jsonl"), "samples_per_prompt"),
    "two teachers of one prompt": (second(2), "teachers arithmetic and other both serve it"),
    "tiers without a rule": (second(1), "say under `tiers:` which gets what"),
    "tiers without the middle": (
        all_of(second(1, samples=2), teacher("arithmetic", tier=3)),
        "none in tier 2",
    ),
    "bands that cross": (second(1, frontier_below_pass_rate=0.9, self_from_pass_rate=0.5), "too hard and mastered"),
    "a tier that gets nothing": (second(3, self_from_pass_rate=None), "tier 3 gets no prompt"),
    "a black box that has to be sure": (
        all_of(second(1, samples=2), instead("arithmetic", gives="answers", answers="said.jsonl")),
        "is a black box, and tiers.frontier_below_confidence needs its confidence",
    ),
    "prompts of its own twice": (teacher("tools", prompts="own.jsonl"), "which has `prompts` of its own"),
    "prompts of its own of another": (teacher("structured", prompts="own.jsonl"), "in the prompts of teacher"),
    "prompts of its own that are not there": (teacher("tools", prompts="no.jsonl"), "no.jsonl: no such file"),
    "a path for a name": (instead("a/b", model="nowhere"), "alias 'a/b'"),
    "a name that metrics have": (instead("sft_anchor", model="nowhere"), "alias 'sft_anchor'"),
    "a typing error": (train(outcome_wieght=0.5), "did you mean 'outcome_weight'"),
    "a typing error further in": (train(balance={"mod": "share"}), "did you mean 'mode'"),
}


@pytest.mark.parametrize("case", CASES)
def test_nonsense_ends_in_one_line_and_leaves_nothing(cli: Cli, folder: Path, case: str) -> None:
    # Miles, NeMo-RL: combinations without a meaning that are accepted, keys that nobody reads
    change, message = CASES[case]
    edit(folder, change)
    before = sorted(folder.rglob("*"))
    ended = cli("distill", "--teachers", folder / "teachers.yaml", "--workspace", folder / "w", "--json")
    assert (ended.code, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("settings", [{"curriculum": {}}, {"outcome_weight": 0.5, "samples_per_prompt": 2}])
def test_what_needs_a_verifier_says_which_prompt_has_none(cli: Cli, folder: Path, settings: Document) -> None:
    rows = [row for _, row in read_jsonl(folder / "prompts.jsonl")]
    del rows[2]["verifier"]
    write_jsonl(folder / "prompts.jsonl", rows)
    edit(folder, train(**settings))
    ended = cli("distill", "--teachers", folder / "teachers.yaml", "--workspace", folder / "w")
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert f"{folder / 'prompts.jsonl'}:3: " in ended.stderr
    assert not (folder / "w").exists()
