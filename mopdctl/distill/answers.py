"""The teachers' own answers to the training prompts: each asked once of its domain's one teacher, then chosen.

An answer is the token ids that were sampled and stays so: it is never written out as text, and nothing is appended.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.teachers import TeachersFile
from mopdctl.config.warmup import TeacherAnswers
from mopdctl.distill.teachers import Teachers, load_teachers
from mopdctl.engines.base import SampleRequest, Step, stream_seed
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import tokenizer_fingerprint
from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.jobs import Job, make_job
from mopdctl.rollouts.step import OnNote, StepRollouts
from mopdctl.rollouts.verdicts import Trouble, check_verifiable, verdicts_on, with_verdict
from mopdctl.runs import Workspace
from mopdctl.store.store import Store
from mopdctl.train import distributed
from mopdctl.train.order import rows_of_step
from mopdctl.verifiers import VerdictState
from mopdctl.verifiers.pool import VerifierPool

LoadTeacher = Callable[[str], AbstractContextManager[HFModel]]
"""The model behind an alias, on the device for a block; e.g. `Teachers.resident`. One block at a time, and those of
aliases of one checkpoint one after the other."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What there is to train on, by teacher."""

    samples: dict[str, list[Sample]]
    """Teacher to its answers, by sample id."""
    counts: dict[str, dict[str, Any]]
    """Teacher to `prompts`, `in`, `out` and `dropped`, a count for each reason."""


def check_answers(config: TeachersFile, prompts: Sequence[Prompt], settings: TeacherAnswers) -> None:
    """What can be checked before any teacher is asked.

    Raises InputError for teachers who all are black boxes, a share of an unknown one, and a prompt whose answers its
    verifier cannot check.
    """
    if all(teacher.is_black_box for teacher in config.teachers.values()):
        raise InputError(
            f"teacher {min(config.teachers)!r}: a black box is not asked for answers, and there is no other teacher; "
            "leave the SFT on answers out: the run itself trains on those of black boxes"
        )
    if unknown := sorted(settings.shares.keys() - config.teachers.keys()):
        raise InputError(f"shares: {unknown[0]!r} is no teacher (has: {', '.join(sorted(config.teachers))})")
    with VerifierPool() as pool:
        check_verifiable(prompts, pool)


def rows_to_ask(
    config: TeachersFile, teacher_of: Sequence[str], settings: TeacherAnswers, num_draws: int
) -> dict[str, list[int]]:
    """Teacher to the rows of the prompts that it is asked: as many as its share of `num_draws` answers has use for.

    They are a seeded choice among all of its prompts, the same whatever other teachers there are. `teacher_of` has the
    alias of each row. Black boxes are not asked: what they have answered is known.
    """
    by_teacher: dict[str, list[int]] = {}
    for row, alias in enumerate(teacher_of):
        if not config.teachers[alias].is_black_box:
            by_teacher.setdefault(alias, []).append(row)
    weights = {alias: settings.shares.get(alias, 1.0) for alias in by_teacher}
    found = {}
    for alias, rows in sorted(by_teacher.items()):
        draws = num_draws * weights[alias] / sum(weights.values())
        count = min(len(rows), math.ceil(draws / settings.keep))
        seed = stream_seed(config.train.seed, "answers", alias)
        order = rows_of_step(0, num_rows=len(rows), batch_size=count, seed=seed)
        found[alias] = sorted(rows[i] for i in order)
    return found


def one_at_a_time(config: TeachersFile, student: HFModel, workspace: Workspace, *, base: Path) -> LoadTeacher:
    """Loads teachers as they are asked for, and drops one before the next. Each has to speak the student's tokens."""
    held: dict[tuple[str, str | None, str, str], Teachers] = {}

    @contextmanager
    def load(alias: str) -> Iterator[HFModel]:
        teacher = config.teachers[alias]
        key = (teacher.model, teacher.base, teacher.dtype, teacher.quant)
        if key not in held:
            held.clear()
            alone = config.model_copy(update={"teachers": {alias: teacher}})
            held[key] = load_teachers(alone, student, workspace, base=base)
        # One checkpoint under several names was loaded under the first of them.
        (loaded,) = held[key].by_alias
        with held[key].resident(loaded) as model:
            yield model

    return load


