"""The fake server keeps its promises: it bills what it has written out, fails as it is told to, and repeats exactly."""

import asyncio
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer

from mopdctl.cli.doctor_serve_fake import serve_fake
from mopdctl.engines.fake_chat import answer, score
from mopdctl.engines.fake_server import FakeServer, Faults, Ledger, Running, run_in_thread, serve
from mopdctl.errors import InputError
from mopdctl.files import digest


@dataclass(frozen=True)
class Reply:
    status: int | None
    """None if none came."""
    text: str = ""
    retry_after: str | None = None

    @property
    def document(self) -> Any:
        return json.loads(self.text)

    @property
    def message(self) -> str:
        return str(self.document["error"]["message"])


def body(number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"model": "fake-chat:words=10", "messages": [{"role": "user", "content": f"Question {number}"}], **fields}


def ask(
    server: Running,
    bodies: Sequence[dict[str, Any] | bytes],
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    keys: Sequence[str] = (),
    headers: dict[str, str] | None = None,
    timeout_s: float = 30,
    at_once: int = 1,
) -> list[Reply]:
    """The replies in the order of the bodies; `keys` are their idempotency keys."""

    async def one(session: aiohttp.ClientSession, gate: asyncio.Semaphore, number: int) -> Reply:
        raw = bodies[number]
        data = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
        extra = {"Idempotency-Key": keys[number]} if keys else {}
        async with gate:
            try:
                async with session.request(
                    method, server.url.removesuffix("/v1") + path, data=data, headers={**(headers or {}), **extra}
                ) as response:
                    text = await response.text()
                    return Reply(response.status, text, response.headers.get("Retry-After"))
            except (aiohttp.ClientError, TimeoutError):
                return Reply(None)

    async def every() -> list[Reply]:
        gate = asyncio.Semaphore(at_once)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
            return await asyncio.gather(*(one(session, gate, i) for i in range(len(bodies))))

    return asyncio.run(every())


def get(server: Running, path: str) -> Reply:
    return ask(server, [b""], path=path, method="GET")[0]


def settled(server: Running) -> dict[str, Any]:
    """The figures once nothing is in flight any more."""
    until = time.monotonic() + 5
    while True:
        figures = server.stats()
        if figures["requests"] == sum(figures["by_status"].values()) + figures["aborted"]:
            return figures
        assert time.monotonic() < until, figures
        time.sleep(0.01)


# -------------------------------------------------------------------------------------------------------------- answers


def test_answers_are_those_of_the_fake_model() -> None:
    bodies = [body(i, seed=i) for i in range(20)]
    with run_in_thread() as server:
        assert [r.document for r in ask(server, bodies, at_once=8)] == [answer(b) for b in bodies]
        figures = server.stats()
    assert (figures["requests"], figures["billed"], figures["by_status"]) == (20, 20, {"200": 20})
    assert (figures["distinct_bodies_billed"], figures["bodies_billed_twice"]) == (20, 0)


