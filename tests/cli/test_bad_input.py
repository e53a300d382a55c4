"""Bad input ends in one line that says what, where and what to do; exit code 2; nothing on stdout, nothing written."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.files import write_json, write_jsonl

Cli = Callable[..., SimpleNamespace]
Document = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path, tiny: Path, teachers_document: Callable[..., Document]) -> Path:
    """A folder with good files, for a case to spoil: `teachers.yaml`, `prompts.jsonl`, `sft.yaml`, `sft.jsonl`."""
    rows = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text("utf-8").splitlines()]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    write_json(tmp_path / "teachers.yaml", teachers_document(steps=1, top={"prompts": "prompts.jsonl"}))
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    write_jsonl(tmp_path / "sft.jsonl", [{"messages": talk}] * 3)
    sft: Document = {"name": "tuned", "model": str(tiny / "models" / "student"), "data": ["sft.jsonl"]}
    write_json(tmp_path / "sft.yaml", sft | {"train": {"steps": 1, "batch_size": 2}})
    return tmp_path


def edit(path: Path, change: Callable[[Document], Any]) -> None:
    """Changes a configuration file, which JSON is a way to write."""
    document = json.loads(path.read_text("utf-8"))
    change(document)
    write_json(path, document)


def edit_teachers(change: Callable[[Document], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "teachers.yaml", change)


def edit_train(**values: Any) -> Callable[[Path], None]:
    return edit_teachers(lambda d: d["train"].update(values))


def prompts(text: str | bytes) -> Callable[[Path], Any]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / "prompts.jsonl").write_bytes(data)


def prompts_and(row: Document) -> Callable[[Path], None]:
    """Spoils the second row of the prompts."""

    def change(folder: Path) -> None:
        lines = (folder / "prompts.jsonl").read_text("utf-8").splitlines()
        lines[1] = json.dumps(json.loads(lines[1]) | row)
        (folder / "prompts.jsonl").write_text("\n".join(lines), "utf-8")

    return change


def sft_rows(*rows: Document) -> Callable[[Path], None]:
    good: Document = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    return lambda folder: write_jsonl(folder / "sft.jsonl", [good, *rows])


def permuted(folder: Path) -> None:
    """A teacher whose tokens `b` and `d` have changed places."""
    import shutil

    document = json.loads((folder / "teachers.yaml").read_text("utf-8"))
    shutil.copytree(document["teachers"]["tools"]["model"], folder / "permuted")
    path = folder / "permuted" / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["b"], vocabulary["d"] = vocabulary["d"], vocabulary["b"]
    path.write_text(json.dumps(tokenizer), "utf-8")
    edit(folder / "teachers.yaml", lambda d: d["teachers"]["tools"].update(model="permuted"))


def nothing(folder: Path) -> None:
    pass


def duplicate_key(folder: Path) -> None:
    text = (folder / "teachers.yaml").read_text("utf-8")
    (folder / "teachers.yaml").write_text(text.replace('"student":', '"name": "other",\n  "student":'), "utf-8")


DISTILL = "distill --teachers teachers.yaml"
SFT = "sft --config sft.yaml"
MERGE = "merge --teachers teachers.yaml --name merged"
PAIR = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]

# (what is bad: what spoils the folder, the command, what the line on stderr says)
CASES: dict[str, tuple[Callable[[Path], Any], str | list[str], str]] = {
    # files
    "no teachers file": (nothing, "distill --teachers nosuch.yaml", "nosuch.yaml: no such file"),
    "no sft file": (nothing, "sft --config nosuch.yaml", "nosuch.yaml: no such file"),
    "a folder": (nothing, "distill --teachers .", "is a folder where a file is needed"),
    "a folder for sft": (nothing, "sft --config .", "is a folder where a file is needed"),
    "a file as a folder": (nothing, "distill --teachers teachers.yaml/x.yaml", "teachers.yaml/x.yaml: "),
    "no prompts": (lambda f: (f / "prompts.jsonl").unlink(), DISTILL, "prompts.jsonl: no such file"),
    "prompts that are a folder": (edit_teachers(lambda d: d.update(prompts=".")), DISTILL, "is a folder"),
    "no data": (lambda f: (f / "sft.jsonl").unlink(), SFT, "sft.jsonl: no such file"),
    "no prompts for a plan": (
        lambda f: (f / "prompts.jsonl").unlink(),
        DISTILL + " --dry-run",
        "prompts.jsonl: no such",
    ),
    "no held-out prompts": (edit_train(eval_every=1, eval_prompts="dev.jsonl"), DISTILL, "dev.jsonl: no such file"),
    "no held-out prompts for a plan": (
        edit_train(eval_every=1, eval_prompts="dev.jsonl"),
        DISTILL + " --dry-run",
        "dev.jsonl: no such file",
    ),
    "a workspace that is a file": (nothing, DISTILL + " --workspace prompts.jsonl", "prompts.jsonl: "),
    # YAML and keys
    "not YAML": (lambda f: (f / "teachers.yaml").write_text("name: [x\nteachers: {"), DISTILL, "teachers.yaml:"),
    "not a mapping": (lambda f: (f / "teachers.yaml").write_text("- x\n"), DISTILL, "not a mapping"),
    "an empty file": (lambda f: (f / "teachers.yaml").write_text(""), DISTILL, "teachers.yaml: is empty"),
    "YAML that holds itself": (
        lambda f: (f / "teachers.yaml").write_text("student: &a {b: *a}\n"),
        DISTILL,
        "teachers.yaml: holds itself",
    ),
    "sft in YAML that holds itself": (
        lambda f: (f / "sft.yaml").write_text("model: &a {b: *a}\n"),
        SFT,
        "sft.yaml: holds itself",
    ),
    "rl in YAML that holds itself": (
        lambda f: (f / "rl.yaml").write_text("model: &a {b: *a}\n"),
        "rl --config rl.yaml",
        "rl.yaml: holds itself",
    ),
    "--set that holds itself": (nothing, [*SFT.split(), "--set", "model=&a {b: *a}"], "holds itself"),
    "not UTF-8": (lambda f: (f / "teachers.yaml").write_bytes(b"name: \xff\n"), DISTILL, "not UTF-8 at byte 6"),
    "a held-out file that is not there": (
        edit_teachers(lambda d: d["train"].update(eval_prompts="nowhere.jsonl")),
        DISTILL,
        "nowhere.jsonl: no such file",
    ),
    "a key that stands twice": (duplicate_key, DISTILL, "duplicate key"),
    "an unknown key": (
        edit_teachers(lambda d: d["train"].update(learning_rat=1e-3)),
        DISTILL,
        "unknown key 'train.learning_rat'; did you mean 'learning_rate'?",
    ),
    "an unknown key of a teacher": (
        edit_teachers(lambda d: d["teachers"]["tools"].update(domain=["tools"])),
        DISTILL,
        "unknown key 'teachers.tools.domain'; did you mean 'domains'?",
    ),
    "a missing key": (edit_teachers(lambda d: d.pop("student")), DISTILL, "key 'student' is missing"),
    "top_p": (
        edit_train(top_p=0.9),
        DISTILL,
        "train.top_p: must be 1: truncated sampling breaks the importance ratios",
    ),
    "a misspelt choice": (edit_train(durability="proces"), DISTILL, "not 'proces'; did you mean 'process'?"),
    "batch_size 0": (edit_train(batch_size=0), DISTILL, "train.batch_size: must be greater than 0"),
    "temperature 0": (edit_train(temperature=0), DISTILL, "train.temperature: must be greater than 0"),
    "a learning rate that is no number": (edit_train(learning_rate="fast"), DISTILL, "train.learning_rate: "),
    "a band upside down": (edit_train(correction_low=6), DISTILL, "correction_low is above correction_high"),
    "held-out scores without prompts": (edit_train(eval_every=5), DISTILL, "eval_every needs eval_prompts"),
    "a name that leads out": (
        edit_teachers(lambda d: d.update(name="../x")),
        DISTILL,
        "name '../x': use 1-100 letters",
    ),
    "a name that leads out, as a flag": (nothing, DISTILL + " --name ../x", "name '../x'"),
    "a merge that leads out": (nothing, "merge --teachers teachers.yaml --name ../x", "name '../x'"),
    "an sft that leads out": (nothing, SFT + " --name ../x", "name '../x'"),
    "--set without =": (nothing, DISTILL + " --set train.steps", "--set 'train.steps': write KEY=VALUE"),
    "--set of an unknown key": (
        nothing,
        SFT + " --set train.step=3",
        "unknown key 'train.step'; did you mean 'steps'?",
    ),
    "--set below a value": (nothing, DISTILL + " --set name.x=3", "'name'"),
    "a scale of zero": (nothing, MERGE + " --scale 0", "--scale 0.0: must be a finite number above 0"),
    "a scale that is no number": (nothing, MERGE + " --scale nan", "--scale nan: "),
    "a scale without end": (nothing, MERGE + " --scale inf", "--scale inf: "),
    # prompts
    "empty prompts": (prompts(""), DISTILL, "prompts.jsonl: holds no rows"),
    "blank prompts": (prompts("\n \n"), DISTILL, "prompts.jsonl: holds no rows"),
    "a line that is not JSON": (
        prompts('{"domain": "tools", "prompt": "x"}\n{"domain"\n'),
        DISTILL,
        "prompts.jsonl:2: ",
    ),
    "a row that is no object": (prompts('"tools"\n'), DISTILL, "prompts.jsonl:1: a str where a JSON object is needed"),
    "prompts in another encoding": (prompts('{"prompt": "\u00e9"}'.encode("latin-1")), DISTILL, "not UTF-8 at byte 12"),
    "an unknown domain": (prompts_and({"domain": "toolz"}), DISTILL, "prompts.jsonl:2: domain 'toolz': no teacher"),
    "no domain": (prompts_and({"domain": None}), DISTILL, "prompts.jsonl:2: no text in routing field 'domain'"),
    "a prompt too long": (
        prompts_and({"messages": [{"role": "user", "content": "4-2 " * 80}]}),
        DISTILL + " --batch-size 24",
        "do not fit into the model's context of 128",
    ),
    "tools that are no list": (prompts_and({"tools": "x"}), DISTILL + " --batch-size 24", "prompts.jsonl:2: "),
    "tools without a function": (prompts_and({"tools": [{"a": 1}]}), DISTILL + " --batch-size 24", "prompts.jsonl:2: "),
    "half a character": (
        prompts_and({"messages": [{"role": "user", "content": "\ud800"}]}),
        DISTILL + " --batch-size 24",
        "prompts.jsonl:2: ",
    ),
    # models
    "a model that is not there": (
        edit_teachers(lambda d: d.update(student="nosuch")),
        DISTILL,
        "model 'nosuch': neither",
    ),
    "a folder without a model": (edit_teachers(lambda d: d.update(student=".")), DISTILL, "model "),
    "a folder without a model to tune": (
        lambda f: edit(f / "sft.yaml", lambda d: d.update(model=".")),
        SFT,
        "model ",
    ),
    "no model to merge": (edit_teachers(lambda d: d.update(student="nosuch")), MERGE, "model 'nosuch': neither"),
    "no model to tune": (lambda f: edit(f / "sft.yaml", lambda d: d.update(model="nosuch")), SFT, "model 'nosuch'"),
    "a permuted vocabulary": (permuted, DISTILL, "teacher 'tools' (permuted): differs from student"),
    "a permuted vocabulary to merge": (permuted, MERGE, "of the same size but in another order"),
    # conversations
    "no assistant": (sft_rows({"messages": PAIR}), SFT, "sft.jsonl:2: no assistant message to train on"),
    "no assistant for a plan": (sft_rows({"messages": PAIR}), SFT + " --dry-run", "sft.jsonl:2: no assistant message"),
    "no messages": (sft_rows({"text": "x"}), SFT, "sft.jsonl:2: has neither 'messages' nor 'prompt'"),
    "data that is not JSON": (lambda f: (f / "sft.jsonl").write_text("{}\n{"), SFT, "sft.jsonl:2: not JSON"),
}


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_in_one_line(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    spoil, command, message = CASES[case]
    spoil(folder)
    monkeypatch.chdir(folder)
    before = files(folder)
    ended = cli(*(command.split() if isinstance(command, str) else command), "--json")
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert message in ended.stderr
    assert ended.code == 2
    assert files(folder) == before


def test_a_template_that_refuses_a_prompt_names_the_row(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.chdir(folder)
    document = json.loads((folder / "teachers.yaml").read_text("utf-8"))
    shutil.copytree(document["student"], folder / "strict")
    template = folder / "strict" / "chat_template.jinja"
    refuse = """\
{%- if messages|selectattr('role', 'equalto', 'user')|list|length > 1 %}{{ raise_exception('one message, please') }}
{%- endif %}"""
    template.write_text(refuse + template.read_text("utf-8"), "utf-8")
    models = {d: {"model": "strict", "domains": [d]} for d in document["teachers"]}
    edit(folder / "teachers.yaml", lambda d: d.update(student="strict", teachers=models))
    prompts_and({"messages": PAIR})(folder)
    edit(folder / "sft.yaml", lambda d: d.update(model="strict"))
    sft_rows({"messages": [*PAIR, {"role": "assistant", "content": "c"}]})(folder)
    for command in (DISTILL + " --batch-size 24", SFT + " --set train.batch_size=3"):
        ended = cli(*command.split())
        assert ended.code == 2
        assert ended.stderr.count("\n") == 1
        assert "one message, please" in ended.stderr
        assert ended.stderr.startswith(f"error: {'prompts' if command.startswith(DISTILL) else 'sft'}.jsonl:2: ")
        assert not (folder / "workspace" / "checkpoints").exists()


@pytest.mark.parametrize("flag", ["--batch-size 0", "--steps x", "--no-such-flag", "--teachers"])
def test_a_bad_flag_is_bad_usage(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.chdir(folder)
    before = files(folder)
    ended = cli(*DISTILL.split(), "--json", *flag.split())
    assert (ended.code, ended.stdout) == (2, "")
    assert flag.split()[0] in ended.stderr.splitlines()[-1]
    assert files(folder) == before


def test_the_command_itself_ends_with_the_code_and_the_line(folder: Path) -> None:
    # One process for the whole way out; the cases above share one.
    command = [sys.executable, "-m", "mopdctl", "distill", "--json", "--teachers", str(folder / "nosuch.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {folder / 'nosuch.yaml'}: no such file; check the path\n"


# -------------------------------------------------------------------------------------------------------------- good


def test_marks_and_line_separators_are_text(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    texts = ["a\u2028b", "c\u2029d", "e\u0085f", "g"]
    rows = [{"domain": d, "prompt": t} for d in ("arithmetic", "structured", "tools") for t in texts]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    (folder / "teachers.yaml").write_bytes(b"\xef\xbb\xbf" + (folder / "teachers.yaml").read_bytes())
    ended = cli(*DISTILL.split(), "--dry-run", "--json")
    assert ended.code == 0
    document = json.loads(ended.stdout)
    assert document["prompts"] == 12
    assert document["prompts_per_teacher"] == {"arithmetic": 4, "structured": 4, "tools": 4}


@pytest.mark.parametrize("command", [DISTILL, SFT, MERGE])
def test_json_is_all_of_stdout_and_a_dry_run_writes_nothing(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(folder)
    before = files(folder)
    plan = cli(*command.split(), "--dry-run", "--json")
    assert (plan.code, plan.stderr) == (0, "")
    assert files(folder) == before
    done = cli(*command.split(), "--json")
    assert done.code == 0
    document = json.loads(done.stdout)
    assert (folder / document["checkpoint"] / "card.json").is_file()
    planned = json.loads(plan.stdout)
    assert planned == {key: document[key] for key in planned}
    # On the same folder the same plan, now that the checkpoint is there.
    assert cli(*command.split(), "--dry-run", "--json").stdout == plan.stdout
    text = cli(*command.split())
    assert text.code == 0
    assert [line.partition(":")[0] for line in text.stdout.splitlines() if line[0] != " "] == list(document)


def test_an_override_is_in_the_plan(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    flags = "--steps 7 --batch-size 5 --name trial --set train.samples_per_prompt=3 --dry-run --json"
    document = json.loads(cli(*DISTILL.split(), *flags.split()).stdout)
    assert (document["steps"], document["samples"], document["name"]) == (7, 105, "trial")


@pytest.mark.slow
def test_a_hub_id_that_is_not_there(folder: Path) -> None:
    edit(folder / "teachers.yaml", lambda d: d["teachers"]["tools"].update(model="no/such"))
    command = [sys.executable, "-m", "mopdctl", *DISTILL.split(), "--json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: model no/such: ")
    assert done.stderr.count("\n") == 1
