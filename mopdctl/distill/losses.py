"""The MOPD objectives as losses for the shared loop. N loss-active tokens, V vocabulary, G width of a teacher."""

import torch
from torch import Tensor

from mopdctl.config.distill import DistillTrainConfig
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import active_hidden, token_logprobs
from mopdctl.errors import MopdctlError
from mopdctl.objective.anchor import sampled_anchor
from mopdctl.objective.chunked import Chunked, chunked_divergence
from mopdctl.objective.chunks import Weights
from mopdctl.objective.divergence import Divergence, Target
from mopdctl.objective.entropy_aware import entropy_aware
from mopdctl.objective.extrapolation import extrapolated_advantage, extrapolated_target
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.head import Head
from mopdctl.objective.jsd import jsd
from mopdctl.objective.kl import entropy, kl_k1, kl_k3
from mopdctl.objective.outcome import outcome_mixed_advantage
from mopdctl.objective.reverse_kl import reverse_kl
from mopdctl.objective.surrogate import clipped_surrogate
from mopdctl.objective.top_k import top_k
from mopdctl.objective.trust_region import trust_region_advantage, trust_region_target
from mopdctl.train.batch import MicroBatch
from mopdctl.train.policy import correction
from mopdctl.train.sft import cross_entropy
from mopdctl.train.step import Algorithm, Policy, TokenLoss, token_loss

TEACHER, REFERENCE = "teacher", "reference"
"""Whose hidden states a micro-batch keeps."""
SFT_ANCHOR = "sft_anchor"
"""The loss component of the SFT anchor."""


def mopd_loss(config: DistillTrainConfig, teachers: Teachers, reference: HFModel | None = None) -> Algorithm:
    """The loss of a run: that of its objective, and cross-entropy on what its SFT anchor brings along."""
    of_teachers = (
        sampled_token_loss(config) if config.objective == "sampled" else vocabulary_loss(config, teachers, reference)
    )

    def loss(policy: Policy, batch: MicroBatch) -> TokenLoss:
        return cross_entropy(policy, batch) if batch.component == SFT_ANCHOR else of_teachers(policy, batch)

    return loss


def sampled_token_loss(config: DistillTrainConfig) -> Algorithm:
    """Minus the sampled-token objective: m_t c_t min(r_t A_t, clip(r_t) A_t).

    Needs the stream `teacher_logprobs`, `outcome_advantages` where `outcome_weight` is not 0, and `reference_logprobs`
    where a reference takes part. Source: Nemotron 3 Ultra report, section 3.3.1, Eqs. 2-3.
    """

    def loss(policy: Policy, batch: MicroBatch) -> TokenLoss:
        logits_NV, streams = policy.logits_NV, batch.streams
        policy_N = token_logprobs(logits_NV, batch.tokens_N)
        prox_N = streams.get("prox_logprobs", policy_N.detach())
        weight_N, metrics = correction(config, prox_N, streams["behavior_logprobs"])
        surrogate_N, clipped_N = clipped_surrogate(
            policy_N, prox_N, _advantage(config, prox_N, streams), clip_low=config.clip_low, clip_high=config.clip_high
        )
        loss_N = -weight_N * surrogate_N
        metrics |= _agreement(policy_N, streams["teacher_logprobs"]) | {
            "policy/clip_fraction": clipped_N,
            "policy/entropy_nats": entropy(logits_NV.detach()),
        }
        if config.anchor.kl_weight:
            kl_N = sampled_anchor(policy_N, streams["reference_logprobs"])
            loss_N = loss_N + config.anchor.kl_weight * weight_N * kl_N
            metrics["distill/kl_reference_nats"] = kl_k3(policy_N.detach(), streams["reference_logprobs"])
        return token_loss(loss_N, batch, metrics)

    return loss


def _advantage(config: DistillTrainConfig, prox_N: Tensor, streams: dict[str, Tensor]) -> Tensor:
    """A_t: from the teacher, bent as the run wants it, then clipped, then with the outcome's advantage added."""
    teacher_N, clip = streams["teacher_logprobs"], config.advantage_clip
    if config.trust_region != 1:
        advantage_N = trust_region_advantage(teacher_N, prox_N, alpha=config.trust_region, clip=clip)
    else:
        reference_N = streams.get("reference_logprobs")
        advantage_N = extrapolated_advantage(
            teacher_N, prox_N, reference_N, extrapolation=config.extrapolation, clip=clip
        )
    if config.outcome_weight:
        advantage_N = outcome_mixed_advantage(advantage_N, streams["outcome_advantages"], alpha=config.outcome_weight)
    return advantage_N


