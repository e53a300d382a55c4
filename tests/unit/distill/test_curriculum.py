"""The curriculum: pass rates that follow the student, draws in proportion to p^a (1-p)^b, and going on exactly."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mopdctl.config.balance import CurriculumConfig
from mopdctl.distill.curriculum import (
    Outcome,
    PassRates,
    check_curriculum,
    curriculum_rows,
    log_weights,
    outcome_metrics,
    outcomes_of,
    weighted_order,
)
from mopdctl.engines.base import stream_seed
from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.verdicts import earned
from mopdctl.store.store import Store, StoreWriter
from mopdctl.verifiers import VerdictState

ROUNDING = 1e-12


def settings(**changes: Any) -> CurriculumConfig:
    return CurriculumConfig.model_validate(changes)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (), None, {}, verifier="integer", place=f"p.jsonl:{i + 1}") for i in range(count)]


def passed(prompt: int, *rewards: float | None, teacher: str = "m") -> list[Outcome]:
    return [Outcome(f"p{prompt}", teacher, reward) for reward in rewards]


# ---------------------------------------------------------------------------------------------------------- pass rates


def test_an_unknown_prompt_has_the_prior() -> None:
    rates = PassRates(settings(prior=0.3), prompts(3))
    assert rates.rates([0, 1, 2]).tolist() == pytest.approx([0.3] * 3)


def test_pass_rates_by_hand() -> None:
    rates = PassRates(settings(memory=0.5, prior=0.25, prior_answers=4), prompts(2))
    rates.observe(passed(0, 1.0, 1.0, 0.0, 0.5))
    assert rates.rates([0, 1]).tolist() == pytest.approx([(2.5 + 1) / (4 + 4), 0.25])
    rates.observe(passed(0, 1.0, 1.0))
    assert rates.rates([0]).tolist() == pytest.approx([(1.25 + 2 + 1) / (2 + 2 + 4)])


def test_what_could_not_be_checked_says_nothing_and_is_counted() -> None:
    rates = PassRates(settings(), prompts(2))
    outcomes = [*passed(0, 1.0, None), *passed(1, None, teacher="c")]
    rates.observe(outcomes)
    alone = PassRates(settings(), prompts(2))
    alone.observe(passed(0, 1.0))
    assert rates.rates([0, 1]).tolist() == alone.rates([0, 1]).tolist()
    assert outcome_metrics(outcomes) == {
        "curriculum/reward": {"c": None, "m": 1.0},
        "curriculum/unchecked": {"c": 1, "m": 1},
    }
    assert outcome_metrics(passed(0, 0.0, 0.5)) == {"curriculum/reward": {"m": 0.25}}


@pytest.mark.parametrize(
    ("state", "reward", "want"),
    [
        (VerdictState.OK, 0.75, 0.75),
        (VerdictState.PARSE_ERROR, None, 0.0),
        (VerdictState.TIMEOUT, None, 0.0),
        (VerdictState.INFRA_ERROR, None, None),
        (VerdictState.INVALID_REFERENCE, None, None),
        (None, None, None),
    ],
)
def test_a_broken_check_is_no_failure_of_the_student(state: Any, reward: Any, want: Any) -> None:
    # DN-MOPD counted what its judge could not check as wrong.
    assert earned(reward, state and state.value) == want


@given(st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_outcomes_in_a_step_changes_no_bit(rewards: list[float], order: random.Random) -> None:
    one, other = PassRates(settings(), prompts(2)), PassRates(settings(), prompts(2))
    outcomes = [*passed(0, *rewards), *passed(1, 0.1, 0.2, 0.7)]
    one.observe(outcomes)
    other.observe(order.sample(outcomes, len(outcomes)))
    assert one.rates([0, 1]).tolist() == other.rates([0, 1]).tolist()


@given(st.lists(st.floats(0, 1), max_size=60), st.floats(0, 0.95), st.floats(0.05, 0.95))
def test_no_prompt_is_given_up_or_thought_mastered_for_good(rewards: list[float], memory: float, prior: float) -> None:
    config = settings(memory=memory, prior=prior)
    rates = PassRates(config, prompts(1))
    for reward in rewards:
        rates.observe(passed(0, reward))
    most = 1 / (1 - memory)  # the answers that are remembered, at most
    least = config.prior_answers * prior / (most + config.prior_answers)
    best = (most + config.prior_answers * prior) / (most + config.prior_answers)
    assert least * (1 - 1e-9) <= rates.rates([0])[0] <= best * (1 + 1e-9)


def test_pass_rates_follow_a_student_that_improves() -> None:
    rates = PassRates(settings(), prompts(1))
    seen = []
    for step in range(40):
        rates.observe(passed(0, float(step >= 20), float(step >= 20)))
        seen.append(float(rates.rates([0])[0]))
    assert seen[19] < 0.15
    assert seen[39] > 0.8
    assert seen[20:] == sorted(seen[20:])
    # Five steps after the change the new answers outweigh all that came before.
    assert seen[24] > 0.5


def test_metrics_by_teacher() -> None:
    rates = PassRates(settings(memory=0.0, prior_answers=1), prompts(4))
    rates.observe([*passed(0, 1.0), *passed(3, 0.0)])
    assert rates.metrics({"c": [3], "m": [0, 1, 2]}) == {
        "curriculum/pass_rate": {"c": 0.25, "m": pytest.approx((0.75 + 0.5 + 0.5) / 3)},
        "curriculum/seen_share": {"c": 1.0, "m": pytest.approx(1 / 3)},
    }


# --------------------------------------------------------------------------------------------------------------- draws


def test_weights_by_hand() -> None:
    rates = np.array([0.1, 0.5, 0.9])
    assert np.exp(log_weights(rates, settings())) == pytest.approx([0.09, 0.25, 0.09])
    skewed = settings(pass_exponent=2, fail_exponent=0.5)
    assert np.exp(log_weights(rates, skewed)) == pytest.approx([0.01 * 0.9**0.5, 0.25 * 0.5**0.5, 0.81 * 0.1**0.5])
    assert log_weights(rates, settings(pass_exponent=0, fail_exponent=0)).tolist() == [0, 0, 0]


def test_the_first_drawn_is_the_winner_of_an_exponential_race() -> None:
    # P(i first) = w_i / sum w holds for arrival times -log(1 - u_i) / w_i with u_i uniform: recomputed here.
    weights = np.array([0.2, 1.0, 3.0, 0.5])
    for seed in range(200):
        numbers = np.random.Generator(np.random.Philox(key=stream_seed(seed, 0))).random(4)
        arrivals = -np.log(1 - numbers) / weights
        assert weighted_order(np.log(weights), 4, seed) == np.argsort(arrivals).tolist()


def test_the_first_drawn_come_up_in_proportion_to_their_weights() -> None:
    weights = np.array([1.0, 2.0, 5.0])
    runs = 4000
    first = Counter(weighted_order(np.log(weights), 1, seed)[0] for seed in range(runs))
    for i, weight in enumerate(weights):
        share = weight / weights.sum()
        assert abs(first[i] / runs - share) < 4 * (share * (1 - share) / runs) ** 0.5


logs = st.lists(st.floats(-700, 5), min_size=1, max_size=10)


@given(logs, st.integers(1, 30), st.integers(0, 99))
def test_each_comes_once_before_any_again_and_a_longer_draw_begins_with_a_shorter_one(
    found: list[float], count: int, seed: int
) -> None:
    order = weighted_order(np.array(found), count, seed)
    for lap in range(0, count, len(found)):
        assert len(set(order[lap : lap + len(found)])) == len(order[lap : lap + len(found)])
    assert weighted_order(np.array(found), count + 3, seed)[:count] == order


@given(logs, st.integers(0, 99), st.data())
def test_more_weight_never_makes_a_prompt_come_later(found: list[float], seed: int, data: st.DataObject) -> None:
    lucky = data.draw(st.integers(0, len(found) - 1))
    before = weighted_order(np.array(found), len(found), seed)
    found[lucky] += data.draw(st.floats(0, 10))
    after = weighted_order(np.array(found), len(found), seed)
    assert after.index(lucky) <= before.index(lucky)
    assert [i for i in after if i != lucky] == [i for i in before if i != lucky]


TEACHERS = ["m", "c", "m", "m", "c", "m"]
POOLS = {"c": [1, 4], "m": [0, 2, 3, 5]}


def rows(rates: PassRates, base: Sequence[int], *, step: int = 0, seed: int = 0, **changes: Any) -> list[int]:
    return curriculum_rows(base, TEACHERS, POOLS, rates, settings(**changes), step=step, seed=seed)


def test_whose_turn_it_is_stays_as_it_was() -> None:
    for step in range(20):
        found = rows(PassRates(settings(), prompts(6)), [0, 4, 2, 1, 1, 3, 5], step=step)
        assert [TEACHERS[row] for row in found] == ["m", "c", "m", "c", "c", "m", "m"]
        assert sorted(row for row in found if TEACHERS[row] == "m") == POOLS["m"]
        assert {found[1], found[3]} == {1, 4}


def test_a_step_hangs_on_its_number_the_seed_and_what_is_known() -> None:
    rates = PassRates(settings(), prompts(6))
    draws = {(step, seed): rows(rates, [0, 0, 1], step=step, seed=seed) for step in range(8) for seed in range(2)}
    assert draws == {(t, s): rows(PassRates(settings(), prompts(6)), [0, 0, 1], step=t, seed=s) for t, s in draws}
    assert len({tuple(found) for found in draws.values()}) > 4


def test_mastered_and_hopeless_prompts_come_up_rarely_and_come_back_with_the_student() -> None:
    rates = PassRates(settings(), prompts(6))
    for _ in range(20):
        rates.observe([*passed(0, 1.0), *passed(2, 0.0), *passed(3, 1.0), *passed(5, 1.0, 0.0)])

    def share_of(row: int) -> float:
        return sum(rows(rates, [0], step=step) == [row] for step in range(600)) / 600

    weights = np.exp(log_weights(rates.rates(POOLS["m"]), settings()))
    want = dict(zip(POOLS["m"], weights / weights.sum(), strict=True))
    assert want[5] > 1.9 * want[2]
    for row in POOLS["m"]:
        assert abs(share_of(row) - want[row]) < 4 * (want[row] * (1 - want[row]) / 600) ** 0.5
    before = share_of(2)
    for _ in range(2):
        rates.observe(passed(2, 1.0))  # the student begins to pass it
    assert share_of(2) > before + 0.05


# ---------------------------------------------------------------------------------------------------- going on exactly


def sample(prompt: int, step: int, number: int, reward: float | None, verdict: str | None) -> Sample:
    return Sample(
        sample_id=f"p{prompt}/{step}/{number}@0",
        prompt_id=f"p{prompt}",
        group_id=f"p{prompt}/{step}",
        generation_index=number,
        domain="d",
        teacher_id=TEACHERS[prompt],
        policy_version_min=step,
        policy_version_max=step,
        tokens=np.array([1, 2, 3], np.int32),
        prompt_length=2,
        loss_mask=np.array([False, False, True]),
        behavior_logprobs=np.array([-1.0], np.float32),
        finish_reason="stop",
        reward=reward,
        verdict=verdict,
        verifier="integer/1",
    )


def step_samples(rows_of_step: Sequence[int], step: int) -> list[Sample]:
    found = []
    for prompt in dict.fromkeys(rows_of_step):
        for number in range(2 * rows_of_step.count(prompt)):
            kind = (3 * prompt + 5 * step + number) % 4
            reward = float(np.float32(0.1 * kind)) if kind < 2 else None
            found.append(sample(prompt, step, number, reward, ("ok", "ok", "parse_error", "infra_error")[kind]))
    return found


def test_a_run_that_goes_on_from_its_store_draws_what_one_draws_that_never_stopped(tmp_path: Path) -> None:
    base = [[0, 4, 2], [1, 3, 5], [0, 1, 2], [3, 4, 5], [0, 0, 1], [2, 2, 4]]
    identity = {"tokenizer": "t", "command": "distill", "run": {}}

    def run(rates: PassRates, first: int, upto: int) -> list[tuple[list[int], list[float]]]:
        """The rows of each step, and what was known of all prompts when they were drawn."""
        found = []
        with StoreWriter(tmp_path / "store", identity) as writer:
            rates.resume(writer.store, first)
            kept = set(writer.store.meta_table(["sample_id"])["sample_id"].to_pylist())
            for step in range(first, upto):
                found.append((rows(rates, base[step], step=step), rates.rates(range(6)).tolist()))
                samples = step_samples(found[-1][0], step)
                writer.commit([s for s in reversed(samples) if s.sample_id not in kept])
                rates.observe(outcomes_of(samples))
        return found

    want = []
    straight = PassRates(settings(), prompts(6))
    for step in range(6):
        want.append((rows(straight, base[step], step=step), straight.rates(range(6)).tolist()))
        straight.observe(outcomes_of(step_samples(want[-1][0], step)))
    assert run(PassRates(settings(), prompts(6)), 0, 5) == want[:5]  # killed; the last state is that after three steps
    assert run(PassRates(settings(), prompts(6)), 3, 6) == want[3:]
    resumed = PassRates(settings(), prompts(6))
    resumed.resume(Store(tmp_path / "store"), 6)
    assert resumed.rates(range(6)).tolist() == straight.rates(range(6)).tolist()
    assert len(set(straight.rates(range(6)).tolist())) > 3


# ----------------------------------------------------------------------------------------------------- what is refused


def test_a_prompt_that_nobody_can_check_is_refused() -> None:
    check_curriculum(prompts(2))
    with pytest.raises(InputError) as caught:
        check_curriculum([*prompts(2), Prompt("x", (), None, {}, place="p.jsonl:3")])
    assert str(caught.value) == "p.jsonl:3: names no verifier; train.curriculum needs one to know its pass rate"


@pytest.mark.parametrize("name", ["memory", "prior"])
def test_a_memory_that_forgets_nothing_and_a_sure_prior_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        settings(**{name: 1.0})
    with pytest.raises(ValidationError):
        settings(prior=0.0)
