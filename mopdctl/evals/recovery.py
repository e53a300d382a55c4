"""What each teacher passed on: recovery = (after - before) / (teacher - before), row by row and pooled.

The formula is that of Table 5 of the Nemotron 3 Ultra report, (MOPD2 - RLVR) / (Teacher - RLVR). The ratio is the same
for metrics where lower is better; differences are turned round for them, so that a positive one is always good.

Figures are Decimals, rounded half up and only when they are shown: 51.25 is 51.3. This module knows no files; intervals
are the work of `bootstrap`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

COMPARED = ("metric", "filter", "higher_is_better", "version", "num_fewshot", "prompt", "generation")
"""Identity fields that must be equal before figures may be compared. Others that differ are noted."""

OK, MISSING, NON_FINITE, MISMATCH, PARTIAL = "ok", "missing", "non_finite", "mismatch", "partial"
TEACHER_NOT_BETTER, LOW_GAP = "teacher_not_better", "low_gap"

Interval = tuple[Decimal, Decimal]


@dataclass(frozen=True, slots=True)
class Figure:
    """What one model scored on one benchmark."""

    score: Decimal | None
    """None where there is none, NaN or infinite where it is not finite; `reason` says why."""
    reason: str | None = None
    n: int | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, float | None] | None = None
    """Document to value, on the scale of `score`; None where there are no per-sample values."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One benchmark and one teacher: what goes into a row of the table."""

    benchmark: str
    before: Figure
    after: Figure
    teacher: Figure
    controls: tuple[Figure, ...] = ()
    """In the order of the table's control names."""
    higher_is_better: bool = True
    domain: str | None = None
    teacher_id: str | None = None
    metric: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Scores and differences in points; None where a figure is absent. A positive difference is good."""

    benchmark: str
    domain: str | None
    teacher_id: str | None
    metric: str | None
    n: int | None
    before: Decimal | None
    after: Decimal | None
    teacher: Decimal | None
    gain: Decimal | None
    """after - before."""
    gap: Decimal | None
    """teacher - before."""
    after_minus_teacher: Decimal | None
    recovery_pct: Decimal | None
    """One decimal, never clipped; only where the status is `ok`."""
    status: str
    note: str | None
    ci: Interval | None = None
    gain_ci: Interval | None = None


@dataclass(frozen=True, slots=True)
class Pooled:
    """The sum of gains over the sum of gaps of the `ok` rows."""

    recovery_pct: Decimal | None
    gain: Decimal | None
    gap: Decimal | None
    n_ok: int
    excluded: tuple[tuple[str, str], ...]
    """Benchmark and status of every other row."""
    ci: Interval | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """Another way to the same end, e.g. a weight merge, on the same `ok` rows; None where it lacks one of them."""

    name: str
    recovery_pct: Decimal | None
    after_minus_control: Decimal | None
    """Mean over the rows of after - control, in points."""
    ci: Interval | None = None
    """Of `after_minus_control`."""


@dataclass(frozen=True, slots=True)
class Table:
    """The whole result."""

    rows: tuple[Row, ...]
    pooled: Pooled
    controls: tuple[Control, ...]
    notes: tuple[str, ...]


def recover(
    entries: Sequence[Entry],
    *,
    min_gap: Decimal = Decimal(1),
    control_names: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> Table:
    """The table without intervals.

    Args:
        entries: The rows to be, each with one control figure per name in `control_names`.
        min_gap: A gap under this many points is `low_gap`.
        control_names: Names of the controls.
        notes: What the reader of the files has to say; shown under the table.

    Source: Nemotron 3 Ultra report, Table 5.
    """
    rows = tuple(judge(entry, min_gap=min_gap) for entry in entries)
    ok = [(entry, row) for entry, row in zip(entries, rows, strict=True) if row.status == OK]
    gain, gap = _total(row.gain for _, row in ok), _total(row.gap for _, row in ok)
    pooled = Pooled(
        recovery_pct=percent(gain, gap) if ok else None,
        gain=gain if ok else None,
        gap=gap if ok else None,
        n_ok=len(ok),
        excluded=tuple((row.benchmark, row.status) for row in rows if row.status != OK),
    )
    controls, problems = [], []
    for index, name in enumerate(control_names):
        control, problem = _control(name, index, ok, gap)
        controls.append(control)
        problems += [problem] if problem else []
    return Table(rows=rows, pooled=pooled, controls=tuple(controls), notes=(*notes, *problems))


def judge(entry: Entry, *, min_gap: Decimal) -> Row:
    """One row with its one status.

    The first that fits of: `missing`, `non_finite`, `mismatch`, `partial`, `teacher_not_better` (gap at most 0),
    `low_gap` (gap under `min_gap` or under two standard errors of the paired difference teacher - before), `ok`.
    Scores of a `partial` row are means over the documents that all three have.
    """
    figures = {"before": entry.before, "after": entry.after, "teacher": entry.teacher}
    status, note = state(figures)
    values = paired_values(tuple(figures.values()))
    scores = [finite_or_none(figure.score) for figure in figures.values()]
    counts = {figure.n for figure in figures.values() if figure.n is not None}
    n = counts.pop() if len(counts) == 1 else None
    notes = [note] if note else []
    if status == PARTIAL and values:
        scores, n = [_mean(column) for column in values], len(values[0])
    elif status == PARTIAL:
        notes.append("scores as reported, because they are not means over documents")

    before, after, teacher = scores
    sign = 1 if entry.higher_is_better else -1
    gain, gap = _difference(after, before, sign), _difference(teacher, before, sign)
    if not status and gap is not None:
        status, note = _judge_gap(gap, _paired_stderr(values), min_gap)
        notes += [note] if note else []
    if status not in (MISSING, NON_FINITE):
        notes += side_notes(figures, values)
    return Row(
        benchmark=entry.benchmark,
        domain=entry.domain,
        teacher_id=entry.teacher_id,
        metric=entry.metric,
        n=n,
        before=before,
        after=after,
        teacher=teacher,
        gain=gain,
        gap=gap,
        after_minus_teacher=_difference(after, teacher, sign),
        recovery_pct=percent(gain, gap) if status == OK else None,
        status=status,
        note="; ".join(notes) or None,
    )


def state(figures: dict[str, Figure]) -> tuple[str, str]:
    """The first of missing, non_finite, mismatch and partial that fits these figures, and why; empty if none does."""
    absent = [f"{who}: {f.reason or 'no score'}" for who, f in figures.items() if f.score is None]
    if absent:
        return MISSING, ", ".join(absent)
    broken = [f"{who}: {problem}" for who, f in figures.items() if (problem := _not_finite(f))]
    if broken:
        return NON_FINITE, ", ".join(broken)
    fields = [_shown_field(name, figures) for name in COMPARED if _differs(name, figures)]
    documents, overlap = _documents(figures)
    if fields or documents == MISMATCH:
        return MISMATCH, "differ: " + ", ".join([*fields, *([overlap] if documents == MISMATCH else [])])
    return documents, overlap


def paired_values(figures: Sequence[Figure]) -> tuple[tuple[float, ...], ...] | None:
    """Per figure, its values on the documents that all share, in the order of the document names.

    None unless every figure is the mean of finite per-sample values and at least one document is shared. A score that
    is not the mean of its documents (a corpus metric) cannot be resampled from them.
    """
    tables = [figure.samples for figure in figures]
    if not all(map(_averages, figures)):
        return None
    shared = sorted(set.intersection(*(set(table) for table in tables if table is not None)))
    columns = tuple(tuple(table[name] for name in shared) for table in tables if table is not None)
    finite = tuple(tuple(value for value in column if value is not None) for column in columns)
    return finite if shared and all(len(column) == len(shared) for column in finite) else None


def percent(gain: Decimal | None, gap: Decimal | None) -> Decimal | None:
    """100 * gain / gap to one decimal, half up, not clipped; None where a figure is absent or the gap is 0."""
    if gain is None or not gap:
        return None
    with localcontext(prec=400):
        return round_half_up(100 * gain / gap, 1)


def round_half_up(value: Decimal, places: int) -> Decimal:
    """`value` with so many decimals; ties away from zero; never a negative zero."""
    with localcontext(prec=400):
        return value.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_UP) + 0


def _judge_gap(gap: Decimal, stderr: float | None, min_gap: Decimal) -> tuple[str, str]:
    if gap <= 0:
        return TEACHER_NOT_BETTER, "teacher equals before" if gap == 0 else ""
    if gap < min_gap:
        return LOW_GAP, f"gap under --min-gap {min_gap}"
    if stderr is not None and float(gap) < 2 * stderr:
        shown = "unknown: one document" if math.isinf(stderr) else f"{2 * stderr:.2f}"
        return LOW_GAP, f"gap under two standard errors ({shown})"
    return OK, ""


def _paired_stderr(values: tuple[tuple[float, ...], ...] | None) -> float | None:
    """sd(teacher - before) / sqrt(n) over documents; infinite for one document, None without per-sample values."""
    if not values:
        return None
    differences = [teacher - before for before, teacher in zip(values[0], values[2], strict=True)]
    n = len(differences)
    if n < 2:
        return math.inf
    mean = math.fsum(differences) / n
    return math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)


def _control(name: str, index: int, ok: list[tuple[Entry, Row]], gap: Decimal) -> tuple[Control, str | None]:
    gains, leads = [], []
    for entry, row in ok:
        figure = entry.controls[index]
        status, why = state({"before": entry.before, name: figure})
        sign = 1 if entry.higher_is_better else -1
        gain, lead = _difference(figure.score, row.before, sign), _difference(row.after, figure.score, sign)
        if status or gain is None or lead is None:
            problem = f"control {name}: no figure, because {row.benchmark} is {status} there ({why})"
            return Control(name, None, None), problem
        gains.append(gain)
        leads.append(lead)
    if not ok:
        return Control(name, None, None), None
    return Control(name, percent(_total(gains), gap), round_half_up(_total(leads) / len(leads), 2)), None


def _documents(figures: dict[str, Figure]) -> tuple[str, str]:
    counts = {who: f.n for who, f in figures.items()}
    tables = {who: f.samples for who, f in figures.items() if f.samples is not None}
    if len(tables) < len(figures):  # without documents, their number is all that can be compared
        same = len({n for n in counts.values() if n is not None}) < 2
        return ("", "") if same else (MISMATCH, f"documents ({_by_side(counts)})")
    sets = [set(table) for table in tables.values()]
    shared = set.intersection(*sets)
    if all(len(found) == len(shared) for found in sets):
        return "", ""
    sizes = _by_side({who: len(table) for who, table in tables.items()})
    if not shared:
        return MISMATCH, f"documents (none shared; {sizes})"
    return PARTIAL, f"{len(shared)} of {len(set.union(*sets))} documents shared ({sizes})"


def side_notes(figures: dict[str, Figure], values: tuple[tuple[float, ...], ...] | None) -> list[str]:
    """What does not change the status but should be known."""
    keys = sorted({key for f in figures.values() for key in f.identity} - set(COMPARED))
    notes = [f"{key} differs" for key in keys if _differs(key, figures)]
    samples = [f.samples is not None for f in figures.values()]
    if any(f.identity for f in figures.values()) and not all(samples):
        notes.append("no interval, because per-sample values are missing")
    elif all(samples) and not all(map(_averages, figures.values())):
        notes.append("no interval, because the score is not the mean of its documents")
    elif values and len(values[0]) < 2:
        notes.append("no interval from one document")
    return notes


def _averages(figure: Figure) -> bool:
    """Whether the score is the mean of its documents; scores rounded to two decimals pass."""
    values = [value for value in (figure.samples or {}).values() if value is not None]
    if not values or len(values) != len(figure.samples or {}) or figure.score is None:
        return False
    return math.isclose(math.fsum(values) / len(values), float(figure.score), rel_tol=1e-6, abs_tol=0.005 + 1e-9)


def _not_finite(figure: Figure) -> str | None:
    if figure.score is not None and not figure.score.is_finite():
        return figure.reason or "not finite"
    holes = sum(value is None for value in (figure.samples or {}).values())
    return f"{holes} of {len(figure.samples or {})} documents without a finite value" if holes else None


def _differs(name: str, figures: dict[str, Figure]) -> bool:
    first, *others = [figure.identity.get(name) for figure in figures.values()]
    return any(other != first for other in others)


def _shown_field(name: str, figures: dict[str, Figure]) -> str:
    values = {who: figure.identity.get(name) for who, figure in figures.items()}
    return f"{name} ({_by_side(values)})" if all(len(str(value)) <= 24 for value in values.values()) else name


def _by_side(values: dict[str, Any]) -> str:
    return ", ".join(f"{who} {'none' if value is None else value}" for who, value in values.items())


def finite_or_none(value: Decimal | None) -> Decimal | None:
    """None instead of NaN and infinity."""
    return value if value is not None and value.is_finite() else None


def _difference(left: Decimal | None, right: Decimal | None, sign: int) -> Decimal | None:
    return None if left is None or right is None else sign * (left - right)


def _mean(values: Sequence[float]) -> Decimal:
    return decimal_of(math.fsum(values) / len(values))


def _total(values: Iterable[Decimal | None]) -> Decimal:
    return sum((value for value in values if value is not None), Decimal(0))


def decimal_of(value: float) -> Decimal:
    """A float as a Decimal of at most ten decimals, so that 14.25 held as 14.249999999999998 still rounds up."""
    return Decimal(repr(round(value, 10))) + 0
