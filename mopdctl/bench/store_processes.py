"""What the store bench runs in processes of their own, as a script: rivals, and workers whose memory is counted.

`next-fit` and `trl` must run where mopdctl is not installed; nothing of it is imported but by `worker`. Those that stay
say one line of JSON when they are ready, and end with their standard input.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def next_fit(store: str, capacity: str, out: str) -> None:
    """A plan as one would write it by hand: read by polars, shuffled, each sample in the last bin or in a new one.

    It keeps teachers apart and samples without loss tokens out, as our plan does, and writes the same three columns.
    It verifies no file, and what it gives up is room: it never looks back for a bin with space left.
    """
    import polars as pl

    files = sorted((Path(store) / "meta").glob("*.parquet"))
    found = (
        pl.scan_parquet(files)
        .with_row_index("row")
        .filter(pl.col("loss_tokens") >= 1)
        .select("row", "teacher_id", (pl.col("prompt_length") + pl.col("response_length")).alias("length"))
        .collect()
    )
    names = found["teacher_id"].cast(pl.Categorical)
    rows, lengths, teachers = found["row"].to_numpy(), found["length"].to_numpy(), names.to_physical().to_numpy()
    order = np.random.default_rng(0).permutation(len(rows))
    kept, bins, first = [], [], 0
    for teacher in np.unique(teachers):
        members = order[teachers[order] == teacher]
        labels = _next_fit(lengths[members], int(capacity)) + first
        kept.append(members)
        bins.append(labels)
        first = int(labels[-1]) + 1
    chosen = np.concatenate(kept)
    plan = {"bin": np.concatenate(bins).astype(np.int32), "row": rows[chosen], "teacher": names.gather(chosen)}
    pl.DataFrame(plan).write_parquet(out)


def _next_fit(lengths: NDArray[Any], capacity: int) -> NDArray[np.int64]:
    ends = lengths.cumsum(dtype=np.int64)
    beyond = np.searchsorted(ends, ends - lengths + capacity, side="right").tolist()  # where a bin begun here is full
    starts = np.zeros(len(lengths), np.int64)
    at = beyond[0]
    while at < len(beyond):
        starts[at] = 1
        at = beyond[at]
    labels: NDArray[np.int64] = starts.cumsum()
    return labels


def trl(lengths: str, capacity: str) -> None:
    """Packs samples of the lengths in a file with TRL, once for each line that it is told.

    As TRL's trainer does by default: best-fit decreasing over batches of 1000 samples. TRL packs columns of lists and
    takes the lengths from them, so it gets lists of nulls: the lengths alone, no token is stored or copied.
    """
    import datasets
    import pyarrow as pa

    pack_dataset = import_module("trl").pack_dataset
    datasets.disable_progress_bars()
    tokens = np.load(lengths)
    offsets = np.concatenate([[0], tokens.cumsum()])
    column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.nulls(int(offsets[-1])))
    dataset = datasets.Dataset(datasets.table.InMemoryTable(pa.table({"input_ids": column})))
    _say({})
    for _ in sys.stdin:
        start = time.process_time()
        packed = pack_dataset(dataset, int(capacity), "bfd")
        cpu_s = time.process_time() - start
        kept = packed.with_format("arrow")[:]["seq_lengths"]
        if kept.combine_chunks().flatten().to_numpy().sum() != offsets[-1]:
            raise ValueError("TRL lost tokens")
        _say({"cpu_s": cpu_s, "bins": len(kept)})


def worker(how: str, path: str) -> None:
    """A loader worker that has gone through all samples and keeps what it needs for that.

    `shared` maps what was shared in `path`, `parquet` reads the files of the folder `path`, `idle` does neither.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mopdctl.store import rows
    from mopdctl.store.loader import Shared

    kept: Any = None
    if how == "shared":
        kept = Shared(Path(path))
        for number in range(kept.rows):
            rows.sample_crc(kept.sample(number))  # touches every byte
    elif how == "parquet":
        kept = [pq.ParquetFile(file).read() for file in sorted(Path(path).glob("*.parquet"))]
        pa.default_memory_pool().release_unused()  # what decoding took on the way is not counted
    _say({})
    sys.stdin.read()


def _say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)  # noqa: T201 - the answer to the process that started this one


ROLES: dict[str, Callable[..., None]] = {"next-fit": next_fit, "trl": trl, "worker": worker}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
