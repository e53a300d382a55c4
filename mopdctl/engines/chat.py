"""The border to models that answer whole conversations: OpenAI request bodies in, raw response documents out."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

ErrorKind = Literal["rate_limited", "server_error", "timeout", "connection", "malformed", "rejected", "unusable"]
"""`rejected`: this request will never be taken. `unusable`: this server will take none (key, credit, model name)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one attempt came back with."""

    document: dict[str, Any] | None
    """The response; None where there was an error."""
    raw: bytes
    """JSON text as it came (UTF-8); of an error, its body as a JSON string, cut to a few kilobytes."""
    error: ErrorKind | None = None
    status: int | None = None
    """HTTP status; None where there was none."""
    retry_after_s: float | None = None
    """What the server asked to wait."""
    detail: str = ""
    """One line for a human, without secrets."""


class ChatEngine(Protocol):
    """Something that answers conversations. Errors of the far side are replies; exceptions are bugs."""

    async def complete(self, body: dict[str, Any], *, key: str, kind: str = "chat") -> Reply:
        """One attempt. `key` is the same for every attempt of a request; `kind` is `chat` or `pooling` (a reward)."""
        ...

    async def close(self) -> None:
        """Lets go of connections and models."""
        ...
