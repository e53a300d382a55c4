"""What the store bench works on: stores of metadata alone, and one with payload, from a fixed seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mopdctl.cli.output import note
from mopdctl.files import file_digest, fingerprint
from mopdctl.records import Sample
from mopdctl.runs import Workspace, building, locked
from mopdctl.store import manifest as manifests
from mopdctl.store import parquet, schema
from mopdctl.store.compact import SHARD_TOKENS
from mopdctl.store.manifest import File, Manifest, Shard
from mopdctl.store.store import Store, StoreWriter

DATA = 1
"""Raised when the data in the cache has to be made anew."""
CAPACITY = 16 * 1024
"""Tokens of a bin and of the longest sample."""
DOMAINS = ("math", "code", "science", "chat", "tools")
IDENTITY = {"tokenizer": "bench"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything; the bars are for these figures."""

    plan_rows: int = 10_000_000
    pack_samples: int = 50_000
    payload_samples: int = 20_000
    payload_mean_tokens: int = 2_000
    """Before the cut; makes 400 MB of uncompressed payload."""
    rows_read: int = 64
    log_requests: int = 64
    log_steps: int = 400
    workers: int = 4
    meta_rows: int = 1_000_000
    meta_payload_tokens: int = 32
    """Of each sample in the file that holds everything. With fewer, pyarrow would read what lies between metadata."""


def lengths(generator: np.random.Generator, samples: int, *, mean: int = 1500) -> NDArray[np.int64]:
    """Log-normal lengths in tokens, [samples]; `mean` is that before they are cut off at the capacity."""
    sigma = 0.9
    found = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, samples)
    return np.clip(found, 16, CAPACITY).astype(np.int64)


def metadata(sizes: Sizes, cache: Path) -> Path:
    """The folder with what the metadata cases read, made on first use.

    `rollouts/plan` and `rollouts/load` are stores without their payload files, `combined.parquet` has the rows of
    `load` with payload beside them.
    """
    made_from = [DATA, schema.document(), file_digest(Path(parquet.__file__)), sizes.plan_rows, sizes.meta_rows]
    folder = cache / f"store-{fingerprint([*made_from, sizes.meta_payload_tokens])}"
    with locked(cache):
        if not folder.is_dir():
            note(f"writing metadata of {sizes.plan_rows:,} and {sizes.meta_rows:,} samples into {folder}")
            with building(folder) as temporary:
                _metadata_store(Workspace(temporary).rollouts("plan"), sizes.plan_rows)
                _metadata_store(Workspace(temporary).rollouts("load"), sizes.meta_rows)
                table = Store(Workspace(temporary).rollouts("load")).meta_table()
                for column in schema.PAYLOAD_COLUMNS[1:]:
                    table = table.append_column(column.field, _short(column, len(table), sizes.meta_payload_tokens))
                rows = schema.PAYLOAD_GROUP_ROWS
                pq.write_table(table, temporary / "combined.parquet", row_group_size=rows, compression="zstd")
    return folder