def test_pooling_gives_a_reward_in_the_shape_of_vllm() -> None:
    with run_in_thread() as server:
        (reply,) = ask(server, [body()], path="/pooling")
        assert get(server, "/v1/models").document["data"][0]["id"] == "fake-chat"
        assert server.stats()["billed"] == 1
    assert reply.document["data"] == [{"index": 0, "object": "pooling", "data": [score(body()["messages"])]}]
    assert reply.document["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


# BerriAI/litellm #822, QwenLM/Qwen-Agent #921, guidance-ai/guidance #1504, agno-agi/agno #8009
def test_the_server_shows_which_zeros_were_sent() -> None:
    seen: list[dict[str, Any]] = []
    sent = [body(temperature=0), body(temperature=0.0, top_p=0), body()]
    with run_in_thread(on_request=seen.append) as server:
        ask(server, sent)
    assert seen == sent
    assert ["temperature" in b for b in seen] == [True, True, False]


# vllm-project/vllm #11953
def test_a_strict_server_refuses_requests_without_a_seed_of_their_own() -> None:
    with run_in_thread(Faults(strict_seed=True)) as server:
        replies = ask(server, [body(), body(seed=None), body(seed=True), body(seed="1"), body(seed=0), body(seed=1)])
        assert ask(server, [body()], path="/pooling")[0].status == 200
    assert [r.status for r in replies] == [400, 400, 400, 400, 200, 200]
    assert replies[4].document["choices"] != replies[5].document["choices"]


# NVIDIA-NeMo/Gym #1925
def test_what_no_server_takes_is_a_400_in_openai_shape_and_costs_nothing() -> None:
    bad: list[dict[str, Any] | bytes] = [
        *(b"", b"{", b"[1]", b"\xff", b"[" * 100_000),
        *({"model": "m"}, body(tool_choice="auto"), body(model="fake-chat:no=1"), body(n=0)),
    ]
    with run_in_thread() as server:
        replies = ask(server, bad)
        unknown = [get(server, "/v1/nothing"), ask(server, [body()], path="/v1/completions")[0]]
        assert server.stats()["billed"] == 0
    assert [r.status for r in replies] == [400] * len(bad)
    assert all(r.message for r in replies)
    assert "'tools'" in replies[6].message
    assert [r.status for r in unknown] == [404, 404]
    assert unknown[1].message == "Unknown request: POST /v1/completions"


def test_a_parameter_that_is_refused_is_named() -> None:
    with run_in_thread(Faults(refuse_params=("min_p", "seed"))) as server:
        replies = ask(server, [body(), body(seed=1), body(min_p=0.0)])
    assert [r.status for r in replies] == [200, 400, 400]
    assert "min_p" in replies[2].message


def test_a_wrong_key_is_quoted_back() -> None:
    with run_in_thread(Faults(api_key="right")) as server:
        wrong, right = (ask(server, [body()], headers={"Authorization": f"Bearer {k}"})[0] for k in ("sk-no", "right"))
        (none,) = ask(server, [body()])
    assert [r.status for r in (wrong, right, none)] == [401, 200, 401]
    assert wrong.message == "Incorrect API key provided: sk-no"


# -------------------------------------------------------------------------------------------------------------- billing


def test_a_key_that_was_billed_is_replayed_and_not_billed_again() -> None:
    with run_in_thread() as server:
        first, again, other_key, other_body = ask(
            server, [body(1), body(1), body(1), body(2)], keys=["a", "a", "b", "a"]
        )
        figures = server.stats(bodies=True)
        over_http = get(server, "/stats?bodies=1").document
    assert first == again == other_key
    assert other_body.document == answer(body(2))
    assert (figures["billed"], figures["replayed"]) == (3, 1)
    assert (figures["distinct_bodies_billed"], figures["bodies_billed_twice"]) == (2, 1)
    assert figures["bodies"] == {digest(json.dumps(body(1))): 2, digest(json.dumps(body(2))): 1}
    assert over_http == figures
    assert "bodies" not in server.stats()


def test_a_client_that_went_away_is_not_billed() -> None:
    with run_in_thread(Faults(latency_s=0.5)) as server:
        replies = ask(server, [body(i) for i in range(5)], timeout_s=0.1, at_once=5, keys=["k"] * 5)
        figures = settled(server)
        assert [r.status for r in replies] == [None] * 5
        assert (figures["aborted"], figures["billed"], figures["max_in_flight"]) == (5, 0, 5)
        assert ask(server, [body(0)], keys=["k"])[0].status == 200
        figures = settled(server)
    assert (figures["billed"], figures["replayed"], figures["requests"]) == (1, 0, 6)


def test_a_client_that_went_away_in_the_middle_of_its_request_is_counted() -> None:
    with run_in_thread() as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            while not server.stats()["requests"]:
                time.sleep(0.01)
        figures = settled(server)
    assert (figures["requests"], figures["aborted"], figures["by_status"]) == (1, 1, {})


def test_an_answer_takes_the_time_that_is_asked_for() -> None:
    with run_in_thread(Faults(latency_s=0.2)) as server:
        start = time.monotonic()
        ask(server, [body(i) for i in range(20)], at_once=20)
        taken = time.monotonic() - start
    assert 0.19 < taken < 2


def test_a_server_that_stops_leaves_no_request_uncounted() -> None:
    with run_in_thread(Faults(latency_s=30)) as server:
        client = threading.Thread(target=ask, args=(server, [body()]))
        client.start()
        while not server.stats()["requests"]:
            time.sleep(0.01)
        stopped = time.monotonic()
    assert time.monotonic() - stopped < 5
    client.join()
    figures = server.stats()
    assert (figures["requests"], figures["aborted"], figures["billed"]) == (1, 1, 0)


@pytest.mark.slow
def test_two_hundred_thousand_requests_stay_under_fifty_megabytes() -> None:
    tracemalloc.start()
    ledger = Ledger()
    for number in range(200_000):
        name = number.to_bytes(16, "big")
        ledger.arrive(name)
        ledger.bill(name, str(number))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ledger.document()["distinct_bodies_billed"] == 200_000
    assert size < 50e6


# --------------------------------------------------------------------------------------------------------------- faults

SHARES = {
    "share_429": 0.1,
    "share_5xx": 0.15,
    "share_hang": 0.1,
    "share_cut": 0.1,
    "share_bad_json": 0.1,
    "share_wrong_count": 0.1,
}


def outcome(reply: Reply, expected: dict[str, Any]) -> str:
    if reply.status is None:
        return "share_cut"
    if reply.status != 200:
        return "share_429" if reply.status == 429 else "share_5xx"
    try:
        document = reply.document
    except ValueError:
        return "share_bad_json"
    return "fine" if document == expected else "share_wrong_count"


def test_faults_come_in_their_shares_and_only_whole_answers_are_billed() -> None:
    bodies = [body(i) for i in range(600)]
    with run_in_thread(Faults(hang_s=0.0, **SHARES)) as server:  # type: ignore[arg-type]
        replies = ask(server, bodies, at_once=16)
        figures = settled(server)
    seen = Counter(outcome(r, answer(b)) for r, b in zip(replies, bodies, strict=True))
    expected = {**SHARES, "fine": 0.35 + SHARES["share_hang"]}
    del expected["share_hang"]
    for name, share in expected.items():
        assert abs(seen[name] - 600 * share) < 4 * math.sqrt(600 * share * (1 - share)), name
    assert {r.status for r in replies} == {None, 200, 429, 500, 502, 503}
    counts = Counter(len(r.document["choices"]) for r in replies if outcome(r, {}) == "share_wrong_count")
    assert counts.keys() == {0, 1, 2}
    assert figures["billed"] == seen["fine"]
    assert figures["by_status"]["cut"] == seen["share_cut"]


def test_the_same_script_meets_the_same_faults_and_another_seed_others() -> None:
    faults = Faults(share_429=0.3, share_5xx=0.2, share_cut=0.1)
    runs = []
    for seed in (1, 1, 2):
        with run_in_thread(replace(faults, seed=seed)) as server:
            runs.append([r.status for r in ask(server, [body(i % 10) for i in range(60)])])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(runs[0][i * 10 : i * 10 + 10]) for i in range(6)}) == 6  # a body that comes again draws again


