"""Samples as rows of the two tables, and back. Arrays move as blocks; no token becomes a Python object."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mopdctl.errors import MopdctlError
from mopdctl.records import Sample
from mopdctl.store import schema

_TYPES: dict[str, Any] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "teacher_logprobs": np.float32,
    "teacher_topk_ids": np.int32,
    "teacher_topk_logprobs": np.float32,
    "teacher_hidden": np.uint16,
    "rewards": np.float32,
}
_WIDE = ("teacher_topk_ids", "teacher_topk_logprobs", "teacher_hidden")
_PER_LOSS_TOKEN = ("behavior_logprobs", "teacher_logprobs", *_WIDE)


def check(sample: Sample) -> None:
    """Raises MopdctlError naming the sample unless its arrays fit each other and every number in them is finite."""
    where = f"sample {sample.sample_id}"
    if what := verdict_problem({name: getattr(sample, name) for name in schema.VERDICT}):
        raise MopdctlError(f"{where}: {what}")
    arrays = {name: getattr(sample, name) for name in schema.STREAMS}
    for name, array in arrays.items():
        if array is None:
            continue
        if array.dtype != _TYPES[name]:
            raise MopdctlError(f"{where}: {name} is {array.dtype} where {np.dtype(_TYPES[name])} is kept")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = np.argwhere(~np.isfinite(array))[0].tolist()
            raise MopdctlError(f"{where}: {name} is {array[tuple(bad)]} at {bad[0]}; only finite numbers are kept")
    if len(sample.loss_mask) != len(sample.tokens):
        raise MopdctlError(f"{where}: {len(sample.loss_mask)} mask entries for {len(sample.tokens)} tokens")
    if not 0 < sample.prompt_length <= len(sample.tokens):
        raise MopdctlError(f"{where}: prompt of {sample.prompt_length} of {len(sample.tokens)} tokens")
    if sample.loss_mask[: sample.prompt_length].any():
        raise MopdctlError(f"{where}: the loss mask covers tokens of the prompt")
    active = int(sample.loss_mask.sum())
    for name in _PER_LOSS_TOKEN:
        array = arrays[name]
        if array is not None and len(array) != active:
            raise MopdctlError(f"{where}: {len(array)} {name} for {active} loss-active tokens")


def verdict_problem(row: Mapping[str, Any]) -> str | None:
    """What is wrong with the verdict in a row of `meta`, None if nothing. A reward goes with `ok` and no other."""
    reward, verdict = row["reward"], row["verdict"]
    if (reward is not None) != (verdict == schema.OK):
        return f"{'no' if reward is None else 'a'} reward beside the verdict {verdict}"
    if reward is not None and not 0 <= reward <= 1:  # NaN is in no range
        return "a reward that is not between 0 and 1"
    if (verdict is None) != (row["verifier"] is None) or (verdict is None and row["verdict_label"] is not None):
        return f"the verdict {verdict} of the verifier {row['verifier']}"
    return None


def payload_crc(arrays: Mapping[str, Any]) -> int:
    """The CRC-32 of a payload: of each stream in turn its name, its length in bytes (-1 for none) and its bytes."""
    crc = 0
    for name in schema.STREAMS:
        array = arrays[name]
        data = b"" if array is None else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        crc = zlib.crc32(f"{name}:{-1 if array is None else len(data)}".encode(), crc)
        crc = zlib.crc32(data, crc)
    return crc


def sample_crc(sample: Sample) -> int:
    """The CRC-32 of a sample's payload."""
    return payload_crc({name: getattr(sample, name) for name in schema.STREAMS})


def payload_table(samples: Sequence[Sample]) -> pa.Table:
    """The payload rows of some samples, in order."""
    columns = []
    for column in schema.PAYLOAD_COLUMNS:
        values = [getattr(sample, column.name) for sample in samples]
        if column.name == "sample_id":
            columns.append(pa.array(values, column.type))
        elif column.name == "teacher_hidden":
            blobs = [None if v is None else np.ascontiguousarray(v, dtype="<u2").tobytes() for v in values]
            columns.append(pa.array(blobs, column.type))
        else:
            columns.append(_lists(values, column.type, _TYPES[column.name]))
    return pa.Table.from_arrays(columns, schema=schema.PAYLOAD)


