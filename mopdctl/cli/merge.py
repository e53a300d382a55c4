"""`mopdctl merge`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, WorkspaceOption
from mopdctl.cli.output import show, stdout_reserved
from mopdctl.train.runtime import prepare_runtime, quiet_libraries


def merge(
    teachers: Annotated[Path, typer.Option("--teachers", help="The teachers.yaml: student and teachers.")],
    name: Annotated[str, typer.Option("--name", help="Name of the checkpoint to make.")],
    scale: Annotated[float, typer.Option("--scale", help="What the sum of teacher deltas is multiplied with.")] = 0.3,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Merge the weights of the teachers by task arithmetic: the control that distillation has to beat.

    \b
    Student plus 0.3 times the sum of what each teacher changed:
      mopdctl merge --teachers teachers.yaml --scale 0.3 --name merge
    A weaker merge, as a place to look for the best scale:
      mopdctl merge --teachers teachers.yaml --scale 0.1 --name merge-01
    """
    from mopdctl.config.teachers import load_teachers
    from mopdctl.errors import InputError
    from mopdctl.runs import Workspace

    if not (math.isfinite(scale) and scale > 0):
        raise InputError(f"--scale {scale}: must be above 0")
    config = load_teachers(teachers)
    place = Workspace(workspace)
    document = {"name": name, "checkpoint": str(place.checkpoint(name)), "scale": scale}
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.distill.merge import run_merge

        quiet_libraries()
        for model in (config.student, *(t.model for t in config.teachers.values())):
            place.resolve_model(model, relative_to=teachers.parent)
        if not dry_run:
            run_merge(config, place, base=teachers.parent, scale=scale, name=name)
    show(document, as_json=as_json)
