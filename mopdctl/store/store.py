"""Reading a rollout store, and committing samples to it.

    manifest/00000000000000000007.json   which files are live, with rows, bytes and digests
    meta/part-<id>.parquet               one row per sample, no tokens
    payload/part-<id>.parquet            the tokens and their streams, in small row groups
    wal/                                 tokens of samples that are still being written
    _staging/                            what a commit has not yet named

A commit writes into `_staging`, syncs, renames, syncs the folders, and then publishes the next manifest. A process
that dies anywhere on the way leaves files that no manifest names; the next writer removes them.
"""

import hashlib
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest
from mopdctl.records import Sample
from mopdctl.runs import locked, told_differences
from mopdctl.store import disk, parquet, rows, schema
from mopdctl.store import manifest as manifests
from mopdctl.store.manifest import File, Manifest, Shard

if TYPE_CHECKING:
    import polars as pl

GRACE_S = 3600
"""A file that no manifest names any more stays so long, for readers that opened an older one."""

OPEN_FILES = 64
"""Payload files that a reader keeps open; a store of many commits has more than a process may have."""


class Store:
    """A store as one manifest describes it. Reading needs no lock: files never change, and stay for a while."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError if there is no store or a newer mopdctl made it."""
        self.folder = folder
        self.manifest, self.digest, self.warnings = manifests.newest(folder)
        self._readers: dict[str, parquet.GroupReader] = {}
        self._location: pa.Table | None = None

    def meta_table(self, columns: Sequence[str] | None = None, *, encoded: bool = False) -> pa.Table:
        """Metadata of all samples in store order, some columns or all. Not one payload byte is read.

        With `encoded`, strings that repeat stay dictionaries: a third of the time, two thirds of the memory.
        Every metadata file is held against its digest first: page checksums do not cover headers and footers.
        """
        names = list(columns) if columns is not None else schema.META.names
        kept = [column.name for column in schema.META_COLUMNS if encoded and column.encoding == "DICTIONARY"]
        wanted = parquet.encoded_schema(pa.schema([schema.META.field(name) for name in names]), kept)
        tables = [wanted.empty_table()]
        tables += [self.shard_meta(shard, names, encoded=kept) for shard in self.manifest.shards]
        return pa.concat_tables(tables)

    def shard_meta(
        self, shard: Shard, columns: Sequence[str] | None = None, *, encoded: Sequence[str] = ()
    ) -> pa.Table:
        """The metadata of one shard, held against its digest."""
        table = parquet.read_table(
            pa.BufferReader(self._verified(shard.meta)),
            columns=columns,
            schema=schema.META,
            encoded=encoded,
            later=schema.SINCE_2,
        )
        if table.num_rows != shard.rows:
            raise MopdctlError(f"{self.folder / shard.meta.path}: {table.num_rows} rows, committed {shard.rows}")
        return table

    def meta(self, columns: Sequence[str] | None = None, *, encoded: bool = False) -> "pl.DataFrame":
        """As `meta_table`, for polars, where `encoded` strings are categories."""
        import polars as pl

        frame = pl.from_arrow(self.meta_table(columns, encoded=encoded))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def read(self, numbers: Sequence[int]) -> list[Sample]:
        """The samples of some rows of `meta`, in the order asked for; each row group is read once.

        Raises MopdctlError naming file and row for a payload that is not what was committed.
        """
        wanted = np.asarray(numbers, np.int64)
        table = self._meta_rows(wanted)
        found: list[Sample | None] = [None] * len(wanted)
        for _, members in sorted(_by_group(table).items()):
            group = self._group(members[0][1])
            for position, row in members:
                found[position] = self._sample(row, group)
        return [sample for sample in found if sample is not None]

    def scan(self) -> Iterator[Sample]:
        """All samples in store order, one row group in memory at a time."""
        for _, _, samples in self.scan_groups():
            yield from samples

    def scan_groups(self) -> Iterator[tuple[pa.Table, rows.PayloadGroup, list[Sample]]]:
        """All row groups in store order: the metadata of its samples, their payload, and both as samples."""
        table = self.meta_table()
        files = table["payload_file"].combine_chunks().dictionary_encode().indices.to_numpy()
        numbers = table["payload_row_group"].to_numpy()
        edges = np.flatnonzero((np.diff(files) != 0) | (np.diff(numbers) != 0)) + 1
        for start, stop in pairwise([0, *edges.tolist(), table.num_rows] if table.num_rows else []):
            meta = table.slice(start, stop - start)
            found = meta.to_pylist()
            group = self._group(found[0])
            if group.rows != len(found):
                raise MopdctlError(f"{self.folder / found[0]['payload_file']}: {group.rows} rows, {len(found)} known")
            yield meta, group, [self._sample(row, group) for row in found]

    def close(self) -> None:
        """Closes the payload files that were opened."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _meta_rows(self, numbers: "np.ndarray[Any, Any]") -> pa.Table:
        if self._location is None:
            self._location = self.meta_table().combine_chunks()  # `take` is slow over a chunk per commit
        return self._location.take(pa.array(numbers))

    def _group(self, row: dict[str, Any]) -> rows.PayloadGroup:
        path = str(row["payload_file"])
        if path not in self._readers:
            entry = self.manifest.files.get(path)
            file = self.folder / path
            if entry is None or not file.exists():
                raise MopdctlError(f"{file}: missing; run `mopdctl store verify`")
            if file.stat().st_size != entry.bytes:
                raise MopdctlError(f"{file}: {file.stat().st_size} bytes, committed {entry.bytes}")
            if len(self._readers) == OPEN_FILES:
                self._readers.pop(next(iter(self._readers))).close()
            self._readers[path] = parquet.GroupReader(file, schema.PAYLOAD)
        return rows.PayloadGroup(self._readers[path].read(int(row["payload_row_group"])))

    def _sample(self, row: dict[str, Any], group: rows.PayloadGroup) -> Sample:
        number, where = int(row["payload_row"]), f"{self.folder / row['payload_file']}"
        place = f"{where}: row group {row['payload_row_group']} row {number}"
        if number >= group.rows or group.sample_id(number) != row["sample_id"]:
            raise MopdctlError(f"{place}: is not sample {row['sample_id']}")
        arrays = group.arrays(number)
        if rows.payload_crc(arrays) != row["payload_crc"]:
            raise MopdctlError(f"{place}: sample {row['sample_id']} is damaged; run `mopdctl store verify`")
        return rows.sample_from(row, arrays)

    def _verified(self, entry: File) -> pa.Buffer:
        path = self.folder / entry.path
        try:
            with pa.memory_map(str(path)) as source:
                buffer = source.read_buffer()
        except (OSError, pa.ArrowException):
            raise MopdctlError(f"{path}: missing or unreadable; run `mopdctl store verify`") from None
        if len(buffer) != entry.bytes or hashlib.blake2b(buffer, digest_size=16).hexdigest() != entry.digest:
            raise MopdctlError(f"{path}: is not what was committed; run `mopdctl store verify`")
        return buffer


def _by_group(table: pa.Table) -> dict[tuple[str, int], list[tuple[int, dict[str, Any]]]]:
    found: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
    for position, row in enumerate(table.to_pylist()):
        found.setdefault((row["payload_file"], row["payload_row_group"]), []).append((position, row))
    return found


class StoreWriter:
    """The one writer of a store. Use as a context manager; holds the lock in between."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """`identity` says what makes the samples. An existing store must have been made by the same.

        Raises InputError if another process writes here, if the folder must not be written, or naming what differs.
        """
        self.folder = folder
        self._held = ExitStack()
        with disk.writing(folder), ExitStack() as held:
            held.enter_context(locked(folder))
            self._open(identity)
            self._held = held.pop_all()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the store."""
        self.store.close()
        self._held.close()

    def _open(self, identity: dict[str, Any]) -> None:
        for name in ("manifest", "meta", "payload", "wal", "_staging"):
            disk.make_folder(self.folder / name)
        if not manifests.numbers(self.folder):
            shutil.rmtree(self.folder / "_staging")
            disk.make_folder(self.folder / "_staging")
            disk.sync_folder(self.folder)
            with self.staging() as staging:
                manifests.publish(self.folder, Manifest(0, None, identity, ()), staging)
        self.store = Store(self.folder)
        if self.store.warnings:
            raise MopdctlError(self.store.warnings[0])
        _check_identity(self.folder, self.store.manifest.identity, identity)
        sweep(self.folder)
        ids = self.store.meta_table(["sample_id", "payload_crc"])
        self.committed: dict[str, tuple[int, int]] = {
            sample_id: (number, crc)
            for number, (sample_id, crc) in enumerate(
                zip(ids["sample_id"].to_pylist(), ids["payload_crc"].to_pylist(), strict=True)
            )
        }
        """Sample id to row number in `meta` and payload CRC."""

    def commit(self, samples: Sequence[Sample]) -> None:
        """Makes samples part of the store: after it returns they survive the machine, before they are not there at all.

        A sample that is there already with the same payload is left out; with another one, MopdctlError.
        """
        fresh = []
        for sample in samples:
            rows.check(sample)
            if sample.sample_id not in self.committed:
                fresh.append(sample)
            elif self.committed[sample.sample_id][1] != rows.sample_crc(sample):
                raise MopdctlError(f"{self.folder}: sample {sample.sample_id} is there with another payload")
        ids = [sample.sample_id for sample in fresh]
        if len(set(ids)) != len(ids):
            raise MopdctlError(f"{self.folder}: a commit holds a sample twice")
        if fresh:
            with disk.writing(self.folder):
                self._commit(fresh)

    def _commit(self, samples: Sequence[Sample]) -> None:
        with self.staging() as staging:
            shard, crcs = write_shard(self.folder, staging, samples)
            self.replace(staging, (*self.store.manifest.shards, shard))
        first = len(self.committed)
        for number, (sample, crc) in enumerate(zip(samples, crcs, strict=True), start=first):
            self.committed[sample.sample_id] = (number, crc)

    def rescore(self, verdicts: Mapping[int, Mapping[str, Any]]) -> int:
        """Gives rows of `meta`, by number, other values of the columns in `schema.VERDICT`; payload is not touched.

        One commit: a process that dies on the way leaves all old values. Metadata files in which nothing changes stay.
        Returns how many were written anew; old ones stay for a while, for readers that opened the store before.
        """
        if not verdicts:
            return 0
        by_shard: dict[int, dict[int, Mapping[str, Any]]] = {}
        edges = np.cumsum([0, *(shard.rows for shard in self.store.manifest.shards)])
        for number, verdict in verdicts.items():
            if what := rows.verdict_problem(verdict):
                raise MopdctlError(f"{self.folder}: row {number}: {what}")
            at = int(np.searchsorted(edges, number, side="right")) - 1
            by_shard.setdefault(at, {})[number - int(edges[at])] = verdict
        with disk.writing(self.folder), self.staging() as staging:
            shards = list(self.store.manifest.shards)
            for at, changed in by_shard.items():
                table = rows.rescored(self.store.shard_meta(shards[at]), changed)
                shards[at] = replace(shards[at], meta=_write_meta(self.folder, staging, _part_name(), table))
            self.replace(staging, shards)
        return len(by_shard)

    def drop_history(self) -> None:
        """Removes all older manifests and every file that only they name: for a writer that knows of no reader."""
        for number in manifests.numbers(self.folder):
            if number != self.store.manifest.number:
                disk.remove(manifests.manifest_path(self.folder, number))
        sweep(self.folder, grace_s=0)

    def replace(self, staging: Path, shards: Sequence[Shard]) -> None:
        """Publishes a manifest with these shards in place of the present ones."""
        before = self.store.manifest
        manifest = Manifest(before.number + 1, self.store.digest, before.identity, tuple(shards))
        manifests.publish(self.folder, manifest, staging)
        self.store.close()
        self.store = Store(self.folder)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder for files that no manifest names yet; it goes when the block ends."""
        folder = self.folder / "_staging" / uuid.uuid4().hex
        disk.make_folder(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_shard(store: Path, staging: Path, samples: Sequence[Sample]) -> tuple[Shard, list[int]]:
    """Writes samples into a pair of files that no manifest names yet; returns the shard and each payload's CRC."""
    name = _part_name()
    groups = list(cut_groups([len(sample.tokens) for sample in samples]))
    edges = np.cumsum([0, *groups]).tolist()
    tables = (rows.payload_table(samples[a:b]) for a, b in pairwise(edges))
    meta = rows.meta_table(samples, file=f"payload/{name}", groups=groups)
    payload = _write_file(store, staging, f"payload/{name}", tables, schema.PAYLOAD_COLUMNS)
    tokens = sum(len(sample.tokens) for sample in samples)
    shard = Shard(len(samples), tokens, meta=_write_meta(store, staging, name, meta), payload=payload)
    return shard, meta["payload_crc"].to_pylist()


