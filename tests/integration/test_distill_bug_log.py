"""Failures that others met in public, and what a breaker found, on whole runs."""

import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.run import run_distill
from mopdctl.engines import head
from mopdctl.engines.base import SampleRequest
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import write_json, write_jsonl
from mopdctl.pipeline.controls import controls_of
from mopdctl.runs import Workspace
from mopdctl.train import state

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]
Cli = Callable[..., SimpleNamespace]

OBJECTIVES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "exact": {"objective": "exact"},
    "top_k": {"objective": "top_k", "top_k": 4, "top_k_support": "union", "divergence": "jsd"},
}


@pytest.fixture
def unverified(tiny: Path, tmp_path: Path) -> str:
    """The prompts without verifiers."""
    rows = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text("utf-8").splitlines()]
    write_jsonl(tmp_path / "unverified.jsonl", [{k: row[k] for k in ("id", "domain", "messages")} for row in rows])
    return str(tmp_path / "unverified.jsonl")


def with_answers(document: dict[str, Any], folder: Path, **teacher: Any) -> dict[str, Any]:
    """The document with a black box for tools, known by one answer to each of its prompts."""
    write_jsonl(folder / "answers.jsonl", [{"prompt_id": f"tools/{i}", "answer": "bo"} for i in range(8)])
    known = {"gives": "answers", "answers": str(folder / "answers.jsonl"), "wrong_answers": "keep"}
    document["teachers"]["tools"] = known | {"domains": ["tools"]} | teacher
    return document


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------------------------------------- alignment