def ask_teachers(
    config: TeachersFile,
    settings: TeacherAnswers,
    rows: Mapping[str, Sequence[int]],
    book: PromptBook,
    student: HFModel,
    load: LoadTeacher,
    folder: Path,
    *,
    record: Mapping[str, Any],
    tools: Tools | None = None,
    on_note: OnNote = lambda line: None,
) -> list[Sample]:
    """All answers to the prompts in `rows`, by sample id, with their verdicts, out of the rollout store in `folder`.

    What is in the store or in its log is not sampled again, and a teacher of whose answers none is missing is not
    loaded. With `tools` an answer is a whole conversation, as the student's are.

    Args:
        config: The run.
        settings: How many answers, at which temperature.
        rows: Teacher to rows of `book`.
        book: The prompts as the student reads them.
        student: Whose tokens they are.
        load: Gives the teachers.
        folder: Of the store; made by this run or new.
        record: What made the store; another run's is refused.
        tools: Of the prompts' environments.
        on_note: Is told what a person should hear.

    Raises:
        InputError: Another run has the store, or a prompt and its budget do not fit into a teacher's context.
    """
    prompts = {book.prompts[row].prompt_id: book.prompts[row] for found in rows.values() for row in found}
    # Before anything is written: a prompt that is too long is refused here.
    asked = {alias: list(_jobs(alias, found, book, config, settings)) for alias, found in rows.items()}
    batch_size = config.train.sampling_batch_size * distributed.world_size()
    trouble = Trouble()
    with (
        StepRollouts(
            folder,
            identity={"tokenizer": tokenizer_fingerprint(student), "command": "answers", "run": record},
            sampling={"run": record, "temperature": settings.temperature},
            temperature=settings.temperature,
            durability=config.train.durability,
            tools=tools,
            on_note=on_note,
        ) as rollouts,
        VerifierPool() as pool,
    ):
        for alias in sorted(rows, key=lambda a: (config.teachers[a].model, config.teachers[a].dtype, a)):
            teacher = _Teacher(alias, load)
            for first in range(0, len(asked[alias]), batch_size):
                samples = rollouts.sample(teacher, asked[alias][first : first + batch_size], policy_version=0)
                fresh = [sample for sample in samples if not rollouts.is_kept(sample)]
                verdicts = verdicts_on(fresh, prompts, student, pool, truncated=False)
                trouble.see(fresh, verdicts)
                rollouts.keep([with_verdict(s, v) for s, v in zip(fresh, verdicts, strict=True)])
                if fresh:
                    there, wanted = min(first + batch_size, len(asked[alias])), len(asked[alias])
                    on_note(f"teacher {alias!r}: {there} of {wanted} answers are there")
        rollouts.finish()
    distributed.barrier()
    for line in trouble.lines():
        on_note(line)
    return sorted(Store(folder).scan(), key=lambda sample: sample.sample_id)


class _Teacher:
    """A sampler whose model is loaded when the first token is asked of it."""

    def __init__(self, alias: str, load: LoadTeacher) -> None:
        self._alias, self._load = alias, load

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        """See `Sampler.stream`."""
        with self._load(self._alias) as model:
            for request in requests:
                if len(request.prompt_ids) + request.max_new_tokens > model.max_length:
                    raise InputError(
                        f"teacher {self._alias!r}: prompt of {len(request.prompt_ids)} tokens and an answer of up to "
                        f"{request.max_new_tokens} (sample {request.sample_id}) do not fit into its context of "
                        f"{model.max_length}; shorten the prompt or lower max_new_tokens"
                    )
            yield from model.stream(requests, temperature=temperature)


def _jobs(
    alias: str, rows: Sequence[int], book: PromptBook, config: TeachersFile, settings: TeacherAnswers
) -> Iterator[Job]:
    for row in rows:
        prompt = book.prompts[row]
        for number in range(settings.samples):
            yield make_job(
                prompt,
                f"teacher/{number}",
                seed=config.train.seed,
                group_id=prompt.prompt_id,
                generation_index=number,
                domain=prompt.routing[config.routing_keys[0]],
                teacher_id=alias,
                prompt_ids=book.token_ids(row),
                max_new_tokens=book.budget(prompt),
            )


def choose(samples: Sequence[Sample], settings: TeacherAnswers) -> Chosen:
    """The answers to train on, and what became of the others.

    Dropped are, for the first reason that holds: answers without an end of their own (under `length`, `max_turns`,
    `tool_lost`); with `wrong: drop` those whose check came to no result (under its state) and those that it did not
    pass (`wrong`); and those of a prompt beyond its best `keep` (`not_best`). Likeliest per token is meant in the
    distribution that was sampled from. Raises MopdctlError for a teacher of whose answers none is left.
    """
    reasons: dict[str, str] = {}
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        if reason := _unfit(sample, settings):
            reasons[sample.sample_id] = reason
        else:
            by_prompt.setdefault(sample.prompt_id, []).append(sample)
    for found in by_prompt.values():
        reasons |= {sample.sample_id: "not_best" for sample in sorted(found, key=_rank)[settings.keep :]}
    chosen = Chosen({}, {})
    for alias in sorted({sample.teacher_id for sample in samples}):
        asked = [sample for sample in samples if sample.teacher_id == alias]
        kept = [sample for sample in asked if sample.sample_id not in reasons]
        dropped = Counter(reasons[sample.sample_id] for sample in asked if sample.sample_id in reasons)
        chosen.samples[alias] = sorted(kept, key=lambda sample: sample.sample_id)
        chosen.counts[alias] = {
            "prompts": len({sample.prompt_id for sample in asked}),
            "in": len(asked),
            "out": len(kept),
            "dropped": dict(sorted(dropped.items())),
        }
        if not kept:
            why = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))
            raise MopdctlError(
                f"teacher {alias!r}: none of its {len(asked)} answers can be trained on ({why}); raise samples or "
                "max_new_tokens, or take wrong: keep"
            )
    return chosen


def _unfit(sample: Sample, settings: TeacherAnswers) -> str | None:
    if sample.finish_reason != "stop":
        return sample.finish_reason
    if settings.wrong == "keep" or sample.verdict is None:
        return None
    if sample.verdict != VerdictState.OK:
        return sample.verdict
    return None if sample.reward is not None and sample.reward >= 1 else "wrong"


def _rank(sample: Sample) -> tuple[float, float, int]:
    """Sorts the best first."""
    reward = -1.0 if sample.reward is None else sample.reward
    return -reward, -float(sample.behavior_logprobs.mean(dtype=float)), sample.generation_index
