"""SFT on the teachers' own answers: a light one before the loop (warm-up), or all the training there is (SeqKD).

Both are the control and the remedy for a student that seldom writes what its teachers would: forward KL in expectation,
since the answers are drawn from the teachers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mopdctl.config.teachers import TeachersFile
from mopdctl.config.train import OnPolicyConfig
from mopdctl.config.warmup import TeacherAnswers, WarmUp
from mopdctl.distill.answers import (
    LoadTeacher,
    ask_teachers,
    check_answers,
    choose,
    one_at_a_time,
    rows_to_ask,
)
from mopdctl.distill.jobs import answer_settings
from mopdctl.distill.prompts import prompt_digests, read_run_prompts
from mopdctl.engines.fake_quant import fake_quantize_weights
from mopdctl.engines.hf import HFModel
from mopdctl.files import write_json
from mopdctl.records import Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.step import OnNote
from mopdctl.rollouts.tools import environment_tools
from mopdctl.runs import Workspace, finished, model_identity
from mopdctl.train import distributed
from mopdctl.train.batch import TrainSequence
from mopdctl.train.loop import update
from mopdctl.train.lora import load_student
from mopdctl.train.optimizer import build_optimizers, learning_rate
from mopdctl.train.order import draw_mixture
from mopdctl.train.session import Clock, OnStep, Session, sole_writer
from mopdctl.train.sft import cross_entropy
from mopdctl.train.state import save_state

WARM_UP, REPORT = "warm-up", "report.json"
"""Folder of a run that holds its warm-up (the teachers' answers, metrics, state), and what the card says of it."""


def answer_sequences(samples: Sequence[Sample]) -> list[TrainSequence]:
    """Answers to train on, token for token as they were sampled; what a tool wrote carries no loss."""
    return [
        TrainSequence(
            sample_id=sample.sample_id,
            prompt_ids=sample.prompt_ids.tolist(),
            response_ids=sample.response_ids.tolist(),
            loss_mask=sample.response_mask.astype(int).tolist(),
            teacher_id=sample.teacher_id,
        )
        for sample in samples
    ]


def warm_up(
    student: HFModel,
    sequences: Mapping[str, Sequence[TrainSequence]],
    settings: WarmUp,
    train: OnPolicyConfig,
    folder: Path,
    *,
    on_step: OnStep = lambda step, row: None,
) -> None:
    """Trains the student for `settings.steps` optimizer steps on the answers of each teacher.

    Metrics and resumable state go to `folder`: a killed warm-up goes on from its last state and repeats the steps since
    then exactly, and after a finished one the student gets the weights that it ended with. The optimizer's moments end
    with it.
    """
    own = train.model_copy(
        update={
            "steps": settings.steps,
            "batch_size": settings.batch_size or train.batch_size,
            "learning_rate": settings.learning_rate or train.learning_rate,
            "inner_steps": 1,
        }
    )
    session = _train(student, sequences, settings.shares, own, folder, on_step)
    if session.first < own.steps:
        save_state(folder / "state", own.steps, student.model, build_optimizers(student, own), keep_last=1)


def run_warm_up(
    config: TeachersFile,
    settings: WarmUp,
    book: PromptBook,
    teacher_of: Sequence[str],
    student: HFModel,
    load: LoadTeacher,
    folder: Path,
    *,
    record: Mapping[str, Any],
    tools: Tools | None = None,
    on_step: OnStep = lambda step, row: None,
    on_note: OnNote = lambda line: None,
) -> dict[str, Any]:
    """Asks the teachers and warms the student up on their answers; returns, and keeps, what the card says of it.

    `folder` belongs to the warm-up alone: `answers/` is the rollout store, beside it stand metrics and state. The other
    arguments are those of `ask_teachers` and `warm_up`; what they raise is raised here.
    """
    num_draws = settings.steps * (settings.batch_size or config.train.batch_size)
    sequences, counts = _answers(
        config,
        settings,
        num_draws,
        book,
        teacher_of,
        student,
        load,
        folder,
        record=record,
        tools=tools,
        on_note=on_note,
    )
    warm_up(student, sequences, settings, config.train, folder, on_step=on_step)
    report = {"steps": settings.steps, "answers": counts}
    if distributed.rank() == 0:
        write_json(folder / REPORT, report)
    return report


def run_seqkd(
    config: TeachersFile,
    workspace: Workspace,
    *,
    base: Path,
    answers: TeacherAnswers | None = None,
    on_step: OnStep = lambda step, row: None,
    on_note: OnNote = lambda line: None,
) -> Path:
    """Trains `config.student` on the teachers' answers alone, and writes the checkpoint `config.name`.

    It is the control on an equal budget: optimizer steps, schedule and sequences per step are those of the MOPD run
    that `config` describes, and every sequence is an answer of a teacher instead of the student's own. One teacher is
    in memory at a time. A killed run goes on where it was; a finished one is left as it is.

    Source: Kim and Rush, "Sequence-Level Knowledge Distillation" (2016), with sampled answers for beam search.
    """
    settings = answers or TeacherAnswers()
    train = config.train.model_copy(update={"batch_size": config.train.batch_size * config.train.samples_per_prompt})
    found = read_run_prompts(config, base=base)
    prompts = found.prompts
    check_answers(config, prompts, settings)
    record = _record(config, settings, workspace, base)
    distributed.start()
    torch.manual_seed(train.seed)
    target, folder = workspace.checkpoint(config.name), workspace.run(config.name)
    if finished(target, folder, record):
        return target
    start = workspace.resolve_model(config.student, relative_to=base)
    student = load_student(start, train.lora, dtype=train.dtype, seed=train.seed, batch_size=train.sampling_batch_size)
    if train.student_quant != "none":
        fake_quantize_weights(student.model, train.student_quant)
    book = PromptBook(student, prompts, answer_settings(config))
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    tools = environment_tools(by_id, student, variables=book.template_kwargs)
    load = one_at_a_time(config, student, workspace, base=base)
    with sole_writer(folder, target, record) as ours:
        if not ours:
            return target
        num_draws = train.steps * train.batch_size
        sequences, counts = _answers(
            config,
            settings,
            num_draws,
            book,
            found.first_choice,
            student,
            load,
            folder,
            record=record,
            tools=tools,
            on_note=on_note,
        )
        session = _train(student, sequences, settings.shares, train, folder, on_step)
        card = {
            "name": config.name,
            "algorithm": "seqkd",
            "parent": config.student,
            "parent_digest": record["student"],
            "teachers": {
                alias: {"model": teacher.model, "domains": teacher.domains, "digest": record["teachers"].get(alias)}
                for alias, teacher in sorted(config.teachers.items())
            },
            "answers": counts,
        }
        session.publish(target, card, record)
    return target


def _answers(
    config: TeachersFile,
    settings: TeacherAnswers,
    num_draws: int,
    book: PromptBook,
    teacher_of: Sequence[str],
    student: HFModel,
    load: LoadTeacher,
    folder: Path,
    *,
    record: Mapping[str, Any],
    tools: Tools | None,
    on_note: OnNote,
) -> tuple[dict[str, list[TrainSequence]], dict[str, dict[str, Any]]]:
    """The sequences of each teacher and the counts of its answers."""
    rows = rows_to_ask(config, teacher_of, settings, num_draws)
    samples = ask_teachers(
        config,
        settings,
        rows,
        book,
        student,
        load,
        folder / "answers",
        record=record,
        tools=tools,
        on_note=on_note,
    )
    chosen = choose(samples, settings)
    for alias, count in chosen.counts.items():
        dropped = ", ".join(f"{reason} {number}" for reason, number in count["dropped"].items())
        on_note(f"teacher {alias!r}: {count['out']} of {count['in']} answers train" + f" ({dropped})" * bool(dropped))
    return {alias: answer_sequences(found) for alias, found in chosen.samples.items()}, chosen.counts


def _train(
    student: HFModel,
    sequences: Mapping[str, Sequence[TrainSequence]],
    shares: Mapping[str, float],
    train: OnPolicyConfig,
    folder: Path,
    on_step: OnStep,
) -> Session:
    """`train.steps` steps of cross-entropy, each on `train.batch_size` answers.

    Teachers take turns in proportion to their shares, however many answers each has: all of one are used before any
    comes again.
    """
    aliases = sorted(sequences)
    pool = [sequence for alias in aliases for sequence in sequences[alias]]
    sizes, weights = [len(sequences[alias]) for alias in aliases], [shares.get(alias, 1.0) for alias in aliases]
    draw = draw_mixture(train.steps * train.batch_size, sizes, weights, train.seed).tolist()
    session = Session(folder, student, train, on_step)
    for step in range(session.first, train.steps):
        clock = Clock()
        with clock.stage("step"):
            batch = draw[step * train.batch_size : (step + 1) * train.batch_size]
            own = [pool[i] for i in batch[distributed.rank() :: distributed.world_size()]]
            result, norm = update(student, session.optimizers, own, cross_entropy, step, train)
        total = sum(result.tokens.values())
        metrics: dict[str, Any] = {
            "step": step,
            "train/loss": result.loss,
            "train/grad_norm": norm,
            "train/learning_rate": learning_rate(step, train),
            "train/loss_tokens": total,
            **result.means,
            "policy/token_share": {alias: count / total for alias, count in result.tokens.items()},
        }
        session.end_step(step, metrics | clock.metrics())
    return session


def _record(config: TeachersFile, settings: TeacherAnswers, workspace: Workspace, base: Path) -> dict[str, Any]:
    """The resolved configuration with the digests of all inputs: what a resumed run must share with its first part."""
    models = {
        alias: workspace.resolve_model(teacher.model, relative_to=base)
        for alias, teacher in sorted(config.teachers.items())
        if teacher.model
    }
    return {
        "algorithm": "seqkd",
        "config": config.model_dump(mode="json", exclude={"student", "prompts", "teachers"}),
        "answers": settings.model_dump(mode="json"),
        "student": model_identity(workspace.resolve_model(config.student, relative_to=base)),
        "teachers": {alias: model_identity(model) for alias, model in models.items()},
        "routes": {a: t.model_dump(mode="json", exclude={"model"}) for a, t in sorted(config.teachers.items())},
        "prompts": prompt_digests(config, base),
    }
