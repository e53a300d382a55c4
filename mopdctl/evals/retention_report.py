"""Retention below the recovery table: for a terminal, for Markdown and as JSON."""

from typing import Any

from mopdctl.evals.retention import Retained, Retention
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

SCHEMA = "mopdctl.retention/1"

LEGEND = "retention = quantized / {full}, in percent, turned round where lower is better; it is not recovery."
TESTS = "p: that nothing changed, by pairs: exact McNemar, or sign flips of graded documents; not corrected for rows."
LENGTHS = "length: of the quantized checkpoint's answers over that before, in characters."


def to_json(found: Retention) -> dict[str, Any]:
    """The rows as a JSON document; absent figures are null, and `status` and `note` say why."""
    return {
        "schema": SCHEMA,
        "full": found.full,
        "rows": [_row_json(row) for row in found.rows],
        "checkpoints": [
            {"checkpoint": one.checkpoint, "median_pct": number(one.median_pct), "n_ok": one.n_ok}
            for one in found.checkpoints
        ],
    }


def to_text(found: Retention) -> str:
    """Aligned columns, and what belongs under them."""
    return "\n".join([*text_table(_columns(found)), "", *_below(found)])


def to_markdown(found: Retention) -> str:
    """A GitHub table, and the lines under it as a list."""
    return "\n".join([*markdown_table(_columns(found)), "", *markdown_list(_below(found))])


def _columns(found: Retention) -> dict[str, list[str]]:
    rows = found.rows
    places = decimal_places(figure for row in rows for figure in (row.full, row.quantized))
    columns = {
        "checkpoint": [plain(row.checkpoint) for row in rows],
        "benchmark": [plain(row.benchmark) for row in rows],
        "metric": [plain(row.metric or "-") for row in rows],
        "n": [_count(row.n) for row in rows],
        "full": [shown_score(row.full, places) for row in rows],
        "quantized": [shown_score(row.quantized, places) for row in rows],
        "change": [shown_points(row.change, places) for row in rows],
        "retention %": [shown_score(row.retention_pct, 1) for row in rows],
        "retention 95%": [shown_interval(row.ci) for row in rows],
        "worse": [_count(row.worse) for row in rows],
        "better": [_count(row.better) for row in rows],
        "test": [row.test or "-" for row in rows],
        "p": ["-" if row.p_value is None else f"{row.p_value:.4f}" for row in rows],
        "length": ["-" if row.length_ratio is None else f"{row.length_ratio}x" for row in rows],
        "status": [row.status for row in rows],
    }
    return without_empty(columns, {"full", "quantized", "change", "retention %"})


def _below(found: Retention) -> list[str]:
    lines = [LEGEND.format(full=plain(found.full))]
    lines += [TESTS] if any(row.test for row in found.rows) else []
    lines += [LENGTHS] if any(row.length_ratio is not None for row in found.rows) else []
    for one in found.checkpoints:
        median = "none, because no row is ok" if one.median_pct is None else f"{one.median_pct} % (rows: {one.n_ok})"
        lines.append(f"{plain(one.checkpoint)}: median retention {median}")
    alike: dict[str, list[str]] = {}
    for row in found.rows:
        if row.note:
            alike.setdefault(row.note, []).append(f"{row.checkpoint} {row.benchmark}")
    return lines + [plain(f"{', '.join(names)}: {text}") for text, names in alike.items()]


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _row_json(row: Retained) -> dict[str, Any]:
    return {
        "checkpoint": row.checkpoint,
        "benchmark": row.benchmark,
        "metric": row.metric,
        "n": row.n,
        "full": number(row.full),
        "quantized": number(row.quantized),
        "change": number(row.change),
        **bounds("change_ci", row.change_ci),
        "retention_pct": number(row.retention_pct),
        **bounds("ci", row.ci),
        "test": row.test,
        "p_value": row.p_value,
        "worse": row.worse,
        "better": row.better,
        "length_ratio": number(row.length_ratio),
        "status": row.status,
        "note": row.note,
    }
