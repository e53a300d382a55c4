"""A discriminator: the student's backbone with a scalar head, trained to tell the teacher's answers from the student's.

P pairs, U different sequences, T columns, H width.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from mopdctl.config.train import TrainConfig
from mopdctl.engines.head import backbone
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import lay_out
from mopdctl.errors import MopdctlError
from mopdctl.objective.gad import bradley_terry_loss, pair_accuracy
from mopdctl.records import Sample
from mopdctl.train import distributed
from mopdctl.train.optimizer import Optimizers


class Discriminator(nn.Module):
    """D(x, y): one score for a prompt and an answer, read off the last token.

    The head begins at zero, so that nothing is told apart before anything is learnt; it has no bias, because only
    differences of scores count. Of the backbone, it trains what the student trains: all of it, or the adapter.
    """

    def __init__(self, student: HFModel) -> None:
        super().__init__()
        with student.computing():  # an adapter is copied as it stands, on or off
            self.backbone = copy.deepcopy(backbone(student.model))
        width = student.model.get_output_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1, bias=False, device=student.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        self._computing, self._pad_id, self._device = student.computing, student.pad_id, student.device

    def forward(self, samples: Sequence[Sample]) -> Tensor:
        """The scores [B] of some samples, float32. Equal sequences are run once, and so have equal scores."""
        texts = [(tuple(s.prompt_ids.tolist()), tuple(s.response_ids.tolist())) for s in samples]
        different = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        layout = lay_out(
            [prompt for prompt, _ in different],
            [response for _, response in different],
            pad_id=self._pad_id,
            device=self._device,
        )
        with self._computing():
            hidden_UTH = self.backbone(
                input_ids=layout.input_ids_BT,
                attention_mask=layout.attention_mask_BT,
                position_ids=layout.position_ids_BT,
                use_cache=False,
            ).last_hidden_state
        num_prompt = hidden_UTH.shape[1] - layout.response_BR.shape[1]
        last_U = num_prompt - 1 + layout.present_BR.sum(-1)
        last_UH = hidden_UTH[torch.arange(len(different), device=self._device), last_U].float()
        rows = torch.tensor([different[text] for text in texts], device=self._device)
        scores: Tensor = self.head(last_UH).squeeze(-1)[rows]
        return scores

    def learnt(self) -> dict[str, Tensor]:
        """All that training may have changed; what is frozen is as the student's checkpoint has it."""
        frozen = self._frozen()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in frozen}

    def load_learnt(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `learnt` gave. Raises ValueError for that of another model."""
        foreign = sorted(tensors.keys() ^ self.learnt().keys())
        if foreign:
            raise ValueError(f"discriminator: weights of another model ({foreign[:3]} ...)")
        self.load_state_dict(tensors, strict=False)

    def _frozen(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if not parameter.requires_grad}


@dataclass(frozen=True, slots=True)
class Told:
    """How well a discriminator told P pairs of all ranks apart, before it learnt from them. None where P is 0."""

    reward: float | None
    """Mean score of the student's answers."""
    margin: float | None
    """Mean of teacher's score minus student's."""
    accuracy: float | None
    """Share of pairs in which the teacher's answer has the higher score, half of those with equal ones."""
    loss: float | None
    """Mean Bradley-Terry loss in nats."""
    pairs: int


def discriminator_optimizer(model: Discriminator, learning_rate: float, train: TrainConfig) -> Optimizers:
    """AdamW with the run's moments on all that the student trains, and on the head."""
    parameters = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=learning_rate, betas=(train.beta1, train.beta2), weight_decay=0.0)
    return Optimizers([adamw])


def learn(
    model: Discriminator,
    optimizers: Optimizers,
    pairs: Sequence[tuple[Sample, Sample]],
    *,
    learning_rate: float,
    max_grad_norm: float,
    micro_batches: int,
    name: str,
) -> Told:
    """One optimizer step on (teacher's answer, student's answer) pairs; the loss is the mean over those of all ranks.

    Every rank must call it, with none of its own if need be. Pairs that are all equal have no gradient and leave
    weights and moments as they are. Raises MopdctlError for a gradient that is not finite.
    """
    (total,) = distributed.sum_over_ranks(len(pairs))
    figures = torch.zeros(4, dtype=torch.float64)
    for chunk in _pieces(pairs, micro_batches):
        scores_2P = model([answer for answer, _ in chunk] + [sample for _, sample in chunk])
        teacher_P, student_P = scores_2P.chunk(2)
        loss_P = bradley_terry_loss(teacher_P, student_P)
        (loss_P.sum() / total).backward()
        margin_P = (teacher_P - student_P).detach()
        columns = (student_P.detach(), margin_P, pair_accuracy(margin_P), loss_P.detach())
        figures += torch.stack([column.double().sum().cpu() for column in columns])
    distributed.sum_gradients(optimizers.parameters)
    if any(p.grad is not None and bool(p.grad.any()) for p in optimizers.parameters):
        norm = optimizers.step(learning_rate, max_grad_norm)
        if not norm < float("inf"):
            raise MopdctlError(
                f"discriminator of {name!r}: the gradient's norm is {norm}, and nothing of this step is kept; "
                "begin again under another name, with a lower discriminator.learning_rate or dtype: float32"
            )
    for parameter in optimizers.parameters:
        parameter.grad = None
    sums = distributed.sum_over_ranks(*figures.tolist())
    reward, margin, accuracy, loss = (value / total if total else None for value in sums)
    return Told(reward, margin, accuracy, loss, int(total))


@torch.no_grad()
def score(model: Discriminator, samples: Sequence[Sample], *, batch_size: int) -> list[float]:
    """The scores of some samples, in order; equal ones are run once, and so earn the same to the bit."""
    first: dict[tuple[bytes, int], int] = {}
    for number, sample in enumerate(samples):
        first.setdefault(_text(sample), number)
    order = sorted(first.values(), key=lambda i: len(samples[i].tokens))
    found: dict[tuple[bytes, int], float] = {}
    for start in range(0, len(order), batch_size):
        chunk = [samples[i] for i in order[start : start + batch_size]]
        found |= zip(map(_text, chunk), model(chunk).tolist(), strict=True)
    return [found[_text(sample)] for sample in samples]


def _text(sample: Sample) -> tuple[bytes, int]:
    return sample.tokens.tobytes(), sample.prompt_length


def _pieces(pairs: Sequence[tuple[Sample, Sample]], count: int) -> list[Sequence[tuple[Sample, Sample]]]:
    """The pairs in at most `count` pieces, those of similar length together."""
    ordered = sorted(pairs, key=lambda pair: (max(len(s.tokens) for s in pair), pair[1].sample_id))
    edges = [len(ordered) * i // count for i in range(count + 1)]
    return [ordered[a:b] for a, b in pairwise(edges) if a < b]
