"""The two protocols of the model border. Token ids in, token ids out: nothing is ever tokenized a second time."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One answer to sample."""

    sample_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    """128 bits that key this sample's own random stream (see `stream_seed`)."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    token_ids: tuple[int, ...]
    """As sampled, with the end token if one was sampled; never one that was not."""
    logprobs: tuple[float, ...]
    """Natural logs of the probabilities in the distribution that was sampled from, one per token."""
    finish_reason: str
    """`stop` or `length`."""


class Sampler(Protocol):
    """Something that writes answers."""

    def sample(self, requests: Sequence[SampleRequest], *, temperature: float) -> list[Completion]:
        """One completion per request, in order. Temperature 0 takes the likeliest token each time."""
        ...


class Scorer(Protocol):
    """Something that says how it would have weighed tokens that were written by another."""

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """For each (prompt ids, response ids), the natural log-probability of each response token at temperature 1."""
        ...


def stream_seed(*parts: object) -> int:
    """A 128-bit key for the random stream that `parts` name, e.g. `(seed, "rollout", sample_id)`.

    It depends on nothing else: not on the batch a sample lands in, nor on how many samples came before.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=16).digest(), "little")


def uniforms(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers in [0, 1) of a stream; number t decides token t of the sample."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)
