"""Weight-space merge by task arithmetic: the control that MOPD has to beat, and a possible place to start from."""

from pathlib import Path

import torch
from torch import Tensor

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.teachers import load_teachers
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.runs import Workspace, building, checkpoint_digest, write_card


@torch.no_grad()
def task_arithmetic(student: dict[str, Tensor], teachers: list[dict[str, Tensor]], scale: float) -> dict[str, Tensor]:
    """Student + scale * sum_i (teacher_i - student), parameter by parameter, in float32.

    Source: Ilharco et al., "Editing models with task arithmetic" (2023). Raises ValueError where shapes differ.
    """
    merged = {}
    for name, weight in student.items():
        total = torch.zeros_like(weight, dtype=torch.float32)
        for teacher in teachers:
            if teacher[name].shape != weight.shape:
                raise ValueError(
                    f"{name}: {tuple(teacher[name].shape)} in a teacher, {tuple(weight.shape)} in the student"
                )
            total += teacher[name].float() - weight.float()
        merged[name] = weight.float() + scale * total
    return merged


def merge_into(student: HFModel, config: TeachersFile, workspace: Workspace, *, base: Path, scale: float) -> None:
    """Replaces the student's weights by the merge with the distinct checkpoints among its teachers."""
    teachers = load_teachers(config, student, workspace, base=base)
    distinct = {id(model): model for model in teachers.by_alias.values()}
    weights = dict(student.model.named_parameters())
    try:
        merged = task_arithmetic(weights, [dict(model.model.named_parameters()) for model in distinct.values()], scale)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"teachers of {config.name}: not of the student's architecture ({error}); merge needs one"
        ) from None
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(merged[name])


def run_merge(config: TeachersFile, workspace: Workspace, *, base: Path, scale: float, name: str) -> Path:
    """Writes the checkpoint `name`: student plus `scale` times the sum of teacher deltas. An existing one is left."""
    target = workspace.checkpoint(name)
    record = {"student": config.student, "teachers": {a: t.model for a, t in config.teachers.items()}, "scale": scale}
    if (target / "card.json").exists():
        return target
    student = HFModel.load(workspace.resolve_model(config.student, relative_to=base), train=True)
    merge_into(student, config, workspace, base=base, scale=scale)
    with building(target) as temporary:
        student.save(temporary)
        write_card(
            temporary,
            {
                "name": name,
                "algorithm": "merge/task_arithmetic",
                "parent": config.student,
                "config": record,
                "digest": checkpoint_digest(temporary),
            },
        )
    return target
