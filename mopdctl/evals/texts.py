"""The test questions of lm-eval tasks as plain text, for the decontamination of training data."""

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mopdctl.evals.harness import load_tasks


def task_documents(tasks: list[str], include: Path) -> Iterator[tuple[str, str, str, str]]:
    """The test documents of tasks, groups and tags, else their validation documents: (task, id, question, answer).

    The id is lm-eval's `doc_id`. The question is the text before the model's answer, without examples and chat
    template, followed by the choices as lines "A. ..." where it does not name them itself. Where lm-eval compares
    questions that differ in one place (Winogrande), it is the right one with what follows. Several right answers are
    lines of one text. Tasks are looked for in the folder `include` first; errors are those of `load_tasks`, raised at
    once.
    """
    loaded = load_tasks(tasks, [include])
    return (
        (name, str(number), *_texts(task, doc))
        for entry in loaded
        for name, task in entry.tasks.items()
        for number, doc in enumerate(task.eval_docs)
    )


def _texts(task: Any, doc: dict[str, Any]) -> tuple[str, str]:
    text, target = task.doc_to_text(doc), task.doc_to_target(doc)
    choices = [] if task.config.doc_to_choice is None else [str(choice) for choice in task.doc_to_choice(doc)]
    targets = target if isinstance(target, list) else [target]
    if isinstance(text, int):  # the number of the right one
        return f"{choices[text]} {target}", str(target)
    answer = "\n".join(choices[each] if isinstance(each, int) and choices else str(each) for each in targets)
    if all(choice in text for choice in choices):
        return text, answer
    # Those after the 26th get no letter.
    lines = [f"{string.ascii_uppercase[number : number + 1]}. {choice}" for number, choice in enumerate(choices)]
    return "\n".join([text, *lines]), answer
