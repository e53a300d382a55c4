"""The stages of the experiment for one seed: every model, its scores, and the overlap of each setting."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mopdctl.config.rl import RlConfig
from mopdctl.config.sft import SftConfig
from mopdctl.files import write_jsonl
from mopdctl.runs import Workspace
from mopdctl.world.data import distinct, generate, prompt_row, sft_row
from mopdctl.world.domains import AGENT_DOMAIN, DOMAINS, SPECIALIST_DOMAINS
from mopdctl.world.family.config import agent_of, grpo_of, read_config, sft_of, teachers_of
from mopdctl.world.family.plan import ARMS, BASE, SETTINGS, TAUGHT, Scale, arms_of
from mopdctl.world.family.scores import score_model
from mopdctl.world.files import config_path, write_world

_SEARCHED = 100
"""Dev prompts that `data/dev.jsonl` has of each domain; those that are scored come after them."""
_OUTSIDE_STEPS = {"arithmetic": 300, "instructions": 150, "structured": 150, "tools": 120, AGENT_DOMAIN: 150}
"""From the base model it takes more steps, at the student's rate, to become as good as a fork."""
_OUTSIDE_ROWS = 4096
_UNDER, _OVER = 1 / 3, 2.0
_GRPO_PASSES = 3
"""Prompts for GRPO, in multiples of what it uses in as many steps as MOPD has."""
WORLD = "world"


@dataclass(frozen=True, slots=True)
class Stage:
    """One process's work. What it makes is a function of `document` and of the stages that it needs."""

    name: str
    needs: tuple[str, ...]
    cost_s: float
    """About how long it takes on one core, so that long chains begin early."""
    document: dict[str, Any]
    """What decides it."""
    run: Callable[[], object]


def build_stages(
    workspace: Workspace, scale: Scale, seed: int, settings: tuple[str, ...], arms: tuple[str, ...]
) -> list[Stage]:
    """All stages of the wanted settings and arms, and no other. Configuration files must be there (`write_configs`)."""
    every = {stage.name: stage for stage in _all_stages(workspace, scale, seed, settings, arms)}
    wanted: dict[str, Stage] = {}

    def want(name: str) -> None:
        if name not in wanted:
            for needed in every[name].needs:
                want(needed)
            wanted[name] = every[name]

    for setting in settings:
        want(f"overlap {setting}")
        want(f"score {SETTINGS[setting].student}")
        for model in SETTINGS[setting].teachers.values():
            want(f"score {model}")
        for arm in arms_of(setting, arms):
            want(f"score {setting}.{arm}")
    return list(wanted.values())