def vocabulary_loss(config: DistillTrainConfig, teachers: Teachers, reference: HFModel | None = None) -> Algorithm:
    """A divergence from the routed teacher over the vocabulary, at each prefix that the student wrote.

    m_t c_t weighs each token, from the ratios of the sampled tokens as in the sampled form. It runs from hidden states
    and heads in chunks of tokens; a teacher's hidden states are computed on the very layout that the student runs on,
    once per step, so that a teacher equal to the student has a gradient of exactly 0. Source: DeepSeek-V4 report,
    section 5.1.2, Eq. 29, and 5.2.2 (hidden states and heads).
    """
    of, target = divergence_of(config), target_of(config)

    def loss(policy: Policy, batch: MicroBatch) -> TokenLoss:
        alias, streams = batch.teacher_id, batch.streams
        hidden_NG = _teacher_hidden(config, teachers, batch)
        third = None if reference is None else (_hidden(reference, batch, REFERENCE), reference.head)

        def weights(policy_logprobs_C: Tensor, rows: slice) -> Tensor:
            prox_C = streams["prox_logprobs"][rows] if "prox_logprobs" in streams else policy_logprobs_C
            return correction(config, prox_C, streams["behavior_logprobs"][rows])[0] * batch.coefficients_N[rows]

        def against(
            other: tuple[Tensor, Head],
            weights: Weights,
            of: Divergence = reverse_kl,
            target: Target | None = None,
            reference: tuple[Tensor, Head] | None = None,
        ) -> Chunked:
            with policy.computing():
                return chunked_divergence(
                    policy.hidden_NH,
                    policy.head,
                    *other,
                    batch.tokens_N,
                    weights=weights,
                    of=of,
                    target=target,
                    reference=reference,
                    vocab_size=policy.vocab_size,
                    chunk_tokens=config.chunk_tokens,
                )

        bent = third if config.extrapolation != 1 else None
        found = against((hidden_NG, teachers.head(alias)), weights, of, target, bent)
        _refuse_non_finite(found.value_N, batch)
        policy_N, teacher_N = found.policy_logprobs_N, found.target_logprobs_N
        _, metrics = correction(config, streams.get("prox_logprobs", policy_N), streams["behavior_logprobs"])
        metrics |= _agreement(policy_N, teacher_N) | {
            f"distill/{_name(config)}_nats": found.value_N,
            "policy/entropy_nats": found.entropy_N,
        }
        total = found.loss
        if config.anchor.kl_weight:
            assert third is not None
            held = against(third, lambda policy_C, rows: config.anchor.kl_weight * weights(policy_C, rows))
            total = total + held.loss
            metrics["distill/kl_reference_nats"] = held.value_N
        kept = {TEACHER: batch.hidden[TEACHER]} if config.teacher_hidden == "store" else {}
        return TokenLoss(total, metrics, {"teacher_logprobs": teacher_N}, kept)

    return loss


def divergence_of(config: DistillTrainConfig) -> Divergence:
    """The divergence that a run minimises, as a pure function."""
    plain = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd(config.jsd_teacher_share)}
    base = plain[config.divergence]
    if config.objective == "top_k":
        base = top_k(base, config.top_k, support=config.top_k_support, tail=config.top_k_tail)
    if not config.entropy_aware_weight:
        return base
    return entropy_aware(
        base, config.entropy_aware_weight, threshold_nats=config.entropy_aware_nats, k=config.entropy_aware_top_k
    )


def target_of(config: DistillTrainConfig) -> Target | None:
    """What the teacher's distribution is bent into; None leaves it as it is."""
    bends: list[Target] = []
    if config.extrapolation != 1:
        bends.append(extrapolated_target(config.extrapolation))
    if config.trust_region != 1:
        bends.append(trust_region_target(config.trust_region))
    if not bends:
        return None

    def target(teacher_NV: Tensor, policy_NV: Tensor, reference_NV: Tensor | None) -> Tensor:
        for bend in bends:
            teacher_NV = bend(teacher_NV, policy_NV, reference_NV)
        return teacher_NV

    return target


def _name(config: DistillTrainConfig) -> str:
    """What the metric of a vocabulary objective is called: `kl_exact` for the plain one."""
    if config.objective == "exact" and config.divergence == "reverse_kl":
        return "kl_exact"
    return config.divergence if config.objective == "exact" else f"{config.divergence}_top_{config.top_k}"


def _teacher_hidden(config: DistillTrainConfig, teachers: Teachers, batch: MicroBatch) -> Tensor:
    """The teacher's hidden states, [N, G]: known, or computed now and kept for the steps on the same rollouts."""
    if TEACHER not in batch.hidden:
        with teachers.resident(batch.teacher_id) as teacher:
            _hidden(teacher, batch, TEACHER)
        if config.teacher_hidden == "store":
            batch.hidden[TEACHER] = batch.hidden[TEACHER].to(torch.bfloat16)
    # A product needs both sides in the precision of the head; what is known from a store is narrower.
    return batch.hidden[TEACHER].to(teachers.head(batch.teacher_id).weight_VH.dtype)


def _hidden(model: HFModel, batch: MicroBatch, name: str) -> Tensor:
    if name not in batch.hidden:
        with torch.no_grad(), model.computing():
            batch.hidden[name] = active_hidden(model.model, batch.layout, batch.active_BR)
    return batch.hidden[name]


def _refuse_non_finite(value_N: Tensor, batch: MicroBatch) -> None:
    """Raises MopdctlError naming sample and teacher for the first divergence that is not a number."""
    bad = (~torch.isfinite(value_N)).nonzero()
    if len(bad):
        first = int(bad[0])
        row, column = (int(i) for i in batch.active_BR.nonzero()[first])
        raise MopdctlError(
            f"sample {batch.sequences[row].sample_id}: the divergence at token {column} (id "
            f"{int(batch.tokens_N[first])}) is {float(value_N[first])}; teacher {batch.teacher_id!r} gives no number, "
            "or no probability"
        )


def _agreement(policy_N: Tensor, teacher_N: Tensor) -> dict[str, Tensor]:
    policy_N = policy_N.detach()
    return {"distill/kl_k1_nats": kl_k1(policy_N, teacher_N), "distill/kl_k3_nats": kl_k3(policy_N, teacher_N)}
