"""Training sequences and micro-batches. B rows, R response columns, N loss-active tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from mopdctl.engines.layout import Layout, lay_out, lay_out_pack
from mopdctl.objective.reduction import Reduction, token_coefficients
from mopdctl.train.distributed import gather_objects


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence to train on, with the per-token streams that its algorithm needs."""

    sample_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    """Everything from the first token that may carry loss."""
    loss_mask: Sequence[int]
    """Per response token: 1 trains, 0 is context (tool output, a user's later turn)."""
    teacher_id: str = ""
    """Who judges this sequence; also the name under which its metrics are kept."""
    weight: float = 1.0
    """lambda of its teacher."""
    streams: dict[str, Sequence[float]] = field(default_factory=dict)
    """Name to one float per response token, e.g. `behavior_logprobs`."""
    hidden: dict[str, Tensor] = field(default_factory=dict)
    """Name to hidden states [n, width] of another model, one row per loss-active token, where they are known."""
    component: str = ""
    """Which loss it belongs to. Every component has its own denominators, so that none dilutes another."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences laid out for one forward pass, and their loss-active tokens in one flat row (_N)."""

    sequences: list[TrainSequence]
    layout: Layout
    active_BR: Tensor
    """True where a token carries loss."""
    tokens_N: Tensor
    coefficients_N: Tensor
    """What each token's loss is multiplied with before it is summed."""
    streams: dict[str, Tensor]
    """Name to [N]."""
    hidden: dict[str, Tensor] = field(default_factory=dict)
    """Name to hidden states [N, width] of another model, kept by whoever computed them for a later pass."""

    @property
    def teacher_id(self) -> str:
        """The one teacher of this micro-batch."""
        return self.sequences[0].teacher_id

    @property
    def component(self) -> str:
        """The one loss component of this micro-batch."""
        return self.sequences[0].component


def cut(
    sequences: Sequence[TrainSequence],
    *,
    reduction: Reduction,
    num_micro_batches: int,
    pad_id: int,
    device: torch.device,
) -> list[MicroBatch]:
    """Cuts the sequences that this rank has of one optimizer step into micro-batches of one component and teacher.

    Within a teacher, sequences of similar length go together. At least `num_micro_batches` come out where there are
    so many sequences, shared among the teachers by their tokens. The coefficients count all ranks.
    """
    coefficients = _coefficients(sequences, reduction)
    found = []
    for group in _groups(sequences, num_micro_batches):
        found.append(_micro_batch(group, [coefficients[id(s)] for s in group], pad_id, device))
    return found


def cut_packs(
    packs: Sequence[Sequence[TrainSequence]], *, reduction: Reduction, device: torch.device
) -> list[MicroBatch]:
    """Makes each pack of sequences of one teacher, which this rank has of one optimizer step, a micro-batch of one row.

    Loss and gradient are those of `cut` on the same sequences. The coefficients count all ranks.
    """
    coefficients = _coefficients([s for pack in packs for s in pack], reduction)
    return [_packed_micro_batch(list(pack), [coefficients[id(s)] for s in pack], device) for pack in packs]


def _coefficients(sequences: Sequence[TrainSequence], reduction: Reduction) -> dict[int, float]:
    """What the loss of each sequence's tokens is multiplied with, by the sequence's `id`."""
    own: dict[str, tuple[int, int]] = {}
    for sequence in sequences:
        tokens, count = own.get(sequence.component, (0, 0))
        own[sequence.component] = tokens + sum(sequence.loss_mask), count + 1
    everywhere = gather_objects(own)
    coefficients: dict[int, float] = {}
    for component in own:
        members = [s for s in sequences if s.component == component]
        totals = [found.get(component, (0, 0)) for found in everywhere]
        found = token_coefficients(
            [sum(s.loss_mask) for s in members],
            [s.weight for s in members],
            reduction,
            total_tokens=sum(tokens for tokens, _ in totals),
            total_sequences=sum(count for _, count in totals),
        )
        coefficients |= dict(zip([id(s) for s in members], found, strict=True))
    return coefficients


