"""`mopdctl rl`."""

from pathlib import Path
from typing import Annotated

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, SetOption, WorkspaceOption
from mopdctl.cli.output import note, show, stdout_reserved
from mopdctl.cli.training import step_progress
from mopdctl.train.runtime import prepare_runtime, settle_libraries


def rl(
    config: Annotated[Path, typer.Option("--config", help="The rl.yaml: model, environments, name, train.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the checkpoint to make.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Checkpoint to start from.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of data order and sampling.")] = None,
    settings: SetOption = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train a model by GRPO on answers that can be checked: verifiable rewards, pivots, tool environments.

    \b
    As configured:
      mopdctl rl --config rl.yaml
    Leave-one-out advantages without the standard deviation, under another name:
      mopdctl rl --config rl.yaml --set train.baseline=leave_one_out --set train.scale=none --name rloo
    What it would train on, without a step:
      mopdctl rl --config rl.yaml --dry-run

    A run that was killed goes on where it was when the same command is given again: same prompts, same answers, same
    rewards. On several GPUs: torchrun --nproc-per-node 8 -m mopdctl rl --config rl.yaml
    """
    from mopdctl.config.overrides import load_with_overrides
    from mopdctl.config.rl import RlConfig
    from mopdctl.runs import Workspace

    flags = {"name": name, "model": model, "train.steps": steps, "train.seed": seed}
    loaded = load_with_overrides(RlConfig, config, flags, settings or [])
    place = Workspace(workspace)
    place.checkpoint(loaded.name)
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.rl.inputs import describe, read_inputs
        from mopdctl.rl.run import check_name, run_rl

        settle_libraries()
        inputs = read_inputs(loaded, place, base=config.parent)
        document = describe(loaded, inputs)
        if dry_run:
            check_name(loaded, place, base=config.parent)
        else:
            progress = step_progress(loaded.name, loaded.train.steps)
            target = run_rl(loaded, place, base=config.parent, inputs=inputs, on_step=progress, on_note=note)
            document["checkpoint"] = str(target)
    show(document, as_json=as_json)
