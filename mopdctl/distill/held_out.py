"""Scores on held-out prompts while training: recovery per teacher, and the step at which the student reached it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.jobs import answer_settings
from mopdctl.distill.prompts import checked_teacher
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.hf import HFModel
from mopdctl.records import Prompt
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.held_out import mean_reward, read_held_out


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out prompts by teacher, and what student and teacher scored on them before training."""

    book: PromptBook
    rows: dict[str, list[int]]
    before: dict[str, float]
    teacher: dict[str, float | None]
    """None where there is no model of it."""

    def measure(self, student: HFModel) -> dict[str, dict[str, float | None]]:
        """Score (0-100) and recovery in percent per teacher; recovery is None where the teacher is not ahead."""
        scores = {alias: mean_reward(student, self.book, rows) for alias, rows in self.rows.items()}
        recovered = {}
        for alias, score in scores.items():
            gap = (self.teacher[alias] or 0.0) - self.before[alias]
            recovered[alias] = 100 * (score - self.before[alias]) / gap if gap > 0 else None
        return {"held_out/score": dict(scores), "held_out/recovery_pct": recovered}


def read(config: TeachersFile, *, base: Path) -> tuple[list[Prompt], dict[str, list[int]]]:
    """The held-out prompts, and the rows of the first `eval_size` of each teacher. All checks that need no model."""
    prompts = read_held_out(config.train, config.routing_keys, base=base)
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        alias = checked_teacher(prompt, config)
        if len(rows.setdefault(alias, [])) < config.train.eval_size:
            rows[alias].append(row)
    return prompts, rows


def prepare(
    config: TeachersFile, student: HFModel, *, base: Path, max_length: int
) -> tuple[PromptBook, dict[str, list[int]]]:
    """Reads and checks the held-out prompts, their lengths included."""
    prompts, rows = read(config, base=base)
    book = PromptBook(student, prompts, answer_settings(config), max_length=max_length)
    for found in rows.values():
        for row in found:
            book.token_ids(row)
    return book, rows


def start(book: PromptBook, rows: dict[str, list[int]], student: HFModel, teachers: Teachers) -> HeldOut:
    """Measures student and teachers before the first step."""
    before = {alias: mean_reward(student, book, found) for alias, found in rows.items()}
    said: dict[str, float | None] = dict.fromkeys(rows)
    for alias in rows.keys() & teachers.by_alias.keys():
        with teachers.resident(alias) as teacher:
            said[alias] = mean_reward(teacher, book, rows[alias])
    return HeldOut(book, rows, before, said)


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
