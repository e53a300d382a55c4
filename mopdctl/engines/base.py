"""The two protocols of the model border. Token ids in, token ids out: nothing is ever tokenized a second time."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One answer to sample."""

    sample_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    """Budget of the whole response, what is there already included."""
    seed: int
    """128 bits that key this sample's own random stream (see `stream_seed`)."""
    response_ids: tuple[int, ...] = ()
    """What is there already: the answer goes on after it, with random number `len(response_ids)` of its stream."""
    forced_ids: tuple[int, ...] = ()
    """Tokens that come next whatever is drawn, decoded one by one and not given back: the way an undisturbed answer
    took, so that the numbers after them are its own to the bit. Reading `response_ids` in one pass rounds otherwise."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step gave: at most one token for each running request."""

    requests: NDArray[np.int64]
    """Indices of the requests that got a token, each at most once."""
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Natural logs of the probabilities in the distribution that was sampled from."""
    finished: dict[int, str]
    """Request index to `stop` or `length`, for those that this step ended."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, without what its request brought along."""

    token_ids: tuple[int, ...]
    """As sampled, with the end token if one was sampled; never one that was not."""
    logprobs: tuple[float, ...]
    """Natural logs of the probabilities in the distribution that was sampled from, one per token."""
    finish_reason: str
    """`stop` or `length`."""


class Sampler(Protocol):
    """Something that writes answers."""

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        """Engine steps until every request has finished. Temperature 0 takes the likeliest token each time.

        A request whose budget is used up already finishes with `length` and no token. Which requests run together is
        the engine's business, and changes no sample.
        """
        ...


def sample(sampler: Sampler, requests: Sequence[SampleRequest], *, temperature: float) -> list[Completion]:
    """One completion per request, in order."""
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    reasons: dict[int, str] = {}
    for step in sampler.stream(requests, temperature=temperature):
        for i, token, logprob in zip(
            step.requests.tolist(), step.token_ids.tolist(), step.logprobs.tolist(), strict=True
        ):
            tokens[i].append(token)
            logprobs[i].append(logprob)
        reasons.update(step.finished)
    return [Completion(tuple(tokens[i]), tuple(logprobs[i]), reasons[i]) for i in range(len(requests))]


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


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """The first `count` numbers in [0, 1) of a stream; number t decides token t of the response."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)
