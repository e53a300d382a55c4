"""Prompts as token ids, each tokenized once and remembered, with the room that its answer gets."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mopdctl.errors import InputError
from mopdctl.records import Prompt
from mopdctl.train.data import prompt_token_ids
from mopdctl.train.spans import ChatModel


class Reader(ChatModel, Protocol):
    """Who reads prompts: a model, or what is known of it without its weights."""

    @property
    def max_length(self) -> int:
        """The most tokens that it takes."""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How a prompt is to be answered."""

    max_new_tokens: int
    template_kwargs: Mapping[str, str | bool | int] = field(default_factory=dict)
    """Arguments for the chat template."""


class PromptBook:
    """The prompts of a run and their tokens."""

    def __init__(
        self,
        model: Reader,
        prompts: Sequence[Prompt],
        settings: Callable[[Prompt], AnswerSettings],
        *,
        max_length: int | None = None,
    ) -> None:
        """`max_length` is the shortest context of all who read the prompts; None takes the model's."""
        self._model, self._settings = model, settings
        self._max_length = min(max_length or model.max_length, model.max_length)
        self.prompts = prompts
        self._ids: dict[int, array[int]] = {}  # a tuple of integers takes nine times the room

    def __len__(self) -> int:
        return len(self.prompts)

    def budget(self, prompt: Prompt) -> int:
        """The token budget of a prompt's answer."""
        return self._settings(prompt).max_new_tokens

    def template_kwargs(self, prompt: Prompt) -> Mapping[str, str | bool | int]:
        """What the chat template is told beside a prompt's messages and tools."""
        return self._settings(prompt).template_kwargs

    def token_ids(self, row: int) -> tuple[int, ...]:
        """The prompt's ids. Raises InputError if prompt and budget do not fit into the model's context."""
        if row not in self._ids:
            prompt = self.prompts[row]
            settings = self._settings(prompt)
            tools = list(prompt.tools) if prompt.tools else None
            kwargs = dict(settings.template_kwargs)
            ids = prompt_token_ids(self._model, prompt.messages, tools, kwargs, place=prompt.place)
            if len(ids) + settings.max_new_tokens > self._max_length:
                raise InputError(
                    f"{prompt.place}: prompt of {len(ids)} tokens and an answer of up to {settings.max_new_tokens} do "
                    f"not fit into the model's context of {self._max_length}; shorten the prompt or lower "
                    "max_new_tokens"
                )
            self._ids[row] = array("i", ids)
        return tuple(self._ids[row])
