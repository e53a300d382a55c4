"""How long the answers of an evaluation are, from the samples that lm-eval left beside its scores."""

import re
from pathlib import Path
from typing import Any

from mopdctl.files import read_jsonl


def answer_lengths(folder: Path, task: str, filter_name: str | None) -> dict[str, float] | None:
    """Document to the length of its answer in characters, the mean where a document was answered several times.

    Documents have the names of `scores.Evaluation.samples`. None where the task has no generated answers (it weighs
    given ones), or the evaluation in `folder` holds none: a group of tasks, or scores that came without samples.
    """
    files = [path for path in (folder / "lm_eval").glob("samples_*.jsonl") if _is_of(path, task)]
    if len(files) != 1:
        return None
    found: dict[str, float] = {}
    seen: dict[str, int] = {}
    for _, row in read_jsonl(files[0]):
        if filter_name is not None and row.get("filter") != filter_name:
            continue
        answers = [text for answer in row.get("resps") or () for text in answer]
        if not _generated(row) or not answers or not all(isinstance(text, str) for text in answers):
            return None
        document = str(row.get("doc_hash"))
        ordinal = seen.get(document, 0)
        seen[document] = ordinal + 1
        found[f"{document}#{ordinal}" if ordinal else document] = sum(map(len, answers)) / len(answers)
    return found or None


def _is_of(path: Path, task: str) -> bool:
    """Whether a file is `samples_TASK_DATE.jsonl`: a glob would also find those of TASK_more."""
    return re.fullmatch(rf"samples_{re.escape(task)}_\d{{4}}-\d\d-\d\dT[^_]*\.jsonl", path.name) is not None


def _generated(row: dict[str, Any]) -> bool:
    """Whether the request gave settings for generation, where one of another kind gives the text to weigh, or none."""
    requests = row.get("arguments")
    first = next(iter(requests.values()), None) if isinstance(requests, dict) else None
    return isinstance(first, dict) and isinstance(first.get("arg_1"), dict)
