"""`fake_chat` over a real socket: an OpenAI-compatible server that fails as it is told to and counts what it bills.

    POST /v1/chat/completions    POST /pooling (a reward, in vLLM's shape)    GET /v1/models    GET /stats

Which fault a request gets is drawn from the seed of the server, the body, and how often this body came before, so that
a script that is run again meets the same faults.
"""

import asyncio
import email.utils
import errno
import hashlib
import json
import math
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mopdctl.engines import fake_chat
from mopdctl.errors import InputError

_SHARES = ("share_429", "share_5xx", "share_hang", "share_cut", "share_bad_json", "share_wrong_count")


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Shares are of requests; a request has at most one of these faults. Raises InputError."""

    seed: int = 0
    share_429: float = 0.0
    share_5xx: float = 0.0
    """500, 502 (as HTML, as a proxy in front of the server sends it) or 503."""
    share_hang: float = 0.0
    """Answers that come `hang_s` late."""
    hang_s: float = 60.0
    share_cut: float = 0.0
    """Connections closed without an answer, at the time at which it was due."""
    share_bad_json: float = 0.0
    """Status 200 with half a document."""
    share_wrong_count: float = 0.0
    """Answers with no choice at all, or with one too many."""
    faults_for_s: float = 0.0
    """Seconds after which the faults above stop; 0 for never."""
    retry_after: str | None = None
    """Header that a 429 carries, word for word; `date` makes an HTTP date one second ahead."""
    latency_s: float = 0.0
    """Mean time of an answer; a request's own hangs on its body and is from 0.5 to 1.5 of it."""
    down_models: tuple[str, ...] = ()
    """Models that always answer 503."""
    api_key: str | None = None
    """A request without it gets a 401 that quotes the key it did send, as some servers do."""
    rpm: int | None = None
    """Requests per minute; more get a 429 with the seconds until the minute is over as `Retry-After`."""
    strict_seed: bool = False
    """Refuses a chat request without a whole number as its seed."""
    refuse_params: tuple[str, ...] = ()
    """Fields of a body that are refused by name."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        shares = [getattr(self, name) for name in _SHARES]
        if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1 + 1e-9:
            raise InputError(f"faults: {', '.join(_SHARES)} are from 0 to 1 each and at most 1 together")
        if not all(0 <= seconds < math.inf for seconds in (self.hang_s, self.faults_for_s, self.latency_s)):
            raise InputError("faults: hang_s, faults_for_s and latency_s are seconds from 0")
        if self.rpm is not None and self.rpm < 1:
            raise InputError(f"faults: rpm is {self.rpm}; give at least 1 request per minute, or leave it out")
        if self.retry_after is not None and not (self.retry_after.isascii() and self.retry_after.isprintable()):
            raise InputError("faults: retry_after holds characters that no header can carry")


class Ledger:
    """What came and what was billed. It keeps digests alone, so that 200,000 requests stay under 50 MB."""

    def __init__(self) -> None:
        self.requests = self.replayed = self.aborted = self.billed = self.in_flight = self.max_in_flight = 0
        self.by_status: Counter[str] = Counter()
        self.came: dict[bytes, int] = {}
        self.billed_bodies: dict[bytes, int] = {}
        self._billed_keys: set[int] = set()
        self._billed_twice = 0

    def arrive(self, body: bytes) -> int:
        """How often this body came before."""
        before = self.came.get(body, 0)
        self.came[body] = before + 1
        return before

    def bill(self, body: bytes, key: str | None) -> None:
        """Books an answer; one with a key that was billed for this body before is a replay."""
        # 7 bytes: an int of up to 60 bits takes 32 bytes, and a `bytes` of this length takes 48.
        digest = None if key is None else int.from_bytes(_hash(key.encode("utf-8", "surrogateescape"), body)[:7], "big")
        if digest in self._billed_keys:
            self.replayed += 1
            return
        if digest is not None:
            self._billed_keys.add(digest)
        self.billed += 1
        times = self.billed_bodies.get(body, 0) + 1
        self.billed_bodies[body] = times
        self._billed_twice += times == 2

    def document(self, *, bodies: bool = False) -> dict[str, Any]:
        """The figures as JSON. `requests` is the sum of `by_status` and `aborted`, once none is in flight."""
        figures = {
            "requests": self.requests,
            "billed": self.billed,
            "replayed": self.replayed,
            "aborted": self.aborted,
            "by_status": dict(sorted(self.by_status.items())),
            "max_in_flight": self.max_in_flight,
            "bodies_billed_twice": self._billed_twice,
            "distinct_bodies_billed": len(self.billed_bodies),
        }
        return figures | ({"bodies": {b.hex(): n for b, n in self.billed_bodies.copy().items()}} if bodies else {})


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes = b""
    retry_after: str | None = None
    content_type: str = "application/json"
    billable: bool = False


_CUT = _Reply(0)


class FakeServer:
    """One server with its ledger.

    `on_request` sees the body of each request that is a JSON object, before anything else is made of it.
    """

    def __init__(self, faults: Faults, *, on_request: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._faults = faults
        self._shares = [(name, share) for name in _SHARES if (share := getattr(faults, name))]
        self._on_request = on_request
        self._ledger = Ledger()
        self._started = self._minute = time.monotonic()
        self._this_minute = 0

    def stats(self, *, bodies: bool = False) -> dict[str, Any]:
        """The figures of `/stats`; with `bodies` also the digest (`files.digest`) of each billed body to its count."""
        return self._ledger.document(bodies=bodies)

    async def serve(self, host: str, port: int, *, ready: Callable[[str], None]) -> None:
        """Serves until it is cancelled; calls `ready` with the base URL once it listens. Port 0 takes any free one.

        Raises InputError if it cannot listen there.
        """
        app = web.Application(client_max_size=0)  # no limit
        app.router.add_post("/v1/chat/completions", self._post)
        app.router.add_post("/pooling", self._post)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/stats", self._stats)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # Cancellation is how the ledger learns of a client that went away while its answer was being made.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, backlog=1024)
            try:
                await site.start()
            except (OSError, OverflowError) as error:
                raise InputError(_cannot_listen(host, port, error)) from None
            bound = runner.addresses[0]
            ready(f"http://{f'[{host}]' if ':' in host else host}:{bound[1]}/v1")
            self._started = self._minute = time.monotonic()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        ledger = self._ledger
        ledger.requests += 1
        ledger.in_flight += 1
        ledger.max_in_flight = max(ledger.max_in_flight, ledger.in_flight)
        try:
            raw = await request.read()
            digest = _hash(raw)
            reply = await self._reply(request, raw, digest)
        except (asyncio.CancelledError, ConnectionError):
            ledger.aborted += 1
            raise
        finally:
            ledger.in_flight -= 1
        transport = request.transport
        if transport is None or transport.is_closing():
            ledger.aborted += 1
        elif reply is _CUT:
            ledger.by_status["cut"] += 1
            transport.abort()
        else:
            # Booked before it is written, so that nobody can have an answer that the figures lack. Nothing else runs
            # until the transport has it.
            ledger.by_status[str(reply.status)] += 1
            if reply.billable:
                ledger.bill(digest, request.headers.get("Idempotency-Key"))
        return _response(reply)

    async def _reply(self, request: web.Request, raw: bytes, digest: bytes) -> _Reply:
        faults = self._faults
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            return _error(400, f"The body is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, f"The body is a {type(body).__name__} where a JSON object is needed")
        if self._on_request is not None:
            self._on_request(body)
        pooling = request.path == "/pooling"
        if (refused := next((name for name in faults.refuse_params if name in body), None)) is not None:
            return _error(400, f"Unrecognized request argument supplied: {refused}")
        if faults.strict_seed and not pooling and type(body.get("seed")) is not int:
            return _error(400, "seed: a whole number is needed")
        if body.get("model") in faults.down_models:
            return _error(503, f"The model {body['model']!r} is down")
        if (wait_s := self._over_the_limit()) is not None:
            return _error(429, "Rate limit reached for requests", retry_after=str(wait_s))
        fault, luck = self._fault(digest)
        if fault == "share_429":
            after = faults.retry_after
            date = email.utils.formatdate(time.time() + 1, usegmt=True)
            return _error(429, "Too many requests", retry_after=date if after == "date" else after)
        if fault == "share_5xx":
            return (_INTERNAL, _BAD_GATEWAY, _UNAVAILABLE)[luck % 3]
        try:
            document = _pooling(body) if pooling else fake_chat.answer(body)
        except InputError as error:
            return _error(400, str(error))
        latency_s = faults.latency_s * (0.5 + digest[0] / 255) + (faults.hang_s if fault == "share_hang" else 0)
        if latency_s:
            await asyncio.sleep(latency_s)
        if fault == "share_cut":
            return _CUT
        if fault == "share_wrong_count":
            answers = document["data" if pooling else "choices"]
            answers[:] = [*answers, answers[-1]] if luck % 2 else []
        text = json.dumps(document).encode()
        if fault == "share_bad_json":
            text = text[: len(text) // 2]
        return _Reply(200, text, billable=fault not in ("share_wrong_count", "share_bad_json"))

    def _unauthorized(self, request: web.Request) -> _Reply | None:
        sent = request.headers.get("Authorization", "")
        if self._faults.api_key is None or sent == f"Bearer {self._faults.api_key}":
            return None
        return _error(401, f"Incorrect API key provided: {sent.removeprefix('Bearer ')}", code="invalid_api_key")

    def _over_the_limit(self) -> int | None:
        """Seconds until the next minute begins, if this one has had its requests; else counts the request."""
        if self._faults.rpm is None:
            return None
        now = time.monotonic()
        if now >= self._minute + 60:
            self._minute, self._this_minute = now, 0
        if self._this_minute >= self._faults.rpm:
            return math.ceil(self._minute + 60 - now)
        self._this_minute += 1
        return None

    def _fault(self, digest: bytes) -> tuple[str, int]:
        """The name of a fault, or nothing, and a number to choose between its kinds by."""
        faults, before = self._faults, self._ledger.arrive(digest)
        drawn = _hash(f"{faults.seed} {before} ".encode(), digest)
        if not faults.faults_for_s or time.monotonic() < self._started + faults.faults_for_s:
            place = int.from_bytes(drawn[:7], "big") / 2**56
            for name, share in self._shares:
                place -= share
                if place < 0:
                    return name, drawn[7]
        return "", drawn[7]

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "fake-chat", "object": "model", "created": 0, "owned_by": "mopdctl"}
        listed = _Reply(200, json.dumps({"object": "list", "data": [model]}).encode())
        return _response(self._unauthorized(request) or listed)

    async def _stats(self, request: web.Request) -> web.Response:
        bodies = request.query.get("bodies") == "1"
        return _response(_Reply(200, json.dumps(self.stats(bodies=bodies)).encode()))

    async def _unknown(self, request: web.Request) -> web.Response:
        return _response(_error(404, f"Unknown request: {request.method} {request.path}"))


async def serve(host: str, port: int, faults: Faults, *, ready: Callable[[str], None]) -> None:
    """Serves until it is cancelled. See `FakeServer.serve`."""
    await FakeServer(faults).serve(host, port, ready=ready)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that runs in a thread."""

    url: str
    """Base URL, with `/v1`."""
    server: FakeServer

    def stats(self, *, bodies: bool = False) -> dict[str, Any]:
        """See `FakeServer.stats`. Still there after the server has stopped."""
        return self.server.stats(bodies=bodies)


