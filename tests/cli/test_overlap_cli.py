"""`overlap` on the command line: one JSON document, nothing sampled twice, nothing written by a dry run."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from mopdctl.files import write_json, write_jsonl
from mopdctl.store.store import Store

Cli = Callable[..., SimpleNamespace]
Document = Callable[..., dict[str, Any]]
NUMBERS = ("figures", "by_prefix", "student", "teacher", "tokens", "advice")


@pytest.fixture
def teachers_file(tmp_path: Path, tiny: Path, teachers_document: Document) -> Path:
    """One teacher is the student itself."""
    document = teachers_document()
    document["teachers"]["tools"] |= {"model": document["student"], "kind": "self"}
    write_json(tmp_path / "teachers.yaml", document)
    return tmp_path / "teachers.yaml"


@pytest.fixture
def arguments(teachers_file: Path, tmp_path: Path) -> list[Any]:
    place = ["--teachers", teachers_file, "--workspace", tmp_path / "ws"]
    return ["overlap", *place, "--samples", 2, "--limit", 3, "--top-k", 8]


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text("utf-8"))
    change(document)
    write_json(path, document)


def answers(tmp_path: Path, name: str = "student") -> dict[str, list[int]]:
    return {s.sample_id: s.tokens.tolist() for s in Store(tmp_path / "ws" / "rollouts" / f"overlap-{name}").scan()}


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


def test_a_report_measures_every_teacher_on_its_own_prompts(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    plot = tmp_path / "overlap.svg"
    done = cli(*arguments, "--json", "--plot", plot)
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)  # exactly one document
    assert json.loads((tmp_path / "ws" / "runs" / "overlap" / "student.json").read_text("utf-8")) == report
    assert report["rollouts"] == {"store": "overlap-student", "answers": 18, "new": 18}
    assert list(report["teachers"]) == ["arithmetic", "structured", "tools"]
    for one in report["teachers"].values():
        assert (one["prompts"], one["answers"]) == (3, 6)
        assert sum(found["tokens"] for found in one["by_prefix"]) == one["tokens"]
        assert all(0 <= found["mean"] <= 1 for name, found in one["figures"].items() if name.endswith("share"))
    # the one that is the student differs by nothing, the others by something
    same, other = report["teachers"]["tools"]["figures"], report["teachers"]["arithmetic"]["figures"]
    assert (same["kl_reverse_nats"]["mean"], same["advantage_nats"]["mean"], same["top_k_overlap"]["mean"]) == (0, 0, 1)
    assert same["student_mass"] == same["teacher_mass"]
    assert other["kl_reverse_nats"]["mean"] > 0.001
    zero = report["zero_test"]
    assert (zero["against"], zero["exact"], zero["tokens"]) == ("tools", True, report["teachers"]["tools"]["tokens"])
    assert (
        report["teachers"]["tools"]["student"]["greedy_score"]
        == (report["teachers"]["tools"]["teacher"]["greedy_score"])
    )
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.slow
def test_a_second_look_samples_nothing_and_more_prompts_go_on_from_the_fewer(
    cli: Cli, arguments: list[Any], tmp_path: Path, teachers_file: Path
) -> None:
    first = json.loads(cli(*arguments, "--json").stdout)
    before = answers(tmp_path)
    again = json.loads(cli(*arguments, "--json").stdout)
    assert again["rollouts"] == {"store": "overlap-student", "answers": 18, "new": 0}
    assert again["teachers"] == first["teachers"]
    assert answers(tmp_path) == before
    # other teachers see the same answers
    edit(teachers_file, lambda d: d["teachers"]["tools"].update(model=d["teachers"]["arithmetic"]["model"]))
    moved = json.loads(cli(*arguments, "--json").stdout)
    assert moved["rollouts"]["new"] == 0
    assert moved["zero_test"]["against"] == "itself"
    assert moved["teachers"]["arithmetic"] == first["teachers"]["arithmetic"]
    assert moved["teachers"]["tools"]["figures"]["kl_reverse_nats"]["mean"] > 0
    # one more prompt of each teacher, one more answer to each prompt
    more = json.loads(cli(*arguments, "--json", "--limit", 4, "--samples", 3).stdout)
    assert (more["rollouts"]["answers"], more["rollouts"]["new"]) == (36, 18)
    assert before.items() <= answers(tmp_path).items()


@pytest.mark.slow
def test_batches_change_nothing_but_rounding(cli: Cli, arguments: list[Any]) -> None:
    one = json.loads(cli(*arguments, "--json").stdout)
    other = json.loads(cli(*arguments, "--json", "--set", "train.sampling_batch_size=2").stdout)
    assert other["rollouts"]["new"] == 0
    for alias in one["teachers"]:
        pair = [list(numbers({n: report["teachers"][alias][n] for n in NUMBERS})) for report in (one, other)]
        assert pair[1] == pytest.approx(pair[0], abs=1e-4)


@pytest.mark.slow
def test_candidates_are_ranked_beside_the_teacher_of_the_domain(
    cli: Cli, arguments: list[Any], tiny: Path, tmp_path: Path
) -> None:
    models = f"same={tiny / 'models' / 'student'},other={tiny / 'models' / 'structured'}"
    asked = [*arguments, "--domain", "arithmetic", "--candidates", models]
    done = cli(*asked, "--json")
    assert done.code == 0, done.stderr
    assert done.stderr.count("comparing the student with") == 3  # each checkpoint is loaded once
    found = json.loads(done.stdout)["candidates"]
    assert found["domain"] == "arithmetic"
    assert set(found["models"]) == {"arithmetic", "same", "other"}
    assert next(iter(found["models"])) == "same"  # nobody is nearer to the student than itself
    assert [one["support_rank"] for one in found["models"].values()] == [1, 2, 3]
    assert all(one["score_rank"] for one in found["models"].values())
    assert found["models"]["arithmetic"] | {"support_rank": 0} == (
        json.loads((tmp_path / "ws" / "runs" / "overlap" / "student.json").read_text("utf-8"))["teachers"]["arithmetic"]
        | {"support_rank": 0, "score_rank": found["models"]["arithmetic"]["score_rank"]}
    )
    shown = cli(*asked).stdout
    assert "candidates for domain arithmetic" in shown
    assert "score rank" in shown


def test_prompts_without_verifiers_are_measured_without_scores(
    cli: Cli, arguments: list[Any], tiny: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text("utf-8").splitlines()]
    bare = [{k: v for k, v in row.items() if k not in ("verifier", "reference", "environment")} for row in rows]
    write_jsonl(tmp_path / "bare.jsonl", bare)
    asked = [*arguments, "--json", "--prompts", tmp_path / "bare.jsonl", "--name", "bare"]
    done = cli(*asked)
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    one = report["teachers"]["arithmetic"]
    assert one["student"]["pass_at_1"] is None
    assert one["student"]["reason"] == "no prompt names a verifier"
    assert one["teacher"]["greedy_score"] is None
    before = answers(tmp_path, "bare")
    again = json.loads(cli(*asked).stdout)
    assert (report["rollouts"]["new"], again["rollouts"]["new"]) == (18, 0)
    assert (again["teachers"], answers(tmp_path, "bare")) == (report["teachers"], before)


def test_a_black_box_is_named_but_not_measured(cli: Cli, arguments: list[Any], teachers_file: Path) -> None:
    box = {"gives": "answers", "answers": "answers.jsonl", "domains": ["tools"]}
    edit(teachers_file, lambda d: d["teachers"].update(tools=box))
    report = json.loads(cli(*arguments, "--json").stdout)
    assert list(report["teachers"]) == ["arithmetic", "structured"]
    assert report["not_measured"] == {"tools": "gives answers, no probabilities"}
    assert report["rollouts"]["answers"] == 12


def test_a_dry_run_checks_and_writes_nothing(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    done = cli(*arguments, "--dry-run", "--json", "--plot", tmp_path / "o.svg")
    plan = json.loads(done.stdout)
    assert (plan["name"], plan["answers"]) == ("student", 18)
    assert plan["prompts_per_teacher"] == {"arithmetic": 3, "structured": 3, "tools": 3}
    assert not (tmp_path / "ws").exists()
    assert not (tmp_path / "o.svg").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--plot", "overlap.png"], "only SVG is drawn"),
        (["--domain", "tools"], "--domain: has no meaning without --candidates"),
        (["--candidates", "a=b"], "say for which domain with --domain"),
        (["--candidates", "a=nowhere", "--domain", "tools"], "teacher 'a': model 'nowhere': neither a folder"),
        (["--student", "nowhere"], "model 'nowhere': neither a folder"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--name", "../up"], "name '../up'"),
        (["--set", "train.max_new_tokens=1000"], "do not fit into the model's context"),
        (["--top-k", "100000"], "--top-k 100000: the student's vocabulary has"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, arguments: list[Any], extra: list[str], message: str, tmp_path: Path) -> None:
    done = cli(*arguments, *extra)
    assert (done.code, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (tmp_path / "ws").exists()


@pytest.mark.slow
def test_answers_of_another_student_are_not_taken_for_its_own(
    cli: Cli, arguments: list[Any], tiny: Path, tmp_path: Path
) -> None:
    assert cli(*arguments, "--name", "mine").code == 0
    done = cli(*arguments, "--name", "mine", "--student", tiny / "models" / "arithmetic")
    assert done.code == 2
    assert "was begun with another configuration (student was " in done.stderr


def test_a_teacher_with_another_tokenizer_is_refused(
    cli: Cli, arguments: list[Any], teachers_file: Path, tiny: Path, tmp_path: Path
) -> None:  # open-instruct #1847: a permuted vocabulary of the same size
    import shutil

    shutil.copytree(tiny / "models" / "arithmetic", tmp_path / "permuted")
    path = tmp_path / "permuted" / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["b"], vocabulary["d"] = vocabulary["d"], vocabulary["b"]
    path.write_text(json.dumps(tokenizer), "utf-8")
    edit(teachers_file, lambda d: d["teachers"]["arithmetic"].update(model="permuted"))
    done = cli(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert "teacher 'arithmetic' (permuted): differs from the student in vocabulary" in done.stderr
    assert not (tmp_path / "ws" / "rollouts").exists()  # before anything is sampled
