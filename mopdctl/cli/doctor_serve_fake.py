"""`mopdctl doctor serve-fake`."""

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mopdctl.cli.output import note, result
from mopdctl.errors import InputError

if TYPE_CHECKING:
    from mopdctl.engines.fake_server import FakeServer


def serve_fake(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="Run this while the server is up, then stop.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any that is free.")] = 8399,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the faults.")] = 0,
    share_429: Annotated[float, typer.Option("--share-429", min=0, max=1, help="Share answered 429.")] = 0.0,
    share_5xx: Annotated[
        float, typer.Option("--share-5xx", min=0, max=1, help="Share answered 500, 502 or 503.")
    ] = 0.0,
    share_hang: Annotated[float, typer.Option("--share-hang", min=0, max=1, help="Share answered too late.")] = 0.0,
    hang_s: Annotated[float, typer.Option("--hang-s", min=0, help="Seconds that these come too late.")] = 60.0,
    share_cut: Annotated[float, typer.Option("--share-cut", min=0, max=1, help="Share cut off unanswered.")] = 0.0,
    share_bad_json: Annotated[
        float, typer.Option("--share-bad-json", min=0, max=1, help="Share answered with half a document.")
    ] = 0.0,
    share_wrong_count: Annotated[
        float, typer.Option("--share-wrong-count", min=0, max=1, help="Share with no choice, or one too many.")
    ] = 0.0,
    faults_for_s: Annotated[
        float, typer.Option("--faults-for-s", min=0, help="Seconds after which these shares stop; 0 for never.")
    ] = 0.0,
    retry_after: Annotated[
        str | None, typer.Option("--retry-after", help="Retry-After of a 429, verbatim; `date`: a date in a second.")
    ] = None,
    latency_s: Annotated[float, typer.Option("--latency-s", min=0, help="Mean seconds of an answer.")] = 0.0,
    down_models: Annotated[
        list[str] | None, typer.Option("--down-model", help="A model that always answers 503; may be repeated.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable with the key to ask for, else 401.")
    ] = None,
    rpm: Annotated[int | None, typer.Option("--rpm", min=1, help="Requests per minute; more are answered 429.")] = None,
    strict_seed: Annotated[bool, typer.Option("--strict-seed", help="Refuse requests without a seed.")] = False,
    refuse_params: Annotated[
        list[str] | None, typer.Option("--refuse-param", help="A body field to refuse; may be repeated.")
    ] = None,
    stats: Annotated[Path | None, typer.Option("--stats", help="JSON file for the final figures of /stats.")] = None,
) -> None:
    """Serve made-up answers over the OpenAI protocol, and fail as told: for trying things out and for tests.

    \b
    A server on http://127.0.0.1:8399/v1 until Ctrl-C, and a question to it:
      mopdctl doctor serve-fake
      curl http://127.0.0.1:8399/v1/chat/completions -d \\
        '{"model": "fake-chat:wrong=0", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'

    \b
    A command against a server that fails now and then, whose URL is in MOPDCTL_FAKE_URL, and what it was billed:
      mopdctl doctor serve-fake --share-429 0.1 --retry-after date --share-cut 0.05 --stats stats.json -- \\
        mopdctl gen-sft --config gen.yaml

    The model's name says what the answers are like, e.g. `fake-chat:words=40,think=0.5,refuse=0.05`; the settings are
    words (60 unless given), wrong (share of wrong sums, 0.2), and the shares think, inline_think, leak_think, refuse,
    repeat, empty, copy, foreign and bad_judge (0).
    """
    from mopdctl.engines.fake_server import FakeServer, Faults
    from mopdctl.files import write_json

    if stats is not None and stats.is_dir():
        raise InputError(f"--stats {stats}: is a folder; name a file")
    faults = Faults(
        seed=seed,
        share_429=share_429,
        share_5xx=share_5xx,
        share_hang=share_hang,
        hang_s=hang_s,
        share_cut=share_cut,
        share_bad_json=share_bad_json,
        share_wrong_count=share_wrong_count,
        faults_for_s=faults_for_s,
        retry_after=retry_after,
        latency_s=latency_s,
        down_models=tuple(down_models or ()),
        api_key=_key(api_key_env),
        rpm=rpm,
        strict_seed=strict_seed,
        refuse_params=tuple(refuse_params or ()),
    )
    server = FakeServer(faults)
    code = asyncio.run(_serve(server, host, port, command or []))
    if stats is not None:
        write_json(stats, server.stats())
    raise typer.Exit(code)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise InputError(f"environment variable {variable}: not set; it holds the API key to ask for")
    return key


async def _serve(server: "FakeServer", host: str, port: int, command: list[str]) -> int:
    """Serves until a signal comes or the command ends; returns the exit code."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    listening: asyncio.Future[str] = loop.create_future()
    serving = loop.create_task(server.serve(host, port, ready=listening.set_result))
    try:
        either: list[asyncio.Future[Any]] = [serving, listening]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        if command:
            note(listening.result())
            return await _run(command, listening.result())
        result(listening.result())
        await stop.wait()
        return 0
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def _run(command: list[str], url: str) -> int:
    """Runs a command; its exit code, or 128 and the number of the signal that ended it, as a shell says."""
    try:
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "MOPDCTL_FAKE_URL": url})
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be run ({error.strerror}); give a command behind `--`") from None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, process.terminate)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal sends it to the command as well
    code = await process.wait()
    return code if code >= 0 else 128 - code
