"""The arithmetic of the experiment: pooled recovery, its standard errors over prompts and seeds, and regret."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopdctl.world.family.scores import Rewards

MIN_GAP = 1.0
"""A teacher that is less than so many points ahead of the student has nothing to pass on."""

Influence = dict[str, NDArray[np.float64]]
"""Domain to what each prompt [P] adds to the error of a figure; a figure's variance is the sum over domains of
P / (P - 1) * sum_p (u_p - mean u)^2."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a model recovered of its teachers' lead."""

    pct: float
    """R = sum_d gain_d / sum_d gap_d, in percent, over the domains whose teacher leads."""
    influence: Influence
    """In percent."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over seeds."""

    pct: float
    stderr_pct: float
    """sqrt(prompts^2 + seeds^2): the prompts are the same for all seeds, so that their error does not average out."""
    prompts_pct: float
    """Standard error over prompts, paired."""
    seeds_pct: float | None
    """Standard error over seeds; None for one seed."""


@dataclass(frozen=True, slots=True)
class Regret:
    """The choice that was advised against the best that there was."""

    best: str
    """The arm of the highest mean over seeds."""
    difference: Figure
    """Recovery of the best less that of the advised arm, paired by prompt and seed."""
    right: bool
    """Whether the advised is the best, or within one standard error of that difference."""


def recover(before: Rewards, teacher: Rewards, after: Rewards) -> Recovery | None:
    """Pooled recovery over the domains of `teacher`; None if no teacher leads by `MIN_GAP` points.

    All three answered the same prompts. With gain g_p and gap h_p of prompt p, R = G / H and H the sum of mean gaps,

        u_p = 100 (g_p - R h_p) / (P H)

    is the linearised error of R (a ratio of sums of stratum means; Cochran, "Sampling techniques", 1977, section 6.11).
    """
    gains, gaps = {}, {}
    for domain, theirs in teacher.items():
        gap = theirs - before[domain]
        if 100 * gap.mean() >= MIN_GAP:
            gains[domain], gaps[domain] = after[domain] - before[domain], gap
    if not gaps:
        return None
    whole_gap = sum(float(gap.mean()) for gap in gaps.values())
    ratio = sum(float(gain.mean()) for gain in gains.values()) / whole_gap
    influence = {d: 100 * (gains[d] - ratio * gaps[d]) / (len(gaps[d]) * whole_gap) for d in gaps}
    return Recovery(100 * ratio, influence)


def over_seeds(found: Sequence[Recovery]) -> Figure:
    """The mean of one figure over seeds, at least one."""
    values = np.array([one.pct for one in found])
    prompts = _stderr(_mean([one.influence for one in found]))
    if len(values) < 2:
        return Figure(float(values.mean()), prompts, prompts, None)
    seeds = float(values.std(ddof=1)) / math.sqrt(len(values))
    return Figure(float(values.mean()), math.hypot(prompts, seeds), prompts, seeds)


def regret(by_seed: Sequence[Mapping[str, Recovery]], advised: Sequence[str]) -> Regret:
    """How much the advised arm (one per seed) loses against the arm that is best over all seeds."""
    arms = list(by_seed[0])
    means = {arm: float(np.mean([found[arm].pct for found in by_seed])) for arm in arms}
    best = max(arms, key=lambda arm: means[arm])
    lost = over_seeds([less(found[best], found[arm]) for found, arm in zip(by_seed, advised, strict=True)])
    return Regret(best, lost, lost.pct <= lost.stderr_pct)


def less(one: Recovery, other: Recovery) -> Recovery:
    """The difference of two figures on the same prompts."""
    return Recovery(one.pct - other.pct, _sum([(1.0, one.influence), (-1.0, other.influence)]))


def _mean(found: Sequence[Influence]) -> Influence:
    return _sum([(1 / len(found), one) for one in found])


def _sum(terms: Sequence[tuple[float, Influence]]) -> Influence:
    total: Influence = {}
    for factor, influence in terms:
        for domain, values in influence.items():
            total[domain] = total[domain] + factor * values if domain in total else factor * values
    return total


def _stderr(influence: Influence) -> float:
    variance = 0.0
    for values in influence.values():
        if len(values) > 1:
            variance += len(values) / (len(values) - 1) * float(((values - values.mean()) ** 2).sum())
    return math.sqrt(variance)
