"""The GRPO loop: sample groups, check them, compare within each group, update, keep."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mopdctl.config.rl import RlConfig, RlTrainConfig
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import tokenizer_fingerprint
from mopdctl.errors import InputError
from mopdctl.files import file_digest
from mopdctl.records import Sample
from mopdctl.rl.collect import Collector
from mopdctl.rl.groups import Groups
from mopdctl.rl.inputs import REFERENCE, Inputs, read_inputs
from mopdctl.rl.judge_mix import Judges
from mopdctl.rl.losses import DISTILLATION, REWARD, policy_loss
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.step import OnNote, StepRollouts
from mopdctl.runs import Workspace, check_name_is_ours, model_identity, read_metrics
from mopdctl.train import distributed
from mopdctl.train.batch import TrainSequence
from mopdctl.train.loop import rollout_metrics, snapshot_of, update
from mopdctl.train.policy import over_response, train_sequence, with_teacher_logprobs
from mopdctl.train.session import Clock, OnStep, Session, sole_writer
from mopdctl.verifiers.pool import Limits, VerifierPool


def check_name(config: RlConfig, workspace: Workspace, *, base: Path) -> None:
    """Raises InputError if something else has the run's name, finished or begun. Reads all weights, writes nothing."""
    record = _record(config, workspace, base)
    check_name_is_ours(workspace.checkpoint(config.name), workspace.run(config.name), record)


def run_rl(
    config: RlConfig,
    workspace: Workspace,
    *,
    base: Path,
    inputs: Inputs | None = None,
    on_step: OnStep = lambda step, row: None,
    on_note: OnNote = lambda line: None,
) -> Path:
    """Trains `config.model` on its environments and writes the checkpoint `config.name`; returns its folder.

    All input is checked before the first step. A killed run goes on from its last state and repeats the steps since
    then exactly; a finished one is left as it is. `base` is the folder that relative paths start from; `inputs` are
    those of the configuration, where they are read already. Raises MopdctlError if no answer of a step can be checked.
    """
    train = config.train
    record = _record(config, workspace, base)
    target, folder = workspace.checkpoint(config.name), workspace.run(config.name)
    distributed.start()
    torch.manual_seed(train.seed)
    check_name_is_ours(target, folder, record)
    if target.exists():
        return target
    inputs = inputs or read_inputs(config, workspace, base=base)
    student = HFModel.load(inputs.start, dtype=train.dtype, train=True, batch_size=train.sampling_batch_size)
    scorers = _load_scorers(config, student, inputs.scorers)
    with sole_writer(folder, target, record) as ours:
        if not ours:
            return target
        session = Session(folder, student, train, on_step)
        snapshot = snapshot_of(student, session.extra) if train.staleness else None
        algorithm = policy_loss(train)
        with (
            _pool(train) as pool,
            _rollouts(config, workspace, student, inputs.tools, record, on_note) as rollouts,
        ):
            judges = Judges(config, folder / "judge", inputs.prompts, student, on_note)
            collector = Collector(config, inputs.mixture, inputs.book, student, pool, rollouts, judges)
            collector.lengths = _last_lengths(folder, session.first)
            for step in range(session.first, train.steps):
                clock = Clock()
                with clock.stage("rollout"):
                    version = max(step - 1, 0) if snapshot else step
                    samples, groups = collector.collect(snapshot or student, step=step, policy_version=version)
                with clock.stage("score"):
                    sequences = _sequences(samples, groups, student, scorers, config)
                if snapshot:
                    snapshot.model.load_state_dict(student.model.state_dict())
                with clock.stage("update"):
                    result, norm = update(student, session.optimizers, sequences, algorithm, step, train)
                with clock.stage("store"):
                    rollouts.keep(with_teacher_logprobs(samples, sequences))
                answers = [(s.domain, len(s.response_ids), s.finish_reason) for s in samples]
                metrics = {"step": step, **rollout_metrics(step, result, norm, answers, train)}
                metrics |= {"rl/updates": train.inner_steps if norm else 0} | groups.metrics | clock.metrics()
                metrics["perf/verify_s"] = {name: round(s, 4) for name, s in sorted(collector.seconds.items())}
                collector.lengths = metrics["rollout/response_length"]
                if train.eval_every and ((step + 1) % train.eval_every == 0 or step + 1 == train.steps):
                    assert inputs.held_out is not None
                    metrics |= inputs.held_out.metrics(student, pool)
                session.end_step(step, metrics, extra=dict(snapshot.model.state_dict()) if snapshot else None)
            rollouts.finish()
        session.publish(target, _card(config, record), record)
    return target


_MOST_WORKERS = 8
"""Verifiers that start by default: each loads what checks need, and every rank has its own."""


