"""The data set's files: Parquet with one schema and bounded row groups, split by prompt."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow.parquet as pq

from mopdctl.engines.base import stream_seed
from mopdctl.files import digest
from mopdctl.gensft.records import Message
from mopdctl.gensft.rows import SCHEMA, compact, table

_ROWS_PER_GROUP = 1024
"""A bound for short rows, which take more memory as objects than as text."""


def split_of(messages: list[Message], *, validation_share: float, seed: int) -> str:
    """`train` or `validation`, by the digest of the prompt: all answers to equal prompts land together."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    prompt = digest(compact([m for m in messages[:last] if m["role"] not in ("system", "developer")]))
    return "validation" if stream_seed(seed, "split", prompt) / 2**128 < validation_share else "train"


class SplitWriter:
    """The Parquet files of one split. Files are named `<split>-NNNNN-of-NNNNN.parquet` once it is closed."""

    def __init__(self, folder: Path, split: str, *, rows_per_file: int, row_group_bytes: int) -> None:
        self._folder, self._split = folder, split
        self._rows_per_file, self._row_group_bytes = rows_per_file, row_group_bytes
        self._held: list[Mapping[str, Any]] = []
        self._held_bytes = 0
        self._in_file = 0
        self._writer: pq.ParquetWriter | None = None
        self._parts: list[Path] = []
        self.rows = 0

    def add(self, row: Mapping[str, Any], size: int) -> None:
        """Adds a row of about `size` bytes of text."""
        if self._in_file + len(self._held) >= self._rows_per_file:
            self._end_file()
        full = self._held_bytes + size > self._row_group_bytes or len(self._held) >= _ROWS_PER_GROUP
        if self._held and full:
            self._flush()
        self._held.append(row)
        self._held_bytes += size
        self.rows += 1

    def _flush(self) -> None:
        if not self._held:
            return
        if self._writer is None:
            self._parts.append(self._folder / f".{self._split}-{len(self._parts):05d}.parquet")
            self._writer = pq.ParquetWriter(self._parts[-1], SCHEMA, compression="zstd")
        self._writer.write_table(table(self._held), row_group_size=len(self._held))
        self._in_file += len(self._held)
        self._held, self._held_bytes = [], 0

    def _end_file(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._in_file = 0

    def __enter__(self) -> "SplitWriter":
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_file()
        for number, part in enumerate(self._parts):
            part.rename(self._folder / f"{self._split}-{number:05d}-of-{len(self._parts):05d}.parquet")
