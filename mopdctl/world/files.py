"""What the quickstart writes into a workspace before it trains: the base model, data and configuration files."""

import io
from itertools import islice
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from mopdctl.files import write_jsonl, write_text
from mopdctl.runs import Workspace, building, checkpoint_digest, write_card
from mopdctl.world.data import distinct, generate, generate_mixture, generate_practice, prompt_row, sft_row
from mopdctl.world.domains import AGENT_DOMAIN, DOMAINS, SELF_DOMAIN, SPECIALIST_DOMAINS
from mopdctl.world.pretrain import BASE
from mopdctl.world.recipe import Recipe
from mopdctl.world.trajectories import trajectory_row

_DEV_SIZE = 100
_SHORT_TOKENS, _TURN_TOKENS, _ERRAND_TOKENS = 24, 64, 128
"""Longest answer in tokens: where answers are short, of any turn, of a whole conversation with an environment."""


def write_world(workspace: Workspace, recipe: Recipe, seed: int) -> None:
    """Writes checkpoint `base`, `data/*.jsonl` and `configs/*.yaml`. The same recipe and seed give the same bytes."""
    _install_base(workspace)
    for name, rows in _data(recipe, seed).items():
        write_jsonl(workspace.root / "data" / f"{name}.jsonl", rows)
    write_configs(workspace, recipe, seed)


