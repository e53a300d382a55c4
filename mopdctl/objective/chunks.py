"""What `chunked_divergence` does chunk after chunk: logits of both models, figures, weights, gradient of the logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mopdctl.objective.fused import Rows, row_block
from mopdctl.objective.head import Head, bend_, unbend_
from mopdctl.objective.products import operand_dtype, project

Weights = Callable[[Tensor, slice], Tensor]
"""(policy_logprobs_C of the sampled tokens, constant; which of the N tokens they are) -> weight_C, constant."""

_CHUNK_ELEMENTS = {"cpu": 40_000_000, "cuda": 80_000_000}
"""Logits of one chunk and one model: 160 and 320 MB in float32. On an H200, 512 rows of 151,936 are as fast as 2,048
and 6 to 8 percent faster than 256."""
_MAX_CHUNK = {"cpu": 256, "cuda": 4096}
"""Rows past which the products become no faster."""
_CHUNKS_PER_PULL = 4
"""On CUDA, chunks whose gradients (bfloat16, a quarter of both logits) go into the weight's together: each time costs a
pass over all of its float32 sum."""


def default_chunk(vocab_size: int, device: torch.device) -> int:
    """Rows per chunk: as many as make 40 million logits and at most 256 on a CPU, 80 million and 4,096 on a GPU.

    From 64 on a multiple of 64.
    """
    kind = "cpu" if device.type == "cpu" else "cuda"
    chunk = max(1, min(_CHUNK_ELEMENTS[kind] // vocab_size, _MAX_CHUNK[kind]))
    return chunk if chunk < 64 else chunk // 64 * 64


@dataclass(frozen=True, slots=True)
class Side:
    """Hidden states and head of one model, cut to the vocabulary, in the dtype in which they are multiplied."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    head: Head

    @classmethod
    def of(cls, hidden_NH: Tensor, head: Head, vocab_size: int) -> "Side":
        """Cuts and casts; neither hidden states nor head carry a gradient from here on."""
        hidden_NH = hidden_NH.detach()
        weight_VH = head.weight_VH.detach()[:vocab_size]
        if operand_dtype(hidden_NH, weight_VH) == torch.bfloat16:
            hidden_NH, weight_VH = hidden_NH.bfloat16(), weight_VH.bfloat16()
        return cls(hidden_NH, weight_VH, None if head.bias_V is None else head.bias_V.detach()[:vocab_size], head)

    def product(self, rows: slice, out_CV: Tensor) -> Tensor:
        """The bare product hidden @ weight^T of these rows, in `out_CV`."""
        project(self.hidden_NH[rows], self.weight_VH, out_CV)
        return out_CV

    def logits(self, rows: slice, out_CV: Tensor) -> Tensor:
        """The logits of these rows, in `out_CV`."""
        return bend_(self.product(rows, out_CV), self.head, self.bias_V)


@dataclass(frozen=True, slots=True)
class Job:
    """What there is to do."""

    policy: Side
    teacher: Side
    reference: Side | None
    tokens_N: Tensor
    weights: Weights
    rows: Rows
    """Used where `in_triton` is not set."""
    in_triton: bool
    chunk: int
    """Rows per chunk."""
    dtype: torch.dtype
    """Of logits and figures."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What is entered chunk by chunk. All [N], constant."""

    value_N: Tensor
    policy_logprobs_N: Tensor
    target_logprobs_N: Tensor
    entropy_N: Tensor
    weight_N: Tensor

    def fill(self, at: slice, value: Tensor, policy_logprobs: Tensor, target_logprobs: Tensor, entropy: Tensor) -> None:
        """Enters the figures of some rows."""
        self.value_N[at] = value
        self.policy_logprobs_N[at] = policy_logprobs
        self.target_logprobs_N[at] = target_logprobs
        self.entropy_N[at] = entropy

    def loss(self) -> Tensor:
        """The sum of weight times value over tokens whose weight is not 0."""
        # 0 * NaN would be NaN.
        return torch.where(self.weight_N != 0, self.weight_N * self.value_N, 0.0).sum()


def torch_chunks(job: Job, figures: Figures) -> Iterator[tuple[slice, Tensor]]:
    """Fills in the figures of one chunk after another and gives the gradient with respect to its logits, unweighted."""
    sides = [job.policy, job.teacher] + ([] if job.reference is None else [job.reference])
    device, vocab_size = job.tokens_N.device, len(job.policy.weight_VH)
    buffers = [torch.empty(job.chunk, vocab_size, dtype=job.dtype, device=device) for _ in sides]
    for chunk in _slices(len(job.tokens_N), job.chunk):
        count = chunk.stop - chunk.start
        policy_CV, target_CV, *reference = (
            side.logits(chunk, buffer[:count]) for side, buffer in zip(sides, buffers, strict=True)
        )
        for rows in _slices(count, row_block(vocab_size, device)):
            found = job.rows(
                policy_CV[rows],
                target_CV[rows],
                reference[0][rows] if reference else None,
                job.tokens_N[chunk][rows],
            )
            unbend_(target_CV[rows], policy_CV[rows], job.policy.head)
            at = slice(chunk.start + rows.start, chunk.start + rows.stop)
            figures.fill(at, found.value_C, found.policy_logprobs_C, found.target_logprobs_C, found.entropy_C)
        figures.weight_N[chunk] = job.weights(figures.policy_logprobs_N[chunk], chunk)
        dropped_C = figures.weight_N[chunk] == 0
        if dropped_C.any():
            target_CV[dropped_C] = 0.0
        yield chunk, target_CV.to(gradient_dtype(job))


def triton_chunks(job: Job, figures: Figures) -> Iterator[tuple[slice, Tensor]]:
    """As `torch_chunks`, for reverse KL on CUDA; a few chunks' gradients are given together."""
    # Not at the top: Triton comes with torch for CUDA and with no other.
    from mopdctl.objective.fused_triton import Raw, differentiate, measure

    device, vocab_size = job.tokens_N.device, len(job.policy.weight_VH)
    buffers = [torch.empty(job.chunk, vocab_size, dtype=torch.float32, device=device) for _ in range(2)]
    together = min(job.chunk * _CHUNKS_PER_PULL, len(job.tokens_N))
    gradient_BV = torch.empty(together, vocab_size, dtype=gradient_dtype(job), device=device)
    for block in _slices(len(job.tokens_N), max(together, 1)):
        for within in _slices(block.stop - block.start, job.chunk):
            chunk = slice(block.start + within.start, block.start + within.stop)
            policy, target = (
                Raw(side.product(chunk, buffer[: chunk.stop - chunk.start]), side.bias_V, side.head)
                for side, buffer in zip((job.policy, job.teacher), buffers, strict=True)
            )
            found = measure(policy, target, job.tokens_N[chunk])
            figures.fill(chunk, found.value_C, found.policy_logprobs_C, found.target_logprobs_C, found.entropy_C)
            figures.weight_N[chunk] = job.weights(figures.policy_logprobs_N[chunk], chunk)
            differentiate(policy, target, found, figures.weight_N[chunk] != 0, gradient_BV[within])
        yield block, gradient_BV[: block.stop - block.start]


def gradient_dtype(job: Job) -> torch.dtype:
    """What the gradient of the logits is multiplied in."""
    narrow = job.policy.weight_VH.device.type == "cuda" and job.policy.weight_VH.dtype == torch.bfloat16
    return torch.bfloat16 if narrow else job.dtype


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
