"""Cosines between what teachers changed, on checkpoints whose deltas are planted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.merging.kinship import mean_cosine
from mopdctl.distill.merging.sources import open_sources
from mopdctl.runs import Workspace

Moves = dict[str, dict[str, float]]
"""Teacher to tensor to what is added to its first element."""


@pytest.fixture
def cosine(tmp_path: Path, write_tiny_model: Callable[..., Path]) -> Callable[[Moves], float | None]:
    def measure(moves: Moves) -> float | None:
        student = write_tiny_model(tmp_path / "student")
        for alias, moved in moves.items():
            folder = write_tiny_model(tmp_path / alias)
            weights = load_file(folder / "model.safetensors")
            for name, by in moved.items():
                weights[name].view(-1)[0] += by
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        document: dict[str, Any] = {
            "student": str(student),
            "prompts": "prompts.jsonl",
            "name": "m",
            "train": {"steps": 1},
            "teachers": {alias: {"model": str(tmp_path / alias), "domains": [alias]} for alias in moves},
        }
        sources = open_sources(TeachersFile.model_validate(document), Workspace(tmp_path / "w"), base=tmp_path)
        return mean_cosine(sources)

    return measure


ONE, OTHER = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


def test_deltas_in_different_tensors_are_orthogonal(cosine: Callable[[Moves], float | None]) -> None:
    assert cosine({"a": {ONE: 1.0}, "b": {OTHER: 2.0}}) == pytest.approx(0, abs=1e-6)


def test_the_cosine_is_that_of_all_tensors_as_one_vector(cosine: Callable[[Moves], float | None]) -> None:
    # (1, 1) and (1, -1) with (2, 0): 0, and 1 / sqrt 2 twice.
    found = cosine({"a": {ONE: 1.0, OTHER: 1.0}, "b": {ONE: 1.0, OTHER: -1.0}, "c": {ONE: 2.0}})
    assert found == pytest.approx(2 * 2**-0.5 / 3, abs=1e-5)


def test_a_teacher_that_is_the_student_has_no_direction(cosine: Callable[[Moves], float | None]) -> None:
    assert cosine({"a": {ONE: 1.0}, "b": {ONE: 3.0}, "self": {}}) == pytest.approx(1, abs=1e-6)
    assert cosine({"a": {ONE: 1.0}, "self": {}}) is None
