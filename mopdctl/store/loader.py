"""The samples of a plan, a micro-batch at a time: from the store's files, or from one copy that local workers share.

    mopdctl-share-<manifest digest>-<run>-<pid>-<random>/
        meta.arrow      metadata in store order, and where in `payload.arrow` each sample is
        payload.arrow   payload, uncompressed, a batch per row group

Workers map both files: the pages exist once, however many workers there are. The owner holds a lock on the folder for
as long as it lives, and the kernel lets go of it however the owner ends: a folder that can be locked is a leftover.
The process id would not tell: it is given again, and means nothing to another container that sees the same `/dev/shm`.
"""

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from mopdctl.errors import InputError
from mopdctl.records import Sample
from mopdctl.runs import check_name
from mopdctl.store import disk, rows, schema
from mopdctl.store.store import Store

if TYPE_CHECKING:  # its polars is private memory of each worker
    from mopdctl.store.plan import Plan

_SHM = Path("/dev/shm")
_PREFIX = "mopdctl-share-"
_NAME = re.compile(rf"\.?{_PREFIX}[0-9a-f]{{32}}-.+-\d+-\w{{8}}")
_MARGIN = 1 << 30
"""Bytes that are left to others who use the file system, or a tenth of it where that is less."""
_META = [name for name in schema.META.names if name not in schema.LOCATION]
_GROUP = list(schema.LOCATION[:2])
_FILES = ("meta.arrow", "payload.arrow")


class Shared:
    """A store's samples in mapped files. Arrays of a sample are read-only views of the map; its mask is unpacked.

    Whoever has opened it, or has a sample of it, keeps the map, even if the owner removes the files meanwhile.
    """

    def __init__(self, path: Path, *, owner: ExitStack | None = None) -> None:
        """Opens what `share` wrote; `owner` is for `share` alone. Raises InputError if nothing whole is there."""
        self.path = path
        try:
            meta, self._payload = (ipc.open_file(pa.memory_map(str(path / name))) for name in _FILES)
            table = meta.read_all()
        except (OSError, pa.ArrowException):
            raise InputError(f"{path}: no shared samples here; does their owner still run?") from None
        self.rows, self.number = int(table.num_rows), int(table.schema.metadata[b"manifest"])
        self._meta = {name: table[name] for name in table.column_names}
        self._release = None if owner is None else weakref.finalize(self, _release, owner, os.getpid())

    def __enter__(self) -> "Shared":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample(self, number: int) -> Sample:
        """The sample of one row of the store's metadata. Raises InputError if it was not shared."""
        if not 0 <= number < self.rows:
            raise InputError(f"{self.path}: no row {number}, there are {self.rows}")
        meta = {name: column[number].as_py() for name, column in self._meta.items()}
        if meta["batch"] is None:
            raise InputError(f"{self.path}: row {number} was not shared; share the rows of this plan")
        group = rows.PayloadGroup(pa.Table.from_batches([self._payload.get_batch(meta["batch"])]))
        return rows.sample_from(meta, group.arrays(meta["batch_row"]))

    def samples(self, numbers: NDArray[np.int64]) -> dict[int, Sample]:
        """The samples of some rows, by row."""
        return {number: self.sample(number) for number in numbers.tolist()}

    def close(self) -> None:
        """Removes the files if this process shared them, as do its end and the end of this object."""
        if self._release is not None:
            self._release()


def share(
    store: Store,
    *,
    run_id: str,
    numbers: Sequence[int] | NDArray[np.int64] | None = None,
    folder: Path | None = None,
    on_note: Callable[[str], None] = lambda line: None,
) -> Shared:
    """Copies payload to where local workers can map it; each gets `path` and opens `Shared(path)`.

    Sweeps first. Every sample is held against its CRC; one row group at a time is in memory. The caller is the owner:
    the files go with it.

    Args:
        store: Where from.
        run_id: Becomes part of the folder's name.
        numbers: Rows of the store's metadata, such as a plan's; None for all.
        folder: A folder of this machine. None for `/dev/shm`, or the system's temporary folder where that is full.
        on_note: Told if it became the temporary folder, and why.

    Raises:
        InputError: There is no room, or the folder must not be written.
        MopdctlError: A payload is not what was committed.
    """
    check_name(run_id)
    wanted = np.arange(store.manifest.rows) if numbers is None else np.unique(np.asarray(numbers, np.int64))
    places = _places() if folder is None else [folder]
    for place in places:
        with suppress(OSError):
            sweep(place)
    while True:
        place = places.pop(0)
        try:
            return _share(store, wanted, place, f"{_PREFIX}{store.digest}-{run_id}-{os.getpid()}-")
        except InputError as error:
            if not places:
                raise
            on_note(f"{error}; samples are shared in {places[0]} instead")


