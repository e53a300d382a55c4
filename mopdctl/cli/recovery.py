"""`mopdctl recovery`."""

import math
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from mopdctl.cli.output import result, result_json
from mopdctl.errors import CheckFailedError, InputError


def recovery(
    before: Annotated[
        str | None, typer.Option("--before", help="Evaluation of the student before distillation, or its column.")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", help="Evaluation of the student after distillation, or its column.")
    ] = None,
    teachers: Annotated[
        Path | None, typer.Option("--teachers", help="A teachers.yaml to use instead of the card of AFTER.")
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option("--control", help="Evaluation, or column, of another way to the same end; may be repeated."),
    ] = None,
    quantized: Annotated[
        list[str] | None,
        typer.Option("--quantized", help="Evaluation, or column, of AFTER quantized: its retention; may be repeated."),
    ] = None,
    scores: Annotated[
        Path | None, typer.Option("--scores", help="Compute the table from this CSV file instead of evaluations.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option("--teacher", help="With --scores: column of the teachers' scores.  [default: teacher]")
    ] = None,
    direction: Annotated[
        Literal["higher", "lower"] | None,
        typer.Option("--direction", help="With --scores: which scores are better.  [default: higher]"),
    ] = None,
    min_gap: Annotated[
        float, typer.Option("--min-gap", help="A row with a gap under this many points is low_gap, without recovery.")
    ] = 1.0,
    min_recovery: Annotated[
        float | None,
        typer.Option("--min-recovery", help="Exit with 3 if the pooled recovery, as printed, is below this percent."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the bootstrap.")] = 0,
    resamples: Annotated[int, typer.Option("--resamples", min=100, help="Number of bootstrap resamples.")] = 10_000,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print the table as Markdown.")] = False,
) -> None:
    """Show what each teacher passed on: (after - before) / (teacher - before), per benchmark and pooled.

    \b
    From evaluations in the workspace, with the merged weights as a control:
      mopdctl recovery --before rlvr --after mopd2 --control merge
    And what the quantized checkpoint kept of it, with paired tests:
      mopdctl recovery --before rlvr --after mopd2 --quantized mopd2-nvfp4
    From a published table; ends with exit code 3 under 50 percent:
      mopdctl recovery --scores table5.csv --before rlvr --after mopd2 --min-recovery 50

    Only rows with status ok have a percentage, which is never clipped, and count in the pooled figure. The others:
    missing, non_finite, mismatch (not the same task, shots, prompt or documents), partial (some documents shared),
    teacher_not_better, low_gap. Intervals are paired bootstrap intervals over documents (95 %). If `mopdctl overlap`
    looked at BEFORE, the student's pass@k and the advice of that time stand below the table.

    Retention is quantized / after, on every benchmark of AFTER. Its statuses are missing, non_finite, mismatch, partial
    and no_ratio (a score of 0 or less). It counts in no recovery figure.
    """
    from mopdctl.evals import report
    from mopdctl.evals.recovery import recover

    if as_json and as_markdown:
        raise InputError("--json and --md: choose one")
    if not (math.isfinite(min_gap) and min_gap >= 0 and math.isfinite(min_recovery or 0)):
        raise InputError("--min-gap needs a number of 0 or more, --min-recovery a finite number")
    controls, kept = list(dict.fromkeys(control or [])), list(dict.fromkeys(quantized or []))
    seen: dict[str, dict[str, Any]] = {}
    if scores:
        if teachers:
            raise InputError("--teachers: is for evaluations; with --scores name the column with --teacher")
        from mopdctl.evals.csvtable import read_table

        entries = read_table(
            scores,
            before=before or "before",
            after=after or "after",
            teacher=teacher or "teacher",
            controls=[*controls, *kept],
            higher_is_better=direction != "lower",
        )
        if kept:
            from mopdctl.evals.retention import take_quantized

            entries, pairs = take_quantized(entries, kept)
        notes = ["no intervals, because a scores file has no per-sample values"]
    else:
        if teacher or direction:
            raise InputError("--teacher and --direction: are for --scores FILE; evaluations know both")
        if not before or not after:
            raise InputError("--before and --after: name two evaluations, or pass --scores FILE")
        from mopdctl.evals.foresight import foresight, lines
        from mopdctl.evals.pairing import pair_evaluations
        from mopdctl.runs import Workspace

        place = Workspace(workspace)
        entries, notes = pair_evaluations(place, before=before, after=after, teachers=teachers, controls=controls)
        seen = foresight(place, before, {entry.teacher_id for entry in entries if entry.teacher_id})
        notes = [*notes, *lines(seen, before)]
        if kept:
            from mopdctl.evals.pairing import pair_quantized

            pairs = pair_quantized(place, full=after, quantized=kept, claimed=[entry.benchmark for entry in entries])
    table = recover(entries, min_gap=Decimal(str(min_gap)), control_names=controls, notes=notes)
    if any(entry.before.samples and entry.after.samples for entry in entries):
        from mopdctl.evals.bootstrap import add_intervals

        table = add_intervals(table, entries, seed=seed, resamples=resamples)
    document = report.to_json(table) | {"before_training": seen, "retention": None}
    shown = [report.to_markdown(table) if as_markdown else report.to_text(table)]
    if kept:
        from mopdctl.evals import retention_report
        from mopdctl.evals.retention import retain

        retained = retain(pairs, full=after or "after", seed=seed, resamples=resamples)
        document["retention"] = retention_report.to_json(retained)
        shown.append(retention_report.to_markdown(retained) if as_markdown else retention_report.to_text(retained))
    if as_json:
        result_json(document)
    else:
        result("\n\n".join(shown))
    pooled = table.pooled.recovery_pct
    if min_recovery is not None and (pooled is None or pooled < Decimal(str(min_recovery))):
        what = "no pooled recovery, because no row is ok" if pooled is None else f"pooled recovery is {pooled} %"
        raise CheckFailedError(f"{what}; --min-recovery asks for {min_recovery:g} %")
