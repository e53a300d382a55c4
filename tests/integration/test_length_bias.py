"""An answer that goes on from the log keeps the law of its length; one that starts over gets another, which is known.

The engine draws other random numbers in each process, so that nothing but the log ties an answer to what it was before.
A process dies before each of its steps with chance q, whatever it is doing. An answer that starts over is accepted when
its L tokens come through in one go, so accepted lengths follow p(L) (1 - q)^L, renormalised: the tilted law with
exp(-1/lambda) = 1 - q. This is so for any number of answers at a time, but those that run together die together, and
would be no independent draws: they run one at a time there.

Seeds are fixed; of others, one in a hundred has a p-value below 0.01 by chance.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mopdctl.engines.base import SampleRequest, Step, stream_seed
from mopdctl.engines.fake import FakeModel
from mopdctl.records import Prompt
from mopdctl.rollouts.generate import RolloutLog, generate
from mopdctl.rollouts.jobs import make_job
from mopdctl.store import disk

MODEL = FakeModel(mean_length=40, sigma=1.0, vocab_size=100)
BUDGET = 400
RATE = 1 / 60
SAMPLES = 2000
WINDOW = 20
"""Samples that are asked for together."""


class DiedError(Exception):
    """What kills a process here."""


@dataclass(frozen=True)
class Mortal:
    """The engine of one process: random numbers of its own, and a death that may come before any step."""

    model: FakeModel
    process: int
    deaths: np.random.Generator
    rate: float

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        salted = [replace(r, seed=stream_seed(r.seed, "process", self.process)) for r in requests]
        for step in self.model.stream(salted, temperature=temperature):
            if self.deaths.random() < self.rate:
                raise DiedError
            yield step


def lengths(folder: Path, *, level: str, rate: float, at_a_time: int, seed: int) -> tuple[list[int], int]:
    """Answer lengths of a run that goes on until it is done, and how often it died."""
    jobs = [
        make_job(
            Prompt(f"p{i}", (), None, {}),
            "0",
            seed=seed,
            group_id="",
            generation_index=0,
            domain="",
            teacher_id="",
            prompt_ids=(5,),
            max_new_tokens=BUDGET,
        )
        for i in range(SAMPLES)
    ]
    model, deaths = replace(MODEL, batch_size=at_a_time), np.random.default_rng(seed)
    done: dict[str, int] = {}
    for process in count():
        engine = Mortal(model, process, deaths, rate)
        with RolloutLog(folder, writer="w", level=level) as log:
            log.committed(list(done))
            try:
                while left := [job for job in jobs if job.sample_id not in done][:WINDOW]:
                    for sample in generate(
                        left,
                        engine,
                        log,
                        temperature=1.0,
                        policy_version=0,
                        tokenizer_fingerprint="",
                        sampling_fingerprint="",
                    ):
                        assert sample.sample_id not in done
                        done[sample.sample_id] = len(sample.response_ids)
                        log.committed([sample.sample_id])
            except DiedError:
                continue
        return list(done.values()), process
    raise AssertionError


def law(rate: float) -> NDArray[np.float64]:
    """The chance of a length of 1, 2, ... among the answers that no death interrupts."""
    hazard = MODEL.hazard(BUDGET)
    chance = np.concatenate([[1.0], np.cumprod(1 - hazard)[:-1]]) * hazard
    chance[-1] += 1 - chance.sum()  # cut by the budget
    tilted: NDArray[np.float64] = chance * (1 - rate) ** np.arange(1, BUDGET + 1)
    return tilted / tilted.sum()


def shares(found: Sequence[int]) -> NDArray[np.float64]:
    return np.bincount(found, minlength=BUDGET + 1)[1:] / len(found)


def ks_p_value(one: NDArray[np.float64], other: NDArray[np.float64], n: float) -> float:
    """Asymptotic p-value of the Kolmogorov-Smirnov test for shares of lengths; n is n1 n2 / (n1 + n2) for two samples.

    Lengths are whole numbers, for which it comes out too large rather than too small.
    """
    distance = np.abs(np.cumsum(one) - np.cumsum(other)).max()
    x = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)))


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine dies here, and there are thousands of processes."""
    monkeypatch.setattr(disk, "sync_file", lambda path: None)


def test_the_p_value_is_that_of_the_tables() -> None:
    for quantile, p_value in ((1.2238, 0.1), (1.3581, 0.05), (1.6276, 0.01)):
        step = quantile / (1000 + 0.12 + 0.11 / 1000)
        found = ks_p_value(np.array([step, 0, 1 - step]), np.array([0, step, 1 - step]), 1000**2)
        assert found == pytest.approx(p_value, rel=1e-3)


@pytest.mark.slow
def test_answers_that_go_on_from_the_log_are_as_long_as_uninterrupted_ones(tmp_path: Path) -> None:
    whole, none = lengths(tmp_path / "whole", level="process", rate=0, at_a_time=4, seed=1)
    resumed, deaths = lengths(tmp_path / "cut", level="process", rate=RATE, at_a_time=4, seed=2)
    with_each_other = ks_p_value(shares(resumed), shares(whole), SAMPLES / 2)
    with_the_law = ks_p_value(shares(resumed), law(0), SAMPLES)
    with_the_tilted = ks_p_value(shares(resumed), law(RATE), SAMPLES)
    print(f"{deaths} deaths, p {with_each_other:.2g} {with_the_law:.2g}, tilted {with_the_tilted:.2g}")  # noqa: T201
    assert none == 0
    assert deaths > 200
    assert with_each_other > 0.01
    assert with_the_law > 0.01
    assert with_the_tilted < 1e-12


@pytest.mark.slow
def test_answers_that_start_over_follow_the_tilted_law(tmp_path: Path) -> None:
    found, deaths = lengths(tmp_path / "off", level="off", rate=RATE, at_a_time=1, seed=3)
    with_the_tilted = ks_p_value(shares(found), law(RATE), SAMPLES)
    with_the_law = ks_p_value(shares(found), law(0), SAMPLES)
    print(f"{deaths} deaths, p {with_the_tilted:.2g}, untilted {with_the_law:.2g}")  # noqa: T201
    assert deaths > 1000
    assert with_the_tilted > 0.01
    assert with_the_law < 1e-12
    mean = float(law(RATE) @ np.arange(1, BUDGET + 1))
    assert mean < 0.7 * float(law(0) @ np.arange(1, BUDGET + 1))
    assert np.mean(found) == pytest.approx(mean, rel=0.06)
