"""A process that runs one check after the other for `pool`. It loads verifiers and nothing heavier.

Messages in both directions are a length of 4 bytes, big-endian, and as many bytes of JSON:

    pool -> worker   {"name": ..., "attempt": {...}}
    worker -> pool   {"said": "ready"}, then for each check {"said": "started"} and {"said": "verdict", ...}
"""

import importlib
import json
import os
import resource
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from mopdctl.verifiers.base import Attempt, Verdict, VerdictState
from mopdctl.verifiers.processes import adopt_orphans, die_with, kill_below, reap
from mopdctl.verifiers.registry import run_check

LENGTH = struct.Struct(">I")


def main() -> None:
    """Serves until stdin ends. Arguments: the parent's process id, the module that has VERIFIERS, memory in MiB."""
    parent, registry, memory_mb = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    die_with(parent)
    adopt_orphans()
    # What a check prints, or what a program that it starts reads, shall not get between the messages.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    verifiers = importlib.import_module(registry).VERIFIERS
    _say(replies, said="ready")
    os.dup2(nowhere, 2)
    # Twice what the pool watches for, so that it is the pool that tells; this is for what one call takes in one go.
    resource.setrlimit(resource.RLIMIT_AS, (2 * memory_mb * 2**20 + 2**30, resource.RLIM_INFINITY))
    for request in _requests(requests):
        attempt = attempt_from_json(request["attempt"])
        _say(replies, said="started")
        verifier = verifiers[request["name"]]
        try:
            verdict = run_check(verifier, attempt)
        except BaseException as error:  # SystemExit, or what a library derives from BaseException for its timeouts
            detail = f"{type(error).__name__}: {error}"
            verdict = Verdict(VerdictState.INFRA_ERROR, None, verifier.name, verifier.version, detail)
        kill_below(os.getpid())
        reap()
        _say(
            replies,
            said="verdict",
            state=verdict.state,
            reward=verdict.reward,
            detail=verdict.detail,
            label=verdict.label,
        )


def attempt_to_json(attempt: Attempt) -> dict[str, Any]:
    """The attempt as JSON values."""
    return {
        "response": attempt.response,
        "reference": attempt.reference,
        "messages": list(attempt.messages),
        "tools": None if attempt.tools is None else list(attempt.tools),
        "environment": attempt.environment,
        "turns": list(attempt.turns),
    }


def attempt_from_json(values: dict[str, Any]) -> Attempt:
    """The inverse of `attempt_to_json`."""
    return Attempt(
        values["response"],
        values["reference"],
        tuple(values["messages"]),
        None if values["tools"] is None else tuple(values["tools"]),
        values["environment"],
        tuple(values["turns"]),
    )


def _say(replies: BinaryIO, **message: Any) -> None:
    text = json.dumps(message).encode()
    replies.write(LENGTH.pack(len(text)) + text)
    replies.flush()


def _requests(requests: BinaryIO) -> Iterator[dict[str, Any]]:
    while len(header := requests.read(LENGTH.size)) == LENGTH.size:
        yield json.loads(requests.read(*LENGTH.unpack(header)))
