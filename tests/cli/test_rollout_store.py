"""`rollout` and `store` on the command line: one JSON document, clear refusals, nothing lost, nothing sampled twice."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.files import write_jsonl
from mopdctl.store.store import Store

Cli = Callable[..., SimpleNamespace]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    write_jsonl(
        path, [{"id": f"q{i}", "prompt": f"question {i}", "domain": ("math", "code")[i % 2]} for i in range(30)]
    )
    return path


@pytest.fixture
def arguments(prompts: Path, tmp_path: Path) -> list[Any]:
    place = ["--workspace", tmp_path / "ws", "--commit-every", 25]
    return [
        "rollout",
        "--engine",
        "fake",
        "--model",
        "fake",
        "--prompts",
        prompts,
        "--out",
        "r",
        "--samples",
        2,
        *place,
    ]


def folder(tmp_path: Path, name: str = "r") -> Path:
    return tmp_path / "ws" / "rollouts" / name


def content(store: Path) -> dict[str, tuple[list[int], list[float]]]:
    return {s.sample_id: (s.tokens.tolist(), s.behavior_logprobs.tolist()) for s in Store(store).scan()}


# ------------------------------------------------------------------------------------------------------------ rollout


def test_a_rollout_makes_every_sample_once(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    first = cli(*arguments, "--json")
    assert first.code == 0
    document = json.loads(first.stdout)
    assert (document["samples"], document["new"], document["prompts"]) == (60, 60, 30)
    assert set(content(folder(tmp_path))) == {f"q{i}/{n}@0" for i in range(30) for n in range(2)}
    before = content(folder(tmp_path))
    assert json.loads(cli(*arguments, "--json").stdout)["new"] == 0
    assert content(folder(tmp_path)) == before
    assert len(Store(folder(tmp_path)).manifest.shards) == 3
    assert list((folder(tmp_path) / "wal").iterdir()) == []


def test_a_sample_does_not_hang_on_the_name_of_the_store(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    renamed = [("other" if word == "r" else word) for word in arguments]
    assert cli(*arguments).code == cli(*renamed, "--commit-every", 7, "--batch-size", 3).code == 0
    assert content(folder(tmp_path)) == content(folder(tmp_path, "other"))
    reseeded = [("seeded" if word == "r" else word) for word in arguments]
    assert cli(*reseeded, "--seed", 1).code == 0
    assert content(folder(tmp_path, "seeded")).keys().isdisjoint(content(folder(tmp_path)))


def test_a_real_model_writes_what_the_engine_samples(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    from mopdctl.engines.hf import HFModel

    words = ["rollout", "--model", tiny / "models" / "student", "--prompts", tiny / "prompts.jsonl", "--out", "r"]
    done = cli(*words, "--workspace", tmp_path / "ws", "--max-new-tokens", 9, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 24
    model = HFModel.load(str(tiny / "models" / "student"))
    samples = list(Store(folder(tmp_path)).scan())
    scores = model.score([(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in samples])
    for sample, row in zip(samples, scores, strict=True):
        assert sample.behavior_logprobs.tolist() == pytest.approx(row, abs=5e-5)
        assert len(sample.response_ids) <= 9
        assert sample.domain == sample.prompt_id.split("/")[0]


def test_a_dry_run_writes_nothing(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    done = cli(*arguments, "--dry-run", "--json")
    assert (done.code, json.loads(done.stdout)["samples"]) == (0, 60)
    assert not (tmp_path / "ws").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--seed": 3}, "another configuration (seed differ)"),
        ({"--samples": 3}, "another configuration (samples differ)"),
        ({"--max-new-tokens": 7}, "another configuration (max_new_tokens differ)"),
        ({"--model": "fake:vocab_size=99"}, "its token ids are those of another tokenizer"),
    ],
)
def test_a_store_goes_on_as_it_was_begun(
    cli: Cli, arguments: list[Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    assert cli(*arguments).code == 0
    before = content(folder(tmp_path))
    ended = cli(*arguments, *(word for pair in change.items() for word in pair), "--json")
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert message in ended.stderr
    assert content(folder(tmp_path)) == before


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"id": "q0", "prompt": "x"}, [], "id 'q0' stands on 2 rows"),
        ({"id": "a", "prompt": ""}, [], "the prompt has no tokens"),
        ({"id": "a"}, [], "neither 'messages' nor 'prompt'"),
        ({"id": "a", "prompt": "x", "domain": 3}, [], "no text in routing field 'domain'"),
        ({"id": "a", "prompt": "x"}, ["--temperature", -1], "--temperature -1.0: must be"),
        ({"id": "a", "prompt": "x"}, ["--temperature", "nan"], "--temperature nan: must be"),
        ({"id": "a", "prompt": "x"}, ["--temperature", "inf"], "--temperature inf: must be"),
        ({"id": "a", "prompt": "x"}, ["--model", "fake:speed=3"], "'speed=3' is no option of the fake engine"),
        ({"id": "a", "prompt": "x"}, ["--model", "real"], "the fake engine has one model, 'fake'"),
        ({"id": "a", "prompt": "x"}, ["--out", "../out"], "name '../out': use 1-100 letters"),
        ({"id": "a", "prompt": "x"}, ["--engine", "hf", "--model", "nobody"], "model 'nobody': neither a folder"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    cli: Cli, prompts: Path, arguments: list[Any], tmp_path: Path, row: dict[str, Any], flags: list[Any], message: str
) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps(row) + "\n")
    ended = cli(*arguments, *flags, "--json")
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert not (tmp_path / "ws").exists()


def test_a_prompt_that_leaves_no_room_is_named(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    words = ["rollout", "--model", tiny / "models" / "student", "--prompts", tiny / "prompts.jsonl", "--out", "r"]
    ended = cli(*words, "--workspace", tmp_path / "ws", "--max-new-tokens", 500)
    assert ended.code == 2
    assert "prompts.jsonl:1: prompt of" in ended.stderr
    assert "do not fit into the model's context of 128" in ended.stderr
    assert not (tmp_path / "ws").exists()


# -------------------------------------------------------------------------------------------- what the machine refuses


def run(arguments: list[Any], *, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, after some Python lines."""
    script = f"import sys\n{before}\nfrom mopdctl.cli.app import main\nmain()"
    words = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("limit", [400, 3000])