def test_a_hanging_answer_comes_late_or_is_never_paid() -> None:
    with run_in_thread(Faults(share_hang=1, hang_s=0.3)) as server:
        assert ask(server, [body()], timeout_s=0.1)[0].status is None
        assert ask(server, [body()])[0].status == 200
        figures = settled(server)
    assert (figures["aborted"], figures["billed"]) == (1, 1)


# oumi-ai/oumi #2516
@pytest.mark.parametrize("header", ["1", "0", "soon, perhaps", "99999999999", "Wed, 21 Oct 2015 07:28:00 GMT", None])
def test_retry_after_is_sent_word_for_word(header: str | None) -> None:
    with run_in_thread(Faults(share_429=1, retry_after=header)) as server:
        (reply,) = ask(server, [body()])
    assert (reply.status, reply.retry_after) == (429, header)


# oumi-ai/oumi #2516
def test_retry_after_can_be_a_date_a_second_ahead() -> None:
    with run_in_thread(Faults(share_429=1, retry_after="date")) as server:
        (reply,) = ask(server, [body()])
    assert -1 < parsedate_to_datetime(reply.retry_after or "").timestamp() - time.time() <= 1


def test_requests_over_the_limit_are_told_how_long_the_minute_lasts() -> None:
    with run_in_thread(Faults(rpm=3)) as server:
        replies = ask(server, [body(i) for i in range(5)])
    assert [r.status for r in replies] == [200, 200, 200, 429, 429]
    assert 50 <= int(replies[3].retry_after or 0) <= 60


