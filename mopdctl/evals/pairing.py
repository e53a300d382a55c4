"""Evaluations and the teachers that claim their benchmarks, as entries of the recovery table."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from mopdctl.errors import InputError
from mopdctl.evals.recovery import Entry, Figure, decimal_of
from mopdctl.evals.scores import Evaluation, has_scores, read_scores, score_key
from mopdctl.records import Score
from mopdctl.runs import Workspace, read_card

if TYPE_CHECKING:  # it loads numpy, which a table without documents does not need
    from mopdctl.evals.retention import Pair

_CLAIM = re.compile(r"(?P<task>.+)/(?P<metric>[^/,]+),(?P<filter>[^/,]+)")


@dataclass(frozen=True, slots=True)
class Claim:
    """What one teacher is responsible for."""

    teacher_id: str
    evaluation: str
    domains: tuple[str, ...]
    benchmarks: tuple[str, ...]
    """`task`, which means its first score, or `task/metric,filter`."""


def claims_from_card(workspace: Workspace, after: str) -> list[Claim]:
    """The teachers that the card of the checkpoint `after` names. Raises InputError if it names none."""
    path = workspace.checkpoint(after) / "card.json"
    teachers = read_card(workspace.checkpoint(after)).get("teachers")
    if not teachers:
        raise InputError(f"{path}: names no teachers; pass --teachers FILE, or --after a checkpoint made by distill")
    claims = []
    for alias, teacher in teachers.items() if isinstance(teachers, dict) else [("teachers", teachers)]:
        keys = teacher if isinstance(teacher, dict) else {}
        model, domains, benchmarks = (keys.get(name) for name in ("model", "domains", "benchmarks"))
        if not (isinstance(model, str) and isinstance(domains, list) and isinstance(benchmarks, list)):
            raise InputError(f"{path}: {alias} needs a model and lists of domains and benchmarks; pass --teachers FILE")
        name = keys.get("eval") or _evaluation_of(workspace, alias, model)
        claims.append(Claim(alias, str(name), tuple(map(str, domains)), tuple(map(str, benchmarks))))
    return claims


def claims_from_file(workspace: Workspace, path: Path) -> list[Claim]:
    """The teachers of a `teachers.yaml`."""
    from mopdctl.config.teachers import load_teachers

    return [
        Claim(alias, _evaluation_of(workspace, alias, t.model), tuple(t.domains), tuple(t.benchmarks))
        for alias, t in load_teachers(path).teachers.items()
    ]


def pair_evaluations(
    workspace: Workspace, *, before: str, after: str, teachers: Path | None = None, controls: Sequence[str] = ()
) -> tuple[list[Entry], list[str]]:
    """One entry per teacher and benchmark that it claims, and notes on what no teacher claims.

    The teachers are those of the file `teachers`, else those of the card of the checkpoint `after`. Raises InputError
    if an evaluation of `before`, `after` or a control is absent, or if there are no teachers. A teacher without an
    evaluation gives entries whose teacher figure is missing.
    """
    models = {name: read_scores(workspace.evaluation(name)) for name in dict.fromkeys([before, after, *controls])}
    claims = claims_from_file(workspace, teachers) if teachers else claims_from_card(workspace, after)
    entries, claimed = [], set()
    for claim in claims:
        folder = workspace.evaluation(claim.evaluation)
        teacher = read_scores(folder) if has_scores(folder) else None
        for benchmark in dict.fromkeys(claim.benchmarks or claim.domains):
            sides = [models[after], models[before], *([teacher] if teacher else [])]
            wanted = _wanted(benchmark, sides)
            claimed.add(wanted.task)
            absent = Figure(None, reason=f"no evaluation {claim.evaluation!r} in {workspace.root}")
            entries.append(
                Entry(
                    benchmark=benchmark,
                    before=_figure(models[before], wanted),
                    after=_figure(models[after], wanted),
                    teacher=_figure(teacher, wanted) if teacher else absent,
                    controls=tuple(_figure(models[name], wanted) for name in controls),
                    higher_is_better=wanted.higher_is_better,
                    domain=_domain(claim, wanted.task),
                    teacher_id=claim.teacher_id,
                    metric=f"{wanted.metric},{wanted.filter}" if wanted.metric else None,
                )
            )
    scored = dict.fromkeys(s.benchmark for name in (after, before) for s in models[name].scores)
    unclaimed = [name for name in scored if name not in claimed]
    return entries, [f"not claimed by a teacher: {', '.join(unclaimed)}"] if unclaimed else []


def pair_quantized(
    workspace: Workspace, *, full: str, quantized: Sequence[str], claimed: Sequence[str] = ()
) -> "list[Pair]":
    """For each quantized checkpoint one pair per benchmark of the evaluation `full`.

    The benchmarks of the recovery table (`claimed`, as its entries name them) come first; any other stands for its
    first score, so that what no teacher claims is seen too. Raises InputError if one of the evaluations is absent.
    """
    from mopdctl.evals.lengths import answer_lengths
    from mopdctl.evals.retention import Pair

    sides = {name: read_scores(workspace.evaluation(name)) for name in dict.fromkeys([full, *quantized])}
    asked = [_wanted(benchmark, [sides[full]]) for benchmark in claimed]
    tasks = {one.task for one in asked}
    others = dict.fromkeys(score.benchmark for score in sides[full].scores if score.benchmark not in tasks)
    asked += [_wanted(benchmark, [sides[full]]) for benchmark in others]
    pairs = []
    for one in {(one.task, one.metric, one.filter): one for one in asked}.values():
        lengths = {name: answer_lengths(workspace.evaluation(name), one.task, one.filter) for name in sides}
        pairs += [
            Pair(
                checkpoint=name,
                benchmark=one.task,
                metric=f"{one.metric},{one.filter}" if one.metric else None,
                full=_figure(sides[full], one),
                quantized=_figure(sides[name], one),
                higher_is_better=one.higher_is_better,
                full_lengths=lengths[full],
                quantized_lengths=lengths[name],
            )
            for name in dict.fromkeys(quantized)
        ]
    return sorted(pairs, key=lambda pair: list(sides).index(pair.checkpoint))


@dataclass(frozen=True, slots=True)
class _Wanted:
    task: str
    metric: str | None
    filter: str | None
    explicit: bool
    higher_is_better: bool


def _wanted(benchmark: str, sides: Sequence[Evaluation]) -> _Wanted:
    """Which score a claim means: the one it spells out, else the first of the task in the first side that has it."""
    named = any(side.find(benchmark) for side in sides)
    match = None if named else _CLAIM.fullmatch(benchmark)
    task, metric, filter_name = (match["task"], match["metric"], match["filter"]) if match else (benchmark, None, None)
    found = next((score for side in sides if (score := side.find(task, metric, filter_name))), None)
    if found is None:
        return _Wanted(task, metric, filter_name, match is not None, True)
    return _Wanted(task, found.metric, found.filter, match is not None, found.higher_is_better)


def _figure(evaluation: Evaluation, wanted: _Wanted) -> Figure:
    score = evaluation.find(wanted.task, wanted.metric, wanted.filter)
    if score is None and not wanted.explicit:
        score = evaluation.find(wanted.task)  # under another metric or filter, which the table shows as a mismatch
    if score is None:
        return Figure(None, reason=f"no score in evaluation {evaluation.name!r}")
    return figure_of(score, evaluation)


def figure_of(score: Score, evaluation: Evaluation) -> Figure:
    """A score with its samples, as the recovery table takes it."""
    return Figure(
        score=Decimal("NaN") if score.score is None else decimal_of(score.score),
        reason=score.reason,
        n=score.n,
        identity={
            **score.identity,
            "metric": score.metric,
            "filter": score.filter,
            "higher_is_better": score.higher_is_better,
        },
        samples=evaluation.samples.get(score_key(score)),
    )


def _evaluation_of(workspace: Workspace, alias: str, model: str) -> str:
    """The evaluation of a teacher is the one under its model's name if there is one, else under its alias."""
    try:
        named = has_scores(workspace.evaluation(model))
    except InputError:  # a path or a hub id, which names no evaluation
        named = False
    return model if named else alias


def _domain(claim: Claim, task: str) -> str | None:
    return task if task in claim.domains else ", ".join(claim.domains) or None
