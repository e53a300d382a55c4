"""What the task files of this folder call: documents, prompts that show tools, and scoring."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from mopdctl.errors import InputError
from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState, verify
from mopdctl.verifiers.registry import run_check

# Beside `tasks`, in a checkout as in an installed package; never looked for from the working directory.
DOCUMENTS = Path(__file__).resolve().parent.parent / "sample_data"


def load_documents(*, domain: str, **_: Any) -> dict[str, Dataset]:
    """The test documents of a domain. The harness also passes the task's metadata, which does not matter here."""
    lines = (DOCUMENTS / f"{domain}_test.jsonl").read_text("utf-8").split("\n")
    return {"test": Dataset.from_list([json.loads(line) for line in lines if line])}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The reward of one response; a response that cannot be parsed counts as wrong."""
    verdict = _verdict(doc, results[0])
    return {"exact_match": 0.0 if verdict.reward is None else verdict.reward}


def process_abstention(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the answer is right, and whether it is at least not wrong."""
    verdict = _verdict(doc, results[0])
    right = verdict.reward == 1.0
    return {"exact_match": float(right), "non_hallucination": float(right or verdict.label == "abstained")}


def _verdict(doc: dict[str, Any], response: str) -> Verdict:
    """Raises InputError for an unusable document: that is no fault of the model and must not become its score."""
    verifier, reference = VERIFIERS[doc["verifier"]], json.loads(doc["reference"])
    if verifier.isolated:
        verdict = verify(verifier.name, response, reference)
    else:
        tools = tuple(json.loads(doc["tools"])) if doc["tools"] else None
        verdict = run_check(verifier, Attempt(response, reference, tuple(ConversationTask.messages(doc)), tools))
    if verdict.state in (VerdictState.INVALID_REFERENCE, VerdictState.INFRA_ERROR):
        raise InputError(f"document with prompt {doc['prompt']!r}: unusable reference ({verdict.detail})")
    return verdict


class ConversationTask(ConfigurableTask):  # type: ignore[misc]
    """A task whose documents bring their own tools, some also the conversation so far; the chat template writes both.

    The harness renders prompts through `apply_chat_template(messages)` of its model object, which takes no tools; so
    this goes to the tokenizer behind that method.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    @staticmethod
    def messages(doc: dict[str, Any]) -> list[dict[str, Any]]:
        """What a document asks to go on with: its `messages`, or its prompt alone.

        It stands in this class because the fingerprint of a task's prompts covers the source of the class.
        """
        return json.loads(doc["messages"]) if doc.get("messages") else [{"role": "user", "content": doc["prompt"]}]

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
        messages = self.messages(doc)
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
