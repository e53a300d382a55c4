"""Merging weights: the checkpoint by each method, what is refused, and a distillation that begins from it."""

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mopdctl.config.merge import MergeConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.merge import merge_into, run_merge
from mopdctl.distill.merging.run import merge_teachers, plan_merge
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import write_json, write_jsonl
from mopdctl.rollouts.held_out import HeldOutScore
from mopdctl.runs import Workspace, checkpoint_digest, locked, open_run, read_card
from mopdctl.world.data import generate, prompt_row

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]
Write = Callable[..., Path]
Cli = Callable[..., SimpleNamespace]


def merge(document: dict[str, Any], workspace: Path, *, scale: float, name: str = "merge") -> Path:
    config = TeachersFile.model_validate(document)
    return run_merge(config, Workspace(workspace), base=workspace.parent, scale=scale, name=name)


def weights(folder: Path | str) -> dict[str, Any]:
    return load_file(Path(folder) / "model.safetensors")


def expected(student: Path | str, teachers: list[Path | str], scale: float) -> dict[str, Any]:
    """In float64: student + scale * sum (teacher - student)."""
    start = {name: weight.double() for name, weight in weights(student).items()}
    found = [weights(teacher) for teacher in teachers]
    return {n: (w + scale * sum(t[n].double() - w for t in found)).float() for n, w in start.items()}


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert float((other[name] - weight).abs().max()) < 1e-6, name


@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_every_weight_is_student_plus_scaled_deltas(tmp_path: Path, teachers_document: Document, scale: float) -> None:
    document = teachers_document()
    target = merge(document, tmp_path / "workspace", scale=scale)
    models = [t["model"] for t in document["teachers"].values()]
    assert_close(weights(target), expected(document["student"], models, scale))


def test_one_teacher_at_scale_one_is_that_teacher(tmp_path: Path, tiny: Path, teachers_document: Document) -> None:
    document = teachers_document()
    document["teachers"] = {"tools": document["teachers"]["tools"]}
    assert_close(weights(merge(document, tmp_path / "workspace", scale=1.0)), weights(tiny / "models" / "tools"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_aliases_of_one_checkpoint_count_once_and_in_full_precision(
    tmp_path: Path, teachers_document: Document, dtype: str
) -> None:
    # `dtype` is the precision in which a teacher scores; weights are merged as they lie on the disk.
    document = teachers_document()
    model = document["teachers"]["arithmetic"]["model"]
    document["teachers"]["structured"] |= {"model": model, "dtype": dtype}
    target = merge(document, tmp_path / "workspace", scale=0.5)
    models = [model, document["teachers"]["tools"]["model"]]
    assert_close(weights(target), expected(document["student"], models, 0.5))


def test_the_order_of_teachers_changes_no_bit(tmp_path: Path, teachers_document: Document) -> None:
    document = teachers_document()
    one = weights(merge(document, tmp_path / "workspace", scale=0.3))
    document["teachers"] = dict(reversed(document["teachers"].items()))
    other = weights(merge(document, tmp_path / "workspace", scale=0.3, name="reversed"))
    assert all(other[name].equal(weight) for name, weight in one.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"intermediate_size": 48},
        {"tie_word_embeddings": False},
        {"vocab_size": 520},
    ],
)
def test_another_architecture_is_refused(
    write_tiny_model: Write, tmp_path: Path, teachers_document: Document, distil: Distil, changes: dict[str, Any]
) -> None:
    document = teachers_document(warm_start="merge")
    document["teachers"]["tools"]["model"] = str(write_tiny_model(tmp_path / "other", **changes))
    workspace = tmp_path / "workspace"
    for work in (lambda: merge(document, workspace, scale=0.3), lambda: distil(document, workspace)):
        with pytest.raises(InputError, match="architecture"):
            work()
        assert not workspace.exists()


