"""`mopdctl doctor template`."""

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from mopdctl.cli.output import result, result_json, stdout_reserved
from mopdctl.errors import CheckFailedError
from mopdctl.train.runtime import prepare_runtime

if TYPE_CHECKING:
    from mopdctl.train.template import TemplateReport


def template(
    model: Annotated[str, typer.Argument(help="Checkpoint: a name in the workspace, a folder or a hub id.")],
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
) -> None:
    """Probe whether what a model's chat template renders is fit to be trained on; loads no weights.

    \b
      mopdctl doctor template student
      mopdctl doctor template Qwen/Qwen3-0.6B --json

    Each probe ends as ok, warn (some kinds of rows need care), bad (training would be harmed) or not_applicable. Ends
    with exit code 3 if one is bad.
    """
    from mopdctl.runs import Workspace

    path = Workspace(workspace).resolve_model(model)
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.engines.tokenizers import ChatTokenizer
        from mopdctl.train.runtime import settle_libraries
        from mopdctl.train.template import probe

        settle_libraries()
        chat = ChatTokenizer.load(path)
        report = probe(chat.tokenizer, chat.eos_ids, model)
    if as_json:
        result_json(asdict(report))
    else:
        result(_table(report))
    if report.bad:
        raise CheckFailedError(f"{model}: the chat template does not train well ({', '.join(report.bad)})")


def _table(report: "TemplateReport") -> str:
    lines = [f"{'probe':<18} {'state':<15} detail"]
    for finding in report.findings:
        first, *rest = textwrap.wrap(finding.detail, 85)
        lines += [f"{finding.name:<18} {finding.state:<15} {first}", *(" " * 35 + line for line in rest)]
    return "\n".join([*lines, f"template digest: {report.template_digest}"])
