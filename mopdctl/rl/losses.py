"""The two losses of an RL run as token losses for the shared loop. N loss-active tokens, V vocabulary."""

from mopdctl.config.rl import RlTrainConfig
from mopdctl.engines.layout import token_logprobs
from mopdctl.objective.advantage import distillation_advantage
from mopdctl.objective.kl import entropy, kl_k1, kl_k3
from mopdctl.objective.surrogate import clipped_surrogate
from mopdctl.train.batch import MicroBatch
from mopdctl.train.policy import correction
from mopdctl.train.step import Algorithm, Policy, TokenLoss, token_loss

REWARD, DISTILLATION = "reward", "distillation"
"""The loss components, each with its own denominators."""


def policy_loss(train: RlTrainConfig) -> Algorithm:
    """-m_t c_t min(r_t A_t, clip(r_t) A_t) + kl_weight * k3_t.

    A_t is the answer's group advantage (stream `advantages`) in the component `reward`, and the distillation advantage
    (stream `teacher_logprobs`) in the component `distillation`. The reference's KL needs `reference_logprobs`.

    Source: PivotRL, section 3.1 (GRPO); correction as in Nemotron 3 Ultra, section 3.3.1, Eq. 3.
    """

    def loss(policy: Policy, batch: MicroBatch) -> TokenLoss:
        logits_NV = policy.logits_NV
        policy_N = token_logprobs(logits_NV, batch.tokens_N)
        prox_N = batch.streams.get("prox_logprobs", policy_N.detach())
        weight_N, metrics = correction(train, prox_N, batch.streams["behavior_logprobs"])
        if batch.component == DISTILLATION:
            teacher_N = batch.streams["teacher_logprobs"]
            advantage_N = distillation_advantage(teacher_N, prox_N)
            metrics["distill/kl_k1_nats"] = kl_k1(policy_N.detach(), teacher_N)
            metrics["distill/kl_k3_nats"] = kl_k3(policy_N.detach(), teacher_N)
        else:
            advantage_N = batch.streams["advantages"]
        surrogate_N, clipped_N = clipped_surrogate(
            policy_N, prox_N, advantage_N, clip_low=train.clip_low, clip_high=train.clip_high
        )
        loss_N = -weight_N * surrogate_N
        metrics["policy/clip_fraction"] = clipped_N
        metrics["policy/entropy_nats"] = entropy(logits_NV.detach())
        if "reference_logprobs" in batch.streams:
            kl_N = kl_k3(policy_N, batch.streams["reference_logprobs"])
            loss_N = loss_N + train.kl_weight * kl_N
            metrics["rl/kl_reference_nats"] = kl_N.detach()
        return token_loss(loss_N, batch, metrics)

    return loss
