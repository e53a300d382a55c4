"""Balance in the loop: what is measured, what is applied, what `metrics.jsonl` carries over to the next step."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from mopdctl.config.balance import BalanceConfig
from mopdctl.distill import balance
from mopdctl.distill.balance import SHARE_BOUND, balanced, check_balance, next_share_factors, row_before
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import token_logprobs
from mopdctl.errors import InputError
from mopdctl.objective.reduction import Reduction
from mopdctl.runs import MetricsLog, read_metrics
from mopdctl.train.batch import MicroBatch, TrainSequence, cut
from mopdctl.train.step import Policy, TokenLoss, accumulate, token_loss

WEIGHTS = {"long": 1.0, "short": 1.0}


def measured(applied: Mapping[str, float], long: float | None, short: float | None) -> dict[str, Any]:
    """Metrics of a step that applied the factors of `share` and measured these shares of the gradient."""
    shares = {"long": long, "short": short}
    return {"balance/factor": applied, "balance/share_factor": applied, "policy/grad_share": shares}


def sequence(number: int, teacher: str, length: int, *, gap: float = 1.0, weight: float = 1.0) -> TrainSequence:
    """A response whose teacher log-ratios have a deviation that grows with `gap`; its first token carries no loss."""
    numbers = np.random.default_rng(number)
    behavior = -numbers.exponential(size=length + 1)
    log_ratios = gap * numbers.normal(size=length + 1)
    log_ratios[0] = 1e9  # what a tool wrote: whatever stands there is nobody's opinion
    return TrainSequence(
        f"s{number}",
        [1, 2, 3],
        [int(t) for t in numbers.integers(100, size=length + 1)],
        [0] + [1] * length,
        teacher,
        weight,
        {"behavior_logprobs": behavior.tolist(), "teacher_logprobs": (behavior + log_ratios).tolist()},
    )


def batch() -> list[TrainSequence]:
    return [sequence(0, "short", 10), sequence(1, "long", 60, gap=0.2), sequence(2, "short", 7, gap=3.0)]


def log_ratios(sequences: Sequence[TrainSequence], teacher: str | None = None) -> np.ndarray[Any, Any]:
    rows = [
        np.array(s.streams["teacher_logprobs"])[1:] - np.array(s.streams["behavior_logprobs"])[1:]
        for s in sequences
        if teacher in (None, s.teacher_id)
    ]
    return np.concatenate(rows)


def config(mode: str, **changes: Any) -> BalanceConfig:
    return BalanceConfig.model_validate({"mode": mode, **changes})


# ------------------------------------------------------------------------------------------------------------ one step


def test_fixed_leaves_everything_as_it_is() -> None:
    found, metrics = balanced(batch(), config("fixed"), WEIGHTS, last=None)
    assert (found, metrics) == (batch(), {})


def test_observing_changes_no_bit_and_says_what_the_others_would_do() -> None:
    last = measured(WEIGHTS, 1 - 1e-9, 1e-9)
    found, seen = balanced(batch(), config("observe", memory=0.0), WEIGHTS, last=last)
    assert found == balanced(batch(), config("fixed"), WEIGHTS, last=last)[0]
    assert seen["balance/factor"] == {"long": 1.0, "short": 1.0}
    for mode in ("share", "sigma"):
        moved, metrics = balanced(batch(), config(mode, memory=0.0), WEIGHTS, last=last)
        assert metrics["balance/factor"] == seen[f"balance/{mode}_factor"] != {"long": 1.0, "short": 1.0}
        assert [s.weight for s in moved] == [metrics["balance/factor"][s.teacher_id] for s in batch()]


def test_sigma_goes_by_the_log_ratios_of_loss_tokens_over_the_whole_batch() -> None:
    found, metrics = balanced(batch(), config("sigma"), WEIGHTS, last=None)
    sigma = {d: log_ratios(batch(), d).std() for d in WEIGHTS}
    assert metrics["balance/sigma_nats"] == pytest.approx(sigma, rel=1e-9)
    want = {d: float(np.clip(log_ratios(batch()).std() / sigma[d], 0.25, 4)) for d in WEIGHTS}
    assert metrics["balance/factor"] == pytest.approx(want, rel=1e-9)
    assert [s.weight for s in found] == pytest.approx([want[s.teacher_id] for s in batch()], rel=1e-9)
    assert [s.streams for s in found] == [s.streams for s in batch()]


def test_factors_multiply_lambda() -> None:
    rows = [sequence(0, "short", 10, weight=2.5), sequence(1, "long", 60, gap=0.2)]
    found, metrics = balanced(rows, config("sigma"), {"short": 2.5, "long": 1.0}, last=None)
    assert found[0].weight == 2.5 * metrics["balance/factor"]["short"] != 2.5


@pytest.mark.parametrize("cut_at", [0, 1, 2, 3])
def test_how_samples_lie_on_ranks_changes_no_bit(cut_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = balanced(batch(), config("sigma"), WEIGHTS, last=None)[1]
    gathered: list[list[Any]] = []

    def alone(own: list[Any]) -> list[list[Any]]:
        gathered.append(own)
        return [own]

    monkeypatch.setattr(balance, "gather_objects", alone)
    balanced(batch()[:cut_at], config("observe"), WEIGHTS, last=None)
    balanced(batch()[cut_at:], config("observe"), WEIGHTS, last=None)
    monkeypatch.setattr(balance, "gather_objects", lambda own: gathered)
    assert balanced([], config("sigma"), WEIGHTS, last=None)[1] == whole


def test_what_no_teacher_judges_stays_as_it_is_and_counts_nowhere() -> None:
    anchor = sequence(9, "anchor", 500, gap=50.0)
    found, metrics = balanced([*batch(), anchor], config("sigma"), WEIGHTS, last=None)
    assert found[-1] == anchor
    assert metrics == balanced(batch(), config("sigma"), WEIGHTS, last=None)[1]


def test_a_teacher_without_answers_in_a_step_has_no_figure_and_factor_one() -> None:
    _, metrics = balanced(batch(), config("sigma"), WEIGHTS | {"idle": 1.0}, last=None)
    assert metrics["balance/factor"]["idle"] == 1.0
    assert metrics["balance/sigma_nats"].keys() == {"long", "short"}


# --------------------------------------------------------------------------------------------------------------- share


def test_share_measures_the_gradient_without_its_own_factor() -> None:
    # Measured under factors 0.5 and 1.5 the shares are equal: nothing is to be changed.
    factors = {"long": 0.5, "short": 1.5}
    last = {
        "balance/factor": factors,
        "balance/share_factor": factors,
        "policy/grad_share": {"long": 0.5, "short": 0.5},
    }
    for memory in (0.0, 0.5):
        found = next_share_factors(config("share", memory=memory), WEIGHTS, last=last)
        assert found == pytest.approx(factors, rel=1e-12)
    # Where they were not applied, the same shares say that factors of 1 would do.
    unapplied = last | {"balance/factor": WEIGHTS}
    assert next_share_factors(config("observe", memory=0.0), WEIGHTS, last=unapplied) == pytest.approx(WEIGHTS)


def test_a_step_without_measurement_or_gradient_keeps_the_factors() -> None:
    factors = {"long": 0.5, "short": 1.5}
    last: dict[str, Any] = {"balance/factor": factors, "balance/share_factor": factors}
    assert next_share_factors(config("share"), WEIGHTS, last=last) == factors
    for shares in ({"long": None, "short": None}, {"long": 1.0, "short": 0.0}, {"long": 1.0}):
        found = next_share_factors(config("share"), WEIGHTS, last=last | {"policy/grad_share": shares})
        assert found == pytest.approx(factors, rel=1e-12)


def test_targets_are_the_lambdas_unless_given() -> None:
    last = measured(WEIGHTS, 0.5, 0.5)

    def ratio(weights: Mapping[str, float], **changes: Any) -> float:
        found = next_share_factors(config("share", memory=0.0, **changes), weights, last=last)
        return found["long"] / found["short"]

    assert ratio({"long": 3.0, "short": 1.0}) == pytest.approx(3.0)
    assert ratio({"long": 3.0, "short": 1.0}, target_shares={"long": 0.2, "short": 0.8}) == pytest.approx(0.25)


def test_how_often_a_teacher_is_drawn_is_no_share_that_it_asks_for() -> None:
    # lambda is 1 for both, and times the correction of the draw 1.8 and 0.2
    scaled = {"long": 1.8, "short": 0.2}
    last = measured(WEIGHTS, 0.5, 0.5)
    found = next_share_factors(config("share", memory=0.0), scaled, targets=WEIGHTS, last=last)
    assert found["long"] / found["short"] == pytest.approx(1.0)


def test_a_share_that_settles_beside_a_judge_without_a_factor() -> None:
    # The gradient of a black box is part of what is measured, and no factor reaches it.
    norms = {"long": 3.0, "short": 1.0, "box": 2.0}
    last: dict[str, Any] | None = None
    for _ in range(12):
        factors = next_share_factors(config("share"), WEIGHTS, last=last)
        real = {alias: norm * factors.get(alias, 1.0) for alias, norm in norms.items()}
        shares = {alias: norm / sum(real.values()) for alias, norm in real.items()}
        last = {"balance/factor": factors, "balance/share_factor": factors, "policy/grad_share": shares}
    assert shares["long"] == pytest.approx(shares["short"], rel=1e-3)
    assert factors == pytest.approx({"long": 0.5, "short": 1.5}, rel=1e-3)


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any], tokenizer: Any) -> HFModel:
    llama = make_llama(
        max_position_embeddings=1024, num_hidden_layers=1, hidden_size=16, num_attention_heads=2
    ).double()
    return HFModel(llama, tokenizer, dtype=torch.float64)


def likelihood(policy: Policy, micro_batch: MicroBatch) -> TokenLoss:
    return token_loss(-token_logprobs(policy.logits_NV, micro_batch.tokens_N), micro_batch)


def train(
    model: HFModel, settings: BalanceConfig, reduction: Reduction, weights: Mapping[str, float], steps: int
) -> list[dict[str, Any]]:
    """The metrics of some steps on the same two domains of 10 and 1000 tokens, without a change to the model."""
    rows: list[dict[str, Any]] = []
    for step in range(steps):
        lengths = [("long", 1000), ("short", 10), ("short", 10)]
        sequences = [sequence(n, name, length, weight=weights[name]) for n, (name, length) in enumerate(lengths)]
        found, metrics = balanced(sequences, settings, weights, last=rows[-1] if rows else None)
        micro_batches = cut(
            found, reduction=reduction, num_micro_batches=1, pad_id=model.pad_id, device=torch.device("cpu")
        )
        norms = accumulate(model, micro_batches, likelihood, per_teacher_norms=True).grad_norms
        model.model.zero_grad(set_to_none=True)
        whole = sum(norms.values())
        rows.append({"step": step, **metrics, "policy/grad_share": {a: n / whole for a, n in norms.items()}})
    return rows


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize(
    ("changes", "weights", "want"),
    [
        ({}, WEIGHTS, {"long": 0.5, "short": 0.5}),
        ({}, {"long": 1.0, "short": 3.0}, {"long": 0.25, "short": 0.75}),
        ({"target_shares": {"long": 3, "short": 2}}, WEIGHTS, {"long": 0.6, "short": 0.4}),
    ],
)
def test_ten_tokens_against_a_thousand_have_their_target_shares(
    model: HFModel,
    reduction: Reduction,
    changes: dict[str, Any],
    weights: dict[str, float],
    want: dict[str, float],
) -> None:
    # Open-MOPD and DN-MOPD: which domain dominates (94 %) or vanishes (0.9 %) flips with the loss reduction.
    plain = train(model, config("observe"), reduction, weights, 1)[0]["policy/grad_share"]
    undamped = train(model, config("share", memory=0.0, **changes), reduction, weights, 2)
    assert undamped[0]["policy/grad_share"] == plain != pytest.approx(want, rel=0.05)
    assert undamped[1]["policy/grad_share"] == pytest.approx(want, rel=1e-6)  # coefficients are float32


def test_damped_shares_halve_their_distance(model: HFModel) -> None:
    rows = train(model, config("share", memory=0.5), "sequence", WEIGHTS, 4)
    distances = [math.log(row["policy/grad_share"]["short"] / row["policy/grad_share"]["long"]) for row in rows]
    assert [later / sooner for sooner, later in pairwise(distances)] == pytest.approx([0.5] * 3, rel=1e-4)


def test_without_balance_the_reduction_says_who_dominates(model: HFModel) -> None:
    shares = {r: train(model, config("observe"), r, WEIGHTS, 1)[0]["policy/grad_share"] for r in ("token", "sequence")}
    assert shares["token"]["long"] > 0.9
    assert shares["sequence"]["short"] > 0.5


# ---------------------------------------------------------------------------------------------------- going on exactly


@pytest.mark.parametrize("mode", ["share", "sigma", "observe"])
def test_a_run_that_goes_on_from_its_metrics_has_the_factors_of_one_that_never_stopped(
    mode: str, tmp_path: Path
) -> None:
    settings = config(mode, memory=0.3)

    def run(first: int, last: dict[str, Any] | None, upto: int) -> list[dict[str, Any]]:
        log = MetricsLog(tmp_path / "metrics.jsonl", next_step=first)
        for step in range(first, upto):
            rows = [sequence(10 * step, "short", 9), sequence(10 * step + 1, "long", 60, gap=0.3)]
            last = {"step": step, **balanced(rows, settings, WEIGHTS, last=last)[1]}
            if step % 3 == 0:
                last["policy/grad_share"] = {"long": 0.7 + 0.02 * step, "short": 0.3 - 0.02 * step}
            log.write(last)
        log.close()
        return read_metrics(tmp_path)

    straight = run(0, None, 9)
    (tmp_path / "metrics.jsonl").unlink()
    run(0, None, 6)  # killed after step 5; its last state is that of step 4
    assert run(4, row_before(tmp_path, 4), 9) == straight
    assert (
        len({json.dumps(row["balance/share_factor"]) for row in straight}) == 4
    )  # at first, and after steps 0, 3 and 6


def test_metrics_that_are_gone_are_missed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", next_step=0)
    log.write({"step": 0})
    log.close()
    assert row_before(tmp_path, 0) is None
    assert row_before(tmp_path, 1) == {"step": 0}
    with pytest.raises(InputError, match=r"metrics\.jsonl: has no line of step 1, from which the balance goes on"):
        row_before(tmp_path, 2)


# ----------------------------------------------------------------------------------------------------- what is refused


def test_targets_name_every_teacher_and_nobody_else() -> None:
    aliases = ["math", "code"]
    check_balance(config("share", target_shares={"math": 1, "code": 2}), aliases, scored_before=False)
    with pytest.raises(InputError) as caught:
        check_balance(config("share", target_shares={"math": 1, "cod": 2}), aliases, scored_before=True)
    assert str(caught.value) == "train.balance.target_shares: 'cod' is no teacher; teachers: code, math"
    with pytest.raises(InputError, match="no share for teacher 'code'; give each one"):
        check_balance(config("share", target_shares={"math": 1}), aliases, scored_before=True)


def test_sigma_without_scores_is_refused_before_and_in_the_loop() -> None:
    for mode in ("fixed", "share", "observe"):
        check_balance(config(mode), ["math"], scored_before=False)
    with pytest.raises(InputError, match="mode sigma needs the teachers' log-probabilities before the update"):
        check_balance(config("sigma"), ["math"], scored_before=False)
    unscored = [TrainSequence("s", [1], [2], [1], "long", 1.0, {"behavior_logprobs": [-1.0]})]
    with pytest.raises(InputError, match="mode sigma needs"):
        balanced(unscored, config("sigma"), WEIGHTS, last=None)
    found, metrics = balanced(unscored, config("share"), WEIGHTS, last=None)
    assert found == unscored
    assert metrics.keys() == {"balance/factor", "balance/share_factor"}


@pytest.mark.parametrize(
    "document",
    [
        {"mode": "fixed", "target_shares": {"a": 1}},
        {"mode": "share", "target_shares": {"a": 0}},
        {"mode": "share", "memory": 1.0},
        {"mode": "sigma", "low": 1.5},
        {"mode": "sigma", "high": 0.5},
        {"mode": "shares"},
    ],
)
def test_settings_without_sense_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BalanceConfig.model_validate(document)


def test_the_bound_on_shares_is_reached_and_kept() -> None:
    last = measured(WEIGHTS, 1 - 1e-9, 1e-9)
    weights = {"long": 100.0, "short": 1.0}
    found = next_share_factors(config("share", memory=0.0, target_shares=WEIGHTS), weights, last=last)
    assert found["short"] == SHARE_BOUND
    assert found["long"] == pytest.approx((101 - SHARE_BOUND) / 100)
