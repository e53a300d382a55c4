"""Student and teachers side by side: what is found of each, with one teacher in memory at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mopdctl.distill.overlap.advice import Support
from mopdctl.distill.overlap.compare import Streams, compare
from mopdctl.distill.overlap.measures import Measures, PassRates, measure, pass_rates
from mopdctl.distill.overlap.plan import OverlapSpec, Seat
from mopdctl.distill.teachers import load_teachers
from mopdctl.engines.adapters import Source
from mopdctl.engines.hf import HFModel
from mopdctl.records import Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.held_out import held_out_score
from mopdctl.rollouts.tools import environment_tools
from mopdctl.runs import Workspace
from mopdctl.verifiers.pool import VerifierPool

OnNote = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found of one teacher. Scores are of greedy answers, on 0-100; None where no prompt has a verifier."""

    streams: list[Streams]
    """By answer."""
    measures: Measures
    passed: PassRates
    """Of the student's sampled answers."""
    student_score: float | None
    teacher_score: float | None

    @property
    def support(self) -> Support:
        """What advice is given by."""
        figures = self.measures.figures
        return Support(*(figures[name].mean for name in ("top_k_overlap", "student_mass", "impossible_share")))


def look_at(
    seats: Sequence[Seat],
    student: HFModel,
    book: PromptBook,
    answers: Mapping[int, Sequence[Sample]],
    spec: OverlapSpec,
    workspace: Workspace,
    *,
    pool: VerifierPool,
    on_note: OnNote,
) -> list[Seen]:
    """What is found of each seat, in order. Base weights are loaded once, and two seats that share all are one look.

    Args:
        seats: Teachers and candidates.
        student: Who wrote the answers.
        book: The prompts.
        answers: By row.
        spec: What is asked for.
        workspace: Where models are looked for.
        pool: Who checks greedy answers.
        on_note: Gets a line for each checkpoint.

    Raises:
        InputError: A teacher does not read the student's tokens, or its context is too short.
    """

    def verified(rows: Sequence[int]) -> list[int]:
        return [row for row in rows if book.prompts[row].verifier is not None]

    def score(model: HFModel, rows: Sequence[int]) -> float | None:
        if not verified(rows):
            return None
        prompts = {book.prompts[row].prompt_id: book.prompts[row] for row in verified(rows)}
        tools = environment_tools(prompts, model, variables=book.template_kwargs)
        return held_out_score(model, book, verified(rows), tools, pool).score

    own = {rows: score(student, rows) for rows in dict.fromkeys(seat.rows for seat in seats)}
    by_weights: dict[tuple[str, str], list[Seat]] = {}
    for seat in seats:
        by_weights.setdefault((seat.source.model, seat.teacher.dtype), []).append(seat)
    seen: dict[tuple[Source, str, tuple[int, ...]], Seen] = {}
    for group in by_weights.values():
        by_alias = {seat.alias: seat.teacher for seat in group}
        on_note(f"comparing the student with {', '.join(by_alias)}")
        these = spec.config.model_copy(update={"teachers": by_alias})
        teachers = load_teachers(these, student, workspace, base=spec.base)
        for seat in group:
            if _key(seat) not in seen:
                samples = [sample for row in seat.rows for sample in answers[row]]
                checked = frozenset(book.prompts[row].prompt_id for row in verified(seat.rows))
                with teachers.resident(seat.alias) as model:
                    streams = compare(student, model, samples, top_k=spec.top_k, room=spec.room)
                    seen[_key(seat)] = Seen(
                        streams,
                        measure(samples, streams),
                        pass_rates(samples, checked, k=spec.samples),
                        student_score=own[seat.rows],
                        teacher_score=score(model, seat.rows),
                    )
        del teachers, model  # before the next ones come
    return [seen[_key(seat)] for seat in seats]


def _key(seat: Seat) -> tuple[Source, str, tuple[int, ...]]:
    return seat.source, seat.teacher.dtype, seat.rows
