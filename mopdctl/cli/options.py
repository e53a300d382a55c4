"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

WorkspaceOption = Annotated[Path, typer.Option("--workspace", help="Folder that holds checkpoints, evals and runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE over the file, e.g. train.steps=10; may be repeated.")
]
DEFAULT_WORKSPACE = Path("workspace")
