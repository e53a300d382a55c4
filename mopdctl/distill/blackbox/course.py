"""All that the black boxes of a run take part in, from their answers to their discriminators' state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mopdctl.config.blackbox import DiscriminatorConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.config.warmup import TeacherAnswers
from mopdctl.distill.answers import ask_teachers, one_at_a_time
from mopdctl.distill.blackbox.book import AnswerBook, choose, open_book
from mopdctl.distill.blackbox.discriminators import Discriminators
from mopdctl.distill.blackbox.loss import black_box_loss
from mopdctl.distill.blackbox.sequences import COMPONENTS, sequences_for
from mopdctl.distill.jobs import answer_settings
from mopdctl.engines.hf import HFModel
from mopdctl.records import Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.step import OnNote
from mopdctl.rollouts.verdicts import Pool
from mopdctl.runs import Workspace
from mopdctl.train.batch import MicroBatch, TrainSequence
from mopdctl.train.rows import data_files
from mopdctl.train.session import Session
from mopdctl.train.step import Algorithm, Policy, TokenLoss


class Course:
    """The black boxes of a run; one without any gives back what it is given. Every rank has to make the same calls."""

    def __init__(
        self, config: TeachersFile, book: PromptBook, teacher_of: Sequence[str], books: Mapping[str, AnswerBook]
    ) -> None:
        self._config, self._book, self._teacher_of, self._books = config, book, teacher_of, books
        self._discriminators: Discriminators | None = None

    @property
    def aliases(self) -> frozenset[str]:
        """The black boxes."""
        return frozenset(self._books)

    def answerable(self, pools: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """The pools of prompts without those that are left out for want of an answer."""
        found = {}
        for alias, rows in pools.items():
            without = set(self._books[alias].without) if alias in self._books else set()
            found[alias] = [row for row in rows if self._book.prompts[row].prompt_id not in without]
        return found

    def asked(self, rows: Sequence[int]) -> list[int]:
        """The prompts of a step that the student answers: not those of teachers whose answers it imitates."""
        teachers = self._config.teachers
        return [row for row in rows if teachers[self._teacher_of[row]].gives != "answers"]

    def begin(self, student: HFModel, session: Session) -> None:
        """Makes the discriminators of the student as the loop begins, or takes up their state."""
        if not self._books:
            return
        judging = {a: t for a, t in self._config.teachers.items() if t.gives == "discriminator" and a in self._books}
        settings = {alias: teacher.discriminator or DiscriminatorConfig() for alias, teacher in judging.items()}
        self._discriminators = Discriminators(student, settings, self._books, self._config.train)
        if session.first:
            self._discriminators.load_state(session.extra)

    def loss(self, others: Algorithm) -> Algorithm:
        """The loss of a run: that of black boxes for their components, else `others`."""
        own = black_box_loss(self._config.train)

        def loss(policy: Policy, batch: MicroBatch) -> TokenLoss:
            return (own if batch.component in COMPONENTS else others)(policy, batch)

        return loss

    def sequences(
        self,
        rows: Sequence[int],
        samples: Sequence[Sample],
        student: HFModel,
        *,
        step: int,
        weights: Mapping[str, float],
    ) -> list[TrainSequence]:
        """What black boxes teach in a step; see `sequences_for`. `rows` are those of all ranks."""
        if self._discriminators is None:
            return []
        own = [sample for sample in samples if sample.teacher_id in self._books]
        prox = None
        if self._config.train.inner_steps > 1:
            pairs = [(sample.prompt_ids.tolist(), sample.response_ids.tolist()) for sample in own]
            prox = dict(zip([sample.sample_id for sample in own], student.score(pairs), strict=True))
        drawn = [(self._teacher_of[row], self._book.prompts[row].prompt_id) for row in rows]
        return sequences_for(
            [(alias, prompt_id) for alias, prompt_id in drawn if alias in self._books],
            own,
            self._books,
            self._discriminators,
            step=step,
            turn=self._turn(step),
            weights=weights,
            prox_logprobs=prox,
        )

    def learn(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """A step of the discriminators; returns their metrics."""
        return {} if self._discriminators is None else self._discriminators.train(samples, turn=self._turn(step))

    def state(self) -> dict[str, Tensor]:
        """What resuming needs beside the student's own state."""
        return {} if self._discriminators is None else self._discriminators.state()

    def card(self) -> dict[str, Any]:
        """What the run's card says: the counts of every black box's answers."""
        found = {alias: book.report() for alias, book in sorted(self._books.items())}
        return {"answers": found} if found else {}

    def _turn(self, step: int) -> int:
        """How often the prompts have come up before, about."""
        return step * self._config.train.batch_size // len(self._book)


def open_course(
    config: TeachersFile,
    workspace: Workspace,
    book: PromptBook,
    teacher_of: Sequence[str],
    student: HFModel,
    folder: Path,
    pool: Pool,
    *,
    base: Path,
    record: dict[str, Any],
    tools: Tools | None,
    on_note: OnNote,
) -> Course:
    """Opens the answers of every black box: from its file, or asked of its model and kept in `folder`.

    Raises InputError as `open_book` does.
    """
    books: dict[str, AnswerBook] = {}
    for alias, teacher in sorted(config.teachers.items()):
        if not teacher.is_black_box:
            continue
        rows = [row for row, owner in enumerate(teacher_of) if owner == alias]
        prompts = [book.prompts[row] for row in rows]
        if teacher.answers is not None:
            books[alias] = open_book(
                alias,
                teacher,
                prompts,
                student,
                answer_settings(config),
                files=data_files(teacher.answers, base=base, workspace=workspace.root),
                domains={prompt.prompt_id: prompt.routing[config.routing_keys[0]] for prompt in prompts},
                max_length=student.max_length,
                pool=pool,
            )
            continue
        # Its model is loaded like any other, and only what it writes is looked at.
        plain = teacher.model_copy(update={"gives": "logprobs"})
        alone = config.model_copy(update={"teachers": {alias: plain}})
        samples = ask_teachers(
            alone,
            TeacherAnswers(wrong="keep"),
            {alias: rows},
            book,
            student,
            one_at_a_time(alone, student, workspace, base=base),
            folder / "blackbox" / alias,
            record=record,
            tools=tools,
            on_note=on_note,
        )
        books[alias] = choose(alias, teacher, prompts, samples)
    for alias, opened in books.items():
        counts = opened.report()
        left_out = f", {counts['prompts_without_answer']} prompts left out" if counts["prompts_without_answer"] else ""
        on_note(f"teacher {alias!r}: {counts['out']} of {counts['in']} answers are used{left_out}")
    return Course(config, book, teacher_of, books)
