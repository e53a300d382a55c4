"""The teachers' manifest: what it follows, and that other teachers are refused on resume."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopdctl.config.lora import Lora
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.manifest import MANIFEST, check_manifest, teacher_manifest
from mopdctl.distill.teachers import load_teachers
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import write_json
from mopdctl.runs import Workspace
from mopdctl.train.lora import add_lora

Document = Callable[..., dict[str, Any]]
Manifest = Callable[..., dict[str, Any]]


@pytest.fixture
def models(tiny: Path, tmp_path: Path) -> Path:
    """A copy of two teachers that a test may change, and an adapter over one of them."""
    for name in ("tools", "structured"):
        shutil.copytree(tiny / "models" / name, tmp_path / name)
    made = add_lora(HFModel.load(str(tmp_path / "tools")), Lora(rank=2), path=str(tmp_path / "tools"), seed=0)
    made.save_adapter(tmp_path / "adapter")
    return tmp_path


@pytest.fixture
def manifest(models: Path, teachers_document: Document) -> Manifest:
    def make(**changes: dict[str, Any]) -> dict[str, Any]:
        document = teachers_document()
        document["teachers"] = {
            "full": {"model": "./structured", "domains": ["a"]} | changes.get("full", {}),
            "low": {"model": "./adapter", "domains": ["b"]} | changes.get("low", {}),
        }
        config = TeachersFile.model_validate(document)
        student = HFModel.load(config.student)
        teachers = load_teachers(config, student, Workspace(models / "workspace"), base=models)
        return teacher_manifest(config, teachers)

    return make


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def nudge(path: Path) -> None:
    tensors = load_file(path)
    name = min(tensors)
    save_file(tensors | {name: torch.nextafter(tensors[name], torch.tensor(1e9))}, path, metadata={"format": "pt"})


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """`alias.field` of every difference."""
    return {
        f"{alias}.{field}"
        for alias, entry in after["teachers"].items()
        for field in entry
        if before["teachers"][alias][field] != entry[field]
    }


def test_it_is_the_same_each_time_and_says_all_there_is_to_say(manifest: Manifest) -> None:
    found = manifest()
    assert manifest() == found
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    full, low = found["teachers"]["full"], found["teachers"]["low"]
    fields = {"model", "weights", "adapter", "tokenizer", "chat_template", "end_tokens", "dtype", "quantization"}
    assert full.keys() == low.keys() == fields
    assert (full["model"], low["model"]) == ("./structured", "./adapter")
    assert (full["adapter"], full["quantization"], full["dtype"]) == (None, None, "float32")
    assert full["weights"] != low["weights"] != low["adapter"]
    assert full["tokenizer"] == low["tokenizer"]
    assert full["end_tokens"] == [1]


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lambda m: nudge(m / "structured" / "model.safetensors"), {"full.weights"}),
        (lambda m: edit_json(m / "structured" / "config.json", rms_norm_eps=1e-3), {"full.weights"}),
        (lambda m: nudge(m / "tools" / "model.safetensors"), {"low.weights"}),
        (lambda m: nudge(m / "adapter" / "adapter_model.safetensors"), {"low.adapter"}),
        (lambda m: edit_json(m / "adapter" / "adapter_config.json", lora_alpha=7), {"low.adapter"}),
        (lambda m: (m / "structured" / "README.md").write_text("hello", "utf-8"), set()),
        (lambda m: (m / "structured" / "card.json").write_text("{}", "utf-8"), set()),
    ],
    ids=["weights", "architecture", "base", "adapter", "alpha", "readme", "card"],
)
def test_it_follows_what_can_change_a_score_and_nothing_else(
    manifest: Manifest, models: Path, change: Callable[[Path], Any], fields: set[str]
) -> None:
    before = manifest()
    change(models)
    assert changed(before, manifest()) == fields


def test_precision_is_part_of_it(manifest: Manifest) -> None:
    assert changed(manifest(), manifest(full={"dtype": "bfloat16"})) == {"full.dtype"}


def test_a_quantized_teacher_says_how(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    from mopdctl.distill import manifest as module

    before = manifest()
    load = module.identify

    def identify(model: HFModel) -> Any:
        model.model.config.quantization_config = {"quant_method": "fp8"}
        return load(model)

    monkeypatch.setattr(module, "identify", identify)
    after = manifest()
    assert changed(before, after) == {"full.quantization", "low.quantization"}
    assert after["teachers"]["full"]["quantization"] == {"quant_method": "fp8"}


FOUND: dict[str, Any] = {
    "schema": "mopdctl.teacher_manifest/1",
    "teachers": {
        alias: {
            "model": f"./{alias}",
            "weights": "aa",
            "adapter": None,
            "tokenizer": "bb",
            "chat_template": "cc",
            "end_tokens": [1],
            "dtype": "float32",
            "quantization": None,
        }
        for alias in ("full", "low")
    },
}


def test_a_run_goes_on_with_its_own_teachers(manifest: Manifest, tmp_path: Path) -> None:
    found = manifest()
    check_manifest(tmp_path / "none" / MANIFEST, found)
    write_json(tmp_path / MANIFEST, found)
    check_manifest(tmp_path / MANIFEST, found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "0"),
        ("adapter", "0"),
        ("tokenizer", "0"),
        ("chat_template", None),
        ("end_tokens", [1, 7]),
        ("dtype", "bfloat16"),
        ("quantization", {"quant_method": "fp8"}),
        ("model", "./other"),
    ],
)
def test_a_teacher_that_was_replaced_is_refused_by_alias_and_field(tmp_path: Path, field: str, value: Any) -> None:
    # TRL #7215: teachers replaced between two parts of a run, known by their names alone
    found = deepcopy(FOUND)
    write_json(tmp_path / MANIFEST, found)
    other = deepcopy(found)
    other["teachers"]["low"][field] = value
    with pytest.raises(InputError) as caught:
        check_manifest(tmp_path / MANIFEST, other)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / MANIFEST}: teacher 'low' is another one than when the run began, {field} ")
    assert f"is {value};" in message
    assert "\n" not in message


def test_a_teacher_that_came_or_went_is_refused(tmp_path: Path) -> None:
    found = deepcopy(FOUND)
    fewer = deepcopy(found)
    del fewer["teachers"]["low"]
    for before, now, word in [(found, fewer, "is gone"), (fewer, found, "is new")]:
        write_json(tmp_path / MANIFEST, before)
        with pytest.raises(InputError, match=rf"teacher 'low' {word} since the run began"):
            check_manifest(tmp_path / MANIFEST, now)
