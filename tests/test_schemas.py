"""The schemas say what the models say, and damage to one is found."""

import json
from pathlib import Path

import jsonschema
import pytest

from mopdctl import schemas
from mopdctl.config.base import Strict
from mopdctl.errors import CheckFailedError


class _Example(Strict):
    temperature: float = 1.0
    """Sampling temperature, without unit."""
    num_samples: int


MODELS: dict[str, type[Strict]] = {"example": _Example}


def test_schemas_in_the_checkout_are_fresh() -> None:
    schemas.check(schemas.checkout_folder())


@pytest.mark.parametrize("name", sorted(schemas.MODELS))
def test_schema_is_valid_json_schema_and_describes_every_field(name: str) -> None:
    document = schemas.schema(schemas.MODELS[name])
    jsonschema.Draft202012Validator.check_schema(document)
    objects = [document, *document.get("$defs", {}).values()]
    fields = [(key, field) for each in objects for key, field in each.get("properties", {}).items()]
    assert fields
    assert [key for key, field in fields if "description" not in field and "const" not in field] == []


def test_schema_refuses_what_the_model_refuses() -> None:
    validator = jsonschema.Draft202012Validator(schemas.schema(_Example))
    assert validator.is_valid({"num_samples": 2})
    assert not validator.is_valid({"num_samples": 2, "num_sample": 3})
    assert not validator.is_valid({"temperature": 1.0})


def test_docstring_of_a_field_becomes_its_description() -> None:
    assert schemas.schema(_Example)["properties"]["temperature"]["description"] == "Sampling temperature, without unit."


def test_writing_twice_gives_the_same_bytes_and_passes_the_check(tmp_path: Path) -> None:
    path, _ = schemas.write(tmp_path, MODELS)
    first = path.read_bytes()
    schemas.write(tmp_path, MODELS)
    assert path.read_bytes() == first
    schemas.check(tmp_path, MODELS)


def test_broken_schema_is_found(tmp_path: Path) -> None:
    path, _ = schemas.write(tmp_path, MODELS)
    document = json.loads(path.read_text())
    document["properties"]["num_samples"]["type"] = "string"
    path.write_text(json.dumps(document))
    with pytest.raises(CheckFailedError, match=r"example\.schema\.json: stale.*python -m mopdctl\.schemas"):
        schemas.check(tmp_path, MODELS)


def test_missing_schema_is_found(tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match=r"example\.schema\.json: missing"):
        schemas.check(tmp_path, MODELS)


def test_schema_without_a_model_is_found_and_removed_by_writing(tmp_path: Path) -> None:
    schemas.write(tmp_path, {**MODELS, "gone": _Example})
    with pytest.raises(CheckFailedError, match=r"gone\.schema\.json: no model"):
        schemas.check(tmp_path, MODELS)
    schemas.write(tmp_path, MODELS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["example.schema.json", "store.json"]


def test_command_exits_3_with_one_line_when_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.schema.json").write_text("{}")
    assert schemas.main(["--check", "--folder", str(tmp_path)]) == 3
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "run `python -m mopdctl.schemas`" in output.err


def test_the_layout_of_the_store_is_written_down() -> None:
    layout = json.loads((schemas.checkout_folder() / "store.json").read_text())
    assert layout["schema"] == "mopdctl.store/2"
    assert [column["name"] for column in layout["payload"]][:3] == ["sample_id", "tokens", "loss_mask"]
    assert all(column["doc"] for table in ("meta", "payload") for column in layout[table])
