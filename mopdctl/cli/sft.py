"""`mopdctl sft`."""

from pathlib import Path
from typing import Annotated

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, SetOption, WorkspaceOption
from mopdctl.cli.output import show, stdout_reserved
from mopdctl.cli.training import step_progress
from mopdctl.train.runtime import prepare_runtime, settle_libraries


def sft(
    config: Annotated[Path, typer.Option("--config", help="The sft.yaml: model, data, name, train.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the checkpoint to make.")] = None,
    settings: SetOption = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Fine-tune a model on conversations: how students and specialist teachers begin.

    \b
    As configured:
      mopdctl sft --config sft.yaml
    The same with another learning rate, under another name:
      mopdctl sft --config sft.yaml --set train.learning_rate=2e-5 --name student-2e-5
    What its stages would train on, without a step: rows, packs and how full they are, share of tokens with loss:
      mopdctl sft --config sft.yaml --dry-run

    A run that was killed goes on where it was when the same command is given again.
    """
    from mopdctl.config.overrides import load_with_overrides
    from mopdctl.config.sft import SftConfig
    from mopdctl.runs import Workspace, read_card

    loaded = load_with_overrides(SftConfig, config, {"name": name}, settings or [])
    place = Workspace(workspace)
    target = place.checkpoint(loaded.name)
    document = {"name": loaded.name, "checkpoint": str(target), "steps": loaded.train.steps}
    if not dry_run:
        prepare_runtime()
    with stdout_reserved():
        from mopdctl.train.sft import plan_sft, run_sft

        settle_libraries()
        document |= plan_sft(loaded, place, base=config.parent, dry_run=dry_run)
        if not dry_run:
            run_sft(loaded, place, base=config.parent, on_step=step_progress(loaded.name, loaded.train.steps))
            document["stages"] = read_card(target)["stages"]
    show(document, as_json=as_json)
