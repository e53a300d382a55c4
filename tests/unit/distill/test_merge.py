"""The methods of a merge by hand, and what they have in common."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.config.merge import MergeConfig
from mopdctl.distill.merging.arithmetic import task_arithmetic
from mopdctl.distill.merging.linear import linear
from mopdctl.distill.merging.methods import Combine
from mopdctl.distill.merging.ties import largest, ties


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


STUDENT = f64(1, 2, 4)
TEACHERS = [f64(3, 2, 0), f64(1, -2, 6)]

METHODS: dict[str, Combine] = {
    "task-arithmetic": task_arithmetic,
    "linear": linear,
    "ties, whole": ties(1.0),
    "ties, half": ties(0.5),
}
DELTA_METHODS = {name: combine for name, combine in METHODS.items() if name != "linear"}


# ----------------------------------------------------------------------------------------------------- task arithmetic


@pytest.mark.parametrize(
    ("scales", "merged"),
    [
        ((1, 1), [1 + 2 + 0, 2 + 0 - 4, 4 - 4 + 2]),
        ((0.25, 0.25), [1.5, 1.0, 3.5]),
        ((2, 2), [5, -6, 0]),
        ((0.5, 0), [2, 2, 2]),
        ((0.5, 2), [2, -6, 6]),
    ],
)
def test_task_arithmetic_adds_each_delta_with_its_scale(scales: Sequence[float], merged: list[float]) -> None:
    assert task_arithmetic(STUDENT, TEACHERS, scales).tolist() == merged
    assert STUDENT.tolist() == [1, 2, 4]


# -------------------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize(
    ("weights", "merged"),
    [((1, 1), [2, 0, 3]), ((7, 7), [2, 0, 3]), ((3, 1), [2.5, 1, 1.5]), ((0, 5), [1, -2, 6])],
)
def test_linear_is_the_weighted_mean_whatever_the_weights_sum_to(weights: Sequence[float], merged: list[float]) -> None:
    assert linear(STUDENT, TEACHERS, weights).tolist() == merged
    assert linear(f64(9, 9, 9), TEACHERS, weights).tolist() == merged


# ---------------------------------------------------------------------------------------------------------------- TIES

# Three teachers at density 0.5: of the four deltas of each, the two that are largest by magnitude are kept.
#                    d          kept
#   a    4   1  -3    2     4   0  -3   0
#   b   -1   2   5    0     0   2   5   0
#   c   -6   3   1   -2    -6   3   0   0
#   sum of kept            -2   5   2   0
#   sign elected            -   +   +   none
#   mean of those with it  -6  2.5  5   0
ZEROS = f64(0, 0, 0, 0)
A, B, C = f64(4, 1, -3, 2), f64(-1, 2, 5, 0), f64(-6, 3, 1, -2)


def test_ties_trims_elects_and_takes_the_mean_of_those_that_agree() -> None:
    assert ties(0.5)(ZEROS, [A, B, C], [1, 1, 1]).tolist() == [-6, 2.5, 5, 0]
    start = f64(10, 20, 30, 40)
    assert ties(0.5)(start, [start + d for d in (A, B, C)], [1, 1, 1]).tolist() == [4, 22.5, 35, 40]


def test_the_scale_of_ties_multiplies_what_is_added() -> None:
    # lambda of the paper: the election is the same at any common scale
    assert ties(0.5)(ZEROS, [A, B, C], [0.5, 0.5, 0.5]).tolist() == [-3, 1.25, 2.5, 0]


def test_own_scales_weigh_the_election_and_the_mean() -> None:
    # With c at a third, the first sum is 4 - 2: its sign turns, and a alone has it.
    assert ties(0.5)(ZEROS, [A, B, C], [1, 1, 1 / 3]).tolist() == pytest.approx([4, 1.5, 5, 0])


def test_a_teacher_of_scale_zero_has_no_say_in_ties() -> None:
    assert ties(0.5)(ZEROS, [A, B, C], [1, 0, 1]).equal(ties(0.5)(ZEROS, [A, C], [1, 1]))


def test_equal_masses_of_both_signs_leave_the_student() -> None:
    assert ties(1.0)(f64(7, 7), [f64(9, 8), f64(5, 8)], [1, 1]).tolist() == [7, 8]


@pytest.mark.parametrize(
    ("density", "kept"),
    [
        (0.2, [0, 0, -5, 0, 0]),
        (0.4, [0, 4, -5, 0, 0]),
        (0.6, [3, 4, -5, 0, 0]),  # three have magnitude 3 for one place: the first has it
        (0.8, [3, 4, -5, -3, 0]),
        (1.0, [3, 4, -5, -3, 3]),
        (0.01, [0, 0, -5, 0, 0]),  # never nothing
    ],
)
def test_trimming_keeps_the_largest_and_of_equals_the_first(density: float, kept: list[float]) -> None:
    delta = f64(3, 4, -5, -3, 3)
    assert (delta * largest(delta, density)).tolist() == kept
    assert largest(delta.view(1, 5), density).tolist() == [[value != 0 for value in kept]]
    assert delta.tolist() == [3, 4, -5, -3, 3]


def test_the_share_that_is_kept_is_that_of_each_tensor() -> None:
    delta = torch.randn(40, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for density in (0.07, 0.2, 0.29, 0.5):
        kept = largest(delta, density)
        assert int(kept.sum()) == round(density * 2000)
        assert float(delta[kept].abs().min()) > float(delta[~kept].abs().max())


# ---------------------------------------------------------------------------------------------------------- identities

# Float32 numbers of like size, as weights are: next to one 2^29 times larger even float64 would lose bits.
numbers = st.integers(-(10**7), 10**7).map(lambda value: value / 2**20)
few = settings(max_examples=40, deadline=None)
tensors = st.lists(numbers, min_size=6, max_size=6).map(lambda values: f64(*values))


@pytest.mark.parametrize("method", ["task-arithmetic", "linear", "ties, whole"])
@few
@given(student=tensors, teacher=tensors)
def test_one_teacher_at_scale_one_is_that_teacher_to_the_bit(method: str, student: Tensor, teacher: Tensor) -> None:
    assert METHODS[method](student, [teacher], [1]).float().equal(teacher.float())


@pytest.mark.parametrize("method", METHODS)
@few
@given(model=tensors, scales=st.lists(st.floats(0.1, 2), min_size=1, max_size=4))
def test_a_merge_of_equal_models_is_the_model(method: str, model: Tensor, scales: list[float]) -> None:
    assert METHODS[method](model, [model] * len(scales), scales).float().equal(model.float())


@few
@given(student=tensors, teachers=st.lists(tensors, min_size=1, max_size=4), scale=st.floats(0.1, 2))
def test_ties_without_trimming_is_task_arithmetic_over_the_number_of_teachers_where_all_signs_agree(
    student: Tensor, teachers: list[Tensor], scale: float
) -> None:
    signs = torch.tensor([1, -1, 1, -1, 1, -1])
    ahead = [student + signs * (teacher.abs() + 1) for teacher in teachers]
    count = len(teachers)
    mean = task_arithmetic(student, ahead, [scale / count] * count)
    assert torch.allclose(ties(1.0)(student, ahead, [scale] * count), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@few
@given(student=tensors, teachers=st.lists(tensors, min_size=2, max_size=4), data=st.data())
def test_the_order_of_teachers_means_nothing(
    method: str, student: Tensor, teachers: list[Tensor], data: st.DataObject
) -> None:
    scales = [0.25 * (1 + i) for i in range(len(teachers))]
    order = data.draw(st.permutations(range(len(teachers))))
    one = METHODS[method](student, teachers, scales)
    # up to what float64 rounds
    other = METHODS[method](student, [teachers[i] for i in order], [scales[i] for i in order])
    if method.startswith("ties"):  # a mass of 0 within rounding may elect either sign or none
        kept = clear_masses(student, teachers, scales, 1.0 if method == "ties, whole" else 0.5)
        one, other = one[kept], other[kept]
    assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def clear_masses(student: Tensor, teachers: list[Tensor], scales: list[float], density: float) -> Tensor:
    """Where the masses of both signs differ by more than rounding."""
    deltas = [s * (t - student) for t, s in zip(teachers, scales, strict=True)]
    return sum((delta * largest(delta, density) for delta in deltas), torch.zeros(())).abs() > 1e-9


@pytest.mark.parametrize("method", DELTA_METHODS)
@few
@given(student=tensors, teacher=tensors)
def test_the_student_among_its_teachers_changes_nothing_where_deltas_are_added(
    method: str, student: Tensor, teacher: Tensor
) -> None:
    combine = DELTA_METHODS[method]
    assert combine(student, [student, teacher], [1, 0.5]).equal(combine(student, [teacher], [0.5]))


@pytest.mark.parametrize("method", METHODS)
def test_teachers_are_read_one_at_a_time_and_each_has_a_scale(method: str) -> None:
    combine = METHODS[method]
    assert combine(STUDENT, iter(TEACHERS), [0.5, 0.5]).equal(combine(STUDENT, TEACHERS, [0.5, 0.5]))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        combine(STUDENT, TEACHERS, [0.5])


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "linear", "scale": 0.5}, "a weighted mean has no common scale"),
        ({"density": 0.5}, "only `ties` has a density"),
        ({"search": True, "scale": 0.5}, "leave out `scale` and `scales`"),
        ({"search": True, "scales": {"a": 0.5}}, "leave out `scale` and `scales`"),
        ({"method": "ties", "density": 0.0}, "greater than 0"),
        ({"method": "ties", "density": 1.5}, "less than or equal to 1"),
        ({"scale": 0.0}, "greater than 0"),
        ({"scales": {"a": -0.1}}, "greater than or equal to 0"),
        ({"scales": {"a": float("nan")}}, "finite number"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MergeConfig.model_validate(settings)
