"""From tokens to figures: means with their standard errors over prompts, bins of prefix length, repetition, pass@k."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopdctl.distill.overlap.compare import Streams
from mopdctl.records import Sample
from mopdctl.verifiers import VerdictState

IMPOSSIBLE = 1e-4
"""A token whose probability is below this is nearly impossible for the teacher."""
NGRAM = 4
"""Tokens of an n-gram whose second occurrence in an answer counts as repetition."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tokens (or answers, or prompts), and how far it may be off."""

    mean: float
    stderr: float | None
    """Standard error over prompts, whose answers depend on each other; None for a single prompt."""


@dataclass(frozen=True, slots=True)
class PrefixBin:
    """The tokens that the student wrote after `begin` to `end - 1` tokens of its own answer."""

    begin: int
    end: int
    tokens: int
    advantage_nats: Estimate
    top_k_overlap: Estimate
    kl_reverse_nats: Estimate


@dataclass(frozen=True, slots=True)
class Measures:
    """What the student's answers to one teacher's prompts say about the two."""

    prompts: int
    answers: int
    tokens: int
    """That the student sampled."""
    figures: dict[str, Estimate]
    by_prefix: tuple[PrefixBin, ...]


@dataclass(frozen=True, slots=True)
class PassRates:
    """How often the student's sampled answers pass their verifier; the figures are None where `reason` says why."""

    pass_at_1: Estimate | None
    pass_at_k: Estimate | None
    k: int
    """Answers per prompt."""
    prompts: int
    """Prompts that count."""
    unchecked: int
    """Prompts left out, because the check of an answer broke."""
    reason: str | None


def measure(samples: Sequence[Sample], streams: Sequence[Streams]) -> Measures:
    """The figures of one teacher: means over all sampled tokens, those of shares of answers over all answers.

    The advantage is log p_teacher(y) - log p_student(y) of the token that was sampled, at temperature 1; the entropy
    gap is the student's entropy less the teacher's.
    """
    lengths = [len(one["teacher_logprobs"]) for one in streams]
    tokens = {name: np.concatenate([one[name] for one in streams]).astype(np.float64) for name in streams[0]}
    owner = np.repeat(_numbered([sample.prompt_id for sample in samples]), lengths)
    advantage = tokens["teacher_logprobs"] - tokens["student_logprobs"]
    per_token = {
        "top_k_overlap": tokens["top_k_overlap"],
        "student_mass": tokens["student_mass"],
        "teacher_mass": tokens["teacher_mass"],
        "impossible_share": tokens["teacher_logprobs"] < math.log(IMPOSSIBLE),
        "kl_reverse_nats": tokens["kl_reverse_nats"],
        "kl_forward_nats": tokens["kl_forward_nats"],
        "student_entropy_nats": tokens["student_entropy_nats"],
        "teacher_entropy_nats": tokens["teacher_entropy_nats"],
        "entropy_gap_nats": tokens["student_entropy_nats"] - tokens["teacher_entropy_nats"],
        "advantage_nats": advantage,
        "repeated_share": np.concatenate([_repeated(sample) for sample in samples]),
    }
    figures = {name: clustered_mean(values, owner) for name, values in per_token.items()}
    truncated = np.array([sample.finish_reason != "stop" for sample in samples])
    figures["truncated_share"] = clustered_mean(truncated, _numbered([sample.prompt_id for sample in samples]))
    prefix = np.concatenate([np.flatnonzero(sample.response_mask) for sample in samples])
    shown = {name: per_token[name] for name in ("advantage_nats", "top_k_overlap", "kl_reverse_nats")}
    return Measures(
        prompts=len({sample.prompt_id for sample in samples}),
        answers=len(samples),
        tokens=len(owner),
        figures=figures,
        by_prefix=tuple(_bins(prefix, owner, shown)),
    )


