"""`mopdctl pivots`: the turns of expert trajectories at which a model sometimes fails, as single-turn problems."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from mopdctl.cli.output import Progress, note, show, stdout_reserved
from mopdctl.errors import InputError
from mopdctl.train.runtime import prepare_runtime

app = typer.Typer(
    help="PivotRL: extract candidates from trajectories, profile them with rollouts, select pivots, export them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The set of candidates, by its name.")]


@app.command()
def extract(
    trajectories: Annotated[list[Path], typer.Argument(help="JSONL, JSON or Parquet files of trajectories.")],
    out: Annotated[str, typer.Option("--out", help="Name of the set of candidates to make.")],
    format: Annotated[
        Literal["chat", "responses", "atif"] | None,
        typer.Option("--format", help="Chat messages, OpenAI Responses items or ATIF.  [default: found out]"),
    ] = None,
    domain: Annotated[str | None, typer.Option("--domain", help="Domain of trajectories that name none.")] = None,
    match: Annotated[
        list[str] | None,
        typer.Option("--match", help="KEY=VALUE of how answers are compared with the action; may be repeated."),
    ] = None,
    compat: Annotated[
        Literal["nemo-gym", "nemo-gym-swe"] | None,
        typer.Option("--compat", help="Compare as NeMo Gym does, its defects included.  [default: our own rules]"),
    ] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
) -> None:
    """Make every assistant turn of expert trajectories a candidate: the state before it and the action taken.

    \b
      mopdctl pivots extract trajectories.jsonl --out errands
      mopdctl pivots extract runs/*.json --format atif --domain terminal --out terminal
    Calls by their tool alone, messages by their words (else by all arguments, and any message will do):
      mopdctl pivots extract swe.jsonl --match arguments=name_only --match content=words --out swe

    A turn that can be none (cut off, failed, copied context, ...) goes to `skipped.jsonl` with its reason; what was
    unusual goes to `notes.jsonl`.
    """
    from mopdctl.pivots.collect import collect
    from mopdctl.runs import Workspace

    line = Progress(f"{out}: turns", None)
    manifest = collect(
        trajectories,
        Workspace(workspace),
        out,
        format=format,
        domain=domain,
        match=_options(match or []),
        compat=compat,
        on_progress=line.update,
    )
    document = {
        "set": str(Workspace(workspace).pivots(out)),
        "trajectories": manifest["trajectories"],
        "turns": manifest["turns"],
        "candidates": manifest["candidates"]["count"],
        "skipped": manifest["skipped"]["count"],
        "notes": manifest["notes"],
        "by": manifest["by"],
    }
    show(document, as_json=as_json)


@app.command()
def profile(
    name: NameArgument,
    model: Annotated[str, typer.Option("--model", help="Reference model: a checkpoint's name, a folder or a hub id.")],
    rollouts: Annotated[int, typer.Option("--rollouts", min=2, help="Answers per candidate.")] = 8,
    temperature: Annotated[float, typer.Option("--temperature", help="Above 0, or all answers are the same.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer in tokens.")] = 512,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the answers' random streams.")] = 0,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many candidates.")] = None,
    reprofile: Annotated[
        bool, typer.Option("--reprofile", help="Another profile beside the one that this model's name has already.")
    ] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Answers sampled at the same time.")] = 64,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
) -> None:
    """Let a model take the next action at every candidate, several times, and judge each against the expert's.

    \b
    With the model that training will start from:
      mopdctl pivots profile errands --model student --rollouts 8
    Later, with the policy as it is by then; see `select --fresh`:
      mopdctl pivots profile errands --model rl-step-200

    The answers go to the store `NAME.profile-MODEL`. A killed profile goes on when the same command is given again.
    """
    from mopdctl.runs import Workspace

    place = Workspace(workspace)
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.pivots.profile import ProfileSpec, run_profile
        from mopdctl.train.runtime import settle_libraries

        settle_libraries()
        progress: Progress | None = None

        def on_progress(done: int, total: int) -> None:
            nonlocal progress
            progress = progress or Progress(f"{name}: answers", total, done=done - 1)
            progress.update(done)

        document = run_profile(
            ProfileSpec(
                name=name,
                model=model,
                rollouts=rollouts,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=seed,
                limit=limit,
                reprofile=reprofile,
                batch_size=batch_size,
            ),
            place,
            on_progress=on_progress,
            on_note=note,
        )
    shown = ("label", "model", "store", "candidates", "profiled", "rollouts", "states", "mean_reward", "mixed")
    show({"profile": document["path"]} | {key: document[key] for key in shown}, as_json=as_json)


@app.command()
def select(
    name: NameArgument,
    lambda_diff: Annotated[
        float, typer.Option("--lambda-diff", help="Keep states whose mean reward lies below; 0.6 is a start.")
    ],
    profile: Annotated[
        str | None, typer.Option("--profile", help="Label of the profile.  [default: the only one]")
    ] = None,
    fresh: Annotated[
        str | None, typer.Option("--fresh", help="Label of a newer profile, in which a pivot has to be one too.")
    ] = None,
    min_ok: Annotated[
        int | None, typer.Option("--min-ok", min=2, help="Fewest judged answers.  [default: half of the rollouts]")
    ] = None,
    per_tool: Annotated[int | None, typer.Option("--per-tool", min=1, help="Most pivots of one tool.")] = None,
    per_depth: Annotated[int | None, typer.Option("--per-depth", min=1, help="Most pivots of one depth.")] = None,
    maximum: Annotated[int | None, typer.Option("--max", min=1, help="Most pivots.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the order among states of equal mean.")] = 0,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
) -> None:
    """Keep the candidates with mixed rewards and a mean below --lambda-diff, hardest first.

    \b
      mopdctl pivots select errands --lambda-diff 0.6
      mopdctl pivots select errands --lambda-diff 0.6 --per-tool 500 --max 2000
    Only those that the policy of step 200 has not learned yet:
      mopdctl pivots select errands --lambda-diff 0.6 --profile student --fresh rl-step-200

    A share of 0 or more than 50 % raises an alarm: then the verifier is more likely wrong than the model.
    """
    from mopdctl.pivots.selection import run_select
    from mopdctl.runs import Workspace

    document = run_select(
        name,
        Workspace(workspace),
        lambda_diff=lambda_diff,
        profile=profile,
        fresh=fresh,
        min_ok=min_ok,
        per_tool=per_tool,
        per_depth=per_depth,
        maximum=maximum,
        seed=seed,
    )
    if document["alarm"]:
        note(f"alarm: {document['alarm']}")
    hidden = ("profile", "fresh", "candidates_digest")
    labels = {"profile": document["profile"]["label"], "fresh": fresh}
    shown = {key: value for key, value in document.items() if key not in hidden} | labels
    show(document if as_json else shown, as_json=as_json)


@app.command()
def export(
    name: NameArgument,
    format: Annotated[
        Literal["rl", "nemo-gym"], typer.Option("--format", help="Prompt rows for `rl`, or rows of NeMo Gym.")
    ],
    out: Annotated[Path, typer.Option("--out", help="JSONL file to write.")],
    every: Annotated[bool, typer.Option("--all", help="All candidates in place of the selected ones.")] = False,
    random: Annotated[
        int | None, typer.Option("--random", min=1, help="So many random candidates, the control of a selection.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random choice.")] = 0,
    agent: Annotated[
        str | None, typer.Option("--agent", help="NeMo Gym: agent_ref.name.  [default: that of its shipped configs]")
    ] = None,
    batches: Annotated[
        bool, typer.Option("--batches", help="NeMo Gym: rows that expect several calls at once, too.")
    ] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
) -> None:
    """Write the selected pivots as rows to train on.

    \b
      mopdctl pivots export errands --format rl --out pivots.jsonl
      mopdctl pivots export errands --format rl --random 200 --out random-turns.jsonl
      mopdctl pivots export errands --format nemo-gym --batches --out train.jsonl
    """
    from mopdctl.pivots.export import ExportSpec
    from mopdctl.pivots.export import export as write
    from mopdctl.pivots.nemo_gym import AGENT
    from mopdctl.runs import Workspace

    if every and random is not None:
        raise InputError("--all and --random: give one of them")
    if format == "rl" and (agent or batches):
        raise InputError("--agent and --batches are for --format nemo-gym; `rl` rows hold batches as they are")
    spec = ExportSpec(format, every, random, seed, agent or AGENT, batches)
    document = write(name, Workspace(workspace), out, spec)
    for line in document["examples"]:
        note(f"skipped: {line}")
    shown = ("file", "set", "format", "candidates", "chosen", "rows", "skipped", "lambda_diff", "digest")
    show(document if as_json else {key: document[key] for key in shown}, as_json=as_json)


def _options(words: list[str]) -> dict[str, Any] | None:
    from mopdctl.verifiers.base import MOST_DEPTH, deeper_than

    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"--match {word}: write KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except ValueError:  # plain text
            found[key] = value
        except RecursionError:
            raise InputError(f"--match {key}: nested too deep") from None
        if deeper_than(found[key], MOST_DEPTH):
            raise InputError(f"--match {key}: nested deeper than {MOST_DEPTH} levels")
    return found or None