def _lists(values: Sequence[Any], of: pa.DataType, dtype: Any) -> pa.Array:
    lengths = np.fromiter((0 if v is None else v.size for v in values), np.int64, len(values))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    present = [np.ravel(v) for v in values if v is not None]
    flat = np.concatenate(present) if present else np.empty(0, dtype)
    missing = np.fromiter((v is None for v in values), bool, len(values))
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(flat, of.value_type), type=of, mask=pa.array(missing) if missing.any() else None
    )


def meta_table(samples: Sequence[Sample], *, file: str, groups: Sequence[int]) -> pa.Table:
    """The metadata rows of samples whose payload stands in `file`, cut into row groups of `groups` rows."""
    own = {
        "response_length": [len(s.tokens) - s.prompt_length for s in samples],
        "loss_tokens": [int(s.loss_mask.sum()) for s in samples],
        "payload_file": [file] * len(samples),
        "payload_row_group": [number for number, rows in enumerate(groups) for _ in range(rows)],
        "payload_row": [row for rows in groups for row in range(rows)],
        "payload_crc": [sample_crc(s) for s in samples],
    }
    columns = [
        pa.array(own[c.name] if c.name in own else [getattr(s, c.name) for s in samples], c.type)
        for c in schema.META_COLUMNS
    ]
    return pa.Table.from_arrays(columns, schema=schema.META)


def rescored(table: pa.Table, verdicts: Mapping[int, Mapping[str, Any]]) -> pa.Table:
    """A table of `meta` in which some rows have other values in the columns of `schema.VERDICT`."""
    for name in schema.VERDICT:
        values = table[name].to_pylist()
        for row, verdict in verdicts.items():
            values[row] = verdict[name]
        field = schema.META.field(name)
        table = table.set_column(schema.META.get_field_index(name), field, pa.array(values, field.type))
    return table


class PayloadGroup:
    """One row group of payload in memory, whose rows come out as arrays over its buffers."""

    def __init__(self, table: pa.Table) -> None:
        self.rows = table.num_rows
        columns = {name: table.column(name) for name in table.column_names}
        # combine_chunks copies a single chunk, too
        self._columns = {name: c.chunk(0) if c.num_chunks == 1 else c.combine_chunks() for name, c in columns.items()}

    def arrays(self, row: int) -> dict[str, Any]:
        """Every stream of a row, None where it has none, as views; the loss mask is unpacked.

        Taken from the buffers: pyarrow's scalars copy bytes, and its `to_numpy` imports pandas, 30 MB of memory.
        """
        found: dict[str, Any] = {}
        for name in schema.STREAMS:
            column = self._columns[name]
            valid, offsets, *_, data = column.buffers()
            at = column.offset + row
            start, end = np.frombuffer(offsets, np.int32, 2, 4 * at).tolist()
            if valid is not None and not valid[at // 8] >> at % 8 & 1:
                found[name] = None
            elif name == "teacher_hidden":
                found[name] = np.frombuffer(data, "<u2", (end - start) // 2, start)
            elif name == "loss_mask":
                bits = np.unpackbits(np.frombuffer(data, np.uint8)[start // 8 : -(-end // 8)], bitorder="little")
                found[name] = bits[start % 8 :][: end - start].view(np.bool_)
            else:
                found[name] = np.frombuffer(data, _TYPES[name], end - start, 4 * start)
            if found[name] is not None:
                found[name].flags.writeable = False
        return found

    def column(self, name: str) -> pa.Array:
        """A whole column."""
        return self._columns[name]

    def sample_id(self, row: int) -> str:
        """The row's id."""
        return str(self._columns["sample_id"][row].as_py())


def sample_from(meta: Mapping[str, Any], arrays: dict[str, Any]) -> Sample:
    """The sample of one metadata row and its payload."""
    own = {name: meta[name] for name in schema.META.names if name in Sample.__dataclass_fields__}
    active = int(meta["loss_tokens"])
    shaped = {
        name: array.reshape(active, -1) if array is not None and active and name in _WIDE else array
        for name, array in arrays.items()
    }
    return Sample(**own, **shaped)
