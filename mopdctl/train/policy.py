"""What the on-policy trainers share: a sample as a training sequence, and the correction of its tokens' weight."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mopdctl.config.train import OnPolicyConfig
from mopdctl.errors import MopdctlError
from mopdctl.objective.correction import correction_weight, staleness_ratio
from mopdctl.objective.reduction import first_non_finite
from mopdctl.records import Sample
from mopdctl.train.batch import TrainSequence

Streams = Mapping[str, Sequence[float]]


def over_response(sample: Sample, values_N: Sequence[float]) -> list[float]:
    """One value per loss-active token as one per response token, 0 where a tool wrote and no loss falls."""
    found = np.zeros(len(sample.response_ids), np.float32)
    found[sample.response_mask] = values_N
    return list(map(float, found))


def train_sequence(
    sample: Sample,
    streams: Streams,
    *,
    judge: str,
    weight: float = 1.0,
    component: str = "",
    hidden: Mapping[str, Tensor] | None = None,
) -> TrainSequence:
    """A sample to train on, with `behavior_logprobs` and the streams given: one value per response token each.

    `hidden` are hidden states of other models [N, width], where they are known.

    Raises MopdctlError naming the sample for a value that is missing or not finite where a token carries loss.
    """
    found = {"behavior_logprobs": over_response(sample, list(sample.behavior_logprobs)), **streams}
    check_streams(sample, found)
    return TrainSequence(
        sample_id=sample.sample_id,
        prompt_ids=sample.prompt_ids.tolist(),
        response_ids=sample.response_ids.tolist(),
        loss_mask=sample.response_mask.astype(int).tolist(),
        teacher_id=judge,
        weight=weight,
        streams=found,
        hidden=dict(hidden or {}),
        component=component,
    )


def with_teacher_logprobs(samples: Sequence[Sample], sequences: Sequence[TrainSequence]) -> list[Sample]:
    """The samples, in order, with the stream `teacher_logprobs` of their sequence at loss-active tokens, if it has one.

    A sample without such a sequence comes back as it is.
    """
    found = {
        s.sample_id: [v for v, active in zip(s.streams["teacher_logprobs"], s.loss_mask, strict=True) if active]
        for s in sequences
        if "teacher_logprobs" in s.streams
    }
    return [
        replace(s, teacher_logprobs=np.array(found[s.sample_id], np.float32)) if s.sample_id in found else s
        for s in samples
    ]


def check_streams(sample: Sample, streams: Streams) -> None:
    """Raises MopdctlError unless every stream has a value per response token, finite wherever a token carries loss.

    Nothing is ever filled in. What a tool wrote is context: no one's opinion of it matters.
    """
    mask = torch.from_numpy(sample.response_mask.astype(np.int64)).unsqueeze(0)
    for name, values in streams.items():
        who = f"teacher {sample.teacher_id!r}" if name.startswith("teacher") else name.removesuffix("_logprobs")
        if len(values) != len(sample.response_ids):
            raise MopdctlError(
                f"sample {sample.sample_id}: {who} scored {len(values)} of {len(sample.response_ids)} tokens"
            )
        bad = first_non_finite(torch.tensor([list(values)]), mask)
        if bad:
            raise MopdctlError(
                f"sample {sample.sample_id}: {name} of token {bad[1]} (id {sample.response_ids[bad[1]]}) is "
                f"{values[bad[1]]}; {who} gives it no probability"
            )


def correction(config: OnPolicyConfig, prox_N: Tensor, behavior_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight m_t c_t of each token (see `objective.correction`) and its metrics."""
    ratio_N = staleness_ratio(prox_N, behavior_N)
    weight_N, mask_N = correction_weight(ratio_N, config.correction, config.correction_low, config.correction_high)
    return weight_N, {"policy/kept_fraction": mask_N, "policy/staleness_ratio": ratio_N}
