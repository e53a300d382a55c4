"""Which answers of a black box are used: whole ones, the best of each prompt, and none missing."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.blackbox import BlackBox
from mopdctl.distill.blackbox.texts import Texts, Written, read_answers
from mopdctl.distill.blackbox.tokens import tokenized
from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import AnswerSettings, PromptBook, Reader
from mopdctl.rollouts.verdicts import Pool, check_verifiable, judge
from mopdctl.verifiers import VerdictState

_WHOLE = ("stop", "tool_calls")
"""Finish reasons of answers that came to their own end, here and in the API of chat completions."""
_WRONG = (VerdictState.OK, VerdictState.PARSE_ERROR)


@dataclass(frozen=True, slots=True)
class AnswerBook:
    """The answers of one black box that are used, as tokens of the student."""

    alias: str
    by_prompt: dict[str, tuple[Sample, ...]]
    """Prompt id to its equally good answers, in the order in which they were given."""
    dropped: dict[str, int]
    """Why answers are not used, and how many."""
    without: tuple[str, ...] = ()
    """Ids of the prompts that are left out because they have no answer."""

    def answer(self, prompt_id: str, turn: int) -> Sample:
        """The answer to use when the prompt comes for the `turn`-th time (from 0): all of them in turn."""
        found = self.by_prompt[prompt_id]
        return found[turn % len(found)]

    def report(self) -> dict[str, Any]:
        """Counts for the plan and the card: in = out + all that was dropped."""
        out = sum(map(len, self.by_prompt.values()))
        return {
            "prompts": len(self.by_prompt),
            "prompts_without_answer": len(self.without),
            "in": out + sum(self.dropped.values()),
            "out": out,
            "dropped": dict(sorted(self.dropped.items())),
        }


def check_answered(alias: str, teacher: BlackBox, prompts: Sequence[Prompt], texts: Texts) -> None:
    """Raises InputError naming the first prompt without any answer, unless such prompts are to be dropped.

    What can be said before anything is tokenized; `choose` says the rest.
    """
    answered = {answer.prompt_id for answer in texts.written}
    _refuse_missing(alias, teacher, prompts, answered, Counter(foreign=texts.foreign))


def open_book(
    alias: str,
    teacher: BlackBox,
    prompts: Sequence[Prompt],
    student: Reader,
    settings: Callable[[Prompt], AnswerSettings],
    *,
    files: Sequence[Path],
    domains: Mapping[str, str],
    max_length: int,
    pool: Pool,
) -> AnswerBook:
    """Reads a black box's answers from files: tokenized, checked where the prompt has a verifier, and chosen.

    Args:
        alias: The teacher.
        teacher: What is configured of it.
        prompts: All that route to it.
        student: Whose tokens they become.
        settings: Token budget and template arguments of a prompt.
        files: Rows as for `read_answers`.
        domains: Prompt id to domain.
        max_length: The shortest context of all who read the answers, in tokens.
        pool: Runs the verifiers.

    Raises:
        InputError: a row, a verifier or its reference is unusable, or a prompt has no usable answer and
            `without_answer` is `refuse`.
    """
    texts = read_answers(files, prompts)
    check_answered(alias, teacher, prompts, texts)
    return book_of(
        alias,
        teacher,
        prompts,
        student,
        settings,
        written=texts.written,
        dropped=Counter(foreign=texts.foreign),
        domains=domains,
        max_length=max_length,
        pool=pool,
    )


def book_of(
    alias: str,
    teacher: BlackBox,
    prompts: Sequence[Prompt],
    student: Reader,
    settings: Callable[[Prompt], AnswerSettings],
    *,
    written: Iterable[Written],
    dropped: Counter[str] | None = None,
    domains: Mapping[str, str],
    max_length: int,
    pool: Pool,
) -> AnswerBook:
    """As `open_book`, from answers that are there already; `dropped` counts those that were left out before."""
    check_verifiable(prompts, pool)
    book = PromptBook(student, prompts, settings, max_length=max_length)
    samples, lost = tokenized(
        written,
        book,
        student,
        alias=alias,
        domains=domains,
        max_length=max_length,
        within_budget=teacher.gives == "discriminator",
    )
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    checked = judge(samples, by_id, student, pool, truncated=False)
    return choose(alias, teacher, prompts, checked, dropped=(dropped or Counter()) + lost)


def choose(
    alias: str,
    teacher: BlackBox,
    prompts: Sequence[Prompt],
    answers: Iterable[Sample],
    *,
    dropped: Mapping[str, int] | None = None,
) -> AnswerBook:
    """The answers to use, and what became of the others.

    Dropped are, for the first reason that holds: answers that did not come to their own end (`unfinished`); those to
    which the verifier gives 0 (`wrong`, with `wrong_answers: drop`); and those with a reward below the best of their
    prompt, or with none where another has one (`not_best`).

    Args:
        alias: The teacher.
        teacher: What is configured of it.
        prompts: All that route to it.
        answers: In the student's tokens, with their verdicts where there are some.
        dropped: Answers that were left out before, by reason.

    Raises:
        InputError: a prompt has no answer left and `without_answer` is `refuse`, or none has.
    """
    reasons = Counter(dropped or {})
    kept: dict[str, list[Sample]] = {}
    for sample in answers:
        wrong = sample.verdict in _WRONG and not sample.reward
        if sample.finish_reason not in _WHOLE:
            reasons["unfinished"] += 1
        elif wrong and teacher.wrong_answers == "drop":
            reasons["wrong"] += 1
        else:
            kept.setdefault(sample.prompt_id, []).append(sample)
    best: dict[str, tuple[Sample, ...]] = {}
    for prompt_id, found in kept.items():
        rewards = [sample.reward for sample in found if sample.reward is not None]
        best[prompt_id] = tuple(s for s in found if not rewards or s.reward == max(rewards))
        reasons["not_best"] += len(found) - len(best[prompt_id])
    missing = _refuse_missing(alias, teacher, prompts, best.keys(), reasons)
    return AnswerBook(alias, best, {name: count for name, count in sorted(reasons.items()) if count}, missing)


def _refuse_missing(
    alias: str, teacher: BlackBox, prompts: Sequence[Prompt], answered: Iterable[str], dropped: Counter[str]
) -> tuple[str, ...]:
    """The ids of the prompts without an answer, where they may be left out."""
    known = set(answered)
    missing = [prompt for prompt in prompts if prompt.prompt_id not in known]
    if not missing or (teacher.without_answer == "drop" and len(missing) < len(prompts)):
        return tuple(prompt.prompt_id for prompt in missing)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()) if count)
    way_out = "answer them" if teacher.without_answer == "drop" else "answer them, or set `without_answer: drop`"
    raise InputError(
        f"{missing[0].place}: teacher {alias!r} has no usable answer to prompt {missing[0].prompt_id!r}, nor to "
        f"{len(missing) - 1} others of {len(prompts)} (answers left out: {reasons or 'none'}); {way_out}"
    )
