"""Which prompts a step takes, and which jobs are sampled together."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.config.rl import RlTrainConfig
from mopdctl.records import Prompt
from mopdctl.rl import mixture as rl_mixture
from mopdctl.rl.mixture import Mixture, sampled_together
from mopdctl.rollouts.jobs import Job
from mopdctl.train.order import draw_mixture


def mixture(sizes: list[int], weights: list[float]) -> Mixture:
    prompts = [
        Prompt(f"{name}/{i}", (), None, {"environment": name})
        for name, size in zip("abcd", sizes, strict=False)
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


def test_further_rows_are_others_and_of_rewarded_environments() -> None:
    found = replace(mixture([14, 30, 16], [1, 1, 1]), taught=frozenset({1}))
    used = {0, 3, 44, 59}
    for round_ in range(1, 6):
        rows = found.more_rows(2, round_, 5, settings(), used=used)
        assert len(rows) == len(set(rows)) == 5
        assert set(rows) <= {*range(14), *range(44, 60)} - used
        assert {row < 14 for row in rows} == {True, False}
    # No more than there are, and none twice.
    assert sorted(found.more_rows(0, 1, 99, settings(), used={1})) == [0, *range(2, 14), *range(44, 60)]
    assert found.more_rows(0, 1, 3, settings(), used={*range(60)}) == []


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(0, 30),
    st.integers(1, 9),
    st.data(),
)
def test_every_step_is_a_piece_of_one_draw(sizes: list[int], step: int, batch_size: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=len(sizes), max_size=len(sizes)))
    train = settings(steps=25, batch_size=batch_size)
    whole = draw_mixture((step + 1) * batch_size, sizes, weights, train.seed).tolist()
    assert mixture(sizes, weights).rows(step, train) == whole[step * batch_size :]


def test_large_environments_are_drawn_from_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def draw(count: int, *arguments: Any) -> Any:
        drawn.append(count)
        return draw_mixture(count, *arguments)

    monkeypatch.setattr(rl_mixture, "draw_mixture", draw)
    found, train = Mixture([], [100_003, 50_021], [3, 1]), settings(steps=300, batch_size=64)
    rows = [row for step in range(300) for row in found.rows(step, train)]
    assert len(set(rows)) == len(rows) == 300 * 64
    assert drawn == [300 * 64]


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
