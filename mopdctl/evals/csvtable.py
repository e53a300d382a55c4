"""A plain CSV table of scores, such as a published one, as entries of the recovery table."""

import csv
import difflib
import io
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

from mopdctl.errors import InputError
from mopdctl.evals.recovery import Entry, Figure
from mopdctl.files import read_text

_NUMBER = re.compile(r"[+-]?(\d{1,12}(\.\d{0,20})?|\.\d{1,20})([eE][+-]?\d{1,2})?", re.ASCII)
_NOT_FINITE = re.compile(r"nan|[+-]?inf(inity)?", re.IGNORECASE)
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def read_table(
    path: Path,
    *,
    before: str,
    after: str,
    teacher: str,
    controls: Sequence[str] = (),
    higher_is_better: bool = True,
) -> list[Entry]:
    """The rows of a CSV file with a `benchmark` column and the named score columns.

    Lines that start with # are comments. Optional columns: `domain`, `teacher_id`, `metric`, and `higher_is_better`
    (true or false), which goes before the argument of that name. An empty score is absent; `nan` and `inf` are not
    finite; any other text that is not a number is an InputError with file, line and column.
    """
    entries: list[Entry] = []
    seen: dict[tuple[str | None, ...], int] = {}
    for line, row in _csv_rows(path, needed=["benchmark", before, after, teacher, *controls]):
        where = f"{path}:{line}"
        if not row["benchmark"]:
            raise InputError(f"{where}: the benchmark has no name; fill the column 'benchmark'")
        direction = row.get("higher_is_better", "").lower()
        if direction and direction not in _TRUTH:
            raise InputError(f"{where}: higher_is_better is {direction!r}; write true or false")
        entry = Entry(
            benchmark=row["benchmark"],
            before=_cell(row, before, where),
            after=_cell(row, after, where),
            teacher=_cell(row, teacher, where),
            controls=tuple(_cell(row, name, where) for name in controls),
            higher_is_better=_TRUTH.get(direction, higher_is_better),
            domain=row.get("domain") or None,
            teacher_id=row.get("teacher_id") or None,
            metric=row.get("metric") or None,
        )
        key = (entry.benchmark, entry.teacher_id, entry.metric)
        if key in seen:
            raise InputError(f"{where}: benchmark {entry.benchmark!r} is also on line {seen[key]}; keep one of the two")
        seen[key] = line
        entries.append(entry)
    if not entries:
        raise InputError(f"{path}: holds no rows; write one line per benchmark under the header")
    return entries


def _csv_rows(path: Path, *, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (line number, column to cell), cells stripped. Blank lines and comments are skipped."""
    line = 0

    def lines() -> Iterator[str]:
        nonlocal line
        for text in io.StringIO(read_text(path), newline=""):
            line += 1
            if not text.startswith("#"):
                yield text

    header: list[str] = []
    try:
        for cells in csv.reader(lines(), strict=True):
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if header:
                if len(cells) != len(header):
                    raise InputError(f"{path}:{line}: {len(cells)} cells where the header has {len(header)}")
                yield line, dict(zip(header, cells, strict=True))
                continue
            header = cells
            for name in needed:
                if header.count(name) != 1:
                    raise InputError(f"{path}:{line}: {_column_problem(name, header)}")
    except csv.Error as error:
        raise InputError(f"{path}:{line}: not CSV ({error})") from None


def _column_problem(name: str, header: Sequence[str]) -> str:
    if name in header:
        return f"two columns are named {name!r}; rename one"
    near = difflib.get_close_matches(name, header, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"columns: {', '.join(header)}"
    return f"no column {name!r}; {hint}"


def _cell(row: dict[str, str], column: str, where: str) -> Figure:
    text = row[column]
    if not text:
        return Figure(None, reason="empty cell")
    if _NOT_FINITE.fullmatch(text):
        return Figure(Decimal("NaN"), reason=text)
    if not _NUMBER.fullmatch(text):
        raise InputError(f"{where}: column {column!r} holds {text!r}, not a number; leave absent scores empty")
    return Figure(Decimal(text))