def test_the_card_says_what_was_merged(tmp_path: Path, cli: Cli, teachers_document: Document) -> None:
    document = teachers_document()
    write_json(tmp_path / "teachers.yaml", document)
    workspace = tmp_path / "workspace"
    arguments = ["merge", "--teachers", tmp_path / "teachers.yaml", "--name", "m", "--workspace", workspace, "--json"]
    done = cli(*arguments, "--scale", 0.25)
    target = workspace / "checkpoints" / "m"
    assert done.code == 0
    scales = dict.fromkeys(("arithmetic", "structured", "tools"), 0.25)
    expected_document = {"name": "m", "checkpoint": str(target), "method": "task-arithmetic", "scales": scales}
    assert json.loads(done.stdout) == expected_document
    card = read_card(target)
    assert card["algorithm"] == "merge/task_arithmetic"
    assert card["parent"] == document["student"]
    assert card["digest"] == checkpoint_digest(target)
    assert card["scales"] == card["config"]["scales"] == scales
    assert set(card["config"]["teachers"]) == {"arithmetic", "structured", "tools"}
    # The same again is there already; another one may not pass under its name.
    before = (target / "card.json").stat().st_mtime_ns
    assert cli(*arguments, "--scale", 0.25).code == 0
    assert (target / "card.json").stat().st_mtime_ns == before
    other = cli(*arguments, "--scale", 0.5)
    assert (other.code, other.stdout) == (2, "")
    assert "scale" in other.stderr


def run(document: dict[str, Any], workspace: Path, name: str = "merge", **how: Any) -> Path:
    config = TeachersFile.model_validate(document)
    return merge_teachers(config, MergeConfig(**how), Workspace(workspace), base=workspace.parent, name=name)


SCALES = {"arithmetic": 0.5, "structured": 1.0, "tools": 0.25}


def test_linear_is_the_weighted_mean_of_every_weight(tmp_path: Path, tiny: Path, teachers_document: Document) -> None:
    teachers = {alias: weights(tiny / "models" / alias) for alias in SCALES}
    for name, scales in (("equal", dict.fromkeys(SCALES, 1.0)), ("weighted", SCALES)):
        given = scales if name == "weighted" else {}
        merged = weights(run(teachers_document(), tmp_path / "workspace", name, method="linear", scales=given))
        total = sum(scales.values())
        wanted = {
            key: sum(scales[alias] * teacher[key].double() for alias, teacher in teachers.items()) / total
            for key in merged
        }
        assert_close(merged, {key: weight.float() for key, weight in wanted.items()})


def naive_ties(student: Any, teachers: list[Any], scales: list[float], density: float) -> Any:
    """One number at a time."""
    start = student.double().flatten().tolist()
    deltas = []
    for teacher, scale in zip(teachers, scales, strict=True):
        delta = [t - s for t, s in zip(teacher.double().flatten().tolist(), start, strict=True)]
        largest = sorted(range(len(delta)), key=lambda i: (-abs(delta[i]), i))[: max(1, round(density * len(delta)))]
        kept = set(largest)
        deltas.append([scale * d if i in kept else 0.0 for i, d in enumerate(delta)])
    merged = []
    for i, value in enumerate(start):
        column = [delta[i] for delta in deltas]
        agreeing = [d for d in column if d * sum(column) > 0]
        merged.append(value + (sum(agreeing) / len(agreeing) if agreeing else 0.0))
    return torch.tensor(merged).view_as(student)


def test_ties_is_what_it_is_by_hand(tmp_path: Path, tiny: Path, teachers_document: Document) -> None:
    merged = weights(run(teachers_document(), tmp_path / "workspace", method="ties", scales=SCALES, density=0.3))
    student = weights(tiny / "models" / "student")
    teachers = [weights(tiny / "models" / alias) for alias in SCALES]
    wanted = {
        name: naive_ties(weight, [t[name] for t in teachers], list(SCALES.values()), 0.3)
        for name, weight in student.items()
    }
    assert_close(merged, wanted)


