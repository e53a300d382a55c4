"""Task arithmetic by hand."""

import pytest
import torch

from mopdctl.distill.merge import task_arithmetic

STUDENT = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[4.0]])}
TEACHERS = [
    {"a": torch.tensor([3.0, 2.0]), "b": torch.tensor([[0.0]])},
    {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[6.0]])},
]


@pytest.mark.parametrize(
    ("scale", "a", "b"),
    [
        (1.0, [1 + 2 + 0, 2 + 0 - 4], [[4 - 4 + 2]]),
        (0.25, [1.5, 1.0], [[3.5]]),
        (2.0, [5.0, -6.0], [[0.0]]),
    ],
)
def test_student_plus_scale_times_the_sum_of_deltas(scale: float, a: list[float], b: list[list[float]]) -> None:
    merged = task_arithmetic(STUDENT, TEACHERS, scale)
    assert merged["a"].tolist() == a
    assert merged["b"].tolist() == b
    assert STUDENT["a"].tolist() == [1.0, 2.0]


def test_no_teacher_or_the_student_itself_changes_nothing() -> None:
    for teachers in ([], [STUDENT], [STUDENT, STUDENT]):
        assert task_arithmetic(STUDENT, teachers, 0.7)["a"].tolist() == STUDENT["a"].tolist()


def test_deltas_are_added_in_float32() -> None:
    student = {"a": torch.tensor([256.0], dtype=torch.bfloat16)}
    teacher = {"a": torch.tensor([258.0], dtype=torch.bfloat16)}
    merged = task_arithmetic(student, [teacher], 0.25)  # 256.5 does not exist in bfloat16
    assert merged["a"].dtype == torch.float32
    assert merged["a"].tolist() == [256.5]


def test_another_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"b: \(1, 2\) in a teacher, \(1, 1\) in the student"):
        task_arithmetic(STUDENT, [STUDENT | {"b": torch.ones(1, 2)}], 0.5)
