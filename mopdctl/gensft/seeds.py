"""Seeds: read row by row from JSONL, Parquet and `datasets`, or made from attributes; and the plan that holds them.

A row that cannot be used goes to quarantine with its place and the reason, and reading goes on.
"""

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mopdctl.config.gensft import SeedSource
from mopdctl.errors import InputError
from mopdctl.files import digest, fingerprint, writing
from mopdctl.gensft.attributes import check_attributes, make_prompts
from mopdctl.gensft.records import Seed
from mopdctl.gensft.seed_rows import FoundRow, UnusableRowError, row_seed
from mopdctl.train.rows import without_nulls

Quarantine = Callable[[dict[str, Any]], None]

_PARQUET_ROWS = 256  # held at once, whatever the size of a row group
_SEED_FIELDS = tuple(field.name for field in fields(Seed))


def check_sources(sources: Sequence[SeedSource], base: Path) -> None:
    """Raises InputError for what is wrong with a source before a row is read.

    That is a file that is missing, no file, unreadable or UTF-16, and attributes that cannot be combined. Nothing is
    fetched for `dataset`.
    """
    for source in sources:
        if source.path is not None:
            _check_file(base / source.path)
        elif source.attributes is not None:
            check_attributes(source.attributes)


def read_seeds(
    sources: Sequence[SeedSource],
    *,
    base: Path,
    limit: int | None,
    quarantine: Quarantine,
    counts: Counter[str] | None = None,
) -> Iterator[Seed]:
    """The seeds of all sources in order, read as they are asked for.

    Trailing assistant turns are cut off, since SFT data are the usual seeds. Roles are never changed or merged.

    Args:
        sources: Where to read.
        base: Folder that relative paths start from.
        limit: Most seeds over all sources; None takes all.
        quarantine: Gets `{"file", "line", "byte_offset", "reason", "text"}` for each row that cannot be used. `line` is
            the row number from 0 where there are no lines, `text` the first 500 characters.
        counts: Counts what was read: `rows` (= `seeds` + `quarantined`), and of the seeds `answers_cut` (ended with
            the assistant), `uneven_roles` (user and assistant not in turn, or a system message that is not first) and
            `arguments_not_an_object` (tool calls whose arguments are no JSON object; they are kept as they are).

    Raises:
        InputError: At once for what `check_sources` finds; while reading, for a source without a usable row.
    """
    check_sources(sources, base)
    counts = Counter() if counts is None else counts
    seeds = (_source_seeds(source, base, quarantine, counts) for source in sources)
    return islice(map(_identifier(), chain.from_iterable(seeds)), limit)


