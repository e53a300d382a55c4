"""`mopdctl store`: look into a rollout store and look after it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from mopdctl.cli.output import note, result, result_json, show
from mopdctl.errors import CheckFailedError, InputError

app = typer.Typer(
    help="Look into a rollout store and look after it: inspect, verify, plan, export, compact, repair.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The store, by its name in the workspace.")]


@app.command()
def inspect(name: NameArgument, workspace: WorkspaceOption = DEFAULT_WORKSPACE, as_json: JsonOption = False) -> None:
    """Show what a store holds: domains, teachers, lengths, endings, log-probabilities.

    \b
    After the quickstart:
      mopdctl store inspect mopd2
    For a script:
      mopdctl store inspect mopd2 --json
    """
    from mopdctl.store.store import Store
    from mopdctl.store.summary import summarize, text

    summary = summarize(Store(_folder(workspace, name)))
    for line in summary["warnings"]:
        note(f"warning: {line}")
    result_json(summary) if as_json else result(text(summary))


@app.command()
def verify(name: NameArgument, workspace: WorkspaceOption = DEFAULT_WORKSPACE, as_json: JsonOption = False) -> None:
    """Read a whole store and check everything in it; exit with 3 if it is damaged.

    \b
      mopdctl store verify mopd2
      mopdctl store verify mopd2 --json
    """
    from dataclasses import asdict

    from mopdctl.store.verify import verify as check

    folder = _folder(workspace, name)
    verdict = check(folder)
    document = {**asdict(verdict), "whole": not verdict.problems}
    if as_json:
        result_json(document)
    else:
        lines = [problem.line() for problem in verdict.problems] + [f"note: {line}" for line in verdict.notes]
        count = f"{verdict.samples} samples in {verdict.shards} shards, {verdict.waiting} waiting in the log"
        result("\n".join([*lines, f"{'damaged' if verdict.problems else 'whole'}: {count}"]))
    if verdict.problems:
        raise CheckFailedError(f"{folder}: damaged; `mopdctl store repair {name}` saves what is whole")


@app.command()
def plan(
    name: NameArgument,
    capacity: Annotated[int, typer.Option("--capacity", min=1, help="Tokens that a bin holds.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the order of samples and bins.")] = 0,
    domain: Annotated[list[str] | None, typer.Option("--domain", help="Only this domain; may be repeated.")] = None,
    teacher: Annotated[list[str] | None, typer.Option("--teacher", help="Only this teacher; may be repeated.")] = None,
    finish_reason: Annotated[
        list[str] | None, typer.Option("--finish-reason", help="Only samples that ended so; may be repeated.")
    ] = None,
    min_version: Annotated[int | None, typer.Option("--min-version", help="Oldest policy version used.")] = None,
    max_version: Annotated[int | None, typer.Option("--max-version", help="Newest policy version used.")] = None,
    data_parallel: Annotated[int, typer.Option("--data-parallel", min=1, help="Bins are a multiple of this.")] = 1,
    align: Annotated[int, typer.Option("--align", min=1, help="Lengths count as rounded up to this.")] = 1,
    over_long: Annotated[
        Literal["error", "drop", "alone"], typer.Option("--over-long", help="What becomes of samples over CAPACITY.")
    ] = "error",
    mix_teachers: Annotated[bool, typer.Option("--mix-teachers", help="Let teachers share bins.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write.  [default: plans/seed-SEED.parquet in the store]")
    ] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
) -> None:
    """Filter, shuffle and pack the samples of a store into bins, from metadata alone, and save the plan.

    \b
    Bins of 32k tokens for eight data-parallel ranks:
      mopdctl store plan mopd2 --capacity 32768 --data-parallel 8
    One domain, whole answers only:
      mopdctl store plan mopd2 --capacity 4096 --domain math --finish-reason stop
    """
    from mopdctl.store.plan import Filter, make_plan
    from mopdctl.store.schema import PLANNING

    store = _open(workspace, name)
    made = make_plan(
        store.meta(PLANNING, encoded=True),
        capacity=capacity,
        seed=seed,
        filters=Filter(
            domains=_given(domain),
            teachers=_given(teacher),
            finish_reasons=_given(finish_reason),
            min_policy_version=min_version,
            max_policy_version=max_version,
        ),
        store_version=store.manifest.number,
        by_teacher=not mix_teachers,
        multiple_of=data_parallel,
        over_long=over_long,
        align=align,
    )
    if not made.kept:
        reasons = ", ".join(f"{reason} {count}" for reason, count in made.dropped.items() if count)
        raise InputError(
            f"{store.folder}: no sample is left to plan ({reasons or 'it holds none'}); see `store inspect`"
        )
    path = out or store.folder / "plans" / f"seed-{seed}.parquet"
    made.save(path)
    document: dict[str, Any] = {
        "plan": str(path),
        "commit": made.store_version,
        "bins": made.num_bins,
        "samples": made.kept,
        "of": made.total,
        "dropped": {reason: count for reason, count in made.dropped.items() if count},
        "alone": made.alone,
        "fill_pct": None if made.fill is None else round(100 * made.fill, 3),
    }
    show(document, as_json=as_json)


@app.command()
def export(
    name: NameArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    split: Annotated[str, typer.Option("--split", help="Name of the split.")] = "train",
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
) -> None:
    """Write a store as a Hugging Face dataset folder that `datasets.load_dataset` reads.

    \b
      mopdctl store export mopd2 --out mopd2-rollouts
      mopdctl store export mopd2 --out held-out --split validation
    """
    from mopdctl.store.export import export as write

    store = _open(workspace, name)
    files = write(store, out, split=split)
    document = {"folder": str(out), "split": split, "samples": store.manifest.rows, "files": [f.name for f in files]}
    show(document, as_json=as_json)


@app.command()
def compact(name: NameArgument, workspace: WorkspaceOption = DEFAULT_WORKSPACE, as_json: JsonOption = False) -> None:
    """Merge the small files of many commits into few, keeping samples and their order.

    \b
      mopdctl store compact mopd2
      mopdctl store compact mopd2 --json
    """
    from mopdctl.store.compact import compact as merge
    from mopdctl.store.store import StoreWriter

    identity = _open(workspace, name).manifest.identity
    with StoreWriter(_folder(workspace, name), identity) as writer:
        before, after = merge(writer)
        document = {"shards_before": before, "shards_after": after, "samples": writer.store.manifest.rows}
    show(document, as_json=as_json)


@app.command()
def repair(name: NameArgument, workspace: WorkspaceOption = DEFAULT_WORKSPACE, as_json: JsonOption = False) -> None:
    """Save what is whole in a damaged store, say what is lost, and move damaged files to `lost/` in the store.

    \b
      mopdctl store repair mopd2
      mopdctl store repair mopd2 --json
    """
    from dataclasses import asdict

    from mopdctl.store.repair import repair as mend

    done = mend(_folder(workspace, name))
    if as_json:
        result_json(asdict(done))
    else:
        lines = [f"lost: {line}" for line in done.lost] + [f"note: {line}" for line in done.notes]
        lines += [f"moved: {line}" for line in done.moved]
        result("\n".join([*lines, f"{done.samples} samples in the store (commit {done.manifest})"]))


def _folder(workspace: Path, name: str) -> Path:
    from mopdctl.runs import Workspace

    return Workspace(workspace).rollouts(name)


def _open(workspace: Path, name: str) -> Any:
    from mopdctl.store.store import Store

    store = Store(_folder(workspace, name))
    for line in store.warnings:
        note(f"warning: {line}")
    return store


def _given(values: Iterable[str] | None) -> tuple[str, ...] | None:
    return tuple(values) if values else None
