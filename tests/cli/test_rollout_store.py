"""`rollout` and `store` on the command line: one JSON document, clear refusals, nothing lost, nothing sampled twice."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
        ({"--seed": 3}, "another configuration (seed was 0, now 3)"),
        ({"--samples": 3}, "another configuration (samples was "),
        ({"--max-new-tokens": 7}, "another configuration (max_new_tokens was "),
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


def test_fewer_answers_than_asked_for_end_the_run(
    cli: Cli, arguments: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NVIDIA-NeMo/RL #2394: an iterator that ended early went on with what it had
    from mopdctl.rollouts import run as running

    real = running.generate
    monkeypatch.setattr(running, "generate", lambda jobs, *rest, **options: real(jobs[1:], *rest, **options))
    ended = cli(*arguments, "--json")
    assert (ended.code, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1] == f"error: {folder(tmp_path)}: 57 answers where 60 were asked for"
    monkeypatch.undo()
    assert json.loads(cli(*arguments, "--json").stdout)["new"] == 3


# ----------------------------------------------------------------------------------------------------------- verdicts


def text_of(sample: Any) -> str:
    """An answer of the fake engine as a verifier sees it."""
    return " ".join(str(token) for token in sample.response_ids.tolist() if token > 1)


@pytest.fixture
def texts(cli: Cli, arguments: list[Any], tmp_path: Path) -> dict[str, str]:
    """What each sample of the run with seed 0 says."""
    assert cli(*[("plain" if word == "r" else word) for word in arguments]).code == 0
    return {sample.sample_id: text_of(sample) for sample in Store(folder(tmp_path, "plain")).scan()}


def checked_rows(texts: dict[str, str]) -> list[dict[str, Any]]:
    """Three kinds of prompts: the first answer is the reference, no answer is, nobody checks."""
    references = {0: lambda i: texts[f"q{i}/0@0"], 1: lambda i: "nothing", 2: lambda i: None}
    return [
        {"id": f"q{i}", "prompt": f"question {i}", "domain": ("math", "code")[i % 2]}
        | ({"verifier": "exact_match", "reference": {"answer": references[i % 3](i)}} if i % 3 < 2 else {})
        for i in range(30)
    ]


@pytest.fixture
def checked(prompts: Path, texts: dict[str, str]) -> Path:
    write_jsonl(prompts, checked_rows(texts))
    return prompts


def verdicts(tmp_path: Path) -> dict[str, tuple[str | None, float | None, str | None]]:
    return {s.sample_id: (s.verdict, s.reward, s.verifier) for s in Store(folder(tmp_path)).scan()}


def reverify_words(prompts: Path, tmp_path: Path, *more: Any) -> list[Any]:
    return [
        "rollout",
        "--reverify",
        "--prompts",
        prompts,
        "--out",
        "r",
        "--workspace",
        tmp_path / "ws",
        *more,
        "--json",
    ]


def test_answers_are_checked_as_they_come(
    cli: Cli, arguments: list[Any], tmp_path: Path, checked: Path, texts: dict[str, str]
) -> None:
    from mopdctl.verifiers import VERIFIERS

    done = cli(*arguments, "--json")
    assert done.code == 0, done.stderr
    name = f"exact_match/{VERIFIERS['exact_match'].version}"
    expected = {}
    for sample_id, text in texts.items():
        number = int(sample_id[1:].partition("/")[0])
        right = number % 3 == 0 and text == texts[f"q{number}/0@0"]
        expected[sample_id] = ("ok", float(right), name) if number % 3 < 2 else (None, None, None)
    assert verdicts(tmp_path) == expected
    document = json.loads(done.stdout)
    assert document["reward"] == 10 / 40
    assert document["verdicts"] == {"ok": 40, "unjudged": 20}
    shown = cli(*words_of("inspect", "r", tmp_path)).stdout
    assert f"verdicts: ok 40, unjudged 20 (by {name})" in shown
    groups = json.loads(cli(*words_of("inspect", "r", tmp_path), "--json").stdout)["groups"]
    assert [(g["domain"], g["rewarded_pct"], g["reward"]) for g in groups] == [
        ("code", 66.7, 0.25),
        ("math", 66.7, 0.25),
    ]
    assert cli(*words_of("verify", "r", tmp_path)).code == 0


def test_a_run_that_died_between_two_commits_gives_the_same_verdicts(
    cli: Cli, arguments: list[Any], tmp_path: Path, checked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mopdctl.store.store import StoreWriter

    assert cli(*arguments).code == 0
    straight = verdicts(tmp_path)
    shutil.rmtree(folder(tmp_path))
    real = StoreWriter.commit

    def once(self: StoreWriter, samples: Any) -> None:
        if self.committed:
            raise KeyboardInterrupt
        real(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "commit", once)
        assert cli(*arguments).code == 130
    assert len(verdicts(tmp_path)) == 25
    assert cli(*arguments).code == 0
    assert verdicts(tmp_path) == straight
    assert len(straight) == 60


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"verifier": "exactmatch", "reference": "x"},
            "prompts.jsonl:31: verifier 'exactmatch' is none of exact_match, ",
        ),
        ({"verifier": "constraints", "reference": 7}, "prompts.jsonl:31: "),
    ],
)
def test_what_nobody_can_check_is_refused_before_the_model_is_loaded(
    cli: Cli,
    prompts: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, Any],
    message: str,
) -> None:
    from mopdctl.engines.hf import HFModel

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("loads the model")

    monkeypatch.setattr(HFModel, "load", refuse)
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "a", "prompt": "x"} | row) + "\n")
    words = ["rollout", "--model", tiny / "models" / "student", "--prompts", prompts, "--out", "r"]
    ended = cli(*words, "--workspace", tmp_path / "ws", "--json")
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert message in ended.stderr
    assert not (tmp_path / "ws").exists()


def test_what_was_left_unchecked_is_said_and_checked_later(
    cli: Cli, arguments: list[Any], tmp_path: Path, checked: Path
) -> None:
    first = json.loads(cli(*arguments, "--no-verify", "--json").stdout)
    assert (first["reward"], first["verdicts"]) == (None, {"unjudged": 60})
    again = cli(*arguments)
    assert "40 answers of an earlier run are not checked; `mopdctl rollout --reverify` does that" in again.stderr
    before, payload = content(folder(tmp_path)), payload_files(tmp_path)
    planned = json.loads(cli(*reverify_words(checked, tmp_path, "--dry-run")).stdout)
    assert set(verdicts(tmp_path).values()) == {(None, None, None)}
    done = cli(*reverify_words(checked, tmp_path))
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == planned
    assert {key: found[key] for key in ("samples", "unchanged", "newly_judged", "changed", "no_verifier")} == {
        "samples": 60,
        "unchanged": 0,
        "newly_judged": {"ok": 40},
        "changed": {},
        "no_verifier": 20,
    }
    assert found["before"] == {"reward": None, "verdicts": {"unjudged": 60}}
    assert (found["reward"], found["verdicts"]) == (0.25, {"ok": 40, "unjudged": 20})
    assert (content(folder(tmp_path)), payload_files(tmp_path)) == (before, payload)
    later = verdicts(tmp_path)
    shutil.rmtree(folder(tmp_path))
    assert cli(*arguments).code == 0
    assert verdicts(tmp_path) == later


def payload_files(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder(tmp_path) / "payload").iterdir()}


def test_checking_again_changes_what_the_references_change_and_a_second_time_nothing(
    cli: Cli, arguments: list[Any], tmp_path: Path, checked: Path, texts: dict[str, str]
) -> None:
    assert cli(*arguments).code == 0
    rows = checked_rows(texts)
    rows[0]["reference"] = {"answer": "nothing"}  # was right once
    rows[1]["reference"] = {"answer": texts["q1/1@0"]}  # was right never
    rows[2] |= {"verifier": "integer", "reference": {"answer": 7}}  # was not checked
    write_jsonl(checked, rows)
    found = json.loads(cli(*reverify_words(checked, tmp_path)).stdout)
    assert found["changed"] == {"ok -> ok, higher reward": 1, "ok -> ok, lower reward": 1}
    assert (sum(found["newly_judged"].values()), found["unchanged"], found["no_verifier"]) == (2, 38, 18)
    after, number = verdicts(tmp_path), Store(folder(tmp_path)).manifest.number
    assert (after["q0/0@0"][1], after["q1/1@0"][1]) == (0.0, 1.0)
    again = json.loads(cli(*reverify_words(checked, tmp_path)).stdout)
    assert (again["unchanged"], again["changed"], again["newly_judged"]) == (42, {}, {})
    assert (verdicts(tmp_path), Store(folder(tmp_path)).manifest.number) == (after, number)
    assert cli(*words_of("verify", "r", tmp_path)).code == 0


def test_another_version_of_a_verifier_changes_who_said_it(
    cli: Cli, arguments: list[Any], tmp_path: Path, checked: Path
) -> None:
    from mopdctl.store.store import StoreWriter

    assert cli(*arguments).code == 0
    identity = Store(folder(tmp_path)).manifest.identity
    with StoreWriter(folder(tmp_path), identity) as writer:  # as an older mopdctl might have left it
        old = {"reward": 0.0, "verdict": "ok", "verifier": "exact_match/0", "verdict_label": None}
        none = {"reward": None, "verdict": "timeout", "verifier": "exact_match/0", "verdict_label": None}
        rows = {name: row for name, (row, _) in writer.committed.items()}
        writer.rescore({rows["q1/0@0"]: old, rows["q1/1@0"]: none})
    found = json.loads(cli(*reverify_words(checked, tmp_path)).stdout)
    (same,) = [key for key in found["changed"] if "same reward" in key]
    assert same.startswith("ok -> ok, same reward, by exact_match/")
    assert found["changed"] == {same: 1, "timeout -> ok": 1}


def test_answers_whose_prompts_are_gone_or_are_others_keep_what_they_had(
    cli: Cli, arguments: list[Any], tmp_path: Path, checked: Path, texts: dict[str, str]
) -> None:
    assert cli(*arguments).code == 0
    before = verdicts(tmp_path)
    rows = checked_rows(texts)
    rows[0] |= {"prompt": "something else", "reference": {"answer": "nothing"}}
    write_jsonl(checked, rows[:-3])
    done = cli(*reverify_words(checked, tmp_path))
    found = json.loads(done.stdout)
    assert (found["no_prompt"], found["other_prompt"], found["unchanged"], found["no_verifier"]) == (6, 2, 34, 18)
    assert f"6 answers keep what they had: {checked} does not have their prompts (q27, q28, q29)" in done.stderr
    assert f"2 answers keep what they had: {checked} has other prompts there (q0)" in done.stderr
    assert verdicts(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", 2], "--samples: has no meaning with --reverify"),
        (["--no-verify"], "--verify: has no meaning with --reverify"),
        (["--out", "nobody"], "rollouts/nobody: no rollout store"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: no such file"),
    ],
)
def test_checking_again_refuses_in_one_line(
    cli: Cli, arguments: list[Any], tmp_path: Path, prompts: Path, words: list[Any], message: str
) -> None:
    assert cli(*arguments).code == 0
    ended = cli(*reverify_words(prompts, tmp_path, *words))
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert message in ended.stderr
    assert not (folder(tmp_path, "nobody")).exists()


def test_only_checking_again_does_without_a_model(cli: Cli, prompts: Path, tmp_path: Path) -> None:
    ended = cli("rollout", "--prompts", prompts, "--out", "r", "--workspace", tmp_path / "ws")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr == "error: --model: missing; say which checkpoint samples\n"


def test_checking_again_does_not_touch_a_store_that_is_being_written(
    cli: Cli, arguments: list[Any], tmp_path: Path, checked: Path
) -> None:
    from mopdctl.runs import locked

    assert cli(*arguments).code == 0
    with locked(folder(tmp_path)):
        ended = cli(*reverify_words(checked, tmp_path))
    assert (ended.code, ended.stdout) == (2, "")
    assert "another process is writing here" in ended.stderr


# ------------------------------------------------------------------------------------------ verdicts on a real model


@pytest.fixture
def real(cli: Cli, tiny: Path, tmp_path: Path) -> list[Any]:
    """A store of a real model, whose workspace has no checkpoint, and the words that check it again."""
    words = ["rollout", "--model", tiny / "models" / "student", "--prompts", tiny / "prompts.jsonl", "--out", "r"]
    done = cli(*words, "--workspace", tmp_path / "ws", "--max-new-tokens", 9)
    assert done.code == 0, done.stderr
    return reverify_words(tiny / "prompts.jsonl", tmp_path)


def test_answers_of_a_real_model_are_checked_as_text(cli: Cli, tiny: Path, tmp_path: Path, real: list[Any]) -> None:
    from mopdctl.engines.tokenizers import ChatTokenizer
    from mopdctl.files import read_jsonl
    from mopdctl.verifiers import verify

    tokenizer = ChatTokenizer.load(str(tiny / "models" / "student")).tokenizer
    rows = {row["id"]: row for _, row in read_jsonl(tiny / "prompts.jsonl")}
    for sample in Store(folder(tmp_path)).scan():
        row = rows[sample.prompt_id]
        text = tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
        expected = verify(row["verifier"], text, row["reference"])
        assert (sample.verdict, sample.reward) == (expected.state, expected.reward)


def test_the_tokenizer_of_a_store_is_found_by_its_fingerprint(
    cli: Cli, tiny: Path, tmp_path: Path, real: list[Any], write_tiny_model: Callable[..., Path], tiny_tokenizer: Any
) -> None:
    ended = cli(*real)
    assert (ended.code, ended.stdout) == (2, "")
    assert "rollouts/r: no checkpoint in" in ended.stderr
    assert "has the tokenizer that wrote it; name one with --model" in ended.stderr
    assert json.loads(cli(*real, "--model", tiny / "models" / "student").stdout)["unchanged"] == 24

    other = copy.deepcopy(tiny_tokenizer)
    other.add_tokens(["another"])
    write_tiny_model(tmp_path / "ws" / "checkpoints" / "another", tokenizer=other)
    assert cli(*real).code == 2
    refused = cli(*real, "--model", "another")
    assert refused.code == 2
    assert "--model another: its tokenizer is not the one that wrote" in refused.stderr
    shutil.copytree(tiny / "models" / "tools", tmp_path / "ws" / "checkpoints" / "tools")
    assert json.loads(cli(*real).stdout)["unchanged"] == 24


@pytest.mark.parametrize("command", ["distill", "rl"])
def test_the_rollouts_of_a_training_run_can_be_checked(
    cli: Cli, tiny: Path, tmp_path: Path, real: list[Any], command: str
) -> None:
    from mopdctl.store.store import StoreWriter

    before = verdicts(tmp_path)
    samples = list(Store(folder(tmp_path)).scan())
    tokenizer = Store(folder(tmp_path)).manifest.identity["tokenizer"]
    shutil.rmtree(folder(tmp_path))
    unjudged: dict[str, Any] = dict.fromkeys(("reward", "verdict", "verifier", "verdict_label"))
    if command == "rl":  # its prompt ids begin with the environment's name, and its domain is that
        samples = [replace(s, prompt_id=f"e/{s.prompt_id}", domain="e") for s in samples]
    with StoreWriter(
        folder(tmp_path), {"tokenizer": tokenizer, "command": command, "run": {"student": "0f"}}
    ) as writer:
        writer.commit([replace(sample, **unjudged) for sample in samples])
    shutil.copytree(tiny / "models" / "student", tmp_path / "ws" / "checkpoints" / "student")
    found = json.loads(cli(*real).stdout)
    assert sum(found["newly_judged"].values()) == 24
    assert verdicts(tmp_path) == before


def test_prompts_with_an_environment_are_answered_in_turns_and_checked_by_replay(
    cli: Cli, tiny: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mopdctl.engines.base import Step
    from mopdctl.engines.hf import HFModel
    from mopdctl.environments.registry import ENVIRONMENTS

    def ids(text: str) -> list[int]:
        return [*tiny_tokenizer(text, add_special_tokens=False)["input_ids"], tiny_tokenizer.eos_token_id]

    call = ids('<tool_call>{"name": "find_person", "arguments": {"name": "kalo"}}</tool_call>')
    message = ids("3")

    def stream(self: HFModel, requests: Any, *, temperature: float) -> Iterator[Step]:
        """Calls a tool, and repeats what it is told."""
        for number, request in enumerate(requests):
            turn = message if request.response_ids else call
            for token in turn:
                ended = {number: "stop"} if token == turn[-1] else {}
                yield Step(np.array([number]), np.array([token], np.int32), np.zeros(1, np.float32), ended)

    monkeypatch.setattr(HFModel, "stream", stream)
    errands = ENVIRONMENTS["errands"]
    setup = {"people": {"kalo": 3, "bemi": 7}, "lockers": {"3": "tode", "7": None}}
    rows = [
        {
            "id": says,
            "prompt": "Where is kalo?",
            "tools": list(errands.tools),
            "environment": {"name": "errands", "setup": setup, "max_turns": 3},
            "verifier": "state_replay",
            "reference": {"calls": [], "message": says, "basis": ["state", "message"]},
        }
        for says in ("3", "7")
    ]
    write_jsonl(tmp_path / "errands.jsonl", rows)
    words = ["rollout", "--model", tiny / "models" / "student", "--prompts", tmp_path / "errands.jsonl", "--out", "r"]
    done = cli(*words, "--workspace", tmp_path / "ws", "--max-new-tokens", 60, "--json")
    assert done.code == 0, done.stderr
    assert {name: reward for name, (_, reward, _) in verdicts(tmp_path).items()} == {"3/0@0": 1.0, "7/0@0": 0.0}
    for sample in Store(folder(tmp_path)).scan():
        sampled = sample.response_ids[sample.response_mask].tolist()
        assert sampled == [*call, *message]
        assert len(sample.response_ids) > len(sampled)
    assert Store(folder(tmp_path)).manifest.identity["environments"] == {"errands": errands.version}
    again = reverify_words(tmp_path / "errands.jsonl", tmp_path, "--model", tiny / "models" / "student")
    assert json.loads(cli(*again).stdout)["unchanged"] == 2


def test_prompts_in_memory_are_sampled_checked_and_resumed(tiny: Path, tmp_path: Path) -> None:
    from mopdctl.errors import InputError
    from mopdctl.records import Prompt
    from mopdctl.rollouts.run import RolloutSpec, run_rollout
    from mopdctl.runs import Workspace

    def prompt(number: int, reference: str = "7") -> Prompt:
        message = {"role": "user", "content": f"question {number}"}
        return Prompt(
            f"c{number}",
            (message,),
            None,
            {"domain": "d"},
            {"answer": reference},
            "exact_match",
            place=f"here {number}",
        )

    def sampled(*prompts: Prompt) -> dict[str, Any]:
        spec = RolloutSpec(name="r", model="fake:mean_length=2", prompts=prompts, engine="fake", samples=3)
        return run_rollout(spec, Workspace(tmp_path / "ws"))

    first = sampled(prompt(1), prompt(2))
    assert (first["samples"], first["new"], first["verdicts"]) == (6, 6, {"ok": 6})
    assert first["reward"] == pytest.approx(sum(v[1] or 0 for v in verdicts(tmp_path).values()) / 6, abs=1e-6)
    moved = [replace(p, place="elsewhere") for p in (prompt(1), prompt(2))]
    assert sampled(*moved)["new"] == 0
    with pytest.raises(InputError, match=r"prompts was \w+, now \w+"):
        sampled(prompt(1), prompt(2, "8"))


# -------------------------------------------------------------------------------------------- what the machine refuses


def run(arguments: list[Any], *, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, after some Python lines."""
    script = f"import sys\n{before}\nfrom mopdctl.cli.app import main\nmain()"
    words = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True)


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
    newer = "import mopdctl.store.schema as schema; schema.NAME = 'mopdctl.store/3'; schema.VERSION = 3"
    words = [("n" if word == "r" else word) for word in arguments]
    assert run(words, before=newer).returncode == 0
    for command in (words, ["store", "inspect", "n", "--workspace", tmp_path / "ws"]):
        ended = cli(*command)
        assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert "a store of layout mopdctl.store/3, this mopdctl reads mopdctl.store/2; upgrade mopdctl" in ended.stderr


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
