"""The quickstart: teachers that each forgot something, and a student that learned from all of them.

SFT makes `student`, RL on verifiable rewards `rlvr`, and that is what MOPD begins with; specialists come from SFT, the
agent from PivotRL, and a frozen copy of `rlvr` keeps a domain that nobody teaches.

Every stage is one call of the function behind a command, with the configuration file that the command would read.
Stages whose result is there already are left alone, so that a killed quickstart goes on where it was.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.base import load_config
from mopdctl.config.rl import RlConfig
from mopdctl.config.sft import SftConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.runs import Workspace
from mopdctl.world.domains import AGENT_DOMAIN, DOMAINS, SPECIALIST_DOMAINS
from mopdctl.world.files import config_path
from mopdctl.world.recipe import Recipe

OnStep = Callable[[int, dict[str, Any]], None]
BEFORE, AFTER, CONTROLS = "rlvr", "mopd2", ("merge", "sft-more")
QUANTIZED = f"{AFTER}-nvfp4"


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
    found.append(_rl(workspace, "rlvr", "the student after RL on answers that can be checked", ("student",)))
    found += _pivots(workspace, recipe)
    found.append(_rl(workspace, AGENT_DOMAIN, "an agent for errands: PivotRL on those turns", (_EXPORTED,)))
    for domain in SPECIALIST_DOMAINS:
        found.append(_sft(workspace, domain, f"a specialist for {domain}, forked from rlvr", ("rlvr",)))
    teachers = (*SPECIALIST_DOMAINS, AGENT_DOMAIN)
    what = "first MOPD iteration: every teacher weighs its own domain"
    found.append(_distill(workspace, "mopd1", what, ("rlvr", *teachers)))
    for domain, name in again.items():
        found.append(_sft(workspace, name, f"a new specialist for {domain}, forked from mopd1", ("mopd1",)))
    what = "second MOPD iteration, with the new specialists"
    found.append(_distill(workspace, "mopd2", what, ("mopd1", *second, AGENT_DOMAIN)))
    found.append(_quantize(workspace, "mopd2 in four bits, for serving"))
    found.append(_merge(workspace, recipe, ("rlvr", *second, AGENT_DOMAIN)))
    found.append(_sft(workspace, "sft-more", "control: as many steps of plain SFT on the mixture", ("rlvr",)))

    whole = dict.fromkeys(DOMAINS, recipe.documents)
    taught = dict.fromkeys(teachers, recipe.documents)
    found += [_eval(workspace, "student", dict.fromkeys(DOMAINS, recipe.see_saw_documents))]
    found += [_eval(workspace, name, whole) for name in (BEFORE, AFTER, QUANTIZED)]
    for domain in teachers:
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


def _rl(workspace: Workspace, name: str, what: str, needs: tuple[str, ...]) -> Stage:
    path = config_path(workspace, name)
    config = load_config(RlConfig, path)

    def run(on_step: OnStep) -> Path:
        from mopdctl.rl.run import run_rl

        return run_rl(config, workspace, base=path.parent, on_step=on_step)

    return Stage(name, what, f"mopdctl rl --config {path}{_at(workspace)}", needs, config.train.steps, run)


_EXTRACTED, _PROFILED, _EXPORTED = "pivots extract", "pivots profile", "pivots select"


def _pivots(workspace: Workspace, recipe: Recipe) -> list[Stage]:
    """From an expert's trajectories to the turns at which `rlvr` sometimes fails."""
    name, data, at = AGENT_DOMAIN, workspace.root / "data", _at(workspace)
    trajectories, rows = data / "trajectories.jsonl", data / f"{name}-pivots.jsonl"

    def extract(on_step: OnStep) -> Any:
        from mopdctl.pivots.collect import collect

        return collect([trajectories], workspace, name, match={"content": "exact"})

    def profile(on_step: OnStep) -> Any:
        from mopdctl.pivots.profile import ProfileSpec, run_profile

        return run_profile(ProfileSpec(name, "rlvr", max_new_tokens=64, batch_size=256), workspace)

    def choose(on_step: OnStep) -> Any:
        from mopdctl.pivots.export import ExportSpec, export
        from mopdctl.pivots.selection import run_select

        run_select(name, workspace, lambda_diff=recipe.lambda_diff)
        return export(name, workspace, rows, ExportSpec("rl"))

    commands = (
        f"mopdctl pivots extract {trajectories} --out {name} --match content=exact{at}",
        f"mopdctl pivots profile {name} --model rlvr --max-new-tokens 64{at}",
        f"mopdctl pivots select {name} --lambda-diff {recipe.lambda_diff}{at} && "
        f"mopdctl pivots export {name} --format rl --out {rows}{at}",
    )
    return [
        Stage(_EXTRACTED, "every turn of an expert's errands", commands[0], (), 0, extract),
        Stage(_PROFILED, "rlvr tries each of those turns eight times", commands[1], ("rlvr", _EXTRACTED), 0, profile),
        Stage(_EXPORTED, "the turns that it sometimes gets wrong", commands[2], (_PROFILED,), 0, choose),
    ]


def _quantize(workspace: Workspace, what: str) -> Stage:
    def run(on_step: OnStep) -> Path:
        from mopdctl.config.quant import QuantConfig
        from mopdctl.quant.run import quantize_model

        return quantize_model(QuantConfig(model=AFTER, name=QUANTIZED), workspace, base=Path())

    command = f"mopdctl quantize {AFTER} --format nvfp4 --name {QUANTIZED}{_at(workspace)}"
    return Stage(QUANTIZED, what, command, (AFTER,), 0, run)


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

    least = min(limits.values())
    more = "".join(f" --limit {task}={count}" for task, count in limits.items() if count != least)
    command = f"mopdctl eval {name} --tasks {','.join(limits)} --limit {least}{more}{_at(workspace)}"
    return Stage(f"eval {name}", f"scores of {name}", command, (name,), 0, run)


def _at(workspace: Workspace) -> str:
    return "" if workspace.root == Path("workspace") else f" --workspace {workspace.root}"


def read_see_saw(workspace: Workspace, recipe: Recipe) -> dict[str, dict[str, float | None]]:
    """Model to domain to score (0-100) of everything that was evaluated: what specialists gained and forgot."""
    from mopdctl.evals.scores import read_scores

    names = [
        "student",
        "rlvr",
        *SPECIALIST_DOMAINS,
        AGENT_DOMAIN,
        "mopd1",
        *(f"{d}-2" for d in recipe.refork),
        AFTER,
        QUANTIZED,
        *CONTROLS,
    ]
    found: dict[str, dict[str, float | None]] = {}
    for name in names:
        for score in read_scores(workspace.evaluation(name)).scores:
            tidy = None if score.score is None else round(score.score, 2)
            found.setdefault(name, {}).setdefault(score.benchmark, tidy)  # the first metric of a task is its own
    return found
