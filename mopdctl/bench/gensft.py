"""What gen-sft costs, beside what one would use instead.

Linux only, on two cores that the fake server shares. Prompts of 14 words, answers of about 60, one member of engine
`openai` with 64 requests at once, no latency, no faults. The server takes 0.5 s of CPU per 1,000 answers on the core
that a client, which is one thread, leaves to it (while rows are asked for, half of that core for gen-sft and a third
for the bare loop), so neither side waits for it. Run it on a quiet computer: what else runs there takes the server's
core away.

- Rows (wall seconds per 1,000): the whole command, from its start to the finished data set, with every rule, exact and
  near duplicates, the journal and the card, which the rivals do not have. Rivals: a bare asyncio loop with httpx that
  sends the same bodies and writes down the responses; NeMo Data Designer 0.9, one LLM column over the same prompts.
- Memory (MiB, peak resident): of those same runs. And how it grows: the peak at 100,000 rows over that at 2,000.

Each run has a workspace and a server of its own. A server that has seen a body before is not the same server any more:
it knows our idempotency keys and replays answers, while a rival sends none. What the server billed and what each side
left on disk is counted after each run; a run that lacks a row is no measurement. The unmeasured first runs are short.

Both rivals get `sniffio`, which none of their packages asks for: without it httpcore looks for it at every request and
is a fifth slower.
"""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import pyarrow.parquet as pq

from mopdctl.bench.frame import Bar, Bench, Case, Spent, rival_environment, spent
from mopdctl.bench.gensft_rivals import data_designer, httpx_loop
from mopdctl.cli.output import note
from mopdctl.config.base import load_config
from mopdctl.config.gensft import GenConfig
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import read_json, write_json, write_jsonl
from mopdctl.gensft.seeds import read_seeds
from mopdctl.gensft.spec import prepare
from mopdctl.runs import Workspace

_CORES = 2
_NAME = "bench"
_MODEL = "fake-chat"
_NOBODY_URL = "http://127.0.0.1:1/v1"
_PROMPT_WORDS = 12
_WORDS = (
    "river market garden engine teacher window letter harbour winter bridge village doctor mountain kitchen library "
    "morning forest journey painter station island farmer castle machine orchard lantern sailor compass meadow baker "
    "quiet bright careful ancient narrow gentle hollow patient distant wooden golden hidden silver simple early late "
    "explain describe compare imagine remember follow measure repair carry gather"
)
"""What prompts are made of: nothing that the fake model answers with anything but prose."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of the cases."""

    loop_rows: int = 20_000
    designer_rows: int = 5_000
    few_rows: int = 2_000
    many_rows: int = 100_000


def bench(sizes: Sizes | None = None, *, cache: Path | None = None) -> Bench:
    """The cases of `python -m mopdctl.bench gensft`."""
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("the gensft bench holds every process to two cores, which Linux can; run it there")
    sizes = sizes or Sizes()
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mopdctl-bench"
    loop = rival_environment("httpx", ["httpx==0.28.*", "sniffio"], report_versions=["httpx"], share_ours=False)
    designer = rival_environment(
        "data-designer", ["data-designer==0.9.*", "sniffio"], report_versions=["data-designer"], share_ours=False
    )
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir=cache, prefix="gensft-")))
        note("writing prompts")
        for rows in {sizes.loop_rows, sizes.designer_rows, sizes.few_rows, sizes.many_rows}:
            write_prompts(folder, rows)
        sides = {
            "ours": OURS,
            "loop": loop_side(loop.program("python")),
            "designer": designer_side(designer.program("python")),
        }
        return Bench(cases(sizes, Runs(folder, sides)), loop.versions | designer.versions, held.pop_all())


