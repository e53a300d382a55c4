"""The `mopdctl` command: the table of commands, and how an error becomes one line and an exit code."""

import sys

import typer

from mopdctl import __version__
from mopdctl.cli import (
    distill,
    doctor,
    evaluate,
    gensft,
    merge,
    overlap,
    pivots,
    quantize,
    quickstart,
    recovery,
    rl,
    rollout,
    sft,
    store,
)
from mopdctl.cli.output import note
from mopdctl.errors import MopdctlError

INTERRUPTED = 130

app = typer.Typer(
    name="mopdctl",
    help="Merge specialist teachers into one student by on-policy distillation, and prove what each passed on.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Merge specialist teachers into one student by on-policy distillation, and prove what each passed on."""


app.command("quickstart")(quickstart.quickstart)
app.command("distill")(distill.distill)
app.command("recovery")(recovery.recovery)
app.command("eval")(evaluate.evaluate)
app.command("overlap")(overlap.overlap)
app.command("merge")(merge.merge)
app.command("quantize")(quantize.quantize)
app.command("gen-sft")(gensft.gen_sft)
app.command("sft")(sft.sft)
app.command("rl")(rl.rl)
app.command("rollout")(rollout.rollout)
app.add_typer(pivots.app, name="pivots")
app.add_typer(store.app, name="store")
app.add_typer(doctor.app, name="doctor")


def main() -> None:
    """Runs a command; a domain error becomes one line on stderr and its exit code."""
    try:
        app()
    except MopdctlError as error:
        note(f"error: {error}")
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            note("stopped; the same command goes on where this one was")
        raise
