"""Prompts that show each document's own tools."""

import functools
import json
from collections.abc import Callable
from typing import Any

from lm_eval.api.task import ConfigurableTask

from mopdctl.errors import InputError


class ToolCallTask(ConfigurableTask):  # type: ignore[misc]
    """A task whose documents each bring their own tools, which the chat template writes into the prompt.

    The harness renders prompts through `apply_chat_template(messages)` of its model object, which takes no tools; so
    this goes to the tokenizer behind that method.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def fewshot_context(
        self,
        doc: dict[str, Any],
        num_fewshot: int,
        system_instruction: str | None = None,
        apply_chat_template: bool = False,
        fewshot_as_multiturn: bool = False,
        chat_template: Callable[..., str] | None = None,
        gen_prefix: str | None = None,
    ) -> str:
        """The prompt of one document. Raises InputError without a chat template: there is nowhere to put the tools."""
        model = _owner(chat_template) if apply_chat_template else None
        if model is None:
            raise InputError(
                f"task {self.config.task}: needs a chat template, which is what shows the tools to the model"
            )
        if num_fewshot:
            raise InputError(f"task {self.config.task}: has no few-shot form; leave num_fewshot at 0")
        messages = [{"role": "user", "content": self.doc_to_text(doc)}]
        if system_instruction:
            messages.insert(0, {"role": "system", "content": system_instruction})
        return str(
            model.tokenizer.apply_chat_template(
                messages,
                tools=json.loads(doc["tools"]),
                tokenize=False,
                add_generation_prompt=True,
                **getattr(model, "chat_template_args", {}),
            )
        )


def _owner(chat_template: Callable[..., str] | None) -> Any:
    """The model object whose method `chat_template` is; None if it has no tokenizer."""
    while isinstance(chat_template, functools.partial):
        chat_template = chat_template.func
    owner = getattr(chat_template, "__self__", None)
    return owner if getattr(owner, "tokenizer", None) is not None else None
