"""`mopdctl eval`."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, WorkspaceOption
from mopdctl.cli.output import Progress, note, result, result_json, show, stdout_reserved
from mopdctl.evals.run import DEFAULT_BATCH_SIZE

if TYPE_CHECKING:
    from mopdctl.evals.run import Limit
    from mopdctl.records import Score


def evaluate(
    name: Annotated[str, typer.Argument(help="Name of the evaluation, and of the model unless --model names another.")],
    tasks: Annotated[str, typer.Option("--tasks", help="lm-eval tasks, groups or tags, separated by commas.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Checkpoint in the workspace, folder or hub id.  [default: NAME]")
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="N|TASK=N",
            help="Use only the first N documents of each task, or of one; may be repeated.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Documents at a time.")] = DEFAULT_BATCH_SIZE,
    include: Annotated[
        list[Path] | None, typer.Option("--include", help="Folder with more task files; may be repeated.")
    ] = None,
    chat_template: Annotated[bool, typer.Option(help="Use the model's chat template, if it has one.")] = True,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of few-shot draws and of sampling.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an evaluation that has this name.")] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Score a model on lm-eval tasks and save the scores under a name, for `recovery` to compare.

    \b
    A checkpoint in the workspace, on two of the tasks that come with mopdctl:
      mopdctl eval mopd2 --tasks arithmetic,tools
    A model from the hub, on the first 200 documents of a task of lm-eval:
      mopdctl eval qwen --model Qwen/Qwen3-0.6B --tasks gsm8k --limit 200

    Task names are looked up in the tasks of mopdctl, in --include folders, and then in lm-eval itself. Shares such as
    accuracies are shown on a 0-100 scale, all else on the metric's own. An evaluation of the same weights, tasks and
    limit that exists already is left as it is. The files that lm-eval writes stay beside the scores.
    """
    from mopdctl.evals.run import plan_eval, run_eval
    from mopdctl.evals.scores import read_scores
    from mopdctl.runs import Workspace
    from mopdctl.train.runtime import prepare_runtime

    names = [task.strip() for task in tasks.split(",") if task.strip()]
    place, model, limit = Workspace(workspace), model or name, _limit(limits or [], names)
    plan = plan_eval(
        name,
        model,
        names,
        place,
        limit=limit,
        include=include or [],
        seed=seed,
        chat_template=chat_template,
        force=force,
    )
    prepare_runtime()
    if dry_run:
        from mopdctl.evals.harness import listening, load_tasks

        with stdout_reserved(), listening(note):
            loaded = load_tasks(names, plan.folders)
        document = {
            "evaluation": name,
            "folder": str(plan.target),
            "model": plan.path,
            "tasks": {task: plan.limits[entry.name] for entry in loaded for task in entry.tasks},
            "reused": plan.done,
        }
        show(document, as_json=as_json)
        return
    with stdout_reserved():
        if not plan.done:
            from mopdctl.train.runtime import settle_vector_math

            settle_vector_math()
        folder = run_eval(
            name,
            model,
            names,
            place,
            limit=limit,
            batch_size=batch_size,
            include=include or [],
            seed=seed,
            chat_template=chat_template,
            force=force,
            on_progress=_progress(),
            on_note=note,
        )
    scores = read_scores(folder).scores
    if as_json:
        document = {"evaluation": name, "folder": str(folder), "reused": plan.done}
        result_json(document | {"scores": [dataclasses.asdict(score) for score in scores]})
    else:
        result(_table(scores))


def _limit(values: Sequence[str], tasks: Sequence[str]) -> "Limit":
    """What `--limit` says of all tasks, and of some."""
    from mopdctl.errors import InputError

    found: dict[str, int] = {}
    for value in values:
        task, _, number = value.rpartition("=")
        if not (number.isdecimal() and int(number)) or task in found:
            raise InputError(f"--limit {value}: needs a number from 1, or task=number, each task once")
        found[task] = int(number)
    everywhere = found.pop("", None)
    return dict.fromkeys(tasks, everywhere) | found if found else everywhere


def _progress() -> Callable[[int, int], None]:
    """One progress line for each round of requests."""
    bars: list[Progress] = []

    def update(done: int, total: int) -> None:
        if done == 0:
            bars[:] = [Progress("eval: answers", total)]
        bars[0].update(done)

    return update


def _table(scores: "Sequence[Score]") -> str:
    rows = [("task", "metric", "n", "score", "")]
    for score in scores:
        arrow = "" if score.higher_is_better else " (lower is better)"
        filter_name = "" if score.filter == "none" else f",{score.filter}"
        stderr = "" if score.stderr is None else f"+- {score.stderr:.2f}"
        shown = "-" if score.score is None else f"{score.score:.2f}"
        row = (score.benchmark, score.metric + filter_name + arrow, str(score.n), shown, score.reason or stderr)
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}  {e}".rstrip()
        for a, b, c, d, e in rows
    )
