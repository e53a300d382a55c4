"""One step of an on-policy trainer once its samples have their streams: update and metrics."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mopdctl.config.train import OnPolicyConfig
from mopdctl.engines.hf import HFModel
from mopdctl.errors import MopdctlError
from mopdctl.train import distributed
from mopdctl.train.batch import TrainSequence, cut
from mopdctl.train.optimizer import Optimizers, learning_rate
from mopdctl.train.step import Accumulated, Algorithm, accumulate


def update(
    student: HFModel,
    optimizers: Optimizers,
    sequences: Sequence[TrainSequence],
    algorithm: Algorithm,
    step: int,
    train: OnPolicyConfig,
) -> tuple[Accumulated, float]:
    """One or more optimizer steps on one batch; returns the first accumulation and its gradient norm.

    A batch without a gradient (norm 0) leaves weights and optimizer as they are. The clip fraction alone is that of the
    last inner step: in the first one nothing can be clipped. Raises MopdctlError for a gradient that is not finite.
    """
    micro_batches = cut(
        sequences,
        reduction=train.loss_reduction,
        num_micro_batches=train.gradient_accumulation,
        pad_id=student.pad_id,
        device=student.device,
    )
    first: tuple[Accumulated, float] | None = None
    for inner in range(train.inner_steps):
        shares = inner == 0 and step % train.grad_share_every == 0
        result = accumulate(student, micro_batches, algorithm, per_teacher_norms=shares)
        norm = _step(optimizers, learning_rate(step, train), train.max_grad_norm)
        if not math.isfinite(norm):
            raise MopdctlError(
                f"step {step}: the gradient's norm is {norm}, and nothing of this step is kept; "
                "begin again under another name, with a lower learning_rate or dtype: float32"
            )
        first = first or (result, norm)
        for name in result.means.keys() & {"policy/clip_fraction"}:
            first[0].means[name] = result.means[name]
    assert first is not None
    return first


def _step(optimizers: Optimizers, rate: float, max_grad_norm: float) -> float:
    """An optimizer step, and the gradient's norm. Momentum and weight decay would move weights without a gradient."""
    if any(p.grad is not None and bool(p.grad.any()) for p in optimizers.parameters):
        return optimizers.step(rate, max_grad_norm)
    for parameter in optimizers.parameters:
        parameter.grad = None
    return 0.0


def snapshot_of(student: HFModel, extra: Mapping[str, Tensor]) -> HFModel:
    """A frozen copy of the student, or of what was saved: the sampler of `staleness: 1`, one step behind."""
    model = copy.deepcopy(student.model).eval().requires_grad_(False)
    if extra:
        model.load_state_dict(extra, strict=False)
    return HFModel(model, student.tokenizer, dtype=student.dtype, batch_size=student.batch_size)


def rollout_metrics(
    step: int,
    result: Accumulated,
    norm: float,
    answers: Sequence[tuple[str, int, str]],
    train: OnPolicyConfig,
) -> dict[str, Any]:
    """One step's metrics; what is kept per judge (teacher or environment) is an object keyed by its name.

    `answers` has (judge, response length in tokens, finish reason) of each sample of this rank.
    """
    total = sum(result.tokens.values())
    lengths: dict[str, list[int]] = {}
    truncated: dict[str, list[bool]] = {}
    for found in distributed.gather_objects(answers):
        for judge, length, reason in found:
            lengths.setdefault(judge, []).append(length)
            truncated.setdefault(judge, []).append(reason != "stop")
    metrics: dict[str, Any] = {
        "train/loss": result.loss,
        "train/grad_norm": norm,
        "train/learning_rate": learning_rate(step, train),
        **result.means,
        "policy/token_share": {judge: count / total for judge, count in result.tokens.items()},
        "rollout/response_length": {a: sum(n) / len(n) for a, n in sorted(lengths.items())},
        "rollout/truncated_share": {a: sum(t) / len(t) for a, t in sorted(truncated.items())},
        "rollout/tokens": total,
    }
    if result.grad_norms:
        whole = sum(result.grad_norms.values())
        metrics["policy/grad_share"] = {a: n / whole if whole else None for a, n in result.grad_norms.items()}
    return metrics
