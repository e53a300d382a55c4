"""`mopdctl quickstart`."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, WorkspaceOption
from mopdctl.cli.output import note, result, result_json, stdout_reserved
from mopdctl.train.runtime import prepare_runtime


def quickstart(
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of data, order and sampling.")] = 0,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Live the whole story on tiny models, in minutes on a CPU: specialists, two rounds of MOPD, controls, the proof.

    \b
    In ./workspace:
      mopdctl quickstart
    With other data and another place:
      mopdctl quickstart --seed 1 --workspace /tmp/world-1

    Each stage prints the command that does the same. Killed, it goes on where it was when it is started again.
    """
    from mopdctl.runs import Workspace, locked, open_run
    from mopdctl.world.recipe import Recipe

    place, recipe, began = Workspace(workspace), Recipe(), time.monotonic()
    if dry_run:
        plan = _plan(place, recipe, seed)
        if as_json:
            result_json(plan)
        else:
            result("\n".join(f"# {stage['what']}\n$ {stage['command']}" for stage in plan["stages"]))
        return
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.world.story import AFTER, BEFORE, CONTROLS, QUANTIZED, Stage, build_stages, read_see_saw
        from mopdctl.world.workers import run_stages

        run = place.run("quickstart")
        with locked(run):
            open_run(run, {"seed": seed, "recipe": recipe.model_dump(mode="json")})
            _prepare(place, recipe, seed)
            stages = build_stages(place, recipe)
            numbers = {stage.name: f"[{i}/{len(stages)}]" for i, stage in enumerate(stages, start=1)}

            def on_start(stage: Stage) -> None:
                note(f"{numbers[stage.name]} {stage.what}\n    $ {stage.command}")

            def on_done(stage: Stage, seconds: float) -> None:
                note(f"{numbers[stage.name]} {stage.name}: done in {seconds:.0f} s")

            run_stages(place, recipe, stages, on_start=on_start, on_done=on_done)
        table = _table(place, BEFORE, AFTER, CONTROLS)
        kept = _retention(place, AFTER, QUANTIZED)
        scores = read_see_saw(place, recipe)
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        result_json(
            {
                "schema": "mopdctl.quickstart/1",
                "workspace": str(place.root),
                "seed": seed,
                "seconds": seconds,
                "recovery": table["json"],
                "retention": kept["json"],
                "scores": scores,
            }
        )
        return
    controls = " ".join(f"--control {name}" for name in CONTROLS)
    where = "" if place.root == DEFAULT_WORKSPACE else f" --workspace {place.root}"
    result("\n" + "\n".join(_scores(scores)))
    note(f"\n$ mopdctl recovery --before {BEFORE} --after {AFTER} {controls} --quantized {QUANTIZED}{where}")
    result("\n" + table["text"])
    result("\n" + kept["text"])
    note(f"\n{seconds:.0f} s")


def _prepare(place: Any, recipe: Any, seed: int) -> None:
    """Writes the world once; a marker says that all of it is there."""
    from mopdctl.errors import InputError
    from mopdctl.files import read_json, write_json
    from mopdctl.world.files import write_world

    marker = place.root / "configs" / ".complete.json"
    if not marker.exists():
        note(f"# the tiny world: base model, data and configurations in {place.root}")
        write_world(place, recipe, seed)
        write_json(marker, {"seed": seed})
    elif (found := read_json(marker).get("seed")) != seed:
        raise InputError(f"{place.root}: holds the world of seed {found}, not {seed}; give another --workspace")


def _plan(place: Any, recipe: Any, seed: int) -> dict[str, Any]:
    """The stages of a quickstart, from configurations that are written to a temporary folder only."""
    import tempfile

    from mopdctl.runs import Workspace
    from mopdctl.world.files import write_configs
    from mopdctl.world.story import build_stages

    where = "" if place.root == DEFAULT_WORKSPACE else f" --workspace {place.root}"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Workspace(Path(folder))

        def shown(command: str) -> str:
            return command.replace(f" --workspace {folder}", where).replace(folder, str(place.root))

        write_configs(scratch, recipe, seed)
        planned = [
            {"what": s.what, "command": shown(s.command), "steps": s.steps} for s in build_stages(scratch, recipe)
        ]
    return {"schema": "mopdctl.quickstart_plan/1", "workspace": str(place.root), "seed": seed, "stages": planned}


def _table(place: Any, before: str, after: str, controls: tuple[str, ...]) -> dict[str, Any]:
    from decimal import Decimal

    from mopdctl.evals import report
    from mopdctl.evals.bootstrap import add_intervals
    from mopdctl.evals.pairing import pair_evaluations
    from mopdctl.evals.recovery import recover

    entries, notes = pair_evaluations(place, before=before, after=after, teachers=None, controls=controls)
    table = recover(entries, min_gap=Decimal(1), control_names=controls, notes=notes)
    table = add_intervals(table, entries, seed=0, resamples=10_000)
    return {"json": report.to_json(table), "text": report.to_text(table)}


def _retention(place: Any, full: str, quantized: str) -> dict[str, Any]:
    """What the quantized checkpoint kept of the scores."""
    from mopdctl.evals import retention_report
    from mopdctl.evals.pairing import pair_quantized
    from mopdctl.evals.retention import retain

    retained = retain(pair_quantized(place, full=full, quantized=[quantized]), full=full)
    return {"json": retention_report.to_json(retained), "text": retention_report.to_text(retained)}


def _scores(scores: dict[str, dict[str, float | None]]) -> list[str]:
    """The see-saw: what each model scores in each domain."""
    domains = list(scores["student"])
    lines = ["scores (0-100)".ljust(18) + "".join(domain.rjust(14) for domain in domains)]
    for name, row in scores.items():
        cells = ("-" if row.get(d) is None else f"{row[d]:.1f}" for d in domains)
        lines.append(name.ljust(18) + "".join(cell.rjust(14) for cell in cells))
    return lines