@contextmanager
def run_in_thread(
    faults: Faults | None = None, *, port: int = 0, on_request: Callable[[dict[str, Any]], None] | None = None
) -> Iterator[Running]:
    """A server on a loopback port (0: any that is free) for as long as the context lasts; None has no faults."""
    server = FakeServer(faults or Faults(), on_request=on_request)
    loop = asyncio.new_event_loop()
    said: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    task = loop.create_task(server.serve("127.0.0.1", port, ready=said.put))

    def work() -> None:
        try:
            loop.run_until_complete(task)
        except BaseException as error:  # the thread that waits for the address has to hear of it
            said.put(error)
        finally:
            loop.close()

    thread = threading.Thread(target=work, name="fake-server", daemon=True)
    thread.start()
    try:
        url = said.get()
        if isinstance(url, BaseException):
            raise url
        yield Running(url, server)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def _pooling(body: Mapping[str, Any]) -> dict[str, Any]:
    usage = fake_chat.answer({key: body[key] for key in ("model", "messages") if key in body})["usage"]
    reward = {"index": 0, "object": "pooling", "data": [fake_chat.score(body["messages"])]}
    usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return {"object": "list", "model": body["model"], "data": [reward], "usage": usage}


def _error(status: int, message: str, *, code: str | None = None, retry_after: str | None = None) -> _Reply:
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    document = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _Reply(status, json.dumps(document).encode(), retry_after)


_INTERNAL = _error(500, "The server had an error while processing your request")
_UNAVAILABLE = _error(503, "The server is overloaded")
_BAD_GATEWAY = _Reply(502, b"<html><body><h1>502 Bad Gateway</h1></body></html>", content_type="text/html")


def _response(reply: _Reply) -> web.Response:
    headers = {"Content-Type": reply.content_type}
    if reply.retry_after is not None:
        headers["Retry-After"] = reply.retry_after
    return web.Response(status=reply.status or 200, body=reply.body, headers=headers)


def _cannot_listen(host: str, port: int, error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return f"--host {host}: no such address; give one of this machine, such as 127.0.0.1"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; give another --port, or 0 for any that is free"
    return f"cannot listen on {host}:{port} ({error}); give another --host or --port"