def _pool(train: RlTrainConfig) -> VerifierPool:
    workers = train.verifier_workers or min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    return VerifierPool(workers, Limits(seconds=train.verifier_seconds, memory_mb=train.verifier_memory_mb))


def _rollouts(
    config: RlConfig,
    workspace: Workspace,
    student: HFModel,
    tools: Tools | None,
    record: dict[str, Any],
    on_note: OnNote,
) -> StepRollouts:
    train = config.train
    return StepRollouts(
        workspace.rollouts(config.name),
        identity={"tokenizer": tokenizer_fingerprint(student), "command": "rl", "run": record},
        sampling={"model": record["model"]} | train.model_dump(include={"temperature", "max_new_tokens"}),
        temperature=train.temperature,
        durability=train.durability,
        tools=tools,
        on_note=on_note,
    )


def _last_lengths(folder: Path, first: int) -> Mapping[str, float]:
    """The mean response lengths of the step before `first`, so that a resumed run samples in the same batches.

    A machine that died may have kept that step's state and lost its metrics: batches are then those of a first step.
    """
    rows = [row for row in read_metrics(folder) if row["step"] == first - 1]
    return dict(rows[-1]["rollout/response_length"]) if rows else {}


def _load_scorers(config: RlConfig, student: HFModel, scorers: Mapping[str, str]) -> dict[str, HFModel]:
    """Teachers by environment, and the reference; each checkpoint once."""
    loaded: dict[str, HFModel] = {}
    for name, path in scorers.items():
        if path not in loaded:
            loaded[path] = HFModel.load(path, dtype=config.train.dtype, batch_size=config.train.sampling_batch_size)
        if loaded[path].vocab_size != student.vocab_size:
            who = "the reference" if name == REFERENCE else f"the teacher of environment {name!r}"
            raise InputError(
                f"{who} ({path}): its embedding has {loaded[path].vocab_size} rows for the {student.vocab_size} tokens "
                "of the student; every token needs one"
            )
    return {name: loaded[path] for name, path in scorers.items()}


def _sequences(
    samples: Sequence[Sample], groups: Groups, student: HFModel, scorers: Mapping[str, HFModel], config: RlConfig
) -> list[TrainSequence]:
    """The answers that train, with the streams of their loss; who has no advantage stays out of the batch."""
    used = [s for s in samples if s.sample_id in groups.advantages or s.domain in scorers]
    pairs = [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in used]
    streams: list[dict[str, Sequence[float]]] = [{} for _ in used]

    def add(name: str, scorer: HFModel, rows: Sequence[int]) -> None:
        for i, values in zip(rows, scorer.score([pairs[i] for i in rows]), strict=True):
            streams[i][name] = values

    for environment, scorer in scorers.items():
        if environment != REFERENCE:
            rows = [i for i, s in enumerate(used) if s.domain == environment]
            add("teacher_logprobs", scorer, rows)
    if reference := scorers.get(REFERENCE):
        add("reference_logprobs", reference, range(len(used)))
    if config.train.inner_steps > 1:
        add("prox_logprobs", student, range(len(used)))
    sequences = []
    for sample, stream in zip(used, streams, strict=True):
        taught = sample.domain in scorers
        if not taught:
            advantage = groups.advantages[sample.sample_id]
            stream["advantages"] = over_response(sample, [advantage] * len(sample.behavior_logprobs))
        sequences.append(
            train_sequence(
                sample,
                stream,
                judge=sample.domain,
                weight=config.environments[sample.domain].loss_weight,
                component=DISTILLATION if taught else REWARD,
            )
        )
    return sequences


def _record(config: RlConfig, workspace: Workspace, base: Path) -> dict[str, Any]:
    """The resolved configuration with the digests of all inputs: what a resumed run must share with its first part."""
    record = config.model_dump(mode="json")
    record["model"] = model_identity(workspace.resolve_model(config.model, relative_to=base))
    for name, environment in config.environments.items():
        entry = record["environments"][name]
        entry["prompts"] = file_digest(base / environment.prompts)
        if environment.teacher is not None:
            entry["teacher"] = model_identity(workspace.resolve_model(environment.teacher, relative_to=base))
    if config.train.reference is not None:
        record["train"]["reference"] = model_identity(workspace.resolve_model(config.train.reference, relative_to=base))
    if config.train.eval_prompts:
        record["train"]["eval_prompts"] = file_digest(base / config.train.eval_prompts)
    return record


def _card(config: RlConfig, record: dict[str, Any]) -> dict[str, Any]:
    """What the checkpoint says about itself."""
    return {
        "name": config.name,
        "algorithm": "rl/grpo",
        "parent": config.model,
        "parent_digest": record["model"],
        "environments": {
            name: {"prompts": str(environment.prompts), "weight": environment.weight, "teacher": environment.teacher}
            for name, environment in config.environments.items()
        },
    }
