"""The zero test: where teacher and student are one model, nothing may differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mopdctl.distill.overlap.compare import Room, Streams, compare
from mopdctl.engines.hf import HFModel
from mopdctl.records import Sample


@dataclass(frozen=True, slots=True)
class ZeroTest:
    """The largest differences from a model that is the student."""

    against: str
    tokens: int
    kl_nats: float
    """The largest, in either direction."""
    advantage_nats: float
    """The largest in size."""
    top_k_overlap: float
    """The least."""
    exact: bool
    """Whether the differences are exactly 0 and the overlap exactly 1."""


def zero_test(
    student: HFModel, samples: Sequence[Sample], selves: Mapping[str, Sequence[Streams]], *, top_k: int, room: Room
) -> ZeroTest:
    """Judges the teachers that are the student's own weights, loaded a second time, by what was measured on them.

    Without such a teacher the student is compared with itself on the first answers, about a batch of them: that finds
    kernels that do not repeat themselves, though not a fault in loading. `selves` are the teachers' streams by alias.
    """
    if selves:
        against, streams = ", ".join(sorted(selves)), [one for found in selves.values() for one in found]
    else:
        lengths = np.cumsum([len(sample.tokens) for sample in samples])
        first = max(1, int(np.searchsorted(lengths, room.batch_tokens)))
        against, streams = "itself", compare(student, student, samples[:first], top_k=top_k, room=room)
    found = {name: np.concatenate([one[name] for one in streams]) for name in streams[0]}
    advantage = np.abs(found["teacher_logprobs"] - found["student_logprobs"])
    kl = max(float(found[name].max()) for name in ("kl_reverse_nats", "kl_forward_nats"))
    overlap = float(found["top_k_overlap"].min())
    return ZeroTest(
        against,
        len(advantage),
        kl_nats=kl,
        advantage_nats=float(advantage.max()),
        top_k_overlap=overlap,
        exact=kl == 0.0 and not advantage.any() and overlap == 1.0,
    )
