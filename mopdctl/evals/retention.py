"""What quantization kept: retention = quantized score / score before quantization, per benchmark, with a paired test.

Retention is not recovery: recovery says what a teacher passed on, retention what the rounding of weights took away.
Both sides answered the same documents, so that the test is one of pairs: exact McNemar where every document is right or
wrong, else a sign-flip permutation test of the mean difference. Where lower is better the ratio is turned round, so
that 100 % means nothing lost, and less of it worse, on every benchmark.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mopdctl.evals.bootstrap import interval, ratio_interval, resampled_means
from mopdctl.evals.recovery import (
    MISSING,
    NON_FINITE,
    OK,
    PARTIAL,
    Entry,
    Figure,
    Interval,
    decimal_of,
    finite_or_none,
    paired_values,
    percent,
    round_half_up,
    side_notes,
    state,
)
from mopdctl.files import digest

NO_RATIO = "no_ratio"
"""A score of 0 or less before quantization, or of 0 after it where lower is better: nothing to take a share of."""

_EXACT_FLIPS = 14
"""Documents that differ, up to which all 2^n signs are tried instead of drawn."""
_BLOCK = 1 << 20
"""Signs held at a time."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One benchmark before and after quantization: what goes into a row."""

    checkpoint: str
    """The evaluation of the quantized checkpoint."""
    benchmark: str
    metric: str | None
    full: Figure
    """Before quantization."""
    quantized: Figure
    higher_is_better: bool = True
    full_lengths: Mapping[str, float] | None = None
    """Document to the length of its answer; None where the evaluation holds no answers."""
    quantized_lengths: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Retained:
    """One row. None where a figure is absent; a positive change is good."""

    checkpoint: str
    benchmark: str
    metric: str | None
    n: int | None
    full: Decimal | None
    quantized: Decimal | None
    change: Decimal | None
    """quantized - full, in points."""
    change_ci: Interval | None
    retention_pct: Decimal | None
    """One decimal, never clipped; only where the status is `ok`."""
    ci: Interval | None
    test: str | None
    """`mcnemar` or `sign_flip`; None where documents cannot be paired."""
    p_value: float | None
    worse: int | None
    """Documents on which the quantized checkpoint did worse."""
    better: int | None
    length_ratio: Decimal | None
    """Mean length of the quantized checkpoint's answers over that before, in characters, on shared documents."""
    status: str
    note: str | None


@dataclass(frozen=True, slots=True)
class Kept:
    """One quantized checkpoint over all benchmarks."""

    checkpoint: str
    median_pct: Decimal | None
    """Median retention of the `ok` rows."""
    n_ok: int


@dataclass(frozen=True, slots=True)
class Retention:
    """The whole result."""

    full: str
    """The evaluation before quantization."""
    rows: tuple[Retained, ...]
    checkpoints: tuple[Kept, ...]


def retain(pairs: Sequence[Pair], *, full: str, seed: int = 0, resamples: int = 10_000) -> Retention:
    """The rows with their tests and paired bootstrap intervals (95 %, over documents), and a median per checkpoint."""
    rows = tuple(judge_pair(pair, seed=seed, resamples=resamples) for pair in pairs)
    kept = []
    for name in dict.fromkeys(row.checkpoint for row in rows):
        found = [row.retention_pct for row in rows if row.checkpoint == name and row.retention_pct is not None]
        kept.append(Kept(name, round_half_up(median(found), 1) if found else None, len(found)))
    return Retention(full, rows, tuple(kept))


def take_quantized(entries: Sequence[Entry], names: Sequence[str]) -> tuple[list[Entry], list[Pair]]:
    """Entries without their last controls, which are the figures of the quantized checkpoints, and those as pairs."""
    count = len(names)
    pairs = [
        Pair(name, entry.benchmark, entry.metric, entry.after, entry.controls[number - count], entry.higher_is_better)
        for number, name in enumerate(names)
        for entry in entries
    ]
    return [replace(entry, controls=entry.controls[:-count]) for entry in entries], pairs