def _metadata_store(folder: Path, samples: int) -> None:
    """A store as compaction leaves it, written by the store's own functions, but for the payload files."""
    for name in ("manifest", "meta", "payload", "_staging"):
        (folder / name).mkdir(parents=True)
    generator = np.random.default_rng(0)
    tokens = lengths(generator, samples)
    shards = []
    edges = np.searchsorted(tokens.cumsum() // SHARD_TOKENS, np.arange(tokens.sum() // SHARD_TOKENS + 2)).tolist()
    for number, (first, last) in enumerate(pairwise(edges)):
        table = _meta_table(generator, first, tokens[first:last], shard=number)
        path = folder / "meta" / Path(table["payload_file"][0].as_py()).name
        pieces = (table.slice(at, schema.META_GROUP_ROWS) for at in range(0, len(table), schema.META_GROUP_ROWS))
        parquet.write(path, pieces, schema.META_COLUMNS)
        meta = File(f"meta/{path.name}", path.stat().st_size, file_digest(path))
        absent = File(f"payload/{path.name}", 1, "0" * 32)
        shards.append(Shard(len(table), int(tokens[first:last].sum()), meta=meta, payload=absent))
    manifests.publish(folder, Manifest(0, None, IDENTITY, tuple(shards)), folder / "_staging")


def _meta_table(generator: np.random.Generator, first: int, tokens: NDArray[np.int64], *, shard: int) -> pa.Table:
    """Metadata rows from number `first` on: eight samples a prompt, one domain and teacher a prompt."""
    count = len(tokens)
    prompts, index = np.divmod(np.arange(first, first + count), 8)
    prompt_ids = pc.binary_join_element_wise("prompt-", pa.array(prompts).cast(pa.string()), "")
    domains = pa.array(DOMAINS).take(pa.array((prompts * 2_654_435_761 >> 16) % len(DOMAINS)))  # in no order
    prompt = np.minimum(tokens // 4, generator.integers(16, 512, count))
    values: dict[str, Any] = {
        "sample_id": pc.binary_join_element_wise(prompt_ids, "/", pa.array(index).cast(pa.string()), "@0", ""),
        "prompt_id": prompt_ids,
        "group_id": prompt_ids,
        "generation_index": index,
        "domain": domains,
        "teacher_id": domains,
        "policy_version_min": np.full(count, shard),
        "policy_version_max": np.full(count, shard + 1),
        "prompt_length": prompt,
        "response_length": tokens - prompt,
        "loss_tokens": tokens - prompt,
        "finish_reason": pa.array(["stop", "length"]).take(pa.array((tokens == CAPACITY).astype(np.int8))),
        "reward": generator.integers(0, 2, count).astype(np.float32),
        "verdict": pa.repeat("ok", count),
        "verifier": pa.repeat("bench/1", count),
        "verdict_label": pa.nulls(count, pa.string()),
        "attempt": np.ones(count),
        "tokenizer_fingerprint": pa.repeat("bench", count),
        "sampling_fingerprint": pa.repeat("bench", count),
        "payload_file": pa.repeat(f"payload/part-{shard:032x}.parquet", count),
        "payload_row_group": np.arange(count) // schema.PAYLOAD_GROUP_ROWS,
        "payload_row": np.arange(count) % schema.PAYLOAD_GROUP_ROWS,
        "payload_crc": generator.integers(0, 1 << 32, count),
    }
    columns = [pa.array(values[column.name]).cast(column.type) for column in schema.META_COLUMNS]
    return pa.Table.from_arrays(columns, schema=schema.META)


def _short(column: schema.Column, count: int, tokens: int) -> pa.Array:
    """A payload column of `count` samples of `tokens` tokens each."""
    if column.nullable and column.name != "teacher_logprobs":
        return pa.nulls(count, column.type)
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * tokens)
    values = np.random.default_rng(0).integers(1, 1 << 17, count * tokens)
    return pa.ListArray.from_arrays(offsets, pa.array(values).cast(column.type.value_type), type=column.type)


def payload_store(sizes: Sizes, folder: Path) -> Store:
    """A store in `folder` that one commit has written, samples and all."""
    with StoreWriter(folder / "rollouts", IDENTITY) as writer:
        writer.commit(list(_samples(sizes)))
    return Store(folder / "rollouts")


def _samples(sizes: Sizes) -> Iterator[Sample]:
    generator = np.random.default_rng(0)
    totals = lengths(generator, sizes.payload_samples, mean=sizes.payload_mean_tokens)
    for number, total in enumerate(totals.tolist()):
        prompt = total // 8
        behavior = -generator.standard_exponential(total - prompt, dtype=np.float32)
        yield Sample(
            sample_id=f"prompt-{number // 8}/{number % 8}@0",
            prompt_id=f"prompt-{number // 8}",
            group_id=f"prompt-{number // 8}",
            generation_index=number % 8,
            domain=DOMAINS[number // 8 % len(DOMAINS)],
            teacher_id=DOMAINS[number // 8 % len(DOMAINS)],
            policy_version_min=0,
            policy_version_max=0,
            tokens=np.exp(generator.random(total, np.float32) * np.log(150_000)).astype(np.int32),  # Zipf, exponent 1
            prompt_length=prompt,
            loss_mask=np.arange(total) >= prompt,
            behavior_logprobs=behavior,
            finish_reason="stop",
            teacher_logprobs=behavior + generator.standard_normal(len(behavior), np.float32),
        )
