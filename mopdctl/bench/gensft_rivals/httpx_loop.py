"""What one writes by hand in place of `gen-sft`: `python httpx_loop.py BODIES URL OUT`, where httpx is installed.

Sends each line of BODIES as a request and writes each response to OUT as a line, in the order in which they come. Bytes
go through as they are, so the loop costs what httpx and asyncio cost. The first failure ends it: it has no retries.
"""

import asyncio
import ssl
import sys
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any

CONCURRENCY = 64
CLIENTS = 16
"""For every request a client looks through all of its connections: one client of 64 takes three times the CPU."""


async def main(bodies: str, url: str, out: str) -> None:
    """Asks with `CONCURRENCY` workers, each with a connection that is kept."""
    httpx: Any = import_module("httpx")
    each = CONCURRENCY // CLIENTS
    settings = {
        "headers": {"Content-Type": "application/json"},
        "limits": httpx.Limits(max_connections=each, max_keepalive_connections=each),
        "timeout": 600,
        "trust_env": False,
        "verify": ssl.create_default_context(),  # made once, not for each client
    }
    with open(bodies, "rb") as asked, open(out, "wb") as answered:  # noqa: PTH123
        async with AsyncExitStack() as held:
            clients = [await held.enter_async_context(httpx.AsyncClient(**settings)) for _ in range(CLIENTS)]

            async def work(client: Any) -> None:
                for body in asked:
                    response = await client.post(f"{url}/chat/completions", content=body)
                    response.raise_for_status()
                    answered.write(response.content + b"\n")

            await asyncio.gather(*(work(client) for client in clients for _ in range(each)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
