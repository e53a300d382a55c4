"""The configurations of the experiment, each as a change of one of the quickstart's."""

from functools import lru_cache
from typing import Any, TypeVar

from mopdctl.config.base import Strict, load_config
from mopdctl.config.rl import RlConfig
from mopdctl.config.sft import SftConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.runs import Workspace
from mopdctl.world.domains import AGENT_DOMAIN, DOMAINS
from mopdctl.world.family.plan import ARMS, SETTINGS, Arm, Scale, domains_of
from mopdctl.world.files import config_path

_SELF = "self"
Config = TypeVar("Config", bound=Strict)


@lru_cache(maxsize=64)
def read_config(kind: type[Config], workspace: Workspace, name: str) -> Config:
    """A configuration of the quickstart in this workspace, read once by each process."""
    return load_config(kind, config_path(workspace, name))


def sft_of(
    like: SftConfig,
    name: str,
    model: str,
    steps: int,
    *,
    rate: float | None = None,
    data: str | None = None,
    seed: int | None = None,
) -> SftConfig:
    """An SFT of so many steps, otherwise as another."""
    document = _document(like) | {"name": name, "model": model}
    document["train"] |= {"steps": steps}
    if rate is not None:
        document["train"]["learning_rate"] = rate
    if seed is not None:
        document["train"]["seed"] = seed
    if data is not None:
        document["data"] = [f"../data/{data}.jsonl"]
    return SftConfig.model_validate(document)


def agent_of(like: RlConfig, name: str, model: str, prompts: str, factor: float) -> RlConfig:
    """PivotRL from a checkpoint on its own pivots."""
    document = _document(like) | {"name": name, "model": model}
    document["environments"][AGENT_DOMAIN]["prompts"] = prompts
    document["train"]["steps"] = max(1, round(factor * like.train.steps))
    return RlConfig.model_validate(document)


def teachers_of(workspace: Workspace, scale: Scale, setting: str, name: str) -> TeachersFile:
    """The `teachers.yaml` of one arm (for merges and SeqKD too) in one setting."""
    where, arm = SETTINGS[setting], ARMS[name]
    document = _document(read_config(TeachersFile, workspace, "mopd1"))
    steps = _steps(scale, setting, arm)
    warm = round(arm.warm_up * steps)
    train = document["train"] | {"objective": "exact", "warm_start": "none", "steps": steps - warm}
    train |= {"samples_per_prompt": arm.samples, "batch_size": scale.recipe.mopd_batch // arm.samples}
    train |= arm.train
    if warm:
        train["warm_up"] = {"steps": warm, "wrong": scale.wrong_answers}
    if arm.anchored:
        train["reference"] = where.student
    train |= _watched(scale, setting, arm)
    if arm.kind in ("task-arithmetic", "linear", "ties"):
        train |= {"eval_prompts": "../data/dev.jsonl", "eval_size": scale.search_prompts}
    own = [domain for domain in DOMAINS if domain not in where.teachers]
    teachers = {
        domain: {"model": model, "kind": "rl" if domain == AGENT_DOMAIN else "sft", "domains": [domain]}
        for domain, model in where.teachers.items()
    }
    teachers[_SELF] = {"model": where.student, "kind": "self", "domains": own}
    changes = {"name": f"{setting}.{name}", "student": where.student, "train": train, "teachers": teachers}
    return TeachersFile.model_validate(document | changes)


def grpo_of(workspace: Workspace, scale: Scale, setting: str, name: str) -> RlConfig:
    """GRPO on all domains at once, from the same checkpoint and with as many answers per step."""
    recipe, arm = scale.recipe, ARMS[name]
    document = _document(read_config(RlConfig, workspace, "rlvr"))
    train = document["train"] | _watched(scale, setting, arm)
    train |= {
        "steps": _steps(scale, setting, arm),
        "batch_size": recipe.mopd_batch // recipe.group_size,
        "max_new_tokens": read_config(TeachersFile, workspace, "mopd1").train.max_new_tokens,
    }
    environments = {
        domain: {"prompts": f"../data/prompts-{domain}.jsonl", "weight": recipe.prompt_weights[domain]}
        for domain in domains_of(SETTINGS[setting])
    }
    changes = {
        "name": f"{setting}.{name}",
        "model": SETTINGS[setting].student,
        "environments": environments,
        "train": train,
    }
    return RlConfig.model_validate(document | changes)


def _steps(scale: Scale, setting: str, arm: Arm) -> int:
    return max(1, round(scale.recipe.mopd1_steps * SETTINGS[setting].budget * arm.budget))


def _watched(scale: Scale, setting: str, arm: Arm) -> dict[str, Any]:
    """Scores while training, where all arms run."""
    if not arm.watched or setting != "rlvr":
        return {}
    return {
        "eval_every": scale.eval_every,
        "eval_prompts": "../data/scored.jsonl",
        "eval_size": scale.eval_prompts,
    }


def _document(config: SftConfig | RlConfig | TeachersFile) -> dict[str, Any]:
    """What was said, without defaults: a setting that has no effect counts as an error where it is given."""
    return config.model_dump(mode="json", exclude_unset=True)
