"""Which of several models should teach a domain: ranked by support and by standalone score, which need not agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mopdctl.config.base import load_config
from mopdctl.config.overlap import CandidatesFile
from mopdctl.config.teachers import Teacher, TeachersFile
from mopdctl.distill.overlap.advice import WARM_UP_BELOW_MASS, Support
from mopdctl.errors import InputError


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one candidate on the domain's prompts."""

    alias: str
    support: Support
    kl_reverse_nats: float
    """KL(student || candidate), mean over the student's tokens."""
    score: float | None
    """Of its own greedy answers, on 0-100; None where nobody checks them."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Places from 1 on; equals share one. `score` is None where a candidate has no score."""

    support: dict[str, int]
    score: dict[str, int | None]
    suggested: str
    reason: str


def rank(candidates: Sequence[Candidate]) -> Ranking:
    """Ranks by support and by score, and suggests the best model of those inside whose support the student writes.

    Support is the student's mass inside the candidate's top-k, in whole percents, then the exact KL: the mass says
    whether the candidate can judge the student's text at all, the KL how much it would change.
    """
    by_support = {c.alias: (-round(100 * c.support.student_mass), c.kl_reverse_nats) for c in candidates}
    by_score = {c.alias: -c.score for c in candidates if c.score is not None}
    support = {alias: 1 + sum(other < key for other in by_support.values()) for alias, key in by_support.items()}
    score = {
        c.alias: None if c.score is None else 1 + sum(other < -c.score for other in by_score.values())
        for c in candidates
    }
    inside = [c for c in candidates if c.support.student_mass >= WARM_UP_BELOW_MASS]
    limit = f"{100 * WARM_UP_BELOW_MASS:g} % of student mass"
    if not inside:
        best = min(candidates, key=lambda c: by_support[c.alias])
        return Ranking(support, score, best.alias, f"none holds {limit}; this one holds most, after a warm-up")
    if all(c.score is None for c in inside):
        best = min(inside, key=lambda c: by_support[c.alias])
        return Ranking(support, score, best.alias, f"the best support of those that hold {limit}; none has a score")
    best = min(
        (c for c in inside if c.score is not None), key=lambda c: (score[c.alias] or 0, support[c.alias], c.alias)
    )
    reason = f"the best score of those that hold {limit}"
    if score[best.alias] != 1:
        ahead = ", ".join(sorted(a for a, place in score.items() if place and place < (score[best.alias] or 0)))
        reason += f"; {ahead} scores more, but the student writes outside its support"
    return Ranking(support, score, best.alias, reason)


def read_candidates(text: str, config: TeachersFile, domain: str) -> dict[str, Teacher]:
    """The models of `--candidates`, `alias=model,alias=model` or a YAML file, with the teachers that serve the domain.

    Raises InputError for anything else, and for an alias that stands for two models.
    """
    if "=" in text:
        found: dict[str, Teacher] = {}
        for part in text.split(","):
            alias, _, model = (piece.strip() for piece in part.partition("="))
            if not alias or not model:
                raise InputError(f"--candidates {text!r}: write alias=model,alias=model, or the path of a YAML file")
            if alias in found:
                raise InputError(f"--candidates: alias {alias!r} stands twice; give each model its own")
            found[alias] = Teacher(model=model, domains=[domain])
    else:
        file = load_config(CandidatesFile, Path(text))
        found = {
            alias: Teacher(model=one.model, domains=[domain], dtype=one.dtype) for alias, one in file.candidates.items()
        }
    if taken := sorted(found.keys() & config.teachers.keys()):
        raise InputError(f"--candidates: {taken[0]!r} is a teacher's alias already; give the candidate another")
    present = {alias: t for alias, t in config.teachers.items() if domain in t.domains and not t.is_black_box}
    return present | found


def the_domain(config: TeachersFile, asked: str | None) -> str:
    """The domain that candidates are for: the one asked for, or the only one. Raises InputError if there is none."""
    known = sorted({domain for teacher in config.teachers.values() for domain in teacher.domains})
    if asked is None and len(known) == 1:
        return known[0]
    if asked is None:
        raise InputError(f"--candidates: say for which domain with --domain; there are {', '.join(known)}")
    if asked not in known:
        raise InputError(f"--domain {asked!r}: no teacher serves it; there are {', '.join(known)}")
    return asked
