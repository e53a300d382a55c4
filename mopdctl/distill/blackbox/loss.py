"""The two losses of black-box teachers as token losses for the shared loop. N loss-active tokens, V vocabulary."""

from mopdctl.config.train import OnPolicyConfig
from mopdctl.distill.blackbox.sequences import ANSWERS
from mopdctl.engines.layout import token_logprobs
from mopdctl.objective.kl import entropy
from mopdctl.objective.surrogate import clipped_surrogate
from mopdctl.train.batch import MicroBatch
from mopdctl.train.policy import correction
from mopdctl.train.step import Algorithm, Policy, TokenLoss, token_loss


def black_box_loss(train: OnPolicyConfig) -> Algorithm:
    """What the student minimises on micro-batches of the components of `sequences`.

        answers:        -log p_theta(y_t)
        discriminator:  -m_t c_t min(r_t A, clip(r_t) A)      A: stream `advantages`

    Source: `answers`: sequence-level distillation (Kim and Rush, 2016); `discriminator`: GAD (arXiv 2511.10643),
    Eq. 2 with GRPO; correction as in Nemotron 3 Ultra, section 3.3.1, Eq. 3.
    """

    def loss(policy: Policy, batch: MicroBatch) -> TokenLoss:
        logits_NV = policy.logits_NV
        policy_N = token_logprobs(logits_NV, batch.tokens_N)
        if batch.component == ANSWERS:
            return token_loss(-policy_N, batch, {"blackbox/nll_nats": -policy_N.detach()})
        prox_N = batch.streams.get("prox_logprobs", policy_N.detach())
        weight_N, metrics = correction(train, prox_N, batch.streams["behavior_logprobs"])
        surrogate_N, clipped_N = clipped_surrogate(
            policy_N, prox_N, batch.streams["advantages"], clip_low=train.clip_low, clip_high=train.clip_high
        )
        metrics |= {"policy/clip_fraction": clipped_N, "policy/entropy_nats": entropy(logits_NV.detach())}
        return token_loss(-weight_N * surrogate_N, batch, metrics)

    return loss
