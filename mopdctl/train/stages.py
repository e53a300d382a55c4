"""Stages of a supervised run: what each trains on, in which order, and what that amounts to."""

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopdctl.config.sft import SftConfig, SftStage
from mopdctl.config.train import TrainConfig
from mopdctl.engines.base import stream_seed
from mopdctl.errors import InputError
from mopdctl.runs import Workspace
from mopdctl.train.order import draw_mixture
from mopdctl.train.packing import Packs, pack_rows
from mopdctl.train.rows import count_rows, data_files, iterate_rows
from mopdctl.train.spans import ChatModel
from mopdctl.train.tokens import TokenTable, tokenize

_SCHEDULE = ("steps", "batch_size", "learning_rate", "schedule", "final_learning_rate_share", "warmup_steps")
"""What a stage may say in place of `train`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, planned: which rows make each of its optimizer steps."""

    name: str
    first_step: int
    """Its first optimizer step, counted over the whole run."""
    train: TrainConfig
    """Its own steps, batch size and schedule; the rest as for the whole run."""
    max_length: int
    """What a pack holds, in tokens."""
    longest: int
    """The most tokens that a row may have: `max_length`, or the model's context where that is less."""
    packed: bool
    table: TokenTable
    groups: Packs
    """What a batch counts: single rows, or packs of rows."""

    def batch(self, step: int) -> list[list[int]]:
        """The groups of rows of one of its steps, counted over the whole run."""
        first = (step - self.first_step) * self.train.batch_size
        return [self.groups.group(number).tolist() for number in range(first, first + self.train.batch_size)]

    def report(self) -> dict[str, Any]:
        """What the stage trains on, in numbers. `packs` and `fill` are None for a stage that packs nothing."""
        rows, table = self.groups.rows, self.table
        tokens, packs = int(table.lengths[rows].sum()), self.train.steps * self.train.batch_size
        return {
            "steps": self.train.steps,
            "rows": table.num_rows,
            "longest_allowed": self.longest,
            "dropped": {"overlong": table.overlong},
            "samples": len(rows),
            "tokens": tokens,
            "trainable_share": round(int(table.trainable[rows].sum()) / tokens, 6),
            "packs": packs if self.packed else None,
            "fill": round(tokens / (packs * self.max_length), 6) if self.packed else None,
        }


def configured_stages(config: SftConfig) -> list[SftStage]:
    """The stages of a configuration; one called `sft` where it names none."""
    return config.stages or [SftStage(name="sft", steps=config.train.steps)]


def all_files(config: SftConfig, workspace: Workspace, *, base: Path) -> dict[Path, list[Path]]:
    """Every data path of a configuration and the files that it means. Raises InputError if there are none."""
    paths = dict.fromkeys([*config.data, *(source.path for stage in config.stages for source in stage.data)])
    return {path: data_files(path, base=base, workspace=workspace.root) for path in paths}


def plan_stages(
    config: SftConfig, model: ChatModel, files: dict[Path, list[Path]], *, max_positions: int
) -> list[Stage]:
    """Tokenizes the data of all stages and says which rows make each optimizer step.

    Args:
        config: The run.
        model: Whose tokenizer is used; no weights are needed.
        files: As from `all_files`.
        max_positions: The longest conversation that the model takes, in tokens.

    Raises:
        InputError: A row cannot be trained on, or a stage has no rows left.
    """
    found = configured_stages(config)
    starts = accumulate((stage.steps for stage in found), initial=0)
    return [
        _plan(stage, number, start, config, model, files, max_positions)
        for number, (stage, start) in enumerate(zip(found, starts, strict=False))
    ]


def _plan(
    stage: SftStage,
    number: int,
    first_step: int,
    config: SftConfig,
    model: ChatModel,
    files: dict[Path, list[Path]],
    max_positions: int,
) -> Stage:
    given = {key: value for key in _SCHEDULE if (value := getattr(stage, key)) is not None}
    train = config.train.model_copy(update=given)
    max_length = stage.max_length or config.max_length
    packed = (stage.packing or config.packing) != "none"
    seed = train.seed if number == 0 else stream_seed(train.seed, "stage", number)
    count = train.steps * train.batch_size
    # The file's own `data` is one pool of rows; a stage's is drawn by weight.
    parts = [[source.path] for source in stage.data] or [config.data]
    weights = [source.weight for source in stage.data] or [1.0]
    sizes = [sum(_size(path, files[path]) for path in part) for part in parts]

    drop = config.overlong == "drop"
    needed = None if packed or drop else draw_mixture(count, sizes, weights, seed)
    table = tokenize(
        model,
        (row for part in parts for path in part for file in files[path] for row in iterate_rows(file)),
        loss_on=config.loss_on,
        limit=min(max_length, max_positions),
        limit_of="max_length" if max_length <= max_positions else "the model's context",
        drop_overlong=drop,
        needed=None if needed is None else frozenset(needed.tolist()),
    )
    if needed is not None:
        groups = _singles(needed)
    else:
        kept = _kept(table, sizes, parts)
        rows, sizes = np.concatenate(kept), [len(part) for part in kept]
        if packed:
            groups = _packs(table, rows, sizes, weights, capacity=max_length, num_packs=count, seed=seed)
        else:
            groups = _singles(rows[draw_mixture(count, sizes, weights, seed)])
    return Stage(stage.name, first_step, train, max_length, min(max_length, max_positions), packed, table, groups)


def _size(path: Path, files: list[Path]) -> int:
    size = sum(map(count_rows, files))
    if not size:
        raise InputError(f"{files[0] if len(files) == 1 else path}: holds no rows; give at least one")
    return size


def _kept(table: TokenTable, sizes: list[int], parts: list[list[Path]]) -> list[NDArray[np.int64]]:
    """The rows of each part that have tokens."""
    found, begin = [], 0
    for size, part in zip(sizes, parts, strict=True):
        rows = begin + np.flatnonzero(table.lengths[begin : begin + size])
        if not len(rows):
            raise InputError(
                f"{part[0]}: every row has too many tokens; raise `max_length`, if the model's context allows"
            )
        found.append(rows)
        begin += size
    return found


def _singles(order: NDArray[np.int64]) -> Packs:
    return Packs(order, np.arange(len(order) + 1))


def _packs(
    table: TokenTable,
    rows: NDArray[np.int64],
    sizes: list[int],
    weights: list[float],
    *,
    capacity: int,
    num_packs: int,
    seed: int,
) -> Packs:
    # No pack holds a row twice, so that this many draws are enough at last.
    most = num_packs * len(rows) + 1
    draws = min(num_packs * capacity // int(table.lengths[rows].mean()) + 1, most)
    while True:
        order = rows[draw_mixture(draws, sizes, weights, seed)]
        found = pack_rows(order, table.lengths, table.prompts, capacity=capacity, num_packs=num_packs, seed=seed)
        if found:
            return found
        draws = min(2 * draws, most)
