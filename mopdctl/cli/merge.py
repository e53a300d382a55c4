"""`mopdctl merge`."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, WorkspaceOption
from mopdctl.cli.output import Progress, note, show, stdout_reserved
from mopdctl.train.runtime import prepare_runtime, settle_libraries


def merge(
    teachers: Annotated[Path, typer.Option("--teachers", help="The teachers.yaml: student and teachers.")],
    name: Annotated[str, typer.Option("--name", help="Name of the checkpoint to make.")],
    method: Annotated[
        Literal["task-arithmetic", "linear", "ties"],
        typer.Option("--method", help="Sum of deltas, weighted mean, or mean of the deltas that agree in sign."),
    ] = "task-arithmetic",
    scale: Annotated[
        float | None, typer.Option("--scale", help="What every delta is multiplied with: 0.3; with ties 1.")
    ] = None,
    scales: Annotated[
        str | None, typer.Option("--scales", help="Own scales of some teachers (linear: weights): math=0.3,code=0.2")
    ] = None,
    density: Annotated[
        float | None, typer.Option("--density", help="TIES: share of each tensor's deltas that is kept: 0.2.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Choose the scales on held-out prompts (train.eval_prompts).")
    ] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Merge the weights of the teachers: the control that distillation has to beat.

    \b
    Student plus 0.3 times the sum of what each teacher changed:
      mopdctl merge --teachers teachers.yaml --scale 0.3 --name merge
    TIES, with half the weight on what the math teacher changed:
      mopdctl merge --teachers teachers.yaml --method ties --scales math=0.5 --name merge-ties
    The best scale of each teacher on held-out prompts, as the strongest control:
      mopdctl merge --teachers teachers.yaml --search --name merge-best

    The search scores at most 7 + 4 N merges of N teachers (linear: 1 + 4 N), each by greedy answers to the first
    train.eval_size held-out prompts of every teacher: a common scale first, then one pass over the teachers.
    """
    from mopdctl.config.base import parse
    from mopdctl.config.merge import MergeConfig
    from mopdctl.config.teachers import load_teachers
    from mopdctl.errors import InputError
    from mopdctl.runs import Workspace, read_card

    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise InputError(f"--scale {scale}: must be a finite number above 0")
    given = {"scale": scale, "scales": _scales(scales) if scales is not None else None, "density": density}
    flags = {"method": method, "search": search} | {key: value for key, value in given.items() if value is not None}
    how = parse(MergeConfig, flags, source="merge")
    config = load_teachers(teachers)
    place = Workspace(workspace)
    place.checkpoint(name)
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.distill.merging.run import merge_teachers, plan_merge

        settle_libraries()
        if dry_run:
            document = plan_merge(config, how, place, base=teachers.parent, name=name)
        else:
            progress: Progress | None = None

            def on_candidate(done: int, most: int, candidate: Any) -> None:
                nonlocal progress
                progress = progress or Progress(name, most, done=done - 1)
                progress.update(done, f"score {candidate.mean:.1f}")

            target = merge_teachers(config, how, place, base=teachers.parent, name=name, on_candidate=on_candidate)
            card = read_card(target)
            settings = {key: card["config"][key] for key in ("method", "density") if key in card["config"]}
            chosen = {key: card[key] for key in ("scales", "search") if key in card}
            document = {"name": name, "checkpoint": str(target)} | settings | chosen
            for alias in (alias for alias, scale in chosen.get("scales", {}).items() if search and not scale):
                note(
                    f"teacher {alias!r} is left out: no scale above 0 that was tried made the mean score higher, on "
                    f"{config.train.eval_size} held-out prompts a teacher (train.eval_size)"
                )
    show(document if as_json else _readable(document), as_json=as_json)


def _scales(text: str) -> dict[str, float]:
    """Alias to scale of `math=0.3,code=0.2`. Raises InputError for anything else."""
    from mopdctl.errors import InputError

    found: dict[str, float] = {}
    for part in text.split(","):
        alias, _, value = (word.strip() for word in part.rpartition("="))
        try:
            scale = float(value)
        except ValueError:
            scale = math.nan
        if not alias or alias in found or not (math.isfinite(scale) and scale >= 0):
            raise InputError(
                f"--scales {text!r}: at {part.strip()!r}; write ALIAS=SCALE, each alias once and no scale below 0, "
                "e.g. math=0.3,code=0.2"
            )
        found[alias] = scale
    return found


def _readable(document: dict[str, Any]) -> dict[str, Any]:
    """The document with a line for each candidate of the search."""
    if "search" not in document:
        return document
    lines = {
        " ".join(f"{alias}={scale:g}" for alias, scale in one["scales"].items()): f"{one['score']:.1f} ("
        + ", ".join(f"{alias} {score:.1f}" for alias, score in one["scores"].items())
        + ")"
        for one in document["search"]["candidates"]
    }
    return document | {"search": {"score": f"{document['search']['score']:.1f}", "candidates": lines}}
