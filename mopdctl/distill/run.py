"""The MOPD loop: sample, score by the routed teacher, update, keep."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mopdctl.config.teachers import DistillTrainConfig, TeachersFile
from mopdctl.distill import held_out
from mopdctl.distill.losses import exact_kl_loss, sampled_token_loss
from mopdctl.distill.merge import check_architectures, merge_into
from mopdctl.distill.prompts import route
from mopdctl.distill.rollout import OnNote, PromptBook, StepRollouts
from mopdctl.distill.teachers import Teachers, load_teachers
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest, fingerprint
from mopdctl.objective.reduction import first_non_finite
from mopdctl.records import Sample
from mopdctl.rollouts.prompts import read_prompts
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
    read_metrics,
    write_card,
)
from mopdctl.train import distributed
from mopdctl.train.batch import TrainSequence, cut
from mopdctl.train.optimizer import Optimizers, build_optimizers, learning_rate
from mopdctl.train.order import rows_of_step
from mopdctl.train.state import load_state, save_state, saved_steps
from mopdctl.train.step import Accumulated, Algorithm, accumulate

OnStep = Callable[[int, dict[str, Any]], None]


@dataclass(slots=True)
class Clock:
    """Seconds per stage of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to the stage `name`."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def plan_distill(config: TeachersFile, workspace: Workspace, *, base: Path, dry_run: bool = False) -> dict[str, Any]:
    """Everything that can be checked without loading a model: prompts, routing, model arguments. Writes nothing.

    `dry_run` also checks whether the name is free: that reads all weights, and `run_distill` does it anyway.
    """
    prompts = read_prompts(base / config.prompts, config.routing_keys)
    if config.train.eval_prompts:
        held_out.read(config, base=base)
    student = workspace.resolve_model(config.student, relative_to=base)
    teachers = {alias: _teacher_model(alias, config, workspace, base) for alias in config.teachers}
    if dry_run:
        record = _record(config, workspace, base)
        check_name_is_ours(workspace.checkpoint(config.name), workspace.run(config.name), record)
    return {
        "name": config.name,
        "student": student,
        "teachers": teachers,
        "prompts": len(prompts),
        "prompts_per_teacher": route(prompts, config),
        "steps": config.train.steps,
        "samples": config.train.steps * config.train.batch_size * config.train.samples_per_prompt,
    }


def _teacher_model(alias: str, config: TeachersFile, workspace: Workspace, base: Path) -> str:
    """What to load for a teacher. Raises InputError naming its alias."""
    try:
        return workspace.resolve_model(config.teachers[alias].model, relative_to=base)
    except InputError as error:
        raise InputError(f"teacher {alias!r}: {error}") from None


def run_distill(
    config: TeachersFile,
    workspace: Workspace,
    *,
    base: Path,
    on_step: OnStep = lambda step, row: None,
    on_note: OnNote = lambda line: None,
) -> Path:
    """Distils the teachers into the student and writes the checkpoint `config.name`; returns its folder.

    All input is checked before the first step. A killed run goes on from its last state and repeats the steps since
    then exactly; a finished one is left as it is. `base` is the folder that relative paths start from.
    """
    train = config.train
    plan_distill(config, workspace, base=base)
    prompts = read_prompts(base / config.prompts, config.routing_keys)
    record = _record(config, workspace, base)
    distributed.start()
    torch.manual_seed(train.seed)
    target, folder = workspace.checkpoint(config.name), workspace.run(config.name)
    if finished(target, folder, record):
        return target
    student = HFModel.load(
        workspace.resolve_model(config.student, relative_to=base),
        dtype=train.dtype,
        train=True,
        batch_size=train.sampling_batch_size,
    )
    teachers = load_teachers(config, student, workspace, base=base)
    if train.warm_start == "merge":
        check_architectures(student, teachers)
    max_length = min(model.max_length for model in (student, *teachers.by_alias.values()))
    book = PromptBook(student, prompts, config, max_length=max_length)
    for step in range(train.steps):
        for row in _rows(step, len(book), train):
            book.token_ids(row)
    held = held_out.prepare(config, student, base=base, max_length=max_length) if train.eval_every else None
    with locked(folder / f"rank-{distributed.rank()}"):
        if finished(target, folder, record):  # by another process, while this one loaded
            return target
        open_run(folder, record)
        measure = held_out.start(*held, student, teachers) if held else None
        if train.warm_start == "merge" and not saved_steps(folder / "state"):
            merge_into(student, config, workspace, base=base, scale=train.warm_start_scale)
        if train.gradient_checkpointing:
            student.model.gradient_checkpointing_enable()
        optimizers = build_optimizers(student, train)
        first, extra = load_state(folder / "state", student.model, optimizers)
        snapshot = _snapshot(student, extra) if train.staleness else None
        algorithm = exact_kl_loss(train, teachers) if train.objective == "exact" else sampled_token_loss(train)
        log = MetricsLog(folder / "metrics.jsonl", next_step=first) if distributed.rank() == 0 else None
        rollouts = StepRollouts(workspace.rollouts(config.name), book, student, config, record, on_note)
        for step in range(first, train.steps):
            clock = Clock()
            with clock.stage("rollout"):
                sampler = snapshot or student
                version = max(step - 1, 0) if snapshot else step
                samples = rollouts.sample(sampler, _rows(step, len(book), train), step=step, policy_version=version)
            with clock.stage("score"):
                sequences = score(samples, teachers, student, config)
            if snapshot:
                snapshot.model.load_state_dict(student.model.state_dict())
            with clock.stage("update"):
                result, norm = update(student, optimizers, sequences, algorithm, step, train)
            with clock.stage("store"):
                rollouts.keep(samples, _teacher_logprobs(sequences, result))
            metrics = _metrics(step, result, norm, samples, clock, train)
            if measure and ((step + 1) % train.eval_every == 0 or step + 1 == train.steps):
                metrics |= measure.measure(student)
            if log:
                log.write(metrics)
            on_step(step + 1, metrics)
            if (step + 1) % train.checkpoint_every == 0 and step + 1 < train.steps:
                save_state(
                    folder / "state",
                    step + 1,
                    student.model,
                    optimizers,
                    extra=dict(snapshot.model.state_dict()) if snapshot else None,
                    keep_last=train.keep_last,
                )
        rollouts.close()
        if distributed.rank() == 0 and log:
            log.close()
            _finish(config, record, workspace, student, folder, base)
        distributed.barrier()
    return target


