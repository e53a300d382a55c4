"""Merging weights: the checkpoint, what it refuses, and a distillation that begins from it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.merge import run_merge
from mopdctl.errors import InputError
from mopdctl.files import write_json
from mopdctl.runs import Workspace, checkpoint_digest, read_card

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]
Write = Callable[..., Path]
Cli = Callable[..., SimpleNamespace]


def merge(document: dict[str, Any], workspace: Path, *, scale: float, name: str = "merge") -> Path:
    config = TeachersFile.model_validate(document)
    return run_merge(config, Workspace(workspace), base=workspace.parent, scale=scale, name=name)


def weights(folder: Path | str) -> dict[str, Any]:
    return load_file(Path(folder) / "model.safetensors")


def expected(student: Path | str, teachers: list[Path | str], scale: float) -> dict[str, Any]:
    """In float64: student + scale * sum (teacher - student)."""
    start = {name: weight.double() for name, weight in weights(student).items()}
    found = [weights(teacher) for teacher in teachers]
    return {n: (w + scale * sum(t[n].double() - w for t in found)).float() for n, w in start.items()}


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert float((other[name] - weight).abs().max()) < 1e-6, name


@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_every_weight_is_student_plus_scaled_deltas(tmp_path: Path, teachers_document: Document, scale: float) -> None:
    document = teachers_document()
    target = merge(document, tmp_path / "workspace", scale=scale)
    models = [t["model"] for t in document["teachers"].values()]
    assert_close(weights(target), expected(document["student"], models, scale))


def test_one_teacher_at_scale_one_is_that_teacher(tmp_path: Path, tiny: Path, teachers_document: Document) -> None:
    document = teachers_document()
    document["teachers"] = {"tools": document["teachers"]["tools"]}
    assert_close(weights(merge(document, tmp_path / "workspace", scale=1.0)), weights(tiny / "models" / "tools"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_aliases_of_one_checkpoint_count_once_and_in_full_precision(
    tmp_path: Path, teachers_document: Document, dtype: str
) -> None:
    # `dtype` is the precision in which a teacher scores; weights are merged as they lie on the disk.
    document = teachers_document()
    model = document["teachers"]["arithmetic"]["model"]
    document["teachers"]["structured"] |= {"model": model, "dtype": dtype}
    target = merge(document, tmp_path / "workspace", scale=0.5)
    models = [model, document["teachers"]["tools"]["model"]]
    assert_close(weights(target), expected(document["student"], models, 0.5))


def test_the_order_of_teachers_changes_no_bit(tmp_path: Path, teachers_document: Document) -> None:
    document = teachers_document()
    one = weights(merge(document, tmp_path / "workspace", scale=0.3))
    document["teachers"] = dict(reversed(document["teachers"].items()))
    other = weights(merge(document, tmp_path / "workspace", scale=0.3, name="reversed"))
    assert all(other[name].equal(weight) for name, weight in one.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"intermediate_size": 48},
        {"tie_word_embeddings": False},
        {"vocab_size": 520},
    ],
)
def test_another_architecture_is_refused(
    write_tiny_model: Write, tmp_path: Path, teachers_document: Document, distil: Distil, changes: dict[str, Any]
) -> None:
    document = teachers_document(warm_start="merge")
    document["teachers"]["tools"]["model"] = str(write_tiny_model(tmp_path / "other", **changes))
    workspace = tmp_path / "workspace"
    for work in (lambda: merge(document, workspace, scale=0.3), lambda: distil(document, workspace)):
        with pytest.raises(InputError, match="architecture"):
            work()
        assert not workspace.exists()


def test_the_card_says_what_was_merged(tmp_path: Path, cli: Cli, teachers_document: Document) -> None:
    document = teachers_document()
    write_json(tmp_path / "teachers.yaml", document)
    workspace = tmp_path / "workspace"
    arguments = ["merge", "--teachers", tmp_path / "teachers.yaml", "--name", "m", "--workspace", workspace, "--json"]
    done = cli(*arguments, "--scale", 0.25)
    target = workspace / "checkpoints" / "m"
    assert done.code == 0
    assert json.loads(done.stdout) == {"name": "m", "checkpoint": str(target), "scale": 0.25}
    card = read_card(target)
    assert card["algorithm"] == "merge/task_arithmetic"
    assert card["parent"] == document["student"]
    assert card["digest"] == checkpoint_digest(target)
    assert card["config"]["scale"] == 0.25
    assert set(card["config"]["teachers"]) == {"arithmetic", "structured", "tools"}
    # The same again is there already; another one may not pass under its name.
    before = (target / "card.json").stat().st_mtime_ns
    assert cli(*arguments, "--scale", 0.25).code == 0
    assert (target / "card.json").stat().st_mtime_ns == before
    other = cli(*arguments, "--scale", 0.5)
    assert (other.code, other.stdout) == (2, "")
    assert "scale" in other.stderr


def test_a_warm_start_begins_from_the_merge(tmp_path: Path, teachers_document: Document, distil: Distil) -> None:
    train: dict[str, Any] = {"steps": 1, "objective": "exact"}
    document = teachers_document(**train, warm_start="merge", warm_start_scale=0.4)
    warm = distil(document)
    merged = merge(document, tmp_path / "workspace", scale=0.4)
    cold = distil(teachers_document(**train, top={"student": str(merged)}))
    assert [r["response_ids"] for r in warm.rollouts[0]] == [r["response_ids"] for r in cold.rollouts[0]]
    for name in ("train/loss", "train/grad_norm", "distill/kl_k1_nats", "distill/kl_k3_nats", "policy/entropy_nats"):
        assert warm.metrics[0][name] == pytest.approx(cold.metrics[0][name], rel=1e-5, abs=1e-5), name
    plain = distil(teachers_document(**train))
    assert warm.metrics[0]["train/loss"] != pytest.approx(plain.metrics[0]["train/loss"], abs=1e-2)
    assert warm.card["warm_start"] == "merge"
    assert warm.card["config"]["train"]["warm_start_scale"] == 0.4
    assert warm.card["parent"] == document["student"]
