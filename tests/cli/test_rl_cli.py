"""`mopdctl rl`: bad input is one line, said before any weights are loaded; plans and JSON."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.engines.hf import HFModel
from mopdctl.files import write_json, write_jsonl

Cli = Callable[..., SimpleNamespace]
Document = dict[str, Any]
LIMIT = {"constraints": [{"kind": "characters", "max": 24}]}
ERRANDS = {"people": {"kalo": 3}, "lockers": {"3": "tode"}}


def rows(name: str = "") -> list[Document]:
    return [
        {"id": f"{name}{i}", "prompt": f"{i}-{i}", "domain": "short", "verifier": "constraints", "reference": LIMIT}
        for i in range(6)
    ]


@pytest.fixture
def folder(tmp_path: Path, tiny: Path) -> Path:
    """A folder with good files, for a case to spoil: `rl.yaml` and its prompts `short.jsonl` and `taught.jsonl`."""
    for name in ("short", "taught"):
        write_jsonl(tmp_path / f"{name}.jsonl", rows())
    document = {
        "name": "grpo",
        "model": str(tiny / "models" / "student"),
        "environments": {
            "short": {"prompts": "short.jsonl", "weight": 3},
            "taught": {"prompts": "taught.jsonl", "teacher": str(tiny / "models" / "tools")},
        },
        "train": {
            "steps": 2,
            "batch_size": 4,
            "group_size": 3,
            "max_new_tokens": 8,
            "verifier_workers": 1,
            "learning_rate": 1e-3,
        },
    }
    write_json(tmp_path / "rl.yaml", document)
    return tmp_path


def config(change: Callable[[Document], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        document = json.loads((folder / "rl.yaml").read_text("utf-8"))
        change(document)
        write_json(folder / "rl.yaml", document)

    return spoil


def train(**values: Any) -> Callable[[Path], None]:
    return config(lambda d: d["train"].update(values))


def environment(name: str = "short", **values: Any) -> Callable[[Path], None]:
    return config(lambda d: d["environments"][name].update(values))


def row(file: str = "short", number: int = 1, **values: Any) -> Callable[[Path], None]:
    """Changes one row; what is None goes."""

    def spoil(folder: Path) -> None:
        found = rows()
        found[number] = {k: v for k, v in (found[number] | values).items() if v is not None}
        write_jsonl(folder / f"{file}.jsonl", found)

    return spoil


def held_out(**values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        train(eval_every=1, eval_prompts="dev.jsonl")(folder)
        row("dev", **values)(folder)

    return spoil


def other_tokenizer(folder: Path) -> None:
    """A teacher whose tokens `b` and `d` have changed places."""
    document = json.loads((folder / "rl.yaml").read_text("utf-8"))
    shutil.copytree(document["environments"]["taught"]["teacher"], folder / "permuted")
    path = folder / "permuted" / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["b"], vocabulary["d"] = vocabulary["d"], vocabulary["b"]
    path.write_text(json.dumps(tokenizer), "utf-8")


def other_teacher(folder: Path) -> None:
    other_tokenizer(folder)
    environment("taught", teacher="permuted")(folder)


def other_reference(folder: Path) -> None:
    other_tokenizer(folder)
    train(kl_weight=0.1, reference="permuted")(folder)


def short_teacher(folder: Path) -> None:
    """A teacher that reads no more than 12 tokens."""
    document = json.loads((folder / "rl.yaml").read_text("utf-8"))
    shutil.copytree(document["environments"]["taught"]["teacher"], folder / "near")
    path = folder / "near" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"max_position_embeddings": 12}), "utf-8")
    environment("taught", teacher="near")(folder)


TALK = {"verifier": "exact_match", "reference": {"answer": "tode"}}

# what is bad: (what spoils the folder, what the line on stderr says)
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no prompts": (lambda f: (f / "short.jsonl").unlink(), "short.jsonl: no such file"),
    "empty prompts": (lambda f: (f / "short.jsonl").write_text(""), "short.jsonl: holds no rows"),
    "prompts that are a folder": (environment(prompts="."), "is a folder"),
    "no verifier": (row(verifier=None), "short.jsonl:2: names no verifier; it is one of exact_match"),
    "an unknown verifier": (row(verifier="maths"), "short.jsonl:2: verifier 'maths' is none of exact_match"),
    "an unknown verifier of a taught prompt": (row("taught", verifier="maths"), "taught.jsonl:2: verifier 'maths'"),
    "an unusable reference": (row(reference={"constraints": [{"kind": "smell"}]}), "short.jsonl:2: "),
    "an unusable reference of an isolated verifier": (row(verifier="structured", reference=7), "short.jsonl:2: "),
    "a prompt too long": (
        row(prompt="4-2 " * 80),
        "short.jsonl:2: prompt of",
    ),
    "a prompt too long for a teacher": (short_teacher, "do not fit into the model's context of 12"),
    "a prompt too long that only resampling may draw": (
        lambda f: [train(steps=1, batch_size=1, zero_variance="resample")(f), row(number=5, prompt="4-2 " * 80)(f)],
        "short.jsonl:6: prompt of",
    ),
    "duplicate ids": (row(id="0"), "short.jsonl:2: id '0' stands on 2 rows, first at"),
    "a group of one": (train(group_size=1), "train.group_size: an answer alone has nothing to be compared with"),
    "no environments": (config(lambda d: d.update(environments={})), "environments: "),
    "a weight of zero": (environment(weight=0), "environments.short.weight: must be greater than 0"),
    "a loss weight of zero": (environment(loss_weight=0), "environments.short.loss_weight: must be"),
    "an environment's name with a slash": (
        config(lambda d: d["environments"].update({"a/b": d["environments"].pop("short")})),
        "environments: name 'a/b': use letters",
    ),
    "the name that the reference has": (
        config(lambda d: d["environments"].update({"@reference": d["environments"].pop("short")})),
        "environments: name '@reference': use letters",
    ),
    "an unknown key": (environment(weigth=2), "unknown key 'environments.short.weigth'; did you mean 'weight'?"),
    "held-out scores without prompts": (train(eval_every=2), "eval_every needs eval_prompts"),
    "no held-out prompts": (train(eval_every=2, eval_prompts="dev.jsonl"), "dev.jsonl: no such file"),
    "a held-out prompt without a domain": (held_out(domain=None), "dev.jsonl:2: no text in routing field 'domain'"),
    "a held-out prompt without a verifier": (held_out(verifier=None), "dev.jsonl:2: names no verifier"),
    "a held-out prompt too long": (held_out(prompt="4-2 " * 80), "dev.jsonl:2: prompt of"),
    "a held-out prompt in an unknown environment": (
        held_out(**TALK, environment={"name": "chess", "setup": {}}),
        "dev.jsonl:2: environment 'chess' is unknown; use one of errands",
    ),
    "an unknown environment": (
        row(**TALK, environment={"name": "chess", "setup": {}}),
        "short.jsonl:2: environment 'chess' is unknown; use one of errands",
    ),
    "a badly set up environment": (
        row(**TALK, environment={"name": "errands", "setup": {"people": {}}}),
        "short.jsonl:2: a setup of errands has exactly the keys",
    ),
    "turns that are no number": (
        row(**TALK, environment={"name": "errands", "setup": ERRANDS, "max_turns": 0}),
        "short.jsonl:2: max_turns 0",
    ),
    "a teacher of another tokenizer": (
        other_teacher,
        "the teacher of environment 'taught' (permuted): differs from ",
    ),
    "a reference of another tokenizer": (other_reference, "the reference (permuted): differs from "),
    "a reference without its KL": (train(reference="x"), "reference: is there for the KL; give kl_weight"),
    "a teacher that is not there": (environment("taught", teacher="nosuch"), "model 'nosuch': neither"),
    "a model that is not there": (config(lambda d: d.update(model="nosuch")), "model 'nosuch': neither"),
    "a folder without a model": (config(lambda d: d.update(model=".")), "model "),
    "teacher and judge": (
        environment("taught", judge={"base_url": "http://localhost:1/v1", "model": "m"}),
        "give either teacher or judge",
    ),
    "soft without a buffer": (train(overlong="soft"), "overlong: soft needs overlong_buffer"),
    "a buffer longer than an answer": (
        train(overlong="soft", overlong_buffer=9),
        "train.overlong_buffer: is longer than an answer of 8 tokens may be",
    ),
    "no steps": (config(lambda d: d["train"].pop("steps")), "key 'train.steps' is missing"),
    "a name that leads out": (config(lambda d: d.update(name="../x")), "name '../x': use 1-100 letters"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_before_any_weights_are_loaded(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    def load(*_: Any, **__: Any) -> HFModel:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(HFModel, "load", load)
    spoil, says = CASES[case]
    spoil(folder)
    before = sorted(folder.rglob("*"))
    for more in ([], ["--dry-run"]):
        ended = cli("rl", "--config", folder / "rl.yaml", "--workspace", folder / "w", "--json", *more)
        assert (ended.code, ended.stdout) == (2, "")
        assert ended.stderr.count("\n") == 1, ended.stderr
        assert ended.stderr.startswith("error: ")
        assert says in ended.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_teacher_with_too_few_rows_in_its_embedding_is_refused_before_anything_is_written(
    cli: Cli, folder: Path, tiny: Path, write_tiny_model: Callable[..., Path], tiny_tokenizer: Any
) -> None:
    write_tiny_model(folder / "cut", vocab_size=len(tiny_tokenizer) - 2)
    environment("taught", teacher="cut")(folder)
    ended = cli("rl", "--config", folder / "rl.yaml", "--workspace", folder / "w", "--json")
    assert (ended.code, ended.stdout) == (2, "")
    assert "the teacher of environment 'taught'" in ended.stderr
    assert "every token needs one" in ended.stderr
    assert not (folder / "w").exists()


def test_a_plan_writes_nothing_and_says_what_would_be_sampled(cli: Cli, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    ended = cli("rl", "--config", folder / "rl.yaml", "--workspace", folder / "w", "--json", "--dry-run")
    assert ended.code == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert sorted(folder.rglob("*")) == before
    # Six prompts in groups of three; a teacher's prompts get one answer each.
    assert document["environments"] == {
        "short": {"prompts": 6, "share": 0.75, "answers": 18},
        "taught": {"prompts": 6, "share": 0.25, "answers": 2},
    }
    assert (document["name"], document["steps"], document["samples"]) == ("grpo", 2, 20)
    assert "checkpoint" not in document


def test_a_run_prints_one_document_and_its_name_is_taken_then(cli: Cli, folder: Path) -> None:
    arguments = ["rl", "--config", folder / "rl.yaml", "--workspace", folder / "w", "--json", "--steps", 1]
    first = cli(*arguments)
    assert first.code == 0, first.stderr
    target = folder / "w" / "checkpoints" / "grpo"
    assert json.loads(first.stdout)["checkpoint"] == str(target)
    assert json.loads((target / "card.json").read_text("utf-8"))["algorithm"] == "rl/grpo"
    before = {p: p.stat().st_mtime_ns for p in (folder / "w").rglob("*") if p.is_file()}
    again = cli(*arguments)
    assert (again.code, again.stdout) == (0, first.stdout)
    for more in ([], ["--dry-run"]):
        other = cli(*arguments, "--seed", 7, *more)
        assert (other.code, other.stdout) == (2, "")
        assert "train.seed was " in other.stderr
    assert {p: p.stat().st_mtime_ns for p in (folder / "w").rglob("*") if p.is_file()} == before
