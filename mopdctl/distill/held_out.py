"""Scores on held-out prompts while training: recovery per teacher, and the step at which the student reached it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.prompts import checked_teacher
from mopdctl.distill.rollout import PromptBook
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.base import SampleRequest
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.records import Prompt
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.verifiers import VERIFIERS, VerdictState, verify


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out prompts by teacher, and what student and teacher scored on them before training."""

    book: PromptBook
    rows: dict[str, list[int]]
    before: dict[str, float]
    teacher: dict[str, float]

    def measure(self, student: HFModel) -> dict[str, dict[str, float | None]]:
        """Score (0-100) and recovery in percent per teacher; recovery is None where the teacher is not ahead."""
        scores = {alias: mean_reward(student, self.book, rows) for alias, rows in self.rows.items()}
        recovered = {}
        for alias, score in scores.items():
            gap = self.teacher[alias] - self.before[alias]
            recovered[alias] = 100 * (score - self.before[alias]) / gap if gap > 0 else None
        return {"held_out/score": dict(scores), "held_out/recovery_pct": recovered}


def read(config: TeachersFile, *, base: Path) -> tuple[list[Prompt], dict[str, list[int]]]:
    """The held-out prompts, and the rows of the first `eval_size` of each teacher. All checks that need no model."""
    path = base / config.train.eval_prompts if config.train.eval_prompts else base
    prompts = read_prompts(path, config.routing_keys)
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if prompt.verifier not in VERIFIERS:
            raise InputError(f"{prompt.place}: verifier {prompt.verifier!r} is none of {', '.join(VERIFIERS)}")
        verdict = verify(prompt.verifier, "", prompt.reference)
        if verdict.state is VerdictState.INVALID_REFERENCE:
            raise InputError(f"{prompt.place}: {verdict.detail}")
        alias = checked_teacher(prompt, config)
        if len(rows.setdefault(alias, [])) < config.train.eval_size:
            rows[alias].append(row)
    return prompts, rows


def prepare(
    config: TeachersFile, student: HFModel, *, base: Path, max_length: int
) -> tuple[PromptBook, dict[str, list[int]]]:
    """Reads and checks the held-out prompts, their lengths included."""
    prompts, rows = read(config, base=base)
    book = PromptBook(student, prompts, config, max_length=max_length)
    for found in rows.values():
        for row in found:
            book.token_ids(row)
    return book, rows


def start(book: PromptBook, rows: dict[str, list[int]], student: HFModel, teachers: Teachers) -> HeldOut:
    """Measures student and teachers before the first step."""
    before = {alias: mean_reward(student, book, found) for alias, found in rows.items()}
    teacher = {alias: mean_reward(teachers[alias], book, found) for alias, found in rows.items()}
    return HeldOut(book, rows, before, teacher)


def mean_reward(model: HFModel, book: PromptBook, rows: Sequence[int]) -> float:
    """The mean reward of greedy answers, on 0-100. An answer that cannot be parsed earns 0."""
    requests = [
        SampleRequest(book.prompts[row].prompt_id, book.token_ids(row), book.budget(book.prompts[row]), 0)
        for row in rows
    ]
    total = 0.0
    for row, completion in zip(rows, model.sample(requests, temperature=0), strict=True):
        prompt = book.prompts[row]
        text = model.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        verdict = verify(str(prompt.verifier), text, prompt.reference)
        if verdict.state is VerdictState.INVALID_REFERENCE:
            raise InputError(f"{prompt.place}: {verdict.detail}")
        total += verdict.reward or 0.0
    return 100 * total / len(rows)


def reached(history: list[dict[str, Any]]) -> dict[str, int | None]:
    """Per teacher, the optimizer steps after which the student first scored as much as the teacher; None if never."""
    aliases = {alias for row in history for alias in row["held_out/recovery_pct"]}
    return {
        alias: next(
            (row["step"] + 1 for row in history if (row["held_out/recovery_pct"].get(alias) or float("-inf")) >= 100),
            None,
        )
        for alias in sorted(aliases)
    }
