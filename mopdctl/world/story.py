"""The quickstart: specialists that each forgot something, and a student that learned from all of them.

Every stage is one call of the function behind a command, with the configuration file that the command would read.
Stages whose result is there already are left alone, so that a killed quickstart goes on where it was.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.base import load_config
from mopdctl.config.sft import SftConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.runs import Workspace
from mopdctl.world.domains import DOMAINS, SPECIALIST_DOMAINS
from mopdctl.world.files import config_path
from mopdctl.world.recipe import Recipe

OnStep = Callable[[int, dict[str, Any]], None]
BEFORE, AFTER, CONTROLS = "student", "mopd2", ("merge", "sft-more")


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the story."""

    what: str
    command: str
    """The command that does the same."""
    steps: int
    """Optimizer steps, or 0."""
    run: Callable[[OnStep], Any]


def stages(workspace: Workspace, recipe: Recipe) -> Iterator[Stage]:
    """All stages in order. Configuration files must have been written (`write_world`)."""
    yield _sft(workspace, "student", "the student: SFT on the mixture, mostly easy examples")
    for domain in SPECIALIST_DOMAINS:
        yield _sft(workspace, domain, f"a specialist for {domain}, forked from the student")
    yield _distill(workspace, "mopd1", "first MOPD iteration: every specialist teaches its own domain")
    for domain in recipe.refork:
        yield _sft(workspace, f"{domain}-2", f"a new specialist for {domain}, forked from mopd1")
    yield _distill(workspace, "mopd2", "second MOPD iteration, with the new specialists")
    yield _merge(workspace, recipe)
    yield _sft(workspace, "sft-more", "control: as many steps of plain SFT on the mixture")
    for name in ("student", "mopd1", "mopd2", *CONTROLS):
        yield _eval(workspace, name, dict.fromkeys(DOMAINS, recipe.documents))
    for domain in SPECIALIST_DOMAINS:
        limits = dict.fromkeys(DOMAINS, recipe.see_saw_documents) | {domain: recipe.documents}
        yield _eval(workspace, domain, limits)
    for domain in recipe.refork:
        yield _eval(workspace, f"{domain}-2", {domain: recipe.documents})


def _sft(workspace: Workspace, name: str, what: str) -> Stage:
    path = config_path(workspace, name)
    config = load_config(SftConfig, path)

    def run(on_step: OnStep) -> Path:
        from mopdctl.train.sft import run_sft

        return run_sft(config, workspace, base=path.parent, on_step=on_step)

    return Stage(what, f"mopdctl sft --config {path}{_at(workspace)}", config.train.steps, run)


def _distill(workspace: Workspace, name: str, what: str) -> Stage:
    path = config_path(workspace, name)
    config = load_config(TeachersFile, path)

    def run(on_step: OnStep) -> Path:
        from mopdctl.distill.run import run_distill

        return run_distill(config, workspace, base=path.parent, on_step=on_step)

    return Stage(what, f"mopdctl distill --teachers {path}{_at(workspace)}", config.train.steps, run)


def _merge(workspace: Workspace, recipe: Recipe) -> Stage:
    path = config_path(workspace, "merge")
    config = load_config(TeachersFile, path)

    def run(on_step: OnStep) -> Path:
        from mopdctl.distill.merge import run_merge

        return run_merge(config, workspace, base=path.parent, scale=recipe.merge_scale, name="merge")

    command = f"mopdctl merge --teachers {path} --scale {recipe.merge_scale} --name merge{_at(workspace)}"
    return Stage("control: the teachers' weights merged", command, 0, run)


def _eval(workspace: Workspace, name: str, limits: dict[str, int]) -> Stage:
    def run(on_step: OnStep) -> Path:
        from mopdctl.evals.run import run_eval

        return run_eval(name, name, list(limits), workspace, limit=limits)

    tasks = ",".join(limits)
    command = f"mopdctl eval {name} --tasks {tasks}{_at(workspace)}"
    if min(limits.values()) < max(limits.values()) or len(limits) < len(DOMAINS):
        command += "   # fewer documents of the other domains"
    return Stage(f"scores of {name}", command, 0, run)


def _at(workspace: Workspace) -> str:
    return "" if workspace.root == Path("workspace") else f" --workspace {workspace.root}"


def see_saw(workspace: Workspace) -> dict[str, dict[str, float | None]]:
    """Model to domain to score (0-100) of everything that was evaluated, for the table of what specialists forgot."""
    from mopdctl.evals.scores import has_scores, read_scores

    names = ["student", *SPECIALIST_DOMAINS, *(f"{d}-2" for d in SPECIALIST_DOMAINS), "mopd1", "mopd2", *CONTROLS]
    found = {}
    for name in names:
        folder = workspace.evaluation(name)
        if has_scores(folder):
            found[name] = {score.benchmark: score.score for score in read_scores(folder).scores}
    return found
