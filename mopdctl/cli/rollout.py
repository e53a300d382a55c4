"""`mopdctl rollout`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, WorkspaceOption
from mopdctl.cli.output import Progress, note, show, stdout_reserved
from mopdctl.train.runtime import prepare_runtime


def rollout(
    context: typer.Context,
    prompts: Annotated[Path, typer.Option("--prompts", help="JSONL or Parquet file of prompts.")],
    out: Annotated[str, typer.Option("--out", help="Name of the rollout store to make or go on with.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Checkpoint: a name in the workspace, a folder or a hub id.")
    ] = None,
    engine: Annotated[Literal["hf", "fake"], typer.Option("--engine", help="Who samples.")] = "hf",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer in tokens.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the samples' random streams.")] = 0,
    durability: Annotated[
        Literal["off", "process", "host"],
        typer.Option("--durability", help="What a token survives at once: nothing, a killed process, a lost machine."),
    ] = "process",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Answers sampled at the same time.")] = 64,
    commit_every: Annotated[int, typer.Option("--commit-every", min=1, help="Answers per commit.")] = 1024,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check answers to prompts that name a verifier.")
    ] = True,
    reverify: Annotated[
        bool, typer.Option("--reverify", help="Check the answers that the store has again; samples nothing.")
    ] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Sample answers to prompts into a rollout store and check them; a killed run goes on from its last token.

    \b
    Four answers to each prompt:
      mopdctl rollout --model student --prompts prompts.jsonl --out student-rollouts --samples 4
    After a change of a verifier or of references, without a model:
      mopdctl rollout --reverify --prompts prompts.jsonl --out student-rollouts
    Without a model, to see what a store looks like:
      mopdctl rollout --engine fake --model fake --prompts prompts.jsonl --out fake && mopdctl store inspect fake
    """
    from mopdctl.errors import InputError
    from mopdctl.runs import Workspace

    place = Workspace(workspace)
    place.rollouts(out)
    progress: Progress | None = None

    def on_progress(done: int, total: int) -> None:
        nonlocal progress
        progress = progress or Progress(out, total, done=done - 1)
        progress.update(done)

    if reverify:
        for name in _SAMPLING:
            if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE":
                raise InputError(f"--{name.replace('_', '-')}: has no meaning with --reverify, which samples nothing")
    elif model is None:
        raise InputError("--model: missing; say which checkpoint samples")
    prepare_runtime()
    with stdout_reserved():
        if reverify:
            from mopdctl.rollouts.reverify import reverify as check
            from mopdctl.train.runtime import settle_libraries

            settle_libraries()
            document = check(out, prompts, place, model=model, dry_run=dry_run, on_progress=on_progress, on_note=note)
        else:
            assert model is not None
            from mopdctl.rollouts.run import RolloutSpec, plan_rollout, run_rollout

            spec = RolloutSpec(
                name=out,
                model=model,
                prompts=prompts,
                engine=engine,
                samples=samples,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                durability=durability,
                batch_size=batch_size,
                commit_every=commit_every,
                verify=verify,
            )
            document = plan_rollout(spec, place)
            if not dry_run:
                if engine == "hf":
                    from mopdctl.train.runtime import settle_libraries

                    settle_libraries()
                document |= run_rollout(spec, place, on_progress=on_progress, on_note=note)
    show(document, as_json=as_json)


_SAMPLING = (
    "engine",
    "samples",
    "max_new_tokens",
    "temperature",
    "seed",
    "durability",
    "batch_size",
    "commit_every",
    "verify",
)
