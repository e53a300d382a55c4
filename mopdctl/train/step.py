"""One accumulation of gradients: forward, token loss, weighted sum, backward, for each micro-batch in turn."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import active_hidden, active_logits
from mopdctl.objective.head import Head
from mopdctl.train.batch import MicroBatch
from mopdctl.train.distributed import gather_objects, sum_gradients, sum_over_ranks


class Policy:
    """The model that trains, at the N loss-active tokens of one micro-batch. V vocabulary, H width.

    An algorithm takes either `logits_NV`, or `hidden_NH` and `head` where it goes over the vocabulary in pieces. Each
    is one forward pass, begun when it is first asked for.
    """

    def __init__(self, model: HFModel, batch: MicroBatch) -> None:
        self._model, self._batch = model, batch
        self.vocab_size = model.vocab_size

    @cached_property
    def logits_NV(self) -> Tensor:
        """Logits of the tokens that exist, with gradient."""
        with self._model.computing():
            return active_logits(
                self._model.model, self._batch.layout, self._batch.active_BR, vocab_size=self.vocab_size
            )

    @cached_property
    def hidden_NH(self) -> Tensor:
        """Last hidden states, with gradient."""
        with self._model.computing():
            return active_hidden(self._model.model, self._batch.layout, self._batch.active_BR)

    def computing(self) -> AbstractContextManager[Any]:
        """The precision that the model computes in, for what is made of `hidden_NH`."""
        return self._model.computing()

    @property
    def head(self) -> Head:
        """What makes logits of `hidden_NH`. Rows beyond `vocab_size` belong to no token."""
        return self._model.head


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What an algorithm makes of the loss-active tokens of one micro-batch."""

    loss: Tensor
    """To be minimised: the sum over tokens of coefficient times loss, a scalar that carries the gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Per-token figures [N] that are averaged over tokens, by teacher."""
    streams: dict[str, Tensor] = field(default_factory=dict)
    """Per-token values [N] to hand back to the caller by sample, e.g. `teacher_logprobs`."""
    hidden: dict[str, Tensor] = field(default_factory=dict)
    """Hidden states [N, width] to hand back likewise."""


def token_loss(
    loss_N: Tensor,
    batch: MicroBatch,
    metrics: dict[str, Tensor] | None = None,
    streams: dict[str, Tensor] | None = None,
) -> TokenLoss:
    """The TokenLoss of one loss per token, weighed by the batch's coefficients."""
    return TokenLoss((loss_N * batch.coefficients_N).sum(), metrics or {}, streams or {})


Algorithm = Callable[[Policy, MicroBatch], TokenLoss]
"""What to make of the policy at the loss-active tokens of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """What one pass over the micro-batches gave, summed over all ranks; gradients are left in `.grad`."""

    loss: float
    tokens: dict[str, int]
    """Teacher to loss-active tokens."""
    means: dict[str, dict[str, float]]
    """Metric to teacher to mean over tokens."""
    grad_norms: dict[str, float]
    """Teacher to the norm of its own gradient; empty unless asked for."""
    streams: dict[str, dict[str, list[float]]]
    """Stream to sample id to one value per loss-active token, for the samples of this rank."""
    hidden: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Name to sample id to hidden states on the CPU, likewise."""


def accumulate(
    model: HFModel, micro_batches: Sequence[MicroBatch], algorithm: Algorithm, *, per_teacher_norms: bool = False
) -> Accumulated:
    """Adds up loss and gradient over micro-batches. Every rank must call it, with none of its own if need be."""
    loss_sum = 0.0
    sums: dict[str, dict[str, float]] = {}
    tokens: dict[str, int] = {}
    streams: dict[str, dict[str, list[float]]] = {}
    hidden: dict[str, dict[str, Tensor]] = {}
    parameters = [p for p in model.model.parameters() if p.requires_grad]
    own: dict[str, list[Tensor | None]] = {}
    for micro_batch in micro_batches:
        if per_teacher_norms:
            _zero(parameters)
        if not len(micro_batch.tokens_N):
            continue
        result = algorithm(Policy(model, micro_batch), micro_batch)
        result.loss.backward()
        loss_sum += float(result.loss.detach())
        teacher = micro_batch.teacher_id
        tokens[teacher] = tokens.get(teacher, 0) + len(micro_batch.tokens_N)
        for name, values_N in result.metrics.items():
            by_teacher = sums.setdefault(name, {})
            by_teacher[teacher] = by_teacher.get(teacher, 0.0) + float(values_N.double().sum())
        for name, values_N in result.streams.items():
            pieces = _by_sample(values_N.detach().float(), micro_batch)
            streams.setdefault(name, {}).update({sample: piece.tolist() for sample, piece in pieces.items()})
        for name, states_NH in result.hidden.items():
            hidden.setdefault(name, {}).update(_by_sample(states_NH.detach(), micro_batch))
        if per_teacher_norms:
            own[teacher] = _add([p.grad for p in parameters], own.get(teacher))
    # A teacher whose algorithm gives no such figure has none: it is missing, not 0.
    figures = sorted({f for found in gather_objects([(n, t) for n in sums for t in sums[n]]) for f in found})
    teachers = sorted({t for found in gather_objects(list(tokens)) for t in found})
    norms = _restore_and_measure(parameters, own, teachers) if per_teacher_norms else {}
    if not per_teacher_norms:
        sum_gradients(parameters)
    totals = sum_over_ranks(
        loss_sum,
        *[tokens.get(t, 0) for t in teachers],
        *[sums.get(n, {}).get(t, 0.0) for n, t in figures],
    )
    counts = dict(zip(teachers, (int(c) for c in totals[1 : 1 + len(teachers)]), strict=True))
    means: dict[str, dict[str, float]] = {}
    for (name, teacher), total in zip(figures, totals[1 + len(teachers) :], strict=True):
        means.setdefault(name, {})[teacher] = total / counts[teacher]
    return Accumulated(totals[0], counts, means, norms, streams, hidden)


def _by_sample(values_N: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """The rows of each sample, on the CPU."""
    pieces = values_N.cpu().split([sum(s.loss_mask) for s in micro_batch.sequences])
    return {s.sample_id: piece for s, piece in zip(micro_batch.sequences, pieces, strict=True)}


def _zero(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _add(gradients: list[Tensor | None], total: list[Tensor | None] | None) -> list[Tensor | None]:
    if total is None:
        return gradients
    return [b if a is None else a if b is None else a + b for a, b in zip(gradients, total, strict=True)]


def _restore_and_measure(
    parameters: list[torch.nn.Parameter], own: dict[str, list[Tensor | None]], teachers: list[str]
) -> dict[str, float]:
    """Sums each teacher's gradient over ranks, takes its norm, and leaves the sum over teachers in `.grad`."""
    norms: dict[str, float] = {}
    total: list[Tensor | None] | None = None
    for teacher in teachers:
        for parameter, gradient in zip(parameters, own.get(teacher, [None] * len(parameters)), strict=True):
            parameter.grad = gradient
        sum_gradients(parameters)
        gradients = [p.grad for p in parameters]
        norms[teacher] = float(torch.stack([g.double().norm() for g in gradients if g is not None]).norm())
        total = _add(gradients, total)
    for parameter, gradient in zip(parameters, total or [None] * len(parameters), strict=True):
        parameter.grad = gradient
    return norms