def test_a_full_disk_ends_in_one_line_and_the_same_command_goes_on(
    cli: Cli, arguments: list[Any], tmp_path: Path, limit: int
) -> None:
    full = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    ended = run(arguments, before=full)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the disk is full or a size limit is reached; make room" in errors[0]
    assert "Traceback" not in ended.stderr
    assert cli(*arguments).code == 0
    assert len(content(folder(tmp_path))) == 60


READ_ONLY = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
for i in (0, 1, 2):  # effective, permitted, inheritable: root without CAP_DAC_OVERRIDE obeys permission bits
    data[i] &= ~(1 << 1)
assert libc.capset(header, data) == 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="capabilities are Linux's")
@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_that_must_not_be_written_ends_in_one_line(
    cli: Cli, arguments: list[Any], tmp_path: Path, begun: bool
) -> None:
    if begun:
        assert cli(*arguments).code == 0
    place = folder(tmp_path) if begun else tmp_path / "ws"
    place.mkdir(exist_ok=True)
    place.chmod(0o555)
    (place / ".lock").chmod(0o444) if begun else None
    ended = run(arguments, before=READ_ONLY)
    place.chmod(0o755)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "must not be written (Permission denied); check its permissions" in ended.stderr


def test_a_second_writer_is_refused(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    from mopdctl.runs import locked

    with locked(folder(tmp_path)):
        ended = run(arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"error: {folder(tmp_path)}: another process is writing here; wait for it or use another name\n"
    )


def test_a_store_of_a_newer_layout_is_refused(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    assert cli(*arguments).code == 0
    newer = "import mopdctl.store.schema as schema; schema.NAME = 'mopdctl.store/2'; schema.VERSION = 2"
    words = [("n" if word == "r" else word) for word in arguments]
    assert run(words, before=newer).returncode == 0
    for command in (words, ["store", "inspect", "n", "--workspace", tmp_path / "ws"]):
        ended = cli(*command)
        assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert "a store of layout mopdctl.store/2, this mopdctl reads mopdctl.store/1; upgrade mopdctl" in ended.stderr


# -------------------------------------------------------------------------------------------------------------- store


COMMANDS = ["inspect", "verify", "plan", "export", "compact", "repair"]


def words_of(command: str, name: str, tmp_path: Path) -> list[Any]:
    extra = {"plan": ["--capacity", 600], "export": ["--out", tmp_path / "out"]}.get(command, [])
    return ["store", command, name, *extra, "--workspace", tmp_path / "ws"]


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document_and_text_is_for_people(
    cli: Cli, arguments: list[Any], tmp_path: Path, command: str
) -> None:
    assert cli(*arguments).code == 0
    done = cli(*words_of(command, "r", tmp_path), "--json")
    assert (done.code, done.stderr) == (0, "")
    assert isinstance(json.loads(done.stdout), dict)
    if command != "export":
        shown = cli(*words_of(command, "r", tmp_path))
        assert shown.code == 0
        assert "60" in shown.stdout
        assert "{" not in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_that_is_not_there_is_said(cli: Cli, tmp_path: Path, command: str) -> None:
    ended = cli(*words_of(command, "nobody", tmp_path))
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "rollouts/nobody: no rollout store" in ended.stderr
    assert not (tmp_path / "ws").exists()


def test_inspect_shows_domains_lengths_and_log_probabilities(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    assert cli(*arguments, "--max-new-tokens", 30).code == 0
    shown = cli(*words_of("inspect", "r", tmp_path)).stdout
    found = json.loads(cli(*words_of("inspect", "r", tmp_path), "--json").stdout)
    assert {g["domain"] for g in found["groups"]} == {"math", "code"}
    samples = [s for s in Store(folder(tmp_path)).scan() if s.domain == "math"]
    cut = 100 * sum(s.finish_reason == "length" for s in samples) / len(samples)
    math = next(g for g in found["groups"] if g["domain"] == "math")
    assert math["truncated_pct"] == pytest.approx(cut, abs=0.05)
    assert cut > 0
    assert f"{math['behavior_logprob']:.3f}" in shown


def test_verify_exits_with_3_and_names_file_and_rows(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    assert cli(*arguments).code == 0
    path = folder(tmp_path) / Store(folder(tmp_path)).manifest.shards[1].payload.path
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    ended = cli(*words_of("verify", "r", tmp_path))
    assert ended.code == 3
    assert f"payload/{path.name}: payload of q" in ended.stdout
    assert "damaged: 60 samples" in ended.stdout
    assert "`mopdctl store repair r` saves what is whole" in ended.stderr
    assert json.loads(cli(*words_of("verify", "r", tmp_path), "--json").stdout)["whole"] is False
    before = content_of_truth(arguments, cli, tmp_path)
    mended = cli(*words_of("repair", "r", tmp_path))
    assert mended.code == 0
    assert "lost: " in mended.stdout
    assert cli(*words_of("verify", "r", tmp_path)).code == 0
    assert cli(*arguments).code == 0  # samples again what was lost
    assert content(folder(tmp_path)) == before


def content_of_truth(arguments: list[Any], cli: Cli, tmp_path: Path) -> dict[str, tuple[list[int], list[float]]]:
    assert cli(*[("truth" if word == "r" else word) for word in arguments]).code == 0
    return content(folder(tmp_path, "truth"))


def test_a_plan_is_saved_and_says_what_it_left_out(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    from mopdctl.store.plan import load_plan

    assert cli(*arguments).code == 0
    words = [*words_of("plan", "r", tmp_path), "--domain", "math", "--data-parallel", 4, "--json"]
    found = json.loads(cli(*words).stdout)
    assert (found["samples"], found["of"], found["dropped"]) == (30, 60, {"domain": 30})
    plan = load_plan(Path(found["plan"]))
    assert plan.num_bins == found["bins"]
    assert plan.num_bins % 4 == 0
    ended = cli(*words_of("plan", "r", tmp_path), "--domain", "law")
    assert (ended.code, ended.stdout) == (2, "")
    assert "no sample is left to plan (domain 60)" in ended.stderr
    assert load_plan(Path(found["plan"])) == plan
    ended = cli("store", "plan", "r", "--capacity", 3, "--workspace", tmp_path / "ws")
    assert ended.code == 2
    assert "longer than" in ended.stderr or "capacity" in ended.stderr


def test_a_torn_tail_is_said_and_the_run_goes_on(cli: Cli, arguments: list[Any], tmp_path: Path) -> None:
    stop = (
        "import mopdctl.engines.fake as fake\n"
        "real = fake.FakeModel.stream\n"
        "def stream(self, requests, *, temperature):\n"
        "    for number, step in enumerate(real(self, requests, temperature=temperature)):\n"
        "        if number == 9: import os; os._exit(9)\n"
        "        yield step\n"
        "fake.FakeModel.stream = stream"
    )
    assert run(arguments, before=stop).returncode == 9
    (segment,) = (folder(tmp_path) / "wal").iterdir()
    segment.write_bytes(segment.read_bytes()[:-2])
    done = cli(*arguments)
    assert done.code == 0
    assert segment.name in done.stderr
    assert "torn" in done.stderr
    assert content(folder(tmp_path)) == content_of_truth(arguments, cli, tmp_path)


def test_an_interrupt_says_that_the_command_goes_on(arguments: list[Any]) -> None:
    stop = (
        "import mopdctl.engines.fake as fake\n"
        "def stream(self, requests, *, temperature):\n"
        "    raise KeyboardInterrupt\n"
        "    yield\n"
        "fake.FakeModel.stream = stream"
    )
    ended = run(arguments, before=stop)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.splitlines()[-1] == "stopped; the same command goes on where this one was"
    assert "Traceback" not in ended.stderr
