"""Runs the stages of the quickstart side by side, each in one thread.

One thread a stage makes results the same on any number of cores, and two stages side by side use two cores better than
one stage in two threads does: these models are small.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from mopdctl.runs import Workspace
from mopdctl.train.runtime import prepare_runtime, settle_libraries
from mopdctl.world.recipe import Recipe
from mopdctl.world.story import Stage, build_stages

MAX_WORKERS = 4


def run_stages(
    workspace: Workspace,
    recipe: Recipe,
    stages: Sequence[Stage],
    *,
    on_start: Callable[[Stage], None],
    on_done: Callable[[Stage, float], None],
) -> None:
    """Runs every stage once those that it needs are done. The first error stops what has not begun and is raised."""
    os.environ["OMP_NUM_THREADS"] = "1"
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    waiting = list(stages)
    done: set[str] = set()
    running: dict[Future[float], Stage] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker, initargs=(os.getpid(),)) as pool:
        try:
            while waiting or running:
                ready = [stage for stage in waiting if done.issuperset(stage.needs)]
                for stage in ready[: workers - len(running)]:
                    waiting.remove(stage)
                    on_start(stage)
                    running[pool.submit(_run, str(workspace.root), recipe.model_dump_json(), stage.name)] = stage
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    stage = running.pop(future)
                    on_done(stage, future.result())
                    done.add(stage.name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def begin_worker(parent: int) -> None:
    """Makes a worker quiet, single-threaded, and gone soon after the process that it works for."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    os.dup2(2, 1)  # stdout belongs to the result of the command
    prepare_runtime()
    import torch

    torch.set_num_threads(1)
    settle_libraries()


def _run(root: str, recipe: str, name: str) -> float:
    """Runs one stage by its name; returns the seconds it took."""
    began = time.monotonic()
    stages = build_stages(Workspace(Path(root)), Recipe.model_validate_json(recipe))
    (stage,) = [s for s in stages if s.name == name]
    stage.run(lambda step, metrics: None)
    return time.monotonic() - began
