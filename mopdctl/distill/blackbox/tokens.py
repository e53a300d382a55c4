"""Answers as tokens of the student: the one place where a black box's text becomes ids."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mopdctl.distill.blackbox.texts import Written
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.train.data import conversation_ids
from mopdctl.train.spans import ChatModel


def tokenized(
    written: Iterable[Written],
    book: PromptBook,
    chat: ChatModel,
    *,
    alias: str,
    domains: Mapping[str, str],
    max_length: int,
    within_budget: bool,
) -> tuple[list[Sample], Counter[str]]:
    """Answers in the student's tokens, in order, and how many were left out for which reason.

    Prompt and answer are rendered by the student's own template and tokenized in one piece. The prompt's ids are those
    from which the student samples: an answer with which they come out differently (`misaligned`: it begins with what
    its tokenizer joins to the prompt's end, or the template writes the prompt otherwise once an answer follows) would
    teach at a prefix that is never sampled from. Of the answer, the assistant's own tokens with its end token carry
    loss; what the template writes after them is cut off, so that an answer ends as a sampled one does.

    Args:
        written: The answers.
        book: The prompts of this teacher as the student reads them.
        chat: The student, or its tokenizer and end tokens.
        alias: The teacher.
        domains: Prompt id to domain.
        max_length: The most tokens of prompt and answer; longer ones are `overlong`.
        within_budget: Whether answers longer than the student may write are `overlong` as well.

    Raises:
        InputError: the text holds control tokens, or the template does not take it; the message names the row.
    """
    rows = {prompt.prompt_id: row for row, prompt in enumerate(book.prompts)}
    found: list[Sample] = []
    dropped: Counter[str] = Counter()
    for answer in written:
        prompt = book.prompts[rows[answer.prompt_id]]
        prompt_ids = book.token_ids(rows[answer.prompt_id])
        if not any(turn.get("content") or turn.get("tool_calls") for turn in answer.turns):
            dropped["empty"] += 1
            continue
        tools = list(prompt.tools) if prompt.tools else None
        ids, mask = conversation_ids(
            chat, [*prompt.messages, *answer.turns], tools, place=answer.place, loss_on="assistant"
        )
        mask = mask[len(prompt_ids) :]
        if tuple(ids[: len(prompt_ids)]) != prompt_ids or 1 not in mask:
            dropped["misaligned"] += 1
            continue
        length = len(mask) - mask[::-1].index(1)
        if len(prompt_ids) + length > max_length or (within_budget and length > book.budget(prompt)):
            dropped["overlong"] += 1
            continue
        found.append(
            _sample(answer, prompt, ids[: len(prompt_ids) + length], mask[:length], alias, domains[prompt.prompt_id])
        )
    return found, dropped


def _sample(
    answer: Written, prompt: Prompt, ids: Sequence[int], mask: Sequence[int], alias: str, domain: str
) -> Sample:
    num_prompt = len(ids) - len(mask)
    return Sample(
        sample_id=answer.answer_id,
        prompt_id=prompt.prompt_id,
        group_id=prompt.prompt_id,
        generation_index=0,
        domain=domain,
        teacher_id=alias,
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array(ids, np.int32),
        prompt_length=num_prompt,
        loss_mask=np.array([*[0] * num_prompt, *mask], bool),
        # A black box tells none; whoever reads them learns that from the values.
        behavior_logprobs=np.full(sum(mask), np.nan, np.float32),
        finish_reason=answer.finish_reason,
        reward=answer.reward,
    )
