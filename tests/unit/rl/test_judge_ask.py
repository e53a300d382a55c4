"""Questions to a judge that answers, fails, is slow, or is gone."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mopdctl.config.judge import JudgeReward
from mopdctl.engines.chat import Reply
from mopdctl.errors import InputError, MopdctlError
from mopdctl.rl import judge_ask
from mopdctl.rl.judge import Request
from mopdctl.rl.judge_ask import Asking
from mopdctl.rl.judge_journal import OK, Entry, ReplyJournal

DOCUMENT: dict[str, Any] = {"choices": [{}]}
ANSWER = Reply(DOCUMENT, json.dumps(DOCUMENT).encode(), status=200)


def failure(kind: Any, **more: Any) -> Reply:
    return Reply(None, b"null", kind, detail=f"it was {kind}", **more)


class Scripted:
    """Answers by request and how often that came before."""

    def __init__(self, answer: Callable[[str, int], Reply]) -> None:
        self.came: Counter[str] = Counter()
        self.under_way = self.most_under_way = 0
        self._answer = answer

    async def complete(self, body: dict[str, Any], *, key: str, kind: str = "chat") -> Reply:
        before = self.came[key]
        self.came[key] += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return self._answer(key, before)

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_ask, "backoff_s", lambda failures, rng: 0.0)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[ReplyJournal]:
    with ReplyJournal(tmp_path / "journal.jsonl") as found:
        yield found


def ask(engine: Scripted, journal: ReplyJournal, count: int, **changes: Any) -> list[str]:
    """Asks `count` requests and returns their states."""
    settings = {"base_url": "http://host/v1", "model": "m", "max_attempts": 3, **changes}
    requests = [Request(f"{number:032x}", {"number": number}) for number in range(count)]
    asking = Asking("poems", JudgeReward.model_validate(settings), engine, journal)
    asyncio.run(asking.ask(requests))
    found = [journal.get(request.key) for request in requests]
    return [entry.state for entry in found if entry is not None]


def number(key: str) -> int:
    return int(key, 16)


def test_what_is_answered_is_never_asked_again(journal: ReplyJournal) -> None:
    engine = Scripted(lambda key, before: ANSWER)
    assert ask(engine, journal, 5) == [OK] * 5
    assert ask(engine, journal, 8) == [OK] * 8
    assert set(engine.came.values()) == {1}
    assert len(engine.came) == 8


def test_no_more_requests_than_allowed_are_under_way(journal: ReplyJournal) -> None:
    engine = Scripted(lambda key, before: ANSWER)
    ask(engine, journal, 30, max_concurrency=4)
    assert engine.most_under_way == 4


def test_a_429_delays_and_drops_nothing(journal: ReplyJournal) -> None:
    # NVIDIA-NeMo/DataDesigner #703
    engine = Scripted(lambda key, before: failure("rate_limited", retry_after_s=0.001) if before < 2 else ANSWER)
    assert ask(engine, journal, 3, max_attempts=1) == [OK] * 3


def test_failures_are_tried_again_and_then_are_a_state(journal: ReplyJournal) -> None:
    kinds = ["server_error", "timeout", "connection", "malformed", "rejected"]
    engine = Scripted(lambda key, before: failure(kinds[number(key)]) if number(key) < 5 else ANSWER)
    assert ask(engine, journal, 12) == [*kinds, *[OK] * 7]
    assert [engine.came[f"{n:032x}"] for n in range(6)] == [3, 3, 3, 3, 1, 1]


def test_a_failed_request_is_asked_again_by_the_next_run(journal: ReplyJournal) -> None:
    assert ask(Scripted(lambda key, before: failure("timeout") if number(key) == 0 else ANSWER), journal, 4)[0] != OK
    engine = Scripted(lambda key, before: ANSWER)
    assert ask(engine, journal, 4) == [OK] * 4
    assert list(engine.came) == [f"{0:032x}"]


def test_a_server_that_answers_nothing_ends_the_run_with_one_line(journal: ReplyJournal) -> None:
    # NVIDIA-NeMo/Gym #1058: a judge that was down was silently replaced
    with pytest.raises(MopdctlError) as raised:
        ask(Scripted(lambda key, before: failure("connection")), journal, 4)
    assert str(raised.value) == (
        "environment 'poems': the judge at http://host/v1 is down (no answer to 4 of 4 requests, the last time because "
        "of it was connection); nothing is lost, the same command goes on when it is back"
    )
    assert raised.value.exit_code == 1
    assert ask(Scripted(lambda key, before: ANSWER), journal, 4) == [OK] * 4


def test_a_server_that_goes_down_in_the_middle_ends_the_run_and_answers_stay(
    journal: ReplyJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_ask, "_DOWN_AFTER_S", 0.05)
    engine = Scripted(lambda key, before: ANSWER if number(key) < 10 else failure("connection"))
    with pytest.raises(MopdctlError, match="no answer to 90 of 100 requests"):
        ask(engine, journal, 100, max_concurrency=5)
    again = Scripted(lambda key, before: ANSWER)
    assert ask(again, journal, 100) == [OK] * 100
    assert min(map(number, again.came)) == 10


def test_an_outage_is_no_fault_of_the_requests_that_meet_it(journal: ReplyJournal) -> None:
    sent = 0

    def answer(key: str, before: int) -> Reply:
        nonlocal sent
        sent += 1
        return failure("connection") if 10 < sent <= 500 else ANSWER

    assert ask(Scripted(answer), journal, 100, max_concurrency=20, max_attempts=2).count(OK) >= 80


def test_a_few_requests_that_always_fail_stop_nothing_now_or_later(
    journal: ReplyJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_ask, "_DOWN_AFTER_S", 0.05)

    def answer(key: str, before: int) -> Reply:
        return failure("server_error") if number(key) >= 30 else ANSWER

    for _ in range(2):
        assert ask(Scripted(answer), journal, 40, max_attempts=100) == [OK] * 30 + ["server_error"] * 10


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_refused_key_ends_the_run_at_once(journal: ReplyJournal, concurrency: int) -> None:
    engine = Scripted(lambda key, before: failure("unusable"))
    with pytest.raises(MopdctlError, match="it was unusable"):
        ask(engine, journal, 1000, max_concurrency=concurrency)
    assert sum(engine.came.values()) <= concurrency


def test_a_journal_that_cannot_be_written_ends_the_run(journal: ReplyJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: ReplyJournal, entry: Entry) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr(ReplyJournal, "add", full)
    engine = Scripted(lambda key, before: ANSWER)
    with pytest.raises(InputError, match="disk is full"):
        ask(engine, journal, 1000, max_concurrency=2)
    assert len(engine.came) < 20
