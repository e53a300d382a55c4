"""One update of an on-policy trainer: what moves the weights, and what does not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mopdctl.config.train import OnPolicyConfig
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import token_logprobs
from mopdctl.errors import MopdctlError
from mopdctl.train.batch import MicroBatch, TrainSequence
from mopdctl.train.loop import rollout_metrics, update
from mopdctl.train.optimizer import Optimizers, build_optimizers
from mopdctl.train.step import Policy, TokenLoss, token_loss


def settings(**train: Any) -> OnPolicyConfig:
    values = {"steps": 4, "learning_rate": 1e-2, "weight_decay": 0.1, "inner_steps": 2, **train}
    return OnPolicyConfig.model_validate(values)


def batch(gain: float) -> list[TrainSequence]:
    return [TrainSequence("s", [3, 4], [5, 6, 7], [1, 0, 1], "math", streams={"gain": [gain] * 3})]


def gained(policy: Policy, micro_batch: MicroBatch) -> TokenLoss:
    return token_loss(
        -micro_batch.streams["gain"] * token_logprobs(policy.logits_NV, micro_batch.tokens_N), micro_batch
    )


def state(model: HFModel, optimizers: Optimizers) -> list[Tensor]:
    """Copies of weights, moments and step counts."""
    moments = [v for part in optimizers.parts for p in optimizers.parameters for v in part.state.get(p, {}).values()]
    return [tensor.detach().clone() for tensor in [*model.model.parameters(), *moments]]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("sequences", [[], batch(0.0)], ids=["nothing to train on", "advantages of zero"])
def test_a_batch_without_a_gradient_moves_nothing(
    make_model64: Callable[..., HFModel], optimizer: str, sequences: list[TrainSequence]
) -> None:
    # Moments of earlier steps and weight decay would move the weights even so.
    model, train = make_model64(), settings(optimizer=optimizer)
    optimizers = build_optimizers(model, train)
    result, norm = update(model, optimizers, batch(1.0), gained, 0, train)
    assert norm > 0
    before = state(model, optimizers)
    result, norm = update(model, optimizers, sequences, gained, 1, train)
    assert norm == 0.0
    after = state(model, optimizers)
    assert len(after) == len(before) > len(list(model.model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(p.grad is None for p in model.model.parameters())
    metrics = rollout_metrics(1, result, norm, [("math", 3, "stop")], train)
    assert (metrics["train/grad_norm"], metrics["train/loss"]) == (0.0, 0.0)
    assert metrics["rollout/tokens"] == (2 if sequences else 0)
    # The next batch goes on as if that one had not been.
    update(model, optimizers, batch(1.0), gained, 2, train)
    assert not all(torch.equal(one, other) for one, other in zip(before, state(model, optimizers), strict=True))


@pytest.mark.parametrize("gain", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_ends_the_run(make_model64: Callable[..., HFModel], gain: float) -> None:
    model, train = make_model64(), settings()
    with pytest.raises(MopdctlError, match="step 3: the gradient's norm is nan"):
        update(model, build_optimizers(model, train), batch(gain), gained, 3, train)
