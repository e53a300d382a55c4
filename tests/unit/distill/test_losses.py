"""The two objectives on one micro-batch, against their equations written out in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopdctl.config.teachers import DistillTrainConfig
from mopdctl.distill.losses import exact_kl_loss, sampled_token_loss
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import lay_out, response_logits
from mopdctl.train.batch import MicroBatch, TrainSequence, cut

FLOAT32 = 1e-5

# Five tokens of vocabulary, six loss-active tokens.
TOKENS = [0, 1, 2, 3, 4, 1]
LOGITS = [[0.1 * ((3 * n + 7 * v) % 11) for v in range(5)] for n in range(6)]
# prox - behaviour of each token: inside the band [0.5, 5], below it, above it, and on its lower end.
STALENESS = [0.0, 0.3, -0.9, 2.0, -0.2, -0.6931]
TEACHER = [-1.0, -2.5, -0.1, -1.7, -3.0, -0.4]


def micro_batch(streams: dict[str, Tensor]) -> MicroBatch:
    sequence = TrainSequence("s", [0], TOKENS, [1] * 6, "math")
    layout = lay_out([[0]], [TOKENS], pad_id=0, device=torch.device("cpu"))
    return MicroBatch([sequence], layout, layout.present_BR, layout.response_BR[0], torch.ones(6), streams)


def settings(**train: Any) -> DistillTrainConfig:
    return DistillTrainConfig(steps=1, **train)


def reference(
    prox_N: Tensor, *, correction: str = "icepop", clip: tuple[float, float] = (0.2, 0.28), bound: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, gradient of its sum, kept, ratio and clipped, straight from Eqs. 2-3."""
    logits_NV = torch.tensor(LOGITS, dtype=torch.float64)
    logprobs_NV = torch.log_softmax(logits_NV, -1)
    policy_N = logprobs_NV[torch.arange(6), TOKENS]
    advantage_N = torch.tensor(TEACHER).double() - prox_N
    if bound:
        advantage_N = advantage_N.clamp(-bound, bound)
    c_N = torch.tensor(STALENESS).double().exp()
    kept_N = ((c_N >= 0.5) & (c_N <= 5)).double() if correction == "icepop" else torch.ones(6).double()
    weight_N = {"icepop": kept_N * c_N, "tis": c_N.clamp(0.5, 5), "none": torch.ones(6).double()}[correction]
    ratio_N = (policy_N - prox_N).exp()
    bounded_N = ratio_N.clamp(1 - clip[0], 1 + clip[1])
    clipped_N = (bounded_N * advantage_N < ratio_N * advantage_N).double()
    loss_N = -weight_N * torch.minimum(ratio_N * advantage_N, bounded_N * advantage_N)
    # d ratio / d logits = ratio (one-hot - softmax), nothing where the clip holds.
    one_hot_NV = torch.nn.functional.one_hot(torch.tensor(TOKENS), 5).double()
    slope_N = -weight_N * advantage_N * ratio_N * (1 - clipped_N)
    return loss_N, slope_N.unsqueeze(-1) * (one_hot_NV - logprobs_NV.exp()), kept_N, c_N, clipped_N


@pytest.mark.parametrize("correction", ["icepop", "tis", "none"])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("bound", [None, 0.75])
def test_the_sampled_objective_is_its_equation(correction: str, inner: bool, bound: float | None) -> None:
    logits_NV = torch.tensor(LOGITS, requires_grad=True)
    policy_N = torch.log_softmax(logits_NV.detach().double(), -1)[torch.arange(6), TOKENS]
    # In a second inner step the policy has left prox so far that clips hold on both sides, but not everywhere.
    prox_N = policy_N - torch.tensor([0.5, 0.5, 0.1, 0.4, -0.4, 0.0]).double() if inner else policy_N
    streams = {
        "behavior_logprobs": (prox_N - torch.tensor(STALENESS)).float(),
        "teacher_logprobs": torch.tensor(TEACHER),
    }
    if inner:
        streams["prox_logprobs"] = prox_N.float()
    found = sampled_token_loss(settings(correction=correction, advantage_clip=bound))(logits_NV, micro_batch(streams))
    loss_N, gradient_NV, kept_N, c_N, clipped_N = reference(prox_N, correction=correction, bound=bound)
    found.loss_N.sum().backward()
    assert logits_NV.grad is not None
    torch.testing.assert_close(found.loss_N.detach().double(), loss_N, atol=FLOAT32, rtol=FLOAT32)
    torch.testing.assert_close(logits_NV.grad.double(), gradient_NV, atol=FLOAT32, rtol=FLOAT32)
    assert found.metrics["policy/kept_fraction"].tolist() == kept_N.tolist()
    assert found.metrics["policy/staleness_ratio"].tolist() == pytest.approx(c_N.tolist(), rel=FLOAT32)
    assert found.metrics["policy/clip_fraction"].tolist() == clipped_N.tolist()
    assert clipped_N.sum() == (3 if inner else 0)
    assert kept_N.sum() == (4 if correction == "icepop" else 6)


