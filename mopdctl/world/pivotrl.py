"""Does choosing turns pay? PivotRL against random turns and against SFT, from the same student and trajectories.

    python -m mopdctl.world.pivotrl --workspace DIR --seed 0

Three arms take the same number of steps from `rlvr`: RL on the pivots, RL on as many random turns, SFT on the
trajectories whole. Measured are held-out errands done from the first call to the last message, and what is left of the
other domains. Source of the design: PivotRL (arXiv 2603.21383), Tables 1, 2 and 6.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mopdctl.config.base import load_config
from mopdctl.config.rl import RlConfig
from mopdctl.config.sft import SftConfig
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.runs import Workspace
from mopdctl.train.runtime import prepare_runtime, settle_libraries
from mopdctl.world.domains import AGENT_DOMAIN, DOMAINS
from mopdctl.world.files import config_path, write_world
from mopdctl.world.recipe import Recipe
from mopdctl.world.story import Stage, build_stages

ARMS = {"pivots": AGENT_DOMAIN, "random": f"{AGENT_DOMAIN}-random", "sft": f"{AGENT_DOMAIN}-sft"}
"""Arm to the name of its checkpoint."""


def prepare(workspace: Workspace, recipe: Recipe, seed: int) -> None:
    """Makes what the arms start from, and the first of them: the stages of the quickstart up to the agent."""
    if not config_path(workspace, AGENT_DOMAIN).exists():
        write_world(workspace, recipe, seed)
    stages = {stage.name: stage for stage in build_stages(workspace, recipe)}
    done: set[str] = set()

    def run(stage: Stage) -> None:
        for needed in stage.needs:
            run(stages[needed])
        if stage.name not in done:
            stage.run(lambda step, metrics: None)
            done.add(stage.name)

    run(stages[AGENT_DOMAIN])


def run_controls(workspace: Workspace, recipe: Recipe, seed: int) -> None:
    """The same steps on random turns, and of SFT on the trajectories."""
    from mopdctl.pivots.export import ExportSpec, export
    from mopdctl.rl.run import run_rl
    from mopdctl.train.sft import run_sft

    data, path = workspace.root / "data", config_path(workspace, AGENT_DOMAIN)
    document = load_config(RlConfig, path).model_dump(mode="json")
    rows = sum(1 for _ in (data / f"{AGENT_DOMAIN}-pivots.jsonl").open())
    random = data / f"{ARMS['random']}.jsonl"
    export(AGENT_DOMAIN, workspace, random, ExportSpec("rl", random=rows, seed=seed))
    document["environments"][AGENT_DOMAIN]["prompts"] = f"../data/{random.name}"
    run_rl(RlConfig.model_validate(document | {"name": ARMS["random"]}), workspace, base=path.parent)
    train = {key: document["train"][key] for key in ("steps", "optimizer", "schedule", "warmup_steps", "seed")}
    sft = {
        "name": ARMS["sft"],
        "model": "rlvr",
        "data": ["../data/trajectories.jsonl"],
        "train": train | {"batch_size": recipe.specialist_batch, "learning_rate": recipe.specialist_rate["tools"]},
    }
    run_sft(SftConfig.model_validate(sft), workspace, base=path.parent)


def score(workspace: Workspace, model: str, *, size: int) -> dict[str, float]:
    """Mean reward of greedy answers to `size` dev prompts of each domain, on 0-100; errands from first call to end."""
    return _scores(workspace, model, DOMAINS, size, samples=1, temperature=0)


def sampled_success(workspace: Workspace, model: str, *, size: int) -> float:
    """Errands done at temperature 1, the mean over four tries of each of `size` dev prompts, on 0-100."""
    return _scores(workspace, model, (AGENT_DOMAIN,), size, samples=4, temperature=1)[AGENT_DOMAIN]


def _scores(
    workspace: Workspace, model: str, domains: Iterable[str], size: int, *, samples: int, temperature: float
) -> dict[str, float]:
    from mopdctl.rollouts.run import RolloutSpec, run_rollout
    from mopdctl.store.store import Store

    prompts = read_prompts(workspace.root / "data" / "dev.jsonl", ("domain",))
    by_domain = {domain: [p for p in prompts if p.routing["domain"] == domain][:size] for domain in domains}
    spec = RolloutSpec(
        f"dev-{temperature:g}.{model}",
        model,
        tuple(p for found in by_domain.values() for p in found),
        samples=samples,
        max_new_tokens=128,
        temperature=temperature,
        batch_size=256,
    )
    run_rollout(spec, workspace)
    table = Store(workspace.rollouts(spec.name)).meta_table(["domain", "reward"]).to_pydict()
    rewards: dict[str, list[float]] = {domain: [] for domain in by_domain}
    for domain, reward in zip(table["domain"], table["reward"], strict=True):
        rewards[domain].append(reward or 0.0)
    return {domain: round(100 * sum(found) / len(found), 2) for domain, found in rewards.items()}


def compare(workspace: Workspace, *, seed: int, size: int = 100, recipe: Recipe | None = None) -> dict[str, Any]:
    """Scores of the student, of `rlvr` and of the three arms."""
    recipe = recipe or Recipe()
    prepare(workspace, recipe, seed)
    run_controls(workspace, recipe, seed)
    scores = {name: score(workspace, name, size=size) for name in ("student", "rlvr", *ARMS.values())}
    others = [domain for domain in DOMAINS if domain != AGENT_DOMAIN]
    return {
        "schema": "mopdctl.pivotrl/1",
        "seed": seed,
        "prompts_per_domain": size,
        "scores": scores,
        "success_greedy": {arm: scores[name][AGENT_DOMAIN] for arm, name in {"before": "rlvr", **ARMS}.items()},
        "success_sampled": {
            arm: sampled_success(workspace, name, size=size) for arm, name in {"before": "rlvr", **ARMS}.items()
        },
        "retained": {
            arm: round(sum(scores[name][d] for d in others) / len(others), 2)
            for arm, name in {"before": "rlvr", **ARMS}.items()
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PivotRL against random turns and SFT.")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=100, help="dev prompts of each domain")
    given = parser.parse_args()
    prepare_runtime()
    settle_libraries()
    print(json.dumps(compare(Workspace(given.workspace), seed=given.seed, size=given.size), indent=2))  # noqa: T201
