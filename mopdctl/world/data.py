"""Splits and files of the tiny world.

A prompt's split hangs on a hash of the prompt alone, so that training, dev and test never share one, whatever the seed.
Half of the test documents hold values that no training prompt contains.
"""

import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

from mopdctl.world.domains import DOMAINS
from mopdctl.world.examples import Example, Values

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
    """Training examples as a general SFT mixture has them: the easy half, and a few of the hard ones."""
    rng = random.Random(f"mixture/{domain}/{seed}")
    for example in generate(domain, "train", seed=f"mixture/{seed}"):
        if example.basic or rng.random() < HARD_SHARE:
            yield example


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


def document_row(example: Example, *, novel: bool) -> dict[str, Any]:
    """A test document for `sample_data/`. Tools and reference are JSON text: their shape differs from row to row."""
    return {
        "prompt": example.user,
        "tools": json.dumps(example.tools) if example.tools else "",
        "target": example.answer,
        "verifier": example.verifier,
        "reference": json.dumps(example.reference),
        "novel": novel,
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
    return row


def sft_row(example: Example, row_id: str) -> dict[str, Any]:
    """A row of an SFT file: the conversation with its gold answer."""
    row = prompt_row(example, row_id)
    del row["verifier"], row["reference"]
    row["messages"] = [*row["messages"], example.assistant()]
    return row
