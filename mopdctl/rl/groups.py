"""From rewards to advantages: which answers train, and by how much."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mopdctl.config.rl import RlTrainConfig
from mopdctl.objective.group import group_advantages, has_zero_variance
from mopdctl.records import Sample
from mopdctl.verifiers import VerdictState

_OVERLONG = ("length", "max_turns")
_ANSWERED_FOR = (VerdictState.OK, VerdictState.PARSE_ERROR, VerdictState.TIMEOUT)
"""Verdicts that say something of the answer. The others are about the machinery, the reference, or not there."""


@dataclass(frozen=True, slots=True)
class Rated:
    """What one answer earned."""

    sample_id: str
    group_id: str
    environment: str
    earned: float | None
    """What counts in its group; None where it takes no part."""
    reward: float | None
    """What the verifier gave."""
    state: str
    """`ok`, or why the verifier gave nothing; `masked` for an overlong answer that is left out."""
    label: str = ""
    verdict: str = ""
    """What the verifier said, of a masked answer too; empty where nobody checked."""


def rate(sample: Sample, train: RlTrainConfig, *, budget: int) -> Rated:
    """What an answer of at most `budget` tokens earned, overlong answers and states by the names of the config.

    Overlong is what ran out of tokens or turns. An answer that could not be checked earns nothing, however long it is.
    """
    state = sample.verdict or "unverified"
    earned = sample.reward
    if state == VerdictState.PARSE_ERROR:
        earned = train.state_rewards.parse_error
    elif state == VerdictState.TIMEOUT:
        earned = train.state_rewards.timeout
    overlong = sample.finish_reason in _OVERLONG
    if overlong and train.overlong == "mask":
        earned, state = None, "masked"
    elif overlong and train.overlong == "fail" and state in _ANSWERED_FOR:
        earned = 0.0
    elif earned is not None and train.overlong == "soft":
        earned += overlong_penalty(len(sample.response_ids), budget=budget, buffer=train.overlong_buffer)
    return Rated(
        sample.sample_id,
        sample.group_id,
        sample.domain,
        earned,
        sample.reward,
        state,
        sample.verdict_label or "",
        sample.verdict or "",
    )


def overlong_penalty(length: int, *, budget: int, buffer: int) -> float:
    """The soft overlong punishment, in [-1, 0]: 0 up to budget - buffer tokens, then linear to -1 at the budget.

    Source: DAPO (arXiv 2503.14476), Eq. 13.
    """
    return -min(max(length - (budget - buffer), 0) / buffer, 1.0)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one step."""

    advantages: dict[str, float]
    """Sample id to advantage, of the answers that train."""
    useful: int
    """Groups whose answers differ in what they earned."""
    metrics: dict[str, Any] = field(default_factory=dict)


def form_groups(rated: Iterable[Rated], train: RlTrainConfig) -> Groups:
    """Advantages within each group, over all answers that earned something.

    A group of fewer than two such answers trains nothing, nor does one in which all earned the same (`zero_variance`
    says whether it stays in the denominators). Nothing leaves without being counted by environment.
    """
    groups: dict[str, list[Rated]] = {}
    everyone = sorted(rated, key=lambda r: r.sample_id)
    for one in everyone:
        groups.setdefault(one.group_id, []).append(one)
    advantages: dict[str, float] = {}
    kinds: dict[str, Counter[str]] = {}
    for members in groups.values():
        taking_part = [r for r in members if r.earned is not None]
        earned = [r.earned for r in taking_part if r.earned is not None]
        if len(earned) < 2:
            kind = "too_small"
        elif has_zero_variance(earned):
            kind = "all_best" if earned[0] >= 1 else "all_worst" if earned[0] <= 0 else "all_equal"
        else:
            kind = "useful"
        kinds.setdefault(members[0].environment, Counter())[kind] += 1
        if kind == "useful" or (kind != "too_small" and train.zero_variance == "keep"):
            found = group_advantages(earned, baseline=train.baseline, scale=train.scale)
            advantages |= zip([r.sample_id for r in taking_part], found, strict=True)
    useful = sum(counts["useful"] for counts in kinds.values())
    return Groups(advantages, useful, _metrics(everyone, kinds))


def checks_that_failed(rated: Iterable[Rated]) -> dict[str, dict[str, int]]:
    """Environment to state (or its label) to answers, if there are some and not one could be checked; else empty.

    A response without the form that was asked for has been checked. One that ran past its limits has not: no model
    writes such answers alone, a machine that is too slow for its limits does.
    """
    failed: dict[str, Counter[str]] = {}
    for one in rated:
        if one.verdict in (VerdictState.OK, VerdictState.PARSE_ERROR):
            return {}
        failed.setdefault(one.environment, Counter())[one.label or one.verdict or "unverified"] += 1
    return {name: dict(sorted(counts.items())) for name, counts in sorted(failed.items())}


def _metrics(rated: Sequence[Rated], kinds: dict[str, Counter[str]]) -> dict[str, Any]:
    names = sorted({r.environment for r in rated})
    by_name = {name: [r for r in rated if r.environment == name] for name in names}
    rewards = {name: [r.reward for r in members if r.reward is not None] for name, members in by_name.items()}
    labels = {name: Counter(r.label for r in members if r.label) for name, members in by_name.items()}
    metrics: dict[str, Any] = {
        "rl/reward": {name: sum(found) / len(found) if found else None for name, found in rewards.items()},
        "rl/earned": {name: _mean([r.earned for r in members]) for name, members in by_name.items()},
        "rl/states": {name: dict(Counter(r.state for r in members)) for name, members in by_name.items()},
        "rl/groups": {name: dict(counts) for name, counts in sorted(kinds.items())},
        "rl/useful_share": {name: counts["useful"] / counts.total() for name, counts in sorted(kinds.items())},
    }
    if any(labels.values()):
        metrics["rl/labels"] = {name: dict(found) for name, found in labels.items() if found}
    return metrics


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
