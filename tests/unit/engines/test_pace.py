"""Slots, pauses and limits of one server, on a clock that the test turns."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from mopdctl.engines.openai import retry_after_s
from mopdctl.engines.pace import Pace, backoff_s


class Clock:
    """Time that passes only while something sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        real_sleep = asyncio.sleep

        async def sleep(seconds: float) -> None:
            self._due.append(self.now + seconds)
            due = self._due[-1]
            while self.now < due:
                await real_sleep(0)
                if min(self._due) >= due:
                    self.now = max(self.now, due)
            self._due.remove(due)

        self._due: list[float] = []
        monkeypatch.setattr("mopdctl.engines.pace.asyncio.sleep", sleep)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 5))


def test_never_more_than_the_window_are_under_way(clock: Clock) -> None:
    async def work() -> int:
        pace = Pace(8, clock=clock)
        most = 0

        async def one() -> None:
            nonlocal most
            taken = await pace.slot()
            most = max(most, pace.in_flight)
            await asyncio.sleep(0.01)
            pace.release(taken, "answered")

        await asyncio.gather(*(one() for _ in range(100)))
        assert pace.in_flight == 0
        return most

    assert run(work()) == 8


def test_one_burst_of_429_shrinks_the_window_once_and_answers_widen_it_again(clock: Clock) -> None:
    async def work() -> None:
        pace = Pace(64, clock=clock, rng=random.Random(0))
        taken = [await pace.slot() for _ in range(64)]
        clock.now += 1
        for at in taken:
            pace.release(at, "limited", retry_after_s=1)
        assert pace.window == 48
        clock.now += 10
        for _ in range(25):
            pace.release(await pace.slot(), "answered")
        assert pace.window == 49
        for _ in range(25 * 20):
            pace.release(await pace.slot(), "answered")
        assert pace.window == 64

    run(work())


def test_the_window_never_falls_below_one(clock: Clock) -> None:
    async def work() -> None:
        pace = Pace(4, clock=clock, rng=random.Random(0))
        for _ in range(30):
            at = await pace.slot()
            clock.now += 0.001
            pace.release(at, "limited", retry_after_s=0.01)
        assert pace.window == 1.0

    run(work())


# NousResearch/hermes-agent #109234, bytedance/deer-flow #4294: all workers came back at the same instant
def test_fifty_waiters_come_back_spread_over_more_than_a_tenth_of_the_pause(clock: Clock) -> None:
    async def work() -> list[float]:
        pace = Pace(50, clock=clock, rng=random.Random(1))
        pace.release(await pace.slot(), "limited", retry_after_s=10)
        pace.window = 50.0
        begun = clock.now
        times: list[float] = []

        async def one() -> None:
            times.append(await pace.slot() - begun)

        await asyncio.gather(*(one() for _ in range(50)))
        return times

    times = run(work())
    assert min(times) >= 10
    assert max(times) - min(times) > 1
    assert len({round(t, 2) for t in times}) > 40


def test_without_a_word_from_the_server_pauses_double(clock: Clock) -> None:
    async def work() -> list[float]:
        pace = Pace(1, clock=clock, rng=random.Random(0))
        pauses = []
        for _ in range(5):
            at = await pace.slot()
            clock.now += 0.001
            pace.release(at, "limited")
            pauses.append(pace._pause_s)
        return pauses

    assert run(work()) == [0.5, 1.0, 2.0, 4.0, 8.0]


# oumi-ai/oumi #2516
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("Wed, 21 Oct 2015 07:28:05 GMT", 5.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
        ("soon", None),
        ("", None),
        ("inf", None),
        ("nan", None),
        (None, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date_and_garbage_is_none(
    value: str | None, expected: float | None
) -> None:
    assert retry_after_s(value, now=1445412480.0) == expected


def test_a_huge_retry_after_is_capped(clock: Clock) -> None:
    async def work() -> float:
        pace = Pace(1, clock=clock, rng=random.Random(0))
        pace.release(await pace.slot(), "limited", retry_after_s=1e9)
        return pace.wait_s(clock.now)

    assert run(work()) <= 180


def test_requests_per_minute_are_kept(clock: Clock) -> None:
    async def work() -> float:
        pace = Pace(100, requests_per_minute=120, clock=clock)
        begun = clock.now
        for _ in range(61):
            pace.release(await pace.slot(), "answered")
        return clock.now - begun

    assert 28 <= run(work()) <= 32


def test_tokens_per_minute_are_kept(clock: Clock) -> None:
    async def work() -> float:
        pace = Pace(100, tokens_per_minute=6000, clock=clock)
        begun = clock.now
        for _ in range(21):
            pace.release(await pace.slot(), "answered", tokens=100)
        return clock.now - begun

    assert 18 <= run(work()) <= 22


def test_backoff_doubles_with_jitter_up_to_a_minute() -> None:
    rng = random.Random(0)
    for failures, most in [(1, 0.5), (2, 1.0), (3, 2.0), (8, 60.0), (60, 60.0)]:
        found = [backoff_s(failures, rng) for _ in range(200)]
        assert most / 2 <= min(found) < max(found) <= most
        assert max(found) - min(found) > most / 10
