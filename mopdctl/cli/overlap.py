"""`mopdctl overlap`."""

from pathlib import Path
from typing import Annotated

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, SetOption, WorkspaceOption
from mopdctl.cli.output import Progress, note, result, result_json, show, stdout_reserved
from mopdctl.train.runtime import prepare_runtime, settle_libraries


def overlap(
    teachers: Annotated[Path, typer.Option("--teachers", help="The teachers.yaml: student, prompts, teachers, train.")],
    student: Annotated[
        str | None, typer.Option("--student", help="Checkpoint that answers.  [default: that of the file]")
    ] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="JSONL or Parquet file of prompts.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the report.  [default: the student's]")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers per prompt.")] = 4,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Prompts per teacher.")] = 64,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Tokens that count as a model's support.")] = 16,
    candidates: Annotated[
        str | None,
        typer.Option("--candidates", help="Models to rank as teachers of a domain: alias=model,... or a YAML file."),
    ] = None,
    domain: Annotated[str | None, typer.Option("--domain", help="The domain that --candidates are for.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG file to draw the report into.")] = None,
    settings: SetOption = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Measure how far the student's own answers lie inside each teacher's support, and advise how to begin.

    \b
    Before a run, with a picture:
      mopdctl overlap --student rlvr --teachers teachers.yaml --plot overlap.svg
    Which of two models should teach a domain, beside the teacher that it has:
      mopdctl overlap --teachers teachers.yaml --domain math --candidates large=math-32b,small=math-8b

    The advice is `exact` (the whole distribution) inside a teacher's support, `sampled` (the sampled token) at its edge
    and `warm-up first` outside. Answers are kept in the rollout store overlap-NAME and are not sampled again, also for
    other teachers; the report is runs/overlap/NAME.json.
    """
    from mopdctl.config.overrides import load_with_overrides
    from mopdctl.config.teachers import TeachersFile
    from mopdctl.errors import InputError
    from mopdctl.runs import Workspace

    if plot and plot.suffix.lower() != ".svg":
        raise InputError(f"--plot {plot}: only SVG is drawn; give a name that ends in .svg")
    flags = {"student": student, "prompts": str(prompts.resolve()) if prompts else None}
    config = load_with_overrides(TeachersFile, teachers, flags, settings or [])
    place = Workspace(workspace)
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.distill.overlap.plan import OverlapSpec
        from mopdctl.distill.overlap.run import plan_overlap, run_overlap

        settle_libraries()
        spec = OverlapSpec(
            config,
            teachers.parent,
            name=name,
            samples=samples,
            limit=limit,
            top_k=top_k,
            candidates=candidates,
            domain=domain,
        )
        document = plan_overlap(spec, place)
        if not dry_run:
            progress: Progress | None = None

            def on_progress(done: int, total: int) -> None:
                nonlocal progress
                progress = progress or Progress("answers", total)
                progress.update(done)

            document = run_overlap(spec, place, on_progress=on_progress, on_note=note)
            if plot:
                from mopdctl.distill.overlap.plot import to_svg
                from mopdctl.files import write_text

                write_text(plot, to_svg(document))
    if dry_run:
        show(document, as_json=as_json)
    elif as_json:
        result_json(document)
    else:
        from mopdctl.distill.overlap.report import to_text

        result(to_text(document))
