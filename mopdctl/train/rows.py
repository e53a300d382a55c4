"""Rows from JSONL and Parquet: which files a data path means, how many rows they hold, and the rows in order."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import read_jsonl, read_text

Row = dict[str, Any]

_BATCH_ROWS = 1024
"""Rows of a Parquet file held at a time, beside its current row group."""


def data_files(path: Path, *, base: Path, workspace: Path) -> list[Path]:
    """The files that a data path means: a data set of the workspace, else a file, else a folder of files.

    A name is looked for under `workspace/datasets`; any other path starts from `base`. Of a folder, it is all
    `data/train-*.parquet`, or else all `*.parquet` and `*.jsonl` directly in it, in the order of their names.

    Raises InputError if nothing is there, or a folder without such files.
    """
    named = workspace / "datasets" / path
    found = named if len(path.parts) == 1 and path.name != ".." and named.is_dir() else base / path
    if not found.is_dir():
        if not found.exists():
            known = sorted(p.name for p in (workspace / "datasets").glob("[!.]*") if p.is_dir())
            near = difflib.get_close_matches(str(path), known, n=1)
            hint = f"did you mean the data set {near[0]!r}?" if near else "check the path"
            raise InputError(f"{found}: no such file; {hint}")
        return [found]
    files = sorted(found.glob("data/train-*.parquet"))
    files = files or sorted(p for p in found.iterdir() if p.suffix in (".parquet", ".jsonl") and p.is_file())
    if not files:
        raise InputError(f"{found}: a folder with neither data/train-*.parquet nor *.parquet or *.jsonl in it")
    return files


def iterate_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row of a JSONL or Parquet file with its place (`file:line` or `file row N`) for error messages.

    Of a Parquet file, one row group is in memory at a time. Raises InputError if the file is missing or unreadable.
    """
    if path.suffix != ".parquet":
        for number, row in list(read_jsonl(path)):  # a line that is no JSON is told before any row is
            yield f"{path}:{number}", row
        return
    number = 0
    with _parquet(path) as file:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group]):
                for row in batch.to_pylist():
                    yield f"{path} row {number}", without_nulls(row)
                    number += 1


def count_rows(path: Path) -> int:
    """The number of rows of a file; of a Parquet file, without reading any."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return int(file.metadata.num_rows)
    return sum(1 for line in read_text(path).split("\n") if line.strip())


def spread(available: int, wanted: int) -> list[int]:
    """Up to `wanted` of so many row numbers, evenly spaced, the first among them; ascending."""
    count = min(available, wanted)
    return [number * available // count for number in range(count)]


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise InputError(f"{path}: no such file; check the path")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None


# Columns whose objects may have keys of their own. Parquet gives every row the keys of all rows and fills them with
# null, which a template would print. Elsewhere, in a reference say, a null may be meant.
_OPEN = ("messages", "tools")


def without_nulls(row: Row) -> Row:
    """A row of a table without the nulls that only say that other rows have the field."""
    found = {key: value for key, value in row.items() if value is not None}
    return found | {key: _present(found[key]) for key in _OPEN if key in found}


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value