def test_what_a_teacher_writes_greedily_is_its_likeliest_token_at_every_place(tiny: Path) -> None:
    # eval-protocol #457, maxtext #2103: logits at t held against token t instead of t + 1.
    # TRL #6191, open-instruct #1847: rows that padding has moved.
    teacher = HFModel.load(str(tiny / "models" / "tools"))
    prompts = [(9, 8, 7, 6, 5, 4), (30,), (12, 40, 41)]
    requests = [SampleRequest(str(i), p, 3 + 4 * i, i) for i, p in enumerate(prompts)]
    answers = [list(c.token_ids) for c in teacher.sample(requests, temperature=0.0)]
    pairs = list(zip(prompts, answers, strict=True))
    assert len({len(answer) for answer in answers}) > 1
    hidden = teacher.hidden_states(pairs, [[1] * len(answer) for answer in answers])
    for answer, scores, hidden_NH in zip(answers, teacher.score(pairs), hidden, strict=True):
        logits_NV = head.head_logits(hidden_NH, teacher.head, vocab_size=teacher.vocab_size)
        assert logits_NV.argmax(-1).tolist() == answer
        best_N = torch.log_softmax(logits_NV, -1).max(-1).values
        assert scores == pytest.approx(best_N.tolist(), abs=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_answers_of_one_token_are_trained_on(distil: Distil, teachers_document: Document, objective: str) -> None:
    # DN-MOPD: a response of one token loses its only dimension.
    run = distil(teachers_document(steps=1, max_new_tokens=1, **OBJECTIVES[objective]))
    assert {len(rollout["response_ids"]) for rollout in run.rollouts[0]} == {1}
    assert run.metrics[0]["train/grad_norm"] > 0
    assert run.metrics[0]["rollout/tokens"] == 12


def test_a_prompt_with_pictures_is_refused_in_one_line(
    cli: Cli, tmp_path: Path, teachers_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TRL #6126, ms-swift #9429: pictures reach a teacher that reads them otherwise.
    picture = [{"type": "image_url", "image_url": {"url": "x.png"}}, {"type": "text", "text": "What is this?"}]
    rows = [{"domain": d, "prompt": "?"} for d in ("arithmetic", "structured")]
    write_jsonl(tmp_path / "p.jsonl", [*rows, {"domain": "tools", "messages": [{"role": "user", "content": picture}]}])
    write_json(tmp_path / "teachers.yaml", teachers_document(top={"prompts": "p.jsonl"}))
    monkeypatch.chdir(tmp_path)
    ended = cli("distill", "--teachers", "teachers.yaml", "--json")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: p.jsonl:3: ")
    assert ended.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------ small and odd steps


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_with_one_prompt_has_figures_of_its_teacher_alone(
    distil: Distil, teachers_document: Document, objective: str
) -> None:
    # TRL #6987: a teacher that gets nothing shows, because nothing is averaged over teachers.
    run = distil(teachers_document(steps=3, batch_size=1, balance={"mode": "observe"}, **OBJECTIVES[objective]))
    for row, rollouts in zip(run.metrics, run.rollouts, strict=True):
        (rollout,) = rollouts
        assert row["policy/token_share"] == {rollout["teacher_id"]: 1.0}
        assert list(row["distill/kl_k3_nats"]) == [rollout["teacher_id"]]
        assert set(row["balance/factor"]) == {"arithmetic", "structured", "tools"}
    assert len({rollouts[0]["teacher_id"] for rollouts in run.rollouts}) > 1


@pytest.mark.parametrize(
    "train",
    [
        {"outcome_weight": 1.0, "samples_per_prompt": 2},
        {"balance": {"mode": "sigma"}},
        {"balance": {"mode": "share"}, "grad_share_every": 1},
        {"curriculum": {}},
        {"objective": "exact", "teacher_hidden": "store"},
        {"staleness": 1},
    ],
    ids=lambda t: "-".join(map(str, t)),
)
def test_steps_of_black_boxes_alone_are_steps_like_others(
    tiny: Path, tmp_path: Path, teachers_document: Document, train: dict[str, Any]
) -> None:
    document = with_answers(teachers_document(steps=4, batch_size=1, **train), tmp_path)
    del document["teachers"]["structured"]
    lines = (tiny / "prompts.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["domain"] != "structured"]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    document["prompts"] = str(tmp_path / "prompts.jsonl")
    seen: list[set[str]] = []
    run_distill(
        TeachersFile.model_validate(document),
        Workspace(tmp_path / "workspace"),
        base=tmp_path,
        on_step=lambda step, row: seen.append(set(row["policy/token_share"])),
    )
    assert len(seen) == 4
    assert {"tools"} in seen
    assert {"arithmetic"} in seen


def test_a_discriminator_beside_teachers_with_scores(
    tmp_path: Path, teachers_document: Document, finished: Callable[..., SimpleNamespace]
) -> None:
    document = with_answers(teachers_document(samples_per_prompt=2), tmp_path, gives="discriminator")
    workspace = Workspace(tmp_path / "workspace")
    rows: list[dict[str, Any]] = []
    run_distill(
        TeachersFile.model_validate(document), workspace, base=tmp_path, on_step=lambda step, row: rows.append(row)
    )
    from mopdctl.store.store import Store

    scored = {s.teacher_id: s.teacher_logprobs is not None for s in Store(workspace.rollouts("merged")).scan()}
    assert scored == {"arithmetic": True, "structured": True, "tools": False}
    assert all(set(row["blackbox/loss"]) == {"tools"} for row in rows)
    assert all(set(row["distill/kl_k3_nats"]) == {"arithmetic", "structured"} for row in rows)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_half_precision_gives_the_loss_of_full_precision_within_its_rounding(
    distil: Distil, teachers_document: Document, objective: str
) -> None:
    document = teachers_document(steps=1, dtype="bfloat16", max_new_tokens=4, **OBJECTIVES[objective])
    for teacher in document["teachers"].values():
        teacher["dtype"] = "bfloat16"
    half = distil(document).metrics[0]
    assert half["train/grad_norm"] > 0
    # The answers differ where rounding changes a draw; agreement with the teachers is of one size all the same.
    whole = distil(teachers_document(steps=1, max_new_tokens=4, **OBJECTIVES[objective])).metrics[0]
    for alias, value in whole["distill/kl_k3_nats"].items():
        assert half["distill/kl_k3_nats"][alias] == pytest.approx(value, rel=0.5)


# ---------------------------------------------------------------------------------- refused before the first step


def refusal(document: dict[str, Any], folder: Path) -> str:
    """The message with which a run is refused; nothing may have been written."""
    workspace = folder / "workspace"
    with pytest.raises(InputError) as caught:
        run_distill(TeachersFile.model_validate(document), Workspace(workspace), base=folder)
    assert not workspace.exists()
    return str(caught.value)


@pytest.mark.parametrize("train", [{"extrapolation": 1.25}, {"anchor": {"kl_weight": 0.1}, "objective": "exact"}])
def test_a_reference_with_a_permuted_vocabulary_is_refused(
    tiny: Path, tmp_path: Path, teachers_document: Document, train: dict[str, Any]
) -> None:
    # open-instruct #1847, SkyRL #2256: equal sizes and other tokens give a divergence that is wrong and looks right.
    path = shutil.copytree(tiny / "models" / "tools", tmp_path / "permuted") / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["b"], vocabulary["d"] = vocabulary["d"], vocabulary["b"]
    path.write_text(json.dumps(tokenizer), "utf-8")
    message = refusal(teachers_document(reference="permuted", **train), tmp_path)
    assert message.startswith("reference (permuted): differs from student ")
    assert "of the same size but in another order" in message


def test_a_prompt_must_fit_into_the_reference_too(
    tiny: Path, tmp_path: Path, teachers_document: Document, write_tiny_model: Callable[..., Path]
) -> None:
    write_tiny_model(tmp_path / "short", max_position_embeddings=32)
    message = refusal(teachers_document(reference="short", extrapolation=1.25), tmp_path)
    assert "do not fit into the model's context of 32" in message


def test_a_head_that_cannot_be_used_is_refused_before_anything_is_sampled(
    tmp_path: Path, teachers_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_TOLERANCE", -1.0)
    message = refusal(teachers_document(objective="exact", warm_up={"steps": 1}), tmp_path)
    assert "does more to its logits than product, bias, scale and soft-capping" in message


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize("data", ["nosuch.jsonl", "nosuch.parquet", "."])
def test_conversations_of_an_anchor_that_are_not_there_are_told_in_one_line(
    cli: Cli, tmp_path: Path, teachers_document: Document, monkeypatch: pytest.MonkeyPatch, data: str, flags: list[str]
) -> None:
    write_json(tmp_path / "teachers.yaml", teachers_document(anchor={"sft_weight": 0.1, "sft_data": data}))
    monkeypatch.chdir(tmp_path)
    ended = cli("distill", "--teachers", "teachers.yaml", *flags)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {data}: ")
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "workspace").exists()


# ------------------------------------------------------------------------------------------------------ controls


def test_controls_of_single_teachers_leave_out_what_names_the_others(
    tiny: Path, tmp_path: Path, teachers_document: Document, unverified: str
) -> None:
    shares = {"arithmetic": 1.0, "structured": 1.0, "front": 1.0, "数学": 2.0}
    document = teachers_document(
        steps=1,
        batch_size=4,
        max_new_tokens=4,
        balance={"mode": "share", "target_shares": shares},
        top={"prompts": unverified, "tiers": {"samples": 1, "frontier_below_pass_rate": None}},
    )
    tools = document["teachers"].pop("tools")
    document["teachers"] |= {"数学": tools, "front": tools | {"tier": 1}}
    workspace = Workspace(tmp_path / "workspace")
    controls = {c.name: c for c in controls_of(TeachersFile.model_validate(document), workspace, base=tmp_path)}
    # A name that no checkpoint can have takes one control away, not those after it.
    assert controls["merged.only-数学"].run is None
    assert "use 1-100 letters" in controls["merged.only-数学"].missing
    for alias, prompts in {"front": "tools", "arithmetic": "arithmetic"}.items():
        made = controls[f"merged.only-{alias}"].run
        assert made is not None
        made(lambda step, row: None)
        rows = (tmp_path / "workspace" / "controls" / f"merged.only-{alias}" / f"{alias}.jsonl").read_bytes()
        assert {json.loads(line)["domain"] for line in rows.split(b"\n")[:-1]} == {prompts}


# ---------------------------------------------------------------------------------------------------- full disks


@pytest.mark.parametrize("failing", ["state", "checkpoint"])
def test_a_device_that_fills_up_is_told_in_one_line_and_the_run_goes_on_to_the_bit(
    tmp_path: Path,
    distil: Distil,
    teachers_document: Document,
    monkeypatch: pytest.MonkeyPatch,
    finished: Callable[..., SimpleNamespace],
    failing: str,
) -> None:
    document = teachers_document(steps=3, checkpoint_every=1, objective="exact")
    undisturbed = distil(document)

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(*((state, "save_file", full) if failing == "state" else (HFModel, "save", full)))
        with pytest.raises(InputError, match=r"workspace/\S+: cannot be written \(.*No space left") as caught:
            distil(document, tmp_path / "workspace")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "workspace").rglob("*.building"))
    again = distil(document, tmp_path / "workspace")
    assert equal(again.weights, undisturbed.weights)
    assert again.metrics == undisturbed.metrics


def test_a_workspace_that_cannot_be_written_is_told_in_one_line(
    cli: Cli, tmp_path: Path, teachers_document: Document
) -> None:
    (tmp_path / "file").write_text("")
    write_json(tmp_path / "teachers.yaml", teachers_document())
    ended = cli("distill", "--teachers", tmp_path / "teachers.yaml", "--workspace", tmp_path / "file" / "inside")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {tmp_path}/file/inside/runs/merged: cannot be written (")
    assert ended.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("limit_kib", [3, 6, 100])
def test_a_limit_of_file_size_anywhere_loses_nothing(
    tmp_path: Path,
    distil: Distil,
    teachers_document: Document,
    finished: Callable[..., SimpleNamespace],
    limit_kib: int,
) -> None:
    document = teachers_document(steps=4, checkpoint_every=2, max_new_tokens=30)
    undisturbed = distil(document)
    workspace = tmp_path / "workspace"
    write_json(tmp_path / "teachers.yaml", document)
    # The configuration, the largest small file, is there: so the limit is met further on.
    (workspace / "runs" / "merged").mkdir(parents=True)
    shutil.copy(undisturbed.folder / "config.json", workspace / "runs" / "merged")
    command = [sys.executable, "-m", "mopdctl", "distill", "--json", "--teachers", "teachers.yaml"]
    limit = (limit_kib * 1024, resource.RLIM_INFINITY)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in done.stderr
    again = distil(document, workspace)
    assert equal(again.weights, undisturbed.weights)
    assert again.rollouts == undisturbed.rollouts


# ------------------------------------------------------------------------------------- fewer samples than processes


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {"outcome_weight": 1.0, "samples_per_prompt": 3},
        {"objective": "exact", "teacher_hidden": "store", "anchor": {"kl_weight": 0.1}, "balance": {"mode": "share"}},
    ],
    ids=["sampled", "exact"],
)
def test_processes_without_a_sample_wait_for_the_others(
    tmp_path: Path,
    distil: Distil,
    teachers_document: Document,
    finished: Callable[..., SimpleNamespace],
    train: dict[str, Any],
) -> None:
    document = teachers_document(steps=2, batch_size=1, grad_share_every=1, **train)
    write_json(tmp_path / "teachers.yaml", document)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    launch += ["--master-port", str(port), "-m", "mopdctl", "distill", "--json"]
    launch += ["--teachers", str(tmp_path / "teachers.yaml"), "--workspace", str(tmp_path / "two")]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    one, two = distil(document), finished(tmp_path / "two")
    for alone, together in zip(one.metrics, two.metrics, strict=True):
        assert together["train/loss"] == pytest.approx(alone["train/loss"], abs=1e-5)
        assert together["policy/token_share"] == alone["policy/token_share"]
    assert max(float((two.weights[n] - w).abs().max()) for n, w in one.weights.items()) < 1e-4
