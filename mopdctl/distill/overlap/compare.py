"""Student and teacher at each token that the student wrote: what one batch of logits says, kept as a few numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import token_logprobs
from mopdctl.errors import InputError, MopdctlError
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.head import head_logits
from mopdctl.objective.kl import entropy
from mopdctl.objective.overlap import support_overlap
from mopdctl.objective.reverse_kl import reverse_kl
from mopdctl.records import Sample

Streams = dict[str, NDArray[np.float32]]
"""Name to one number per sampled token, [N]; see `STREAMS`."""

STREAMS = (
    "top_k_overlap",
    "student_mass",
    "teacher_mass",
    "kl_reverse_nats",
    "kl_forward_nats",
    "student_entropy_nats",
    "teacher_entropy_nats",
    "student_logprobs",
    "teacher_logprobs",
)
"""Shares of `support_overlap`; KL(student || teacher) and KL(teacher || student); log-probabilities of the tokens."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is held at one time. It changes no measure but by rounding."""

    batch_tokens: int = 1 << 14
    """Tokens in one forward pass, padding included; an answer longer than that goes alone."""
    logit_rows: int = 256
    """Tokens whose logits exist at one time."""


@torch.no_grad()
def compare(student: HFModel, teacher: HFModel, samples: Sequence[Sample], *, top_k: int, room: Room) -> list[Streams]:
    """What `STREAMS` names of every token that was sampled, by sample, in order. Both models at temperature 1.

    Raises InputError for an answer that is longer than the teacher's context, and MopdctlError naming the sample where
    a model gives no number.
    """
    for sample in samples:
        if len(sample.tokens) > teacher.max_length:
            raise InputError(
                f"sample {sample.sample_id}: {len(sample.tokens)} tokens, but the teacher's context has "
                f"{teacher.max_length}; lower train.max_new_tokens"
            )
    found: dict[int, Streams] = {}
    for batch in _batches(samples, room.batch_tokens):
        chosen = [samples[i] for i in batch]
        pairs = [(sample.prompt_ids.tolist(), sample.response_ids.tolist()) for sample in chosen]
        masks = [sample.response_mask.tolist() for sample in chosen]
        hidden = [torch.cat(model.hidden_states(pairs, masks)) for model in (student, teacher)]
        tokens_N = torch.cat([torch.from_numpy(sample.response_ids[sample.response_mask]) for sample in chosen]).long()
        pieces = [
            _measured(_logits(student, hidden[0][rows]), _logits(teacher, hidden[1][rows]), tokens_N[rows], top_k=top_k)
            for rows in _slices(len(tokens_N), room.logit_rows)
        ]
        edges = np.cumsum([int(sample.response_mask.sum()) for sample in chosen])[:-1]
        by_name = {name: np.split(np.concatenate([piece[name] for piece in pieces]), edges) for name in STREAMS}
        for place, i in enumerate(batch):
            found[i] = {name: values[place] for name, values in by_name.items()}
            _refuse_non_finite(samples[i], found[i])
    return [found[i] for i in range(len(samples))]


def _logits(model: HFModel, hidden_NH: Tensor) -> Tensor:
    with model.computing():
        return head_logits(hidden_NH.to(model.device), model.head, vocab_size=model.vocab_size)


def _measured(policy_logits_NV: Tensor, teacher_logits_NV: Tensor, tokens_N: Tensor, *, top_k: int) -> Streams:
    tokens_N = tokens_N.to(policy_logits_NV.device)
    policy_NV, teacher_NV = (torch.log_softmax(x.float(), dim=-1) for x in (policy_logits_NV, teacher_logits_NV))
    values = (
        *support_overlap(policy_NV, teacher_NV, top_k),
        reverse_kl(policy_NV, teacher_NV)[0],
        forward_kl(policy_NV, teacher_NV)[0],
        entropy(policy_NV),
        entropy(teacher_NV),
        token_logprobs(policy_NV, tokens_N),
        token_logprobs(teacher_NV, tokens_N),
    )
    return {name: value_N.float().cpu().numpy() for name, value_N in zip(STREAMS, values, strict=True)}


def _batches(samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of samples of similar length whose padded batch has no more tokens than that."""
    batch: list[int] = []
    prompt = response = 0
    for i in sorted(range(len(samples)), key=lambda i: (len(samples[i].tokens), i)):
        own = samples[i].prompt_length, len(samples[i].tokens) - samples[i].prompt_length
        if batch and (max(prompt, own[0]) + max(response, own[1])) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, prompt, response = [], 0, 0
        prompt, response = max(prompt, own[0]), max(response, own[1])
        batch.append(i)
    if batch:
        yield batch


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, start + size)


def _refuse_non_finite(sample: Sample, streams: Streams) -> None:
    for name, values in streams.items():
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise MopdctlError(
                f"sample {sample.sample_id}: {name} of sampled token {bad[0]} is {values[bad[0]]}; a model gives no "
                "number, or no probability to what the other writes"
            )
