import math

import pytest

from mopdctl.config.train import TrainConfig
from mopdctl.train.optimizer import learning_rate


def rates(**settings: object) -> list[float]:
    config = TrainConfig.model_validate({"learning_rate": 8e-4, **settings})
    return [learning_rate(step, config) for step in range(config.steps + 1)]


def test_constant_after_a_linear_rise_that_does_not_begin_at_zero() -> None:
    assert rates(steps=6, warmup_steps=3) == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 8e-4, 8e-4, 8e-4], rel=1e-12)


def test_constant_without_warm_up() -> None:
    assert rates(steps=3) == [8e-4] * 4


def test_linear_falls_evenly_from_the_peak_to_the_final_share() -> None:
    got = rates(steps=5, warmup_steps=1, schedule="linear", final_learning_rate_share=0.5)
    assert got == pytest.approx([4e-4, 8e-4, 7e-4, 6e-4, 5e-4, 4e-4], rel=1e-12)


def test_cosine_at_its_quarters() -> None:
    got = rates(steps=4, schedule="cosine", final_learning_rate_share=0.0)
    quarter = 4e-4 * (1 + math.sqrt(0.5))
    assert got == pytest.approx([8e-4, quarter, 4e-4, 8e-4 - quarter, 0.0], rel=1e-12, abs=1e-18)


def test_cosine_ends_at_the_final_share_and_is_halfway_in_the_middle() -> None:
    got = rates(steps=10, warmup_steps=2, schedule="cosine", final_learning_rate_share=0.1)
    assert got[2] == 8e-4
    assert got[6] == pytest.approx(8e-4 * 0.55, rel=1e-12)
    assert got[10] == pytest.approx(8e-5, rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_the_rate_rises_to_the_peak_and_never_rises_again(schedule: str, warmup: int) -> None:
    got = rates(steps=20, warmup_steps=warmup, schedule=schedule)
    top = got.index(max(got))
    assert max(got) <= 8e-4
    assert got[:top] == sorted(got[:top])
    assert got[top:] == sorted(got[top:], reverse=True)
    assert min(got) > 0.0


def test_warm_up_longer_than_the_run_is_no_division_by_zero() -> None:
    got = rates(steps=2, warmup_steps=5, schedule="linear")
    assert got == pytest.approx([8e-4 / 6, 16e-4 / 6, 24e-4 / 6], rel=1e-12)