def _all_stages(
    workspace: Workspace, scale: Scale, seed: int, settings: tuple[str, ...], arms: tuple[str, ...]
) -> list[Stage]:
    recipe = scale.recipe
    world = {"recipe": recipe.model_dump(mode="json"), "seed": seed, "scored_prompts": scale.scored_prompts}
    found = [Stage(WORLD, (), 20, world, partial(_write_world, workspace, scale, seed))]
    sft, rl = partial(_sft, workspace), partial(_rl, workspace)
    found.append(sft("student", "base", "student", recipe.student_steps))
    found.append(sft("weak", "base", "student", max(1, recipe.student_steps // 3)))
    found += [rl("rlvr", "student"), rl("weak-rlvr", "weak")]
    for start in ("rlvr", "student", "weak", "weak-rlvr"):
        found.append(_pivots(workspace, scale, start))
        found.append(_agent(workspace, start, start, 1.0))
        found += [sft(f"{start}-{d}", start, d, recipe.specialist_steps[d]) for d in SPECIALIST_DOMAINS]
    for name, factor in (("under", _UNDER), ("over", _OVER)):
        found.append(_agent(workspace, name, BASE, factor))
        for domain in SPECIALIST_DOMAINS:
            steps = max(1, round(factor * recipe.specialist_steps[domain]))
            found.append(sft(f"{name}-{domain}", BASE, domain, steps))
    for domain, steps in recipe.refork_steps.items():
        found.append(sft(f"mopd1-{domain}", f"{BASE}.exact", domain, steps))
    factor = recipe.specialist_steps["arithmetic"] / 200
    for domain, steps in _OUTSIDE_STEPS.items():
        outside = {"rate": recipe.student_rate / 2, "data": f"outside-{domain}", "seed": seed + 1000}
        found.append(sft(f"outside-{domain}", "base", "student", max(1, round(factor * steps)), **outside))
    for setting in settings if "mopd1" not in settings else dict.fromkeys((*settings, BASE)):
        found.append(_overlap(workspace, scale, setting))
        found += [_arm(workspace, scale, setting, arm) for arm in sorted({*arms_of(setting, arms), "exact"})]
    scored = {stage.name for stage in found if stage.name in _models(settings, arms)}
    found += [_score(workspace, scale, name) for name in sorted(scored)]
    return found


def _models(settings: tuple[str, ...], arms: tuple[str, ...]) -> set[str]:
    found = set()
    for name in settings:
        found |= {SETTINGS[name].student, *SETTINGS[name].teachers.values()}
        found |= {f"{name}.{arm}" for arm in arms_of(name, arms)}
    return found


def _write_world(workspace: Workspace, scale: Scale, seed: int) -> None:
    """The files of the quickstart, prompts to score on, prompts by domain for GRPO, and data of outside teachers."""
    write_world(workspace, scale.recipe, seed)
    data, recipe = workspace.root / "data", scale.recipe
    rows: list[dict[str, Any]] = []
    for domain in DOMAINS:
        examples = distinct(generate(domain, "dev", seed="dev"), _SEARCHED + scale.scored_prompts)
        rows += [prompt_row(example, f"{domain}/dev/{i}") for i, example in enumerate(examples) if i >= _SEARCHED]
    write_jsonl(data / "scored.jsonl", rows)
    for domain in DOMAINS:
        stream = generate(domain, "train", seed=f"prompts/{seed}")
        share = recipe.prompt_weights[domain] / sum(recipe.prompt_weights.values())
        count = math.ceil(share * _GRPO_PASSES * recipe.mopd_batch // recipe.group_size * recipe.mopd1_steps)
        write_jsonl(data / f"prompts-{domain}.jsonl", [prompt_row(next(stream), f"{domain}/{i}") for i in range(count)])
    for domain in TAUGHT:
        stream = generate(domain, "train", seed=f"outside/{seed}")
        count = min(_OUTSIDE_ROWS, _OUTSIDE_STEPS[domain] * recipe.specialist_batch)
        write_jsonl(data / f"outside-{domain}.jsonl", [sft_row(next(stream), f"{domain}/{i}") for i in range(count)])


def _base(workspace: Workspace) -> Path:
    """The folder that paths of configurations are relative to."""
    return config_path(workspace, "student").parent


def _sft(workspace: Workspace, name: str, model: str, like: str, steps: int, **changes: Any) -> Stage:
    config = sft_of(read_config(SftConfig, workspace, like), name, model, steps, **changes)

    def run() -> None:
        from mopdctl.train.sft import run_sft

        run_sft(config, workspace, base=_base(workspace))

    needs = (WORLD,) if model == "base" else (model,)
    return Stage(name, needs, 0.35 * steps, config.model_dump(mode="json"), run)


def _rl(workspace: Workspace, name: str, model: str) -> Stage:
    config = read_config(RlConfig, workspace, "rlvr").model_copy(update={"name": name, "model": model})
    return _rl_stage(workspace, config, (model,), 4.0)


def _rl_stage(workspace: Workspace, config: RlConfig, needs: tuple[str, ...], step_s: float) -> Stage:
    def run() -> None:
        from mopdctl.rl.run import run_rl

        run_rl(config, workspace, base=_base(workspace))

    return Stage(config.name, needs, step_s * config.train.steps, config.model_dump(mode="json"), run)


def _pivots(workspace: Workspace, scale: Scale, model: str) -> Stage:
    """The turns at which a model sometimes fails, as in the quickstart."""
    name, data = f"pivots-{model}", workspace.root / "data"

    def run() -> None:
        from mopdctl.pivots.collect import collect
        from mopdctl.pivots.export import ExportSpec, export
        from mopdctl.pivots.profile import ProfileSpec, run_profile
        from mopdctl.pivots.selection import run_select

        collect([data / "trajectories.jsonl"], workspace, name, match={"content": "exact"})
        run_profile(ProfileSpec(name, model, max_new_tokens=64, batch_size=256), workspace)
        run_select(name, workspace, lambda_diff=scale.recipe.lambda_diff)
        export(name, workspace, data / f"{name}.jsonl", ExportSpec("rl"))

    document = {"model": model, "lambda_diff": scale.recipe.lambda_diff}
    return Stage(f"pivots {model}", (model,), 40, document, run)


def _agent(workspace: Workspace, name: str, start: str, factor: float) -> Stage:
    config = agent_of(
        read_config(RlConfig, workspace, AGENT_DOMAIN),
        f"{name}-{AGENT_DOMAIN}",
        start,
        f"../data/pivots-{start}.jsonl",
        factor,
    )
    return _rl_stage(workspace, config, (f"pivots {start}",), 3.0)


def _overlap(workspace: Workspace, scale: Scale, setting: str) -> Stage:
    config = teachers_of(workspace, scale, setting, "exact")

    def run() -> None:
        from mopdctl.distill.overlap.plan import OverlapSpec
        from mopdctl.distill.overlap.run import run_overlap

        spec = OverlapSpec(
            config, _base(workspace), name=setting, samples=scale.overlap_samples, limit=scale.overlap_prompts
        )
        run_overlap(spec, workspace)

    document = config.model_dump(mode="json") | {"samples": scale.overlap_samples, "limit": scale.overlap_prompts}
    return Stage(f"overlap {setting}", _inputs(setting), 40, document, run)


def _inputs(setting: str) -> tuple[str, ...]:
    return tuple(sorted({SETTINGS[setting].student, *SETTINGS[setting].teachers.values()}))


def _arm(workspace: Workspace, scale: Scale, setting: str, name: str) -> Stage:
    kind, base = ARMS[name].kind, _base(workspace)
    if kind == "grpo":
        rl = grpo_of(workspace, scale, setting, name)
        return _rl_stage(workspace, rl, (SETTINGS[setting].student,), 1.2)
    config = teachers_of(workspace, scale, setting, name)

    def run() -> None:
        if kind == "mopd":
            from mopdctl.distill.run import run_distill

            run_distill(config, workspace, base=base)
        elif kind == "seqkd":
            from mopdctl.config.warmup import TeacherAnswers
            from mopdctl.distill.warmup import run_seqkd

            run_seqkd(config, workspace, base=base, answers=TeacherAnswers(wrong=scale.wrong_answers))
        else:
            from mopdctl.config.merge import MergeConfig
            from mopdctl.distill.merging.run import merge_teachers

            how = MergeConfig(method=kind, search=True)
            merge_teachers(config, how, workspace, base=base, name=config.name)

    cost = 200.0 if kind not in ("mopd", "seqkd") else 1.3 * config.train.steps
    document = config.model_dump(mode="json") | {"kind": kind, "wrong_answers": scale.wrong_answers}
    return Stage(config.name, _inputs(setting), cost, document, run)


def _score(workspace: Workspace, scale: Scale, model: str) -> Stage:
    """Teachers answer the prompts of their own domain, students those of every domain."""
    own = [d for d in TAUGHT if any(setting.teachers.get(d) == model for setting in SETTINGS.values())]
    domains = own or list(DOMAINS)
    document = {"model": model, "domains": domains, "prompts": scale.scored_prompts}
    run = partial(score_model, workspace, model, domains)
    return Stage(f"score {model}", (model,), 4 * len(domains), document, run)
