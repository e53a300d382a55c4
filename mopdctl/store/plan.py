"""Which samples a training run uses, in which bins and in which order: planned from metadata alone, kept as one file.

A sample is known by its row number in store order. A bin is what one rank takes at a time. Bins follow each other in
random order; rank r of W takes bins r, r + W, and so on.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mopdctl import __version__
from mopdctl.errors import InputError
from mopdctl.store import disk
from mopdctl.store.packing import OverLong, pack
from mopdctl.store.schema import (
    DOMAIN,
    FINISH_REASON,
    LOSS_TOKENS,
    POLICY_MAX,
    POLICY_MIN,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    TEACHER,
)

VERSION = 1
"""Raised when a reader of the old layout could misread the new one."""
NAME = "mopdctl.plan"
_HEADER, _DIGEST = NAME.encode(), f"{NAME}.digest".encode()
_COLUMNS = pa.schema({"bin": pa.int32(), "row": pa.int64(), "teacher": pa.dictionary(pa.int32(), pa.string())})
_OPTIONS = {
    "compression": "zstd",
    "use_dictionary": ["teacher"],
    "column_encoding": {"bin": "DELTA_BINARY_PACKED", "row": "DELTA_BINARY_PACKED"},  # 3 bytes a row, not 9
    "write_page_checksum": True,
}
_LENGTH = pl.col(PROMPT_LENGTH).cast(pl.Int64) + pl.col(RESPONSE_LENGTH)
_UNUSABLE = 255
"""Stands in place of the number of a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which samples are used. None lets everything through."""

    domains: tuple[str, ...] | None = None
    teachers: tuple[str, ...] | None = None
    finish_reasons: tuple[str, ...] | None = None
    min_policy_version: int | None = None
    """Optimizer steps that the weights of a sample's oldest token must have seen at least."""
    max_policy_version: int | None = None
    """Optimizer steps that the weights of its newest token may have seen at most."""
    min_loss_tokens: int = 1
    max_length: int | None = None
    """Tokens, prompt and response."""

    def reasons(self) -> dict[str, pl.Expr]:
        """What is true of a sample that is dropped, by reason; the first that holds is the one it counts under."""
        found: dict[str, pl.Expr] = {}
        if self.domains is not None:
            found["domain"] = ~pl.col(DOMAIN).is_in(self.domains)
        if self.teachers is not None:
            found["teacher"] = ~pl.col(TEACHER).is_in(self.teachers)
        if self.finish_reasons is not None:
            found["finish_reason"] = ~pl.col(FINISH_REASON).is_in(self.finish_reasons)
        if self.min_policy_version is not None:
            found["policy_too_old"] = pl.col(POLICY_MIN) < self.min_policy_version
        if self.max_policy_version is not None:
            found["policy_too_new"] = pl.col(POLICY_MAX) > self.max_policy_version
        found["too_few_loss_tokens"] = pl.col(LOSS_TOKENS) < self.min_loss_tokens
        if self.max_length is not None:
            found["too_long"] = _LENGTH.gt(self.max_length)
        return found


