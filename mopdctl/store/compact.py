"""Many small files into few: a training run commits every step, and a reader opens every file."""

from mopdctl.store import disk
from mopdctl.store.manifest import Shard
from mopdctl.store.store import StoreWriter, write_shard

SHARD_TOKENS = 32 * 1024 * 1024
"""A shard that holds so many tokens is left as it is; about 200 MB of payload."""


def compact(writer: StoreWriter, *, shard_tokens: int = SHARD_TOKENS) -> tuple[int, int]:
    """Merges neighbouring shards up to `shard_tokens` tokens; returns the shards before and after.

    Samples keep their order. Old files stay for a while, for readers that opened the store before.
    """
    store = writer.store
    before = len(store.manifest.shards)
    runs = _runs(store.manifest.shards, shard_tokens)
    if len(runs) == before:
        return before, before
    with disk.writing(store.folder), writer.staging() as staging:
        shards: list[Shard] = []
        first = 0
        for run in runs:
            end = first + sum(shard.rows for shard in run)
            merged = run[0] if len(run) == 1 else write_shard(store.folder, staging, store.read(range(first, end)))[0]
            shards.append(merged)
            first = end
        writer.replace(staging, shards)
    return before, len(shards)


def _runs(shards: tuple[Shard, ...], limit: int) -> list[list[Shard]]:
    runs: list[list[Shard]] = []
    tokens = 0
    for shard in shards:
        if not runs or tokens + shard.tokens > limit:
            runs.append([])
            tokens = 0
        runs[-1].append(shard)
        tokens += shard.tokens
    return runs
