"""Thresholds of `mopdctl overlap`'s advice, searched on some seeds and judged on the others."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from mopdctl.distill.overlap import advice
from mopdctl.errors import InputError
from mopdctl.world.family.document import recoveries
from mopdctl.world.family.plan import ADVISED, SETTINGS
from mopdctl.world.family.table import Recovery, regret

_VALUES = 9
"""Candidates of each threshold beside the present one: midpoints between what was measured, evenly chosen."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Those of `distill.overlap.advice`, under its names."""

    warm_up_below_mass: float = advice.WARM_UP_BELOW_MASS
    warm_up_below_overlap: float = advice.WARM_UP_BELOW_OVERLAP
    warm_up_from_impossible: float = advice.WARM_UP_FROM_IMPOSSIBLE
    exact_from_mass: float = advice.EXACT_FROM_MASS
    exact_from_overlap: float = advice.EXACT_FROM_OVERLAP


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting at one seed: the least support of any teacher, and what each arm recovered."""

    setting: str
    seed: int
    mass: float
    overlap: float
    impossible: float
    """The largest of any teacher."""
    recovered: Mapping[str, Recovery]


def arm_for(cell: Cell, thresholds: Thresholds) -> str:
    """The arm that the rule advises overall: the most careful advice of any teacher decides.

    It is `overall` of `advise` per teacher, written for the least support: a teacher outside asks for a warm-up, and
    exact is advised where all teachers allow it.
    """
    t = thresholds
    if (
        cell.mass < t.warm_up_below_mass
        or cell.overlap < t.warm_up_below_overlap
        or cell.impossible >= t.warm_up_from_impossible
    ):
        return ADVISED["warm-up first"]
    inside = cell.mass >= t.exact_from_mass and cell.overlap >= t.exact_from_overlap
    return ADVISED["exact" if inside else "sampled"]


def cells_of(documents: Sequence[Any]) -> list[Cell]:
    """All settings and seeds whose three arms have been scored, of one or several documents."""
    found: dict[tuple[str, int], Cell] = {}
    for document in documents:
        for seed in document["seeds"]:
            for setting, report in seed["overlap"].items():
                arms = recoveries(seed, setting, list(ADVISED.values())) if setting in SETTINGS else {}
                if arms.keys() >= set(ADVISED.values()):
                    figures = [one["figures"] for one in report["teachers"].values()]
                    means = {name: [one[name]["mean"] for one in figures] for name in figures[0]}
                    found[setting, seed["seed"]] = Cell(
                        setting,
                        seed["seed"],
                        min(means["student_mass"]),
                        min(means["top_k_overlap"]),
                        max(means["impossible_share"]),
                        {arm: arms[arm] for arm in ADVISED.values()},
                    )
    return list(found.values())


def judge(cells: Sequence[Cell], arms: Sequence[str]) -> dict[str, Any]:
    """How often the given arms (one per cell) are right, by setting over its seeds, and what they lose on average."""
    by_setting: dict[str, list[int]] = {}
    for i, cell in enumerate(cells):
        by_setting.setdefault(cell.setting, []).append(i)
    told = {
        setting: regret([cells[i].recovered for i in rows], [arms[i] for i in rows])
        for setting, rows in by_setting.items()
    }
    return {
        "right": sum(one.right for one in told.values()),
        "of": len(told),
        "mean_regret_pct": round(float(np.mean([one.difference.pct for one in told.values()])), 3),
        "wrong": sorted(setting for setting, one in told.items() if not one.right),
    }


def fit(documents: Sequence[Any], fit_seeds: Sequence[int]) -> dict[str, Any]:
    """The thresholds that are right most often on `fit_seeds`, then lose least, and how they do on the other seeds.

    Beside them stand the present thresholds and the three rules that always say the same. Raises InputError if one of
    the two groups of seeds has no complete cell.
    """
    cells = cells_of(documents)
    groups = {
        "fit": [cell for cell in cells if cell.seed in fit_seeds],
        "test": [cell for cell in cells if cell.seed not in fit_seeds],
    }
    for name, group in groups.items():
        if not group:
            seeds = sorted({cell.seed for cell in cells})
            raise InputError(f"--fit-seeds: no complete setting to {name} on; the documents have seeds {seeds}")
    present = Thresholds()
    best = min(_candidates(groups["fit"]), key=lambda t: _loss(groups["fit"], t, present))

    def judged(arm: Any) -> dict[str, Any]:
        return {name: judge(group, [arm(cell) for cell in group]) for name, group in groups.items()}

    return {
        "schema": "mopdctl.family-fit/1",
        "fit_seeds": sorted({cell.seed for cell in groups["fit"]}),
        "test_seeds": sorted({cell.seed for cell in groups["test"]}),
        "fitted": {"thresholds": asdict(best)} | judged(lambda cell: arm_for(cell, best)),
        "present": {"thresholds": asdict(present)} | judged(lambda cell: arm_for(cell, present)),
        "always": {arm: judged(lambda cell, arm=arm: arm) for arm in ADVISED.values()},
        "cells": [
            {
                "setting": cell.setting,
                "seed": cell.seed,
                "least_student_mass": cell.mass,
                "least_top_k_overlap": cell.overlap,
                "largest_impossible_share": cell.impossible,
                "recovery_pct": {arm: round(one.pct, 2) for arm, one in cell.recovered.items()},
                "fitted": arm_for(cell, best),
            }
            for cell in sorted(cells, key=lambda cell: (cell.setting, cell.seed))
        ],
    }


def _candidates(cells: Sequence[Cell]) -> list[Thresholds]:
    """One candidate for each way in which thresholds can divide the cells; those that say the same count once."""
    present = Thresholds()
    mass, overlap, impossible = ([getattr(cell, name) for cell in cells] for name in ("mass", "overlap", "impossible"))
    seen: dict[tuple[str, ...], Thresholds] = {}
    for a, b, c in product(
        _values(mass, present.warm_up_below_mass),
        _values(overlap, present.warm_up_below_overlap),
        _values(impossible, present.warm_up_from_impossible),
    ):
        for d, e in product(_values(mass, present.exact_from_mass), _values(overlap, present.exact_from_overlap)):
            if d >= a and e >= b:
                candidate = Thresholds(a, b, c, d, e)
                key = tuple(arm_for(cell, candidate) for cell in cells)
                if key not in seen or _distance(candidate, present) < _distance(seen[key], present):
                    seen[key] = candidate
    return list(seen.values())


def _values(measured: Sequence[float], present: float) -> list[float]:
    """Midpoints between neighbours, beyond both ends too, and the present threshold."""
    there = np.unique(measured)
    middles = np.concatenate([[there[0] / 2], (there[1:] + there[:-1]) / 2, [(there[-1] + 1) / 2]])
    picked = middles[np.unique(np.linspace(0, len(middles) - 1, _VALUES).round().astype(int))]
    return sorted({present, *(round(float(value), 4) for value in picked)})


def _loss(cells: Sequence[Cell], thresholds: Thresholds, present: Thresholds) -> tuple[float, ...]:
    found = judge(cells, [arm_for(cell, thresholds) for cell in cells])
    return (-found["right"], found["mean_regret_pct"], _distance(thresholds, present))


def _distance(one: Thresholds, other: Thresholds) -> float:
    mine, theirs = asdict(one), asdict(other)
    return sum(abs(mine[name] - theirs[name]) for name in mine)
