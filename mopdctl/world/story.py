"""The quickstart: specialists that each forgot something, and a student that learned from all of them.

Every stage is one call of the function behind a command, with the configuration file that the command would read.
Stages whose result is there already are left alone, so that a killed quickstart goes on where it was.
"""

from collections.abc import Callable
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

    name: str
    what: str
    command: str
    """The command that does the same."""
    needs: tuple[str, ...]
    """Names of the stages whose results it reads."""
    steps: int
    """Optimizer steps, or 0."""
    run: Callable[[OnStep], Any]


def build_stages(workspace: Workspace, recipe: Recipe) -> list[Stage]:
    """All stages in an order in which they can run. Configuration files must have been written (`write_configs`)."""
    again = {domain: f"{domain}-2" for domain in recipe.refork}
    second = tuple(again.get(domain, domain) for domain in SPECIALIST_DOMAINS)
    found = [_sft(workspace, "student", "the student: SFT on the mixture, mostly easy examples", ())]
    for domain in SPECIALIST_DOMAINS:
        found.append(_sft(workspace, domain, f"a specialist for {domain}, forked from the student", ("student",)))
    what = "first MOPD iteration: every specialist teaches its own domain"
    found.append(_distill(workspace, "mopd1", what, ("student", *SPECIALIST_DOMAINS)))
    for domain, name in again.items():
        found.append(_sft(workspace, name, f"a new specialist for {domain}, forked from mopd1", ("mopd1",)))
    what = "second MOPD iteration, with the new specialists"
    found.append(_distill(workspace, "mopd2", what, ("mopd1", *second)))
    found.append(_merge(workspace, recipe, ("student", *second)))
    found.append(_sft(workspace, "sft-more", "control: as many steps of plain SFT on the mixture", ("student",)))

    whole = dict.fromkeys(DOMAINS, recipe.documents)
    taught = dict.fromkeys(SPECIALIST_DOMAINS, recipe.documents)
    found += [_eval(workspace, BEFORE, whole), _eval(workspace, AFTER, whole)]
    for domain in SPECIALIST_DOMAINS:
        others = dict.fromkeys(DOMAINS, recipe.see_saw_documents)
        found.append(_eval(workspace, domain, others | {domain: recipe.documents}))
    found.append(_eval(workspace, "mopd1", taught))
    found += [_eval(workspace, name, {domain: recipe.documents}) for domain, name in again.items()]
    found += [_eval(workspace, name, taught) for name in CONTROLS]
    return found


def _sft(workspace: Workspace, name: str, what: str, needs: tuple[str, ...]) -> Stage:
    path = config_path(workspace, name)
    config = load_config(SftConfig, path)

    def run(on_step: OnStep) -> Path:
        from mopdctl.train.sft import run_sft

        return run_sft(config, workspace, base=path.parent, on_step=on_step)

    return Stage(name, what, f"mopdctl sft --config {path}{_at(workspace)}", needs, config.train.steps, run)


def _distill(workspace: Workspace, name: str, what: str, needs: tuple[str, ...]) -> Stage:
    path = config_path(workspace, name)
    config = load_config(TeachersFile, path)

    def run(on_step: OnStep) -> Path:
        from mopdctl.distill.run import run_distill

        return run_distill(config, workspace, base=path.parent, on_step=on_step)

    return Stage(name, what, f"mopdctl distill --teachers {path}{_at(workspace)}", needs, config.train.steps, run)


def _merge(workspace: Workspace, recipe: Recipe, needs: tuple[str, ...]) -> Stage:
    path = config_path(workspace, "merge")
    config = load_config(TeachersFile, path)

    def run(on_step: OnStep) -> Path:
        from mopdctl.distill.merge import run_merge

        return run_merge(config, workspace, base=path.parent, scale=recipe.merge_scale, name="merge")

    command = f"mopdctl merge --teachers {path} --scale {recipe.merge_scale} --name merge{_at(workspace)}"
    return Stage("merge", "control: the teachers' weights merged", command, needs, 0, run)


def _eval(workspace: Workspace, name: str, limits: dict[str, int]) -> Stage:
    def run(on_step: OnStep) -> Path:
        from mopdctl.evals.run import run_eval

        return run_eval(name, name, list(limits), workspace, limit=limits)

    command = f"mopdctl eval {name} --tasks {','.join(limits)}{_at(workspace)}"
    if len(set(limits.values())) > 1:
        command += f"   # {min(limits.values())} documents outside its own domain"
    return Stage(f"eval {name}", f"scores of {name}", command, (name,), 0, run)


def _at(workspace: Workspace) -> str:
    return "" if workspace.root == Path("workspace") else f" --workspace {workspace.root}"


def read_see_saw(workspace: Workspace, recipe: Recipe) -> dict[str, dict[str, float | None]]:
    """Model to domain to score (0-100) of everything that was evaluated: what specialists gained and forgot."""
    from mopdctl.evals.scores import read_scores

    names = ["student", *SPECIALIST_DOMAINS, "mopd1", *(f"{d}-2" for d in recipe.refork), "mopd2", *CONTROLS]
    return {
        name: {s.benchmark: _tidy(s.score) for s in read_scores(workspace.evaluation(name)).scores} for name in names
    }


def _tidy(score: float | None) -> float | None:
    return None if score is None else round(score, 2)
