"""The MOPD loop: sample, score by the routed teacher, update, keep."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill import held_out
from mopdctl.distill.anchor import anchor_sequences, read_anchor
from mopdctl.distill.balance import balanced, row_before
from mopdctl.distill.blackbox.course import open_course
from mopdctl.distill.curriculum import PassRates, curriculum_rows, outcome_metrics, outcomes_of
from mopdctl.distill.draw import checked_sampling_weights, draw_run, pools_of, sampling_factors
from mopdctl.distill.jobs import answer_settings, step_jobs
from mopdctl.distill.losses import mopd_loss
from mopdctl.distill.manifest import MANIFEST, check_states, teacher_manifest
from mopdctl.distill.outcome import outcome_advantages
from mopdctl.distill.plan import plan_distill, run_card, run_record
from mopdctl.distill.prompts import read_run_prompts
from mopdctl.distill.quant_noise import measure_quant_noise
from mopdctl.distill.score import score, with_scores
from mopdctl.distill.start import begin
from mopdctl.distill.teachers import Teachers, load_reference, load_teachers
from mopdctl.distill.tiers import route_by_tiers, tier_counts
from mopdctl.engines.adapters import own_weights
from mopdctl.engines.fake_quant import fake_quantize_weights
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import tokenizer_fingerprint
from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.step import OnNote, StepRollouts
from mopdctl.rollouts.tools import environment_tools
from mopdctl.rollouts.verdicts import judge
from mopdctl.runs import Workspace, finished
from mopdctl.store.store import Store
from mopdctl.train import distributed
from mopdctl.train.loop import rollout_metrics, snapshot_of, update
from mopdctl.train.lora import load_student
from mopdctl.train.session import Clock, OnStep, Session, sole_writer
from mopdctl.verifiers.pool import VerifierPool


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
    found = read_run_prompts(config, base=base)
    prompts = found.prompts
    record = run_record(config, workspace, base)
    distributed.start()
    torch.manual_seed(train.seed)
    target, folder = workspace.checkpoint(config.name), workspace.run(config.name)
    if finished(target, folder, record):
        return target
    student = load_student(
        workspace.resolve_model(config.student, relative_to=base),
        train.lora,
        dtype=train.dtype,
        seed=train.seed,
        batch_size=train.sampling_batch_size,
    )
    if train.student_quant != "none":
        fake_quantize_weights(student.model, train.student_quant)
    teachers = load_teachers(config, student, workspace, base=base)
    manifest = teacher_manifest(config, teachers)
    reference = load_reference(config, student, workspace, base=base) if train.needs_reference else None
    others = [] if reference is None else [reference]
    if train.objective != "sampled":
        _check_heads((student, *others), teachers)
    max_length = min(model.max_length for model in (student, *teachers.by_alias.values(), *others))
    book = PromptBook(student, prompts, answer_settings(config), max_length=max_length)
    for row in range(len(book)):
        book.token_ids(row)
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    tools = environment_tools(by_id, student, variables=book.template_kwargs)
    anchor = read_anchor(train.anchor, student, base=base)
    held = held_out.prepare(config, student, base=base, max_length=max_length) if train.eval_every else None
    with VerifierPool() as pool, sole_writer(folder, target, record) as ours:
        if not ours:
            return target
        check_states(folder / "state", manifest)
        teacher_of = found.first_choice
        if found.is_tiered and config.tiers is not None:
            routed = route_by_tiers(
                folder / "routing.jsonl",
                book,
                found.serving,
                config.tiers,
                student,
                teachers.resident,
                pool,
                tools=tools,
                temperature=train.temperature,
                seed=train.seed,
            )
            teacher_of = [one.teacher for one in routed]
            on_note(f"tiers: {tier_counts(routed)}")
        course = open_course(
            config,
            workspace,
            book,
            teacher_of,
            student,
            folder,
            pool,
            base=base,
            record=record,
            tools=tools,
            on_note=on_note,
        )
        pools = course.answerable(pools_of(teacher_of))
        sampling = checked_sampling_weights({alias: config.teachers[alias].sampling_weight for alias in pools})
        drawn = draw_run(pools, sampling, steps=train.steps, batch_size=train.batch_size, seed=train.seed)
        on_draw = sampling_factors(pools, sampling, of=lambda alias: config.teachers[alias].gives)
        weights = {alias: config.teachers[alias].weight * factor for alias, factor in on_draw.items()}
        scoring = {alias: weight for alias, weight in weights.items() if alias not in course.aliases}
        targets = {alias: config.teachers[alias].weight for alias in scoring}
        measure = held_out.start(*held, student, teachers) if held else None
        begin(
            config,
            workspace,
            book,
            teacher_of,
            student,
            teachers,
            folder,
            base=base,
            record=record,
            tools=tools,
            on_note=on_note,
        )
        session = Session(folder, student, train, on_step, documents={MANIFEST: manifest})
        course.begin(student, session)
        snapshot = snapshot_of(student, session.extra) if train.staleness else None
        last = row_before(folder, session.first) if train.balance.mode != "fixed" else None
        algorithm = course.loss(mopd_loss(train, teachers, reference))
        with StepRollouts(
            workspace.rollouts(config.name),
            identity={"tokenizer": tokenizer_fingerprint(student), "command": "distill", "run": record},
            sampling={"model": record["student"]} | train.model_dump(include={"temperature", "max_new_tokens"}),
            temperature=train.temperature,
            durability=train.durability,
            tools=tools,
            on_note=on_note,
        ) as rollouts:
            rates = PassRates(train.curriculum, prompts) if train.curriculum else None
            if rates:
                rates.resume(Store(workspace.rollouts(config.name)), session.first)
            teachers.take_forwarded()  # what is counted from here on is the scoring of rollouts
            for step in range(session.first, train.steps):
                clock = Clock()
                rows = drawn[step].tolist()
                if rates and train.curriculum:
                    rows = curriculum_rows(rows, teacher_of, pools, rates, train.curriculum, step=step, seed=train.seed)
                with clock.stage("rollout"):
                    version = max(step - 1, 0) if snapshot else step
                    jobs = step_jobs(book, course.asked(rows), teacher_of, step=step, config=config)
                    samples = rollouts.sample(snapshot or student, jobs, policy_version=version)
                if train.outcome_weight or rates:
                    with clock.stage("verify"):
                        samples = _checked(samples, rollouts, by_id, student, pool)
                with clock.stage("score"):
                    noise: dict[str, Any] = {}
                    if step == 0:
                        noise = measure_quant_noise(
                            samples, teachers, student, config, workspace, reference=reference, base=base
                        )
                    scored = [sample for sample in samples if sample.teacher_id not in course.aliases]
                    outcomes = outcome_advantages(scored, step) if train.outcome_weight else None
                    sequences = score(
                        scored, teachers, student, config, weights=weights, reference=reference, outcomes=outcomes
                    )
                    sequences, seen = balanced(sequences, train.balance, scoring, targets=targets, last=last)
                    sequences += anchor_sequences(anchor, train.anchor, step, train.seed)
                    sequences += course.sequences(rows, samples, student, step=step, weights=weights)
                if snapshot:
                    snapshot.model.load_state_dict(student.model.state_dict())
                with clock.stage("update"):
                    result, norm = update(student, session.optimizers, sequences, algorithm, step, train)
                    seen |= course.learn(samples, step)
                with clock.stage("store"):
                    rollouts.keep(with_scores(samples, sequences, result))
                by_teacher = [(s.teacher_id, len(s.response_ids), s.finish_reason) for s in samples]
                metrics = {"step": step, **rollout_metrics(step, result, norm, by_teacher, train), **clock.metrics()}
                metrics |= noise | seen | {"perf/teacher_tokens": _forwarded(teachers)}
                if rates:
                    earned = outcomes_of(samples)
                    rates.observe(earned)
                    metrics |= outcome_metrics(earned) | rates.metrics(pools)
                if measure and ((step + 1) % train.eval_every == 0 or step + 1 == train.steps):
                    metrics |= measure.measure(student)
                last = metrics
                extra = dict(own_weights(snapshot.model)) if snapshot else {}
                session.end_step(step, metrics, extra={**extra, **course.state()} or None)
            rollouts.finish()
        session.publish(target, run_card(config, record, folder) | course.card(), record)
    return target


def _check_heads(models: Sequence[HFModel], teachers: Teachers) -> None:
    """Raises InputError, before anything is sampled, for a model whose logits are not those of its hidden states."""
    for model in models:
        _ = model.head
    for alias in teachers.by_alias:
        try:
            teachers.head(alias)
        except InputError as error:
            raise InputError(f"teacher {alias!r}: {error}") from None


def _forwarded(teachers: Teachers) -> dict[str, int]:
    """The tokens that ran through each teacher since the last call, on all ranks. Every rank must call it."""
    total: Counter[str] = Counter()
    for found in distributed.gather_objects(teachers.take_forwarded()):
        total.update(found)
    return dict(sorted(total.items()))


def _checked(
    samples: Sequence[Sample],
    rollouts: StepRollouts,
    prompts: Mapping[str, Prompt],
    student: HFModel,
    pool: VerifierPool,
) -> list[Sample]:
    """The samples with their verdicts; what was committed with one keeps it."""
    fresh = [sample for sample in samples if not rollouts.is_kept(sample)]
    found = {sample.sample_id: sample for sample in judge(fresh, prompts, student, pool)}
    return [found.get(sample.sample_id, sample) for sample in samples]