def test_agreement_with_the_teacher_is_measured_on_the_current_policy() -> None:
    streams = {"behavior_logprobs": torch.full((6,), -1.0), "teacher_logprobs": torch.tensor(TEACHER)}
    found = sampled_token_loss(settings())(torch.tensor(LOGITS), micro_batch(streams)).metrics
    logprobs_NV = torch.log_softmax(torch.tensor(LOGITS).double(), -1)
    d_N = torch.tensor(TEACHER).double() - logprobs_NV[torch.arange(6), TOKENS]
    expected = {
        "distill/kl_k1_nats": -d_N,
        "distill/kl_k3_nats": d_N.exp() - 1 - d_N,
        "policy/entropy_nats": -(logprobs_NV.exp() * logprobs_NV).sum(-1),
    }
    for name, values_N in expected.items():
        torch.testing.assert_close(found[name].double(), values_N, atol=FLOAT32, rtol=FLOAT32)
    assert set(found) - set(expected) == {
        "policy/clip_fraction",
        "policy/kept_fraction",
        "policy/staleness_ratio",
    }


# --------------------------------------------------------------------------------------------------------------- exact


@pytest.fixture(scope="module")
def models(tiny: Path) -> dict[str, HFModel]:
    return {name: HFModel.load(str(tiny / "models" / name), train=name == "student") for name in ("student", "tools")}


def batch_of(student: HFModel, staleness: float) -> MicroBatch:
    """Three sequences of 1, 3 and 6 response tokens; behaviour is `staleness` below the student's own scores."""
    prompts, responses = [[9, 8], [7, 6, 5, 4], [30]], [[40], [50, 60, 70], [11, 12, 13, 14, 15, 16]]
    rows = student.score(list(zip(prompts, responses, strict=True)))
    sequences = [
        TrainSequence(f"s{i}", p, r, [1] * len(r), "tools", streams={"behavior_logprobs": [x - staleness for x in row]})
        for i, (p, r, row) in enumerate(zip(prompts, responses, rows, strict=True))
    ]
    (batch,) = cut(sequences, reduction="token", num_micro_batches=1, pad_id=student.pad_id, device=student.device)
    return batch


def run_exact(models: dict[str, HFModel], teacher: str, batch: MicroBatch) -> tuple[Any, Tensor]:
    """The TokenLoss, and the gradient of its sum with respect to the student's logits [N, V]."""
    student = models["student"]
    logits_BRV = response_logits(student.model, batch.layout, vocab_size=student.vocab_size)
    logits_NV = logits_BRV[batch.active_BR].detach().requires_grad_()
    found = exact_kl_loss(settings(), Teachers({"tools": models[teacher]}))(logits_NV, batch)
    found.loss_N.sum().backward()
    assert logits_NV.grad is not None
    return found, logits_NV.grad


def logprobs_of(model: HFModel, batch: MicroBatch) -> Tensor:
    """Log-probabilities [N, V] in float64, from unpadded rows."""
    rows = []
    for sequence in batch.sequences:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
        with torch.no_grad():
            logits = model.model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1]
        rows.append(torch.log_softmax(logits.double(), -1))
    return torch.cat(rows)


@pytest.mark.parametrize("staleness", [0.0, 0.3, 3.0])
def test_the_exact_objective_is_the_reverse_kl_at_every_prefix(models: dict[str, HFModel], staleness: float) -> None:
    batch = batch_of(models["student"], staleness)
    found, gradient_NV = run_exact(models, "tools", batch)
    policy_NV, teacher_NV = (logprobs_of(models[name], batch) for name in ("student", "tools"))
    kl_N = (policy_NV.exp() * (policy_NV - teacher_NV)).sum(-1)
    weight = float(torch.tensor(staleness).exp()) if staleness < 1 else 0.0  # e^3 lies above the band
    by_hand_NV = weight * policy_NV.exp() * (policy_NV - teacher_NV - kl_N.unsqueeze(-1))
    assert float(kl_N.min()) > 0.1
    torch.testing.assert_close(found.metrics["distill/kl_exact_nats"].double(), kl_N, atol=5e-5, rtol=0)
    torch.testing.assert_close(found.loss_N.detach().double(), weight * kl_N, atol=5e-5, rtol=0)
    torch.testing.assert_close(gradient_NV.double(), by_hand_NV, atol=5e-6, rtol=0)
    tokens_N = torch.tensor([t for s in batch.sequences for t in s.response_ids])
    expected = teacher_NV[torch.arange(len(tokens_N)), tokens_N]
    torch.testing.assert_close(found.streams["teacher_logprobs"].double(), expected, atol=5e-5, rtol=0)


def test_a_teacher_equal_to_the_student_has_no_gradient_at_all(models: dict[str, HFModel]) -> None:
    # Not merely a small one: AdamW divides a gradient by its own size, so that rounding alone would move the weights.
    found, gradient_NV = run_exact(models, "student", batch_of(models["student"], 0.0))
    assert found.loss_N.tolist() == [0.0] * 10
    assert float(gradient_NV.abs().max()) == 0.0


def test_the_teacher_keeps_no_gradient(models: dict[str, HFModel], write_tiny_model: Callable[..., Path]) -> None:
    run_exact(models, "tools", batch_of(models["student"], 0.0))
    assert all(p.grad is None and not p.requires_grad for p in models["tools"].model.parameters())
    assert not models["tools"].model.training
    assert models["student"].model.training
