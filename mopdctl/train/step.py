"""One accumulation of gradients: forward, token loss, weighted sum, backward, for each micro-batch in turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import active_logits
from mopdctl.train.batch import MicroBatch
from mopdctl.train.distributed import gather_objects, sum_gradients, sum_over_ranks


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What an algorithm makes of the loss-active tokens of one micro-batch. All [N]."""

    loss_N: Tensor
    """To be minimised, not yet weighted; carries the gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Per-token figures that are averaged over tokens, by teacher."""
    streams: dict[str, Tensor] = field(default_factory=dict)
    """Per-token values to hand back to the caller by sample, e.g. `teacher_logprobs`."""


Algorithm = Callable[[Tensor, MicroBatch], TokenLoss]
"""(logits [N, V] of the loss-active tokens, micro-batch) -> TokenLoss."""


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


def accumulate(
    model: HFModel, micro_batches: Sequence[MicroBatch], algorithm: Algorithm, *, per_teacher_norms: bool = False
) -> Accumulated:
    """Adds up loss and gradient over micro-batches. Every rank must call it, with none of its own if need be."""
    loss_sum = 0.0
    sums: dict[str, dict[str, float]] = {}
    tokens: dict[str, int] = {}
    streams: dict[str, dict[str, list[float]]] = {}
    parameters = [p for p in model.model.parameters() if p.requires_grad]
    own: dict[str, list[Tensor | None]] = {}
    for micro_batch in micro_batches:
        if per_teacher_norms:
            _zero(parameters)
        if not len(micro_batch.tokens_N):
            continue
        with model.computing():
            logits_NV = active_logits(
                model.model, micro_batch.layout, micro_batch.active_BR, vocab_size=model.vocab_size
            )
        result = algorithm(logits_NV, micro_batch)
        loss = (result.loss_N * micro_batch.coefficients_N).sum()
        loss.backward()
        loss_sum += float(loss.detach())
        teacher = micro_batch.teacher_id
        tokens[teacher] = tokens.get(teacher, 0) + len(micro_batch.tokens_N)
        for name, values_N in result.metrics.items():
            by_teacher = sums.setdefault(name, {})
            by_teacher[teacher] = by_teacher.get(teacher, 0.0) + float(values_N.double().sum())
        for name, values_N in result.streams.items():
            streams.setdefault(name, {}).update(_by_sample(values_N, micro_batch))
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
    return Accumulated(totals[0], counts, means, norms, streams)


def _by_sample(values_N: Tensor, micro_batch: MicroBatch) -> dict[str, list[float]]:
    counts = [sum(s.loss_mask) for s in micro_batch.sequences]
    pieces = values_N.detach().float().cpu().split(counts)
    return {s.sample_id: piece.tolist() for s, piece in zip(micro_batch.sequences, pieces, strict=True)}


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
