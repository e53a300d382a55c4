import json
import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.runs import (
    MetricsLog,
    Workspace,
    building,
    check_name,
    checkpoint_digest,
    locked,
    open_run,
    read_metrics,
)

# -------------------------------------------------------------------------------------------------------------- names

ESCAPES = [
    "..",
    ".",
    "",
    "../x",
    "a/../../b",
    "a/b",
    "/etc",
    "~",
    "~root",
    "a\\b",
    ".hidden",
    "-rf",
    "a\0b",
    "a\n",
    "a b",
]
ESCAPES += ["x" * 101, "na\u00efve", "\uff0e\uff0e", "a:b", "%2e%2e", "$HOME"]


@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_could_lead_out_of_the_workspace_are_refused(tmp_path: Path, name: str) -> None:
    workspace = Workspace(tmp_path)
    for place in (workspace.checkpoint, workspace.evaluation, workspace.run, check_name):
        with pytest.raises(InputError, match="name"):
            place(name)


@given(st.text(max_size=12))
def test_whatever_is_accepted_stays_directly_inside_its_folder(name: str) -> None:
    workspace = Workspace(Path("/work space/w"))
    try:
        path = workspace.run(name)
    except InputError:
        return
    assert Path(os.path.normpath(path)) == path
    assert path.parent == Path("/work space/w/runs")


def test_ordinary_names_have_their_places(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for name in ("a", "mopd2", "Qwen3-0.6B", "a..b", "v1.2_final-3", "x" * 100):
        assert workspace.checkpoint(name) == tmp_path / "checkpoints" / name
        assert workspace.evaluation(name) == tmp_path / "evals" / name
        assert workspace.run(name) == tmp_path / "runs" / name


def test_a_model_is_a_name_in_the_workspace_then_a_folder_then_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path / "w")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student").mkdir()
    (tmp_path / "base" / "student").mkdir(parents=True)
    assert workspace.resolve_model("student") == "student"
    assert workspace.resolve_model("student", relative_to=tmp_path / "base") == str(tmp_path / "base" / "student")
    workspace.checkpoint("student").mkdir(parents=True)
    assert workspace.resolve_model("student", relative_to=tmp_path / "base") == str(workspace.checkpoint("student"))
    assert workspace.resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("model", ["nothing", "../secret", "a/b/c", "./x/y", "/no/such/folder", ""])
def test_a_model_that_is_nowhere_lists_what_there_is(tmp_path: Path, model: str) -> None:
    workspace = Workspace(tmp_path)
    workspace.checkpoint("rlvr").mkdir(parents=True)
    workspace.checkpoint("mopd2").mkdir(parents=True)
    with pytest.raises(InputError, match=r"has: mopd2, rlvr"):
        workspace.resolve_model(model)


# ------------------------------------------------------------------------------------------------------------ metrics


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path.parent)]


def test_opening_at_a_step_drops_that_step_and_all_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path, next_step=0)
    for step in range(5):
        log.write({"step": step, "loss": step / 8})
    log.close()
    log = MetricsLog(path, next_step=3)
    log.write({"step": 3, "loss": 9.0})
    log.close()
    assert read_metrics(path.parent) == [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 0.125},
        {"step": 2, "loss": 0.25},
        {"step": 3, "loss": 9.0},
    ]


def test_opening_at_zero_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    MetricsLog(path, next_step=0).close()
    assert steps(path) == []


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"{", b'{"step": 2, "name": "\xc3', b'{"step": 2}'])
def test_a_torn_last_line_is_dropped_and_the_log_goes_on(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n' + torn)
    log = MetricsLog(path, next_step=2)
    log.write({"step": 2, "note": "\u2028"})
    log.close()
    assert read_metrics(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 2, "note": "\u2028"}]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b'{"step": 2, "name": "\xc3'])
def test_reading_a_log_that_a_kill_cut_short_gives_its_complete_lines(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1}\n' + torn)
    assert read_metrics(tmp_path) == [{"step": 0}, {"step": 1}]


def test_every_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, next_step=0)
    log.write({"step": 0, "loss": 1.5})
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 1.5}]
    log.close()


def test_a_number_that_is_none_is_refused_and_leaves_the_log_readable(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", next_step=0)
    with pytest.raises(ValueError, match="JSON"):
        log.write({"step": 0, "loss": float("nan")})
    log.write({"step": 1, "loss": None})
    log.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None}]


# ------------------------------------------------------------------------------------------------------------ folders


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_folder_appears_when_its_block_ends_well_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    for content in ("one", "two"):
        with building(target) as temporary:
            (temporary / "weights").write_text(content)
            assert not target.exists() or (target / "weights").read_text() == "one"
        assert (target / "weights").read_text() == content
    assert names_in(target.parent) == ["model"]


def test_a_folder_whose_block_fails_never_appears_and_the_old_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with building(target) as temporary:
        (temporary / "weights").write_text("old")

    def fail(failure: BaseException) -> None:
        with building(target) as temporary:
            (temporary / "weights").write_text("half")
            raise failure

    for failure in (RuntimeError("disk full"), KeyboardInterrupt()):
        with pytest.raises(type(failure)):
            fail(failure)
    assert (target / "weights").read_text() == "old"
    assert names_in(tmp_path) == ["model"]


def test_what_an_earlier_kill_left_behind_does_not_get_into_the_new_folder(tmp_path: Path) -> None:
    (tmp_path / ".model.building").mkdir()
    (tmp_path / ".model.building" / "stale").write_text("x")
    with building(tmp_path / "model") as temporary:
        (temporary / "weights").write_text("new")
    assert names_in(tmp_path / "model") == ["weights"]


def _try_lock(folder: Path, answer: "multiprocessing.Queue[str]") -> None:
    try:
        with locked(folder):
            answer.put("held")
    except InputError as error:
        answer.put(str(error))


def test_a_folder_has_one_writer_and_is_free_again_afterwards(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.Queue[str] = context.Queue()

    def ask() -> str:
        process = context.Process(target=_try_lock, args=(tmp_path, answer))
        process.start()
        process.join()
        return answer.get(timeout=10)

    with locked(tmp_path):
        assert "another process is writing here" in ask()
    assert ask() == "held"


def test_a_run_goes_on_only_under_the_configuration_that_it_began_with(tmp_path: Path) -> None:
    open_run(tmp_path, {"lr": 1e-5, "steps": 10, "teachers": {"a": [1, 2]}})
    open_run(tmp_path, {"teachers": {"a": [1, 2]}, "steps": 10, "lr": 1e-5})
    told = r"\(lr was 1e-05, now 2e-05; seed was not set, now 0; steps was 10, now not set\)"
    with pytest.raises(InputError, match=told):
        open_run(tmp_path, {"lr": 2e-5, "teachers": {"a": [1, 2]}, "seed": 0})
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 1e-5


def test_a_checkpoint_digest_follows_names_and_contents_but_not_the_card(tmp_path: Path) -> None:
    def made(name: str, files: dict[str, str]) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_text(content)
        return checkpoint_digest(folder)

    plain = {"model.safetensors": "w", "config.json": "{}", "chat_template.jinja": "t"}
    known = made("a", plain)
    assert made("b", dict(reversed(plain.items()))) == known
    assert made("c", plain | {"card.json": "x", "notes.txt": "y"}) == known
    assert made("d", plain | {"model.safetensors": "v"}) != known
    assert made("e", plain | {"chat_template.jinja": "u"}) != known
    assert made("f", {"model.safetensors": "{}", "config.json": "w", "chat_template.jinja": "t"}) != known
