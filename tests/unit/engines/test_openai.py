"""What a server's answers become: replies, each of one kind, without the key."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from mopdctl.engines.chat import Reply
from mopdctl.engines.openai import OpenAIServer
from mopdctl.errors import InputError

KEY = "sk-a/b\"c'0123456789"


def ask(response: Any, *, key_name: str | None = None, timeout_s: float = 5, kind: str = "chat") -> tuple[Reply, Any]:
    """One request to a server that gives `response`, a web.Response or a coroutine function."""
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen["path"], seen["headers"] = request.path, dict(request.headers)
        seen["body"] = await request.json()
        return await response(request) if callable(response) else response

    async def work() -> Reply:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        server = OpenAIServer(f"http://127.0.0.1:{port}/v1", api_key_env=key_name, timeout_s=timeout_s)
        try:
            return await server.complete({"model": "m", "temperature": 0.0}, key="0" * 32, kind=kind)
        finally:
            await server.close()
            await runner.cleanup()

    return asyncio.run(work()), seen


def test_an_answer_is_its_document_and_the_very_bytes() -> None:
    raw = '{"choices": [{"text": "\u2028é"}],\n "usage": null}'
    reply, seen = ask(web.Response(text=raw))
    assert reply == Reply(json.loads(raw), raw.encode(), status=200)
    assert seen["path"] == "/v1/chat/completions"
    assert seen["headers"]["Idempotency-Key"] == "0" * 32
    assert "Authorization" not in seen["headers"]
    assert seen["body"] == {"model": "m", "temperature": 0.0}


def test_rewards_are_asked_for_beside_the_v1_path() -> None:
    assert ask(web.Response(text="{}"), kind="pooling")[1]["path"] == "/pooling"


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (429, "slow down", "rate_limited"),
        (429, '{"error": {"code": "insufficient_quota", "message": "no credit"}}', "unusable"),
        (400, '{"error": {"message": "too long"}}', "rejected"),
        (413, "", "rejected"),
        (422, "x", "rejected"),
        (401, "", "unusable"),
        (403, "", "unusable"),
        (402, "", "unusable"),
        (404, '{"error": "no model m"}', "unusable"),
        (408, "", "server_error"),
        (500, "", "server_error"),
        (503, "<html>busy</html>", "server_error"),
        (302, "", "server_error"),
    ],
)
def test_every_status_is_of_one_kind(status: int, text: str, kind: str) -> None:
    reply, _ = ask(web.Response(status=status, text=text))
    assert (reply.error, reply.status, reply.document) == (kind, status, None)
    assert json.loads(reply.raw) == text
    assert reply.detail.startswith(f"{status}: ")


@pytest.mark.parametrize("body", [b'{"choices": [', b"[1]", b"", b'{"a": "\xff"}', b"null", b"\xff\xfe{\x00}\x00"])
def test_a_body_that_is_no_json_object_is_malformed_and_kept(body: bytes) -> None:
    reply, _ = ask(web.Response(body=body))
    assert (reply.error, reply.status) == ("malformed", 200)
    assert json.loads(reply.raw) == body.decode("utf-8", "replace")


def test_a_hang_is_a_timeout_and_a_cut_connection_is_said() -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(3)
        return web.Response()

    async def cut(request: web.Request) -> web.Response:
        assert request.transport
        request.transport.close()
        return web.Response()

    assert ask(hang, timeout_s=0.2)[0].error == "timeout"
    assert ask(cut)[0].error == "connection"


def test_retry_after_comes_along() -> None:
    assert ask(web.Response(status=429, headers={"Retry-After": "7"}))[0].retry_after_s == 7


def test_the_key_is_sent_and_cut_out_of_whatever_quotes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    for status in (200, 401):
        quoted = json.dumps({"error": {"message": f"bad key {KEY}"}})
        reply, seen = ask(web.Response(status=status, text=quoted), key_name="SOME_KEY")
        assert seen["headers"]["Authorization"] == f"Bearer {KEY}"
        assert b"0123456789" not in reply.raw
        assert "0123456789" not in reply.detail
        assert "0123456789" not in str(reply.document)


@pytest.mark.parametrize("value", [None, "", "  ", "sk-\u00e9", "a\nb"])
def test_a_key_that_cannot_be_sent_is_said_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(InputError, match="environment variable SOME_KEY") as refused:
        OpenAIServer("http://127.0.0.1:1/v1", api_key_env="SOME_KEY", timeout_s=1)
    assert "sk-" not in str(refused.value)
