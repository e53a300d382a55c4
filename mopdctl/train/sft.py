"""Supervised fine-tuning: cross-entropy on the assistant's tokens, on the shared loop."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from mopdctl.config.sft import SftConfig
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import token_logprobs
from mopdctl.errors import InputError
from mopdctl.files import file_digest, fingerprint
from mopdctl.runs import (
    MetricsLog,
    Workspace,
    building,
    check_name_is_ours,
    checkpoint_digest,
    finished,
    locked,
    model_identity,
    open_run,
    write_card,
)
from mopdctl.train import distributed
from mopdctl.train.batch import MicroBatch, TrainSequence, cut
from mopdctl.train.data import conversation_ids, read_rows, row_conversation, row_tools
from mopdctl.train.optimizer import build_optimizers, learning_rate
from mopdctl.train.order import rows_of_step
from mopdctl.train.state import load_state, save_state
from mopdctl.train.step import TokenLoss, accumulate

OnStep = Callable[[int, dict[str, Any]], None]


def cross_entropy(logits_NV: Tensor, micro_batch: MicroBatch) -> TokenLoss:
    """-log p_theta(y_t), in nats."""
    loss_N = -token_logprobs(logits_NV, micro_batch.tokens_N)
    return TokenLoss(loss_N, {"sft/loss_nats": loss_N.detach()})


def plan_sft(config: SftConfig, workspace: Workspace, *, base: Path, dry_run: bool = False) -> dict[str, Any]:
    """Everything that can be checked without loading the model. Writes nothing.

    `dry_run` also checks whether the name is free, which `run_sft` does anyway.
    """
    rows = [placed for path in config.data for placed in read_rows(base / path)]
    for place, row in rows:
        row_conversation(row, place)
        row_tools(row, place)
    start = workspace.resolve_model(config.model, relative_to=base)
    if dry_run:
        record = _record(config, start, base)
        check_name_is_ours(workspace.checkpoint(config.name), workspace.run(config.name), record)
    return {"model": start, "rows": len(rows)}


def _record(config: SftConfig, start: str, base: Path) -> dict[str, Any]:
    """The resolved configuration with the digests of all inputs: what a resumed run must share with its first part."""
    return config.model_dump(mode="json") | {
        "model": model_identity(start),
        "data": {str(path): file_digest(base / path) for path in config.data if (base / path).exists()},
    }


def run_sft(config: SftConfig, workspace: Workspace, *, base: Path, on_step: OnStep = lambda step, row: None) -> Path:
    """Trains `config.model` on its conversations and writes the checkpoint `config.name`; returns its folder.

    A run that was killed goes on from its last state. A finished one is left as it is. `base` is the folder that
    relative paths start from. Raises InputError before the first step for unusable data.
    """
    start = workspace.resolve_model(config.model, relative_to=base)
    target = workspace.checkpoint(config.name)
    record = _record(config, start, base)
    distributed.start()
    folder = workspace.run(config.name)
    if finished(target, folder, record):
        return target
    rows = [placed for path in config.data for placed in read_rows(base / path)]
    model = HFModel.load(start, dtype=config.train.dtype, train=True)
    order = [_rows_of_rank(number, len(rows), config) for number in range(config.train.steps)]
    sequences = {i: _sequence(model, str(i), *rows[i], config) for i in sorted({i for part in order for i in part})}
    with locked(folder / f"rank-{distributed.rank()}"):
        if finished(target, folder, record):  # by another process, while this one loaded
            return target
        open_run(folder, record)
        if config.train.gradient_checkpointing:
            model.model.gradient_checkpointing_enable()
        optimizers = build_optimizers(model, config.train)
        step, _ = load_state(folder / "state", model.model, optimizers)
        log = MetricsLog(folder / "metrics.jsonl", next_step=step) if distributed.rank() == 0 else None
        for number in range(step, config.train.steps):
            began = time.perf_counter()
            rate = learning_rate(number, config.train)
            micro_batches = cut(
                [sequences[i] for i in order[number]],
                reduction="token",
                num_micro_batches=config.train.gradient_accumulation,
                pad_id=model.pad_id,
                device=model.device,
            )
            result = accumulate(model, micro_batches, cross_entropy)
            norm = optimizers.step(rate, config.train.max_grad_norm)
            metrics = {
                "step": number,
                "train/loss": result.loss,
                "train/grad_norm": norm,
                "train/learning_rate": rate,
                "train/loss_tokens": sum(result.tokens.values()),
                "perf/step_s": round(time.perf_counter() - began, 4),
            }
            if log:
                log.write(metrics)
            on_step(number + 1, metrics)
            if (number + 1) % config.train.checkpoint_every == 0 and number + 1 < config.train.steps:
                save_state(folder / "state", number + 1, model.model, optimizers, keep_last=config.train.keep_last)
        if distributed.rank() == 0:
            with building(target) as temporary:
                model.save(temporary)
                write_card(
                    temporary,
                    {
                        "name": config.name,
                        "algorithm": "sft",
                        "parent": config.model,
                        "parent_digest": record["model"],
                        "config": record,
                        "fingerprint": fingerprint(record),
                        "digest": checkpoint_digest(temporary),
                    },
                )
            if log:
                log.close()
        distributed.barrier()
    return target


def _rows_of_rank(step: int, num_rows: int, config: SftConfig) -> list[int]:
    rows = rows_of_step(step, num_rows=num_rows, batch_size=config.train.batch_size, seed=config.train.seed)
    return rows[distributed.rank() :: distributed.world_size()]


def _sequence(model: HFModel, sample_id: str, place: str, row: dict[str, Any], config: SftConfig) -> TrainSequence:
    messages, tools = row_conversation(row, place), row_tools(row, place)
    ids, mask = conversation_ids(model, messages, tools, place=place, loss_on=config.loss_on)
    limit = min(config.max_length, model.max_length)
    if len(ids) > limit:
        raise InputError(f"{place}: {len(ids)} tokens, but at most {limit} fit; shorten or drop the row")
    if 1 not in mask:
        raise InputError(f"{place}: no token to train on (empty assistant message?)")
    first = mask.index(1)
    return TrainSequence(sample_id, ids[:first], ids[first:], mask[first:], teacher_id="sft")