def clustered_mean(values: NDArray[np.generic], owner: NDArray[np.int64]) -> Estimate:
    """The mean of all values, with its standard error where values of one owner depend on each other.

        mean = sum_p s_p / sum_p n_p,   stderr = sqrt( P / (P - 1) sum_p (s_p - mean n_p)^2 ) / sum_p n_p

    with sum s_p and count n_p of each of P owners (the linearised variance of a ratio; Cochran, "Sampling techniques",
    1977, section 2.11).
    """
    n = np.bincount(owner)
    s = np.bincount(owner, weights=values.astype(np.float64))
    n, s = n[n > 0], s[n > 0]
    mean = float(s.sum() / n.sum())
    if len(n) < 2:
        return Estimate(mean, None)
    spread = len(n) / (len(n) - 1) * float(((s - mean * n) ** 2).sum())
    return Estimate(mean, math.sqrt(spread) / float(n.sum()))


def repeated_tokens(token_ids: Sequence[int], n: int = NGRAM) -> NDArray[np.bool_]:
    """True at each token that ends an n-gram which the answer has had before. Shape [T].

    Source: Welleck et al., "Neural text generation with unlikelihood training" (2019), seq-rep-n.
    """
    seen: set[tuple[int, ...]] = set()
    found = np.zeros(len(token_ids), np.bool_)
    for end in range(n, len(token_ids) + 1):
        gram = tuple(token_ids[end - n : end])
        found[end - 1] = gram in seen
        seen.add(gram)
    return found


def pass_at_k(answers: int, passed: int, k: int) -> float:
    """The unbiased estimate of the chance that one of k answers passes, from `passed` of `answers`.

        pass@k = 1 - C(answers - passed, k) / C(answers, k)

    Raises ValueError for a k above `answers`. Source: Chen et al., "Evaluating large language models trained on code"
    (2021), Eq. 1.
    """
    if not 1 <= k <= answers:
        raise ValueError(f"pass@{k} of {answers} answers")
    return 1.0 - math.comb(answers - passed, k) / math.comb(answers, k)


def pass_rates(samples: Sequence[Sample], verifiable: frozenset[str], *, k: int) -> PassRates:
    """pass@1 and pass@k of the student over the prompts in `verifiable` (ids), of k answers each.

    An answer passes with the full reward of 1. One that cannot be read or hangs its check does not pass; a prompt with
    an answer whose check broke does not count.
    """
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.prompt_id in verifiable:
            by_prompt.setdefault(sample.prompt_id, []).append(sample)
    counts = []
    for found in by_prompt.values():
        if all(one.verdict not in (None, VerdictState.INFRA_ERROR, VerdictState.INVALID_REFERENCE) for one in found):
            counts.append((len(found), sum(one.reward == 1.0 for one in found)))
    unchecked = len(by_prompt) - len(counts)
    if not counts:
        reason = "no answer could be checked" if by_prompt else "no prompt names a verifier"
        return PassRates(None, None, k, 0, unchecked, reason)
    owner = np.arange(len(counts))
    at_1, at_k = (
        clustered_mean(np.array([pass_at_k(n, passed, size) for n, passed in counts]), owner) for size in (1, k)
    )
    return PassRates(at_1, at_k, k, len(counts), unchecked, None)


def _repeated(sample: Sample) -> NDArray[np.bool_]:
    return repeated_tokens(sample.response_ids.tolist())[sample.response_mask]


def _numbered(names: Sequence[Hashable]) -> NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def _bins(
    prefix: NDArray[np.int64], owner: NDArray[np.int64], shown: dict[str, NDArray[np.generic]]
) -> list[PrefixBin]:
    """Bins 0, 1, 2-3, 4-7, 8-15, ...; those without a token are left out."""
    found = []
    number = np.frexp(prefix)[1]  # 0 -> 0, 1 -> 1, 2 and 3 -> 2
    for i in np.unique(number).tolist():
        inside = number == i
        estimates = {name: clustered_mean(values[inside], owner[inside]) for name, values in shown.items()}
        begin = 0 if i == 0 else 1 << (i - 1)
        found.append(PrefixBin(begin, max(1, begin * 2), int(inside.sum()), **estimates))
    return found
