"""Which prompts a step takes, and which jobs are sampled together."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mopdctl.config.rl import RlTrainConfig
from mopdctl.records import Prompt
from mopdctl.rl.mixture import Mixture, sampled_together
from mopdctl.rollouts.jobs import Job


def mixture(sizes: list[int], weights: list[float]) -> Mixture:
    prompts = [
        Prompt(f"{name}/{i}", (), None, {"environment": name})
        for name, size in zip("abc", sizes, strict=False)
        for i in range(size)
    ]
    return Mixture(prompts, sizes, weights)


def settings(**train: Any) -> RlTrainConfig:
    return RlTrainConfig.model_validate({"steps": 10, "batch_size": 8, **train})


def test_environments_come_in_proportion_to_their_weights() -> None:
    found = mixture([100, 30], [3, 1])
    rows = [row for step in range(10) for row in found.rows(step, settings())]
    assert Counter(row < 100 for row in rows) == {True: 60, False: 20}


def test_an_environment_uses_every_prompt_before_any_again() -> None:
    found = mixture([5, 40], [1, 1])
    own = [row for step in range(10) for row in found.rows(step, settings()) if row < 5]
    assert [sorted(own[i : i + 5]) for i in range(0, 40, 5)] == [[0, 1, 2, 3, 4]] * 8


def test_a_step_hangs_on_its_number_and_seed_alone() -> None:
    found = mixture([50, 50], [1, 2])
    assert found.rows(7, settings()) == found.rows(7, settings(steps=99))
    assert found.rows(7, settings()) != found.rows(7, settings(seed=1))
    assert found.more_rows(7, 1, 6, settings()) == found.more_rows(7, 1, 9, settings())[:6]
    assert found.more_rows(7, 1, 6, settings()) != found.more_rows(7, 2, 6, settings())


def job(environment: str, budget: int) -> Job:
    return Job(f"{environment}/{budget}", "p", "g", 0, environment, "", (1,), budget, 0)


def test_answers_of_similar_length_are_sampled_together() -> None:
    jobs = [job("short", 64), job("long", 64), job("short", 64), job("new", 48)]
    batches = sampled_together(jobs, {"short": 6.0, "long": 40.0}, {})
    assert sorted([j.domain for j in batch] for batch in batches) == [["long", "new"], ["short", "short"]]
    assert Counter(j.sample_id for batch in batches for j in batch) == Counter(j.sample_id for j in jobs)


def test_what_takes_longest_to_check_is_sampled_first() -> None:
    jobs = [job("quick", 8), job("slow", 500)]
    assert [b[0].domain for b in sampled_together(jobs, {}, {"slow": 3.0, "quick": 0.1})] == ["slow", "quick"]
    assert [b[0].domain for b in sampled_together(jobs, {}, {"slow": 0.1, "quick": 3.0})] == ["quick", "slow"]


@pytest.mark.parametrize("seconds", [{}, {"slow": 1.0}])
def test_the_time_that_checks_take_changes_no_batch(seconds: dict[str, float]) -> None:
    jobs = [job("quick", 8), job("slow", 500), replace(job("slow", 300), sample_id="x")]
    assert {tuple(j.sample_id for j in b) for b in sampled_together(jobs, {}, seconds)} == {
        ("quick/8",),
        ("slow/500", "x"),
    }
