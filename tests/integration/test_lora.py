"""Whole runs with adapters, as teachers and as what the student trains."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mopdctl.config.lora import Lora
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.run import run_distill
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import read_json
from mopdctl.runs import Workspace
from mopdctl.train.lora import add_lora

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]
Finished = Callable[..., SimpleNamespace]
FLOAT32 = 1e-4  # x W + (x A) B against x (W + A B)
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`math` and `code`, adapters over the student, and `math-merged` and `code-merged`, the same as full weights."""
    root = tmp_path_factory.mktemp("adapters")
    base = str(tiny / "models" / "student")
    for seed, name in enumerate(("math", "code")):
        made = add_lora(HFModel.load(base), Lora(rank=3), path=base, seed=seed)
        with torch.no_grad():
            for parameter_name, parameter in sorted(made.model.named_parameters()):
                if ".lora_B" in parameter_name:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        made.save(root / f"{name}-merged")
        shutil.copytree(root / f"{name}-merged" / "adapter", root / name)
    return root


def with_teachers(document: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    return document | {"teachers": {d: {"model": str(m), "domains": [d]} for d, m in models.items()}}


def same(one: SimpleNamespace, other: SimpleNamespace) -> bool:
    return (
        one.metrics == other.metrics
        and one.rollouts == other.rollouts
        and all(torch.equal(other.weights[name], tensor) for name, tensor in one.weights.items())
    )


# ---------------------------------------------------------------------------------------------------------- as teachers


@pytest.mark.parametrize("objective", ["exact", pytest.param("sampled", marks=pytest.mark.slow)])
def test_adapters_teach_as_their_merged_weights_do_wherever_they_wait(
    tiny: Path, adapters: Path, distil: Distil, teachers_document: Document, objective: str
) -> None:
    # TRL #6530: adapters ignored
    document = teachers_document(objective=objective, steps=1)
    student = tiny / "models" / "student"
    low = {"arithmetic": adapters / "math", "structured": adapters / "code", "tools": student}
    full = {"arithmetic": adapters / "math-merged", "structured": adapters / "code-merged", "tools": student}
    by_adapter, by_weights = distil(with_teachers(document, low)), distil(with_teachers(document, full))
    turning = distil(with_teachers(teachers_document(objective=objective, steps=1, teacher_residency="one"), low))
    assert same(by_adapter, turning)
    for one, other in zip(by_adapter.rollouts[0], by_weights.rollouts[0], strict=True):
        assert one["response_ids"] == other["response_ids"]
        assert one["teacher_logprobs"] == pytest.approx(other["teacher_logprobs"], abs=FLOAT32)
        apart = [abs(t - b) for t, b in zip(one["teacher_logprobs"], one["behavior_logprobs"], strict=True)]
        assert max(apart) < FLOAT32 if one["teacher_id"] == "tools" else max(apart) > 0.01


# ---------------------------------------------------------------------------------------------------------- as student


@pytest.mark.parametrize("objective", ["sampled", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_student_that_trains_an_adapter_publishes_whole_weights_and_the_adapter(
    tiny: Path, distil: Distil, teachers_document: Document, objective: str
) -> None:
    run = distil(teachers_document(objective=objective, lora=LORA, steps=3, learning_rate=1e-2))
    before = load_file(tiny / "models" / "student" / "model.safetensors")
    assert run.weights.keys() == before.keys()
    moved = {name for name, tensor in run.weights.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.split(".")[-2] in LORA["target_modules"]}
    for name in moved:
        assert torch.linalg.matrix_rank(run.weights[name] - before[name], rtol=1e-3) <= LORA["rank"]
    # the later steps were sampled from the adapter, not from the base
    model = HFModel.load(str(tiny / "models" / "student"))
    pairs = [(r["prompt_ids"], r["response_ids"]) for r in run.rollouts[2]]
    behavior = [r["behavior_logprobs"] for r in run.rollouts[2]]
    apart = [abs(a - b) for x, y in zip(model.score(pairs), behavior, strict=True) for a, b in zip(x, y, strict=True)]
    assert max(apart) > 0.01
    ratios = [row["policy/staleness_ratio"] for row in run.metrics]
    assert all(value == pytest.approx(1, abs=1e-3) for row in ratios for value in row.values())
    # what was published is a model for anyone, and an adapter for whoever has the base
    document = with_teachers(
        teachers_document(steps=1), {"arithmetic": run.checkpoint, "structured": run.checkpoint / "adapter"}
    )
    document["teachers"]["structured"]["domains"].append("tools")
    again = distil(document)
    published, rows = HFModel.load(str(run.checkpoint)), again.rollouts[0]
    for row, scores in zip(rows, published.score([(r["prompt_ids"], r["response_ids"]) for r in rows]), strict=True):
        assert row["teacher_logprobs"] == pytest.approx(scores, abs=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("train", [{"objective": "exact"}, {"staleness": 1}], ids=["exact", "sampled"])
def test_a_run_with_an_adapter_that_broke_off_equals_one_that_did_not(
    finished: Finished, teachers_document: Document, tmp_path: Path, train: dict[str, Any]
) -> None:
    config = TeachersFile.model_validate(teachers_document(lora=LORA, steps=4, checkpoint_every=2, **train))
    straight, broken = (Workspace(tmp_path / name) for name in ("straight", "broken"))
    run_distill(config, straight, base=tmp_path)

    class StopError(Exception):
        pass

    def stop(done: int, metrics: dict[str, Any]) -> None:
        if done == 3:
            raise StopError

    with pytest.raises(StopError):
        run_distill(config, broken, base=tmp_path, on_step=stop)
    (state,) = (broken.run("merged") / "state").glob("step-*")
    kept = load_file(state / "model.safetensors")
    assert kept
    assert all(".lora_" in name for name in kept)
    run_distill(config, broken, base=tmp_path)
    assert same(finished(straight.root), finished(broken.root))


def test_a_student_that_is_its_own_teacher_is_in_memory_once(
    tiny: Path, distil: Distil, teachers_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    load = HFModel.load.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        HFModel, "load", classmethod(lambda cls, path, **options: loads.append(path) or load(cls, path, **options))
    )
    student = str(tiny / "models" / "student")
    document = teachers_document(objective="exact", lora=LORA, steps=2, anchor={"kl_weight": 0.1})
    for teacher in document["teachers"].values():
        teacher |= {"model": student, "kind": "self"}
    run = distil(document)
    assert loads == [student]
    for row in run.metrics:
        assert row["train/grad_norm"] == 0.0  # B is 0: the adapter changes no bit


# ------------------------------------------------------------------------------------------------------------ manifest


def test_the_manifest_is_in_every_state_and_checkpoint_and_another_base_is_refused(
    tiny: Path, adapters: Path, teachers_document: Document, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny / "models" / "tools", tmp_path / "base")
    document = teachers_document(steps=2, checkpoint_every=1)
    document["teachers"]["tools"] |= {"model": str(adapters / "math"), "base": str(base)}
    config, workspace = TeachersFile.model_validate(document), Workspace(tmp_path / "w")

    class StopError(Exception):
        pass

    def stop(done: int, metrics: dict[str, Any]) -> None:
        if done == 2:
            raise StopError

    with pytest.raises(StopError):
        run_distill(config, workspace, base=tmp_path, on_step=stop)
    state = workspace.run("merged") / "state" / "step-000001"
    manifest = read_json(state / "teacher_manifest.json")
    assert manifest["teachers"].keys() == {"arithmetic", "structured", "tools"}
    assert manifest["teachers"]["tools"]["adapter"]

    # TRL #7215: between two parts of a run a teacher becomes another one under the same name
    (base / "config.json").write_text((base / "config.json").read_text("utf-8").replace("1e-06", "1e-05"), "utf-8")
    with pytest.raises(InputError, match=r"teachers\.tools\.base was "):
        run_distill(config, workspace, base=tmp_path)
    shutil.copy(tiny / "models" / "tools" / "config.json", base)
    changed = manifest | {"teachers": manifest["teachers"] | {"tools": manifest["teachers"]["tools"] | {"dtype": "x"}}}
    (state / "teacher_manifest.json").write_text(json.dumps(changed), "utf-8")
    with pytest.raises(InputError, match=r"teacher 'tools' .* dtype was x and is float32"):
        run_distill(config, workspace, base=tmp_path)
    (state / "teacher_manifest.json").write_text(json.dumps(manifest), "utf-8")
    assert read_json(run_distill(config, workspace, base=tmp_path) / "teacher_manifest.json") == manifest
