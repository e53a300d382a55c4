"""The report of `mopdctl overlap` as one JSON document."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mopdctl.distill.overlap.advice import advise, how_to, overall
from mopdctl.distill.overlap.candidates import Candidate, rank
from mopdctl.distill.overlap.look import Seen
from mopdctl.distill.overlap.measures import IMPOSSIBLE, NGRAM
from mopdctl.distill.overlap.plan import OverlapSpec, Plan, Seat
from mopdctl.distill.overlap.zero import ZeroTest
from mopdctl.engines.adapters import Source
from mopdctl.runs import package_versions

SCHEMA = "mopdctl.overlap/1"


def to_document(
    spec: OverlapSpec,
    plan: Plan,
    found: Sequence[Seen],
    zero: ZeroTest,
    *,
    made_by: Mapping[str, str],
    digests: Mapping[Source, Any],
    new: int,
    no_merge: str,
) -> dict[str, Any]:
    """Everything that was found, with what it was found on.

    Args:
        spec: What was asked for.
        plan: Who was measured on what.
        found: Of the plan's teachers, then of its candidates.
        zero: The zero test.
        made_by: Digests of `student` and `prompts`.
        digests: Those of the models.
        new: Answers that were sampled for this report.
        no_merge: Why not to begin from a merge of them; empty if nothing speaks against it.
    """
    train = spec.config.train
    teachers = list(zip(plan.teachers, found, strict=False))
    advice = overall({seat.alias: advise(one.support) for seat, one in teachers})
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "name": spec.report_name,
        "student": {"model": spec.config.student, "digest": made_by["student"]},
        "prompts": {"file": str(spec.config.prompts) if spec.config.prompts else None, "digest": made_by["prompts"]},
        "rollouts": {"store": spec.store_name, "answers": len(plan.rows) * spec.samples, "new": new},
        "settings": {
            "samples": spec.samples,
            "limit": spec.limit,
            "top_k": spec.top_k,
            "impossible_below": IMPOSSIBLE,
            "repeated_ngram": NGRAM,
            "temperature": train.temperature,
            "max_new_tokens": train.max_new_tokens,
            "dtype": train.dtype,
            "seed": train.seed,
        },
        "zero_test": asdict(zero),
        "teachers": {seat.alias: _report(seat, one, digests) for seat, one in teachers},
        "not_measured": {
            alias: f"gives {teacher.gives}, no probabilities"
            for alias, teacher in sorted(spec.config.teachers.items())
            if teacher.is_black_box
        },
        "advice": asdict(advice) | {"how": how_to(advice.choice, no_merge)},
    }
    if plan.domain:
        theirs = found[len(plan.teachers) :]
        document["candidates"] = {"domain": plan.domain, **_ranking(plan.candidates, theirs, digests)}
    return document | {"versions": package_versions()}


def _report(seat: Seat, seen: Seen, digests: Mapping[Source, Any]) -> dict[str, Any]:
    """Everything about one teacher."""
    return {
        "model": seat.teacher.model,
        "kind": seat.teacher.kind,
        "domains": seat.teacher.domains,
        "digest": digests[seat.source],
        **_rounded(asdict(seen.measures)),
        "student": {**_rounded(asdict(seen.passed)), "greedy_score": _rounded(seen.student_score)},
        "teacher": {"greedy_score": _rounded(seen.teacher_score)},
        "advice": asdict(advise(seen.support)),
    }


def _ranking(seats: Sequence[Seat], found: Sequence[Seen], digests: Mapping[Source, Any]) -> dict[str, Any]:
    """The candidates in the order of their support."""
    pairs = list(zip(seats, found, strict=True))
    ranking = rank(
        [
            Candidate(seat.alias, one.support, one.measures.figures["kl_reverse_nats"].mean, one.teacher_score)
            for seat, one in pairs
        ]
    )
    pairs.sort(key=lambda pair: (ranking.support[pair[0].alias], pair[0].alias))
    return {
        "suggested": ranking.suggested,
        "reason": ranking.reason,
        "models": {
            seat.alias: {
                "support_rank": ranking.support[seat.alias],
                "score_rank": ranking.score[seat.alias],
                **_report(seat, one, digests),
            }
            for seat, one in pairs
        },
    }


def _rounded(value: Any) -> Any:
    """Figures to six decimals, which is more than they are good for."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value