def cases(sizes: Sizes, runs: "Runs") -> list[Case]:
    """Time before memory, which is that of the runs that were timed."""

    def timed(side: str, rows: int) -> Callable[[], float]:
        counts = chain([sizes.few_rows], repeat(rows))  # the first run is the one that is not measured

        def s_per_1000() -> float:
            count = next(counts)
            return runs.run(side, count).wall_s / count * 1000

        return s_per_1000

    def peak(side: str, rows: int) -> Callable[[], float]:
        return lambda: runs.known(side, rows).peak_bytes / 2**20

    def growth(side: str) -> Callable[[], float]:
        return lambda: runs.known(side, sizes.many_rows).peak_bytes / runs.known(side, sizes.few_rows).peak_bytes

    beside = [
        ("loop", "bare asyncio + httpx loop", sizes.loop_rows, Bar(ratio_at_least=0.7), 3),
        ("designer", "NeMo Data Designer", sizes.designer_rows, Bar(ratio_at_least=2), 1),
    ]
    return [
        *(
            Case(
                name=f"{rows:,} rows, {httpx_loop.CONCURRENCY} concurrent | {name}",
                unit="s per 1,000",
                ours=timed("ours", rows),
                rival=timed(rival, rows),
                bar=bar,
                max_runs=max_runs,
            )
            for rival, name, rows, bar, max_runs in beside
        ),
        *(
            Case(
                name=f"peak memory, {rows:,} rows | {name}",
                unit="MiB",
                ours=peak("ours", rows),
                rival=peak(rival, rows),
                bar=None,
                max_runs=1,
            )
            for rival, name, rows, _, _ in beside
        ),
        Case(
            name=f"peak memory at {sizes.many_rows:,} rows over that at {sizes.few_rows:,} | bare asyncio + httpx loop",
            unit="times",
            ours=growth("ours"),
            rival=growth("loop"),
            bar=Bar(ours_at_most=1.25),
            max_runs=1,
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------- sides


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one side: what it is to read, whom to ask, where to write."""

    seeds: Path
    bodies: Path
    rows: int
    url: str
    folder: Path
    """Its own, empty; deleted afterwards."""


@dataclass(frozen=True, slots=True)
class Side:
    """How one side does a job, and how many rows it has left in the job's folder."""

    command: Callable[[Job], list[str]]
    rows_made: Callable[[Path], int]


def our_command(job: Job) -> list[str]:
    """`mopdctl gen-sft` in a fresh workspace; writes its two files."""
    config = write_config(job.folder, seeds=job.seeds, url=job.url)
    workspace = str(job.folder / "workspace")
    return [sys.executable, "-m", "mopdctl", "gen-sft", "--config", str(config), "--workspace", workspace, "--json"]


def our_rows(folder: Path) -> int:
    """Rows of both splits. No prompt or answer is like another, so that none is dropped."""
    manifest = read_json(Workspace(folder / "workspace").dataset(_NAME) / "manifest.json")
    return sum(manifest["rows"].values())


OURS = Side(our_command, our_rows)


def loop_side(python: Path) -> Side:
    """The bare loop in its environment."""

    def command(job: Job) -> list[str]:
        return [str(python), "-P", httpx_loop.__file__, str(job.bodies), job.url, str(job.folder / "out.jsonl")]

    def rows_made(folder: Path) -> int:
        with (folder / "out.jsonl").open("rb") as file:
            return sum(1 for _ in file)

    return Side(command, rows_made)


def designer_side(python: Path) -> Side:
    """NeMo Data Designer in its environment."""

    def command(job: Job) -> list[str]:
        job_arguments = [str(job.seeds), job.url, _MODEL, str(job.rows), str(job.folder)]
        return [str(python), "-P", data_designer.__file__, *job_arguments]

    def rows_made(folder: Path) -> int:
        files = (folder / "artifacts").rglob("*.parquet")
        return sum(pq.ParquetFile(path).metadata.num_rows for path in files)

    return Side(command, rows_made)


# ----------------------------------------------------------------------------------------------------------------- runs


class Runs:
    """Runs sides, each time from nothing, and remembers what a side took last."""

    def __init__(self, folder: Path, sides: Mapping[str, Side]) -> None:
        """`folder` holds what `write_prompts` wrote."""
        self._folder, self._sides = folder, sides
        self._last: dict[tuple[str, int], Spent] = {}

    def run(self, side: str, rows: int) -> Spent:
        """One run. Raises MopdctlError if it does not end with all rows, each asked for once."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            with fake_server(folder / "stats.json") as url:
                seeds, bodies = prompt_files(self._folder, rows)
                command = self._sides[side].command(Job(seeds, bodies, rows, url, folder))
                found = spent(command, cores=_CORES)
            billed = read_json(folder / "stats.json")["billed"]
            made = self._sides[side].rows_made(folder)
        if (billed, made) != (rows, rows):
            raise MopdctlError(
                f"bench gensft: {side} was billed {billed:,} times and made {made:,} rows where {rows:,} were due"
            )
        self._last[side, rows] = found
        return found

    def known(self, side: str, rows: int) -> Spent:
        """What the last run took; runs it if there was none."""
        return self._last.get((side, rows)) or self.run(side, rows)


@contextmanager
def fake_server(stats: Path) -> Iterator[str]:
    """A server on the cores that the sides have, for as long as the context lasts; leaves its counts in `stats`."""
    command = [sys.executable, "-m", "mopdctl", "doctor", "serve-fake", "--port", "0", "--stats", str(stats)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            os.sched_setaffinity(process.pid, sorted(os.sched_getaffinity(0))[:_CORES])
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise MopdctlError(f"`{' '.join(command)}` ended with {process.wait()}")
            yield url
        finally:
            process.terminate()


# ---------------------------------------------------------------------------------------------------------------- files


def prompts(rows: int) -> Iterator[str]:
    """Prompts, all different; a longer list begins with the shorter one."""
    draw, words = random.Random(0), _WORDS.split()
    for number in range(rows):
        yield f"{' '.join(draw.choices(words, k=_PROMPT_WORDS)).capitalize()}, number {number}."


def prompt_files(folder: Path, rows: int) -> tuple[Path, Path]:
    """Where the prompts stand as seeds, and as the request bodies that gen-sft makes of them."""
    return folder / f"seeds-{rows}.jsonl", folder / f"bodies-{rows}.jsonl"


def write_prompts(folder: Path, rows: int) -> None:
    """Writes both."""
    seeds, bodies = prompt_files(folder, rows)
    write_jsonl(seeds, ({"domain": "chat", "prompt": prompt} for prompt in prompts(rows)))
    config = write_config(folder, seeds=seeds, url=_NOBODY_URL)
    spec = prepare(load_config(GenConfig, config), Workspace(folder / "workspace"), base=folder)
    found = read_seeds(spec.config.seeds, base=folder, limit=None, quarantine=lambda entry: None)
    write_jsonl(bodies, (request.body for seed in found for _, (request,) in spec.router.chains(seed)))


def write_config(folder: Path, *, seeds: Path, url: str) -> Path:
    """Writes `committee.yaml` and `gen.yaml` with all defaults but what the sides must share; returns the latter."""
    sampling = {"temperature": data_designer.TEMPERATURE, "max_tokens": data_designer.MAX_TOKENS}
    member = {
        "engine": "openai",
        "model": _MODEL,
        "base_url": url,
        "sampling": sampling,
        "max_concurrency": httpx_loop.CONCURRENCY,
    }
    write_json(
        folder / "committee.yaml", {"members": {"model": member}, "routes": {"default": {"members": {"model": 1}}}}
    )
    config = {"name": _NAME, "committee": "committee.yaml", "seeds": [{"path": str(seeds)}]}
    write_json(folder / "gen.yaml", config)
    return folder / "gen.yaml"