def score(samples: Sequence[Sample], teachers: Teachers, student: HFModel, config: TeachersFile) -> list[TrainSequence]:
    """Samples with the streams that the objective needs: teacher scores for `sampled`, prox where it is not theta.

    Raises MopdctlError naming the sample for a score that is missing or not finite.
    """
    train = config.train
    pairs = [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in samples]
    streams: list[dict[str, Sequence[float]]] = [{"behavior_logprobs": _over_response(s)} for s in samples]
    if train.objective == "sampled":
        by_teacher: dict[str, list[int]] = {}
        for i, sample in enumerate(samples):
            by_teacher.setdefault(sample.teacher_id, []).append(i)
        for alias, members in sorted(by_teacher.items()):
            for i, row in zip(members, teachers[alias].score([pairs[i] for i in members]), strict=True):
                streams[i]["teacher_logprobs"] = row
    if train.inner_steps > 1:
        for stream, row in zip(streams, student.score(pairs), strict=True):
            stream["prox_logprobs"] = row
    sequences = []
    for sample, (prompt_ids, response_ids), stream in zip(samples, pairs, streams, strict=True):
        check_streams(sample, stream)
        sequences.append(
            TrainSequence(
                sample_id=sample.sample_id,
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                loss_mask=sample.response_mask.astype(int).tolist(),
                teacher_id=sample.teacher_id,
                weight=config.teachers[sample.teacher_id].weight,
                streams=stream,
            )
        )
    return sequences


def _over_response(sample: Sample) -> list[float]:
    """The behaviour log-probabilities with one entry per response token, 0 where a tool wrote and no loss falls."""
    found = np.zeros(len(sample.response_ids), np.float32)
    found[sample.response_mask] = sample.behavior_logprobs
    return list(map(float, found))


def check_streams(sample: Sample, streams: dict[str, Sequence[float]]) -> None:
    """Raises MopdctlError unless every stream has one finite value per response token. Nothing is ever filled in."""
    for name, values in streams.items():
        who = f"teacher {sample.teacher_id!r}" if name.startswith("teacher") else name.removesuffix("_logprobs")
        if len(values) != len(sample.response_ids):
            raise MopdctlError(
                f"sample {sample.sample_id}: {who} scored {len(values)} of {len(sample.response_ids)} tokens"
            )
        row = torch.tensor([list(values)])
        bad = first_non_finite(row, torch.ones_like(row))
        if bad:
            raise MopdctlError(
                f"sample {sample.sample_id}: {name} of token {bad[1]} (id {sample.response_ids[bad[1]]}) is "
                f"{values[bad[1]]}; {who} gives it no probability"
            )


def update(
    student: HFModel,
    optimizers: Optimizers,
    sequences: Sequence[TrainSequence],
    algorithm: Algorithm,
    step: int,
    train: DistillTrainConfig,
) -> tuple[Accumulated, float]:
    """One or more optimizer steps on one batch; returns the first accumulation and its gradient norm.

    The clip fraction alone is that of the last inner step: in the first one nothing can be clipped.
    """
    micro_batches = cut(
        sequences,
        reduction=train.loss_reduction,
        num_micro_batches=train.gradient_accumulation,
        pad_id=student.pad_id,
        device=student.device,
    )
    first: tuple[Accumulated, float] | None = None
    for inner in range(train.inner_steps):
        shares = inner == 0 and step % train.grad_share_every == 0
        result = accumulate(student, micro_batches, algorithm, per_teacher_norms=shares)
        norm = optimizers.step(learning_rate(step, train), train.max_grad_norm)
        first = first or (result, norm)
        for name in result.means.keys() & {"distill/clip_fraction"}:
            first[0].means[name] = result.means[name]
    assert first is not None
    return first


