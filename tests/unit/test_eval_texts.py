"""The test questions of lm-eval tasks as text."""

import json
from pathlib import Path

import pytest

from mopdctl.errors import InputError
from mopdctl.evals.texts import task_documents
from mopdctl.gensft.decontaminate import report, scan
from mopdctl.gensft.question_index import build_index
from mopdctl.gensft.question_parts import Document
from mopdctl.runs import shipped

DOMAINS = ["arithmetic", "instructions", "lookup", "structured", "tools"]

DATA = """
from datasets import Dataset

def load(*, split, rows, **_):
    return {split: Dataset.from_list(rows), "train": Dataset.from_list([{**rows[0], "question": "never asked"}])}
"""
TASK = """
task: {name}
custom_dataset: !function data.load
dataset_kwargs: {kwargs}
training_split: train
{split}_split: {split}
{more}
"""
ROWS = [
    {
        "question": "Which gas do plants take in?",
        "options": ["Oxygen", "Carbon dioxide"],
        "gold": 1,
        "also": ["CO2", "c"],
    },
    {"question": "Which planet is red?", "options": ["Mars", "Venus"], "gold": 0, "also": ["Mars", "m"]},
]


def write_task(folder: Path, name: str, more: str, *, split: str = "test") -> None:
    (folder / "data.py").write_text(DATA)
    kwargs = json.dumps({"split": split, "rows": ROWS})
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, kwargs=kwargs, split=split, more=more))


def test_our_own_tasks_give_all_their_documents_in_order() -> None:
    expected = [
        (domain, str(number), row["prompt"], row["target"])
        for domain in DOMAINS
        for number, row in enumerate(
            json.loads(line)
            for line in (shipped("sample_data") / f"{domain}_test.jsonl").read_text("utf-8").splitlines()
        )
    ]
    assert list(task_documents(DOMAINS, shipped("tasks"))) == expected
    assert len(expected) == 2500


def test_a_question_of_our_own_tasks_is_found_in_a_row_and_those_that_are_too_short_are_counted() -> None:
    documents = [Document(*found) for found in task_documents(DOMAINS, shipped("tasks"))]
    index = build_index(documents, allow=())
    structured = next(d for d in documents if d.benchmark == "structured" and d.text.count("=") > 5)
    found = list(scan([(0, "a", [f"Please: {structured.text}"]), (1, "b", ["JSON: city=nowhere"])], index))
    assert {(hit.row, hit.benchmark, hit.document_id) for hit in found} == {(0, "structured", structured.document_id)}
    counts = report(found, index)["benchmarks"]
    assert (counts["arithmetic"]["documents"], counts["arithmetic"]["too_short"]) == (500, 500)
    assert all(c["documents"] == c["indexed"] + c["too_short"] + c["without_evidence"] for c in counts.values())


def test_choices_that_the_question_does_not_name_follow_it_and_the_answer_is_the_right_one(tmp_path: Path) -> None:
    more = "output_type: multiple_choice\ndoc_to_text: 'Q: {{question}}'\ndoc_to_choice: options\ndoc_to_target: gold"
    write_task(tmp_path, "bare", more)
    write_task(tmp_path, "named", more.replace("{{question}}", "{{question}} {{options[1]}} or {{options[0]}}?"))
    assert list(task_documents(["bare", "named"], tmp_path)) == [
        ("bare", "0", "Q: Which gas do plants take in?\nA. Oxygen\nB. Carbon dioxide", "Carbon dioxide"),
        ("bare", "1", "Q: Which planet is red?\nA. Mars\nB. Venus", "Mars"),
        ("named", "0", "Q: Which gas do plants take in? Carbon dioxide or Oxygen?", "Carbon dioxide"),
        ("named", "1", "Q: Which planet is red? Venus or Mars?", "Mars"),
    ]


def test_validation_documents_stand_in_where_a_task_has_no_test_split_and_answers_may_be_several(
    tmp_path: Path,
) -> None:
    more = "output_type: generate_until\ndoc_to_text: question\ndoc_to_target: also\ngeneration_kwargs: {until: ['.']}"
    write_task(tmp_path, "open", more, split="validation")
    assert list(task_documents(["open"], tmp_path)) == [
        ("open", "0", "Which gas do plants take in?", "CO2\nc"),
        ("open", "1", "Which planet is red?", "Mars\nm"),
    ]


def test_a_question_that_is_the_choice_is_the_right_one_with_what_follows(tmp_path: Path) -> None:
    more = "output_type: multiple_choice\ndoc_to_text: gold\ndoc_to_choice: options\ndoc_to_target: 'is what it is.'"
    write_task(tmp_path, "gap", more.replace("doc_to_text: gold", "doc_to_text: '{{gold}}'"))
    assert list(task_documents(["gap"], tmp_path)) == [
        ("gap", "0", "Carbon dioxide is what it is.", "is what it is."),
        ("gap", "1", "Mars is what it is.", "is what it is."),
    ]


def test_a_folder_that_is_not_there_is_refused_before_the_first_document_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: no such folder of tasks"):
        task_documents(["arithmetic"], tmp_path / "none")
