"""How many requests a server gets at once: additive increase, multiplicative decrease, and waits that spread out."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

_DECREASE = 0.75
_SUCCESSES_PER_INCREASE = 25
_FIRST_PAUSE_S = 0.5
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 120.0


class _Bucket:
    """A limit per minute: up to a second's worth at once, then evenly."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._rate = per_minute / 60
        self._room = self._capacity = max(1.0, self._rate)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until the limit allows one more."""
        self._room = min(self._capacity, self._room + (now - self._at) * self._rate)
        self._at = now
        return 0.0 if self._room > 0 else -self._room / self._rate + 1e-3

    def take(self, amount: float) -> None:
        """Debits; may go below zero, which later requests wait out."""
        self._room -= amount


class Pace:
    """Slots of one server. A slot is given back with what became of it.

    A 429 shrinks the window by a quarter, once for all requests that were under way together, and holds every new
    request until the server's `Retry-After` (or a growing pause) is over; each waiter adds a random share of it, so
    that they do not all come back in one instant. 25 answers widen the window by one.
    """

    def __init__(
        self,
        max_concurrency: int,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._max = max_concurrency
        self.window = float(max_concurrency)
        self.in_flight = 0
        self._clock, self._rng = clock, rng or random.Random()
        now = clock()
        self._requests = _Bucket(requests_per_minute, now) if requests_per_minute else None
        self._tokens = _Bucket(tokens_per_minute, now) if tokens_per_minute else None
        self._paused_until = now
        self._pause_s = 0.0
        self._shrunk_at = -1.0
        self._streak = 0
        self._limited_in_a_row = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def slot(self) -> float:
        """Waits for a slot; returns when it was taken, to be handed back to `release`."""
        while True:
            now = self._clock()
            wait = self.wait_s(now)
            if wait <= 0 and self.in_flight < int(self.window):
                self.in_flight += 1
                if self._requests:
                    self._requests.take(1)
                return now
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()
                raise

    def wait_s(self, now: float) -> float:
        """Seconds until pause and limits per minute allow a request, spread at random where there was a pause."""
        wait = max((bucket.wait_s(now) for bucket in (self._requests, self._tokens) if bucket), default=0.0)
        if self._paused_until > now:
            wait = max(wait, self._paused_until - now + self._rng.uniform(0, max(_SHORTEST_PAUSE_S, self._pause_s / 2)))
        return wait

    def release(
        self,
        taken_at: float,
        outcome: Literal["answered", "limited", "failed"],
        *,
        retry_after_s: float | None = None,
        tokens: int = 0,
    ) -> None:
        """Gives a slot back. `limited`: a 429 came; `failed`: another error, which says nothing of the pace."""
        self.in_flight -= 1
        if self._tokens:
            self._tokens.take(tokens)
        if outcome == "limited":
            self._limit(taken_at, retry_after_s)
        elif outcome == "answered":
            self._limited_in_a_row = 0
            self._streak += 1
            if self._streak >= _SUCCESSES_PER_INCREASE:
                self._streak = 0
                self.window = min(float(self._max), self.window + 1)
        self._wake()

    def _limit(self, taken_at: float, retry_after_s: float | None) -> None:
        now = self._clock()
        self._streak = 0
        if taken_at > self._shrunk_at:  # those that left before the last decrease say nothing new
            self.window = max(1.0, self.window * _DECREASE)
            self._shrunk_at = now
            self._limited_in_a_row += 1
        if not retry_after_s:
            retry_after_s = _FIRST_PAUSE_S * 2 ** min(self._limited_in_a_row - 1, 16)
        self._pause_s = min(max(retry_after_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        self._paused_until = max(self._paused_until, now + self._pause_s)

    def _wake(self) -> None:
        free = int(self.window) - self.in_flight
        while free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1


def backoff_s(failures: int, rng: random.Random) -> float:
    """Seconds before the next try after so many failed ones: doubling, half a second to a minute, half random."""
    return min(60.0, 0.5 * 2.0 ** min(failures - 1, 7)) * rng.uniform(0.5, 1.0)
