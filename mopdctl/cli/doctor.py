"""`mopdctl doctor`: probes of what training depends on, and the fake server for trying things out."""

import typer

from mopdctl.cli import doctor_serve_fake, doctor_template, doctor_verifiers

app = typer.Typer(
    help="Probe chat templates and verifiers; serve fake answers.", no_args_is_help=True, rich_markup_mode=None
)
app.command("template")(doctor_template.template)
app.command("verifiers")(doctor_verifiers.verifiers)
app.command("serve-fake", context_settings={"allow_interspersed_args": False})(doctor_serve_fake.serve_fake)
