"""`mopdctl distill`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, SetOption, WorkspaceOption
from mopdctl.cli.output import note, show, stdout_reserved
from mopdctl.cli.training import step_progress
from mopdctl.errors import MopdctlError
from mopdctl.train.runtime import prepare_runtime, settle_libraries

if TYPE_CHECKING:
    from mopdctl.config.teachers import TeachersFile
    from mopdctl.runs import Workspace


def distill(
    teachers: Annotated[Path, typer.Option("--teachers", help="The teachers.yaml: student, prompts, teachers, train.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the checkpoint to make.")] = None,
    student: Annotated[str | None, typer.Option("--student", help="Checkpoint to start from.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="JSONL or Parquet file of prompts.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, help="Prompts per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="Peak learning rate.")] = None,
    eval_every: Annotated[
        int | None, typer.Option("--eval-every", min=0, help="Steps between held-out scorings (train.eval_prompts).")
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option("--warmup", min=1, metavar="STEPS", help="Steps of SFT on the teachers' answers before MOPD."),
    ] = None,
    student_quant: Annotated[
        Literal["none", "nvfp4", "mxfp4"] | None,
        typer.Option("--student-quant", help="Train for FP4: the student runs on its quantized weights."),
    ] = None,
    controls: Annotated[
        bool,
        typer.Option("--controls", help="Also make what it has to beat, on the same budget: merges, SeqKD, RL, ..."),
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of data order and sampling.")] = None,
    settings: SetOption = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Merge teachers into a student: it writes, and the one teacher of each prompt's domain weighs every token.

    \b
    All that the run needs is in the file:
      mopdctl distill --teachers teachers.yaml
    A trial of three steps under another name:
      mopdctl distill --teachers teachers.yaml --steps 3 --batch-size 16 --name trial
    Twenty steps of SFT on the teachers' answers first, where `mopdctl overlap` advises a warm-up:
      mopdctl distill --teachers teachers.yaml --warmup 20
    With its controls, as NAME.merge, NAME.seqkd, NAME.only-TEACHER, NAME.rl and so on:
      mopdctl distill --teachers teachers.yaml --controls
    For serving in NVFP4 (quantize NAME with --method max afterwards):
      mopdctl distill --teachers teachers.yaml --student-quant nvfp4

    A run that was killed goes on where it was when the same command is given again: same prompts, same answers, same
    losses. On several GPUs: torchrun --nproc-per-node 8 -m mopdctl distill --teachers teachers.yaml
    """
    from mopdctl.config.overrides import load_with_overrides
    from mopdctl.config.teachers import TeachersFile
    from mopdctl.runs import Workspace

    flags = {
        "name": name,
        "student": student,
        "prompts": str(prompts.resolve()) if prompts else None,
        "train.steps": steps,
        "train.batch_size": batch_size,
        "train.learning_rate": learning_rate,
        "train.eval_every": eval_every,
        "train.warm_up.steps": warmup,
        "train.student_quant": student_quant,
        "train.seed": seed,
    }
    config = load_with_overrides(TeachersFile, teachers, flags, settings or [])
    place = Workspace(workspace)
    place.checkpoint(config.name)
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.distill.plan import plan_distill
        from mopdctl.distill.run import run_distill

        settle_libraries()
        document = plan_distill(config, place, base=teachers.parent, dry_run=dry_run)
        if not dry_run:
            target = run_distill(
                config,
                place,
                base=teachers.parent,
                on_step=step_progress(config.name, config.train.steps),
                on_note=note,
            )
            document["checkpoint"] = str(target)
        failed = False
        if controls:
            document["controls"], failed = _controls(config, place, teachers.parent, dry_run=dry_run)
    show(document, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _controls(config: "TeachersFile", place: "Workspace", base: Path, *, dry_run: bool) -> tuple[dict[str, str], bool]:
    """Makes each control; name to what it is, or why it could not be made, and whether one failed on the way."""
    from mopdctl.pipeline.controls import controls_of

    found, failed = {}, False
    for control in controls_of(config, place, base=base):
        found[control.name] = control.what if control.run else f"not made: {control.missing}"
        if control.run and not dry_run:
            note(f"control {control.name}: {control.what}")
            try:
                control.run(step_progress(control.name, config.train.steps))
            except MopdctlError as error:  # the others are worth having all the same
                note(f"control {control.name}: {error}")
                found[control.name], failed = f"failed: {error}", True
    return found, failed
