"""Tables for a terminal and for Markdown, and how figures look in them."""

from collections.abc import Iterable, Sequence
from decimal import Decimal

from mopdctl.evals.recovery import Interval, round_half_up

WORDS = frozenset({"benchmark", "checkpoint", "teacher_id", "metric", "status", "test"})
"""Columns that stand on the left; the others are figures."""


def text_table(columns: dict[str, list[str]]) -> list[str]:
    """Lines of aligned columns under their names."""
    widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}

    def line(cells: Sequence[str]) -> str:
        pairs = zip(columns, cells, strict=True)
        return "  ".join(c.ljust(widths[n]) if n in WORDS else c.rjust(widths[n]) for n, c in pairs).rstrip()

    rule = ["-" * width for width in widths.values()]
    return [*map(line, [list(columns), rule, *zip(*columns.values(), strict=True)])]


def markdown_table(columns: dict[str, list[str]]) -> list[str]:
    """Lines of a GitHub table; what is in its cells cannot break it."""
    escaped = {name: [_escaped(cell) for cell in cells] for name, cells in columns.items()}
    rule = [":---" if name in WORDS else "---:" for name in escaped]
    lines = [list(escaped), rule, *zip(*escaped.values(), strict=True)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def markdown_list(lines: Iterable[str]) -> list[str]:
    """Lines as the items of a list."""
    return [f"- {_escaped(line)}" for line in lines]


def without_empty(columns: dict[str, list[str]], kept: Iterable[str]) -> dict[str, list[str]]:
    """The columns without those that are empty throughout, unless they are `kept`."""
    return {name: cells for name, cells in columns.items() if name in kept or set(cells) != {"-"}}


def decimal_places(figures: Iterable[Decimal | None]) -> int:
    """One decimal if that shows every figure exactly, else two."""
    return 1 if all(figure is None or round_half_up(figure, 1) == figure for figure in figures) else 2


def shown_score(value: Decimal | None, places: int) -> str:
    """A figure with so many decimals."""
    return "-" if value is None else f"{round_half_up(value, places):f}"


def shown_points(value: Decimal | None, places: int) -> str:
    """A difference with its sign."""
    return "-" if value is None else f"{round_half_up(value, places):+f}"


def shown_interval(ci: Interval | None) -> str:
    """`[low, high]`."""
    return "-" if ci is None else f"[{ci[0]}, {ci[1]}]"


def number(value: Decimal | None) -> float | None:
    """A figure as JSON holds it."""
    return None if value is None else float(value)


def bounds(name: str, ci: Interval | None) -> dict[str, float | None]:
    """An interval as JSON holds it: `name_low` and `name_high`."""
    low, high = ci or (None, None)
    return {f"{name}_low": number(low), f"{name}_high": number(high)}


def plain(text: str) -> str:
    """Text from files without what could move a cursor or break a row."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
