"""The loss of an RL run on whole batches, against its equation in float64, one token at a time."""

import math
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopdctl.config.rl import RlTrainConfig
from mopdctl.rl.losses import DISTILLATION, REWARD, policy_loss
from mopdctl.train.batch import TrainSequence, cut

VOCABULARY = 7
FLOAT32 = 2e-5


def settings(**train: Any) -> RlTrainConfig:
    return RlTrainConfig.model_validate({"steps": 1, **train})


def ragged(seed: int, *, prox: bool, reference: bool) -> list[TrainSequence]:
    """Nine sequences of both components, of one to eight response tokens, some of which carry no loss.

    Where no token carries loss, a stream holds what would spoil everything.
    """
    rng = random.Random(seed)
    found = []
    for number in range(9):
        component = DISTILLATION if number % 3 == 0 else REWARD
        length = rng.randint(1, 8)
        mask = [1, *(rng.choice([0, 1, 1]) for _ in range(length - 1))]
        advantage = rng.choice([-1.5, -0.5, 0.0, 0.75, 2.0])

        def stream(low: float, high: float, mask: list[int] = mask) -> list[float]:
            return [rng.uniform(low, high) if on else math.nan for on in mask]

        streams = {"behavior_logprobs": stream(-4, -0.2)}
        if component == DISTILLATION:
            streams["teacher_logprobs"] = stream(-5, -0.1)
        else:
            streams["advantages"] = [advantage if on else math.nan for on in mask]
        if prox:
            streams["prox_logprobs"] = stream(-4, -0.2)
        if reference:
            streams["reference_logprobs"] = stream(-5, -0.1)
        found.append(
            TrainSequence(
                f"s{number}",
                [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))],
                [rng.randrange(VOCABULARY) for _ in range(length)],
                mask,
                teacher_id=f"{component}-{number % 2}",
                weight=rng.choice([0.5, 1.0, 2.0]),
                streams=streams,
                component=component,
            )
        )
    return found


def logits_of(sequence: TrainSequence, position: int) -> list[float]:
    """What a model might give at a position: a function of sequence and position alone, however a batch is cut."""
    rng = random.Random(f"{sequence.sample_id}/{position}")
    return [rng.uniform(-2, 2) for _ in range(VOCABULARY)]


@dataclass
class Result:
    loss: float
    gradients: dict[tuple[str, int], list[float]]
    kept: dict[tuple[str, int], float]
    clipped: dict[tuple[str, int], float]


def by_definition(sequences: list[TrainSequence], train: RlTrainConfig) -> Result:
    """The sum over tokens of coefficient times loss, its gradient with respect to the logits, and what was held."""
    result = Result(0.0, {}, {}, {})
    for s in sequences:
        own = [other for other in sequences if other.component == s.component]
        tokens = sum(s.loss_mask)
        if train.loss_reduction == "token":
            coefficient = s.weight / sum(sum(other.loss_mask) for other in own)
        else:
            coefficient = s.weight / (tokens * len(own))
        for position, (token, on) in enumerate(zip(s.response_ids, s.loss_mask, strict=True)):
            if not on:
                continue
            logits = logits_of(s, position)
            total = sum(map(math.exp, logits))
            policy = logits[token] - math.log(total)
            value = {name: values[position] for name, values in s.streams.items()}
            prox = value.get("prox_logprobs", policy)
            c = math.exp(prox - value["behavior_logprobs"])
            low, high = train.correction_low, train.correction_high
            kept = 1.0
            if train.correction == "icepop":
                kept = float(low <= c <= high)
                weight = kept * c
            else:
                weight = min(max(c, low), high) if train.correction == "tis" else 1.0
            advantage = value["teacher_logprobs"] - prox if s.component == DISTILLATION else value["advantages"]
            ratio = math.exp(policy - prox)
            plain = ratio * advantage
            held = min(max(ratio, 1 - train.clip_low), 1 + train.clip_high) * advantage
            loss = -weight * min(plain, held)
            slope = 0.0 if held < plain else -weight * advantage * ratio
            if train.kl_weight:
                gap = value["reference_logprobs"] - policy
                loss += train.kl_weight * (math.exp(gap) - 1 - gap)
                slope += train.kl_weight * (1 - math.exp(gap))
            key = s.sample_id, position
            result.loss += coefficient * loss
            result.gradients[key] = [
                coefficient * slope * ((v == token) - math.exp(logits[v]) / total) for v in range(VOCABULARY)
            ]
            result.kept[key] = kept
            result.clipped[key] = float(held < plain)
    return result


