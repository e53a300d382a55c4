"""What every bench shares: fair runs, one definition of `ratio`, bars, the rival's own environment, the report.

- A figure is a cost (seconds, bytes, seconds per 1000 tokens): less is better. A bench turns a rate into a cost.
- `ratio = rival / ours`, so above 1 we are cheaper, and 2 means that the rival costs twice as much.
- Both sides run once unmeasured, then in turn (ours, rival, ours, rival, ...), so that a slow minute of the computer
  falls on both. A figure is the median of its runs.
- A bar is a ceiling on `ours`, a floor under `ratio`, or both. A report holds if every bar does. A case without a bar
  is there to be seen, and holds.

The report is `{"rows": [{"case", "ours", "rival", "unit", "ratio", "bar", "holds"}], "machine", "versions"}`.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from mopdctl.cli.output import note
from mopdctl.errors import MopdctlError
from mopdctl.files import fingerprint, write_json
from mopdctl.runs import locked, package_versions

RUNS = 7
"""Measured runs per side; odd, so that the median is a run that happened."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a case has to reach; at least one of the two."""

    ours_at_most: float | None = None
    """Ceiling on our cost, in the case's unit."""
    ratio_at_least: float | None = None
    """Floor under rival / ours."""

    def __post_init__(self) -> None:
        assert self.ours_at_most is not None or self.ratio_at_least is not None, "a bar that bars nothing"

    def holds(self, ours: float, ratio: float) -> bool:
        """Whether the figures reach the bar; touching it is enough."""
        below = self.ours_at_most is None or ours <= self.ours_at_most
        return below and (self.ratio_at_least is None or ratio >= self.ratio_at_least)

    def text(self, unit: str) -> str:
        """The bar in words, e.g. `ours <= 0.5 s, ratio >= 1`."""
        parts = []
        if self.ours_at_most is not None:
            parts.append(f"ours <= {self.ours_at_most:g} {unit}")
        if self.ratio_at_least is not None:
            parts.append(f"ratio >= {self.ratio_at_least:g}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that both sides do. `ours` and `rival` each do it once and return what it cost."""

    name: str
    unit: str
    ours: Callable[[], float]
    rival: Callable[[], float]
    bar: Bar | None
    """None for a case that is only shown."""
    max_runs: int | None = None
    """Measures fewer runs than others: one takes long, or gives the same figure each time."""


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one case."""

    case: str
    ours: float
    rival: float
    unit: str
    ratio: float
    bar: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Bench:
    """The cases of one bench and the package versions that the rival ran with."""

    cases: Sequence[Case]
    rival_versions: dict[str, str]
    held: ExitStack = field(default_factory=ExitStack)
    """What the cases need until the last of them is measured: files, processes."""


def measure(case: Case, *, runs: int = RUNS) -> Row:
    """Runs a case and returns its row. Raises MopdctlError for a cost that is not above 0: nothing was measured."""
    ours, rival = [], []
    runs = min(runs, case.max_runs or runs)
    for number in range(-1, runs):
        pair = (case.ours(), case.rival())
        if min(pair) <= 0:
            raise MopdctlError(
                f"bench case {case.name!r}: measured {pair[0]:g} and {pair[1]:g} {case.unit}, not a cost"
            )
        if number >= 0:
            ours.append(pair[0])
            rival.append(pair[1])
            note(
                f"{case.name}: run {number + 1}/{runs}: ours {pair[0]:.4g} {case.unit}, rival {pair[1]:.4g} {case.unit}"
            )
    cost, rival_cost = median(ours), median(rival)
    ratio = rival_cost / cost
    bar, holds = ("none", True) if case.bar is None else (case.bar.text(case.unit), case.bar.holds(cost, ratio))
    return Row(case.name, cost, rival_cost, case.unit, ratio, bar, holds)


def report(bench: Bench, *, runs: int = RUNS) -> dict[str, Any]:
    """Measures every case, lets go of what the bench holds, and returns the report."""
    with bench.held:
        rows = [asdict(measure(case, runs=runs)) for case in bench.cases]
    return {
        "rows": rows,
        "machine": machine(),
        "versions": {"ours": package_versions(), "rival": bench.rival_versions},
    }


def all_hold(document: dict[str, Any]) -> bool:
    """Whether every row of a report reaches its bar."""
    return all(row["holds"] for row in document["rows"])


def table(document: dict[str, Any]) -> str:
    """A report as a plain table."""
    head = ("case", "ours", "rival", "unit", "ratio", "bar", "holds")
    lines = [head] + [
        (
            row["case"],
            f"{row['ours']:.3g}",
            f"{row['rival']:.3g}",
            row["unit"],
            f"{row['ratio']:.2f}",
            row["bar"],
            "yes" if row["holds"] else "NO",
        )
        for row in document["rows"]
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    rival = ", ".join(f"{name} {found}" for name, found in document["versions"]["rival"].items())
    where = f"{document['machine']['cpu']}, {document['machine']['cores']} cores; rival: {rival}"
    return f"{text}\n\nratio = rival / ours: above 1 we are cheaper\n{where}"


def machine() -> dict[str, Any]:
    """The computer that the figures belong to."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().split("\n") if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_bytes": memory_bytes, "system": platform.platform()}


