"""Supervised fine-tuning: cross-entropy on the assistant's tokens, on the shared loop."""

import time
from pathlib import Path
from typing import Any

from mopdctl.config.sft import SftConfig
from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import check_keeps_apart, token_logprobs
from mopdctl.engines.tokenizers import ChatTokenizer
from mopdctl.errors import InputError
from mopdctl.files import file_digest
from mopdctl.runs import Workspace, check_name_is_ours, finished, model_identity
from mopdctl.train import distributed
from mopdctl.train.batch import MicroBatch, cut, cut_packs
from mopdctl.train.data import row_conversation, row_loss_on, row_tools
from mopdctl.train.optimizer import Optimizers, learning_rate
from mopdctl.train.rows import iterate_rows
from mopdctl.train.session import OnStep, Session, sole_writer
from mopdctl.train.stages import Stage, all_files, plan_stages
from mopdctl.train.step import Policy, TokenLoss, accumulate, token_loss


def cross_entropy(policy: Policy, batch: MicroBatch) -> TokenLoss:
    """-log p_theta(y_t), in nats."""
    loss_N = -token_logprobs(policy.logits_NV, batch.tokens_N)
    return token_loss(loss_N, batch, {"sft/loss_nats": loss_N.detach()})


def plan_sft(config: SftConfig, workspace: Workspace, *, base: Path, dry_run: bool = False) -> dict[str, Any]:
    """Everything that can be checked without loading the model. Writes nothing.

    `dry_run` also tokenizes and packs the data and checks whether the name is free, as `run_sft` does anyway.
    """
    files = all_files(config, workspace, base=base)
    rows = sum(_check_rows(path, found, config) for path, found in files.items())
    start = workspace.resolve_model(config.model, relative_to=base)
    document: dict[str, Any] = {"model": start, "rows": rows}
    if dry_run:
        record = _record(config, start, files)
        check_name_is_ours(workspace.checkpoint(config.name), workspace.run(config.name), record)
        chat = ChatTokenizer.load(start)
        if not chat.eos_ids:
            raise InputError(f"model {start}: neither model nor tokenizer names an end token")
        document["stages"] = _reports(plan_stages(config, chat, files, max_positions=chat.max_length))
    return document


def _check_rows(path: Path, files: list[Path], config: SftConfig) -> int:
    """The number of rows, each of which has a conversation. Raises InputError naming the first that has none."""
    count = 0
    for place, row in (found for file in files for found in iterate_rows(file)):
        row_conversation(row, place)
        row_tools(row, place)
        row_loss_on(row, place, config.loss_on)
        count += 1
    if not count:
        raise InputError(f"{files[0] if len(files) == 1 else path}: holds no rows; give at least one")
    return count


def _reports(stages: list[Stage]) -> dict[str, Any]:
    return {stage.name: stage.report() for stage in stages}


def _record(config: SftConfig, start: str, files: dict[Path, list[Path]]) -> dict[str, Any]:
    """The resolved configuration with the digests of all inputs: what a resumed run must share with its first part."""
    digests = {
        str(path): {file.name: file_digest(file) for file in found} if len(found) > 1 else file_digest(found[0])
        for path, found in files.items()
    }
    return config.model_dump(mode="json") | {"model": model_identity(start), "data": digests}


def run_sft(config: SftConfig, workspace: Workspace, *, base: Path, on_step: OnStep = lambda step, row: None) -> Path:
    """Trains `config.model` on its conversations and writes the checkpoint `config.name`; returns its folder.

    A run that was killed goes on from its last state. A finished one is left as it is. `base` is the folder that
    relative paths start from. The card of the checkpoint says under `stages` what each stage trained on. Raises
    InputError before the first step for unusable data, or a model that mixes packed conversations.
    """
    start = workspace.resolve_model(config.model, relative_to=base)
    target = workspace.checkpoint(config.name)
    files = all_files(config, workspace, base=base)
    record = _record(config, start, files)
    distributed.start()
    folder = workspace.run(config.name)
    if finished(target, folder, record):
        return target
    model = HFModel.load(start, dtype=config.train.dtype, train=True)
    stages = plan_stages(config, model, files, max_positions=model.max_length)
    if any(stage.packed for stage in stages):
        check_keeps_apart(model.model)
    with sole_writer(folder, target, record) as ours:
        if not ours:
            return target
        session = Session(folder, model, config.train, on_step)
        for step, stage in [(s.first_step + i, s) for s in stages for i in range(s.train.steps)][session.first :]:
            metrics = {"step": step, "train/stage": stage.name} | _train_step(model, session.optimizers, stage, step)
            session.end_step(step, metrics)
        card = {
            "name": config.name,
            "algorithm": "sft",
            "parent": config.model,
            "parent_digest": record["model"],
            "stages": _reports(stages),
        }
        session.publish(target, card, record)
    return target


def _train_step(model: HFModel, optimizers: Optimizers, stage: Stage, step: int) -> dict[str, Any]:
    """One optimizer step on this rank's share of the batch; its metrics."""
    began = time.perf_counter()
    rate = learning_rate(step - stage.first_step, stage.train)
    batch = stage.batch(step)
    own = batch[distributed.rank() :: distributed.world_size()]
    groups = [[stage.table.sequence(row) for row in group] for group in own]
    if stage.packed:
        micro_batches = cut_packs(groups, reduction="token", device=model.device)
    else:
        micro_batches = cut(
            [sequence for group in groups for sequence in group],
            reduction="token",
            num_micro_batches=stage.train.gradient_accumulation,
            pad_id=model.pad_id,
            device=model.device,
        )
    result = accumulate(model, micro_batches, cross_entropy)
    norm = optimizers.step(rate, stage.train.max_grad_norm)
    tokens = int(stage.table.lengths[[row for group in batch for row in group]].sum())
    trained, seconds = sum(result.tokens.values()), time.perf_counter() - began
    return {
        "train/loss": result.loss,
        "train/grad_norm": norm,
        "train/learning_rate": rate,
        "train/loss_tokens": trained,
        "train/trainable_share": round(trained / tokens, 6),
        "perf/tokens_per_s": round(tokens / seconds, 1),
        "perf/step_s": round(seconds, 4),
    }
