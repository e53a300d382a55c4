"""`mopdctl doctor verifiers` passes on our own documents, and finds a verifier that is too kind, strict or unsteady."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mopdctl.cli.doctor_verifiers import check_task
from mopdctl.errors import InputError
from mopdctl.files import write_jsonl
from mopdctl.verifiers.base import Attempt, Outcome, ParseError, Verifier
from mopdctl.verifiers.registry import VERIFIERS

ROW = {
    "prompt": "Say a",
    "tools": "",
    "target": "a",
    "verifier": "exact_match",
    "reference": '{"answer": "a"}',
    "wrong": ["A", "a b"],
}


def documents(folder: Path, *changes: dict[str, Any]) -> Path:
    write_jsonl(folder / "own_test.jsonl", [ROW | change for change in changes or ({},)])
    return folder / "own_test.jsonl"


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(name: str, check: Callable[[Attempt], Outcome]) -> None:
        monkeypatch.setitem(VERIFIERS, name, Verifier(name, 1, check))

    return put


@pytest.mark.slow
def test_every_task_of_the_package_passes(cli: Callable[..., Any]) -> None:
    done = cli("doctor", "verifiers", "--json")
    assert done.code == 0, done.stdout
    tasks = {report["task"]: report for report in json.loads(done.stdout)["tasks"]}
    assert set(tasks) == {"arithmetic", "instructions", "structured", "tools", "lookup", "errands"}
    for report in tasks.values():
        assert (report["documents"], report["gold"], report["failures"], report["duplicates"]) == (500, 500, [], 0)
        assert report["wrong"] >= 2500


@pytest.mark.parametrize(
    ("check", "kinds"),
    [
        (lambda attempt: Outcome(1.0), {"wrong", "empty"}),
        (lambda attempt: Outcome(0.0), {"gold"}),
        (lambda attempt: Outcome(0.5), {"gold", "wrong", "empty"}),
        (lambda attempt: Outcome(float("A" not in attempt.response)), {"wrong", "empty"}),
        (lambda attempt: 1 / 0, {"unusable"}),
    ],
)
def test_a_broken_verifier_is_found(tmp_path: Path, replace: Any, check: Any, kinds: set[str]) -> None:
    replace("exact_match", check)
    assert {failure.kind for failure in check_task("own", documents(tmp_path)).failures} == kinds


def test_a_wrong_answer_may_be_unreadable_but_a_gold_one_may_not(tmp_path: Path, replace: Any) -> None:
    def picky(attempt: Attempt) -> Outcome:
        if attempt.response != "a":
            raise ParseError("not a")
        return Outcome(1.0)

    replace("exact_match", picky)
    assert check_task("own", documents(tmp_path)).failures == ()
    (failure,) = check_task("own", documents(tmp_path, {"target": "b"})).failures
    assert (failure.line, failure.kind, failure.state, failure.reward) == (1, "gold", "parse_error", None)


def test_a_verdict_that_changes_from_one_check_to_the_next_is_found(tmp_path: Path, replace: Any) -> None:
    times = count()
    replace("exact_match", lambda attempt: Outcome(float(attempt.response == "a"), str(next(times))))
    found = check_task("own", documents(tmp_path)).failures
    assert [failure.kind for failure in found] == ["unsteady"] * 4


def test_prompts_that_stand_there_twice_are_counted_and_other_conversations_are_not(tmp_path: Path) -> None:
    later = json.dumps([{"role": "user", "content": "Say a"}, {"role": "assistant", "content": "b"}])
    report = check_task("own", documents(tmp_path, {}, {}, {"messages": later}, {"prompt": "Say a!"}))
    assert (report.documents, report.duplicates, report.wrong, report.failures) == (4, 1, 8, ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wrong": None}, "not a test document"),
        ({"reference": "{"}, "not a test document"),
        ({"verifier": "exactly"}, "unknown verifier 'exactly'"),
    ],
)
def test_unusable_documents_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"own_test.jsonl:2: .*{said}"):
        check_task("own", documents(tmp_path, {}, change))


def test_the_table_shows_failures_and_the_exit_code_is_three(cli: Callable[..., Any], replace: Any) -> None:
    replace("integer", lambda attempt: Outcome(1.0))
    done = cli("doctor", "verifiers", "--task", "arithmetic")
    assert done.code == 3
    header, row, *failures = done.stdout.splitlines()
    assert header.split()[:3] == ["task", "verifier", "documents"]
    assert row.split()[:4] == ["arithmetic", "integer/1", "500", "500/500"]
    assert failures[0].startswith("arithmetic line 1, wrong: ")
    assert "more, all in --json" in failures[-1]
    assert "judge wrongly in arithmetic" in done.stderr


def test_an_unknown_task_names_the_nearest(cli: Callable[..., Any]) -> None:
    done = cli("doctor", "verifiers", "--task", "errand")
    assert done.code == 2
    assert "did you mean 'errands'" in done.stderr
