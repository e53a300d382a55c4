"""Runs stages side by side, each in a process of one thread on a core of its own, the longest chains first.

A stage that is done leaves a mark with what decided it, so that a killed experiment goes on; a stage that was killed
goes on from its own last state.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import fingerprint, read_json, write_json
from mopdctl.runs import Workspace
from mopdctl.world.family.stages import Stage
from mopdctl.world.workers import begin_worker

Key = tuple[int, str]
"""Seed and name of a stage."""


@dataclass(slots=True)
class Outcome:
    """What became of the stages."""

    failed: dict[Key, str] = field(default_factory=dict)
    """Why, in one line."""
    pending: list[Key] = field(default_factory=list)
    """Stages that were not begun or not ended: time was up, or one that they need failed."""


def mark_path(workspace: Workspace, name: str) -> Path:
    """Where a stage that is done says so."""
    return workspace.root / "family" / "stages" / f"{name.replace(' ', '.')}.json"


def is_done(workspace: Workspace, stage: Stage) -> bool:
    """Whether the stage has been done. Raises InputError if another one of its name was."""
    path = mark_path(workspace, stage.name)
    if not path.exists():
        return False
    if read_json(path)["fingerprint"] != fingerprint(stage.document):
        raise InputError(
            f"{path}: {stage.name!r} was made at another scale or with other settings; use a new workspace"
        )
    return True


def run_marked(workspace: Workspace, stage: Stage) -> float:
    """Runs a stage, then marks it; returns the seconds it took."""
    began = time.monotonic()
    stage.run()
    seconds = time.monotonic() - began
    document = {"stage": stage.name, "fingerprint": fingerprint(stage.document), "seconds": round(seconds, 1)}
    write_json(mark_path(workspace, stage.name), document)
    return seconds


def priorities(stages: Mapping[Key, Stage]) -> dict[Key, float]:
    """Seconds from the beginning of a stage to the end of the longest chain that it begins."""
    after: dict[Key, list[Key]] = {}
    for (seed, name), stage in stages.items():
        for needed in stage.needs:
            after.setdefault((seed, needed), []).append((seed, name))
    found: dict[Key, float] = {}

    def look(key: Key) -> float:
        if key not in found:
            found[key] = stages[key].cost_s + max((look(later) for later in after.get(key, ())), default=0.0)
        return found[key]

    for key in stages:
        look(key)
    return found


def run_all(
    stages: Mapping[Key, Stage],
    done: Iterable[Key],
    submit: Callable[[Key], "Future[float]"],
    *,
    workers: int,
    deadline: float,
    on_done: Callable[[Key, float | None], None],
) -> Outcome:
    """Runs every stage once those that it needs are done, until time is up; see `run_stages` for who does the work.

    A stage that fails stops those that need it, and no other.
    """
    finished, outcome, order = set(done), Outcome(), priorities(stages)
    waiting = sorted((key for key in stages if key not in finished), key=lambda key: (-order[key], key))
    running: dict[Future[float], Key] = {}
    while time.monotonic() < deadline:
        ready = [key for key in waiting if all((key[0], needed) in finished for needed in stages[key].needs)]
        for key in ready[: workers - len(running)]:
            waiting.remove(key)
            running[submit(key)] = key
        if not running:
            break
        ended, _ = wait(running, timeout=min(60.0, max(0.0, deadline - time.monotonic())), return_when=FIRST_COMPLETED)
        for future in ended:
            key = running.pop(future)
            error = future.exception()
            if error is None:
                finished.add(key)
                on_done(key, future.result())
            else:
                outcome.failed[key] = f"{type(error).__name__}: {error}"
                on_done(key, None)
    outcome.pending = sorted([*waiting, *running.values()])
    return outcome


def run_stages(
    stages: Mapping[Key, Stage],
    done: Iterable[Key],
    work: Callable[..., float],
    given: Sequence[Any],
    *,
    workers: int,
    deadline: float,
    on_done: Callable[[Key, float | None], None],
) -> Outcome:
    """Runs stages in processes: `work(*given, seed, name)` in each. What still runs when time is up is killed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # models of half a million parameters, and results that hang on no device
    context = multiprocessing.get_context("spawn")
    number = context.Value("i", 0)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(os.getpid(), number)) as pool:
        try:
            return run_all(
                stages,
                done,
                lambda key: pool.submit(work, *given, *key),
                workers=workers,
                deadline=deadline,
                on_done=on_done,
            )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()


def _begin(parent: int, number: "Synchronized[int]") -> None:
    """Begins a worker on a core of its own."""
    with number.get_lock():
        mine = number.value
        number.value += 1
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[mine % len(cores)]})  # its verifiers too: they start one process per core
    begin_worker(parent)