def sweep(folder: Path) -> list[Path]:
    """Removes what dead owners left in `folder`, and nothing else there. Returns what was removed."""
    removed: list[Path] = []
    if not folder.is_dir():
        return removed
    with _locked(folder):  # each owner of something in here has its own lock by now
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name):
                with suppress(OSError), _locked(path, wait=False):
                    shutil.rmtree(path)
                    removed.append(path)
    return removed


def _places() -> list[Path]:
    parents = [parent for parent in (_SHM, Path(tempfile.gettempdir())) if parent.is_dir()]
    return [parent / f"mopdctl-{os.getuid()}" for parent in dict.fromkeys(parents)]


def _share(store: Store, wanted: NDArray[np.int64], place: Path, name: str) -> Shared:
    with disk.writing(place):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if place in _places() and (place.is_symlink() or place.stat().st_uid != os.getuid()):
            raise InputError(f"{place}: belongs to someone else; name another folder")  # anyone may make it in /dev/shm
    with ExitStack() as held, disk.writing(place):
        with _locked(place):  # no sweep sees the folder before it is locked
            path = Path(tempfile.mkdtemp(prefix=f".{name}", dir=place))
            held.enter_context(_locked(path))
        held.callback(shutil.rmtree, path, ignore_errors=True)
        _write(store, wanted, path)
        whole = path.with_name(path.name[1:])
        disk.rename(path, whole)
        held.callback(shutil.rmtree, whole, ignore_errors=True)
        return Shared(whole, owner=held.pop_all())


def _release(held: ExitStack, owner: int) -> None:
    if os.getpid() == owner:  # a fork has the object, too
        held.close()


def _write(store: Store, wanted: NDArray[np.int64], path: Path) -> None:
    table = store.meta_table([*_META, *_GROUP])
    meta, keys = table.select(_META).combine_chunks(), _keys(table)
    counts = (schema.PROMPT_LENGTH, schema.RESPONSE_LENGTH, schema.LOSS_TOKENS)
    lengths = sum(meta[name].to_numpy() for name in counts)
    # tokens and behavior_logprobs at least; what else there is shows on the way
    _check_room(path, meta.nbytes + 4 * int(lengths[wanted].sum(dtype=np.int64)))
    batch, batch_row = np.full(len(keys), -1, np.int32), np.zeros(len(keys), np.int32)
    with ipc.new_file(str(path / _FILES[1]), schema.PAYLOAD) as file:
        for number, members in enumerate(_by_group(keys, wanted)):
            payload = rows.payload_table(store.read(members.tolist()))
            _check_room(path, payload.nbytes)
            file.write_table(payload)
            batch[members], batch_row[members] = number, np.arange(len(members))
    _check_room(path, meta.nbytes + batch.nbytes + batch_row.nbytes)
    meta = meta.append_column("batch", pa.array(batch, mask=batch < 0)).append_column("batch_row", pa.array(batch_row))
    meta = meta.replace_schema_metadata({"manifest": str(store.manifest.number)})
    with ipc.new_file(str(path / _FILES[0]), meta.schema) as file:
        file.write_table(meta, max_chunksize=schema.META_GROUP_ROWS)


