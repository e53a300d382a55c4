"""Asking: requests through their members into the journal, each until it is answered, given up or passed on.

A request that is in the journal is never sent again. A 429 delays and never drops; other failures are tried again until
`max_attempts`, then the request's fall-back is asked. A member that answers nothing any more is down: its requests move
to their fall-backs, and a note says so. Where no fall-back is left the run stops, since every further row would fail.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from mopdctl.config.committee import Price
from mopdctl.engines.chat import ChatEngine, Reply
from mopdctl.engines.pace import Pace, backoff_s
from mopdctl.errors import MopdctlError
from mopdctl.gensft.answers import usage
from mopdctl.gensft.journal import Journal

_BYTES_PER_TOKEN = 3.5
"""For estimates before a server has counted."""
_TEMPLATE_TOKENS = 32
"""What a chat template may add to a message."""
_NOTE_AFTER = 5
"""Failures in a row that a person should hear of."""
_FAILING_AFTER = 20
"""Failures in a row from which a member has an outage, which is no fault of the requests that meet it."""
_DOWN_AFTER_S = 120.0
"""An outage of so long is no restart any more: the member is down."""
_PERHAPS_PAID = ("timeout", "malformed")
"""Ends of attempts for which a server may have charged; a budget counts the most that they can have taken."""
_PATIENCE_S = 3600.0
"""A member that answers 429 for so long and nothing else is down."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to one member."""

    key: str
    """32 hex digits, the fingerprint of endpoint and body."""
    member: str
    body: dict[str, Any]
    kind: str = "chat"
    """`chat` or `pooling`."""


@dataclass(slots=True)
class Party:
    """A member with its engine, its pace and its state."""

    alias: str
    engine: ChatEngine
    pace: Pace
    price: Price | None
    max_attempts: int
    failures_in_a_row: int = 0
    failing_since: float | None = None
    """When the first of these was."""
    limited_since: float | None = None
    """When its first 429 came after which nothing else did."""
    down: str = ""
    """Why it answers nothing any more; empty while it does."""


@dataclass(slots=True)
class Spending:
    """What a run has spent, from the journal on, and what it may."""

    max_cost: float | None = None
    max_tokens: int | None = None
    cost: float = 0.0
    """USD of answers with a known price."""
    tokens: int = 0
    unpriced: int = 0
    """Answers whose price or token counts are unknown."""
    reserved_cost: float = 0.0
    reserved_tokens: int = 0

    def allows(self, cost: float, tokens: int) -> bool:
        """Whether a request of at most this size fits beside what is spent and under way."""
        return (self.max_cost is None or self.cost + self.reserved_cost + cost <= self.max_cost) and (
            self.max_tokens is None or self.tokens + self.reserved_tokens + tokens <= self.max_tokens
        )

    def reserve(self, cost: float, tokens: int) -> None:
        """Sets aside what a request may take."""
        self.reserved_cost += cost
        self.reserved_tokens += tokens

    def release(self, cost: float, tokens: int) -> None:
        """Gives back what was set aside."""
        self.reserve(-cost, -tokens)

    def book(self, cost: float, tokens: int) -> None:
        """Books what may have been charged although no answer came."""
        self.cost, self.tokens, self.unpriced = self.cost + cost, self.tokens + tokens, self.unpriced + 1

    def add(self, document: Mapping[str, Any], price: Price | None, most: tuple[float, int]) -> int:
        """Books an answer and returns its tokens; where the server did not count them, the most it can have taken."""
        prompt, completion = usage(document)
        cost, tokens = booked(document, price, most)
        self.cost, self.tokens = self.cost + cost, self.tokens + tokens
        self.unpriced += price is None or prompt is None or completion is None
        return (prompt or 0) + (completion or 0)


def booked(document: Mapping[str, Any] | None, price: Price | None, most: tuple[float, int]) -> tuple[float, int]:
    """USD and tokens of an attempt for a budget: as the server counted them, else the most that they can be."""
    prompt, completion = usage(document)
    if prompt is None or completion is None:
        return most
    return (price.cost_usd(prompt, completion) if price else 0.0), prompt + completion


@dataclass(slots=True)
class Progress:
    """Figures of one round of asking."""

    total: int | None
    """None where it is not known before the end."""
    done: int = 0
    """Requests that need no more asking, those found in the journal included."""
    found: int = 0
    """Of those, found in the journal."""
    tokens: int = 0
    """Tokens of answers that came in this round."""
    states: Counter[str] = field(default_factory=Counter)
    """How attempts ended, by state."""


def estimated_prompt_tokens(body: Mapping[str, Any]) -> int:
    """Prompt tokens as the length of the text lets one guess."""
    return int(_prompt_bytes(body) / _BYTES_PER_TOKEN)


