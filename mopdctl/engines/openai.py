"""Any OpenAI-compatible server: vLLM above all, and the hosted ones."""

import asyncio
import json
import os
import time
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from mopdctl import __version__
from mopdctl.engines.chat import ErrorKind, Reply
from mopdctl.errors import InputError

_PATHS = {"chat": "/chat/completions", "pooling": "/pooling"}
_KEPT_ERROR_BYTES = 4096
_SHORTEST_SECRET = 16
"""Keys below are placeholders that local servers want, and may be words of an answer."""


class OpenAIServer:
    """One server with one key.

    The key is read from the environment, sent as a header, and cut out of all that comes back: some servers quote it.
    """

    def __init__(self, base_url: str, *, api_key_env: str | None, timeout_s: float) -> None:
        """Raises InputError if the environment variable is not set. Opens no connection."""
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._secrets: tuple[str, ...] = ()
        self._real_key = False
        headers = {"Content-Type": "application/json", "User-Agent": f"mopdctl/{__version__}"}
        if api_key_env is not None:
            api_key = os.environ.get(api_key_env, "").strip()
            if not api_key:
                raise InputError(f"environment variable {api_key_env}: not set; it holds the API key of {base_url}")
            if not api_key.isascii() or not api_key.isprintable():
                raise InputError(f"environment variable {api_key_env}: holds characters that no header can carry")
            headers["Authorization"] = f"Bearer {api_key}"
            self._secrets = tuple({api_key, json.dumps(api_key)[1:-1], api_key.replace("/", "\\/")})
            self._real_key = len(api_key) >= _SHORTEST_SECRET
        self._headers = headers
        self._has_answered = False
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, body: dict[str, Any], *, key: str, kind: str = "chat") -> Reply:
        """See `ChatEngine.complete`."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, connect=min(60.0, self._timeout_s)),
            )
        # vLLM serves /pooling beside /v1, not under it.
        base = self._base_url.removesuffix("/v1") if kind == "pooling" else self._base_url
        try:
            async with self._session.post(
                base + _PATHS[kind],
                data=json.dumps(body, ensure_ascii=False, allow_nan=False).encode(),
                headers={"Idempotency-Key": key},
                allow_redirects=False,
            ) as response:
                raw = await response.read()
                status, headers = response.status, response.headers
        except TimeoutError:
            return Reply(None, b"null", "timeout", detail=f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Reply(None, b"null", "connection", detail=self._clean(f"{type(error).__name__}: {error}"))
        if status == 200:
            return self._document(raw, kind)
        text = self._clean(raw[:_KEPT_ERROR_BYTES].decode("utf-8", "replace"))
        wait = retry_after_s(headers.get("Retry-After"), now=time.time())
        failure = _kind(status, text)
        if status == 403 and self._has_answered:
            failure = "rejected"  # this one prompt is forbidden: others were answered
        return Reply(None, json.dumps(text).encode(), failure, status, wait, f"{status}: {_message(text)}")

    def _document(self, raw: bytes, kind: str) -> Reply:
        try:
            text = raw.decode("utf-8")
            if self._real_key:  # `EMPTY` and the like are words that an answer may hold
                text = self._clean(text)
            document = json.loads(text)
            if not isinstance(document, dict):
                raise ValueError("no JSON object")
        except (ValueError, RecursionError) as error:
            kept = self._clean(raw[:_KEPT_ERROR_BYTES].decode("utf-8", "replace"))
            detail = f"200 with a body that is not a JSON object ({str(error).splitlines()[0]})"
            return Reply(None, json.dumps(kept).encode(), "malformed", 200, detail=detail)
        if document.get("error") and not document.get("choices") and not document.get("data"):
            detail = f"200 with an error: {_message(self._clean(text))}"
            return Reply(None, json.dumps(self._clean(text)).encode(), "server_error", 200, detail=detail)
        if kind == "chat" and not document.get("choices"):
            detail = "200 without a choice"
            return Reply(None, json.dumps(self._clean(text)).encode(), "malformed", 200, detail=detail)
        self._has_answered = True
        return Reply(document, text.encode(), status=200)

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return text

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)


def _kind(status: int, text: str) -> ErrorKind:
    if status == 429:
        return "unusable" if "insufficient_quota" in text else "rate_limited"
    if status in (401, 402, 403, 404, 405, 410):
        return "unusable"
    if status in (408, 409, 425) or status >= 500 or status < 400:
        return "server_error"
    return "rejected"


def _message(text: str) -> str:
    try:
        found = json.loads(text)["error"]
        message = found["message"] if isinstance(found, dict) else found
    except (ValueError, KeyError, TypeError, RecursionError):
        message = text
    return " ".join(str(message).encode("utf-8", "replace").decode().split())[:200]


def retry_after_s(value: str | None, *, now: float) -> float | None:
    """Seconds that a `Retry-After` header asks for, given as seconds or as an HTTP date; None for anything else."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