def _rows(step: int, num_rows: int, train: DistillTrainConfig) -> list[int]:
    return rows_of_step(step, num_rows=num_rows, batch_size=train.batch_size, seed=train.seed)


def _snapshot(student: HFModel, extra: dict[str, torch.Tensor]) -> HFModel:
    """A frozen copy of the student: the sampler of `staleness: 1`, one step behind."""
    import copy

    model = copy.deepcopy(student.model).eval().requires_grad_(False)
    if extra:
        model.load_state_dict(extra, strict=False)
    return HFModel(model, student.tokenizer, dtype=student.dtype, batch_size=student.batch_size)


def _teacher_logprobs(sequences: Sequence[TrainSequence], result: Accumulated) -> dict[str, list[float]]:
    """Sample id to the teacher's log-probability of each loss-active token."""
    return result.streams.get("teacher_logprobs") or {
        s.sample_id: [v for v, active in zip(s.streams["teacher_logprobs"], s.loss_mask, strict=True) if active]
        for s in sequences
    }


def _metrics(
    step: int, result: Accumulated, norm: float, samples: Sequence[Sample], clock: Clock, train: DistillTrainConfig
) -> dict[str, Any]:
    """One step's metrics; what is kept per teacher is an object keyed by alias."""
    total = sum(result.tokens.values())
    lengths: dict[str, list[int]] = {}
    truncated: dict[str, list[bool]] = {}
    for found in distributed.gather_objects([(s.teacher_id, len(s.response_ids), s.finish_reason) for s in samples]):
        for alias, length, reason in found:
            lengths.setdefault(alias, []).append(length)
            truncated.setdefault(alias, []).append(reason == "length")
    metrics: dict[str, Any] = {
        "step": step,
        "train/loss": result.loss,
        "train/grad_norm": norm,
        "train/learning_rate": learning_rate(step, train),
        **result.means,
        "distill/token_share": {alias: count / total for alias, count in result.tokens.items()},
        "rollout/response_length": {a: sum(n) / len(n) for a, n in sorted(lengths.items())},
        "rollout/truncated_share": {a: sum(t) / len(t) for a, t in sorted(truncated.items())},
        "rollout/tokens": total,
        **{f"perf/{stage}_s": round(seconds, 4) for stage, seconds in clock.seconds.items()},
    }
    if result.grad_norms:
        whole = sum(result.grad_norms.values())
        metrics["distill/grad_share"] = {a: n / whole if whole else None for a, n in result.grad_norms.items()}
    return metrics


def _record(config: TeachersFile, workspace: Workspace, base: Path) -> dict[str, Any]:
    """The resolved configuration with the digests of all inputs: what a resumed run must share with its first part."""
    record = config.model_dump(mode="json")
    record["student"] = model_identity(workspace.resolve_model(config.student, relative_to=base))
    for alias, teacher in config.teachers.items():
        record["teachers"][alias]["model"] = model_identity(workspace.resolve_model(teacher.model, relative_to=base))
    record["prompts"] = file_digest(base / config.prompts)
    if config.train.eval_prompts:
        record["train"]["eval_prompts"] = file_digest(base / config.train.eval_prompts)
    # Teachers are keyed by alias and sorted: their order in the file means nothing.
    record["teachers"] = dict(sorted(record["teachers"].items()))
    return record


def _finish(
    config: TeachersFile, record: dict[str, Any], workspace: Workspace, student: HFModel, folder: Path, base: Path
) -> None:
    history = [row for row in read_metrics(folder) if "held_out/score" in row]
    card = {
        "name": config.name,
        "algorithm": f"mopd/{config.train.objective}",
        "parent": config.student,
        "warm_start": config.train.warm_start,
        "teachers": {
            alias: {
                "model": teacher.model,
                "kind": teacher.kind,
                "domains": teacher.domains,
                "benchmarks": teacher.benchmarks or teacher.domains,
                "eval": Path(teacher.model).name,
                "digest": record["teachers"][alias]["model"],
            }
            for alias, teacher in sorted(config.teachers.items())
        },
        "config": record,
        "fingerprint": fingerprint(record),
    }
    if history:
        card["steps_to_reach_teacher"] = held_out.reached(history)
    with building(workspace.checkpoint(config.name)) as temporary:
        student.save(temporary)
        write_card(temporary, card | {"digest": checkpoint_digest(temporary)})