def judge_pair(pair: Pair, *, seed: int, resamples: int) -> Retained:
    """One row with its one status.

    The first that fits of: `missing`, `non_finite`, `mismatch`, `partial` (as in the recovery table; scores and test
    are those of the shared documents), `no_ratio`, `ok`.
    """
    figures = {"before quantization": pair.full, "quantized": pair.quantized}
    status, note = state(figures)
    notes = [note] if note else []
    # What is not the same task, prompt and metric is no pair, even if its documents have the same names.
    paired = paired_values(tuple(figures.values())) if status in ("", PARTIAL) else None
    counts = {figure.n for figure in figures.values() if figure.n is not None}
    n = counts.pop() if len(counts) == 1 else None
    scores = [finite_or_none(figure.score) for figure in figures.values()]
    if status == PARTIAL and paired:
        scores, n = [decimal_of(math.fsum(column) / len(column)) for column in paired], len(paired[0])
    full, quantized = scores
    whole, share = (full, quantized) if pair.higher_is_better else (quantized, full)
    if not status and whole is not None and (whole <= 0 or (share is not None and share < 0)):
        status = NO_RATIO
        notes.append("a share of a score that is 0 or less says nothing")
    if status not in (MISSING, NON_FINITE):
        notes += side_notes(figures, paired)
    sign = 1 if pair.higher_is_better else -1
    ci = change_ci = test = p_value = worse = better = None
    if paired:
        differences = [sign * (q - f) for f, q in zip(*paired, strict=True)]
        worse, better = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
        stream = f"{pair.benchmark}/{pair.metric}"
        test, p_value = _test(paired, differences, worse, better, stream=stream, seed=seed, draws=resamples)
        if len(differences) > 1:
            means = resampled_means(paired, stream=stream, seed=seed, resamples=resamples)
            change_ci = interval(sign * (means[1] - means[0]), places=2)
            wholes, shares = (means[0], means[1]) if pair.higher_is_better else (means[1], means[0])
            ci = ratio_interval(shares, wholes) if not status else None
    return Retained(
        checkpoint=pair.checkpoint,
        benchmark=pair.benchmark,
        metric=pair.metric,
        n=n,
        full=full,
        quantized=quantized,
        change=None if full is None or quantized is None else sign * (quantized - full),
        change_ci=change_ci,
        retention_pct=percent(share, whole) if not status else None,
        ci=ci,
        test=test,
        p_value=p_value,
        worse=worse,
        better=better,
        length_ratio=_length_ratio(pair.full_lengths, pair.quantized_lengths),
        status=status or OK,
        note="; ".join(notes) or None,
    )


def mcnemar(worse: int, better: int) -> float:
    """The exact two-sided p-value of McNemar's test.

    Of n = `worse` + `better` documents that only one side got right, each falls on either side with probability 1/2 if
    quantization changes nothing: p = min(1, 2 P(X <= min(worse, better))), X ~ Binomial(n, 1/2). 1 where n = 0.

    Source: McNemar 1947; the exact form as in Agresti, Categorical Data Analysis, section 11.1.
    """
    n = worse + better
    tail = ways = 1
    for k in range(min(worse, better)):  # from one binomial coefficient to the next: thousands anew would take seconds
        ways = ways * (n - k) // (k + 1)
        tail += ways
    return float(min(Fraction(1), Fraction(2 * tail, 1 << n)))


def sign_flip(differences: Sequence[float], *, stream: str, seed: int, draws: int) -> float:
    """The two-sided p-value of the mean of paired differences.

    If quantization changes nothing, each difference has either sign: p is the share of all sign patterns whose |sum| is
    at least the one seen. With more than 14 differences other than 0, the share of `draws` drawn ones, the one seen
    counted among them, (1 + hits) / (1 + draws), which never gives 0.

    Source: Fisher 1935, section 21; Phipson and Smyth 2010 for the drawn form.
    """
    values = np.array([d for d in differences if d], np.float64)
    if not len(values):
        return 1.0
    seen = abs(values.sum()) - 1e-9 * np.abs(values).sum()  # sums of the same numbers in another order are equal
    if len(values) <= _EXACT_FLIPS:
        bits = np.arange(1 << len(values))[:, None] >> np.arange(len(values)) & 1
        return float(np.mean(np.abs((2 * bits - 1) @ values) >= seen))
    rng = np.random.default_rng([seed, int(digest(f"sign_flip/{stream}")[:16], 16)])
    hits, block = 0, max(1, _BLOCK // len(values))
    for start in range(0, draws, block):
        signs: NDArray[np.int8] = rng.integers(0, 2, size=(min(block, draws - start), len(values)), dtype=np.int8)
        hits += int(np.count_nonzero(np.abs(2 * (signs @ values) - values.sum()) >= seen))
    return (1 + hits) / (1 + draws)


def _test(
    paired: Sequence[Sequence[float]],
    differences: Sequence[float],
    worse: int,
    better: int,
    *,
    stream: str,
    seed: int,
    draws: int,
) -> tuple[str, float]:
    if len({value for column in paired for value in column} - {0.0}) <= 1:  # right or wrong, whatever right counts
        return "mcnemar", mcnemar(worse, better)
    return "sign_flip", sign_flip(differences, stream=stream, seed=seed, draws=draws)


def _length_ratio(full: Mapping[str, float] | None, quantized: Mapping[str, float] | None) -> Decimal | None:
    shared = (full or {}).keys() & (quantized or {}).keys()
    if not full or not quantized or not shared:
        return None
    before, after = (math.fsum(lengths[name] for name in sorted(shared)) for lengths in (full, quantized))
    return round_half_up(decimal_of(after / before), 2) if before else None
