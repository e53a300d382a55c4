"""Scores on held-out prompts while training, by domain."""

from collections.abc import Sequence
from dataclasses import dataclass

from mopdctl.config.rl import RlTrainConfig
from mopdctl.engines.hf import HFModel
from mopdctl.records import Prompt
from mopdctl.rollouts.book import AnswerSettings, PromptBook
from mopdctl.rollouts.held_out import mean_reward


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out prompts by domain."""

    book: PromptBook
    rows: dict[str, list[int]]

    def scores(self, student: HFModel) -> dict[str, float]:
        """Domain to score on 0-100."""
        return {domain: mean_reward(student, self.book, rows) for domain, rows in self.rows.items()}


def prepare(student: HFModel, prompts: Sequence[Prompt], train: RlTrainConfig, *, max_length: int) -> HeldOut:
    """The first `eval_size` prompts of each domain. Raises InputError for one that does not fit into the context."""
    book = PromptBook(student, prompts, lambda prompt: AnswerSettings(train.max_new_tokens), max_length=max_length)
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        found = rows.setdefault(prompt.routing["domain"], [])
        if len(found) < train.eval_size:
            book.token_ids(row)
            found.append(row)
    return HeldOut(book, rows)
