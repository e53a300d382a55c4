"""The recovery table for a terminal, for Markdown and as JSON."""

from collections.abc import Sequence
from typing import Any

from mopdctl.evals.recovery import OK, Interval, Row, Table
from mopdctl.evals.tables import (
    bounds,
    decimal_places,
    markdown_list,
    markdown_table,
    number,
    plain,
    shown_interval,
    shown_points,
    shown_score,
    text_table,
    without_empty,
)

SCHEMA = "mopdctl.recovery/1"

LEGEND = "gain = after - before, gap = teacher - before, lead = after - teacher, all in points; a positive one is good."


def to_json(table: Table) -> dict[str, Any]:
    """The table as a JSON document. Scores are on 0-100, percentages have one decimal, absent figures are null."""
    pooled = table.pooled
    return {
        "schema": SCHEMA,
        "rows": [_row_json(row) for row in table.rows],
        "pooled": {
            "recovery_pct": number(pooled.recovery_pct),
            **bounds("ci", pooled.ci),
            "gain": number(pooled.gain),
            "gap": number(pooled.gap),
            "n_ok": pooled.n_ok,
            "excluded": [benchmark for benchmark, _ in pooled.excluded],
        },
        "controls": [
            {
                "name": control.name,
                "recovery_pct": number(control.recovery_pct),
                "after_minus_control": number(control.after_minus_control),
                **bounds("ci", control.ci),
            }
            for control in table.controls
        ],
        "notes": list(table.notes),
    }


def to_text(table: Table) -> str:
    """Aligned columns for a terminal, and what belongs under them."""
    return "\n".join([*text_table(_columns(table)), "", *_below(table)])


def to_markdown(table: Table) -> str:
    """A GitHub table, and the lines under it as a list."""
    return "\n".join([*markdown_table(_columns(table)), "", *markdown_list(_below(table))])


def _columns(table: Table) -> dict[str, list[str]]:
    """Column name to cells; columns that would be empty throughout are left out."""
    places = _places(table.rows)
    columns = {
        "benchmark": [plain(row.benchmark) for row in table.rows],
        "teacher_id": [plain(row.teacher_id or "-") for row in table.rows],
        "metric": [plain(row.metric or "-") for row in table.rows],
        "n": ["-" if row.n is None else str(row.n) for row in table.rows],
        "before": [shown_score(row.before, places) for row in table.rows],
        "after": [shown_score(row.after, places) for row in table.rows],
        "teacher": [shown_score(row.teacher, places) for row in table.rows],
        "gain": [shown_points(row.gain, places) for row in table.rows],
        "gain 95%": [shown_interval(row.gain_ci) for row in table.rows],
        "gap": [shown_points(row.gap, places) for row in table.rows],
        "lead": [shown_points(row.after_minus_teacher, places) for row in table.rows],
        "recovery %": [shown_score(row.recovery_pct, 1) for row in table.rows],
        "recovery 95%": [shown_interval(row.ci) for row in table.rows],
        "status": [row.status for row in table.rows],
    }
    kept = {"before", "after", "teacher", "gain", "gap", "lead", "recovery %"}
    return without_empty(columns, kept)


def _below(table: Table) -> list[str]:
    pooled, places = table.pooled, _places(table.rows)
    lines = [LEGEND]
    if pooled.recovery_pct is None:
        lines.append("pooled recovery: none, because no row is ok")
    else:
        shown = f"gain {shown_points(pooled.gain, places)} over gap {shown_points(pooled.gap, places)}"
        lines.append(f"pooled recovery: {pooled.recovery_pct} %{_bracket(pooled.ci)} ({shown}; ok rows: {pooled.n_ok})")
    if pooled.excluded:
        names = ", ".join(f"{plain(name)} ({status})" for name, status in pooled.excluded)
        lines.append(f"not in the pooled figure: {names}")
    for control in table.controls:
        if control.after_minus_control is None or control.recovery_pct is None:
            lines.append(f"control {plain(control.name)}: no figure")
            continue
        lead = (
            f"after - {plain(control.name)} {shown_points(control.after_minus_control, 2)} points{_bracket(control.ci)}"
        )
        lines.append(f"control {plain(control.name)}: pooled recovery {control.recovery_pct} %, {lead}")
    alike: dict[str, list[str]] = {}
    for row in table.rows:
        if row.note:
            alike.setdefault(row.note, []).append(row.benchmark)
    lines += [plain(f"{', '.join(names)}: {text}") for text, names in alike.items()]
    return lines + [plain(text) for text in table.notes]


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "benchmark": row.benchmark,
        "domain": row.domain,
        "teacher_id": row.teacher_id,
        "metric": row.metric,
        "n": row.n,
        "before": number(row.before),
        "after": number(row.after),
        "teacher": number(row.teacher),
        "gain": number(row.gain),
        "gap": number(row.gap),
        "after_minus_teacher": number(row.after_minus_teacher),
        "recovery_pct": number(row.recovery_pct) if row.status == OK else None,
        **bounds("ci", row.ci),
        **bounds("gain_ci", row.gain_ci),
        "status": row.status,
        "note": row.note,
    }


def _places(rows: Sequence[Row]) -> int:
    return decimal_places(figure for row in rows for figure in (row.before, row.after, row.teacher))


def _bracket(ci: Interval | None) -> str:
    return "" if ci is None else f" {shown_interval(ci)}"
