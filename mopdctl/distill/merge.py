"""Weight-space merge by task arithmetic: the control that MOPD has to beat, and a possible place to start from."""

from pathlib import Path

import torch
from torch import Tensor

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.teachers import Teachers, load_teachers
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import fingerprint
from mopdctl.runs import Workspace, building, checkpoint_digest, finished, model_identity, write_card


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
    """Replaces the student's weights by the merge with the distinct checkpoints among its teachers.

    Teachers are read in full precision whatever they score in. Raises InputError for one of another architecture.
    """
    teachers = load_teachers(config, student, workspace, base=base, dtype="float32")
    check_architectures(student, teachers)
    distinct = {id(model): model for model in teachers.by_alias.values()}
    weights = dict(student.model.named_parameters())
    merged = task_arithmetic(weights, [dict(model.model.named_parameters()) for model in distinct.values()], scale)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(merged[name])


def check_architectures(student: HFModel, teachers: Teachers) -> None:
    """Raises InputError unless every teacher has exactly the student's parameters, by name and shape."""
    own = {name: tuple(weight.shape) for name, weight in student.model.named_parameters()}
    for alias, teacher in teachers.by_alias.items():
        other = {name: tuple(weight.shape) for name, weight in teacher.model.named_parameters()}
        differing = sorted(n for n in own.keys() | other.keys() if own.get(n) != other.get(n))
        if differing:
            name = differing[0]
            raise InputError(
                f"teacher {alias!r}: not of the student's architecture ({name} is {other.get(name, 'missing')} in the "
                f"teacher, {own.get(name, 'missing')} in the student); a merge needs one architecture"
            )


def run_merge(config: TeachersFile, workspace: Workspace, *, base: Path, scale: float, name: str) -> Path:
    """Writes the checkpoint `name`: student plus `scale` times the sum of teacher deltas.

    The same merge is left as it is; raises InputError if something else has the name.
    """
    target = workspace.checkpoint(name)
    models = {alias: workspace.resolve_model(t.model, relative_to=base) for alias, t in config.teachers.items()}
    start = workspace.resolve_model(config.student, relative_to=base)
    record = {
        "student": model_identity(start),
        "teachers": {alias: model_identity(model) for alias, model in sorted(models.items())},
        "scale": scale,
    }
    if finished(target, None, record):
        return target
    student = HFModel.load(start, train=True)
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
                "fingerprint": fingerprint(record),
                "digest": checkpoint_digest(temporary),
            },
        )
    return target