@dataclass(frozen=True, eq=False)
class Plan:
    """Bins of rows: bin b holds rows `rows[offsets[b]:offsets[b + 1]]`. Plans with the same content are equal."""

    rows: NDArray[np.int64]
    """Row numbers in store order, [N], bin after bin; each at most once."""
    offsets: NDArray[np.int64]
    """Where each bin begins in `rows`, and the end, [B + 1]."""
    bin_teacher: NDArray[np.int32]
    """The one teacher of each bin as a place in `teachers`, [B]; -1 where bins mix teachers."""
    teachers: tuple[str, ...]
    capacity: int
    """Tokens that a bin holds."""
    seed: int
    store_version: int
    """Number of the manifest whose rows these are."""
    settings: dict[str, Any]
    """How else it was asked for: filters and packing options."""
    total: int
    """Samples in the store."""
    dropped: dict[str, int]
    """Samples left out, by reason."""
    alone: int
    """Samples longer than the capacity, each in a bin of its own."""
    fill: float | None
    """Share of the bins' room that tokens take, bins of over-long samples aside; None without a bin."""
    fingerprint: str
    """Digest of the metadata and the arguments that it was made from."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and _digest(self, _header(self)) == _digest(other, _header(other))

    @property
    def kept(self) -> int:
        """Samples in bins."""
        return len(self.rows)

    @property
    def num_bins(self) -> int:
        """Bins, B."""
        return len(self.offsets) - 1

    def bin(self, number: int) -> NDArray[np.int64]:
        """The rows of one bin."""
        return self.rows[self.offsets[number] : self.offsets[number + 1]]

    def bins_of_rank(self, rank: int, world: int) -> NDArray[np.int64]:
        """The bins that rank `rank` of `world` takes, in order; every rank gets as many.

        Raises InputError if there is no such rank, or if the bins do not go round.
        """
        if not 0 <= rank < world:
            raise InputError(f"rank {rank} of {world}: ranks go from 0 to {world - 1}")
        if self.num_bins % world:
            raise InputError(f"{self.num_bins} bins for {world} ranks: make the plan with `multiple_of={world}`")
        return np.arange(rank, self.num_bins, world)

    def save(self, path: Path) -> None:
        """Writes the plan as one Parquet file, whole. Raises InputError or MopdctlError if that fails."""
        header = _header(self)
        sizes = np.diff(self.offsets)
        bins = np.repeat(np.arange(self.num_bins, dtype=np.int32), sizes)
        codes = np.repeat(self.bin_teacher, sizes)
        names = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(self.teachers, pa.string()))
        schema = _COLUMNS.with_metadata({_HEADER: header, _DIGEST: _digest(self, header)})
        table = pa.Table.from_arrays([pa.array(bins), pa.array(self.rows), names], schema=schema)
        with disk.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
                temporary = Path(folder) / path.name
                pq.write_table(table, temporary, **_OPTIONS)
                disk.sync_file(temporary)
                disk.rename(temporary, path)
            disk.sync_folder(path.parent)


def make_plan(
    meta: pl.DataFrame | pl.LazyFrame,
    *,
    capacity: int,
    seed: int,
    filters: Filter,
    store_version: int,
    by_teacher: bool = True,
    multiple_of: int = 1,
    over_long: OverLong = "error",
    align: int = 1,
) -> Plan:
    """Filters the samples of a store and packs them into bins; the packing options are those of `pack`.

    Args:
        meta: The store's metadata in store order; only the columns that are needed are read.
        capacity: Tokens that a bin holds.
        seed: Makes the order of bins and samples.
        filters: Which samples are used.
        store_version: Number of the manifest that `meta` was read under.
        by_teacher: Samples of different teachers share no bin, so that one teacher at a time has to be in memory.
        multiple_of: The data-parallel size; holds for the bins of all teachers together.
        over_long: What becomes of a sample longer than `capacity`.
        align: Lengths count as rounded up to a multiple of this.

    Raises:
        InputError: A needed column is missing or has nulls, a sample has no tokens, or as `pack` says.
    """
    reasons = filters.reasons()
    reason_of, lengths, names = _judged(meta, reasons, by_teacher)
    rows = np.flatnonzero(reason_of == 0)
    teachers, codes = _encoded(names.gather(rows)) if names is not None else ([], None)
    options: dict[str, Any] = {"multiple_of": multiple_of, "over_long": over_long, "align": align}
    packing = pack(lengths[rows], capacity, seed=seed, groups=codes, **options)
    settings = {"filters": asdict(filters), "by_teacher": by_teacher, **options}
    counts = np.bincount(reason_of, minlength=len(reasons) + 1).tolist()
    made_from = [capacity, seed, store_version, settings, teachers]
    first = packing.order[packing.offsets[:-1]]
    return Plan(
        rows=rows[packing.order],
        offsets=packing.offsets,
        bin_teacher=np.full(len(first), -1, np.int32) if codes is None else codes[first],
        teachers=tuple(teachers),
        capacity=capacity,
        seed=seed,
        store_version=store_version,
        settings=json.loads(json.dumps(settings)),  # lists for tuples, as after loading
        total=len(reason_of),
        dropped=dict(zip(reasons, counts[1:], strict=True)) | {"over_long": packing.dropped},
        alone=packing.alone,
        fill=packing.fill,
        fingerprint=_hash(json.dumps(made_from).encode(), reason_of, lengths, *([] if codes is None else [codes])),
    )


def load_plan(path: Path) -> Plan:
    """The plan in `path`. Raises InputError if it is missing, damaged, no plan, or of a newer layout than we know."""
    damaged = InputError(f"{path}: damaged, or no plan at all; check the path or make the plan again")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            keys = file.schema_arrow.metadata or {}
            if _HEADER not in keys or _DIGEST not in keys:
                raise InputError(f"{path}: is a Parquet file but no plan; check the path")
            header = json.loads(keys[_HEADER])
            if int(header["schema"].removeprefix(f"{NAME}/")) > VERSION:
                raise InputError(f"{path}: made by mopdctl {header['made_by']}, newer than this one; update mopdctl")
            table = file.read()
        plan = _decoded(table, header)
        if _digest(plan, keys[_HEADER]) != keys[_DIGEST].decode():
            raise damaged
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError):
        raise damaged from None
    return plan


def _decoded(table: pa.Table, header: dict[str, Any]) -> Plan:
    if not table.schema.remove_metadata().equals(_COLUMNS):
        raise ValueError("columns")
    fields = {name: value for name, value in header.items() if name not in ("schema", "made_by")}
    bins, rows = table["bin"].to_numpy(), table["row"].to_numpy()
    column = table["teacher"].unify_dictionaries().combine_chunks()
    places = np.array([*map(header["teachers"].index, column.dictionary.to_pylist()), -1], np.int32)
    codes = places[column.indices.fill_null(len(places) - 1).to_numpy()]
    offsets = np.concatenate([[0], np.bincount(bins).cumsum()])
    fields["teachers"] = tuple(header["teachers"])
    return Plan(rows=rows, offsets=offsets, bin_teacher=codes[offsets[:-1]], **fields)


def _judged(
    meta: pl.DataFrame | pl.LazyFrame, reasons: dict[str, pl.Expr], by_teacher: bool
) -> tuple[NDArray[np.uint8], NDArray[np.int64], pl.Series | None]:
    """Of each row, [n]: why it is dropped (1 for the first of `reasons`; 0 if it is kept), its tokens, its teacher."""
    wanted = [_LENGTH.alias("length"), *([pl.col(TEACHER)] if by_teacher else [])]
    needed = sorted({name for rule in [*wanted, *reasons.values()] for name in rule.meta.root_names()})
    frame = meta.lazy()
    if missing := [name for name in needed if name not in frame.collect_schema()]:
        raise InputError(f"metadata: no column {', '.join(missing)}; pass the store's whole metadata")
    reason = pl.lit(0, pl.UInt8)
    for number, rule in reversed(list(enumerate(reasons.values(), start=1))):
        reason = pl.when(rule).then(pl.lit(number, pl.UInt8)).otherwise(reason)
    unusable = pl.any_horizontal(pl.col(needed).is_null()) | (_LENGTH < 1)
    reason = pl.when(unusable).then(pl.lit(_UNUSABLE, pl.UInt8)).otherwise(reason)
    found = frame.select(reason.alias("reason"), *wanted).collect()

    reason_of = found["reason"].to_numpy()
    if bad := np.flatnonzero(reason_of == _UNUSABLE).tolist():
        raise InputError(
            f"metadata: {len(bad)} rows, first row {bad[0]}, have no tokens or a null in {', '.join(needed)}; "
            "run `mopdctl store verify`"
        )
    return reason_of, found["length"].to_numpy(), found[TEACHER] if by_teacher else None


def _encoded(names: pl.Series) -> tuple[list[str], NDArray[np.int32]]:
    """The distinct names, sorted, and the place of each row's name among them."""
    distinct = sorted(names.unique().cast(pl.String).to_list())
    return distinct, names.cast(pl.Enum(distinct)).to_physical().cast(pl.Int32).to_numpy()


def _header(plan: Plan) -> bytes:
    """Everything in a plan but its arrays, as JSON."""
    arrays = ("rows", "offsets", "bin_teacher")
    own = {name: getattr(plan, name) for name in Plan.__dataclass_fields__ if name not in arrays}
    return json.dumps({"schema": f"{NAME}/{VERSION}", "made_by": __version__, **own}, allow_nan=False).encode()


def _digest(plan: Plan, header: bytes) -> str:
    return _hash(header, plan.rows, plan.offsets, plan.bin_teacher)


def _hash(text: bytes, *arrays: NDArray[Any]) -> str:
    state = blake2b(text, digest_size=16)
    for array in arrays:
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()
