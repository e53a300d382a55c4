"""What a step's answers are trained with: the streams of their tokens, and what of them the store keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.losses import TEACHER
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.hf import HFModel
from mopdctl.records import Sample
from mopdctl.train.batch import TrainSequence
from mopdctl.train.policy import train_sequence, with_teacher_logprobs
from mopdctl.train.step import Accumulated


def score(
    samples: Sequence[Sample],
    teachers: Teachers,
    student: HFModel,
    config: TeachersFile,
    *,
    reference: HFModel | None = None,
    outcomes: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[TrainSequence]:
    """Samples with the streams that the objective needs beside `behavior_logprobs`.

    `sampled` takes the routed teacher's log-probabilities here; objectives over the vocabulary ask the teacher inside
    the loss, unless a sample brings its hidden states from the store. `prox_logprobs` come where several steps are
    taken on the same answers.

    Args:
        samples: this rank's answers of one step.
        teachers: by alias; each scores the tokens that route to it, once.
        student: as it is when the batch is taken.
        config: the run's.
        reference: third model, where one takes part.
        outcomes: sample id to group-relative advantage of its reward.
        weights: alias to lambda; None takes those of the configuration.

    Raises:
        MopdctlError: a score is missing or not finite; the message names the sample.
    """
    train = config.train
    pairs = [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in samples]
    streams: list[dict[str, Sequence[float]]] = [{} for _ in samples]
    if train.objective == "sampled":
        for alias in sorted({s.teacher_id for s in samples}):
            members = [i for i, s in enumerate(samples) if s.teacher_id == alias]
            with teachers.resident(alias) as teacher:
                for i, row in zip(members, teacher.score([pairs[i] for i in members]), strict=True):
                    streams[i]["teacher_logprobs"] = row
        if reference is not None:
            for stream, row in zip(streams, reference.score(pairs), strict=True):
                stream["reference_logprobs"] = row
    if train.inner_steps > 1:
        for stream, row in zip(streams, student.score(pairs), strict=True):
            stream["prox_logprobs"] = row
    if outcomes is not None:
        for sample, stream in zip(samples, streams, strict=True):
            stream["outcome_advantages"] = [outcomes[sample.sample_id]] * len(sample.response_ids)
    return [
        train_sequence(
            sample,
            stream,
            judge=sample.teacher_id,
            weight=weights[sample.teacher_id] if weights else config.teachers[sample.teacher_id].weight,
            hidden={} if sample.teacher_hidden is None else {TEACHER: from_bits(sample.teacher_hidden)},
        )
        for sample, stream in zip(samples, streams, strict=True)
    ]


def with_scores(samples: Sequence[Sample], sequences: Sequence[TrainSequence], result: Accumulated) -> list[Sample]:
    """The samples with what their teacher said of each loss-active token: log-probability, hidden states if kept.

    A sample of which nothing was said, that of a black box, stays as it is.
    """
    told, hidden = result.streams.get("teacher_logprobs", {}), result.hidden.get(TEACHER, {})

    def with_told(sample: Sample) -> Sample:
        logprobs = told.get(sample.sample_id, None if sample.response_mask.any() else [])
        if sample.teacher_logprobs is None and logprobs is not None:
            sample = replace(sample, teacher_logprobs=np.array(logprobs, np.float32))
        if sample.sample_id in hidden:
            sample = replace(sample, teacher_hidden=to_bits(hidden[sample.sample_id]))
        return sample

    return list(map(with_told, with_teacher_logprobs(samples, sequences)))


def to_bits(states_NH: Tensor) -> NDArray[np.uint16]:
    """Hidden states as a store keeps them: the bits of bfloat16."""
    return states_NH.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(bits_NH: NDArray[np.uint16]) -> Tensor:
    """The inverse of `to_bits`, bfloat16."""
    return torch.from_numpy(np.ascontiguousarray(bits_NH).view(np.int16).copy()).view(torch.bfloat16)
