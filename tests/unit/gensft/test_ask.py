"""Asking: every request ends in one state, nothing is asked for twice, a 429 delays and never drops."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mopdctl.config.committee import Price
from mopdctl.engines.chat import Reply
from mopdctl.engines.pace import Pace
from mopdctl.errors import MopdctlError
from mopdctl.files import digest
from mopdctl.gensft.ask import Asking, Party, Progress, Request, Spending
from mopdctl.gensft.journal import Journal

Script = Callable[[Request, int], Reply]


def good(tokens: tuple[int, int] | None = (10, 5)) -> Reply:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}}
    document: dict[str, Any] = {"choices": [], **usage}
    return Reply(document, json.dumps(document).encode(), status=200)


def bad(kind: Any, **more: Any) -> Reply:
    return Reply(None, b'"no"', kind, detail=f"it was {kind}", **more)


class Scripted:
    """Answers as the script says for the request and the number of times that it came before."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.seen: Counter[str] = Counter()
        self.in_flight = self.most = 0

    async def complete(self, body: dict[str, Any], *, key: str, kind: str = "chat") -> Reply:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        self.seen[key] += 1
        reply = self._script(Request(key, "", body), self.seen[key])
        self.in_flight -= 1
        return reply

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits take a thousandth of their time."""
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        await real(seconds / 1000)

    monkeypatch.setattr("mopdctl.gensft.ask.asyncio.sleep", sleep)
    monkeypatch.setattr("mopdctl.engines.pace.asyncio.sleep", sleep)
    monkeypatch.setattr("mopdctl.engines.pace._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("mopdctl.engines.pace._SHORTEST_PAUSE_S", 0.001)
    monkeypatch.setattr("mopdctl.gensft.ask._DOWN_AFTER_S", 0.0)


def party(alias: str, script: Script, **more: Any) -> Party:
    return Party(alias, Scripted(script), Pace(8), more.pop("price", None), more.pop("max_attempts", 4), **more)


def request(number: int, member: str = "a") -> Request:
    return Request(digest(f"{member}{number}"), member, {"messages": [{"role": "user", "content": "x" * 35}]})


def run(
    path: Path,
    parties: list[Party],
    chains: list[tuple[Request, ...]],
    spending: Spending | None = None,
    **more: Any,
) -> tuple[str, Journal, Progress]:
    journal = Journal(path)
    last = Progress(0)

    def on_progress(progress: Progress) -> None:
        nonlocal last
        last = progress

    asking = Asking(
        {p.alias: p for p in parties},
        journal,
        spending or Spending(),
        on_progress=on_progress,
        rng=random.Random(0),
        **more,
    )
    why = asyncio.run(asyncio.wait_for(asking.ask(iter(chains), total=len(chains)), 20))
    return why, journal, last


def test_every_request_is_answered_once_and_a_second_run_asks_nothing(tmp_path: Path) -> None:
    chains = [(request(i),) for i in range(100)]
    one = party("a", lambda r, n: good())
    why, journal, progress = run(tmp_path / "j", [one], chains)
    assert why == ""
    assert (progress.done, progress.found, progress.tokens) == (100, 0, 1500)
    assert set(one.engine.seen.values()) == {1}  # type: ignore[attr-defined]
    assert one.engine.most == 8  # type: ignore[attr-defined]
    journal.close()
    again = party("a", lambda r, n: good())
    why, journal, progress = run(tmp_path / "j", [again], chains)
    assert (progress.done, progress.found, journal.calls) == (100, 100, 0)


# NVIDIA-NeMo/DataDesigner #703, #730: rows were dropped under 429
def test_a_429_delays_a_request_however_often_and_never_drops_it(tmp_path: Path) -> None:
    limited = party("a", lambda r, n: bad("rate_limited", status=429, retry_after_s=0.001) if n < 30 else good())
    why, journal, progress = run(tmp_path / "j", [limited], [(request(i),) for i in range(20)])
    assert why == ""
    assert all(journal.state(request(i).key) == "ok" for i in range(20))
    assert progress.states["rate_limited"] == 20 * 29


def test_errors_are_tried_again_and_then_the_fall_back_is_asked(tmp_path: Path) -> None:
    def script(r: Request, n: int) -> Reply:
        return bad(["server_error", "timeout", "malformed", "connection"][n % 4]) if r.key == broken else good()

    broken = request(3).key
    one, other = party("a", script, max_attempts=4), party("b", lambda r, n: good())
    chains = [(request(i), request(i, "b")) for i in range(10)]
    _, journal, progress = run(tmp_path / "j", [one, other], chains)
    assert one.engine.seen[broken] == 4  # type: ignore[attr-defined]
    assert list(other.engine.seen) == [request(3, "b").key]  # type: ignore[attr-defined]
    assert journal.state(broken) is None
    assert progress.done == 10
    assert not one.down


def test_a_rejected_request_is_not_tried_again_in_this_run_or_the_next(tmp_path: Path) -> None:
    one = party("a", lambda r, n: bad("rejected", status=400))
    chains = [(request(0),)]
    _, journal, _ = run(tmp_path / "j", [one], chains)
    assert journal.state(request(0).key) == "rejected"
    journal.close()
    _, journal, progress = run(tmp_path / "j", [one], chains)
    assert (journal.calls, progress.found) == (0, 1)


def test_a_rejected_request_goes_to_the_fall_back_also_after_a_kill_between_the_two(tmp_path: Path) -> None:
    _, journal, _ = run(tmp_path / "j", [party("a", lambda r, n: bad("rejected"))], [(request(0),)])
    journal.close()
    other = party("b", lambda r, n: good())
    parties = [party("a", lambda r, n: good()), other]
    _, journal, _ = run(tmp_path / "j", parties, [(request(0), request(0, "b"))])
    assert journal.calls == 1
    assert journal.state(request(0, "b").key) == "ok"


def test_a_member_that_is_down_gives_its_requests_to_the_fall_back_and_says_so(tmp_path: Path) -> None:
    notes: list[str] = []
    dead = party("a", lambda r, n: bad("server_error", status=503), max_attempts=3)
    chains = [(request(i), request(i, "b")) for i in range(100)]
    _, journal, progress = run(tmp_path / "j", [dead, party("b", lambda r, n: good())], chains, on_note=notes.append)
    assert progress.done == 100
    assert all(journal.state(request(i, "b").key) == "ok" for i in range(100))
    assert sum(dead.engine.seen.values()) < 40  # type: ignore[attr-defined]
    assert "member 'a': 5 failures in a row" in notes[0]
    assert "member 'a' is down" in notes[1]
    assert "fall-backs" in notes[1]
    assert len(notes) == 2


# NVIDIA-NeMo/DataDesigner #757, #201: all rows failed, with a misleading error
def test_a_dead_member_without_a_fall_back_stops_the_run_with_one_line(tmp_path: Path) -> None:
    dead = party("a", lambda r, n: bad("unusable", status=401))
    with pytest.raises(MopdctlError, match=r"member .a. is down .it was unusable.* nothing is lost"):
        run(tmp_path / "j", [dead], [(request(i),) for i in range(1000)])
    assert sum(dead.engine.seen.values()) <= 8  # type: ignore[attr-defined]


# NVIDIA-NeMo/Gym #1058: a dead judge has no silent stand-in
def test_a_dead_judge_leaves_its_requests_unanswered_and_stops_nothing(tmp_path: Path) -> None:
    dead, alive = party("a", lambda r, n: bad("unusable")), party("b", lambda r, n: good())
    chains = [(request(i, alias),) for i in range(50) for alias in "ab"]
    why, journal, _ = run(tmp_path / "j", [dead, alive], chains, may_fail=True)
    assert why == ""
    assert dead.down
    assert all(journal.state(request(i, "b").key) == "ok" for i in range(50))
    assert all(journal.state(request(i, "a").key) is None for i in range(50))


def test_a_request_is_begun_only_if_the_most_it_can_take_fits_the_budget(tmp_path: Path) -> None:
    price = Price(input_per_million=1e6, output_per_million=1e6)  # a dollar a token
    spending = Spending(max_cost=1000.0)

    def chain(i: int) -> tuple[Request, ...]:
        return (Request(digest(str(i)), "a", {"max_tokens": 80, "messages": [{"role": "user", "content": "x" * 19}]}),)

    one = party("a", lambda r, n: good((10, 50)), price=price)
    why, journal, progress = run(tmp_path / "j", [one], [chain(i) for i in range(100)], spending)
    assert why == "the budget is used up"
    assert 800 < spending.cost <= 1000
    assert spending.cost == 60 * journal.calls
    assert progress.done == journal.calls == len(journal)
    assert (spending.reserved_cost, spending.reserved_tokens) == (0, 0)


def test_tokens_without_a_count_are_booked_as_the_most_they_can_be(tmp_path: Path) -> None:
    spending = Spending()
    price = Price(input_per_million=1, output_per_million=0.27)
    run(tmp_path / "j", [party("a", lambda r, n: good(None), price=price)], [(request(0),)], spending)
    assert spending.unpriced == 1
    assert spending.tokens == 35 + 32 + 4096
    assert spending.cost == pytest.approx((35 + 32 + 4096 * 0.27) / 1e6)


def test_what_is_under_way_at_a_stop_is_waited_for_and_the_rest_is_left(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    one = party("a", lambda r, n: good())
    asking = Asking({"a": one}, journal, Spending())

    def chains() -> Iterator[tuple[Request, ...]]:
        for i in range(1000):
            if i == 50:
                asking.stop("enough")
            yield (request(i),)

    assert asyncio.run(asyncio.wait_for(asking.ask(chains(), total=1000), 10)) == "enough"
    assert 30 <= journal.calls <= 51
    assert journal.calls == len(journal)


# bespokelabsai/curator 15105b43: one task per row, out of memory
def test_requests_are_read_only_as_far_ahead_as_there_is_room(tmp_path: Path) -> None:
    drawn = 0
    ahead = 0
    one = party("a", lambda r, n: good())

    def chains() -> Iterator[tuple[Request, ...]]:
        nonlocal drawn, ahead
        for i in range(2000):
            drawn += 1
            ahead = max(ahead, drawn - sum(one.engine.seen.values()))  # type: ignore[attr-defined]
            yield (request(i),)

    journal = Journal(tmp_path / "j")
    asyncio.run(Asking({"a": one}, journal, Spending()).ask(chains(), total=2000))
    assert ahead <= 20


def test_raw_responses_of_failed_tries_are_in_the_journal(tmp_path: Path) -> None:
    one = party("a", lambda r, n: bad("malformed", status=200) if n == 1 else good())
    _, journal, _ = run(tmp_path / "j", [one], [(request(0),)])
    lines = [(line["s"], line.get("r"), line.get("e")) for line in journal.entries() if line["s"] != "sent"]
    assert lines[0] == ("malformed", "no", "it was malformed")
    assert lines[1][0] == "ok"


def test_an_outage_is_no_fault_of_the_requests_that_meet_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopdctl.gensft.ask._DOWN_AFTER_S", 60.0)
    calls = 0

    def restarting(r: Request, n: int) -> Reply:
        nonlocal calls
        calls += 1
        return bad("connection") if 100 < calls < 600 else good()

    one = party("a", restarting, max_attempts=6)
    _, journal, progress = run(tmp_path / "j", [one], [(request(i),) for i in range(300)])
    assert progress.done == len(journal) == 300
    assert progress.states["connection"] == 499
    assert not one.down


def test_a_bad_row_stops_nothing_where_only_its_fall_back_is_down(tmp_path: Path) -> None:
    one = party("a", lambda r, n: bad("server_error") if r.key == request(3).key else good())
    dead = party("b", lambda r, n: bad("unusable"))
    why, journal, progress = run(tmp_path / "j", [one, dead], [(request(i), request(i, "b")) for i in range(10)])
    assert why == ""
    assert progress.done == 10
    assert journal.state(request(3).key) is None


def test_a_timeout_may_have_been_charged_and_counts_against_a_budget(tmp_path: Path) -> None:
    spending = Spending(max_tokens=10**9)
    one = party("a", lambda r, n: bad("timeout") if n == 1 else good())
    run(tmp_path / "j", [one], [(request(0),)], spending)
    assert spending.tokens == 15 + 35 + 32 + 4096


def test_a_few_requests_that_always_fail_are_given_up_and_stop_nothing(tmp_path: Path) -> None:
    poison = {request(i).key for i in range(50, 60)}
    one = party("a", lambda r, n: bad("server_error") if r.key in poison else good(), max_attempts=5)
    for _ in range(2):
        why, journal, progress = run(tmp_path / "j", [one], [(request(i),) for i in range(60)])
        assert why == ""
        assert progress.done == 60
        assert len(journal) == 50
        journal.close()


def test_requests_that_were_all_rejected_or_whose_rest_is_lost_stop_the_run(tmp_path: Path) -> None:
    parties = [party("a", lambda r, n: bad("rejected")), party("b", lambda r, n: bad("unusable"))]
    with pytest.raises(MopdctlError, match="member 'b' is down"):
        run(tmp_path / "j", parties, [(request(i), request(i, "b")) for i in range(5)])


def test_an_interrupt_after_another_reason_to_stop_still_waits_for_what_is_under_way(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    release = asyncio.Event()

    class Slow(Scripted):
        async def complete(self, body: dict[str, Any], *, key: str, kind: str = "chat") -> Reply:
            self.in_flight += 1
            await release.wait()
            return good()

    slow = party("a", lambda r, n: good())
    slow.engine = Slow(lambda r, n: good())
    asking = Asking({"a": slow}, journal, Spending())

    async def work() -> str:
        task = asyncio.create_task(asking.ask(iter([(request(i),) for i in range(5)]), total=5))
        while slow.engine.in_flight < 5:  # type: ignore[attr-defined]
            await asyncio.wait([task], timeout=0.01)
        asking.stop("enough")
        await asyncio.wait([task], timeout=1.5)
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
        release.set()
        return await task

    assert asyncio.run(asyncio.wait_for(work(), 10)) == "interrupted"
    assert len(journal) == 5
