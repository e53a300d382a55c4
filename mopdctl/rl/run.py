"""The GRPO loop: sample groups, check them, compare within each group, update, keep."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mopdctl.config.rl import RlConfig
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import differences, identify, tokenizer_fingerprint
from mopdctl.errors import InputError
from mopdctl.files import file_digest
from mopdctl.records import Sample
from mopdctl.rl import held_out
from mopdctl.rl.collect import Collector
from mopdctl.rl.groups import Groups
from mopdctl.rl.judge_mix import Judges, check_judges
from mopdctl.rl.losses import DISTILLATION, REWARD, policy_loss
from mopdctl.rl.mixture import Mixture, answer_settings, read_mixture
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.held_out import read_held_out
from mopdctl.rollouts.step import OnNote, StepRollouts
from mopdctl.rollouts.tools import environment_tools
from mopdctl.runs import Workspace, check_name_is_ours, finished, model_identity, read_metrics
from mopdctl.train import distributed
from mopdctl.train.batch import TrainSequence
from mopdctl.train.loop import rollout_metrics, snapshot_of, update
from mopdctl.train.policy import over_response, train_sequence
from mopdctl.train.session import Clock, OnStep, Session, sole_writer
from mopdctl.verifiers.pool import Limits, VerifierPool


def plan_rl(config: RlConfig, workspace: Workspace, *, base: Path, dry_run: bool = False) -> dict[str, Any]:
    """Everything that can be checked without loading a model: prompts, references, model arguments. Writes nothing.

    `dry_run` also checks whether the name is free: that reads all weights, and `run_rl` does it anyway.
    """
    mixture = read_mixture(config, base=base)
    check_judges(config)
    if config.train.eval_prompts:
        read_held_out(config.train, ("domain",), base=base)
    start = workspace.resolve_model(config.model, relative_to=base)
    for model in _other_models(config).values():
        workspace.resolve_model(model, relative_to=base)
    if dry_run:
        record = _record(config, workspace, base)
        check_name_is_ours(workspace.checkpoint(config.name), workspace.run(config.name), record)
    train = config.train
    groups = train.steps * train.batch_size
    return {
        "name": config.name,
        "model": start,
        "environments": {
            name: {"prompts": size, "share": weight / sum(mixture.weights)}
            for name, size, weight in zip(config.environments, mixture.sizes, mixture.weights, strict=True)
        },
        "steps": train.steps,
        "groups": groups,
        "samples": groups * train.group_size,
    }


def run_rl(
    config: RlConfig,
    workspace: Workspace,
    *,
    base: Path,
    on_step: OnStep = lambda step, row: None,
    on_note: OnNote = lambda line: None,
) -> Path:
    """Trains `config.model` on its environments and writes the checkpoint `config.name`; returns its folder.

    All input is checked before the first step. A killed run goes on from its last state and repeats the steps since
    then exactly; a finished one is left as it is. `base` is the folder that relative paths start from.
    """
    train = config.train
    record = _record(config, workspace, base)
    target, folder = workspace.checkpoint(config.name), workspace.run(config.name)
    distributed.start()
    torch.manual_seed(train.seed)
    if finished(target, folder, record):
        return target
    mixture = read_mixture(config, base=base)
    check_judges(config)
    held = read_held_out(train, ("domain",), base=base) if train.eval_every else []
    start = workspace.resolve_model(config.model, relative_to=base)
    student = HFModel.load(start, dtype=train.dtype, train=True, batch_size=train.sampling_batch_size)
    scorers = _load_scorers(config, student, workspace, base=base)
    max_length = min(model.max_length for model in (student, *scorers.values()))
    book = PromptBook(student, mixture.prompts, lambda p: answer_settings(config, p), max_length=max_length)
    for step in range(train.steps):
        for row in mixture.rows(step, train):
            book.token_ids(row)
    measure = held_out.prepare(student, held, train, max_length=max_length)
    with sole_writer(folder, target, record) as ours:
        if not ours:
            return target
        session = Session(folder, student, train)
        snapshot = snapshot_of(student, session.extra) if train.staleness else None
        algorithm = policy_loss(train)
        limits = Limits(seconds=train.verifier_seconds, memory_mb=train.verifier_memory_mb)
        with VerifierPool(train.verifier_workers, limits) as pool:
            rollouts = _rollouts(config, workspace, student, mixture, record, on_note)
            judges = Judges(config, folder / "judge", {p.prompt_id: p for p in mixture.prompts}, student, on_note)
            collector = Collector(config, mixture, book, student, pool, rollouts, judges)
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
                    scored = _teacher_logprobs(sequences)
                    collector.rollouts.keep([_with_teacher(s, scored) for s in samples])
                answers = [(s.domain, len(s.response_ids), s.finish_reason) for s in samples]
                metrics = {"step": step, **rollout_metrics(step, result, norm, answers, train)}
                metrics |= groups.metrics | clock.metrics()
                metrics["perf/verify_s"] = {name: round(s, 4) for name, s in sorted(collector.seconds.items())}
                collector.lengths = metrics["rollout/response_length"]
                if train.eval_every and ((step + 1) % train.eval_every == 0 or step + 1 == train.steps):
                    metrics["held_out/score"] = measure.scores(student)
                session.end_step(step, metrics, extra=dict(snapshot.model.state_dict()) if snapshot else None)
                on_step(step + 1, metrics)
            collector.rollouts.close()
        session.publish(target, _card(config, record), record)
    return target


def _rollouts(
    config: RlConfig,
    workspace: Workspace,
    student: HFModel,
    mixture: Mixture,
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
        tools=environment_tools({prompt.prompt_id: prompt for prompt in mixture.prompts}, student),
        on_note=on_note,
    )


def _last_lengths(folder: Path, first: int) -> Mapping[str, float]:
    """The mean response lengths of the step before `first`, so that a resumed run samples in the same batches."""
    if not first:
        return {}
    rows = [row for row in read_metrics(folder) if row["step"] == first - 1]
    return dict(rows[-1]["rollout/response_length"])


REFERENCE = "@reference"
"""Stands beside the environments' names, and cannot be one of them."""


