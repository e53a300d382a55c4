"""What a model earns on the scored prompts, prompt by prompt, so that two models can be compared in pairs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mopdctl.errors import MopdctlError
from mopdctl.files import read_json, write_json
from mopdctl.runs import Workspace

Rewards = dict[str, NDArray[np.float64]]
"""Domain to the reward of each scored prompt, in [0, 1], in the order of the file."""


def scores_path(workspace: Workspace, model: str) -> Path:
    """Where the rewards of a model lie."""
    return workspace.root / "family" / "scores" / f"{model}.json"


def score_model(workspace: Workspace, model: str, domains: Sequence[str]) -> None:
    """Greedy answers to the scored prompts of some domains, whole conversations where there is an environment.

    Raises MopdctlError if one of them could not be checked: a pair would lack its other half.
    """
    from mopdctl.rollouts.prompts import read_prompts
    from mopdctl.rollouts.run import RolloutSpec, run_rollout
    from mopdctl.rollouts.verdicts import earned
    from mopdctl.store.store import Store

    prompts = read_prompts(workspace.root / "data" / "scored.jsonl", ("domain",))
    asked = tuple(prompt for prompt in prompts if prompt.routing["domain"] in domains)
    spec = RolloutSpec(
        f"scored.{model}", model, asked, max_new_tokens=128, temperature=0, batch_size=256, durability="off"
    )
    run_rollout(spec, workspace)
    found = {
        sample.prompt_id: earned(sample.reward, sample.verdict)
        for sample in Store(workspace.rollouts(spec.name)).scan()
    }
    rewards: dict[str, list[float]] = {domain: [] for domain in domains}
    for prompt in asked:
        reward = found[prompt.prompt_id]
        if reward is None:
            raise MopdctlError(f"{model}: the answer to {prompt.prompt_id} could not be checked; run it again")
        rewards[prompt.routing["domain"]].append(reward)
    write_json(scores_path(workspace, model), {d: pack(values) for d, values in rewards.items()})


def read_rewards(workspace: Workspace, model: str) -> dict[str, str] | None:
    """The packed rewards of a model by domain; None if it has not been scored."""
    path = scores_path(workspace, model)
    return dict(read_json(path)) if path.exists() else None


def pack(values: Sequence[float]) -> str:
    """Rewards as one short text."""
    return " ".join(f"{value:.4g}" for value in values)


def unpack(packed: dict[str, str]) -> Rewards:
    """Rewards by domain, shape [P] each."""
    return {domain: np.array(text.split(), np.float64) for domain, text in packed.items()}
