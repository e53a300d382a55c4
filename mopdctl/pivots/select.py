"""Which candidates become pivots: those at which the model sometimes fails, and fails often enough.

The advantageous set of PivotRL (arXiv 2603.21383, section 3): `D_adv = {s : var(s) > 0 and mean(s) < lambda_diff}`. A
state that always passes or always fails gives a group of equal rewards, hence no advantage and no gradient.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopdctl.engines.base import stream_seed
from mopdctl.pivots.profiled import Profiled, counts

ALARM_SHARE = 0.5
"""A larger share of advantageous states says that the verifier or its reference is wrong, as none at all does."""

SENSITIVITY = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Values of `lambda_diff` at which a report counts what would be kept: the paper names none."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is kept. `lambda_diff` and `min_ok` decide alone, the limits thin out what passes, hardest first."""

    lambda_diff: float
    """Only states whose mean reward lies below."""
    min_ok: int
    """Fewest rollouts with a reward."""
    per_tool: int | None = None
    per_depth: int | None = None
    maximum: int | None = None
    seed: int = 0
    """Of the order among states of equal mean."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What became of every candidate."""

    kept: tuple[Profiled, ...]
    """Hardest first."""
    dropped: dict[str, str]
    """Candidate id to reason."""
    advantageous: int
    """Candidates in D_adv of the profile, whatever a newer profile and the limits leave of them."""


def verdict(profiled: Profiled, *, lambda_diff: float, min_ok: int) -> str | None:
    """Why a state is not in D_adv, None if it is."""
    rewards = profiled.ok_rewards
    if len(rewards) < max(min_ok, 1):
        return "too_few_ok"
    if profiled.variance == 0:
        return "all_fail" if max(rewards) == 0 else "all_pass" if min(rewards) == 1 else "all_equal"
    mean = profiled.mean
    assert mean is not None
    return "too_easy" if mean >= lambda_diff else None


def select(profile: Sequence[Profiled], rule: Rule, *, fresh: Mapping[str, Profiled] | None = None) -> Selection:
    """Keeps D_adv, of it what is in D_adv of the newer profile `fresh` too, of that what the limits leave.

    The order is by mean reward, of the two the larger, then by a hash of seed and id: the result does not hang on the
    order of `profile`, and a larger `lambda_diff` drops nothing that a smaller one keeps.
    """
    kept: list[Profiled] = []
    dropped: dict[str, str] = {}
    advantageous = 0
    for profiled in profile:
        reason = verdict(profiled, lambda_diff=rule.lambda_diff, min_ok=rule.min_ok)
        advantageous += reason is None
        if reason is None and fresh is not None:
            newer = fresh.get(profiled.candidate_id)
            now = verdict(newer, lambda_diff=rule.lambda_diff, min_ok=rule.min_ok) if newer else "missing"
            reason = f"fresh_{now}" if now else None
        if reason:
            dropped[profiled.candidate_id] = reason
        else:
            kept.append(profiled)

    def order(profiled: Profiled) -> tuple[float, int, str]:
        seen = [profiled, fresh[profiled.candidate_id]] if fresh is not None else [profiled]
        tie = stream_seed(rule.seed, "pivots", profiled.candidate_id)
        return max(p.mean or 0.0 for p in seen), tie, profiled.candidate_id

    chosen: list[Profiled] = []
    tools, depths = Counter[str](), Counter[int]()
    for profiled in sorted(kept, key=order):
        reason = _over_limit(profiled, rule, len(chosen), tools, depths)
        if reason:
            dropped[profiled.candidate_id] = reason
            continue
        chosen.append(profiled)
        tools[profiled.tool] += 1
        depths[profiled.depth] += 1
    return Selection(tuple(chosen), dropped, advantageous)


def _over_limit(profiled: Profiled, rule: Rule, count: int, tools: Counter[str], depths: Counter[int]) -> str | None:
    if rule.per_tool is not None and tools[profiled.tool] >= rule.per_tool:
        return "balance_tool"
    if rule.per_depth is not None and depths[profiled.depth] >= rule.per_depth:
        return "balance_depth"
    return "balance_max" if rule.maximum is not None and count >= rule.maximum else None


def report(
    profile: Sequence[Profiled], rule: Rule, selection: Selection, *, fresh: Mapping[str, Profiled] | None = None
) -> dict[str, Any]:
    """Counts in and out by reason, the share in D_adv with its alarm, and what other values of lambda would keep."""
    share = selection.advantageous / len(profile)
    alarm = None
    if not selection.advantageous:
        alarm = (
            f"none of {len(profile)} candidates has mixed rewards and a mean below {rule.lambda_diff:g}: look at the "
            "reasons, and at verifier, references and the model's answers in the store"
        )
    elif share > ALARM_SHARE:
        alarm = (
            f"{100 * share:.1f} % of the candidates are advantageous; more than {100 * ALARM_SHARE:g} % says that the "
            "verifier is too loose or too noisy: look at some answers in the store"
        )
    return {
        "lambda_diff": rule.lambda_diff,
        "min_ok": rule.min_ok,
        "per_tool": rule.per_tool,
        "per_depth": rule.per_depth,
        "max": rule.maximum,
        "seed": rule.seed,
        "profiled": len(profile),
        "advantageous": selection.advantageous,
        "keep_rate_pct": round(100 * share, 3),
        "kept": len(selection.kept),
        "dropped": dict(sorted(Counter(selection.dropped.values()).items())),
        "alarm": alarm,
        "kept_by": {
            "action": counts(p.action for p in selection.kept),
            "tool": counts(p.tool for p in selection.kept),
            "depth": counts(p.depth for p in selection.kept),
        },
        "sensitivity": {
            f"{value:g}": len(select(profile, _at(rule, value), fresh=fresh).kept) for value in SENSITIVITY
        },
    }


def _at(rule: Rule, lambda_diff: float) -> Rule:
    return Rule(lambda_diff, rule.min_ok, rule.per_tool, rule.per_depth, rule.maximum, rule.seed)
