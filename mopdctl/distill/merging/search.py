"""The search for scales: the best common one, then each teacher's own, by scores that somebody else measures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mopdctl.config.merge import MergeMethod
from mopdctl.distill.merging.sources import Scales

COMMON_SCALES: dict[MergeMethod, tuple[float, ...]] = {
    "task-arithmetic": (0.3, 0.4, 0.2, 0.5, 0.7, 0.1, 1.0),
    "linear": (1.0,),
    "ties": (1.0, 0.8, 1.3, 0.6, 1.6, 2.0, 0.4),
}
"""Common scales that are tried first, the default before others: where a few prompts cannot tell scales apart, the
first of equals stays. In a mean only proportions count, so that equal weights are one candidate."""

FACTORS = (0.0, 0.5, 1.5, 2.0)
"""What the scale of one teacher is then multiplied with."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Scales that were tried, and what the merge with them scored."""

    scales: Scales
    scores: Mapping[str, float]
    """Teacher to mean reward of greedy answers to its held-out prompts, 0-100."""
    unchecked: int = 0
    """Answers that the scores leave out, because their check broke."""

    @property
    def mean(self) -> float:
        """The mean over teachers, which the search maximises."""
        return sum(self.scores.values()) / len(self.scores)


def search(
    common: Iterable[float], num_teachers: int, movable: Sequence[int], measure: Callable[[Scales], Candidate]
) -> tuple[Candidate, list[Candidate]]:
    """The best candidate, and all of them in the order in which they were measured.

    First every teacher at each of the `common` scales; from the best of these, one pass over the teachers in `movable`
    (numbers from 0) that tries the current scale of one teacher times each of FACTORS and keeps what is best. Of equals
    the first one measured stays. No scales are measured twice, nor are those that leave no teacher in.
    """
    seen: dict[Scales, Candidate] = {}

    def look(scales: Scales) -> Candidate:
        if scales not in seen:
            seen[scales] = measure(scales)
        return seen[scales]

    best = max((look((scale,) * num_teachers) for scale in common), key=lambda candidate: candidate.mean)
    for i in movable:
        here = best.scales
        for factor in FACTORS:
            scales = (*here[:i], round(here[i] * factor, 6), *here[i + 1 :])
            if any(scales) and look(scales).mean > best.mean:
                best = seen[scales]
    return best, list(seen.values())


def most_measurements(method: MergeMethod, num_movable: int) -> int:
    """How many candidates a search measures at most."""
    return len(COMMON_SCALES[method]) + len(FACTORS) * num_movable
