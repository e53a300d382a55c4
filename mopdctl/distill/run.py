"""The MOPD loop: sample, score by the routed teacher, update, keep."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mopdctl.config.teachers import DistillTrainConfig, TeachersFile
from mopdctl.distill import held_out
from mopdctl.distill.jobs import answer_settings, step_jobs
from mopdctl.distill.losses import exact_kl_loss, sampled_token_loss
from mopdctl.distill.merge import check_architectures, merge_into
from mopdctl.distill.prompts import route
from mopdctl.distill.teachers import Teachers, load_teachers
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import tokenizer_fingerprint
from mopdctl.errors import InputError
from mopdctl.files import file_digest
from mopdctl.records import Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.rollouts.step import OnNote, StepRollouts
from mopdctl.rollouts.tools import environment_tools
from mopdctl.runs import Workspace, check_name_is_ours, finished, model_identity, read_metrics
from mopdctl.train import distributed
from mopdctl.train.batch import TrainSequence
from mopdctl.train.loop import rollout_metrics, snapshot_of, update
from mopdctl.train.order import rows_of_step
from mopdctl.train.policy import train_sequence
from mopdctl.train.session import Clock, OnStep, Session, is_fresh, sole_writer
from mopdctl.train.step import Accumulated


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
    settings = answer_settings(config)
    book = PromptBook(student, prompts, settings, max_length=max_length)
    for step in range(train.steps):
        for row in _rows(step, len(book), train):
            book.token_ids(row)
    held = held_out.prepare(config, student, base=base, max_length=max_length) if train.eval_every else None
    tools = environment_tools(
        {prompt.prompt_id: prompt for prompt in prompts}, student, variables=lambda p: settings(p).template_kwargs
    )
    with sole_writer(folder, target, record) as ours:
        if not ours:
            return target
        measure = held_out.start(*held, student, teachers) if held else None
        if train.warm_start == "merge" and is_fresh(folder):
            merge_into(student, config, workspace, base=base, scale=train.warm_start_scale)
        session = Session(folder, student, train, on_step)
        snapshot = snapshot_of(student, session.extra) if train.staleness else None
        algorithm = exact_kl_loss(train, teachers) if train.objective == "exact" else sampled_token_loss(train)
        with StepRollouts(
            workspace.rollouts(config.name),
            identity={"tokenizer": tokenizer_fingerprint(student), "command": "distill", "run": record},
            sampling={"model": record["student"]} | train.model_dump(include={"temperature", "max_new_tokens"}),
            temperature=train.temperature,
            durability=train.durability,
            tools=tools,
            on_note=on_note,
        ) as rollouts:
            for step in range(session.first, train.steps):
                clock = Clock()
                with clock.stage("rollout"):
                    version = max(step - 1, 0) if snapshot else step
                    jobs = step_jobs(book, _rows(step, len(book), train), step=step, config=config)
                    samples = rollouts.sample(snapshot or student, jobs, policy_version=version)
                with clock.stage("score"):
                    sequences = score(samples, teachers, student, config)
                if snapshot:
                    snapshot.model.load_state_dict(student.model.state_dict())
                with clock.stage("update"):
                    result, norm = update(student, session.optimizers, sequences, algorithm, step, train)
                with clock.stage("store"):
                    rollouts.keep(_with_scores(samples, sequences, result))
                by_teacher = [(s.teacher_id, len(s.response_ids), s.finish_reason) for s in samples]
                metrics = {"step": step, **rollout_metrics(step, result, norm, by_teacher, train), **clock.metrics()}
                if measure and ((step + 1) % train.eval_every == 0 or step + 1 == train.steps):
                    metrics |= measure.measure(student)
                session.end_step(step, metrics, extra=dict(snapshot.model.state_dict()) if snapshot else None)
            rollouts.finish()
        session.publish(target, _card(config, record, folder), record)
    return target


def score(samples: Sequence[Sample], teachers: Teachers, student: HFModel, config: TeachersFile) -> list[TrainSequence]:
    """Samples with the streams that the objective needs: teacher scores for `sampled`, prox where it is not theta.

    Raises MopdctlError naming the sample for a score that is missing or not finite.
    """
    train = config.train
    pairs = [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in samples]
    streams: list[dict[str, Sequence[float]]] = [{} for _ in samples]
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
    return [
        train_sequence(sample, stream, judge=sample.teacher_id, weight=config.teachers[sample.teacher_id].weight)
        for sample, stream in zip(samples, streams, strict=True)
    ]


def _rows(step: int, num_rows: int, train: DistillTrainConfig) -> list[int]:
    return rows_of_step(step, num_rows=num_rows, batch_size=train.batch_size, seed=train.seed)


def _with_scores(samples: Sequence[Sample], sequences: Sequence[TrainSequence], result: Accumulated) -> list[Sample]:
    """The samples with the teacher's log-probability of each loss-active token."""
    found = result.streams.get("teacher_logprobs") or {
        s.sample_id: [v for v, active in zip(s.streams["teacher_logprobs"], s.loss_mask, strict=True) if active]
        for s in sequences
    }
    return [replace(s, teacher_logprobs=np.array(found.get(s.sample_id, []), np.float32)) for s in samples]


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


def _card(config: TeachersFile, record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the checkpoint says about itself."""
    card: dict[str, Any] = {
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
    }
    history = [row for row in read_metrics(folder) if "held_out/score" in row]
    if history:
        card["steps_to_reach_teacher"] = held_out.reached(history)
    return card
