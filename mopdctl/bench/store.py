"""What the rollout store costs, beside what one would use instead.

Linux only. 600 MB of data are made once and kept in the bench's cache; the rest goes into a temporary folder beside
them, on a real disk. Lengths are log-normal with a mean of 1.5k tokens, cut off at the 16k of a bin. The cases measure:

- Plan (s, wall time; GiB, peak resident memory): `mopdctl store plan` on two cores, from its start to the saved plan,
  over 10 million samples in shards as compaction leaves them. Rival: the same by hand with polars and next-fit, the
  cheapest plan that keeps teachers apart; a tenth of its room stays empty. What packs as well, TRL for one, takes
  minutes for so many samples.
- Pack (CPU seconds per million samples; per mille of the bins' room left empty): 50,000 lengths in memory. Rival:
  `pack_dataset` of TRL 1.16, the packing that people use, called as by its trainer, so on batches of 1000 samples. On
  all samples at once it leaves as little empty as we do (the algorithm is the same) and takes longer.
- Row (ms, wall time): one random sample of 20,000 with all its streams, checksums verified. Rivals: pyarrow reading the
  row group of 64 that the sample is in, which is what Parquet itself costs; pyarrow on a file written with its
  defaults, which is one row group; `datasets`, which has unpacked the file into an Arrow file, the usual way to have
  random rows. That one is held against our unpacked copy, too, the one that loader workers share.
- Log (us, wall time): the median engine step of 64 requests at level `host`. Rival: `write` and `fdatasync` of the same
  bytes, without which nothing survives the machine. Sides take turns step by step, for a disk is never quiet.
- Worker (MB): private memory of the largest of four loader workers that have each gone through 400 MB of samples, above
  that of an idle one with the same imports. Rival: four workers that read the Parquet files into memory.
- Metadata (s, wall time; bytes read per sample): all metadata of a million samples in one table, from a store whose
  payload files are not there, so that opening one would fail. Bytes are what read calls return and the whole of a file
  that is mapped. Rival: pyarrow reading the same columns of one file that holds a (short) payload, too, in the row
  groups of 64 that random rows ask for: what comes of not keeping them apart.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mopdctl.bench import store_processes
from mopdctl.bench.frame import Bar, Bench, Case, rival_environment, spent
from mopdctl.bench.store_data import CAPACITY, Sizes, lengths, metadata, payload_store
from mopdctl.cli.output import note
from mopdctl.errors import InputError, MopdctlError
from mopdctl.runs import Workspace
from mopdctl.store import schema
from mopdctl.store.loader import Shared, share
from mopdctl.store.packing import pack
from mopdctl.store.store import Store
from mopdctl.store.wal import Open, SegmentName, Tokens, WalWriter, read_frames


def bench(sizes: Sizes | None = None, *, cache: Path | None = None) -> Bench:
    """The cases of `python -m mopdctl.bench store`."""
    if not Path("/proc/self/smaps_rollup").exists():
        raise InputError("the store bench counts memory and bytes in /proc, which is not here; run it on Linux")
    sizes = sizes or Sizes()
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mopdctl-bench"
    reported = ["trl", "datasets", "pyarrow", "polars"]
    rival = rival_environment("trl", ["trl==1.16.*"], report_versions=reported, share_ours=True)
    data = metadata(sizes, cache)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir=cache, prefix="store-")))
        note("writing payload")
        store = payload_store(sizes, folder)
        shared = held.enter_context(share(store, run_id="bench", on_note=note))
        cases = [
            *plan_cases(sizes, data, folder),
            *pack_cases(sizes, rival.program("python"), folder, held),
            *row_cases(sizes, store, shared, folder),
            *log_cases(sizes, folder),
            *worker_cases(sizes, store, shared),
            *metadata_cases(sizes, data),
        ]
        return Bench(cases, rival.versions, held.pop_all())


# ----------------------------------------------------------------------------------------------------------- plan, pack


def plan_cases(sizes: Sizes, data: Path, folder: Path) -> list[Case]:
    """From metadata files to a saved plan: time and memory of a process with two cores."""
    out = folder / "plan.parquet"
    ours = [sys.executable, "-m", "mopdctl", "store", "plan", "plan", "--capacity", CAPACITY, "--workspace", data]
    rival = [*_script(sys.executable, "next-fit"), Workspace(data).rollouts("plan"), CAPACITY, out]

    def wall_s(command: Sequence[Any]) -> float:
        return spent([str(part) for part in command], cores=2).wall_s

    def peak_gib(command: Sequence[Any]) -> float:
        return spent([str(part) for part in command], cores=2).peak_bytes / 2**30

    name = f"plan {sizes.plan_rows:,} samples"
    ours += ["--out", out]
    return [
        Case(
            name=f"{name} | next-fit by hand",
            unit="s",
            ours=lambda: wall_s(ours),
            rival=lambda: wall_s(rival),
            bar=Bar(ours_at_most=15),
            max_runs=3,
        ),
        Case(
            name=f"{name}, peak memory | next-fit by hand",
            unit="GiB",
            ours=lambda: peak_gib(ours),
            rival=lambda: peak_gib(rival),
            bar=Bar(ours_at_most=4),
            max_runs=1,
        ),
    ]


def pack_cases(sizes: Sizes, rival_python: Path, folder: Path, held: ExitStack) -> list[Case]:
    """The packing of lengths alone: CPU time, and how much room it leaves empty."""
    tokens = lengths(np.random.default_rng(0), sizes.pack_samples)
    file = folder / "lengths.npy"
    np.save(file, tokens)
    note("starting TRL")
    trl = held.enter_context(Child([*_script(rival_python, "trl"), file, CAPACITY]))
    trl.answer()

    def ours_cpu_s() -> float:
        start = time.process_time()
        pack(tokens, CAPACITY, seed=0)
        return (time.process_time() - start) / sizes.pack_samples * 1e6

    def ours_empty() -> float:
        return 1000 - 1000 * (pack(tokens, CAPACITY, seed=0).fill or 0)

    def rival_empty() -> float:
        return 1000 - 1000 * int(tokens.sum()) / (int(trl.ask()["bins"]) * CAPACITY)

    name = f"pack {sizes.pack_samples:,} lengths"
    return [
        Case(
            name=f"{name} | TRL pack_dataset",
            unit="CPU s per 1M",
            ours=ours_cpu_s,
            rival=lambda: float(trl.ask()["cpu_s"]) / sizes.pack_samples * 1e6,
            bar=Bar(ratio_at_least=1),
            max_runs=3,
        ),
        Case(
            name=f"{name}, room left empty | TRL pack_dataset",
            unit="per mille",
            ours=ours_empty,
            rival=rival_empty,
            bar=Bar(ours_at_most=1),
            max_runs=1,
        ),
    ]


# ----------------------------------------------------------------------------------------------------------------- rows


def row_cases(sizes: Sizes, store: Store, shared: Shared, folder: Path) -> list[Case]:
    """One random sample, all of it."""
    import datasets

    (shard,) = store.manifest.shards
    file, defaults = store.folder / shard.payload.path, folder / "defaults.parquet"
    groups = store.meta_table(["payload_row_group"])["payload_row_group"].to_pylist()
    picks = np.random.default_rng(0).permutation(shard.rows)[: sizes.rows_read].tolist()

    note("writing the rivals' files")
    pq.write_table(pq.read_table(file), defaults)
    grouped, whole = pq.ParquetFile(file), pq.ParquetFile(defaults)
    if whole.num_row_groups != 1:
        raise MopdctlError(f"{defaults}: pyarrow's defaults made {whole.num_row_groups} row groups where one was meant")
    datasets.disable_progress_bars()
    unpacked = datasets.Dataset.from_parquet(str(file), cache_dir=str(folder / "datasets")).with_format("numpy")

    def read() -> float:
        return _ms_each(lambda number: store.read([number]), picks)

    def unpacked_row() -> float:
        return _ms_each(lambda number: unpacked[number], picks)

    name = f"random row of {shard.rows:,}"
    return [
        Case(
            name=f"{name} | pyarrow, one row group of {schema.PAYLOAD_GROUP_ROWS}",
            unit="ms",
            ours=read,
            rival=lambda: _ms_each(lambda number: grouped.read_row_group(groups[number]), picks),
            bar=Bar(ratio_at_least=0.5),
        ),
        Case(
            name=f"{name} | pyarrow, file written with defaults",
            unit="ms",
            ours=read,
            rival=lambda: _ms_each(lambda number: whole.read_row_group(0).slice(number, 1), picks[:1]),
            bar=Bar(ratio_at_least=50),
            max_runs=3,
        ),
        Case(name=f"{name} | datasets", unit="ms", ours=read, rival=unpacked_row, bar=None),
        Case(
            name=f"{name}, shared | datasets",
            unit="ms",
            ours=lambda: _ms_each(shared.sample, picks),
            rival=unpacked_row,
            bar=None,
        ),
    ]


def _ms_each(action: Callable[[int], Any], numbers: Sequence[int]) -> float:
    start = time.perf_counter()
    for number in numbers:
        action(number)
    return (time.perf_counter() - start) / len(numbers) * 1e3


# ------------------------------------------------------------------------------------------------------------------ log


def log_cases(sizes: Sizes, folder: Path) -> list[Case]:
    """An engine step in the token log, at the level that survives the machine."""
    count = sizes.log_requests
    generator = np.random.default_rng(0)
    token_ids = generator.integers(0, 150_000, (sizes.log_steps, count)).astype(np.int32)
    logprobs = -generator.standard_exponential((sizes.log_steps, count), dtype=np.float32)
    prompt = np.arange(64, dtype=np.int32)

    def steps(frames: Sequence[bytes]) -> tuple[float, float, Path]:
        """Median us of a step in the log and of a bare one, taken in turn; and the segment."""
        ours, rival = [], []
        handle = os.open(folder / uuid.uuid4().hex, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        with WalWriter(folder / uuid.uuid4().hex, writer="bench", level="host", epoch=1, fence={}) as log:
            log.append([Open(slot, f"prompt-{slot}/0@0", 1, prompt, {}) for slot in range(count)])
            for step, frame in enumerate(frames):
                slots, positions = np.arange(count, dtype=np.uint32), np.full(count, step, np.uint32)
                start = time.perf_counter()
                log.append([Tokens(0, slots, positions, token_ids[step], logprobs[step])])
                middle = time.perf_counter()
                os.write(handle, frame)
                os.fdatasync(handle)
                rival.append(time.perf_counter() - middle)
                ours.append(middle - start)
        os.close(handle)
        return median(ours) * 1e6, median(rival) * 1e6, log.folder / log.segments[0]

    *_, segment = steps([b""] * sizes.log_steps)
    data, name = segment.read_bytes(), SegmentName.parse(segment.name)
    assert name is not None
    offsets = [offset for offset, _ in read_frames(data, name)][-sizes.log_steps :]
    frames = [data[start:end] for start, end in pairwise([*offsets, len(data)])]
    bare: list[float] = []

    def ours() -> float:
        cost, rival_cost, _ = steps(frames)
        bare.append(rival_cost)
        return cost

    return [
        Case(
            name=f"log a step of {count} requests, level host | write and fdatasync",
            unit="us",
            ours=ours,
            rival=lambda: bare.pop(),
            bar=Bar(ratio_at_least=0.7),
        )
    ]


# -------------------------------------------------------------------------------------------------------------- workers


def worker_cases(sizes: Sizes, store: Store, shared: Shared) -> list[Case]:
    """Memory that each loader worker has for itself."""
    megabytes = (shared.path / "payload.arrow").stat().st_size / 1e6

    def above_idle(how: str, path: Path) -> float:
        with ExitStack() as running:
            asked = [("idle", path), *[(how, path)] * sizes.workers]
            idle, *workers = [
                running.enter_context(Child([sys.executable, "-m", store_processes.__name__, "worker", *arguments]))
                for arguments in asked
            ]
            for child in (idle, *workers):
                child.answer()
            above: int = max(worker.private_bytes() for worker in workers) - idle.private_bytes()
            return max(above, os.sysconf("SC_PAGE_SIZE")) / 1e6  # less than a page cannot be told from none

    return [
        Case(
            name=f"private memory of a worker, {sizes.workers} over {megabytes:.0f} MB | reading the files",
            unit="MB",
            ours=lambda: above_idle("shared", shared.path),
            rival=lambda: above_idle("parquet", store.folder / "payload"),
            bar=Bar(ours_at_most=20),
            max_runs=1,
        )
    ]


# ------------------------------------------------------------------------------------------------------------- metadata


def metadata_cases(sizes: Sizes, data: Path) -> list[Case]:
    """All metadata of a store whose payload cannot be read, for it is not there."""
    folder, combined = Workspace(data).rollouts("load"), data / "combined.parquet"
    if any((folder / "payload").iterdir()):
        raise MopdctlError(f"{folder}: has payload files, so nothing would be proved")
    mapped = sum(path.stat().st_size for path in (folder / "meta").iterdir())

    def ours() -> pa.Table:
        return Store(folder).meta_table()

    def rival() -> pa.Table:
        with pq.ParquetFile(combined) as file:
            return file.read(columns=schema.META.names)

    def bytes_each(action: Callable[[], pa.Table]) -> float:
        before = _bytes_read()
        action()
        return (_bytes_read() - before) / sizes.meta_rows

    def wall_s(action: Callable[[], pa.Table]) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    name = f"metadata of {sizes.meta_rows:,} samples"
    return [
        Case(
            name=f"{name}, payload absent | pyarrow, one file with payload",
            unit="s",
            ours=lambda: wall_s(ours),
            rival=lambda: wall_s(rival),
            bar=Bar(ratio_at_least=1),
            max_runs=3,
        ),
        Case(
            name=f"{name}, bytes read per sample | pyarrow, one file with payload",
            unit="bytes",
            ours=lambda: bytes_each(ours) + mapped / sizes.meta_rows,
            rival=lambda: bytes_each(rival),
            bar=Bar(ratio_at_least=1),
            max_runs=1,
        ),
    ]


def _bytes_read() -> int:
    """Bytes that read calls have returned to this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


# ------------------------------------------------------------------------------------------------------------ processes


def _script(python: str | Path, role: str) -> list[Any]:
    return [python, "-P", store_processes.__file__, role]


class Child:
    """A process of `store_processes` that stays. Use as a context manager; ends with it."""

    def __init__(self, command: Sequence[Any]) -> None:
        """Starts it; its first answer says that it is ready."""
        self._command = [str(part) for part in command]
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self) -> dict[str, Any]:
        """Tells it a line and returns its answer."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next answer. Raises MopdctlError if it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MopdctlError(f"`{' '.join(self._command)}` ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def private_bytes(self) -> int:
        """Memory that it shares with no other process."""
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) * 1024
