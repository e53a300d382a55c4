"""The two MOPD objectives as token losses for the shared loop. N loss-active tokens, V vocabulary."""

import torch
from torch import Tensor

from mopdctl.config.teachers import DistillTrainConfig
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.layout import response_logits, token_logprobs
from mopdctl.errors import MopdctlError
from mopdctl.objective.advantage import distillation_advantage
from mopdctl.objective.kl import entropy, kl_k1, kl_k3, reverse_kl
from mopdctl.objective.surrogate import clipped_surrogate
from mopdctl.train.batch import MicroBatch
from mopdctl.train.policy import correction
from mopdctl.train.step import Algorithm, TokenLoss


def sampled_token_loss(config: DistillTrainConfig) -> Algorithm:
    """Minus the sampled-token objective: m_t c_t min(r_t A_t, clip(r_t) A_t). Needs `teacher_logprobs` in the batch.

    Source: Nemotron 3 Ultra report, section 3.3.1, Eqs. 2-3.
    """

    def loss(logits_NV: Tensor, batch: MicroBatch) -> TokenLoss:
        policy_N = token_logprobs(logits_NV, batch.tokens_N)
        prox_N = batch.streams.get("prox_logprobs", policy_N.detach())
        teacher_N = batch.streams["teacher_logprobs"]
        weight_N, metrics = correction(config, prox_N, batch)
        advantage_N = distillation_advantage(teacher_N, prox_N, clip=config.advantage_clip)
        surrogate_N, clipped_N = clipped_surrogate(
            policy_N, prox_N, advantage_N, clip_low=config.clip_low, clip_high=config.clip_high
        )
        metrics |= _agreement(logits_NV, policy_N, teacher_N) | {"policy/clip_fraction": clipped_N}
        return TokenLoss(-weight_N * surrogate_N, metrics)

    return loss


def exact_kl_loss(config: DistillTrainConfig, teachers: Teachers) -> Algorithm:
    """The reverse KL from the routed teacher over the whole vocabulary, at each prefix that the student wrote.

    m_t c_t weighs each token, as in the sampled form. The teacher runs inside the loss, so that its logits exist for
    one micro-batch at a time. Source: DeepSeek-V4 report, Eq. 29.
    """

    def loss(logits_NV: Tensor, batch: MicroBatch) -> TokenLoss:
        teacher = teachers[batch.teacher_id]
        with torch.no_grad(), teacher.computing():
            teacher_BRV = response_logits(teacher.model, batch.layout, vocab_size=logits_NV.shape[-1])
            teacher_NV = teacher_BRV[batch.active_BR]
        policy_N = token_logprobs(logits_NV, batch.tokens_N)
        prox_N = batch.streams.get("prox_logprobs", policy_N.detach())
        teacher_N = token_logprobs(teacher_NV, batch.tokens_N)
        weight_N, metrics = correction(config, prox_N, batch)
        kl_N = reverse_kl(logits_NV, teacher_NV)
        _refuse_non_finite(kl_N.detach(), batch)
        metrics |= _agreement(logits_NV, policy_N, teacher_N) | {"distill/kl_exact_nats": kl_N.detach()}
        return TokenLoss(weight_N * kl_N, metrics, {"teacher_logprobs": teacher_N})

    return loss


def _refuse_non_finite(kl_N: Tensor, batch: MicroBatch) -> None:
    """Raises MopdctlError naming sample and teacher for the first KL that is not a number."""
    bad = (~torch.isfinite(kl_N)).nonzero()
    if len(bad):
        first = int(bad[0])
        row, column = (int(i) for i in batch.active_BR.nonzero()[first])
        raise MopdctlError(
            f"sample {batch.sequences[row].sample_id}: the KL at token {column} (id {int(batch.tokens_N[first])}) is "
            f"{float(kl_N[first])}; teacher {batch.teacher_id!r} gives no number, or no probability"
        )


def _agreement(logits_NV: Tensor, policy_N: Tensor, teacher_N: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {
            "distill/kl_k1_nats": kl_k1(policy_N, teacher_N),
            "distill/kl_k3_nats": kl_k3(policy_N, teacher_N),
            "policy/entropy_nats": entropy(logits_NV),
        }
