"""Which objective, which start, which balance: one factor at a time, beside the controls, and the advice put to test.

    python -m mopdctl.world.family --workspace DIR --seeds 0,1,2 --workers 16 --minutes 9 > out.json
    python -m mopdctl.world.family --md out.json
    python -m mopdctl.world.family --fit out.json --fit-seeds 3,4

All arms run in one setting (`plan.ARMS`), the three that `mopdctl overlap` chooses between in every setting. The
same command goes on where an earlier one was killed or ran out of time; the document then says what is still pending.
"""

import argparse
import sys
import time
from functools import lru_cache
from pathlib import Path

from mopdctl.errors import InputError
from mopdctl.files import dump_json, read_json
from mopdctl.runs import Workspace
from mopdctl.world.family.document import SCHEMA, collect, to_document
from mopdctl.world.family.fit import fit
from mopdctl.world.family.plan import ARMS, SETTINGS, Scale, full_scale, quick_scale
from mopdctl.world.family.pool import Key, is_done, mark_path, run_marked, run_stages
from mopdctl.world.family.stages import WORLD, Stage, build_stages
from mopdctl.world.family.text import to_markdown
from mopdctl.world.files import write_configs


def workspace_of(root: Path, seed: int) -> Workspace:
    """Each seed has a workspace of its own."""
    return Workspace(root / f"seed-{seed}")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code: 1 if a stage failed or is pending."""
    parser = argparse.ArgumentParser(description="Objectives, warm-up, balance and controls in the tiny world.")
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--workers", type=int, default=2, help="processes, each of one thread")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long and tell what is there")
    parser.add_argument("--quick", action="store_true", help="a few steps and prompts: does everything run?")
    parser.add_argument("--md", type=Path, help="render a document as Markdown")
    parser.add_argument("--fit", type=Path, nargs="+", help="search thresholds of the advice in documents")
    parser.add_argument("--fit-seeds", default="0", help="seeds to search on; the others judge")
    given = parser.parse_args(arguments)
    try:
        return _act(given, parser)
    except InputError as error:
        parser.exit(2, f"{error}\n")


def _act(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if given.md is not None:
        print(to_markdown(_read(given.md)))  # noqa: T201
        return 0
    if given.fit is not None:
        print(dump_json(fit([_read(path) for path in given.fit], _numbers(given.fit_seeds))))  # noqa: T201
        return 0
    if given.workspace is None:
        parser.error("--workspace is needed")
    settings, arms = (tuple(text.split(",")) for text in (given.settings, given.arms))
    if unknown := sorted(set(settings) - SETTINGS.keys()) + sorted(set(arms) - ARMS.keys()):
        parser.error(f"{unknown[0]!r}: settings are {', '.join(SETTINGS)}; arms are {', '.join(ARMS)}")
    deadline = time.monotonic() + 60 * given.minutes
    document = run(
        given.workspace,
        _numbers(given.seeds),
        settings,
        arms,
        quick=given.quick,
        workers=given.workers,
        deadline=deadline,
    )
    print(dump_json(document))  # noqa: T201
    return 1 if document["pending"] or document["failed"] else 0


def run(
    root: Path,
    seeds: list[int],
    settings: tuple[str, ...],
    arms: tuple[str, ...],
    *,
    quick: bool,
    workers: int,
    deadline: float = float("inf"),
) -> dict[str, object]:
    """Runs what is missing until `deadline` (on the monotonic clock) and returns the document of what is there."""
    scale = quick_scale() if quick else full_scale()
    stages: dict[Key, Stage] = {}
    done: list[Key] = []
    for seed in seeds:
        workspace = workspace_of(root, seed)
        if not mark_path(workspace, WORLD).exists():
            write_configs(workspace, scale.recipe, seed)
        for stage in build_stages(workspace, scale, seed, settings, arms):
            stages[seed, stage.name] = stage
            if is_done(workspace, stage):
                done.append((seed, stage.name))
    began, ended = time.monotonic(), len(done)

    def told(key: Key, seconds: float | None) -> None:
        nonlocal ended
        ended += seconds is not None
        took = "failed" if seconds is None else f"{seconds:.0f} s"
        line = f"{time.monotonic() - began:6.0f} s  {ended} of {len(stages)}  seed {key[0]}  {key[1]}  {took}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201

    outcome = run_stages(
        stages,
        done,
        work,
        (str(root), quick, settings, arms),
        workers=workers,
        deadline=deadline,
        on_done=told,
    )
    found = [collect(workspace_of(root, seed), scale, seed, settings, arms) for seed in seeds]
    return to_document(
        scale,
        found,
        settings,
        arms,
        pending=[f"seed {seed} {name}" for seed, name in outcome.pending],
        failed={f"seed {seed} {name}": why for (seed, name), why in outcome.failed.items()},
    )


def work(root: str, quick: bool, settings: tuple[str, ...], arms: tuple[str, ...], seed: int, name: str) -> float:
    """One stage, in a process of its own."""
    workspace = workspace_of(Path(root), seed)
    return run_marked(workspace, _stages(root, quick, settings, arms, seed)[name])


@lru_cache(maxsize=4)
def _stages(root: str, quick: bool, settings: tuple[str, ...], arms: tuple[str, ...], seed: int) -> dict[str, Stage]:
    scale: Scale = quick_scale() if quick else full_scale()
    found = build_stages(workspace_of(Path(root), seed), scale, seed, settings, arms)
    return {stage.name: stage for stage in found}


def _read(path: Path) -> dict[str, object]:
    document = dict(read_json(path))
    if document.get("schema") != SCHEMA:
        raise InputError(f"{path}: is not of schema {SCHEMA}; give what `python -m mopdctl.world.family` printed")
    return document


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
