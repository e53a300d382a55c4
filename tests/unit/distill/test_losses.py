"""The objectives on one micro-batch, against their equations written out in float64."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopdctl.config.distill import DistillTrainConfig
from mopdctl.distill.losses import mopd_loss, sampled_token_loss, vocabulary_loss
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import lay_out
from mopdctl.objective.head import Head
from mopdctl.train.batch import MicroBatch, TrainSequence, cut
from mopdctl.train.step import Policy, TokenLoss

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


@dataclass
class Given:
    """Stands for a `Policy`: these logits, or these hidden states with an identity for a head."""

    logits_NV: Tensor

    @property
    def hidden_NH(self) -> Tensor:
        return self.logits_NV

    @property
    def head(self) -> Head:
        return Head(torch.eye(self.vocab_size, dtype=self.logits_NV.dtype))

    @property
    def vocab_size(self) -> int:
        return self.logits_NV.shape[-1]


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
    found = sampled_token_loss(settings(correction=correction, advantage_clip=bound))(
        Given(logits_NV), micro_batch(streams)
    )
    loss_N, gradient_NV, kept_N, c_N, clipped_N = reference(prox_N, correction=correction, bound=bound)
    found.loss.backward()
    assert logits_NV.grad is not None
    torch.testing.assert_close(found.loss.detach().double(), loss_N.sum(), atol=FLOAT32, rtol=FLOAT32)
    torch.testing.assert_close(logits_NV.grad.double(), gradient_NV, atol=FLOAT32, rtol=FLOAT32)
    assert found.metrics["policy/kept_fraction"].tolist() == kept_N.tolist()
    assert found.metrics["policy/staleness_ratio"].tolist() == pytest.approx(c_N.tolist(), rel=FLOAT32)
    assert found.metrics["policy/clip_fraction"].tolist() == clipped_N.tolist()
    assert clipped_N.sum() == (3 if inner else 0)
    assert kept_N.sum() == (4 if correction == "icepop" else 6)


def test_agreement_with_the_teacher_is_measured_on_the_current_policy() -> None:
    streams = {"behavior_logprobs": torch.full((6,), -1.0), "teacher_logprobs": torch.tensor(TEACHER)}
    found = sampled_token_loss(settings())(Given(torch.tensor(LOGITS)), micro_batch(streams)).metrics
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


def run_exact(
    models: dict[str, HFModel], teacher: str, batch: MicroBatch, **train: Any
) -> tuple[TokenLoss, dict[str, Tensor]]:
    """The TokenLoss, and the gradient of its loss with respect to the student's weights."""
    student = models["student"]
    algorithm = vocabulary_loss(settings(**{"objective": "exact"} | train), Teachers({"tools": models[teacher]}))
    found = algorithm(Policy(student, batch), batch)
    found.loss.backward()
    gradients = {n: p.grad for n, p in student.model.named_parameters() if p.grad is not None}
    student.model.zero_grad(set_to_none=True)
    return found, gradients


def logprobs_of(model: HFModel, batch: MicroBatch) -> Tensor:
    """Log-probabilities [N, V] in float64, from unpadded rows."""
    rows = []
    for sequence in batch.sequences:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
        with torch.no_grad():
            logits = model.model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1]
        rows.append(torch.log_softmax(logits.double(), -1))
    return torch.cat(rows)


def gradients_by_hand(student: HFModel, batch: MicroBatch, slope_NV: Tensor) -> dict[str, Tensor]:
    """The gradient of sum(slope * logits), rows unpadded."""
    done = 0
    for sequence in batch.sequences:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
        logits_NV = student.model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1]
        (logits_NV * slope_NV[done : done + len(logits_NV)].float()).sum().backward()
        done += len(logits_NV)
    found = {n: p.grad.clone() for n, p in student.model.named_parameters() if p.grad is not None}
    student.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("staleness", [0.0, 0.3, 3.0])