def test_teachers_without_a_scale_of_their_own_take_the_common_one(
    tmp_path: Path, cli: Cli, teachers_document: Document
) -> None:
    document = teachers_document()
    write_json(tmp_path / "teachers.yaml", document)
    command = ["merge", "--teachers", tmp_path / "teachers.yaml", "--workspace", tmp_path / "workspace", "--json"]
    done = cli(*command, "--name", "m", "--scale", 0.5, "--scales", "tools=0, arithmetic=1")
    assert (done.code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["scales"] == {"arithmetic": 1.0, "structured": 0.5, "tools": 0.0}
    start, found = weights(document["student"]), weights(tmp_path / "workspace" / "checkpoints" / "m")
    one, half = (weights(document["teachers"][alias]["model"]) for alias in ("arithmetic", "structured"))
    wanted = {n: w.double() + (one[n].double() - w) + 0.5 * (half[n].double() - w) for n, w in start.items()}
    assert_close(found, {name: weight.float() for name, weight in wanted.items()})
    ties = cli(*command, "--name", "t", "--method", "ties", "--density", 0.5)
    expected_document = {"method": "ties", "density": 0.5, "scales": dict.fromkeys(SCALES, 1.0)}
    assert {key: json.loads(ties.stdout)[key] for key in expected_document} == expected_document
    assert read_card(tmp_path / "workspace" / "checkpoints" / "t")["algorithm"] == "merge/ties"


def test_one_model_is_loaded_and_no_teacher(
    tmp_path: Path, teachers_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    load = HFModel.load
    monkeypatch.setattr(HFModel, "load", lambda path, **how: loaded.append(path) or load(path, **how))
    document = teachers_document()
    run(document, tmp_path / "workspace")
    assert loaded == [document["student"]]
    merge_into(
        load(document["student"], train=True),
        TeachersFile.model_validate(document),
        Workspace(tmp_path / "workspace"),
        base=tmp_path,
        scale=0.3,
    )
    assert loaded == [document["student"]]


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(document: dict[str, Any], workspace: Path, **how: Any) -> str:
    """The one line with which a merge is refused; nothing may have been written."""
    with pytest.raises(InputError) as caught:
        run(document, workspace, **how)
    assert not workspace.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_adapter_among_the_teachers_is_refused_by_its_alias(
    tmp_path: Path, tiny: Path, teachers_document: Document
) -> None:
    folder = shutil.copytree(tiny / "models" / "tools", tmp_path / "adapter")
    (folder / "adapter_config.json").write_text("{}", "utf-8")
    document = teachers_document()
    document["teachers"]["tools"]["model"] = str(folder)
    message = refused(document, tmp_path / "workspace")
    assert message.startswith(f"teacher 'tools': model {folder}: is a LoRA adapter; ")


def test_scales_that_do_not_fit_the_teachers_are_refused(tmp_path: Path, teachers_document: Document) -> None:
    workspace, document = tmp_path / "workspace", teachers_document()
    assert refused(document, workspace, scales={"tool": 0.1}) == (
        "scale of 'tool': no such teacher; teachers: arithmetic, structured, tools"
    )
    assert "all are 0, which merges nothing" in refused(document, workspace, scales=dict.fromkeys(SCALES, 0.0))
    document["teachers"]["structured"]["model"] = document["teachers"]["arithmetic"]["model"]
    message = refused(document, workspace, scales={"arithmetic": 0.1, "structured": 0.2})
    assert message == "scales of arithmetic and structured: they are one checkpoint, which has one scale"
    card = read_card(run(document, workspace, scales={"arithmetic": 0.1}))
    assert card["scales"] == {"arithmetic": 0.1, "structured": 0.1, "tools": 0.3}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scales", "tools"], "--scales 'tools': at 'tools'; write ALIAS=SCALE"),
        (["--scales", "tools=x"], "at 'tools=x'"),
        (["--scales", "tools=-1"], "at 'tools=-1'"),
        (["--scales", "tools=1,tools=2"], "at 'tools=2'"),
        (["--scales", "tools=nan"], "at 'tools=nan'"),
        (["--density", "0.5"], "only `ties` has a density"),
        (["--method", "ties", "--density", "0"], "density: must be greater than 0"),
        (["--method", "linear", "--scale", "0.5"], "a weighted mean has no common scale"),
        (["--search", "--scale", "0.5"], "leave out `scale` and `scales`"),
        (["--search"], "needs held-out prompts; name their file in `train.eval_prompts`"),
    ],
)
def test_flags_that_mean_nothing_end_in_one_line(
    tmp_path: Path, cli: Cli, teachers_document: Document, flags: list[str], message: str
) -> None:
    write_json(tmp_path / "teachers.yaml", teachers_document())
    workspace = tmp_path / "workspace"
    done = cli("merge", "--teachers", tmp_path / "teachers.yaml", "--name", "m", "--workspace", workspace, *flags)
    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr
    assert not workspace.exists()


def test_two_merges_under_one_name_do_not_collide(tmp_path: Path, teachers_document: Document) -> None:
    workspace = tmp_path / "workspace"
    with (
        locked(Workspace(workspace).run("merge") / "rank-0"),
        pytest.raises(InputError, match="another process is writing here"),
    ):
        run(teachers_document(), workspace)
    assert not (workspace / "checkpoints").exists()
    assert run(teachers_document(), workspace).is_dir()


