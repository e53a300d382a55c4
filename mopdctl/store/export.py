"""A store as a Hugging Face dataset folder that `datasets.load_dataset` reads without us."""

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from mopdctl.errors import InputError
from mopdctl.runs import building
from mopdctl.store import disk, parquet, rows, schema
from mopdctl.store.schema import Column
from mopdctl.store.store import Store

FILE_TOKENS = 64 * 1024 * 1024
"""A file ends at so many tokens; about 500 MB."""

_SPLIT = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")

COLUMNS: tuple[Column, ...] = tuple(c for c in schema.META_COLUMNS if c.name not in schema.LOCATION) + tuple(
    c for c in schema.PAYLOAD_COLUMNS if c.name != "sample_id"
)
"""One row per sample, metadata and payload side by side."""


def export(store: Store, out: Path, *, split: str = "train", file_tokens: int = FILE_TOKENS) -> list[Path]:
    """Writes `data/<split>-00000-of-0000N.parquet` and a card into the folder `out`; returns the data files.

    The folder appears whole. Raises InputError if it is there already or must not be written, or if the store holds no
    sample.
    """
    if not _SPLIT.fullmatch(split) or split == "all":
        raise InputError(
            f"split {split!r}: `datasets` wants letters, digits and '_', with '.' in between, and not 'all'"
        )
    if not store.manifest.rows:
        raise InputError(f"{store.folder}: holds no samples; nothing to export")
    with disk.writing(out):
        if out.exists():
            raise InputError(f"{out}: exists already; export into another folder")
        with building(out) as folder:
            return [out / "data" / name for name in _write(store, folder, split, file_tokens)]


def _write(store: Store, folder: Path, split: str, file_tokens: int) -> list[str]:
    (folder / "data").mkdir()
    for number, groups in groupby(_numbered(store, file_tokens), key=itemgetter(0)):
        parquet.write(folder / "data" / f"{number}.parquet", (table for _, table in groups), COLUMNS)
    made = sorted((folder / "data").iterdir(), key=lambda path: int(path.stem))
    names = [f"{split}-{number:05d}-of-{len(made):05d}.parquet" for number in range(len(made))]
    for path, name in zip(made, names, strict=True):
        path.rename(path.with_name(name))
    (folder / "README.md").write_text(card(store, split, folder / "data"), "utf-8")
    return names


def _numbered(store: Store, limit: int) -> Iterator[tuple[int, pa.Table]]:
    """The store's row groups, each with the number of the file that it goes into."""
    number = tokens = 0
    for meta, payload, samples in store.scan_groups():
        size = sum(len(sample.tokens) for sample in samples)
        if tokens and tokens + size > limit:
            number, tokens = number + 1, 0
        tokens += size
        yield number, _join(meta, payload)


def _join(meta: pa.Table, payload: rows.PayloadGroup) -> pa.Table:
    columns = [
        meta.column(column.name) if column.name in schema.META.names else payload.column(column.name)
        for column in COLUMNS
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema([column.field for column in COLUMNS]))


def card(store: Store, split: str, data: Path) -> str:
    """The dataset card: what the Hub and `load_dataset` read, and a paragraph for people."""
    size = sum(path.stat().st_size for path in data.iterdir())
    features = "\n".join(f"  - name: {c.name}\n    {_feature(c)}" for c in COLUMNS)
    described = "\n".join(f"| `{c.name}` | {c.doc} |" for c in COLUMNS)
    return f"""---
configs:
- config_name: default
  data_files:
  - split: "{split}"
    path: "data/{split}-*"
dataset_info:
  features:
{features}
  splits:
  - name: "{split}"
    num_bytes: {size}
    num_examples: {store.manifest.rows}
---

# Rollouts

{store.manifest.rows} samples, {store.manifest.tokens} tokens, from commit {store.manifest.number} of a rollout store.
Exported by mopdctl. T tokens a sample, N of them loss-active, K candidates of a teacher, H its hidden size.

| column | |
| --- | --- |
{described}
"""


def _feature(column: Column) -> str:
    names: dict[Any, str] = {
        pa.string(): "string",
        pa.int32(): "int32",
        pa.float32(): "float32",
        pa.bool_(): "bool",
        pa.uint32(): "uint32",
        pa.binary(): "binary",
    }
    if pa.types.is_list(column.type):
        return f"list: {names[column.type.value_type]}"
    return f"dtype: {names[column.type]}"
