"""From what lies in the workspaces to one JSON document: raw rewards, measures and curves, and the figures of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mopdctl.distill.overlap.run import report_path
from mopdctl.files import read_json
from mopdctl.runs import Workspace, package_versions, read_metrics
from mopdctl.world.domains import DOMAINS
from mopdctl.world.family.plan import ADVISED, ARMS, BASE, SETTINGS, Scale, arms_of
from mopdctl.world.family.pool import mark_path
from mopdctl.world.family.scores import Rewards, read_rewards, unpack
from mopdctl.world.family.table import Recovery, over_seeds, recover, regret

SCHEMA = "mopdctl.family/1"
_REACHED = (50, 80, 90, 100)
"""Percents of the teachers' lead for which the step is told at which a student first had it."""


def collect(workspace: Workspace, scale: Scale, seed: int, settings: Sequence[str], arms: Sequence[str]) -> Any:
    """What one seed has so far: raw, nothing computed but from its own files."""
    names = {SETTINGS[s].student for s in settings} | {m for s in settings for m in SETTINGS[s].teachers.values()}
    names |= {f"{s}.{arm}" for s in settings for arm in arms_of(s, tuple(arms))}
    rewards = {name: found for name in sorted(names) if (found := read_rewards(workspace, name)) is not None}
    overlap = {}
    for setting in settings:
        path = report_path(workspace, setting)
        if path.exists():
            report = read_json(path)
            kept = ("prompts", "answers", "tokens", "figures", "by_prefix", "student", "teacher", "advice")
            overlap[setting] = {
                "teachers": {
                    alias: {key: one[key] for key in kept} | {"kind": one["kind"]}
                    for alias, one in report["teachers"].items()
                },
                "advice": report["advice"],
                "zero_test": report["zero_test"],
            }
    curves = {}
    for arm in arms_of(BASE, tuple(arms)) if BASE in settings else ():
        run = workspace.run(f"{BASE}.{arm}")
        if ARMS[arm].watched and (run / "metrics.jsonl").exists():
            # A warm-up comes before the first step of the loop and counts as steps.
            ahead = round(ARMS[arm].warm_up * scale.recipe.mopd1_steps)
            rows = [row for row in read_metrics(run) if "held_out/score" in row]
            curves[arm] = {str(ahead + row["step"] + 1): row["held_out/score"] for row in rows}
    marks = {}
    for name in names:
        if (path := mark_path(workspace, name)).exists():
            marks[name] = read_json(path)["seconds"]
    return {
        "seed": seed,
        "rewards": rewards,
        "overlap": overlap,
        "curves": curves,
        "seconds": dict(sorted(marks.items())),
    }