def by_batches(sequences: list[TrainSequence], train: RlTrainConfig, pieces: int) -> Result:
    """The same by `policy_loss`, cut into micro-batches."""
    result = Result(0.0, {}, {}, {})
    algorithm = policy_loss(train)
    device = torch.device("cpu")
    for batch in cut(sequences, reduction=train.loss_reduction, num_micro_batches=pieces, pad_id=0, device=device):
        keys = [(s.sample_id, position) for s in batch.sequences for position, on in enumerate(s.loss_mask) if on]
        by_id = {s.sample_id: s for s in batch.sequences}
        logits_NV = torch.tensor([logits_of(by_id[name], position) for name, position in keys], requires_grad=True)
        found = algorithm(SimpleNamespace(logits_NV=logits_NV), batch)
        loss = found.loss
        loss.backward()
        assert logits_NV.grad is not None
        result.loss += float(loss.detach())
        result.gradients |= zip(keys, logits_NV.grad.tolist(), strict=True)
        result.kept |= zip(keys, found.metrics["policy/kept_fraction"].tolist(), strict=True)
        result.clipped |= zip(keys, found.metrics["policy/clip_fraction"].tolist(), strict=True)
    return result


CASES: dict[str, dict[str, Any]] = {
    "one inner step": {},
    "clip-higher": {"inner_steps": 2, "clip_low": 0.1, "clip_high": 0.5},
    "a band that masks": {"inner_steps": 2, "correction_low": 0.8, "correction_high": 1.5},
    "truncated importance sampling": {"inner_steps": 2, "correction": "tis", "correction_low": 0.7},
    "no correction": {"inner_steps": 2, "correction": "none"},
    "the KL to a reference": {"kl_weight": 0.3},
    "all of it": {"inner_steps": 2, "kl_weight": 0.05, "correction": "tis", "clip_high": 0.4},
}


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_equation(case: str, reduction: str) -> None:
    train = settings(loss_reduction=reduction, **CASES[case])
    clipped = masked = 0.0
    for seed in range(4):
        sequences = ragged(seed, prox=train.inner_steps > 1, reference=train.kl_weight > 0)
        expected = by_definition(sequences, train)
        for pieces in (1, 5):
            found = by_batches(sequences, train, pieces)
            assert found.loss == pytest.approx(expected.loss, rel=FLOAT32, abs=FLOAT32)
            assert found.gradients.keys() == expected.gradients.keys()
            for key, gradient in expected.gradients.items():
                assert found.gradients[key] == pytest.approx(gradient, rel=1e-4, abs=FLOAT32), key
            assert found.kept == expected.kept
            assert found.clipped == expected.clipped
        clipped += sum(expected.clipped.values())
        masked += sum(1 - kept for kept in expected.kept.values())
    # The cases reach what they are there for.
    assert (clipped > 0) == (train.inner_steps > 1)
    assert (masked > 0) == (train.correction == "icepop")


def test_masked_tokens_stay_in_the_denominator() -> None:
    sequences = ragged(0, prox=True, reference=False)
    wide, narrow = (settings(inner_steps=2, correction_low=0.0, correction_high=high) for high in (1e9, 1.5))
    everything, some = by_batches(sequences, wide, 1), by_batches(sequences, narrow, 1)
    dropped = {key for key, kept in some.kept.items() if not kept}
    assert 0 < len(dropped) < len(some.kept)
    for key, gradient in some.gradients.items():
        assert gradient == ([0.0] * VOCABULARY if key in dropped else everything.gradients[key])


def test_neither_component_changes_the_gradient_of_the_other() -> None:
    train = settings(kl_weight=0.1)
    sequences = ragged(3, prox=False, reference=True)
    together = by_batches(sequences, train, 1)
    for component in (REWARD, DISTILLATION):
        alone = by_batches([s for s in sequences if s.component == component], train, 1)
        assert len(alone.gradients) < len(together.gradients)
        assert alone.gradients == {key: together.gradients[key] for key in alone.gradients}
