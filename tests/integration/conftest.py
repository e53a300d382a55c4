"""A tiny model that has learnt to call tools, and prompts whose answers take several calls."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

STEPS = 60
"""Of fine-tuning, after which answers differ: about three of four are right."""


def _places(number: int) -> tuple[list[str], list[int], list[str]]:
    """The people of a prompt, their lockers and the items in them."""
    people, items = ("kalo", "bemi", "tora", "dune"), ("tode", "rika", "suna", "mopa")
    first, second = number % 4, (number + 1 + number // 4 % 3) % 4
    return [people[first], people[second]], [3 + 2 * first, 3 + 2 * second], [items[first], items[second]]


@pytest.fixture(scope="session")
def errands(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Path]) -> Path:
    """`model`, which calls tools in most of its turns and not always rightly, and twelve prompts, `errands.jsonl`.

    Nothing may write here.
    """
    import torch

    from mopdctl.engines.hf import HFModel
    from mopdctl.environments.errands import Errands
    from mopdctl.files import write_jsonl
    from mopdctl.train.data import conversation_ids

    folder = tmp_path_factory.mktemp("errands")
    model = HFModel.load(str(write_tiny_model(folder / "model", max_position_embeddings=256)), train=True)

    def call(name: str, /, **arguments: Any) -> dict[str, Any]:
        return {"name": name, "arguments": arguments}

    rows, taught = [], []
    for number in range(12):
        people, lockers, items = _places(number)
        calls = [call("find_person", name=people[0]), call("open_locker", number=lockers[0])]
        told = [str(lockers[0]), items[0]]
        question = {"role": "user", "content": f"What does {people[0]} have?"}
        setup = {
            "people": dict(zip(people, lockers, strict=True)),
            "lockers": dict(zip(map(str, lockers), items, strict=True)),
        }
        rows.append(
            {
                "id": str(number),
                "messages": [question],
                "tools": Errands.tools,
                "domain": "errands",
                "verifier": "state_replay",
                "reference": {"calls": calls, "message": items[0], "basis": ["calls", "message"]},
                "environment": {"name": "errands", "setup": setup, "max_turns": 4},
            }
        )
        turns = [
            message
            for made, result in zip(calls, told, strict=True)
            for message in (
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": made}]},
                {"role": "tool", "content": result},
            )
        ]
        talk = [question, *turns, {"role": "assistant", "content": items[0]}]
        taught.append(conversation_ids(model, talk, list(Errands.tools), place="row", loss_on="assistant"))
    write_jsonl(folder / "errands.jsonl", rows)
    longest = max(len(ids) for ids, _ in taught)
    ids_BT = torch.tensor([[*ids, *[model.pad_id] * (longest - len(ids))] for ids, _ in taught])
    labels_BT = torch.tensor(
        [
            [*(t if on else -100 for t, on in zip(ids, mask, strict=True)), *[-100] * (longest - len(ids))]
            for ids, mask in taught
        ]
    )
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        model.model(ids_BT, labels=labels_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save(folder / "model")
    return folder


@pytest.fixture(scope="session")
def stopped_after() -> Callable[..., AbstractContextManager[None]]:
    """Runs a training command, stops it `delay_s` after line `lines` of its metrics, kills it when the block ends."""

    @contextmanager
    def stopped(metrics: Path, lines: int, arguments: list[str], *, delay_s: float = 0) -> Iterator[None]:
        before = metrics.stat().st_ino if metrics.exists() else None
        environment = os.environ | {"GOMP_SPINCOUNT": "3000"}
        process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 120
            # A resumed run writes the file anew before it appends to it.
            while not (
                metrics.exists() and metrics.stat().st_ino != before and metrics.read_bytes().count(b"\n") >= lines
            ):
                assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
                assert time.monotonic() < deadline, "no progress"
                time.sleep(0.001)
            time.sleep(delay_s)
            process.send_signal(signal.SIGSTOP)
            yield
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL

    return stopped
