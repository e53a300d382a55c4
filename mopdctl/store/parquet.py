"""Parquet files as the schema asks for them: encodings by leaf, bounded row groups, page checksums, all verified."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mopdctl.errors import MopdctlError
from mopdctl.store.schema import Column

DAMAGE = (pa.ArrowException, OSError, ValueError, LookupError)
"""What pyarrow raises for bytes that are no Parquet; a column name that is no UTF-8 is a ValueError."""


def write(path: Path, groups: Iterable[pa.Table], columns: Sequence[Column]) -> list[int]:
    """Writes one row group per table into a new file and returns the rows of each. The caller syncs it.

    pyarrow ignores an option that it cannot place without a word, so the footer is read back and compared: of the
    first row group before the second is written, and of the whole file at its end. Raises MopdctlError if it is not
    what was asked for.
    """
    schema = pa.schema([column.field for column in columns])
    sizes: list[int] = []
    with pq.ParquetWriter(path, schema, **_options(columns)) as writer:
        for table in groups:
            if not sizes:
                _check_first(table, columns)
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            sizes.append(table.num_rows)
    with pq.ParquetFile(path) as file:
        check_footer(file.metadata, columns, sizes, place=str(path))
    return sizes


def _options(columns: Sequence[Column]) -> dict[str, Any]:
    return {
        "compression": {c.leaf: "NONE" if c.compression == "UNCOMPRESSED" else c.compression for c in columns},
        "compression_level": {column.leaf: 1 for column in columns if column.compression == "ZSTD"},
        "use_dictionary": [column.leaf for column in columns if column.encoding == "DICTIONARY"],
        "column_encoding": {c.leaf: c.encoding for c in columns if c.encoding not in ("DICTIONARY", "PLAIN")},
        "write_page_checksum": True,
        "write_page_index": True,
        "write_statistics": [column.leaf for column in columns if not pa.types.is_nested(column.type)],
    }


def _check_first(table: pa.Table, columns: Sequence[Column]) -> None:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **_options(columns)) as writer:
        writer.write_table(table, row_group_size=max(table.num_rows, 1))
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    check_footer(footer, columns, [table.num_rows], place="first row group")


def check_footer(footer: Any, columns: Sequence[Column], sizes: Sequence[int], *, place: str) -> None:
    """Raises MopdctlError unless every column chunk has the leaf path, codec and encoding that its column asks for."""
    found = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    if found != list(sizes):
        raise MopdctlError(f"{place}: row groups of {found} rows where {list(sizes)} were written")
    for group in range(footer.num_row_groups):
        chunks = [footer.row_group(group).column(i) for i in range(footer.num_columns)]
        if [chunk.path_in_schema for chunk in chunks] != [column.leaf for column in columns]:
            raise MopdctlError(f"{place}: has columns {[chunk.path_in_schema for chunk in chunks]}")
        for column, chunk in zip(columns, chunks, strict=True):
            wanted = {"DICTIONARY": "RLE_DICTIONARY"}.get(column.encoding, column.encoding)
            empty = chunk.statistics is not None and chunk.statistics.null_count == chunk.num_values
            if chunk.compression != column.compression or (
                wanted not in chunk.encodings and not (column.encoding == "DICTIONARY" and empty)
            ):
                raise MopdctlError(
                    f"{place}: column {column.leaf} came out as {'+'.join(chunk.encodings)} {chunk.compression}, "
                    f"asked for {column.encoding} {column.compression}"
                )


def read_table(
    source: Any,
    *,
    columns: Sequence[str] | None = None,
    schema: pa.Schema,
    encoded: Sequence[str] = (),
    later: Sequence[str] = (),
) -> pa.Table:
    """Some columns of a whole file, page checksums verified; those in `encoded` stay dictionaries.

    Columns in `later` are null if the file has none of them. Raises MopdctlError if it is not of `schema`.
    """
    names = list(columns) if columns is not None else schema.names
    wanted = encoded_schema(schema, encoded)
    footer = pq.read_metadata(source)
    absent = set() if set(later) & set(footer.schema.to_arrow_schema().names) else set(later)
    with pq.ParquetFile(
        source,
        metadata=footer,
        page_checksum_verification=True,
        read_dictionary=[name for name in encoded if name not in absent],
    ) as file:
        _check_schema(file, pa.schema(field for field in wanted if field.name not in absent), source)
        table = file.read(columns=[name for name in names if name not in absent], use_threads=True)
    found = [pa.nulls(footer.num_rows, wanted.field(n).type) if n in absent else table[n] for n in names]
    return pa.Table.from_arrays(found, schema=pa.schema([wanted.field(n) for n in names]))


def encoded_schema(schema: pa.Schema, encoded: Sequence[str]) -> pa.Schema:
    """`schema` as it is read with `encoded` columns as dictionaries."""
    return pa.schema(
        field.with_type(pa.dictionary(pa.int32(), field.type)) if field.name in encoded else field for field in schema
    )


class GroupReader:
    """An open payload file that gives one row group at a time."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            _check_schema(self._file, schema, path)
        except DAMAGE as error:
            raise MopdctlError(f"{path}: damaged ({_first_line(error)}); run `mopdctl store verify`") from None

    def read(self, group: int) -> pa.Table:
        """One row group. Raises MopdctlError naming the file if it is damaged."""
        try:
            return self._file.read_row_group(group, use_threads=True)
        except DAMAGE as error:
            raise MopdctlError(
                f"{self._path}: row group {group} is damaged ({_first_line(error)}); run `mopdctl store verify`"
            ) from None

    @property
    def num_groups(self) -> int:
        """How many row groups the file has."""
        return int(self._file.num_row_groups)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _check_schema(file: pq.ParquetFile, schema: pa.Schema, source: Any) -> None:
    if not file.schema_arrow.remove_metadata().equals(schema):
        place = source if isinstance(source, str | Path) else "file"
        raise MopdctlError(f"{place}: its columns are not those of this store's schema")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