def _check_room(path: Path, needed: int) -> None:
    """Raises InputError unless so many bytes fit beside the margin."""
    usage = shutil.disk_usage(path)
    margin = min(usage.total // 10, _MARGIN)
    if usage.free < needed + margin:
        raise InputError(
            f"{path.parent}: no room, {usage.free >> 20} MiB are free, at least {needed >> 20} MiB are needed and "
            f"{margin >> 20} MiB stay for others; make room or name another folder"
        )


def _keys(table: pa.Table) -> NDArray[np.int64]:
    """A number for each row that orders by file and row group, equal within one."""
    files, groups = (table[name] for name in _GROUP)
    codes = files.dictionary_encode().combine_chunks().indices.to_numpy()
    keys: NDArray[np.int64] = codes.astype(np.int64) << 32 | groups.to_numpy()
    return keys


def _by_group(keys: NDArray[np.int64], wanted: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The rows in `wanted` by file and row group, in that order."""
    ordered = wanted[np.argsort(keys[wanted], kind="stable")]
    parts = np.split(ordered, np.flatnonzero(np.diff(keys[ordered])) + 1)
    return [part for part in parts if len(part)]


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


class Loader:
    """One rank's bins in the order of the plan, one pass over them. Iterate it: each step gives a micro-batch.

    It keeps no sample that it has given away. Arrays are read-only, whatever the source.
    """

    def __init__(
        self,
        source: Store | Shared,
        plan: "Plan",
        *,
        rank: int = 0,
        world: int = 1,
        bins_per_batch: int = 1,
        window: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Reads where payload is, but no payload.

        Args:
            source: The store, or what was shared of it.
            plan: Which samples, in which bins.
            rank: Number of this data-parallel rank.
            world: How many of them there are.
            bins_per_batch: Bins of a micro-batch; the last one may have fewer.
            window: Micro-batches that are fetched together. A row group is read once for all of them.
            state: What `state` of any rank gave, to go on from there; the number of ranks may be another.

        Raises:
            InputError: Source, plan and state do not belong together, or the bins do not go round.
        """
        known = source if isinstance(source, Shared) else source.manifest
        if (plan.store_version, plan.total) != (known.number, known.rows):
            raise InputError(
                f"the plan is for manifest {plan.store_version} with {plan.total} samples, the store is at manifest "
                f"{known.number} with {known.rows}; make the plan again"
            )
        if min(bins_per_batch, window) < 1:
            raise InputError(f"bins_per_batch {bins_per_batch}, window {window}: have to be at least 1")
        self._taken = 0
        self._bins = plan.bins_of_rank(rank, world)
        self._plan, self._world, self._step, self._window = plan, world, bins_per_batch, window
        state = state or self.state()
        if state["plan"] != plan.fingerprint:
            raise InputError(f"stopped in plan {state['plan']}, cannot go on in plan {plan.fingerprint}")
        self._taken, left = divmod(state["start_at"], world)
        if left:
            raise InputError(f"stopped after {state['start_at']} bins, {world} ranks cannot go on from there together")
        self._held: dict[int, Sample] = {}
        self._fetch = (
            source.samples if isinstance(source, Shared) else partial(_fetch, source, _keys(source.meta_table(_GROUP)))
        )

    def __len__(self) -> int:
        """Micro-batches that are still to come."""
        return -(-(len(self._bins) - self._taken) // self._step)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> list[Sample]:
        if not (bins := self._bins[self._taken : self._taken + self._step * self._window].tolist()):
            raise StopIteration
        if not self._held:
            self._held = self._fetch(np.concatenate([self._plan.bin(number) for number in bins]))
        self._taken += len(bins := bins[: self._step])
        return [self._held.pop(row) for number in bins for row in self._plan.bin(number).tolist()]

    def state(self) -> dict[str, Any]:
        """Where this rank is, JSON-like: the plan and `start_at`, its first bin that no rank has been given."""
        return {"plan": self._plan.fingerprint, "start_at": self._taken * self._world}


def _fetch(store: Store, keys: NDArray[np.int64], wanted: NDArray[np.int64]) -> dict[int, Sample]:
    found: dict[int, Sample] = {}
    for members in _by_group(keys, wanted):
        found |= zip(members.tolist(), map(_detached, store.read(members.tolist())), strict=True)
    return found


def _detached(sample: Sample) -> Sample:
    """The sample with arrays of its own: a view would keep its whole row group in memory."""
    own = {name: array.copy() for name in schema.STREAMS if (array := getattr(sample, name)) is not None}
    for array in own.values():
        array.flags.writeable = False
    return replace(sample, **own)