def test_a_merge_does_not_take_the_name_of_a_distillation_that_has_begun(
    tmp_path: Path, teachers_document: Document
) -> None:
    place = Workspace(tmp_path / "workspace")
    open_run(place.run("merge"), {"student": "another"})
    with pytest.raises(InputError, match="was begun with another configuration"):
        run(teachers_document(), place.root)
    assert not place.checkpoint("merge").exists()


# --------------------------------------------------------------------------------------------------------------- search

PLANTED = {"arithmetic": 0.3, "structured": 0.6, "tools": 0.15}


@pytest.fixture
def searchable(tmp_path: Path, teachers_document: Document) -> dict[str, Any]:
    """A document with two held-out prompts per teacher, of which one is used."""
    rows = []
    for domain in SCALES:
        examples = islice(generate(domain, "dev", seed=0), 2)
        rows += [prompt_row(example, f"{domain}/{i}") for i, example in enumerate(examples)]
    write_jsonl(tmp_path / "dev.jsonl", rows)
    return teachers_document(eval_prompts=str(tmp_path / "dev.jsonl"), eval_size=1, max_new_tokens=4)


@pytest.fixture
def planted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that fall with the distance of the model's weights from a merge with the planted scales."""
    models = {name: weights(tiny / "models" / name) for name in ("student", *SCALES)}
    key = "model.layers.0.self_attn.q_proj.weight"
    deltas = torch.stack([(models[alias][key] - models["student"][key]).flatten() for alias in PLANTED]).double()

    def score(model: HFModel, book: Any, rows: list[int], *_: Any) -> HeldOutScore:
        (row,) = rows
        alias = book.prompts[row].routing["domain"]
        moved = (dict(model.model.named_parameters())[key].detach() - models["student"][key]).flatten().double()
        scales = torch.linalg.lstsq(deltas.T, moved.unsqueeze(-1)).solution.flatten()
        off = float(scales[list(PLANTED).index(alias)]) - PLANTED[alias]
        return HeldOutScore(round(100 - 100 * abs(off), 3), unchecked=int(alias == "tools"))

    monkeypatch.setattr("mopdctl.distill.merging.measure.held_out_score", score)


@pytest.mark.usefixtures("planted")
def test_the_search_finds_the_planted_scales_and_the_card_has_every_candidate(
    tmp_path: Path, cli: Cli, searchable: dict[str, Any]
) -> None:
    write_json(tmp_path / "teachers.yaml", searchable)
    workspace = tmp_path / "workspace"
    command = ["merge", "--teachers", tmp_path / "teachers.yaml", "--workspace", workspace, "--search"]
    plan = cli(*command, "--name", "m", "--json", "--dry-run")
    assert json.loads(plan.stdout)["measurements"] == 7 + 4 * 3
    assert not workspace.exists()
    done = cli(*command, "--name", "m", "--json")
    assert done.code == 0
    result, card = json.loads(done.stdout), read_card(workspace / "checkpoints" / "m")
    assert result["scales"] == card["scales"] == PLANTED
    assert result["search"] == card["search"]
    candidates = card["search"]["candidates"]
    assert len(candidates) == 7 + 4 * 3
    (weak,) = [candidate for candidate in candidates if candidate["scales"] == dict.fromkeys(PLANTED, 0.1)]
    assert weak["scores"] == {"arithmetic": 80.0, "structured": 50.0, "tools": 95.0}
    assert weak["score"] == pytest.approx(75.0)
    assert weak["unchecked"] == 1
    assert card["search"]["score"] == max(c["score"] for c in candidates) == 100.0
    # What is written is the merge with these scales, and the same command finds it there.
    assert_same(weights(workspace / "checkpoints" / "m"), weights(run(searchable, workspace, "given", scales=PLANTED)))
    before = (workspace / "checkpoints" / "m" / "card.json").stat().st_mtime_ns
    assert json.loads(cli(*command, "--name", "m", "--json").stdout) == result
    assert (workspace / "checkpoints" / "m" / "card.json").stat().st_mtime_ns == before
    assert "is left out" not in done.stderr
    # A person sees a line for each of them.
    shown = cli(*command, "--name", "m").stdout
    assert "    arithmetic=0.1 structured=0.1 tools=0.1: 75.0 (arithmetic 80.0, structured 50.0, tools 95.0)" in shown