def _groups(sequences: Sequence[TrainSequence], num_micro_batches: int) -> list[list[TrainSequence]]:
    by_teacher: dict[tuple[str, str], list[TrainSequence]] = {}
    for sequence in sequences:
        by_teacher.setdefault((sequence.component, sequence.teacher_id), []).append(sequence)
    total = sum(_length(s) for s in sequences)
    groups: list[list[TrainSequence]] = []
    for teacher in sorted(by_teacher):
        members = sorted(by_teacher[teacher], key=lambda s: (_length(s), s.sample_id))
        pieces = min(len(members), max(1, -(-num_micro_batches * sum(map(_length, members)) // max(total, 1))))
        edges = [len(members) * i // pieces for i in range(pieces + 1)]
        groups += [members[a:b] for a, b in pairwise(edges)]
    # A teacher with many tokens in few sequences cannot give its share: others make up for it.
    while len(groups) < min(num_micro_batches, len(sequences)):
        i = max((i for i, g in enumerate(groups) if len(g) > 1), key=lambda i: sum(map(_length, groups[i])))
        half = len(groups[i]) // 2
        groups[i : i + 1] = [groups[i][:half], groups[i][half:]]
    return groups


def _check(group: list[TrainSequence]) -> None:
    """Raises ValueError naming the sample unless all have the same streams, each with one entry per response token."""
    for sequence in group:
        if sequence.streams.keys() != group[0].streams.keys():
            raise ValueError(
                f"sample {sequence.sample_id}: has streams {sorted(sequence.streams)}, "
                f"but sample {group[0].sample_id} has {sorted(group[0].streams)}"
            )
        for name, values in {"loss_mask": sequence.loss_mask, **sequence.streams}.items():
            if len(values) != len(sequence.response_ids):
                raise ValueError(
                    f"sample {sequence.sample_id}: {len(values)} {name} for {len(sequence.response_ids)} tokens"
                )


def _length(sequence: TrainSequence) -> int:
    return len(sequence.prompt_ids) + len(sequence.response_ids)


def _micro_batch(
    group: list[TrainSequence], coefficients: list[float], pad_id: int, device: torch.device
) -> MicroBatch:
    _check(group)
    layout = lay_out([s.prompt_ids for s in group], [s.response_ids for s in group], pad_id=pad_id, device=device)
    num_response = layout.response_BR.shape[1]

    def padded(rows: list[Sequence[float]]) -> Tensor:
        return torch.tensor(
            [[*row, *[0.0] * (num_response - len(row))] for row in rows], device=device, dtype=torch.float32
        )

    active = padded([s.loss_mask for s in group]).bool() & layout.present_BR
    streams = {name: padded([s.streams[name] for s in group])[active] for name in group[0].streams}
    spread = torch.tensor(coefficients, device=device, dtype=torch.float32).unsqueeze(-1).expand_as(active)
    return MicroBatch(
        group, layout, active, layout.response_BR[active], spread[active], streams, _hidden(group, device)
    )


def _hidden(group: list[TrainSequence], device: torch.device) -> dict[str, Tensor]:
    """What all of the group have, [N, width]."""
    known = set.intersection(*[set(s.hidden) for s in group])
    return {name: torch.cat([s.hidden[name] for s in group]).to(device) for name in sorted(known)}


def _packed_micro_batch(group: list[TrainSequence], coefficients: list[float], device: torch.device) -> MicroBatch:
    _check(group)
    if not all(s.prompt_ids for s in group):
        raise ValueError("an empty prompt: its first response token would be predicted from another sequence")
    layout = lay_out_pack([[*s.prompt_ids, *s.response_ids] for s in group], device=device)
    flags = [flag for s in group for flag in (*[0] * len(s.prompt_ids), *s.loss_mask)]
    active = torch.tensor([flags[1:]], device=device, dtype=torch.bool)

    def flat(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)

    streams = {
        name: flat([v for s in group for v, on in zip(s.streams[name], s.loss_mask, strict=True) if on])
        for name in group[0].streams
    }
    spread = flat([c for s, c in zip(group, coefficients, strict=True) for on in s.loss_mask if on])
    return MicroBatch(group, layout, active, layout.response_BR[active], spread, streams)