def write_plan(path: Path, seeds: Iterable[Seed]) -> int:
    """Writes seeds as JSONL, one by one, into a file that appears whole or not at all. Returns their number."""
    written = 0
    with writing(path) as file:
        for seed in seeds:
            document = {name: getattr(seed, name) for name in _SEED_FIELDS}
            file.write(json.dumps(document, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            written += 1
    return written


def read_plan(path: Path) -> Iterator[Seed]:
    """The seeds that `write_plan` wrote, one by one. Raises InputError for anything else."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); plan anew") from None
    with file:
        for number, line in enumerate(file, start=1):
            yield _planned(line, f"{path}:{number}")


def _planned(line: bytes, place: str) -> Seed:
    try:
        found = json.loads(line)
        found |= {"messages": tuple(found["messages"]), "tools": tuple(found["tools"]) if found["tools"] else None}
        return Seed(**found)
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{place}: no seed of this version; delete the file to plan anew") from None


def _source_seeds(source: SeedSource, base: Path, quarantine: Quarantine, counts: Counter[str]) -> Iterator[Seed]:
    """The seeds of one source, still without ids."""
    if source.attributes is not None:
        for seed in islice(_made_seeds(source), source.limit):
            counts.update(("rows", "seeds"))
            yield seed
        return
    path = base / source.path if source.path else None
    taken, first_problem = 0, ""
    for found in _rows(path) if path else _dataset_rows(source, base):
        counts["rows"] += 1
        try:
            seed = row_seed(found, source, counts)
        except UnusableRowError as error:
            counts["quarantined"] += 1
            first_problem = first_problem or f"{found.place}: {error}"
            quarantine(found.quarantined(str(error)))
            continue
        counts["seeds"] += 1
        yield seed
        taken += 1
        if taken == source.limit:
            return
    if first_problem and not taken:
        raise InputError(f"{path or source.dataset}: none of the rows can be used; the first one is {first_problem}")
    if not taken:
        raise InputError(f"{path or source.dataset}: holds no rows; give at least one")


def _made_seeds(source: SeedSource) -> Iterator[Seed]:
    assert source.attributes is not None
    assert source.domain is not None
    name = source.source or "attributes"
    for made in make_prompts(source.attributes):
        yield Seed(
            seed_id="",
            messages=({"role": "user", "content": made.prompt},),
            tools=None,
            domain=source.domain,
            source=name,
            license=source.license,
            difficulty=made.difficulty,
            extra=dict(made.values),
            place=f"{name} row {made.number}",
        )


def _identifier() -> Callable[[Seed], Seed]:
    """Gives seeds their ids. Identical rows differ by how many came before; other rows change nothing."""
    seen: dict[int, int] = {}

    def identified(seed: Seed) -> Seed:
        own_id = (seed.extra or {}).get("id", "")
        identity = fingerprint([seed.source, own_id, seed.messages, seed.tools])
        key = int(identity[:16], 16)
        seen[key] = repeat = seen.get(key, -1) + 1
        return replace(seed, seed_id=digest(f"{identity} {repeat}"))

    return identified


def _check_file(path: Path) -> None:
    if not path.exists():
        raise InputError(f"{path}: no such file; check the path")
    if not path.is_file():
        raise InputError(f"{path}: is not a file; name a JSONL or Parquet file")
    try:
        with path.open("rb") as file:
            head = file.read(4096).split(b"\n", 1)[0]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    marked = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if path.suffix != ".parquet" and (marked or b"\0" in head):
        encoding = "UTF-16" if marked else "UTF-16BE" if head.startswith(b"\0") else "UTF-16LE"
        raise InputError(
            f"{path}:1: {encoding} where UTF-8 is needed; convert it: "
            f"iconv -f {encoding} -t UTF-8 {path.name} > {path.stem}.utf8{path.suffix}"
        )


def _rows(path: Path) -> Iterator[FoundRow]:
    return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Iterator[FoundRow]:
    offset = 0
    with path.open("rb") as file:  # lines of a binary file end at \n alone
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(codecs.BOM_UTF8)  # before a later line too, where files were joined
            if text.strip():
                yield FoundRow(str(path), number, offset, text)
            offset += len(line)


def _parquet_rows(path: Path) -> Iterator[FoundRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in range(batch.num_rows):
                    try:
                        yield FoundRow(str(path), number, None, without_nulls(batch.slice(row, 1).to_pylist()[0]))
                    except UnicodeDecodeError:
                        yield FoundRow(str(path), number, None, {}, "holds text that is not UTF-8")
                    number += 1
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None
    except OSError as error:
        raise InputError(f"{path}: damaged after row {number} ({str(error).splitlines()[0]})") from None


def _dataset_rows(source: SeedSource, base: Path) -> Iterator[FoundRow]:
    import datasets
    from datasets.exceptions import DatasetsError

    name = str(source.dataset)
    found = str(base / name) if (base / name).is_dir() else name
    try:
        rows = datasets.load_dataset(
            found, source.config, split=source.split, revision=source.revision, streaming=False
        )
    except (OSError, ValueError, DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{name}: cannot be loaded ({reason}); check dataset, config, split and revision") from None
    for number, row in enumerate(rows):
        yield FoundRow(name, number, None, without_nulls(row))
