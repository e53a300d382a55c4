"""A `teachers.yaml` as a committee: who answers which prompt, what is refused, and a data set of it from end to end."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from mopdctl.errors import InputError
from mopdctl.files import read_jsonl, write_json, write_jsonl
from mopdctl.gensft.from_teachers import prepare_from_teachers
from mopdctl.gensft.spec import Spec
from mopdctl.runs import Workspace

Document = Callable[..., dict[str, Any]]
Cli = Callable[..., SimpleNamespace]
ROWS = [
    {"id": f"{domain}/{i}", "prompt": f"{i} {domain[0]}", "domain": domain}
    for domain in ("arithmetic", "structured", "tools")
    for i in range(8)
]
# Random models write neither words nor sound markup.
LENIENT = ["filter.off=[repetition, control_tokens, tool_pairing]", "filter.min_words=0", "dedup.near=false"]


@pytest.fixture
def write(tmp_path: Path, teachers_document: Document) -> Callable[..., Path]:
    """Writes `teachers.yaml` beside `prompts.jsonl`; `train` goes into its `train`, `changes` over the whole."""

    def write(rows: list[dict[str, Any]] | None = None, *, train: dict[str, Any] | None = None, **changes: Any) -> Path:
        write_jsonl(tmp_path / "prompts.jsonl", ROWS if rows is None else rows)
        document = teachers_document("taught", **{"max_new_tokens": 30} | (train or {}))
        write_json(tmp_path / "teachers.yaml", document | {"prompts": "prompts.jsonl"} | changes)
        return tmp_path / "teachers.yaml"

    return write


def prepared(path: Path, *settings: str, **flags: Any) -> Spec:
    return prepare_from_teachers(path, Workspace(path.parent / "w"), flags=flags, settings=settings)


def test_each_domain_is_answered_by_its_one_teacher_alone_as_the_loop_would_sample(
    write: Callable[..., Path], tiny: Path
) -> None:
    spec = prepared(write(train={"temperature": 0.7, "seed": 3}))
    assert spec.committee.routes.keys() == {"arithmetic", "structured", "tools"}
    for domain, route in spec.committee.routes.items():
        assert route.members == {domain: 1}
        assert route.aliases == {domain}
        member = spec.committee.members[domain]
        assert (member.engine, member.model) == ("hf", str((tiny / "models" / domain).resolve()))
        assert member.sampling.body() == {"temperature": 0.7, "max_tokens": 30}
    assert (spec.config.name, spec.config.seed, str(spec.config.committee)) == ("taught", 3, "teachers.yaml")


def test_the_same_file_makes_the_same_record_and_other_settings_another(write: Callable[..., Path]) -> None:
    path = write()
    assert prepared(path).record == prepared(path).record
    assert prepared(path).record != prepared(path, samples=2).record
    assert "/tmp" not in json.dumps(prepared(path).record["config"])
    assert not (path.parent / "w").exists()


def test_a_name_in_the_workspace_stays_a_name(write: Callable[..., Path], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "w" / "checkpoints").mkdir(parents=True)
    (tmp_path / "w" / "checkpoints" / "mathematician").symlink_to(tiny / "models" / "arithmetic")
    teachers = {"math": {"model": "mathematician", "domains": ["arithmetic", "structured", "tools"]}}
    assert prepared(write(teachers=teachers)).committee.members["math"].model == "mathematician"


def test_only_what_a_verifier_passes_becomes_a_row_unless_told_otherwise(write: Callable[..., Path]) -> None:
    path = write()
    assert prepared(path).config.selection("tools").require_verified
    best = prepared(path, "select=[{strategy: best}]").config.selection("tools")
    assert (best.strategy, best.require_verified) == ("best", False)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            {"routing": ["domain", "effort"]},
            (),
            "routing is by domain, effort; gen-sft routes by the field 'domain' alone",
        ),
        ({"routing": "skill"}, (), "routing is by skill"),
        ({"prompts": "nothing.jsonl"}, (), "nothing.jsonl: no such file"),
        (
            {"rows": [*ROWS, {"prompt": "?", "domain": "law"}]},
            (),
            "prompts.jsonl:25: domain 'law': no teacher serves it",
        ),
        (
            {"rows": [{"prompt": "?", "domain": "tools", "environment": {"name": "errands"}}]},
            (),
            "prompts.jsonl:1: has a tool environment, and gen-sft asks for single answers",
        ),
        (
            {},
            ("filter.min_word=3",),
            "teachers.yaml as gen.yaml with command-line overrides: unknown key 'filter.min_word'",
        ),
        ({}, ("judges=[{members: [nobody]}]",), "teachers.yaml: judge 'nobody' is no member (has: arithmetic, "),
        ({}, ("committee=other.yaml",), "the committee are its teachers"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_its_place(
    write: Callable[..., Path], changes: dict[str, Any], settings: tuple[str, ...], message: str
) -> None:
    path = write(**changes)
    with pytest.raises(InputError) as caught:
        prepared(path, *settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("/tmp/tmp") == 0


def test_a_domain_of_two_teachers_and_a_model_that_is_not_there_are_refused(
    write: Callable[..., Path], tiny: Path
) -> None:
    model = str(tiny / "models" / "tools")
    two = {"a": {"model": model, "domains": ["tools"]}, "b": {"model": model, "domains": ["tools"]}}
    with pytest.raises(InputError, match="domain 'tools': teachers a and b both serve it"):
        prepared(write(teachers=two))
    with pytest.raises(InputError, match="teacher 'a': model 'nowhere': neither a folder, a hub id, nor a checkpoint"):
        prepared(write(teachers={"a": {"model": "nowhere", "domains": ["arithmetic", "structured", "tools"]}}))


@pytest.mark.parametrize("both", [False, True])
def test_neither_file_and_both_are_one_line(cli: Cli, tmp_path: Path, both: bool) -> None:
    given = ["--config", "gen.yaml", "--from-teachers", "teachers.yaml"] if both else []
    shown = cli("gen-sft", *given, "--workspace", tmp_path / "w")
    assert (shown.code, shown.stdout) == (2, "")
    assert shown.stderr == "error: give one of --config gen.yaml and --from-teachers teachers.yaml\n"


def rows_of(workspace: Path, name: str) -> list[dict[str, Any]]:
    return pl.read_parquet(workspace / "datasets" / name / "data" / "*.parquet").to_dicts()


def test_the_teachers_write_a_data_set_with_its_provenance_and_wrong_answers_stay_out(
    cli: Cli, write: Callable[..., Path], tiny: Path, tmp_path: Path
) -> None:
    common = ["--workspace", tmp_path / "w", *(word for setting in LENIENT for word in ("--set", setting))]
    path = write(train={"max_new_tokens": 100})
    dry = cli("gen-sft", "--from-teachers", path, "--dry-run", "--json", *common)
    assert dry.code == 0, dry.stderr
    assert json.loads(dry.stdout)["seeds_by_domain"] == {"arithmetic": 8, "structured": 8, "tools": 8}
    assert not (tmp_path / "w").exists()

    made = cli("gen-sft", "--from-teachers", path, "--name", "plain", "--json", *common)
    assert made.code == 0, made.stderr
    assert json.loads(made.stdout)["requests"] == 24
    rows = rows_of(tmp_path / "w", "plain")
    assert len(rows) > 6
    assert all(row["generator"] == row["domain"] for row in rows)
    assert all(row["model"] == str((tiny / "models" / row["domain"]).resolve()) for row in rows)
    again = cli("gen-sft", "--from-teachers", path, "--name", "plain", "--json", *common)
    assert json.loads(again.stdout)["requests"] == 0

    # The same answers, of which the verifier knows every second one to be right.
    said = {json.loads(row["extra"])["id"]: row["messages"][-1]["content"] for row in rows}
    right = sorted(said)[::2]
    checked = [
        row
        | {
            "verifier": "exact_match",
            "reference": {"answer": said[str(row["id"])] if row["id"] in right else "something else"},
        }
        for row in ROWS
        if row["id"] in said
    ]
    write(checked, train={"max_new_tokens": 100})
    verified = cli("gen-sft", "--from-teachers", path, "--name", "checked", "--set", "reuse=[plain]", "--json", *common)
    assert verified.code == 0, verified.stderr
    document = json.loads(verified.stdout)
    assert document["requests"] == 0
    assert f"not_verified {len(said) - len(right)}" in document["stages"]["select"]
    assert sorted(json.loads(row["extra"])["id"] for row in rows_of(tmp_path / "w", "checked")) == right
    dropped = [r for _, r in read_jsonl(tmp_path / "w" / "datasets" / "checked" / "quarantine" / "not_selected.jsonl")]
    assert len(dropped) == len(said) - len(right)
