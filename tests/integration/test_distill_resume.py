"""A run that was killed, at any moment, ends with the same bits as one that was not."""

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.config.overrides import load_with_overrides
from mopdctl.config.teachers import TeachersFile, load_teachers
from mopdctl.distill.run import run_distill
from mopdctl.engines.base import SampleRequest, Step
from mopdctl.engines.hf import HFModel
from mopdctl.files import read_json, read_jsonl, write_json, write_jsonl
from mopdctl.rollouts.step import StepRollouts
from mopdctl.runs import Workspace, read_card, read_metrics
from mopdctl.store.store import Store

Stopped = Callable[..., AbstractContextManager[None]]
Cli = Callable[..., SimpleNamespace]
Finished = Callable[..., SimpleNamespace]

# The exact objective with a fresh sampler, the sampled one with a stale sampler, whose weights are part of the state.
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"objective": "exact", "staleness": 0},
    "sampled": {"objective": "sampled", "staleness": 1, "optimizer": "muon", "warm_start": "merge"},
}


def command(teachers: Path, workspace: Path) -> list[str]:
    return [sys.executable, "-m", "mopdctl", "distill", "--teachers", str(teachers), "--workspace", str(workspace)]


def assert_equal(straight: SimpleNamespace, resumed: SimpleNamespace) -> None:
    assert resumed.metrics == straight.metrics
    assert [row["step"] for row in straight.metrics] == list(range(6))
    assert resumed.rollouts == straight.rollouts
    assert resumed.weights.keys() == straight.weights.keys()
    assert all(resumed.weights[name].equal(weight) for name, weight in straight.weights.items())
    assert resumed.card == straight.card


