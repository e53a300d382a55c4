"""Tokenized conversations in flat arrays: five bytes a token, and no Python object per row or token."""

import hashlib
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopdctl.errors import InputError
from mopdctl.train.batch import TrainSequence
from mopdctl.train.data import conversation_ids, row_conversation, row_loss_on, row_tools
from mopdctl.train.rows import Row
from mopdctl.train.spans import ChatModel, Messages


@dataclass(frozen=True)
class TokenTable:
    """Rows of tokens one after another. A row that was left out or is not needed has no tokens."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]
    """1 where a token trains."""
    offsets: NDArray[np.int64]
    """Where each row begins, and the end: [rows + 1]."""
    prompts: NDArray[np.uint64]
    """A digest of each row's prompt, [rows]."""
    overlong: int
    """Rows left out because they are too long."""

    @property
    def num_rows(self) -> int:
        """Rows, those without tokens included."""
        return len(self.prompts)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, [rows]."""
        return np.diff(self.offsets)

    @cached_property
    def trainable(self) -> NDArray[np.int64]:
        """Tokens to train on of each row, [rows]."""
        before = np.concatenate([[0], np.cumsum(self.loss_mask, dtype=np.int64)])
        return np.diff(before[self.offsets])

    def sequence(self, row: int) -> TrainSequence:
        """One row to train on."""
        begin, end = self.offsets[row : row + 2]
        mask = self.loss_mask[begin:end]
        first = int(mask.argmax())
        ids = self.token_ids[begin:end].tolist()
        return TrainSequence(str(row), ids[:first], ids[first:], mask[first:].tolist(), teacher_id="sft")


def tokenize(
    model: ChatModel,
    rows: Iterable[tuple[str, Row]],
    *,
    loss_on: str,
    limit: int,
    limit_of: str = "max_length",
    drop_overlong: bool,
    needed: frozenset[int] | None = None,
) -> TokenTable:
    """Tokenizes rows, of which only their tokens are kept.

    Args:
        model: Whose tokenizer is used.
        rows: Each with its place.
        loss_on: What a row without a `loss_on` of its own is trained on.
        limit: The most tokens that a row may have.
        limit_of: What sets it, for messages.
        drop_overlong: Leave longer rows out and count them; else they are an error.
        needed: Numbers of the rows to tokenize; None takes all.

    Raises:
        InputError: A row cannot be trained on; the message names it.
    """
    ids, masks, offsets, prompts = array("i"), array("b"), array("q", [0]), array("Q")
    overlong = 0
    for number, (place, row) in enumerate(rows):
        prompt = 0
        if needed is None or number in needed:
            messages, tools = row_conversation(row, place), row_tools(row, place)
            token_ids, mask = conversation_ids(
                model, messages, tools, place=place, loss_on=row_loss_on(row, place, loss_on)
            )
            if 1 not in mask:
                raise InputError(f"{place}: no token to train on (empty assistant message?)")
            if mask[0]:
                raise InputError(f"{place}: the assistant's first token has nothing before it that could predict it")
            if len(token_ids) <= limit:
                ids.extend(token_ids)
                masks.extend(mask)
                prompt = _prompt_digest(messages, tools)
            elif drop_overlong:
                overlong += 1
            else:
                raise InputError(
                    f"{place}: {len(token_ids)} tokens, but at most {limit} fit ({limit_of}); shorten or drop the row"
                )
        offsets.append(len(ids))
        prompts.append(prompt)
    return TokenTable(
        token_ids=np.asarray(memoryview(ids)),
        loss_mask=np.asarray(memoryview(masks)),
        offsets=np.asarray(memoryview(offsets)),
        prompts=np.asarray(memoryview(prompts)),
        overlong=overlong,
    )


def _prompt_digest(messages: Messages, tools: Any) -> int:
    """64 bits of what stands before the assistant's first message."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    text = json.dumps([messages[:first], tools], sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