@pytest.mark.usefixtures("planted")
def test_a_teacher_that_the_search_leaves_out_is_named(
    tmp_path: Path, cli: Cli, searchable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLANTED, "tools", 0.0)
    write_json(tmp_path / "teachers.yaml", searchable)
    done = cli(
        "merge", "--teachers", tmp_path / "teachers.yaml", "--workspace", tmp_path / "w", "--search", "--name", "m"
    )
    assert done.code == 0
    assert (
        "teacher 'tools' is left out: no scale above 0 that was tried made the mean score higher, on 1 " in done.stderr
    )
    assert done.stderr.count("is left out") == 1


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(other[name].equal(weight) for name, weight in one.items())


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_the_order_of_teachers_changes_no_search(tmp_path: Path, searchable: dict[str, Any]) -> None:
    workspace = tmp_path / "workspace"
    one = run(searchable, workspace, "one", search=True)
    searchable["teachers"] = dict(reversed(searchable["teachers"].items()))
    other = run(searchable, workspace, "other", search=True)
    assert_same(weights(one), weights(other))
    assert read_card(one)["search"] == read_card(other)["search"]
    assert run(searchable, workspace, "one", search=True) == one


@pytest.mark.usefixtures("planted")
def test_a_teacher_that_is_the_student_keeps_the_common_scale(tmp_path: Path, searchable: dict[str, Any]) -> None:
    searchable["teachers"]["tools"]["model"] = searchable["student"]
    config, place = TeachersFile.model_validate(searchable), Workspace(tmp_path / "workspace")
    for method, measurements in (("task-arithmetic", 7 + 4 * 2), ("linear", 1 + 4 * 3), ("ties", 7 + 4 * 2)):
        how = MergeConfig.model_validate({"method": method, "search": True})
        assert plan_merge(config, how, place, base=tmp_path, name="m")["measurements"] == measurements
    card = read_card(run(searchable, place.root, search=True))
    assert len(card["search"]["candidates"]) == 7 + 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["task-arithmetic", "linear", "ties"])
def test_answers_are_sampled_and_checked(tmp_path: Path, searchable: dict[str, Any], method: str) -> None:
    card = read_card(run(searchable, tmp_path / "workspace", search=True, method=method))
    for candidate in card["search"]["candidates"]:
        assert candidate["scores"].keys() == SCALES.keys()
        assert candidate["score"] == pytest.approx(sum(candidate["scores"].values()) / 3)
        assert candidate["unchecked"] == 0


def test_a_search_that_could_not_be_measured_is_refused(tmp_path: Path, searchable: dict[str, Any]) -> None:
    workspace = tmp_path / "workspace"
    rows = (tmp_path / "dev.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "dev.jsonl").write_text("".join(rows[2:]), "utf-8")
    assert "teacher 'arithmetic': no held-out prompt routes to it" in refused(searchable, workspace, search=True)
    (tmp_path / "dev.jsonl").write_text("".join(rows), "utf-8")
    searchable["train"]["max_new_tokens"] = 127
    assert "do not fit into the model's context of 128" in refused(searchable, workspace, search=True)
    (tmp_path / "dev.jsonl").unlink()
    assert "dev.jsonl: no such file" in refused(searchable, workspace, search=True)


# ----------------------------------------------------------------------------------------------------------- warm start


def test_a_warm_start_begins_from_the_merge(tmp_path: Path, teachers_document: Document, distil: Distil) -> None:
    train: dict[str, Any] = {"steps": 1, "objective": "exact"}
    document = teachers_document(**train, warm_start="merge", warm_start_scale=0.4)
    warm = distil(document)
    merged = merge(document, tmp_path / "workspace", scale=0.4)
    cold = distil(teachers_document(**train, top={"student": str(merged)}))
    assert [r["response_ids"] for r in warm.rollouts[0]] == [r["response_ids"] for r in cold.rollouts[0]]
    for name in ("train/loss", "train/grad_norm", "distill/kl_k1_nats", "distill/kl_k3_nats", "policy/entropy_nats"):
        assert warm.metrics[0][name] == pytest.approx(cold.metrics[0][name], rel=1e-5, abs=1e-5), name
    plain = distil(teachers_document(**train))
    assert warm.metrics[0]["train/loss"] != pytest.approx(plain.metrics[0]["train/loss"], abs=1e-2)
    assert warm.card["warm_start"] == "merge"
    assert warm.card["config"]["train"]["warm_start_scale"] == 0.4
    assert warm.card["parent"] == document["student"]
