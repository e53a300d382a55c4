"""Scores on held-out prompts while training, by domain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mopdctl.config.rl import RlTrainConfig
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import ChatTokenizer
from mopdctl.records import Prompt
from mopdctl.rollouts.book import AnswerSettings, PromptBook
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.held_out import held_out_score
from mopdctl.rollouts.tools import environment_tools
from mopdctl.verifiers.pool import VerifierPool


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out prompts by domain."""

    book: PromptBook
    rows: dict[str, list[int]]
    tools: Tools | None

    def metrics(self, student: HFModel, pool: VerifierPool) -> dict[str, Any]:
        """Domain to score on 0-100, and how many answers it leaves out, where there are some."""
        found = {domain: held_out_score(student, self.book, r, self.tools, pool) for domain, r in self.rows.items()}
        metrics: dict[str, Any] = {"held_out/score": {domain: one.score for domain, one in found.items()}}
        if unchecked := {domain: one.unchecked for domain, one in found.items() if one.unchecked}:
            metrics["held_out/unchecked"] = unchecked
        return metrics


def prepare_held_out(
    chat: ChatTokenizer, prompts: Sequence[Prompt], train: RlTrainConfig, *, max_length: int
) -> HeldOut:
    """The first `eval_size` prompts of each domain. Raises InputError for one that does not fit into the context."""
    book = PromptBook(chat, prompts, lambda prompt: AnswerSettings(train.max_new_tokens), max_length=max_length)
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        found = rows.setdefault(prompt.routing["domain"], [])
        if len(found) < train.eval_size:
            book.token_ids(row)
            found.append(row)
    used = [prompts[row] for found in rows.values() for row in found]
    return HeldOut(book, rows, environment_tools({prompt.prompt_id: prompt for prompt in used}, chat))
