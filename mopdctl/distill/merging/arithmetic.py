"""Task arithmetic."""

from collections.abc import Iterable, Sequence

from torch import Tensor


def task_arithmetic(student: Tensor, teachers: Iterable[Tensor], scales: Sequence[float]) -> Tensor:
    """Student + sum_i scale_i * (teacher_i - student).

    Source: Ilharco et al., "Editing models with task arithmetic" (2023), section 2: addition of task vectors, there
    with one scale for all.
    """
    merged = student.clone()
    for teacher, scale in zip(teachers, scales, strict=True):
        merged.add_(teacher - student, alpha=scale)
    return merged
