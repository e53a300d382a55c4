import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from mopdctl.errors import InputError
from mopdctl.evals.csvtable import read_table
from mopdctl.evals.pairing import pair_evaluations
from mopdctl.evals.recovery import Entry, judge, recover
from mopdctl.evals.scores import read_scores, write_scores
from mopdctl.files import write_json
from mopdctl.records import Score
from mopdctl.runs import Workspace

IDENTITY = {"version": 1, "num_fewshot": 0, "prompt": "p", "generation": {}}

# ----------------------------------------------------------------------------------------------------- the plain CSV


def table(tmp_path: Path, text: str | bytes, **arguments: Any) -> list[Entry]:
    path = tmp_path / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_table(path, **({"before": "before", "after": "after", "teacher": "teacher"} | arguments))


def test_a_table_as_spreadsheets_write_it(tmp_path: Path) -> None:
    lines = [
        "# comment",
        "benchmark, before ,after,teacher,domain",
        "",
        '"A, ""b""",1.50,2,+3.,math',
        "#x",
        "B,,nan,4,",
        "",
    ]
    first, second = table(tmp_path, b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert (first.benchmark, first.domain, second.domain) == ('A, "b"', "math", None)
    assert [f.score for f in (first.before, first.after, first.teacher)] == [Decimal("1.50"), 2, 3]
    assert second.before.score is None
    assert second.after.score is not None
    assert second.after.score.is_nan()
    assert judge(second, min_gap=Decimal(1)).status == "missing"


def test_direction_by_argument_and_by_column(tmp_path: Path) -> None:
    text = "benchmark,before,after,teacher,higher_is_better\na,10,5,2,\nb,1,2,3,true\nc,3,2,1,false\n"
    entries = table(tmp_path, text, higher_is_better=False)
    assert [e.higher_is_better for e in entries] == [False, True, False]
    row = judge(entries[0], min_gap=Decimal(1))
    assert (row.gain, row.gap, row.after_minus_teacher, row.recovery_pct) == (5, 8, -3, Decimal("62.5"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("benchmark,befor,after,teacher\na,1,2,3\n", ":1: no column 'before'; did you mean 'befor'?"),
        ("benchmark,x,after,teacher\n", ":1: no column 'before'; columns: benchmark, x, after, teacher"),
        ("benchmark,before,before,after,teacher\n", ":1: two columns are named 'before'; rename one"),
        ("# c\nbenchmark,before,after,teacher\na,1,2,3\nb,1,high,3\n", ":4: column 'after' holds 'high', not a number"),
        ("benchmark,before,after,teacher\na,1_0,2,3\n", ":2: column 'before' holds '1_0', not a number"),
        ("benchmark,before,after,teacher\na,1e999999,2,3\n", ":2: column 'before' holds '1e999999', not a number"),
        ("benchmark,before,after,teacher\na,1,2\n", ":2: 3 cells where the header has 4"),
        ("benchmark,before,after,teacher\na,1,2,3\na,1,2,3\n", ":3: benchmark 'a' is also on line 2; keep one"),
        ("benchmark,before,after,teacher\n,1,2,3\n", ":2: the benchmark has no name"),
        ('benchmark,before,after,teacher\n"a,1,2,3\n', ":2: not CSV (unexpected end of data)"),
        ("benchmark,before,after,teacher\n", ": holds no rows"),
        ("", ": holds no rows"),
        ("benchmark,before,after,teacher,higher_is_better\na,1,2,3,up\n", ":2: higher_is_better is 'up'"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        table(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 't.csv'}{problem}")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------- scores.json, samples.jsonl


def score(benchmark: str, value: float | None, n: int, **changes: Any) -> Score:
    fields: dict[str, Any] = {
        "benchmark": benchmark,
        "metric": "acc",
        "filter": "none",
        "higher_is_better": True,
        "score": value,
        "stderr": None,
        "n": n,
        "reason": None,
        "identity": IDENTITY,
    }
    return Score(**(fields | changes))


def sample(benchmark: str, document: str, value: float | None, **changes: str) -> dict[str, Any]:
    return {"benchmark": benchmark, "metric": "acc", "filter": "none", "doc_hash": document, "value": value} | changes


def save(space: Workspace, name: str, right: dict[str, int], *, of: int = 50) -> None:
    """An evaluation in which the first documents of each benchmark are right."""
    scores = [score(benchmark, 100 * count / of, of) for benchmark, count in right.items()]
    samples = [sample(b, f"d{i}", 100.0 if i < count else 0.0) for b, count in right.items() for i in range(of)]
    write_scores(space.evaluation(name), name, scores, samples)


def test_scores_and_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    scores = [score("gsm8k", 62.5, 2, stderr=1.25), score("mmlu", None, 0, reason="no documents")]
    write_scores(tmp_path / "e", "e", scores, [sample("gsm8k", "x", 100), sample("gsm8k", "y", 25.0)])
    back = read_scores(tmp_path / "e")
    assert (back.name, back.scores) == ("e", tuple(scores))
    assert back.samples == {("gsm8k", "acc", "none"): {"x": 100.0, "y": 25.0}}
    first = (tmp_path / "e" / "scores.json").read_bytes()
    write_scores(tmp_path / "e", "e", scores, [])
    assert (tmp_path / "e" / "scores.json").read_bytes() == first
    assert json.loads(first)["schema"] == "mopdctl.scores/1"


def test_repeated_documents_get_ordinals_within_a_score(tmp_path: Path) -> None:
    samples = [sample("a", "x", 1), sample("a", "x", 2), sample("a", "x", 3, filter="strict"), sample("a", "x", 4)]
    write_scores(tmp_path / "e", "e", [], samples)
    assert read_scores(tmp_path / "e").samples == {
        ("a", "acc", "none"): {"x": 1, "x#1": 2, "x#2": 4},
        ("a", "acc", "strict"): {"x": 3},
    }


def test_non_finite_values_become_null_with_a_reason(tmp_path: Path) -> None:
    write_scores(tmp_path / "e", "e", [score("a", float("nan"), 1)], [sample("a", "x", float("inf"))])
    back = read_scores(tmp_path / "e")
    assert (back.scores[0].score, back.scores[0].reason) == (None, "not finite (nan)")
    assert back.samples == {("a", "acc", "none"): {"x": None}}


def test_a_failed_rewrite_leaves_no_finished_evaluation(tmp_path: Path) -> None:
    write_scores(tmp_path / "e", "e", [], [])
    with pytest.raises(KeyError):
        write_scores(tmp_path / "e", "e", [], [{"benchmark": "a"}])
    with pytest.raises(InputError, match=r"holds no scores\.json, so the evaluation did not finish"):
        read_scores(tmp_path / "e")


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("scores.json", "[]", "not a mopdctl.scores/1 file"),
        (
            "scores.json",
            '{"schema": "mopdctl.scores/1", "scores": [{}]}',
            "scores[0]: needs the keys benchmark, metric",
        ),
        ("samples.jsonl", '{"benchmark": "a"}\n', "samples.jsonl:1: needs the texts benchmark, metric"),
        (
            "samples.jsonl",
            json.dumps(sample("a", "x", 1)).replace("1}", '"1"}'),
            "samples.jsonl:1: value '1' is neither",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, text: str, problem: str) -> None:
    write_scores(tmp_path / "e", "e", [], [])
    (tmp_path / "e" / file).write_text(text)
    with pytest.raises(InputError) as caught:
        read_scores(tmp_path / "e")
    assert problem in str(caught.value)


def test_an_absent_evaluation_says_which_there_are(tmp_path: Path) -> None:
    save(Workspace(tmp_path), "rlvr", {"math": 10})
    with pytest.raises(InputError, match=r"evals/mopd: no evaluation of that name \(there are: rlvr\)"):
        read_scores(Workspace(tmp_path).evaluation("mopd"))


# --------------------------------------------------------------------------------------- teachers and their benchmarks


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    """A student before and after, two teachers and a merge; the card of `mopd` names the teachers."""
    found = Workspace(tmp_path / "ws")
    save(found, "rlvr", {"math": 10, "code": 20, "mmlu": 25})
    save(found, "mopd", {"math": 28, "code": 32, "mmlu": 24})
    save(found, "math-rl", {"math": 30})
    save(found, "code-rl", {"code": 40})
    save(found, "merge", {"math": 19, "code": 26, "mmlu": 25})
    card(found, {"math": teacher("math-rl", ["math"]), "code": teacher("code-rl", ["code"])})
    return found


def teacher(evaluation: str, domains: list[str], benchmarks: list[str] | None = None) -> dict[str, Any]:
    return {"model": "m", "kind": "rl", "domains": domains, "benchmarks": benchmarks or [], "eval": evaluation}


def card(space: Workspace, teachers: Any) -> None:
    write_json(space.checkpoint("mopd") / "card.json", {"teachers": teachers})


def test_rows_are_the_benchmarks_that_teachers_claim(space: Workspace) -> None:
    entries, notes = pair_evaluations(space, before="rlvr", after="mopd", controls=["merge"])
    result = recover(entries, control_names=["merge"], notes=notes)
    assert [(r.benchmark, r.domain, r.teacher_id, r.metric, r.n, r.status) for r in result.rows] == [
        ("math", "math", "math", "acc,none", 50, "ok"),
        ("code", "code", "code", "acc,none", 50, "ok"),
    ]
    assert [r.recovery_pct for r in result.rows] == [Decimal("90.0"), Decimal("60.0")]
    assert result.pooled.recovery_pct == Decimal("75.0")
    assert result.controls[0].recovery_pct == Decimal("37.5")  # (18 + 12) / (40 + 40)
    assert result.controls[0].after_minus_control == Decimal("15.00")
    assert result.notes == ("not claimed by a teacher: mmlu",)


def test_a_teacher_without_an_evaluation_gives_missing_rows(space: Workspace) -> None:
    card(space, {"math": teacher("math-rl", ["math"]), "lore": teacher("lore-rl", ["lore"], ["mmlu"])})
    entries, notes = pair_evaluations(space, before="rlvr", after="mopd")
    rows = recover(entries).rows
    assert [(r.benchmark, r.domain, r.status) for r in rows] == [("math", "math", "ok"), ("mmlu", "lore", "missing")]
    assert rows[1].note == f"teacher: no evaluation 'lore-rl' in {space.root}"
    assert rows[1].gain == Decimal(-2)
    assert notes == ["not claimed by a teacher: code"]


def test_a_claim_may_spell_out_metric_and_filter(space: Workspace) -> None:
    for name, strict, loose in [("rlvr", 10.0, 20.0), ("mopd", 30.0, 60.0), ("math-rl", 50.0, 70.0)]:
        scores = [score("math", strict, 50, filter="strict"), score("math", loose, 50, filter="loose")]
        write_scores(space.evaluation(name), name, scores, [])
    card(space, {"math": teacher("math-rl", ["math"], ["math", "math/acc,loose", "math/f1,none"])})
    rows = recover(pair_evaluations(space, before="rlvr", after="mopd")[0]).rows
    assert [(r.benchmark, r.metric, r.recovery_pct, r.status) for r in rows] == [
        ("math", "acc,strict", Decimal("50.0"), "ok"),
        ("math/acc,loose", "acc,loose", Decimal("80.0"), "ok"),
        ("math/f1,none", "f1,none", None, "missing"),
    ]
    assert (rows[2].note or "").startswith("before: no score in evaluation 'rlvr'")


def test_a_first_score_under_another_filter_is_a_mismatch(space: Workspace) -> None:
    write_scores(space.evaluation("math-rl"), "math-rl", [score("math", 60.0, 50, filter="strict")], [])
    rows = recover(pair_evaluations(space, before="rlvr", after="mopd")[0]).rows
    assert rows[0].status == "mismatch"
    assert (rows[0].note or "").startswith("differ: filter (before none, after none, teacher strict)")


def test_a_score_of_null_is_non_finite_and_keeps_its_reason(space: Workspace) -> None:
    lost = score("math", None, 50, reason="no answer could be parsed")
    write_scores(space.evaluation("math-rl"), "math-rl", [lost], [])
    row = recover(pair_evaluations(space, before="rlvr", after="mopd")[0]).rows[0]
    assert (row.status, row.note) == ("non_finite", "teacher: no answer could be parsed")


def test_lower_is_better_comes_from_the_evaluation(space: Workspace) -> None:
    for name, value in [("rlvr", 9.0), ("mopd", 6.0), ("math-rl", 5.0)]:
        write_scores(space.evaluation(name), name, [score("math", value, 50, higher_is_better=False)], [])
    row = recover(pair_evaluations(space, before="rlvr", after="mopd")[0]).rows[0]
    assert (row.gain, row.gap, row.after_minus_teacher, row.recovery_pct) == (3, 4, -1, Decimal("75.0"))


@pytest.mark.parametrize(
    ("teachers", "problem"),
    [
        (None, "names no teachers; pass --teachers FILE"),
        ({}, "names no teachers; pass --teachers FILE"),
        ({"math": {"model": "m"}}, "math needs a model and lists of domains and benchmarks"),
        (["math"], "teachers needs a model and lists"),
    ],
)
def test_a_card_without_usable_teachers(space: Workspace, teachers: Any, problem: str) -> None:
    card(space, teachers)
    with pytest.raises(InputError) as caught:
        pair_evaluations(space, before="rlvr", after="mopd")
    assert f"card.json: {problem}" in str(caught.value)


def test_teachers_from_a_file_are_found_by_model_name_or_alias(space: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "teachers.yaml"
    path.write_text(
        "student: rlvr\nprompts: p.jsonl\nname: mopd\n"
        "train: {steps: 1, seed: 0}\n"
        "teachers:\n"
        "  a: {model: math-rl, domains: [math]}\n"
        "  code-rl: {model: some/where, domains: [coding], benchmarks: [code]}\n"
    )
    entries, _ = pair_evaluations(space, before="rlvr", after="mopd", teachers=path)
    rows = recover(entries).rows
    assert [(r.teacher_id, r.benchmark, r.domain, r.status, str(r.recovery_pct)) for r in rows] == [
        ("a", "math", "math", "ok", "90.0"),
        ("code-rl", "code", "coding", "ok", "60.0"),
    ]
