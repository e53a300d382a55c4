"""The SFT anchor: a few conversations beside each step's rollouts, as a loss with a denominator of its own."""

from collections.abc import Sequence
from pathlib import Path

from mopdctl.config.distill import Anchor
from mopdctl.distill.losses import SFT_ANCHOR
from mopdctl.engines.base import stream_seed
from mopdctl.engines.hf import HFModel
from mopdctl.train import distributed
from mopdctl.train.batch import TrainSequence
from mopdctl.train.order import rows_of_step
from mopdctl.train.rows import iterate_rows
from mopdctl.train.tokens import TokenTable, tokenize


def read_anchor(config: Anchor, student: HFModel, *, base: Path) -> TokenTable | None:
    """The conversations of the anchor, tokenized; None if there is none. Raises InputError naming an unusable row."""
    if config.sft_data is None:
        return None
    return tokenize(
        student,
        iterate_rows(base / config.sft_data),
        loss_on="assistant",
        limit=student.max_length,
        drop_overlong=False,
    )


def anchor_sequences(table: TokenTable | None, config: Anchor, step: int, seed: int) -> Sequence[TrainSequence]:
    """This rank's part of a step's conversations; every one is used once before any is used again."""
    if table is None:
        return []
    rows = rows_of_step(
        step, num_rows=table.num_rows, batch_size=config.sft_batch_size, seed=stream_seed(seed, SFT_ANCHOR)
    )
    found = []
    for row in rows[distributed.rank() :: distributed.world_size()]:
        sequence = table.sequence(row)
        found.append(
            TrainSequence(
                f"{SFT_ANCHOR}/{step}/{row}",
                sequence.prompt_ids,
                sequence.response_ids,
                sequence.loss_mask,
                teacher_id=SFT_ANCHOR,
                weight=config.sft_weight,
                component=SFT_ANCHOR,
            )
        )
    return found
