"""The rule that turns measures into advice. All its thresholds stand here, each with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Choice = Literal["sampled", "exact", "warm-up first"]

WARM_UP_BELOW_MASS = 0.90
"""Student mass inside the teacher's top-k below which the student writes what the teacher would not."""
WARM_UP_BELOW_OVERLAP = 0.50
"""Well below 0.72, where healthy runs begin (arXiv 2604.13016)."""
WARM_UP_FROM_IMPOSSIBLE = 0.005
"""Share of the student's tokens that the teacher finds nearly impossible: they carry most of the advantage. Fitted on
one seed of the tiny world (`world.family`); a model finds 0.3 % of its own tokens nearly impossible."""
NO_MERGE_FROM_COSINE = 0.2
"""Mean cosine between the teachers' weight deltas from which they are taken to come from elsewhere. In the tiny world
forks of the student had 0.02 and gained 39 points by a merge start, teachers of another lineage 0.35 and lost 29."""
EXACT_FROM_MASS = 0.97
"""What the overlap holds in healthy runs is 0.97-0.99 (arXiv 2604.13016)."""
EXACT_FROM_OVERLAP = 0.72
"""Where healthy runs begin (arXiv 2604.13016)."""


@dataclass(frozen=True, slots=True)
class Support:
    """The measures that the rule looks at, each a mean over the student's tokens, in [0, 1]."""

    top_k_overlap: float
    student_mass: float
    """The student's mass inside the teacher's top-k."""
    impossible_share: float


@dataclass(frozen=True, slots=True)
class Advice:
    """What to begin with, and why."""

    choice: Choice
    reason: str


def advise(support: Support) -> Advice:
    """Which objective fits one teacher: exact inside its support, sampled token at its edge, warm-up first outside.

    An exact divergence pulls towards all that the teacher would write, which helps where both mean the same by a
    prefix; a sampled token asks less of the teacher. Outside its support neither says anything useful.
    """
    outside = []
    if support.student_mass < WARM_UP_BELOW_MASS:
        outside.append(f"student mass {_percent(support.student_mass)}, below {_percent(WARM_UP_BELOW_MASS)}")
    if support.top_k_overlap < WARM_UP_BELOW_OVERLAP:
        outside.append(f"top-k overlap {_percent(support.top_k_overlap)}, below {_percent(WARM_UP_BELOW_OVERLAP)}")
    if support.impossible_share >= WARM_UP_FROM_IMPOSSIBLE:
        share, limit = _percent(support.impossible_share), _percent(WARM_UP_FROM_IMPOSSIBLE)
        outside.append(f"{share} of the student's tokens are nearly impossible for the teacher, {limit} or more")
    if outside:
        return Advice("warm-up first", f"outside the teacher's support: {'; '.join(outside)}")
    found = f"student mass {_percent(support.student_mass)}, top-k overlap {_percent(support.top_k_overlap)}"
    needed = f"{_percent(EXACT_FROM_MASS)} and {_percent(EXACT_FROM_OVERLAP)}"
    if support.student_mass >= EXACT_FROM_MASS and support.top_k_overlap >= EXACT_FROM_OVERLAP:
        return Advice("exact", f"inside the teacher's support: {found} ({needed} needed)")
    return Advice("sampled", f"at the edge of the teacher's support: {found} (exact needs {needed})")


def overall(advice: Mapping[str, Advice]) -> Advice:
    """The most careful of the teachers' advice, because a run has one objective and one beginning."""
    choices: tuple[Choice, ...] = ("warm-up first", "sampled", "exact")
    choice = next(choice for choice in choices if any(one.choice == choice for one in advice.values()))
    names = [alias for alias, one in sorted(advice.items()) if one.choice == choice]
    if len(names) == len(advice):
        return Advice(choice, "so for every teacher")
    return Advice(choice, f"the most careful advice, that for {', '.join(names)}, decides")


def how_to(choice: Choice, no_merge: str) -> str:
    """The settings under `train` that follow the advice.

    A merge of weights is the better warm-up where there can be one: in the tiny world it brought more than SFT on the
    teachers' answers, and it costs no answers (`world.family`).

    Args:
        choice: Of the whole run.
        no_merge: Why not to begin from a merge of them; empty if nothing speaks against it.
    """
    if choice != "warm-up first":
        return f"objective: {choice}"
    if no_merge:
        return f"--warmup STEPS, SFT on the teachers' answers, and no merge start: {no_merge}"
    return "warm_start: merge, and trust_region: 0.5 with it; or --warmup STEPS, SFT on the teachers' answers"


def against_merging(mean_cosine: float | None) -> str:
    """Why not to begin from a merge, by the mean cosine between the teachers' deltas; empty if nothing speaks for that.

    Args:
        mean_cosine: See `merging.kinship`.
    """
    if mean_cosine is None or mean_cosine < NO_MERGE_FROM_COSINE:
        return ""
    return (
        f"the teachers' weights lie in one direction from the student's (mean cosine {mean_cosine:.2f}, "
        f"{NO_MERGE_FROM_COSINE:g} or more), as those of another lineage do: their sum takes away what it learned"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.01 else f"{100 * share:.2f} %"