def test_the_exact_objective_is_the_reverse_kl_at_every_prefix(models: dict[str, HFModel], staleness: float) -> None:
    batch = batch_of(models["student"], staleness)
    found, gradients = run_exact(models, "tools", batch)
    policy_NV, teacher_NV = (logprobs_of(models[name], batch) for name in ("student", "tools"))
    kl_N = (policy_NV.exp() * (policy_NV - teacher_NV)).sum(-1)
    weight = float(torch.tensor(staleness).exp()) if staleness < 1 else 0.0  # e^3 lies above the band
    by_hand_NV = weight * policy_NV.exp() * (policy_NV - teacher_NV - kl_N.unsqueeze(-1)) / len(kl_N)
    assert float(kl_N.min()) > 0.1
    torch.testing.assert_close(found.metrics["distill/kl_exact_nats"].double(), kl_N, atol=5e-5, rtol=0)
    assert float(found.loss.detach()) == pytest.approx(weight * float(kl_N.mean()), abs=5e-5)
    expected = gradients_by_hand(models["student"], batch, by_hand_NV)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=5e-5, rtol=1e-3)
    tokens_N = torch.tensor([t for s in batch.sequences for t in s.response_ids])
    said_N = teacher_NV[torch.arange(len(tokens_N)), tokens_N]
    torch.testing.assert_close(found.streams["teacher_logprobs"].double(), said_N, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"divergence": "forward_kl"},
        {"divergence": "jsd"},
        {"objective": "top_k", "top_k": 4},
        {"entropy_aware_weight": 1.0},
        {"trust_region": 0.3},
        {"chunk_tokens": 3},
    ],
    ids=lambda t: "-".join(t) or "reverse_kl",
)
def test_a_teacher_equal_to_the_student_has_no_gradient_at_all(models: dict[str, HFModel], train: Any) -> None:
    # Not merely a small one: AdamW divides a gradient by its own size, so that rounding alone would move the weights.
    found, gradients = run_exact(models, "student", batch_of(models["student"], 0.0), **train)
    assert float(found.loss.detach()) == 0.0
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients.values())


def test_the_teacher_keeps_no_gradient(models: dict[str, HFModel]) -> None:
    run_exact(models, "tools", batch_of(models["student"], 0.0))
    assert all(p.grad is None and not p.requires_grad for p in models["tools"].model.parameters())


def test_a_token_that_the_correction_masks_has_no_say_in_any_objective(models: dict[str, HFModel]) -> None:
    for train in ({}, {"divergence": "jsd"}, {"objective": "top_k"}, {"extrapolation": 1.25, "trust_region": 0.5}):
        batch = batch_of(models["student"], 3.0)
        algorithm = mopd_loss(
            settings(**{"objective": "exact"} | train), Teachers({"tools": models["tools"]}), models["tools"]
        )
        found = algorithm(Policy(models["student"], batch), batch)
        assert float(found.loss.detach()) == 0.0
        assert found.metrics["policy/kept_fraction"].tolist() == [0.0] * 10


def test_hidden_states_from_a_store_take_the_teachers_place(models: dict[str, HFModel]) -> None:
    first, gradients = run_exact(models, "tools", batch_of(models["student"], 0.0), teacher_hidden="store")
    again = batch_of(models["student"], 0.0)
    again.hidden["teacher"] = first.hidden["teacher"]
    assert first.hidden["teacher"].dtype == torch.bfloat16

    class Deaf(HFModel):
        """Has a head and can be asked nothing."""

        model = property(lambda self: pytest.fail("the teacher was asked"), lambda self, value: None)  # type: ignore[assignment]

    other = object.__new__(Deaf)
    other.__dict__["head"] = models["tools"].head
    student = models["student"]
    algorithm = vocabulary_loss(settings(objective="exact", teacher_hidden="store"), Teachers({"tools": other}))
    found = algorithm(Policy(student, again), again)
    found.loss.backward()
    assert float(found.loss.detach()) == float(first.loss.detach())
    for name, parameter in student.model.named_parameters():
        assert name not in gradients or torch.equal(parameter.grad, gradients[name])
    student.model.zero_grad(set_to_none=True)


def test_inner_steps_ask_a_teacher_once(models: dict[str, HFModel]) -> None:
    batch = batch_of(models["student"], 0.0)
    teachers = Teachers({"tools": models["tools"]})
    algorithm = vocabulary_loss(settings(objective="exact"), teachers)
    asked = []
    hook = models["tools"].model.register_forward_hook(lambda *_: asked.append(1))
    backbone_hook = models["tools"].model.base_model.register_forward_hook(lambda *_: asked.append(1))
    try:
        teachers.head("tools")
        asked.clear()
        for _ in range(3):
            algorithm(Policy(models["student"], batch), batch)
    finally:
        hook.remove()
        backbone_hook.remove()
    assert len(asked) == 1


