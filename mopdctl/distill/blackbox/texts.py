"""Answers as text, as a black box gave them: rows of a file, each found its prompt."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import fingerprint
from mopdctl.records import Message, Prompt, Sample
from mopdctl.rollouts.bridge import turn_text
from mopdctl.train.data import row_messages
from mopdctl.train.rows import Row, iterate_rows
from mopdctl.train.spans import ChatModel


@dataclass(frozen=True, slots=True)
class Written:
    """One answer, as text."""

    answer_id: str
    prompt_id: str
    turns: tuple[Message, ...]
    """What comes after the prompt: the assistant's message; with tools, its calls, their results and its last word."""
    finish_reason: str = "stop"
    reward: float | None = None
    """What its source says that it is worth; None if it says nothing."""
    place: str = ""
    """Where it was read, for error messages."""


@dataclass(slots=True)
class Texts:
    """The answers of one black box to the prompts of a run."""

    written: list[Written] = field(default_factory=list)
    foreign: int = 0
    """Answers to prompts that this run does not have."""


def read_answers(files: Iterable[Path], prompts: Sequence[Prompt]) -> Texts:
    """The answers in JSONL or Parquet files to some prompts, in order.

    A row has the answer as text (`answer`), or a conversation that ends in it (`messages`, as `gen-sft` writes them).
    It names its prompt by `prompt_id`, or else by beginning with the prompt's messages; system messages are not
    compared, since a teacher may have been told more than the student is. `reward` and `finish_reason` are taken where
    a row has them.

    Raises:
        InputError: a row has no answer, or one to something else than the prompt that it names.
    """
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    by_text: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_text.setdefault(_key(prompt.messages), []).append(prompt)
    found = Texts()
    count: Counter[str] = Counter()
    for place, row in (item for file in files for item in iterate_rows(file)):
        pairs = _pairs(row, place, by_id, by_text)
        found.foreign += not pairs
        for prompt, turns in pairs:
            count[prompt.prompt_id] += 1
            found.written.append(
                Written(
                    answer_id=f"{prompt.prompt_id}/answer-{count[prompt.prompt_id]}",
                    prompt_id=prompt.prompt_id,
                    turns=turns,
                    finish_reason=str(row.get("finish_reason") or "stop"),
                    reward=_reward(row, place),
                    place=place,
                )
            )
    return found


def written_by(samples: Sequence[Sample], chat: ChatModel) -> list[Written]:
    """The text of answers that a model with another tokenizer sampled; `chat` is that model.

    Raises InputError for a conversation with tools: between its turns stands what the other template wrote.
    """
    for sample in samples:
        if not sample.response_mask.all():
            raise InputError(
                f"answer {sample.sample_id}: a conversation with tools in the tokens of another model; give answers to "
                "such prompts as rows with `messages`"
            )
    return [
        Written(
            answer_id=sample.sample_id,
            prompt_id=sample.prompt_id,
            turns=({"role": "assistant", "content": turn_text(chat, sample.response_ids.tolist())},),
            finish_reason=sample.finish_reason,
            reward=sample.reward,
            place=f"answer {sample.sample_id}",
        )
        for sample in samples
    ]


def _pairs(
    row: Row, place: str, by_id: dict[str, Prompt], by_text: dict[str, list[Prompt]]
) -> list[tuple[Prompt, tuple[Message, ...]]]:
    """The prompts that a row answers, each with the turns of its answer; empty if the run has none of them."""
    named = row.get("prompt_id")
    if named is not None and (isinstance(named, bool) or not isinstance(named, str | int)):
        raise InputError(f"{place}: 'prompt_id' is a {type(named).__name__}; give the id of a prompt")
    prompt = None if named is None else by_id.get(str(named))
    if named is not None and prompt is None:
        return []
    if prompt is not None:  # with the id, the row may hold the answer alone
        by_text = {_key(prompt.messages): [prompt], _key(()): [prompt]}
    messages = _messages(row, place, named=named is not None)
    for end in reversed(range(len(messages))):
        turns = tuple(messages[end:])
        if _is_answer(turns) and (prompts := by_text.get(_key(messages[:end]))):
            return [(found, turns) for found in prompts]
    if prompt is not None:
        raise InputError(
            f"{place}: its messages are not those of prompt {prompt.prompt_id!r} ({prompt.place}) and an answer"
        )
    return []


def _messages(row: Row, place: str, *, named: bool) -> list[Message]:
    """A row as one conversation that ends in the answer."""
    if "answer" not in row:
        messages = row_messages(row, place)
        if messages[-1]["role"] != "assistant":
            raise InputError(f"{place}: holds no answer; give it as 'answer' or as the last of 'messages'")
        return messages
    if not isinstance(row["answer"], str):
        raise InputError(f"{place}: 'answer' is a {type(row['answer']).__name__}, not text")
    if not named and "messages" not in row and "prompt" not in row:
        raise InputError(f"{place}: names no prompt; give 'prompt_id', or the prompt's 'messages' or 'prompt'")
    before = row_messages(row, place) if "messages" in row or "prompt" in row else []
    return [*before, {"role": "assistant", "content": row["answer"]}]


def _is_answer(turns: Sequence[Message]) -> bool:
    """Whether these are turns after a prompt: the assistant begins, and nobody but tools speaks beside it."""
    roles = [message["role"] for message in turns]
    return bool(roles) and roles[0] == "assistant" and not {"system", "developer", "user"}.intersection(roles)


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] not in ("system", "developer")]


def _key(messages: Sequence[Message]) -> str:
    """Equal for conversations in which the same is said, system messages aside."""
    said = [[m["role"], m.get("content") or "", m.get("tool_calls") or []] for m in _without_system(messages)]
    return fingerprint(json.loads(json.dumps(said, default=str)))


def _reward(row: Row, place: str) -> float | None:
    value: Any = row.get("reward")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{place}: 'reward' is {value!r}; give a finite number or leave it out")
    return float(value)
