"""Factors w_d on each teacher's lambda: from the spread of its signal, or from the norm of its gradient.

Every sum is `math.fsum`, which rounds once: neither the order of teachers nor how samples lie on ranks changes a bit.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spread:
    """Count, mean and spread of some log-ratios in nats."""

    count: int
    mean_nats: float
    squares: float
    """Sum of squared deviations from the mean, in nats^2."""

    @property
    def sigma_nats(self) -> float:
        """Population standard deviation; 0 of nothing."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def spread(log_ratios_N: Tensor) -> Spread:
    """The spread of the log-ratios [N] of one sample, in float64."""
    values = log_ratios_N.double().tolist()
    if not values:
        return Spread(0, 0.0, 0.0)
    mean = math.fsum(values) / len(values)
    return Spread(len(values), mean, math.fsum((value - mean) ** 2 for value in values))


def pooled(parts: Iterable[Spread]) -> Spread:
    """The spread of all values of some parts together."""
    parts = [part for part in parts if part.count]
    if not parts:
        return Spread(0, 0.0, 0.0)
    count = sum(part.count for part in parts)
    mean = math.fsum(part.count * part.mean_nats for part in parts) / count
    between = [part.count * (part.mean_nats - mean) ** 2 for part in parts]
    return Spread(count, mean, math.fsum([*between, *(part.squares for part in parts)]))


def sigma_factors(spreads: Mapping[str, Spread], *, low: float, high: float) -> dict[str, float]:
    """w_d = clip(sigma_all / sigma_d, low, high), so that no teacher is loud only because its log-ratios are wide.

    sigma is the standard deviation of teacher - behaviour log-probabilities over the loss-active tokens of the whole
    optimizer batch: of one teacher (d), of all. Advantages keep their mean. A teacher whose log-ratios are all equal
    (one token, or the student itself) has no spread to go by, and factor 1.

    Source: DN-MOPD (arXiv 2609.35347).
    """
    sigma_all = pooled(spreads.values()).sigma_nats
    return {
        teacher: min(max(sigma_all / own.sigma_nats, low), high) if own.sigma_nats else 1.0
        for teacher, own in spreads.items()
    }


def share_factors(
    before: Mapping[str, float],
    norms: Mapping[str, float],
    targets: Mapping[str, float],
    weights: Mapping[str, float],
    *,
    memory: float,
    low: float,
    high: float,
) -> dict[str, float]:
    """One damped step towards factors under which each teacher's share of the gradient norm is its target.

        w_d <- clip(c w_d^memory (target_d / norm_d)^(1 - memory), low, high),   c such that sum lambda_d w_d stays

    If gradients keep their direction and size, a share's logarithm comes closer to its target's by the factor `memory`
    each time. A teacher without a measured gradient keeps its factor, and the others share what they had.

    Args:
        before: w_d so far; lambda-weighted mean 1, each in [low, high].
        norms: Norm of each teacher's gradient without w_d, in any common unit. 0 and absence are no measurement.
        targets: Shares aimed at, positive, in any common unit.
        weights: lambda_d.
        memory: In [0, 1): how much of the old factor is kept.
        low: Least factor, at most 1.
        high: Largest factor, at least 1.
    """
    measured = sorted(teacher for teacher in before if norms.get(teacher))
    logs = {
        teacher: memory * math.log(before[teacher])
        + (1 - memory) * (math.log(targets[teacher]) - math.log(norms[teacher]))
        for teacher in measured
    }
    return {**before, **_fill(logs, before, weights, low, high)} if measured else dict(before)


def _fill(
    logs: Mapping[str, float], before: Mapping[str, float], weights: Mapping[str, float], low: float, high: float
) -> dict[str, float]:
    """exp(logs + s) within [low, high], with the one s that leaves the lambda-weighted sum as it was: by bisection.

    To clip after scaling, or scale after clipping, would break either the bounds or the mean.
    """
    total = math.fsum(weights[teacher] * before[teacher] for teacher in logs)

    def factor(log_factor: float) -> float:
        if math.log(low) < log_factor < math.log(high):
            return min(max(math.exp(log_factor), low), high)
        return low if log_factor <= math.log(low) else high

    def factors(shift: float) -> dict[str, float]:
        return {teacher: factor(value + shift) for teacher, value in logs.items()}

    least, most = math.log(low) - max(logs.values()), math.log(high) - min(logs.values())
    while least < (middle := (least + most) / 2) < most:
        found = factors(middle)
        if math.fsum(weights[teacher] * own for teacher, own in found.items()) < total:
            least = middle
        else:
            most = middle
    return factors(most)
