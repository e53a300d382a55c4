"""Asking a judge: the requests of one step through one server into the journal.

A request that is answered in the journal is never sent again. A 429 delays and never drops; other failures are tried
again until `max_attempts`, and then are an entry with the kind of the error. A server that leaves most of a step
unanswered ends the run, which would learn from the rest alone.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from typing import Literal

from mopdctl.config.judge import JudgeReward
from mopdctl.engines.chat import ChatEngine, Reply
from mopdctl.engines.pace import Pace, backoff_s
from mopdctl.errors import MopdctlError
from mopdctl.rl.judge import Request
from mopdctl.rl.judge_journal import OK, Entry, ReplyJournal

REJECTED = "rejected"

_NOTE_AFTER = 5
"""Failures in a row that a person should hear of."""
_FAILING_AFTER = 20
"""Failures in a row from which the server has an outage, which is no fault of the requests that meet it."""
_DOWN_AFTER_S = 120.0
"""An outage of so long is no restart any more."""
_PATIENCE_S = 3600.0
"""A request that meets 429 for so long and nothing else is given up."""


class Asking:
    """One round of questions to one judge. What is on its way when the round ends early is waited for: it is paid."""

    def __init__(
        self,
        name: str,
        judge: JudgeReward,
        engine: ChatEngine,
        journal: ReplyJournal,
        on_note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`name` is the environment's."""
        self._name, self._judge, self._engine, self._journal = name, judge, engine, journal
        self._on_note = on_note
        self._pace = Pace(judge.max_concurrency)
        self._rng = random.Random()
        self._sending: set[asyncio.Task[None] | None] = set()
        self._over = asyncio.Event()
        self._failures_in_a_row = 0
        self._failing_since = 0.0
        self._last = Reply(None, b"")
        """The last failure."""

    async def ask(self, requests: Iterable[Request]) -> None:
        """Asks everything that has no answer yet; then all requests have an entry.

        Raises MopdctlError if the server takes no requests at all (its key, its credit, the model's name), answered
        none of these, or left more than half of them unanswered that it did not reject.
        """
        every = {request.key: request for request in requests}
        unanswered = [request for request in every.values() if self._state(request) != OK]
        if not unanswered:
            return
        await self._ask(unanswered)
        states = [self._state(request) for request in every.values()]
        lost = sum(state not in (OK, REJECTED) for state in states)
        if self._last.error == "unusable" or OK not in states or 2 * lost > len(states):
            why = f"no answer to {len(states) - states.count(OK)} of {len(states)} requests, the last time because of"
            raise MopdctlError(
                f"environment {self._name!r}: the judge at {self._judge.base_url} is down ({why} {self._last.detail}); "
                "nothing is lost, the same command goes on when it is back"
            )
        for request in every.values():
            if self._journal.get(request.key) is None:
                self._give_up(request, self._last)

    def _state(self, request: Request) -> str:
        entry = self._journal.get(request.key)
        return "" if entry is None else entry.state

    async def _ask(self, requests: Iterable[Request]) -> None:
        tasks = {asyncio.create_task(self._request(request)) for request in requests}
        over = asyncio.create_task(self._over.wait())
        waiting = set(tasks)
        try:
            while waiting and not self._over.is_set():
                done, _ = await asyncio.wait({*waiting, over}, return_when=asyncio.FIRST_COMPLETED)
                waiting -= done
                for task in done & tasks:
                    task.result()  # a bug, or a journal that cannot be written
        finally:
            self._over.set()
            over.cancel()
            for task in tasks - self._sending:
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)

    async def _request(self, request: Request) -> None:
        """Tries until there is an answer, it is given up, or the round is over."""
        failures, limited_since = 0, None
        while not self._over.is_set() and (reply := await self._send(request)) is not None:
            if reply.document is not None:
                self._failures_in_a_row = 0
                self._journal.add(Entry(request.key, OK, reply.raw.decode()))
                return
            self._last = reply
            if reply.error == REJECTED:  # the server is there, and has something against this one request
                self._failures_in_a_row = 0
                self._give_up(request, reply)
                return
            if reply.error == "rate_limited":
                limited_since = limited_since or time.monotonic()
                if time.monotonic() - limited_since >= _PATIENCE_S:
                    self._give_up(request, reply)
                    return
                continue
            limited_since = None
            failures += self._in_a_row(reply) < _FAILING_AFTER
            if failures >= self._judge.max_attempts:
                self._give_up(request, reply)
                return
            if self._is_down(reply):
                self._over.set()
            if self._over.is_set():
                return
            await asyncio.sleep(max(backoff_s(max(failures, 1), self._rng), min(reply.retry_after_s or 0.0, 120.0)))

    async def _send(self, request: Request) -> Reply | None:
        """One attempt; None if the round is over."""
        taken_at = await self._pace.slot()
        outcome: Literal["answered", "limited", "failed"] = "failed"
        reply = None
        try:
            if self._over.is_set():
                return None
            self._sending.add(asyncio.current_task())
            reply = await self._engine.complete(request.body, key=request.key)
            if reply.document is not None:
                outcome = "answered"
            elif reply.error == "rate_limited":
                outcome = "limited"
            return reply
        finally:
            self._sending.discard(asyncio.current_task())
            self._pace.release(taken_at, outcome, retry_after_s=reply.retry_after_s if reply else None)

    def _in_a_row(self, reply: Reply) -> int:
        """Counts one more failure."""
        if not self._failures_in_a_row:
            self._failing_since = time.monotonic()
        self._failures_in_a_row += 1
        if self._failures_in_a_row == _NOTE_AFTER:
            self._on_note(
                f"environment {self._name!r}: {_NOTE_AFTER} failures of the judge in a row ({reply.detail}); trying on"
            )
        return self._failures_in_a_row

    def _is_down(self, reply: Reply) -> bool:
        lasting = time.monotonic() - self._failing_since >= _DOWN_AFTER_S
        return reply.error == "unusable" or (self._failures_in_a_row >= _FAILING_AFTER and lasting)

    def _give_up(self, request: Request, reply: Reply) -> None:
        self._journal.add(Entry(request.key, reply.error or "", reply.raw.decode(errors="replace"), reply.detail))