# --------------------------------------------------------------------------------------------------- modifiers, sampled


def sampled(streams: dict[str, Tensor], **train: Any) -> tuple[float, Tensor]:
    logits_NV = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    behavior_N = torch.log_softmax(logits_NV.detach(), -1)[torch.arange(6), TOKENS]
    streams = {"behavior_logprobs": behavior_N, "teacher_logprobs": torch.tensor(TEACHER), **streams}
    found = sampled_token_loss(settings(**train))(Given(logits_NV), micro_batch(streams))
    found.loss.backward()
    assert logits_NV.grad is not None
    return float(found.loss.detach()), logits_NV.grad


def policy_gradient(advantage_N: Tensor) -> Tensor:
    logprobs_NV = torch.log_softmax(torch.tensor(LOGITS).double(), -1)
    one_hot_NV = torch.nn.functional.one_hot(torch.tensor(TOKENS), 5).double()
    return -advantage_N.unsqueeze(-1) * (one_hot_NV - logprobs_NV.exp())


POLICY = torch.log_softmax(torch.tensor(LOGITS).double(), -1)[torch.arange(6), TOKENS]
GAP = torch.tensor(TEACHER).double() - POLICY
THIRD = torch.tensor([-1.2, -1.9, -0.3, -2.7, -2.0, -1.4])


@pytest.mark.parametrize(
    ("train", "streams", "advantage_N"),
    [
        ({"extrapolation": 1.25}, {"reference_logprobs": THIRD}, GAP + 0.25 * (torch.tensor(TEACHER) - THIRD).double()),
        ({"trust_region": 0.2}, {}, (0.2 * GAP.exp() + 0.8).log()),
        (
            {"outcome_weight": 0.5, "samples_per_prompt": 2},
            {"outcome_advantages": torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, 1.0])},
            GAP + 0.5 * torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, 1.0]).double(),
        ),
        (
            {"outcome_weight": 0.5, "samples_per_prompt": 2, "advantage_clip": 0.4},
            {"outcome_advantages": torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, 1.0])},
            GAP.clamp(-0.4, 0.4) + 0.5 * torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, 1.0]).double(),
        ),
    ],
    ids=["extrapolation", "trust_region", "outcome", "outcome_after_the_clip"],
)
def test_a_modifier_bends_the_advantage_by_its_equation(train: Any, streams: Any, advantage_N: Tensor) -> None:
    _, gradient_NV = sampled(streams, **train)
    torch.testing.assert_close(gradient_NV, policy_gradient(advantage_N), atol=1e-5, rtol=1e-5)


def test_neutral_modifiers_leave_the_sampled_objective_to_the_bit() -> None:
    plain = sampled({})
    for train in ({"trust_region": 1.0}, {"extrapolation": 1.0}, {"outcome_weight": 0.0}):
        loss, gradient_NV = sampled({}, **train)
        assert loss == plain[0]
        assert torch.equal(gradient_NV, plain[1])


def test_the_anchor_adds_the_gradient_of_the_kl_to_the_reference() -> None:
    plain, anchored = sampled({}), sampled({"reference_logprobs": THIRD}, anchor={"kl_weight": 0.3})
    added_NV = policy_gradient(-0.3 * (POLICY - THIRD.double()))
    torch.testing.assert_close(anchored[1] - plain[1], added_NV, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"objective": "sampled", "divergence": "jsd"}, "`divergence` needs `objective: exact` or `top_k`"),
        ({"objective": "exact", "top_k": 4}, "`top_k` needs `objective: top_k`"),
        ({"objective": "top_k", "top_k": 1, "top_k_tail": "renormalize"}, "renormalized is 0 whatever"),
        ({"objective": "exact", "advantage_clip": 1.0}, "`advantage_clip` needs `objective: sampled`"),
        ({"objective": "exact", "jsd_teacher_share": 0.3}, "needs `divergence: jsd`"),
        ({"outcome_weight": 1.0}, "`samples_per_prompt` of at least 2"),
        ({"reference": "other"}, "`reference` needs"),
        ({"trust_region": 0.5, "extrapolation": 1.25}, "`trust_region` and `extrapolation` together need"),
        ({"anchor": {"sft_weight": 0.1}}, "need each other"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(train: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        settings(**train)