def cpu_seconds(command: Sequence[str | Path], *, cwd: Path | None = None) -> float:
    """CPU seconds, user and system, that a command takes with the children it waited for; its output is discarded.

    CPU time and not wall time: it does not grow while another program holds the processor.
    Raises MopdctlError if the command fails.
    """
    with subprocess.Popen(
        [str(part) for part in command], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        problem = process.stderr.read().decode(errors="replace").strip()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        last = problem.split("\n")[-1] if problem else "no message"
        raise MopdctlError(f"`{' '.join(map(str, command))}` ended with {process.returncode}: {last}")
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True, slots=True)
class Spent:
    """What a command took."""

    wall_s: float
    peak_bytes: int
    """Resident memory at its highest, mapped files included."""


_STARTER = """
import json, os, resource, subprocess, sys, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
start = time.perf_counter()
status = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL).returncode
wall_s = time.perf_counter() - start
peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"wall_s": wall_s, "peak_bytes": peak_bytes}))
sys.exit(status)
"""


def spent(command: Sequence[str | Path], *, cores: int) -> Spent:
    """Wall seconds and peak memory of a command that may use so many cores (Linux); its output is discarded.

    A small process starts it: Linux counts the memory of whoever starts a process into that process's peak.
    Raises MopdctlError if the command fails.
    """
    return Spent(**json.loads(_run([sys.executable, "-S", "-c", _STARTER, str(cores), *command], shown=command)))


@dataclass(frozen=True, slots=True)
class Environment:
    """A rival's own virtual environment."""

    folder: Path
    versions: dict[str, str]

    def program(self, name: str) -> Path:
        """A program of the environment, e.g. `trl` or `python`."""
        return self.folder / "bin" / name


def rival_environment(
    name: str, pins: Sequence[str], *, report_versions: Sequence[str], share_ours: bool, cache: Path | None = None
) -> Environment:
    """The environment with `pins` installed, made on first use and reused while pins and Python stay the same.

    With `share_ours` it sees our packages too, and pip adds only what they do not satisfy: both sides then stand on the
    same torch and transformers. `report_versions` are the packages whose versions go into the report. An environment
    that was cut short lacks its `complete.json` and is made again. Raises MopdctlError if pip fails.
    """
    ours = sysconfig.get_path("purelib") if share_ours else None
    key = fingerprint([list(pins), platform.python_version(), ours])
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mopdctl-bench"
    folder = cache / f"{name}-{key}"
    complete = folder / "complete.json"
    with locked(cache):
        if not complete.is_file():
            note(f"making the rival's environment {folder}: {' '.join(pins)}")
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", folder])
            if ours is not None:
                (link,) = folder.glob("lib/python*/site-packages")
                (link / "mopdctl_bench_shared.pth").write_text(ours + "\n")
            _run([folder / "bin" / "python", "-m", "pip", "install", "-q", *pins])
            write_json(complete, {"pins": list(pins)})
    asked = "import json, sys; from importlib.metadata import version; "
    asked += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    return Environment(folder, json.loads(_run([folder / "bin" / "python", "-c", asked, *report_versions])))


def _run(command: Sequence[str | Path], *, shown: Sequence[str | Path] | None = None) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no message").split("\n")[-1]
        raise MopdctlError(f"`{' '.join(map(str, shown or command))}` ended with {done.returncode}: {last}")
    return done.stdout
