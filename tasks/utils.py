"""What the task files of this folder call: documents and scoring."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from mopdctl.errors import InputError
from mopdctl.verifiers import VerdictState, verify

# Beside `tasks`, in a checkout as in an installed package; never looked for from the working directory.
DOCUMENTS = Path(__file__).resolve().parent.parent / "sample_data"


def load_documents(*, domain: str, **_: Any) -> dict[str, Dataset]:
    """The test documents of a domain. The harness also passes the task's metadata, which does not matter here."""
    lines = (DOCUMENTS / f"{domain}_test.jsonl").read_text("utf-8").split("\n")
    return {"test": Dataset.from_list([json.loads(line) for line in lines if line])}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The reward of one response; a response that cannot be parsed counts as wrong.

    Raises InputError for an unusable document: that is no fault of the model and must not become its score.
    """
    verdict = verify(doc["verifier"], results[0], json.loads(doc["reference"]))
    if verdict.state is VerdictState.INVALID_REFERENCE:
        raise InputError(f"document with prompt {doc['prompt']!r}: unusable reference ({verdict.detail})")
    return {"exact_match": 0.0 if verdict.reward is None else verdict.reward}