def _part_name() -> str:
    return f"part-{uuid.uuid4().hex}.parquet"


def _write_meta(store: Path, staging: Path, name: str, table: pa.Table) -> File:
    pieces = (table.slice(i, schema.META_GROUP_ROWS) for i in range(0, table.num_rows, schema.META_GROUP_ROWS))
    return _write_file(store, staging, f"meta/{name}", pieces, schema.META_COLUMNS)


def _write_file(
    store: Path, staging: Path, path: str, content: Iterable[pa.Table], columns: Sequence[schema.Column]
) -> File:
    """Writes a file of the store, durable and under its own name, for a manifest that is still to come."""
    temporary = staging / path.replace("/", "-")
    with _parquet_errors(temporary):
        parquet.write(temporary, content, columns)
    disk.sync_file(temporary)
    entry = File(path, temporary.stat().st_size, file_digest(temporary))
    disk.rename(temporary, store / path)
    disk.sync_folder((store / path).parent)
    return entry


def cut_groups(lengths: Iterable[int]) -> Iterator[int]:
    """Rows of each payload row group for samples of these lengths, in order."""
    count = tokens = 0
    for length in lengths:
        if count and (count == schema.PAYLOAD_GROUP_ROWS or tokens + length > schema.PAYLOAD_GROUP_TOKENS):
            yield count
            count = tokens = 0
        count += 1
        tokens += length
    if count:
        yield count