def write_configs(workspace: Workspace, recipe: Recipe, seed: int) -> None:
    """Writes `configs/*.yaml` alone."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    for name, document in _configs(recipe, seed).items():
        text = io.StringIO()
        yaml.dump(document, text)
        write_text(config_path(workspace, name), text.getvalue())


def _install_base(workspace: Workspace) -> None:
    target = workspace.checkpoint("base")
    if (target / "card.json").exists():
        return
    with building(target) as temporary:
        for file in sorted(BASE.iterdir()):
            (temporary / file.name).write_bytes(file.read_bytes())
        card = {
            "name": "base",
            "algorithm": "pretraining",
            "parent": None,
            "made_by": "python -m mopdctl.world.pretrain",
        }
        write_card(temporary, card | {"digest": checkpoint_digest(temporary)})


def _data(recipe: Recipe, seed: int) -> dict[str, list[dict[str, Any]]]:
    def interleaved(weights: dict[str, int], count: int, streams: dict[str, Any], row: Any) -> list[dict[str, Any]]:
        unit = [domain for domain in DOMAINS for _ in range(weights[domain])]
        return [row(next(streams[unit[i % len(unit)]]), f"{unit[i % len(unit)]}/{i}") for i in range(count)]

    mopd_steps = recipe.mopd1_steps + recipe.mopd2_steps
    mixture = {domain: generate_mixture(domain, seed=seed) for domain in DOMAINS}
    prompts = {domain: generate(domain, "train", seed=f"prompts/{seed}") for domain in DOMAINS}
    found = {
        "mixture": interleaved(
            recipe.mixture_weights, (recipe.student_steps + mopd_steps) * recipe.student_batch, mixture, sft_row
        ),
        "prompts": interleaved(recipe.prompt_weights, mopd_steps * recipe.mopd_batch, prompts, prompt_row),
        "dev": [
            prompt_row(example, f"{domain}/dev/{i}")
            for domain in DOMAINS
            for i, example in enumerate(distinct(generate(domain, "dev", seed="dev"), _DEV_SIZE))
        ],
    }
    for domain in SPECIALIST_DOMAINS:
        steps = recipe.specialist_steps[domain] + recipe.refork_steps.get(domain, 0)
        rows = islice(generate(domain, "train", seed=f"specialist/{seed}"), steps * recipe.specialist_batch)
        found[domain] = [sft_row(example, f"{domain}/{i}") for i, example in enumerate(rows)]
    for domain in recipe.rlvr_weights:
        rows = islice(generate_practice(domain, seed=seed), recipe.rlvr_steps * recipe.rlvr_groups)
        found[f"rl-{domain}"] = [prompt_row(example, f"{domain}/{i}") for i, example in enumerate(rows)]
    errands = distinct(generate(AGENT_DOMAIN, "train", seed=f"trajectories/{seed}"), recipe.trajectories)
    found["trajectories"] = [trajectory_row(example, f"errand-{i}") for i, example in enumerate(errands)]
    return found


def _configs(recipe: Recipe, seed: int) -> dict[str, dict[str, Any]]:
    steps1, steps2 = recipe.mopd1_steps, recipe.mopd2_steps
    found = {
        "student": _sft("student", "base", "mixture", recipe.student_steps, recipe, recipe.student_batch, seed),
        "rlvr": _rlvr(recipe, seed),
        AGENT_DOMAIN: _agent(recipe, seed),
        "sft-more": _sft("sft-more", "rlvr", "mixture", steps1 + steps2, recipe, recipe.student_batch, seed + 1),
    }
    for domain in SPECIALIST_DOMAINS:
        steps = recipe.specialist_steps[domain]
        found[domain] = _sft(domain, "rlvr", domain, steps, recipe, recipe.specialist_batch, seed)
    for domain in recipe.refork:
        steps, name = recipe.refork_steps[domain], f"{domain}-2"
        found[name] = _sft(name, "mopd1", domain, steps, recipe, recipe.specialist_batch, seed + 1)
    first = {domain: domain for domain in (*SPECIALIST_DOMAINS, AGENT_DOMAIN)}
    second = first | {domain: f"{domain}-2" for domain in recipe.refork}
    found["mopd1"] = _mopd("mopd1", "rlvr", first, steps1, recipe.warm_start, recipe, seed)
    found["mopd2"] = _mopd("mopd2", "mopd1", second, steps2, "none", recipe, seed + 1)
    # The merge control starts from `rlvr`, as recovery does, with the teachers that mopd2 learned from.
    found["merge"] = _mopd("merge", "rlvr", second, steps2, "none", recipe, seed)
    return found


def _rlvr(recipe: Recipe, seed: int) -> dict[str, Any]:
    environments = {
        domain: {
            "prompts": f"../data/rl-{domain}.jsonl",
            "weight": weight,
            "max_new_tokens": _SHORT_TOKENS,
        }
        for domain, weight in recipe.rlvr_weights.items()
    }
    train = _grpo(recipe.rlvr_steps, recipe.rlvr_groups, recipe.rlvr_rate, recipe, seed)
    return {"name": "rlvr", "model": "student", "environments": environments, "train": train}


def _agent(recipe: Recipe, seed: int) -> dict[str, Any]:
    """PivotRL: single turns at which `rlvr` sometimes fails."""
    train = _grpo(recipe.agent_steps, recipe.agent_groups, recipe.agent_rate, recipe, seed)
    pivots = {"prompts": f"../data/{AGENT_DOMAIN}-pivots.jsonl", "max_new_tokens": _TURN_TOKENS}
    return {"name": AGENT_DOMAIN, "model": "rlvr", "environments": {AGENT_DOMAIN: pivots}, "train": train}


def _grpo(steps: int, groups: int, rate: float, recipe: Recipe, seed: int) -> dict[str, Any]:
    return _train(steps, groups, rate, seed) | {"group_size": recipe.group_size, "gradient_accumulation": 2}


def _train(steps: int, batch: int, rate: float, seed: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "batch_size": batch,
        "learning_rate": rate,
        "optimizer": "muon",
        "schedule": "cosine",
        "warmup_steps": 5,
        "gradient_accumulation": 4,
        "checkpoint_every": 25,
        "seed": seed,
    }


def _sft(name: str, model: str, data: str, steps: int, recipe: Recipe, batch: int, seed: int) -> dict[str, Any]:
    rate = recipe.student_rate if data == "mixture" else recipe.specialist_rate[data]
    return {"name": name, "model": model, "data": [f"../data/{data}.jsonl"], "train": _train(steps, batch, rate, seed)}


def _mopd(
    name: str, student: str, teachers: dict[str, str], steps: int, warm_start: str, recipe: Recipe, seed: int
) -> dict[str, Any]:
    train = _train(steps, recipe.mopd_batch, recipe.mopd_rate, seed) | {
        "max_new_tokens": _ERRAND_TOKENS,
        "objective": recipe.objective,
        "loss_reduction": recipe.loss_reduction,
        "warm_start": warm_start,
        "warm_start_scale": recipe.warm_start_scale,
        "gradient_accumulation": 1,
    }
    if recipe.objective == "sampled":
        train["advantage_clip"] = 5.0
    aliases = {
        domain: {
            "model": model,
            "kind": "rl" if domain == AGENT_DOMAIN else "sft",
            "domains": [domain],
            "benchmarks": [domain],
        }
        for domain, model in teachers.items()
    }
    aliases["self"] = {"model": "rlvr", "kind": "self", "domains": [SELF_DOMAIN], "benchmarks": [SELF_DOMAIN]}
    return {"name": name, "student": student, "prompts": "../data/prompts.jsonl", "train": train, "teachers": aliases}


def config_path(workspace: Workspace, name: str) -> Path:
    """Where the configuration of stage `name` lies."""
    return workspace.root / "configs" / f"{name}.yaml"