def most_tokens(body: Mapping[str, Any]) -> tuple[int, int]:
    """The most prompt and answer tokens that a request can take: a token has at least one byte.

    An answer without a limit of its own counts as 4096; budgets are refused where there is none.
    """
    return _prompt_bytes(body), int(body.get("max_completion_tokens") or body.get("max_tokens") or 4096)


def _prompt_bytes(body: Mapping[str, Any]) -> int:
    said = sum(
        len(str(m.get("content") or "").encode()) + len(str(m.get("tool_calls") or "")) for m in body["messages"]
    )
    return said + _TEMPLATE_TOKENS * len(body["messages"]) + len(str(body.get("tools") or "").encode())


def most_of(body: Mapping[str, Any], price: Price | None) -> tuple[float, int]:
    """The most USD and tokens that a request can take."""
    prompt, completion = most_tokens(body)
    return (price.cost_usd(prompt, completion) if price else 0.0), prompt + completion


def answered(chain: tuple[Request, ...], journal: Journal) -> bool:
    """Whether a chain needs no more asking: one of it is answered, or all of it was rejected."""
    for request in chain:
        state = journal.state(request.key)
        if state is None:
            return any(journal.state(other.key) == "ok" for other in chain)
        if state == "ok":
            return True
    return True


class Asking:
    """One round of asking. `stop` ends it early: what is under way is waited for, the rest stays pending.

    With `may_fail` a member that is down only leaves its own requests unanswered.
    """

    def __init__(
        self,
        parties: Mapping[str, Party],
        journal: Journal,
        spending: Spending,
        *,
        may_fail: bool = False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_note: Callable[[str], None] = lambda line: None,
        rng: random.Random | None = None,
    ) -> None:
        self._parties, self._journal, self._spending = parties, journal, spending
        self._may_fail = may_fail
        self._on_progress, self._on_note = on_progress, on_note
        self._rng = rng or random.Random()
        self._stopping = ""
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: set[asyncio.Task[Any] | None] = set()
        self._keys: set[str] = set()
        """Of chains that are being asked: an equal request (two answers alike, before one judge) is asked once."""
        self._all_begun = False
        self._heard: set[str] = set()
        """Members that have answered a request of this round, now or in an earlier run."""
        self.lost: set[str] = set()
        """Members that went down with requests still to come, or without ever answering: more is wrong with them than
        with the few requests that were left."""

    def stop(self, why: str) -> None:
        """Begins no more requests. Those that wait for their turn are dropped, those under way are not."""
        self._stopping = self._stopping or why
        for task in self._tasks - self._sending - {asyncio.current_task()}:
            task.cancel()

    async def ask(self, chains: Iterator[tuple[Request, ...]], *, total: int | None) -> str:
        """Asks every chain of a request and its fall-backs; returns why it stopped early, or "".

        Raises MopdctlError if a member is lost whose requests nobody else may answer.
        """
        progress = Progress(total)
        for party in self._parties.values():  # what was down a round ago may be back
            party.down, party.failures_in_a_row, party.failing_since, party.limited_since = "", 0, None, None
        room = asyncio.Semaphore(2 * sum(max(1, int(party.pace.window)) for party in self._parties.values()))

        def ended(task: asyncio.Task[None], key: str) -> None:
            self._tasks.discard(task)
            self._keys.discard(key)
            room.release()
            if not task.cancelled() and (error := task.exception()):
                self._failure = self._failure or error
                self.stop(str(error))

        try:
            for chain in chains:
                if self._stopping:
                    break
                if chain[0].key in self._keys or answered(chain, self._journal):
                    progress.done += 1
                    progress.found += 1
                    self._heard.update(r.member for r in chain if self._journal.state(r.key) == "ok")
                    if progress.found % 1000 == 0:
                        self._on_progress(progress)
                        await asyncio.sleep(0)
                    continue
                await room.acquire()
                task = asyncio.create_task(self._chain(chain, progress))
                self._tasks.add(task)
                task.add_done_callback(partial(ended, key=chain[0].key))
                self._keys.add(chain[0].key)
            self._all_begun = True
            while self._tasks and not self._stopping:
                await asyncio.wait(self._tasks, timeout=1.0)
        except asyncio.CancelledError:
            self.stop("interrupted")
        if self._tasks:  # paid for already: each ends within its member's timeout
            self._on_note(f"waiting for {len(self._sending)} answers that are under way")
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError:
                if self._stopping == "interrupted":
                    raise  # the second time
                self._failure, self._stopping = None, "interrupted"
                await asyncio.wait(self._tasks)
        self._on_progress(progress)
        if self._failure:
            raise self._failure
        return self._stopping

    async def _chain(self, chain: tuple[Request, ...], progress: Progress) -> None:
        """Asks a request, then its fall-backs, until one is answered."""
        for request in chain:
            if self._journal.state(request.key) == "rejected":
                continue
            party = self._parties[request.member]
            if await self._request(request, party, progress):
                break
            if self._stopping:
                return
        else:
            left = [r.member for r in chain if self._journal.state(r.key) != "rejected"]
            down = {alias: self._parties[alias].down for alias in left}
            if down and all(down.values()) and down.keys() <= self.lost and not self._may_fail:
                alias, why = next(iter(down.items()))
                raise MopdctlError(
                    f"member {alias!r} is down ({why}) and nobody else may answer; nothing is lost, the same command "
                    "goes on when it is back"
                )
        progress.done += 1
        self._on_progress(progress)

    async def _request(self, request: Request, party: Party, progress: Progress) -> bool:
        """Tries until there is an answer (True) or it is given up (False)."""
        failures = errors = tries = 0
        most = most_of(request.body, party.price)
        while not party.down and not self._stopping:
            taken_at = await party.pace.slot()
            outcome: Literal["answered", "limited", "failed"] = "failed"
            reply, tokens = None, 0
            try:
                if party.down or not await self._afford(*most):
                    return False
                tries += 1
                try:
                    reply = await self._send(request, party, tries, most)
                finally:
                    self._spending.release(*most)
                if reply.document is not None:
                    outcome, tokens = "answered", self._spending.add(reply.document, party.price, most)
                elif reply.error == "rate_limited":
                    outcome = "limited"
                elif reply.error in _PERHAPS_PAID:
                    self._spending.book(*most)
            finally:
                wait = reply.retry_after_s if reply else None
                party.pace.release(taken_at, outcome, retry_after_s=wait, tokens=tokens)
            progress.states[reply.error or "ok"] += 1
            progress.tokens += tokens
            if reply.document is not None or reply.error == "rejected":
                party.failures_in_a_row, party.failing_since, party.limited_since = 0, None, None
                self._heard.add(party.alias)
                return reply.document is not None
            self._watch(party, reply)
            if outcome == "limited" or party.down:
                continue
            errors += 1
            failures += party.failures_in_a_row < _FAILING_AFTER
            if failures >= party.max_attempts:
                return False
            await asyncio.sleep(max(backoff_s(errors, self._rng), min(reply.retry_after_s or 0.0, 120.0)))
        return False

    async def _send(self, request: Request, party: Party, attempt: int, most: tuple[float, int]) -> Reply:
        """One attempt, with its two lines in the journal. It is not cancelled by `stop`."""
        self._journal.sent(request.key, most)
        self._sending.add(asyncio.current_task())
        began = time.monotonic()
        try:
            reply = await party.engine.complete(request.body, key=request.key, kind=request.kind)
        finally:
            self._sending.discard(asyncio.current_task())
        more: dict[str, Any] = {"h": reply.status} if reply.status not in (None, 200) else {}
        if reply.document is not None or reply.error in _PERHAPS_PAID:
            more["w"] = booked(reply.document, party.price, most)
        self._journal.add(
            request.key,
            reply.error or "ok",
            attempt=attempt,
            latency_s=time.monotonic() - began,
            member=party.alias,
            raw=reply.raw,
            **more,
            **({"e": reply.detail} if reply.detail else {}),
        )
        return reply

    def _watch(self, party: Party, reply: Reply) -> None:
        """Decides whether a member is down after a failed attempt."""
        if party.down:
            return
        if reply.error == "unusable":
            party.down = reply.detail
        elif reply.error == "rate_limited":
            party.limited_since = party.limited_since or time.monotonic()
            if time.monotonic() - party.limited_since > _PATIENCE_S:
                party.down = f"nothing but 429 for {_PATIENCE_S:.0f} s"
        else:
            party.limited_since = None
            party.failures_in_a_row += 1
            party.failing_since = party.failing_since or time.monotonic()
            if party.failures_in_a_row == _NOTE_AFTER:
                self._on_note(f"member {party.alias!r}: {_NOTE_AFTER} failures in a row ({reply.detail}); trying on")
            lasting = time.monotonic() - party.failing_since >= _DOWN_AFTER_S
            if party.failures_in_a_row >= _FAILING_AFTER and lasting:
                party.down = f"{party.failures_in_a_row} failures in a row, the last one: {reply.detail}"
        if party.down:
            if not self._all_begun or party.alias not in self._heard:
                self.lost.add(party.alias)
            then = "they stay unanswered" if self._may_fail else "they go to their fall-backs, where they have any"
            self._on_note(f"member {party.alias!r} is down ({party.down}); its requests: {then}")

    async def _afford(self, cost: float, tokens: int) -> bool:
        """Reserves the most that a request can take; waits while others under way hold what it needs."""
        while not self._spending.allows(cost, tokens):
            if self._spending.reserved_tokens <= 0:
                self.stop("the budget is used up")
                return False
            await asyncio.sleep(0.02)
        self._spending.reserve(cost, tokens)
        return True