def _other_models(config: RlConfig) -> dict[str, str]:
    """Environment to its teacher, and the reference of the KL where there is one."""
    found = {name: e.teacher for name, e in config.environments.items() if e.teacher is not None}
    if config.train.kl_weight > 0:
        found[REFERENCE] = config.train.reference or config.model
    return found


def _load_scorers(config: RlConfig, student: HFModel, workspace: Workspace, *, base: Path) -> dict[str, HFModel]:
    """Teachers by environment, and the reference; each checkpoint once. All have to read the student's tokens."""
    loaded: dict[str, HFModel] = {}
    found = {}
    own = identify(student)
    for name, model in _other_models(config).items():
        path = workspace.resolve_model(model, relative_to=base)
        if path not in loaded:
            loaded[path] = HFModel.load(path, dtype=config.train.dtype, batch_size=config.train.sampling_batch_size)
            if differing := differences(own, identify(loaded[path])):
                who = "the reference" if name == REFERENCE else f"the teacher of environment {name!r}"
                raise InputError(
                    f"{who} ({model}): differs from {config.model} in {'; '.join(differing)}; it must read the "
                    "student's tokens as the student wrote them"
                )
        found[name] = loaded[path]
    return found


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


def _teacher_logprobs(sequences: Sequence[TrainSequence]) -> dict[str, list[float]]:
    """Sample id to the teacher's log-probability of each loss-active token, of the samples that have a teacher."""
    return {
        s.sample_id: [v for v, active in zip(s.streams["teacher_logprobs"], s.loss_mask, strict=True) if active]
        for s in sequences
        if "teacher_logprobs" in s.streams
    }


def _with_teacher(sample: Sample, teacher_logprobs: Mapping[str, Sequence[float]]) -> Sample:
    """The sample with its teacher's log-probability of each loss-active token, where it has a teacher."""
    found = teacher_logprobs.get(sample.sample_id)
    return sample if found is None else replace(sample, teacher_logprobs=np.array(found, np.float32))


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