def sweep(folder: Path, *, grace_s: float = GRACE_S) -> list[Path]:
    """Removes what dead writers left: everything in `_staging`, and data files that no manifest names, once old.

    Only for the one who holds the lock. Data files stay while a manifest is damaged: it may have named them. Returns
    what was removed.
    """
    removed = list((folder / "_staging").iterdir())
    for leftover in removed:
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        known = [manifests.read(folder, number)[0] for number in manifests.numbers(folder)]
    except MopdctlError:
        return removed
    named = {path for manifest in known for path in manifest.files}
    for kind in ("meta", "payload"):
        for path in (folder / kind).iterdir():
            if f"{kind}/{path.name}" not in named and time.time() - path.stat().st_mtime >= grace_s:
                disk.remove(path)
                removed.append(path)
    return removed


def _check_identity(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if before.get("tokenizer") != now.get("tokenizer"):
        raise InputError(
            f"{folder}: its token ids are those of another tokenizer ({before.get('tokenizer')}, the run's is "
            f"{now.get('tokenizer')}); use another name"
        )
    if before != now:
        raise InputError(
            f"{folder}: was begun with another configuration ({told_differences(before, now)}); "
            "use another name, restore the configuration, or delete the folder"
        )


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """Pyarrow reports a full disk as an OSError without a number, or leaves a file without a footer."""
    try:
        yield
    except pa.ArrowException as error:
        raise MopdctlError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from error