def test_faults_stop_after_their_time() -> None:
    with run_in_thread(Faults(share_5xx=1, faults_for_s=0.3)) as server:
        assert ask(server, [body()])[0].status in (500, 502, 503)
        time.sleep(0.4)
        assert ask(server, [body()])[0].status == 200


def test_a_model_that_is_down_stays_down_and_the_others_answer() -> None:
    with run_in_thread(Faults(down_models=("sick",))) as server:
        assert [r.status for r in ask(server, [body(model="sick"), body(model="sick"), body()])] == [503, 503, 200]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share_429": 0.6, "share_cut": 0.6}, "at most 1 together"),
        ({"share_5xx": -0.1}, "from 0 to 1"),
        ({"share_hang": math.nan}, "from 0 to 1"),
        ({"hang_s": math.inf}, "seconds from 0"),
        ({"rpm": 0}, "rpm is 0"),
        ({"retry_after": "1\r\nX: y"}, "no header can carry"),
    ],
)
def test_faults_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Faults(**fields)


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=r"port \d+ of 127\.0\.0\.1 is in use; give another --port"):
            asyncio.run(serve("127.0.0.1", taken.getsockname()[1], Faults(), ready=lambda _: None))


# ------------------------------------------------------------------------------------------------- the command line

CLI = "import typer; from mopdctl.cli.doctor_serve_fake import serve_fake; typer.run(serve_fake)"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_the_server_says_where_it_is_and_ends_well_at_a_signal(number: int, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    started = subprocess.Popen(
        [sys.executable, "-c", CLI, "--port", "0", "--stats", stats], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    url = started.stdout.readline().strip()
    (reply,) = ask(Running(url, FakeServer(Faults())), [body()])
    started.send_signal(number)
    assert (started.wait(20), started.stdout.read()) == (0, "")
    assert reply.document == answer(body())
    assert json.loads(stats.read_text())["billed"] == 1


def test_options_after_the_dashes_belong_to_the_command() -> None:
    run = ["--port", "0", "--share-429", "0.5", "--", sys.executable, "-c", "import sys; sys.exit(int(sys.argv[2]))"]
    assert subprocess.run([sys.executable, "-c", CLI, *run, "--port", "7"]).returncode == 7


def test_a_command_runs_while_the_server_is_up_and_its_output_alone_is_on_stdout(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = "import os, urllib.request as u; print(u.urlopen(os.environ['MOPDCTL_FAKE_URL'] + '/models').status)"
    with pytest.raises(typer.Exit) as ended:
        serve_fake([sys.executable, "-c", code], port=0)
    stdout, stderr = capfd.readouterr()
    assert (ended.value.exit_code, stdout) == (0, "200\n")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1\n", stderr)


def test_a_command_that_a_signal_ends_gives_the_code_that_a_shell_gives() -> None:
    with pytest.raises(typer.Exit) as ended:
        serve_fake(["sh", "-c", "kill -9 $$"], port=0)
    assert ended.value.exit_code == 137


def test_a_command_line_that_cannot_be_is_an_input_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(InputError, match="no-such-command: cannot be run"):
        serve_fake(["no-such-command"], port=0)
    with pytest.raises(InputError, match="environment variable NO_SUCH_KEY: not set"):
        serve_fake(api_key_env="NO_SUCH_KEY", port=0)
    with pytest.raises(InputError, match="is a folder; name a file"):
        serve_fake(stats=tmp_path, port=0)
    with pytest.raises(InputError, match=r"--host nowhere\.invalid: no such address"):
        serve_fake(host="nowhere.invalid", port=0)
