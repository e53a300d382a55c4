"""Balancing the teachers of a run: the factors of a step, from the batch and from the metrics of the step before.

Nothing else is remembered, so that a run that goes on from its last line of `metrics.jsonl` goes on exactly.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mopdctl.config.balance import BalanceConfig
from mopdctl.errors import InputError
from mopdctl.objective.balance import Spread, pooled, share_factors, sigma_factors, spread
from mopdctl.runs import read_metrics
from mopdctl.train.batch import TrainSequence
from mopdctl.train.distributed import gather_objects

SHARE_BOUND = 16.0
"""Factors of `share` lie between 1 / SHARE_BOUND and SHARE_BOUND."""

_NO_SCORES = (
    "train.balance: mode sigma needs the teachers' log-probabilities before the update, which this run does not have; "
    "use mode share"
)


def check_balance(config: BalanceConfig, aliases: Collection[str], *, scored_before: bool) -> None:
    """Raises InputError for targets that do not name each of `aliases`, and for `sigma` without its input.

    `aliases` are the teachers that score the student's tokens; `scored_before` says whether they do so before the
    update, so that their log-ratios are known.
    """
    if config.target_shares:
        missing = sorted(set(aliases) - config.target_shares.keys())
        unknown = sorted(config.target_shares.keys() - set(aliases))
        if unknown:
            raise InputError(
                f"train.balance.target_shares: {unknown[0]!r} is no teacher; teachers: {', '.join(sorted(aliases))}"
            )
        if missing:
            raise InputError(f"train.balance.target_shares: no share for teacher {missing[0]!r}; give each one")
    if config.mode == "sigma" and not scored_before:
        raise InputError(_NO_SCORES)


def balanced(
    sequences: Sequence[TrainSequence],
    config: BalanceConfig,
    weights: Mapping[str, float],
    *,
    targets: Mapping[str, float] | None = None,
    last: Mapping[str, Any] | None,
) -> tuple[list[TrainSequence], dict[str, Any]]:
    """This rank's sequences of a step with their factors in `weight`, and the metrics of the balance.

    Every rank must call it. Sequences that no teacher in `weights` judges stay as they are.

        balance/factor                              what was applied
        balance/share_factor, balance/sigma_factor  what `share` and `sigma` would apply
        balance/sigma_nats                          deviation of teacher - behaviour log-probabilities

    The last two are there where the sequences have `teacher_logprobs`. `fixed` has no metrics.

    Args:
        sequences: With lambda in `weight`.
        config: The mode and its settings.
        weights: Alias to lambda, of every teacher that scores the student's tokens.
        targets: Alias to its share of the gradient norm where `target_shares` names none, in any unit; None takes
            `weights`.
        last: The metrics of the step before, None in the first.
    """
    if config.mode == "fixed":
        return list(sequences), {}
    spreads = _spreads(sequences, weights)
    found = {"share": next_share_factors(config, weights, targets=targets, last=last)}
    if spreads:
        found["sigma"] = sigma_factors(spreads, low=config.low, high=config.high)
    elif config.mode == "sigma" and _are_judged(sequences, weights):
        raise InputError(_NO_SCORES)
    applied = dict.fromkeys(sorted(weights), 1.0) | found.get(config.mode, {})
    metrics: dict[str, Any] = {"balance/factor": applied}
    metrics |= {f"balance/{mode}_factor": factors for mode, factors in found.items()}
    if spreads:
        metrics["balance/sigma_nats"] = {alias: own.sigma_nats for alias, own in spreads.items()}
    return [replace(s, weight=s.weight * applied.get(s.teacher_id, 1.0)) for s in sequences], metrics


def next_share_factors(
    config: BalanceConfig,
    weights: Mapping[str, float],
    *,
    targets: Mapping[str, float] | None = None,
    last: Mapping[str, Any] | None,
) -> dict[str, float]:
    """The factors of `share` after a step with metrics `last`: as they were, unless it measured gradient shares."""
    if last is None:
        return dict.fromkeys(sorted(weights), 1.0)
    before: dict[str, float] = last["balance/share_factor"]
    shares: Mapping[str, float | None] = last.get("policy/grad_share", {})
    applied = last["balance/factor"]
    wanted = config.target_shares or targets or weights
    return share_factors(
        before,
        {alias: share / applied[alias] for alias, share in shares.items() if share and alias in applied},
        {alias: wanted[alias] for alias in weights},
        weights,
        memory=config.memory,
        low=1 / SHARE_BOUND,
        high=SHARE_BOUND,
    )


def row_before(folder: Path, step: int) -> dict[str, Any] | None:
    """The metrics of the step before `step`, which a run goes on with; None before the first.

    Raises InputError if `metrics.jsonl` does not have them any more.
    """
    if step == 0:
        return None
    for row in read_metrics(folder):
        if row["step"] == step - 1:
            return row
    raise InputError(
        f"{folder / 'metrics.jsonl'}: has no line of step {step - 1}, from which the balance goes on; "
        "restore the file or begin under another name"
    )


def _are_judged(sequences: Sequence[TrainSequence], weights: Mapping[str, float]) -> bool:
    """Whether any rank has sequences of a teacher in `weights`; a step may have drawn prompts of black boxes alone."""
    return any(gather_objects(any(s.teacher_id in weights for s in sequences)))


def _spreads(sequences: Sequence[TrainSequence], weights: Mapping[str, float]) -> dict[str, Spread]:
    """Alias to the spread of its log-ratios over all ranks; without those of whom there is none."""
    own = [(s.teacher_id, spread(_log_ratios(s))) for s in sequences if "teacher_logprobs" in s.streams]
    by_alias: dict[str, list[Spread]] = {}
    for found in gather_objects(own):
        for alias, part in found:
            by_alias.setdefault(alias, []).append(part)
    return {alias: pooled(by_alias[alias]) for alias in sorted(by_alias.keys() & weights.keys())}


def _log_ratios(sequence: TrainSequence) -> torch.Tensor:
    """Teacher - behaviour log-probabilities of the loss-active tokens, [N]."""
    active = torch.tensor(list(sequence.loss_mask)).bool()
    teacher, behavior = (
        torch.tensor(list(sequence.streams[name]), dtype=torch.float64)
        for name in ("teacher_logprobs", "behavior_logprobs")
    )
    # Masked places may hold anything.
    return teacher[active] - behavior[active]