def to_document(
    scale: Scale,
    seeds: Sequence[Any],
    settings: Sequence[str],
    arms: Sequence[str],
    *,
    pending: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The whole document; `seeds` are what `collect` found. Figures are null where something is not there yet."""
    base = SETTINGS[BASE]
    return {
        "schema": SCHEMA,
        "scale": asdict(scale) | {"recipe": scale.recipe.model_dump(mode="json")},
        "settings": {name: asdict(SETTINGS[name]) for name in settings},
        "arms": {name: asdict(ARMS[name]) for name in arms},
        "summary": {
            "arms": summarize_arms(seeds, arms) if BASE in settings else {},
            "steps_to_teacher": steps_to_teacher(seeds, base.student, base.teachers, scale.eval_prompts),
            "advice": {name: summarize_advice(seeds, name) for name in settings},
        },
        "seeds": list(seeds),
        "pending": list(pending),
        "failed": dict(failed or {}),
        "versions": package_versions(),
    }


def recoveries(seed: Any, setting: str, arms: Sequence[str]) -> dict[str, Recovery]:
    """The recovery of each arm of a setting that has been scored, the student itself under `none`.

    Empty where student or teachers have not been scored, or no teacher leads.
    """
    rewards, where = seed["rewards"], SETTINGS[setting]
    if where.student not in rewards or not rewards.keys() >= set(where.teachers.values()):
        return {}
    before = unpack(rewards[where.student])
    teacher = _teacher(rewards, where.teachers)
    found = {}
    for arm, model in {"none": where.student, **{arm: f"{setting}.{arm}" for arm in arms}}.items():
        if model in rewards and (one := recover(before, teacher, unpack(rewards[model]))) is not None:
            found[arm] = one
    return found


def summarize_arms(seeds: Sequence[Any], arms: Sequence[str]) -> dict[str, Any]:
    """Recovery, scores and seconds of each arm of the base setting, over the seeds that have it.

    The recovery is null where no teacher leads or one has not been scored.
    """
    by_seed = [recoveries(seed, BASE, arms) for seed in seeds]
    found: dict[str, Any] = {}
    for arm in ("none", *arms):
        model = SETTINGS[BASE].student if arm == "none" else f"{BASE}.{arm}"
        there = [one[arm] for one in by_seed if arm in one]
        having = [seed for seed in seeds if model in seed["rewards"]]
        if not having:
            found[arm] = None
            continue
        scores = [{d: 100 * float(r.mean()) for d, r in unpack(seed["rewards"][model]).items()} for seed in having]
        seconds = [seed["seconds"][model] for seed in having if model in seed["seconds"]]
        found[arm] = {
            "seeds": [seed["seed"] for seed in having],
            "recovery": _rounded(asdict(over_seeds(there))) if there else None,
            "recovery_by_seed_pct": [round(one.pct, 2) for one in there],
            "scores": {d: round(float(np.mean([one[d] for one in scores])), 2) for d in DOMAINS},
            "seconds": round(float(np.mean(seconds)), 1) if seconds and arm != "none" else None,
        }
    return found


def summarize_advice(seeds: Sequence[Any], setting: str) -> dict[str, Any] | None:
    """What was advised in a setting, what each arm recovered, and whether the advice was right; None if incomplete."""
    arms, cells = list(ADVISED.values()), []
    for seed in seeds:
        found = recoveries(seed, setting, arms)
        if setting in seed["overlap"] and found.keys() >= set(arms):
            cells.append((seed, {arm: found[arm] for arm in arms}))
    if not cells:
        return None
    choices = [seed["overlap"][setting]["advice"]["choice"] for seed, _ in cells]
    by_seed = [found for _, found in cells]
    told = regret(by_seed, [ADVISED[choice] for choice in choices])
    return {
        "seeds": [seed["seed"] for seed, _ in cells],
        "advised": [ADVISED[choice] for choice in choices],
        "recovery": {arm: _rounded(asdict(over_seeds([found[arm] for found in by_seed]))) for arm in arms},
        "best": told.best,
        "regret": _rounded(asdict(told.difference)),
        "right": told.right,
    }


def steps_to_teacher(
    seeds: Sequence[Any], student: str, teachers: Mapping[str, str], size: int
) -> dict[str, dict[str, list[int | None]]]:
    """Arm to percent of the teachers' lead to the step, per seed, at which the held-out scores first had so much of it.

    Student and teachers count on the same prompts, the first `size` of each domain; None where it never came so far.
    """
    found: dict[str, dict[str, list[int | None]]] = {}
    for seed in seeds:
        rewards = seed["rewards"]
        if student not in rewards or not rewards.keys() >= set(teachers.values()):
            continue
        before = {d: 100 * float(r[:size].mean()) for d, r in unpack(rewards[student]).items()}
        lead = {d: 100 * float(r[:size].mean()) - before[d] for d, r in _teacher(rewards, teachers).items()}
        lead = {domain: gap for domain, gap in lead.items() if gap > 0}
        if not lead:
            continue
        for arm, curve in seed["curves"].items():
            reached = {
                int(step): 100 * sum(scores[d] - before[d] for d in lead) / sum(lead.values())
                for step, scores in curve.items()
            }
            for share in _REACHED:
                step = min((step for step, pct in reached.items() if pct >= share), default=None)
                found.setdefault(arm, {}).setdefault(str(share), []).append(step)
    return found


def _teacher(rewards: Mapping[str, dict[str, str]], teachers: Mapping[str, str]) -> Rewards:
    return {domain: unpack(rewards[model])[domain] for domain, model in teachers.items()}


def _rounded(figure: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value is None else round(value, 2) for key, value in figure.items()}
