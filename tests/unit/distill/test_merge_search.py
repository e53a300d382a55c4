"""The search for scales, on scores that are a function of the scales."""

from collections.abc import Callable, Sequence

import pytest

from mopdctl.distill.merging.search import COMMON_SCALES, FACTORS, Candidate, most_measurements, search
from mopdctl.distill.merging.sources import Scales

COMMON = COMMON_SCALES["task-arithmetic"]


def run(
    score: Callable[[Scales], Sequence[float]], *, teachers: int, movable: Sequence[int] | None = None
) -> tuple[Scales, list[Scales]]:
    """The best scales, and all that were measured in order."""

    def measure(scales: Scales) -> Candidate:
        return Candidate(scales, {f"t{i}": value for i, value in enumerate(score(scales))})

    movable = range(teachers) if movable is None else movable
    best, all_ = search(COMMON, teachers, movable, measure)
    assert best.mean == max(one.mean for one in all_)
    return best.scales, [one.scales for one in all_]


def peak(*planted: float) -> Callable[[Scales], list[float]]:
    """Scores that fall with the distance of each scale from a planted one."""
    return lambda scales: [100 - 10 * abs(s - p) for s, p in zip(scales, planted, strict=True)]


@pytest.mark.parametrize("planted", [(0.4, 0.4, 0.4), (0.2, 0.4, 0.6), (0.0, 0.3, 0.2), (0.6, 0.3, 0.3)])
def test_the_planted_best_is_found(planted: tuple[float, ...]) -> None:
    best, _ = run(peak(*planted), teachers=3)
    assert best == planted


def test_the_mean_over_teachers_decides_and_not_the_best_of_them() -> None:
    # The first teacher's score grows with every scale, the second's falls four times as fast.
    best, _ = run(lambda s: [10 * sum(s), 90 - 40 * sum(s)], teachers=2)
    assert best == (0.0, 0.05)


def test_common_scales_come_first_and_then_one_pass_over_the_teachers() -> None:
    _, measured = run(peak(0.2, 0.4), teachers=2)
    assert measured[: len(COMMON)] == [(scale, scale) for scale in COMMON]
    passes = measured[len(COMMON) :]
    # 0.2 to 0.4 are equally good as common scales: the default, measured first, stays. Then each teacher in turn.
    assert passes[: len(FACTORS)] == [(0.0, 0.3), (0.15, 0.3), (0.45, 0.3), (0.6, 0.3)]
    assert passes[len(FACTORS) :] == [(0.15, 0.0), (0.15, 0.15), (0.15, 0.45), (0.15, 0.6)]
    assert len(measured) == most_measurements("task-arithmetic", 2)


def test_without_any_difference_the_first_candidate_stays() -> None:
    best, measured = run(lambda scales: [0.0], teachers=2)
    assert best == (COMMON[0], COMMON[0])
    assert len(measured) == len(set(measured))


def test_what_was_measured_is_not_measured_again_and_no_candidate_is_without_a_teacher() -> None:
    best, measured = run(peak(0.2), teachers=1)
    assert best == (0.2,)
    assert sorted(measured) == sorted({(s,) for s in COMMON} | {(0.2 * f,) for f in (0.5, 2)} | {(0.3,)})


def test_scales_of_teachers_that_cannot_matter_are_left_as_they_are() -> None:
    best, measured = run(peak(0.6, 0.0), teachers=2, movable=[0])
    assert all(len(set(scales)) == 1 for scales in measured[: len(COMMON)])
    assert {scales[1] for scales in measured[len(COMMON) :]} == {best[1]}


def test_scales_stay_short_numbers() -> None:
    best, _ = run(peak(0.3, 0.3, 0.45), teachers=3)
    assert best == (0.3, 0.3, 0.45)  # 0.3 * 1.5 is 0.44999999999999996
