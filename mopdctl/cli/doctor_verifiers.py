"""`mopdctl doctor verifiers`."""

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mopdctl.cli.options import JsonOption
from mopdctl.cli.output import Progress, result, result_json
from mopdctl.errors import CheckFailedError, InputError

if TYPE_CHECKING:
    from mopdctl.verifiers import Attempt, Verdict

_SUFFIX = "_test.jsonl"
_SHOWN = 3
"""Failures of a task that the table spells out."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One answer that its verifier did not judge as it should."""

    line: int
    """In the file of documents, from 1."""
    kind: str
    """`gold` refused, `wrong` or `empty` accepted, `unusable` document, or `unsteady`: two checks, two verdicts."""
    answer: str
    state: str
    reward: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What the verifiers of one task make of the answers in its documents."""

    task: str
    verifiers: tuple[str, ...]
    """`name/version`."""
    documents: int
    gold: int
    """Gold answers, one a document; as many empty ones are tried."""
    wrong: int
    """Answers that are known to be wrong."""
    duplicates: int
    """Documents whose prompt, conversation and tools included, an earlier one has."""
    failures: tuple[Failure, ...]


def verifiers(
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help="A task of this package; may be repeated. Default: all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that verifiers tell right answers from nearly right ones, on the documents of the tasks.

    \b
      mopdctl doctor verifiers
      mopdctl doctor verifiers --task errands --task tools --json

    Every document brings its gold answer, which has to score 1, and wrong ones made by a rule, which have to score 0 or
    be refused as unreadable, as an empty answer has to. Each is checked twice, and both verdicts have to be the same.
    Prompts that stand there twice are counted. Ends with exit code 3 if a verifier is wrong.
    """
    from mopdctl.runs import shipped

    folder = shipped("sample_data")
    names = _chosen(tasks or [], sorted(path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")))
    progress = Progress("tasks", len(names))
    reports = []
    for number, name in enumerate(names, start=1):
        reports.append(check_task(name, folder / f"{name}{_SUFFIX}"))
        progress.update(number, name)
    if as_json:
        result_json({"tasks": [asdict(report) for report in reports]})
    else:
        result(_table(reports))
    if failed := [report.task for report in reports if report.failures]:
        raise CheckFailedError(f"verifiers judge wrongly in {', '.join(failed)}; the failures are above")


def _chosen(asked: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise InputError(f"--task {name}: has no documents here; did you mean {near[0]!r}?")
    return list(dict.fromkeys(asked)) or list(known)


def check_task(task: str, path: Path) -> TaskReport:
    """Holds the verifiers of a task's documents against their answers. Raises InputError for a file of another form."""
    from mopdctl.files import read_jsonl
    from mopdctl.verifiers import VERIFIERS

    expected: list[tuple[int, str]] = []
    checks: list[tuple[str, Attempt]] = []
    prompts: Counter[str] = Counter()
    for line, row in read_jsonl(path):
        attempts = _attempts(row, f"{path}:{line}")
        prompt = attempts[0][1]
        prompts[json.dumps([prompt.messages, prompt.tools])] += 1
        expected += [(line, kind) for kind, _ in attempts]
        checks += [(row["verifier"], attempt) for _, attempt in attempts]
    first, second = (_verdicts(checks) for _ in range(2))
    failures = [
        Failure(line, fault, attempt.response, verdict.state.value, verdict.reward, verdict.detail)
        for (line, kind), (_, attempt), verdict, again in zip(expected, checks, first, second, strict=True)
        if (fault := _fault(kind, verdict, again))
    ]
    kinds = Counter(kind for _, kind in expected)
    used = sorted({name for name, _ in checks})
    return TaskReport(
        task,
        tuple(f"{name}/{VERIFIERS[name].version}" for name in used),
        documents=prompts.total(),
        gold=kinds["gold"],
        wrong=kinds["wrong"],
        duplicates=prompts.total() - len(prompts),
        failures=tuple(failures),
    )


def _attempts(row: dict[str, Any], place: str) -> "list[tuple[str, Attempt]]":
    """The answers of one document, each with what it is: `gold`, `wrong` or `empty`."""
    from mopdctl.verifiers import VERIFIERS, Attempt

    try:
        reference = json.loads(row["reference"])
        tools = tuple(json.loads(row["tools"])) if row["tools"] else None
        user = {"role": "user", "content": row["prompt"]}
        messages = tuple(json.loads(row["messages"])) if row.get("messages") else (user,)
        answers = [("gold", row["target"]), *(("wrong", text) for text in row["wrong"]), ("empty", "")]
        known = row["verifier"] in VERIFIERS
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place}: not a test document ({type(error).__name__}: {error}); write it anew") from None
    if not known:
        raise InputError(f"{place}: unknown verifier {row['verifier']!r}; known: {', '.join(VERIFIERS)}")
    return [(kind, Attempt(text, reference, messages, tools)) for kind, text in answers]


def _verdicts(checks: "Sequence[tuple[str, Attempt]]") -> "list[Verdict]":
    """Verdicts in order; verifiers that may hang run in workers that can be killed."""
    from mopdctl.verifiers import VERIFIERS
    from mopdctl.verifiers.registry import run_check

    found = {i: run_check(VERIFIERS[name], a) for i, (name, a) in enumerate(checks) if not VERIFIERS[name].isolated}
    rest = [i for i in range(len(checks)) if i not in found]
    if rest:
        from mopdctl.verifiers import VerifierPool

        with VerifierPool() as pool:
            found |= zip(rest, pool.check([checks[i] for i in rest]), strict=True)
    return [found[i] for i in range(len(checks))]


def _fault(kind: str, verdict: "Verdict", again: "Verdict") -> str:
    """What is wrong with the two verdicts on an answer of this kind; empty if nothing is."""
    from mopdctl.verifiers import VerdictState

    if verdict != again:
        return "unsteady"
    if verdict.state in (VerdictState.INVALID_REFERENCE, VerdictState.INFRA_ERROR):
        return "unusable"
    right = verdict.reward == 1 if kind == "gold" else verdict.reward in (0, None)
    return "" if right else kind


def _table(reports: Sequence[TaskReport]) -> str:
    lines = [
        f"{'task':<14} {'verifier':<18} {'documents':>9} {'gold right':>12} {'wrong refused':>15} {'empty refused':>15}"
        f" {'other faults':>13} {'duplicates':>11}"
    ]
    for report in reports:
        faults = Counter(failure.kind for failure in report.failures)
        shares = {
            kind: f"{total - faults.pop(kind, 0)}/{total}"
            for kind, total in {"gold": report.gold, "wrong": report.wrong, "empty": report.documents}.items()
        }
        lines.append(
            f"{report.task:<14} {', '.join(report.verifiers):<18} {report.documents:>9} {shares['gold']:>12}"
            f" {shares['wrong']:>15} {shares['empty']:>15} {faults.total():>13} {report.duplicates:>11}"
        )
    for report in reports:
        for failure in report.failures[:_SHOWN]:
            said = failure.state if failure.reward is None else f"reward {failure.reward:g}"
            answer = f"{failure.answer[:60]!r}: {said}{failure.detail and f' ({failure.detail[:60]})'}"
            lines.append(f"{report.task} line {failure.line}, {failure.kind}: {answer}")
        if len(report.failures) > _SHOWN:
            lines.append(f"{report.task}: {len(report.failures) - _SHOWN} more, all in --json")
    return "\n".join(lines)
