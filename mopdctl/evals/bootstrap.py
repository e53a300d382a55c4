"""Paired bootstrap intervals for the recovery table. The only part of it that needs numpy.

One resample of a benchmark draws its documents with replacement and applies the same draw to before, after, teacher and
controls. Pooled figures draw within each benchmark on its own. Intervals are the 2.5th and 97.5th percentiles.
"""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from mopdctl.evals.recovery import (
    LOW_GAP,
    OK,
    PARTIAL,
    TEACHER_NOT_BETTER,
    Entry,
    Figure,
    Interval,
    Row,
    Table,
    paired_values,
    round_half_up,
    state,
)
from mopdctl.files import digest

Floats = NDArray[np.float64]

MAX_SHARE_WITHOUT_GAP = 0.05
_BLOCK = 1 << 16
"""Draws per step of the work: few enough for the processor's cache."""


def add_intervals(table: Table, entries: Sequence[Entry], *, seed: int, resamples: int) -> Table:
    """The table with the intervals that its per-sample values allow.

    Args:
        table: What `recover` made of `entries`.
        entries: The same entries in the same order.
        seed: With the benchmark's name, the random stream of its draws, so that a row's interval does not depend on
            which other rows there are.
        resamples: Number of bootstrap resamples.
    """
    rows, pooled = [], _Pool(len(table.controls))
    for entry, row in zip(entries, table.rows, strict=True):
        figures = _resampled_figures(entry, row)
        values = paired_values(figures) if figures else None
        if values is None or len(values[0]) < 2:
            rows.append(row)
            if row.status == OK:
                pooled.refuse(row.benchmark)
            continue
        controls = [paired_values((*figures, control)) for control in entry.controls] if row.status == OK else []
        usable = [c is not None and len(c[0]) == len(values[0]) for c in controls]
        columns = (*values, *(c[-1] for c, good in zip(controls, usable, strict=True) if good and c is not None))
        stream = f"{entry.benchmark}/{entry.metric}"
        means = resampled_means(columns, stream=stream, seed=seed, resamples=resamples)
        means *= 1 if entry.higher_is_better else -1
        gains = means[1] - means[0]
        ci, note = None, row.note
        if row.status == OK:
            gaps = means[2] - means[0]
            ci = ratio_interval(gains, gaps)
            note = note if ci else "; ".join(filter(None, [note, "no interval, because the gap is often 0 or less"]))
            pooled.add(gains, gaps, means[1], means[3:], usable)
        rows.append(replace(row, ci=ci, gain_ci=interval(gains, places=2), note=note))
    return pooled.finish(replace(table, rows=tuple(rows)))


def resampled_means(columns: Sequence[Sequence[float]], *, stream: str, seed: int, resamples: int) -> Floats:
    """Means of K paired columns of D documents over the same resampled documents. Shape (K, resamples)."""
    values = np.asarray(columns, dtype=np.float64).T  # (D, K)
    documents = len(values)
    rng = np.random.default_rng([seed, int(digest(stream)[:16], 16)])
    means = np.empty((resamples, values.shape[1]))
    block = max(1, _BLOCK // documents)
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = rng.integers(0, documents, size=(size, documents), dtype=np.int32)
        drawn += np.arange(size, dtype=np.int32)[:, None] * np.int32(documents)
        counts = np.bincount(drawn.ravel(), minlength=size * documents).reshape(size, documents)
        means[start : start + size] = counts @ values / documents
    return means.T.copy()


def interval(values: Floats, *, places: int) -> Interval:
    """The 2.5th and 97.5th percentile, rounded half up."""
    low, high = np.percentile(values, [2.5, 97.5])
    return round_half_up(Decimal(repr(float(low))), places), round_half_up(Decimal(repr(float(high))), places)


def ratio_interval(gains: Floats, gaps: Floats) -> Interval | None:
    """The interval of 100 * gain / gap, in percent to one decimal.

    A resample whose gap is 0 or less has no meaningful ratio (both differences negative would read as a success), so
    the percentiles are taken over the others. If more than 5 % have none, the interval would describe a selection and
    not the ratio: then there is no interval.
    """
    good = gaps > 0
    if np.count_nonzero(~good) > MAX_SHARE_WITHOUT_GAP * len(gaps):
        return None
    return interval(100 * gains[good] / gaps[good], places=1)


def _resampled_figures(entry: Entry, row: Row) -> tuple[Figure, ...]:
    if row.status in (OK, LOW_GAP, TEACHER_NOT_BETTER, PARTIAL):
        return (entry.before, entry.after, entry.teacher)
    comparable = state({"before": entry.before, "after": entry.after})[0] == ""
    return (entry.before, entry.after) if comparable else ()


class _Pool:
    """Sums the resampled gains, gaps and leads over controls of the `ok` rows."""

    def __init__(self, controls: int) -> None:
        self._gains: list[Floats] = []
        self._gaps: list[Floats] = []
        self._leads: list[list[Floats]] = [[] for _ in range(controls)]
        self._without: list[str] = []

    def refuse(self, benchmark: str) -> None:
        self._without.append(benchmark)

    def add(self, gains: Floats, gaps: Floats, after: Floats, controls: Floats, usable: Sequence[bool]) -> None:
        self._gains.append(gains)
        self._gaps.append(gaps)
        given = iter(controls)
        for leads, good in zip(self._leads, usable, strict=True):
            if good:
                leads.append(after - next(given))

    def finish(self, table: Table) -> Table:
        if self._without:
            names = ", ".join(self._without)
            return replace(table, notes=(*table.notes, f"no pooled intervals, because these rows have none: {names}"))
        if not self._gains:
            return table
        ci = ratio_interval(np.sum(self._gains, axis=0), np.sum(self._gaps, axis=0))
        notes = [*table.notes, *([] if ci else ["no pooled interval, because the summed gap is often 0 or less"])]
        controls = []
        for control, leads in zip(table.controls, self._leads, strict=True):
            if len(leads) == len(self._gains):
                control = replace(control, ci=interval(np.mean(leads, axis=0), places=2))
            elif control.after_minus_control is not None:
                notes.append(f"control {control.name}: no interval, because a row lacks per-sample values for it")
            controls.append(control)
        return replace(table, pooled=replace(table.pooled, ci=ci), controls=tuple(controls), notes=tuple(notes))
