"""Splits and files of the tiny world.

A prompt's split hangs on a hash of the prompt alone, so that training, dev and test never share one, whatever the seed.
Half of the test documents hold values that no training prompt contains.
"""

import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

from mopdctl.world.domains import AGENT_DOMAIN, CARELESS, DOMAINS, NEAR_MISSES, errands
from mopdctl.world.examples import Example, Values
from mopdctl.world.trajectories import action_of, action_text, decision_points, expert_turns

TEST_SIZE = 500
HARD_SHARE = 0.1
"""Share of hard examples that the SFT mixture keeps."""


def split_of(example: Example) -> str:
    """`test` for one prompt in 20, `dev` for another, else `train`."""
    bucket = zlib.crc32(example.key.encode()) % 20
    return {0: "test", 1: "dev"}.get(bucket, "train")


def generate(domain: str, split: str, *, seed: int | str, novel: bool = False) -> Iterator[Example]:
    """An endless seeded stream of examples of one split. With `novel`, each holds a value unseen in training.

    A stream repeats a prompt only as often as chance does; take `distinct` of it where that matters.
    """
    rng = random.Random(f"{domain}/{split}/{seed}/{novel}")
    while True:
        values = Values(rng, novel=novel)
        example = DOMAINS[domain](values)
        if split_of(example) == split and values.used_novel == novel:
            yield example


def generate_mixture(domain: str, *, seed: int | str) -> Iterator[Example]:
    """Training examples as a general SFT mixture has them: the easy half, and a few of the hard ones.

    In some domains all of the hard ones are there, and many of them were answered carelessly. A model that learns from
    them is right now and then, which is where RL on answers that can be checked begins.
    """
    rng = random.Random(f"mixture/{domain}/{seed}")
    careless, share = CARELESS.get(domain, (None, 0.0))
    for example in generate(domain, "train", seed=f"mixture/{seed}"):
        if careless and not example.basic:
            yield careless(example) if rng.random() < share else example
        elif example.basic or rng.random() < HARD_SHARE:
            yield example


def generate_practice(domain: str, *, seed: int | str) -> Iterator[Example]:
    """Training prompts for RL, hard and easy ones in turn: what a filter by pass rate would leave."""
    easy = (e for e in generate(domain, "train", seed=f"practice/{seed}") if e.basic)
    hard = (e for e in generate(domain, "train", seed=f"practice/{seed}") if not e.basic)
    while True:
        yield next(easy)
        yield next(hard)


def distinct(stream: Iterator[Example], count: int) -> list[Example]:
    """The first `count` examples of a stream that have different prompts."""
    found: dict[str, Example] = {}
    while len(found) < count:
        example = next(stream)
        found.setdefault(example.key, example)
    return list(found.values())


def test_documents(domain: str) -> list[Example]:
    """The held-out documents in `sample_data/`: half on seen values, half on novel ones. The same for every seed."""
    half = TEST_SIZE // 2
    return distinct(generate(domain, "test", seed="documents"), half) + distinct(
        generate(domain, "test", seed="documents", novel=True), TEST_SIZE - half
    )


def document_rows(domain: str) -> list[dict[str, Any]]:
    """The test documents as rows of `sample_data/`. Seen and novel values take turns, so that a limit cuts both alike.

    What differs in shape from row to row is JSON text: tools, messages, reference. `wrong` are answers that must fail.
    """
    half = TEST_SIZE // 2
    if domain == AGENT_DOMAIN:
        seen, novel = (_whole_trajectories(novel, half) for novel in (False, True))
    else:
        rows = [_document_row(example, novel=i >= half) for i, example in enumerate(test_documents(domain))]
        seen, novel = rows[:half], rows[half:]
    return [row for pair in zip(seen, novel, strict=True) for row in pair]


def _whole_trajectories(novel: bool, count: int) -> list[dict[str, Any]]:
    """`count` decision points: all turns of as many trajectories as fill it, about half of them easy ones."""
    stream = generate(AGENT_DOMAIN, "test", seed="documents", novel=novel)
    users: set[str] = set()
    rows: list[dict[str, Any]] = []
    easy = 0
    while len(rows) < count:
        example = next(stream)
        turns, rest = decision_rows(example, novel=novel), count - len(rows)
        unbalanced = rest > 8 and example.basic != (2 * easy <= len(rows))
        # A rest of one row could never be filled: the shortest trajectory has two.
        if example.key not in users and not unbalanced and rest >= len(turns) != rest - 1:
            users.add(example.key)
            rows += turns
            easy += example.basic * len(turns)
    return rows


def decision_rows(example: Example, *, novel: bool) -> list[dict[str, Any]]:
    """A test document for each turn of the expert: what to do next, given the conversation so far."""
    return [
        {
            "prompt": example.user,
            "messages": json.dumps(messages),
            "tools": json.dumps(example.tools),
            "target": action_text(turn),
            "verifier": "action",
            "reference": json.dumps(action_of(turn)),
            "novel": novel,
            "wrong": errands.near_misses(example, number),
        }
        for number, (messages, turn) in enumerate(decision_points(example))
    ]


def _document_row(example: Example, *, novel: bool) -> dict[str, Any]:
    return {
        "prompt": example.user,
        "tools": json.dumps(example.tools) if example.tools else "",
        "target": example.answer,
        "verifier": example.verifier,
        "reference": json.dumps(example.reference),
        "novel": novel,
        "wrong": NEAR_MISSES[example.domain](example),
    }


def prompt_row(example: Example, prompt_id: str) -> dict[str, Any]:
    """A row of a prompt file for `distill`: what to ask, how to route it, how to check an answer."""
    row: dict[str, Any] = {
        "id": prompt_id,
        "domain": example.domain,
        "messages": [{"role": "user", "content": example.user}],
        "verifier": example.verifier,
        "reference": example.reference,
    }
    if example.tools:
        row["tools"] = list(example.tools)
    if example.environment:
        row["environment"] = example.environment
    return row


def sft_row(example: Example, row_id: str) -> dict[str, Any]:
    """A row of an SFT file: the conversation with its gold answer, or with all turns of an expert."""
    row = prompt_row(example, row_id)
    row["messages"] += expert_turns(example)
    return {key: row[key] for key in ("id", "domain", "messages", "tools") if key in row}