@pytest.fixture(scope="module")
def documents(teachers_document: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for name, train in VARIANTS.items():
        # Long answers make steps slow enough to be caught in the middle.
        settings: dict[str, Any] = {"steps": 6, "checkpoint_every": 2, "max_new_tokens": 40, "schedule": "cosine"}
        write_json(folder / f"{name}.yaml", teachers_document(**settings, **train))
    return folder


class StopError(Exception):
    pass


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_broke_off_time_and_again_equals_one_that_did_not(
    finished: Finished, documents: Path, tmp_path: Path, variant: str
) -> None:
    short = {"train.max_new_tokens": 8}
    config = load_with_overrides(TeachersFile, documents / f"{variant}.yaml", short)
    straight, broken = (Workspace(tmp_path / name) for name in ("straight", "broken"))
    run_distill(config, straight, base=documents)
    begun = []
    # Before the first state, right before the second one, after it, at the very end.
    for last in (1, 4, 5, 6):

        def on_step(done: int, metrics: dict[str, Any], last: int = last) -> None:
            begun.append(metrics["step"])
            if done == last:
                raise StopError

        with pytest.raises(StopError):
            run_distill(config, broken, base=documents, on_step=on_step)
    run_distill(config, broken, base=documents)
    assert begun == [0, *range(4), *range(2, 5), *range(4, 6)]
    assert_equal(finished(straight.root), finished(broken.root))


@pytest.mark.slow  # test_rl_resume.py kills a run of the same loop in the plain tests
@pytest.mark.parametrize("variant", ["exact", "sampled"])
def test_killed_and_started_again_equals_never_killed(
    cli: Cli, finished: Finished, documents: Path, tmp_path: Path, variant: str, stopped_after: Stopped
) -> None:
    teachers = documents / f"{variant}.yaml"
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run = killed / "runs" / "merged"
    assert cli("distill", "--teachers", teachers, "--workspace", straight).code == 0

    with stopped_after(run / "metrics.jsonl", 3, command(teachers, killed)):
        # While the first process is alive, a second one may not write into its run.
        second = cli("distill", "--teachers", teachers, "--workspace", killed, "--json")
        assert (second.code, second.stdout) == (2, "")
        assert second.stderr == (
            f"error: {run / 'rank-0'}: another process is writing here; wait for it or use another name\n"
        )
    assert [p.name for p in (run / "state").glob("[!.]*")] == ["step-000002"]
    assert not (killed / "checkpoints" / "merged").exists()

    # What was begun with one configuration does not go on with another, and the difference is named.
    other = cli("distill", "--teachers", teachers, "--workspace", killed, "--learning-rate", 0.5)
    assert other.code == 2
    assert "train.learning_rate" in other.stderr
    assert "train.steps" not in other.stderr

    if variant == "exact":
        # Once more, somewhere between two lines.
        with stopped_after(run / "metrics.jsonl", 5, command(teachers, killed), delay_s=random.uniform(0, 0.03)):
            pass

    again = cli("distill", "--teachers", teachers, "--workspace", killed, "--json")
    assert again.code == 0
    assert json.loads(again.stdout)["checkpoint"] == str(killed / "checkpoints" / "merged")
    assert_equal(finished(straight), finished(killed))
    assert [p for p in killed.rglob("*") if ".building" in p.name or p.suffix == ".tmp"] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_answer_that_was_interrupted_goes_on_where_it_was(
    finished: Finished, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    config = load_with_overrides(TeachersFile, documents / f"{variant}.yaml", {})
    straight, broken = (Workspace(tmp_path / name) for name in ("straight", "broken"))
    run_distill(config, straight, base=documents)
    written: list[int] = []
    breaks = iter([9, 30, 61, 97])  # engine steps of each process before it dies
    real = HFModel.stream

    def stream(self: HFModel, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        for step in real(self, requests, temperature=temperature):
            yield step
            written[-1] += len(step.token_ids)
            left[0] -= 1
            if not left[0]:
                raise StopError

    monkeypatch.setattr(HFModel, "stream", stream)
    for limit in (*breaks, 10**9):
        left = [limit]
        written.append(0)
        if limit < 10**9:
            with pytest.raises(StopError):
                run_distill(config, broken, base=documents)
        else:
            run_distill(config, broken, base=documents)
    one, other = finished(straight.root), finished(broken.root)
    assert [len(row) for row in one.rollouts] == [len(row) for row in other.rollouts]
    assert_equal(one, other)
    # Not one token was sampled twice, in spite of the steps that are trained again.
    assert sum(written) == sum(len(r["response_ids"]) for step in one.rollouts for r in step)
    attempts = Store(broken.rollouts("merged")).meta(["attempt"])["attempt"]
    assert attempts.max() > 1
    assert list((broken.rollouts("merged") / "wal").iterdir()) == []


def test_a_finished_run_is_left_as_it_is(cli: Cli, documents: Path, tmp_path: Path) -> None:
    arguments = ["distill", "--teachers", documents / "exact.yaml", "--workspace", tmp_path, "--steps", 2, "--json"]

    def state() -> dict[Path, tuple[int, bytes]]:
        files = (p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock")
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files}

    first = cli(*arguments)
    before = state()
    second = cli(*arguments)
    assert (first.code, second.code) == (0, 0)
    assert json.loads(second.stdout) == json.loads(first.stdout)
    assert state() == before


@pytest.mark.parametrize("command", ["distill", "merge"])
def test_a_checkpoint_that_something_else_made_is_neither_replaced_nor_taken_for_ours(
    cli: Cli, tiny: Path, documents: Path, tmp_path: Path, command: str
) -> None:
    arguments = ["--teachers", documents / "exact.yaml", "--workspace", tmp_path]
    shutil.copytree(tiny / "models" / "student", tmp_path / "checkpoints" / "copied")
    if command == "distill":
        assert cli("merge", *arguments, "--name", "merge").code == 0
    else:
        assert cli("distill", *arguments, "--name", "merge", "--steps", 1).code == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for name in ("copied", "merge"):
        ended = cli(command, *arguments, "--name", name, "--json")
        assert (ended.code, ended.stdout) == (2, "")
        # of what has a run, its configuration is looked at first
        assert f"{'checkpoints' if name == 'copied' else 'runs'}/{name}: " in ended.stderr
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_every_kind_of_change_is_named(cli: Cli, tiny: Path, documents: Path, tmp_path: Path) -> None:
    document = json.loads((documents / "exact.yaml").read_text("utf-8"))
    document["train"] |= {"steps": 1}
    workspace = tmp_path / "workspace"

    def run(changed: dict[str, Any]) -> SimpleNamespace:
        write_json(tmp_path / "teachers.yaml", changed)
        return cli("distill", "--teachers", tmp_path / "teachers.yaml", "--workspace", workspace)

    assert run(document).code == 0
    prompts = (tiny / "prompts.jsonl").read_text("utf-8")
    (tmp_path / "prompts.jsonl").write_text(prompts.replace('"role": "user"', '"role":  "user"'), "utf-8")
    teachers = document["teachers"]
    changes: dict[str, dict[str, Any]] = {
        "train.seed": {"train": document["train"] | {"seed": 1}},
        "prompts": {"prompts": str(tmp_path / "prompts.jsonl")},
        "student": {"student": teachers["tools"]["model"]},
        "teachers.tools.model": {"teachers": teachers | {"tools": teachers["arithmetic"] | {"domains": ["tools"]}}},
        "teachers.tools.weight": {"teachers": teachers | {"tools": teachers["tools"] | {"weight": 2.0}}},
    }
    for key, change in changes.items():
        ended = run(document | change)
        assert ended.code == 2
        assert f"({key} was " in ended.stderr, key
    # A copy of a teacher, or of the prompts, under another path is the same run.
    (tmp_path / "copy").symlink_to(teachers["tools"]["model"])
    same = teachers | {"tools": teachers["tools"] | {"model": "copy"}}
    assert run(document | {"teachers": same}).code == 0


# ------------------------------------------------------------------------------------ what a run has beside its weights

LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
BESIDE: dict[str, dict[str, Any]] = {
    "hidden states and balance": {
        "objective": "exact",
        "teacher_hidden": "store",
        "balance": {"mode": "share"},
        "inner_steps": 2,
        "trust_region": 0.8,
    },
    "curriculum": {"curriculum": {"memory": 0.5}, "outcome_weight": 0.3, "samples_per_prompt": 2},
    "warm-up and tiers": {
        "warm_up": {"steps": 2, "samples": 4, "wrong": "keep", "batch_size": 6},
        "max_new_tokens": 16,
    },
    "discriminator": {"samples_per_prompt": 2, "optimizer": "muon", "staleness": 1},
    "adapter": {"lora": LORA, "objective": "exact", "anchor": {"kl_weight": 0.1}},
    "stale adapter": {"lora": LORA, "staleness": 1, "balance": {"mode": "sigma"}},
}


def with_all_beside(document: dict[str, Any], name: str, tiny: Path, folder: Path) -> dict[str, Any]:
    """The document with an SFT anchor, prompts that can be checked, and teachers as the variant wants them."""
    rows = [row for _, row in read_jsonl(tiny / "prompts.jsonl")]
    reference = {"constraints": [{"kind": "letter", "letter": "e", "min": 1}]}
    write_jsonl(folder / "prompts.jsonl", [row | {"verifier": "constraints", "reference": reference} for row in rows])
    talk = [{"role": "user", "content": "7 + 5"}, {"role": "assistant", "content": "12"}]
    write_jsonl(folder / "sft.jsonl", [{"messages": talk}] * 3)
    write_jsonl(folder / "answers.jsonl", [{"prompt_id": f"tools/{i}", "answer": f"say {i}"} for i in range(8)])
    document["prompts"] = "prompts.jsonl"
    document["train"]["anchor"] = document["train"].get("anchor", {}) | {"sft_weight": 0.1, "sft_data": "sft.jsonl"}
    teachers = document["teachers"]
    if name == "discriminator":
        box = {
            "gives": "discriminator",
            "wrong_answers": "keep",
            "discriminator": {"warm_up_steps": 2, "learning_rate": 1e-3},
        }
        teachers["tools"] = {"domains": ["tools"], "answers": "answers.jsonl", **box}
    if name == "warm-up and tiers":
        document["tiers"] = {"samples": 2, "frontier_below_confidence": None, "self_from_pass_rate": 0.9}
        teachers["frontier"] = {"model": teachers["tools"]["model"], "domains": ["arithmetic"], "tier": 1}
        teachers["itself"] = {"model": document["student"], "domains": ["arithmetic"], "tier": 3}
    return document


def all_of(workspace: Workspace) -> dict[str, Any]:
    """Everything that a run leaves, without times."""
    run = workspace.run("merged")
    store = sorted(Store(workspace.rollouts("merged")).scan(), key=lambda sample: sample.sample_id)
    streams = ("tokens", "behavior_logprobs", "teacher_logprobs", "teacher_hidden")
    return {
        "metrics": [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(run)],
        "samples": [
            (
                s.sample_id,
                s.teacher_id,
                s.reward,
                *[None if (v := getattr(s, n)) is None else v.tolist() for n in streams],
            )
            for s in store
        ],
        "weights": {p.name: p.read_bytes() for p in sorted(workspace.checkpoint("merged").rglob("*.safetensors"))},
        "manifest": read_json(workspace.checkpoint("merged") / "teacher_manifest.json"),
        "card": read_card(workspace.checkpoint("merged")),
        "routing": (run / "routing.jsonl").read_bytes() if (run / "routing.jsonl").exists() else None,
        "warm-up": [row["train/loss"] for row in read_metrics(run / "warm-up")] if (run / "warm-up").exists() else None,
    }


def made(tiny: Path, folder: Path, teachers_document: Callable[..., dict[str, Any]], name: str, **train: Any) -> Path:
    """A file for a variant: three steps, with a state after each."""
    settings = {"steps": 3, "checkpoint_every": 1, "max_new_tokens": 8, "batch_size": 6, "grad_share_every": 1}
    document = teachers_document(**settings | BESIDE[name] | train)
    write_json(folder / "teachers.yaml", with_all_beside(document, name, tiny, folder))
    return folder / "teachers.yaml"


def assert_all_equal(straight: Workspace, broken: Workspace, *, steps: int) -> None:
    one, other = all_of(straight), all_of(broken)
    assert len(one["metrics"]) == steps
    for part, expected in one.items():
        assert other[part] == expected, part


@pytest.mark.parametrize(
    "name", [name if name != "adapter" else pytest.param(name, marks=pytest.mark.slow) for name in BESIDE]
)
def test_a_run_that_was_interrupted_goes_on_with_all_that_it_had(
    tiny: Path,
    tmp_path: Path,
    teachers_document: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    # ms-swift #9935, open-instruct #1523, DN-MOPD patches: what is forgotten on resume
    config = load_teachers(made(tiny, tmp_path, teachers_document, name))
    straight, broken = (Workspace(tmp_path / where) for where in ("straight", "broken"))
    run_distill(config, straight, base=tmp_path)
    last = random.choice([2, 3])
    begun: list[int] = []

    def on_step(done: int, metrics: dict[str, Any]) -> None:
        begun.append(metrics["step"])
        if done == last and begun.count(last - 1) == 1:  # committed and logged, and its state not yet written
            raise KeyboardInterrupt

    sample = StepRollouts.sample

    def until_the_second(*arguments: Any, **options: Any) -> Any:
        if begun:  # the state of the first step is written, and nothing of the second is there
            raise KeyboardInterrupt
        return sample(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(StepRollouts, "sample", until_the_second)
        with pytest.raises(KeyboardInterrupt):
            run_distill(config, broken, base=tmp_path, on_step=on_step)
    with pytest.raises(KeyboardInterrupt):
        run_distill(config, broken, base=tmp_path, on_step=on_step)
    assert not broken.checkpoint("merged").exists()
    run_distill(config, broken, base=tmp_path, on_step=on_step)
    assert begun == [*range(last), *range(last - 1, 3)]
    assert_all_equal(straight, broken, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hidden states and balance", "curriculum", "discriminator", "adapter"])
def test_killed_at_any_moment_a_run_goes_on_with_all_that_it_had(
    cli: Cli,
    tiny: Path,
    tmp_path: Path,
    teachers_document: Callable[..., dict[str, Any]],
    stopped_after: Stopped,
    name: str,
) -> None:
    teachers = made(tiny, tmp_path, teachers_document, name, steps=6, max_new_tokens=40)
    straight, killed = (Workspace(tmp_path / where) for where in ("straight", "killed"))
    run_distill(load_teachers(teachers), straight, base=tmp_path)
    metrics = killed.run("merged") / "metrics.jsonl"
    for lines in (1, random.randint(3, 5)):
        with stopped_after(metrics, lines, command(teachers, killed.root), delay_s=random.uniform(0, 0.2)):
            pass
    assert not killed.checkpoint("merged").exists()
    assert cli("distill", "--teachers", teachers, "--workspace", killed.root).code == 0
    assert_all_equal(straight, killed, steps=6)


# ------------------------------------------------------------------------------------------------ who the teachers are


def test_a_teacher_that_was_edited_between_two_parts_of_a_run_is_refused(
    cli: Cli, tiny: Path, tmp_path: Path, teachers_document: Callable[..., dict[str, Any]]
) -> None:
    # TRL #7215: a teacher silently replaced between runs
    document = teachers_document(steps=3, checkpoint_every=1, max_new_tokens=6)
    mine = shutil.copytree(tiny / "models" / "tools", tmp_path / "mine")
    document["teachers"]["tools"]["model"] = "mine"
    write_json(tmp_path / "teachers.yaml", document)
    config, place = load_teachers(tmp_path / "teachers.yaml"), Workspace(tmp_path / "w")

    def on_step(done: int, metrics: dict[str, Any]) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_distill(config, place, base=tmp_path, on_step=on_step)
    (state,) = (place.run("merged") / "state").glob("step-*")
    manifest = read_json(state / "teacher_manifest.json")
    assert list(manifest["teachers"]) == ["arithmetic", "structured", "tools"]
    assert manifest["teachers"]["tools"]["model"] == "mine"
    assert len({teacher["weights"] for teacher in manifest["teachers"].values()}) == 3
    assert {teacher["dtype"] for teacher in manifest["teachers"].values()} == {"float32"}

    def again() -> SimpleNamespace:
        before = {p: p.read_bytes() for p in place.root.rglob("*") if p.is_file()}
        ended = cli("distill", "--teachers", tmp_path / "teachers.yaml", "--workspace", place.root, "--json")
        if ended.code:
            assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
            assert {p: p.read_bytes() for p in place.root.rglob("*") if p.is_file()} == before
        return ended

    original = (mine / "model.safetensors").read_bytes()
    shutil.copy(tiny / "models" / "arithmetic" / "model.safetensors", mine)  # other weights under the same name
    assert "(teachers.tools.model was " in again().stderr
    (mine / "model.safetensors").write_bytes(original)
    # what a digest of the files cannot see, the manifest of the state does
    changed = manifest | {"teachers": manifest["teachers"] | {"tools": manifest["teachers"]["tools"] | {"dtype": "x"}}}
    write_json(state / "teacher_manifest.json", changed)
    stderr = again().stderr
    assert "teacher 'tools' is another one than when the run began, dtype was x and is float32; " in stderr
    write_json(state / "teacher_manifest.json", manifest)
    assert again().code == 0
    assert read_json(place.checkpoint("merged") / "teacher_manifest.json") == manifest
