"""The recovery table for a terminal, for Markdown and as JSON."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from mopdctl.evals.recovery import OK, Interval, Row, Table, round_half_up

SCHEMA = "mopdctl.recovery/1"

LEGEND = "gain = after - before, gap = teacher - before, lead = after - teacher, all in points; a positive one is good."
_TEXT_COLUMNS = {"benchmark", "teacher_id", "metric", "status"}


def to_json(table: Table) -> dict[str, Any]:
    """The table as a JSON document. Scores are on 0-100, percentages have one decimal, absent figures are null."""
    pooled = table.pooled
    return {
        "schema": SCHEMA,
        "rows": [_row_json(row) for row in table.rows],
        "pooled": {
            "recovery_pct": _number(pooled.recovery_pct),
            **_bounds("ci", pooled.ci),
            "gain": _number(pooled.gain),
            "gap": _number(pooled.gap),
            "n_ok": pooled.n_ok,
            "excluded": [benchmark for benchmark, _ in pooled.excluded],
        },
        "controls": [
            {
                "name": control.name,
                "recovery_pct": _number(control.recovery_pct),
                "after_minus_control": _number(control.after_minus_control),
                **_bounds("ci", control.ci),
            }
            for control in table.controls
        ],
        "notes": list(table.notes),
    }


def to_text(table: Table) -> str:
    """Aligned columns for a terminal, and what belongs under them."""
    columns = _columns(table)
    widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}

    def line(cells: Sequence[str]) -> str:
        pairs = zip(columns, cells, strict=True)
        return "  ".join(c.ljust(widths[n]) if n in _TEXT_COLUMNS else c.rjust(widths[n]) for n, c in pairs).rstrip()

    rule = ["-" * width for width in widths.values()]
    rows = zip(*columns.values(), strict=True)
    return "\n".join([*map(line, [list(columns), rule, *rows]), "", *_below(table)])


def to_markdown(table: Table) -> str:
    """A GitHub table, and the lines under it as a list."""
    columns = {name: [_escaped(cell) for cell in cells] for name, cells in _columns(table).items()}
    rule = [":---" if name in _TEXT_COLUMNS else "---:" for name in columns]
    lines = [list(columns), rule, *zip(*columns.values(), strict=True)]
    below = [f"- {_escaped(line)}" for line in _below(table)]
    return "\n".join([*("| " + " | ".join(cells) + " |" for cells in lines), "", *below])


def _columns(table: Table) -> dict[str, list[str]]:
    """Column name to cells; columns that would be empty throughout are left out."""
    places = _places(table.rows)
    columns = {
        "benchmark": [_plain(row.benchmark) for row in table.rows],
        "teacher_id": [_plain(row.teacher_id or "-") for row in table.rows],
        "metric": [_plain(row.metric or "-") for row in table.rows],
        "n": ["-" if row.n is None else str(row.n) for row in table.rows],
        "before": [_score(row.before, places) for row in table.rows],
        "after": [_score(row.after, places) for row in table.rows],
        "teacher": [_score(row.teacher, places) for row in table.rows],
        "gain": [_points(row.gain, places) for row in table.rows],
        "gain 95%": [_interval(row.gain_ci) for row in table.rows],
        "gap": [_points(row.gap, places) for row in table.rows],
        "lead": [_points(row.after_minus_teacher, places) for row in table.rows],
        "recovery %": [_score(row.recovery_pct, 1) for row in table.rows],
        "recovery 95%": [_interval(row.ci) for row in table.rows],
        "status": [row.status for row in table.rows],
    }
    kept = {"before", "after", "teacher", "gain", "gap", "lead", "recovery %"}
    return {name: cells for name, cells in columns.items() if name in kept or set(cells) != {"-"}}


def _below(table: Table) -> list[str]:
    pooled, places = table.pooled, _places(table.rows)
    lines = [LEGEND]
    if pooled.recovery_pct is None:
        lines.append("pooled recovery: none, because no row is ok")
    else:
        shown = f"gain {_points(pooled.gain, places)} over gap {_points(pooled.gap, places)}"
        lines.append(f"pooled recovery: {pooled.recovery_pct} %{_bracket(pooled.ci)} ({shown}; ok rows: {pooled.n_ok})")
    if pooled.excluded:
        names = ", ".join(f"{_plain(name)} ({status})" for name, status in pooled.excluded)
        lines.append(f"not in the pooled figure: {names}")
    for control in table.controls:
        if control.after_minus_control is None or control.recovery_pct is None:
            lines.append(f"control {_plain(control.name)}: no figure")
            continue
        lead = f"after - {_plain(control.name)} {_points(control.after_minus_control, 2)} points{_bracket(control.ci)}"
        lines.append(f"control {_plain(control.name)}: pooled recovery {control.recovery_pct} %, {lead}")
    alike: dict[str, list[str]] = {}
    for row in table.rows:
        if row.note:
            alike.setdefault(row.note, []).append(row.benchmark)
    lines += [_plain(f"{', '.join(names)}: {text}") for text, names in alike.items()]
    return lines + [_plain(text) for text in table.notes]


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "benchmark": row.benchmark,
        "domain": row.domain,
        "teacher_id": row.teacher_id,
        "metric": row.metric,
        "n": row.n,
        "before": _number(row.before),
        "after": _number(row.after),
        "teacher": _number(row.teacher),
        "gain": _number(row.gain),
        "gap": _number(row.gap),
        "after_minus_teacher": _number(row.after_minus_teacher),
        "recovery_pct": _number(row.recovery_pct) if row.status == OK else None,
        **_bounds("ci", row.ci),
        **_bounds("gain_ci", row.gain_ci),
        "status": row.status,
        "note": row.note,
    }


def _bounds(name: str, ci: Interval | None) -> dict[str, float | None]:
    low, high = ci or (None, None)
    return {f"{name}_low": _number(low), f"{name}_high": _number(high)}


def _number(value: Decimal | None) -> float | None:
    return None if value is None else float(value)


def _places(rows: Sequence[Row]) -> int:
    """One decimal if that shows every figure exactly, else two."""
    figures = [f for row in rows for f in (row.before, row.after, row.teacher) if f is not None]
    return 1 if all(round_half_up(f, 1) == f for f in figures) else 2


def _score(value: Decimal | None, places: int) -> str:
    return "-" if value is None else f"{round_half_up(value, places):f}"


def _points(value: Decimal | None, places: int) -> str:
    return "-" if value is None else f"{round_half_up(value, places):+f}"


def _interval(ci: Interval | None) -> str:
    return "-" if ci is None else f"[{ci[0]}, {ci[1]}]"


def _bracket(ci: Interval | None) -> str:
    return "" if ci is None else f" {_interval(ci)}"


def _plain(text: str) -> str:
    """Text from files without what could move a cursor or break a row."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
