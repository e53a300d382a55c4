"""`gen-sft` against the fake server over a real socket: killed, refused, kept waiting, and never paying twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopdctl.engines.fake_server import Faults, run_in_thread
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import write_text

ROOT = Path(__file__).parents[2]
WORDS = ["river", "lamp", "stone", "winter", "copper", "garden", "letter", "engine", "harbour", "violin", "market"]


@pytest.fixture(autouse=True)
def _short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that only fails is down after half a second."""
    monkeypatch.setattr("mopdctl.gensft.ask._DOWN_AFTER_S", 0.5)


def member(url: str, model: str = "fake-chat:words=40", **more: Any) -> dict[str, Any]:
    """A member at the server."""
    price = {"input_per_million": 0.5, "output_per_million": 1.5}
    return {"engine": "openai", "base_url": url, "model": model, "price": price, "timeout_s": 20} | more


def project(
    folder: Path, members: dict[str, Any], routes: dict[str, Any], *, seeds: int = 30, **gen: Any
) -> tuple[Path, list[str]]:
    """Writes committee.yaml, seeds.jsonl and gen.yaml; returns the last and the words that name it to a command."""
    rng = random.Random(0)
    rows = [
        {
            "id": i,
            "prompt": f"Tell me about the {rng.choice(WORDS)} and the {rng.choice(WORDS)}, number {i}.",
            "domain": "chat",
            "source": "test",
            "license": "cc0-1.0",
        }
        for i in range(seeds)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "seeds.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_text(folder / "committee.yaml", json.dumps({"members": members, "routes": routes}))
    document = {"name": "made", "committee": "committee.yaml", "seeds": [{"path": "seeds.jsonl"}]} | gen
    write_text(folder / "gen.yaml", json.dumps(document))
    return folder / "gen.yaml", ["gen-sft", "--config", str(folder / "gen.yaml")]


def make(path: Path, workspace: Path, **more: Any) -> dict[str, Any]:
    """Runs a gen.yaml in this process."""
    from mopdctl.config.base import load_config
    from mopdctl.config.gensft import GenConfig
    from mopdctl.gensft.run import run
    from mopdctl.gensft.spec import prepare
    from mopdctl.runs import Workspace

    return run(prepare(load_config(GenConfig, path), Workspace(workspace), base=path.parent), **more)


def stages(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["stage"]: stage for stage in document["stages"]}


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a data set."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def command(words: list[str], workspace: Path) -> list[str]:
    return [sys.executable, "-m", "mopdctl", *words, "--workspace", str(workspace)]


JUDGES = [{"members": ["judge"], "kind": "rubric"}]
ONE = {"default": {"members": {"a": 1}}}


def test_an_interrupted_run_ends_with_the_answers_under_way_and_says_what_to_do(tmp_path: Path) -> None:
    with run_in_thread(Faults(latency_s=0.2)) as server:
        _, words = project(tmp_path, {"a": member(server.url, max_concurrency=4)}, ONE, seeds=60)
        process = subprocess.Popen(command(words, tmp_path / "w"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
        while server.stats()["billed"] < 8:
            time.sleep(0.02)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 130, stderr
        assert "the same command goes on" in stderr
        paid = server.stats()
        assert paid["aborted"] == 0
        lines = (tmp_path / "w" / "runs" / "made.gen-sft" / "journal.jsonl").read_text("utf-8").split("\n")
        assert sum('"s":"ok"' in line for line in lines) == paid["billed"] < 60
        done = subprocess.run(command(words, tmp_path / "w"), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        after = server.stats()
        assert (after["billed"], after["requests"], after["bodies_billed_twice"]) == (60, 60, 0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_kills_change_no_byte_and_no_request_is_paid_for_twice(tmp_path: Path) -> None:
    rng = random.Random(4)
    kills = 0
    members = {
        "a": {"max_concurrency": 6, "model": "fake-chat:words=40,refuse=0.05,copy=0.05"},
        "b": {"max_concurrency": 4, "model": "fake-chat:think=0.5,words=30"},
        "judge": {"max_concurrency": 6, "model": "fake-chat:bad_judge=0.05"},
    }
    gen = {"samples": 2, "judges": JUDGES, "select": [{"strategy": "best"}], "write": {"validation_share": 0.2}}
    routes = {"default": {"members": {"a": 2, "b": 1}, "reference": "judge"}}
    expected: dict[str, bytes] = {}
    runs = replayed = port = 0
    while kills < 50:
        with run_in_thread(Faults(latency_s=0.06), port=port) as server:  # the address is part of every key
            port = int(server.url.removesuffix("/v1").rpartition(":")[2])
            workspace = tmp_path / f"w{runs}"
            made = {alias: member(server.url, **settings) for alias, settings in members.items()}
            _, words = project(tmp_path, made, routes, seeds=100, **gen)
            started = time.monotonic()
            lives = 0
            while True:
                process = subprocess.Popen(
                    command(words, workspace), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )
                if runs == 0:  # the undisturbed one
                    process.wait(timeout=120)
                    whole_s = time.monotonic() - started
                else:
                    try:
                        process.wait(timeout=rng.uniform(0.1, 0.7) * whole_s)
                    except subprocess.TimeoutExpired:
                        process.send_signal(signal.SIGKILL)
                        kills += 1
                lives += 1
                _, stderr = process.communicate()
                assert process.returncode in (0, -signal.SIGKILL), stderr
                if process.returncode == 0:
                    break
            stats = server.stats()
            found = content(workspace / "datasets" / "made")
            assert stats["bodies_billed_twice"] == 0
            assert stats["billed"] == stats["distinct_bodies_billed"]
            manifest = json.loads(found["manifest.json"])
            assert stats["billed"] == sum(m["requests"] for m in manifest["members"].values())
            # What was answered but not yet written down when the kill came is at most what was under way.
            assert stats["replayed"] + stats["aborted"] <= 16 * (lives - 1)
            again = subprocess.run(command(words, workspace), cwd=ROOT, capture_output=True, text=True)
            assert again.returncode == 0, again.stderr
            assert server.stats()["requests"] == stats["requests"]
        expected = expected or found
        assert found == expected
        replayed += stats["replayed"] + stats["aborted"]
        runs += 1
    assert replayed > 0  # some kills came between an answer and its line in the journal


# NVIDIA-NeMo/DataDesigner #703, #730
def test_a_storm_of_429_delays_rows_and_drops_none(tmp_path: Path) -> None:
    with run_in_thread(Faults(share_429=0.9, retry_after="0.05", faults_for_s=4)) as server:
        path, _ = project(tmp_path, {"a": member(server.url, max_concurrency=16)}, ONE, seeds=100)
        document = make(path, tmp_path / "w")
        stats = server.stats()
    generate = stages(document)["generate"]
    assert (generate["in"], generate["out"]) == (100, 100)
    assert stats["by_status"]["429"] > 30
    assert (stats["billed"], stats["bodies_billed_twice"]) == (100, 0)


@pytest.mark.slow
def test_errors_and_hangs_are_tried_again_until_every_row_has_one_state(tmp_path: Path) -> None:
    faults = Faults(share_5xx=0.1, share_hang=0.05, hang_s=60, share_cut=0.03, share_bad_json=0.03)
    with run_in_thread(faults) as server:
        path, _ = project(tmp_path, {"a": member(server.url, timeout_s=1, max_concurrency=32)}, ONE, seeds=300)
        document = make(path, tmp_path / "w")
        stats = server.stats()
    generate = stages(document)["generate"]
    assert generate["in"] == 300
    assert generate["out"] + sum(generate["dropped"].values()) == 300
    assert generate["out"] >= 299
    assert stats["bodies_billed_twice"] <= stats["billed"] - 300 + sum(generate["dropped"].values()) + 20
    ids = [row["id"] for row in _rows(tmp_path / "w")]
    assert len(set(ids)) == len(ids)


def _rows(workspace: Path, name: str = "made") -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    found = sorted((workspace / "datasets" / name / "data").glob("*.parquet"))
    return [row for path in found for row in pq.read_table(path).to_pylist()]


def test_total_failure_of_a_member_moves_its_rows_to_the_fall_back_and_says_so(tmp_path: Path) -> None:
    notes: list[str] = []
    with run_in_thread(Faults(down_models=("dead",))) as server:
        members = {"a": member(server.url, "dead", max_attempts=2, max_concurrency=4), "b": member(server.url)}
        route = {"members": {"a": 1, "b": 1}, "fallbacks": ["b"]}
        path, _ = project(tmp_path, members, {"default": route}, seeds=60)
        document = make(path, tmp_path / "w", on_note=notes.append)
    assert document["complete"]
    assert stages(document)["generate"]["out"] == 60
    assert {row["generator"] for row in _rows(tmp_path / "w")} == {"b"}
    assert any("member 'a' is down" in note and "fall-backs" in note for note in notes)


def test_a_wrong_key_is_one_error_and_the_key_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    secret = "sk-very/secret-0123456789"
    monkeypatch.setenv("TEST_API_KEY", secret)
    with run_in_thread(Faults(api_key="another")) as server:
        _, words = project(tmp_path, {"a": member(server.url, api_key_env="TEST_API_KEY")}, ONE)
        shown = cli(*words, "--workspace", tmp_path / "w", "--json")
    assert shown.code == 1
    assert "member 'a' is down" in shown.stderr
    assert "401" in shown.stderr
    everything = shown.stdout.encode() + shown.stderr.encode()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            everything += path.read_bytes()
    for form in (secret, json.dumps(secret), secret.replace("/", "\\/"), secret[3:]):
        assert form.encode() not in everything


def test_a_right_key_is_in_no_file_and_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    secret = "sk-right-0123456789"
    monkeypatch.setenv("TEST_API_KEY", secret)
    with run_in_thread(Faults(api_key=secret, share_5xx=0.2)) as server:
        _, words = project(tmp_path, {"a": member(server.url, api_key_env="TEST_API_KEY")}, ONE)
        shown = [cli(*words, "--workspace", tmp_path / "w", *more) for more in (["--dry-run", "--json"], ["--json"])]
    assert [one.code for one in shown] == [0, 0], shown[-1].stderr
    everything = b"".join(one.stdout.encode() + one.stderr.encode() for one in shown)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            everything += path.read_bytes()
    assert secret.encode() not in everything


def test_a_missing_key_is_found_before_anything_is_asked(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        path, _ = project(tmp_path, {"a": member(server.url, api_key_env="NO_SUCH_KEY")}, ONE)
        with pytest.raises(InputError, match="environment variable NO_SUCH_KEY: not set"):
            make(path, tmp_path / "w")
        assert server.stats()["requests"] == 0


# BerriAI/litellm #822, QwenLM/Qwen-Agent #921, guidance-ai/guidance #1504, agno-agi/agno #8009
@pytest.mark.parametrize("temperature", [0, 0.0, 0.7, None])
def test_what_is_configured_is_what_is_sent(tmp_path: Path, temperature: float | None) -> None:
    sampling = {} if temperature is None else {"temperature": temperature}
    sampling |= {"max_tokens": 30, "extra": {"min_p": 0, "chat_template_kwargs": {"enable_thinking": False}}}
    with run_in_thread(Faults(strict_seed=True)) as server:
        path, _ = project(tmp_path, {"a": member(server.url, sampling=sampling)}, ONE, seeds=3)
        document = make(path, tmp_path / "w")
    assert document["requests"] == 3
    for row in _rows(tmp_path / "w"):
        sent = json.loads(row["sampling"])
        assert sent.get("temperature") == temperature
        assert ("temperature" in sent) == (temperature is not None)
        assert (sent["min_p"], sent["chat_template_kwargs"]) == (0, {"enable_thinking": False})


# A parameter that the server does not know is an error of its rows, never left out in silence (sdg_hub's drop_params)
def test_a_refused_parameter_is_said_and_not_dropped(tmp_path: Path) -> None:
    with run_in_thread(Faults(refuse_params=("min_p",))) as server:
        sampling = {"extra": {"min_p": 0.1}}
        path, _ = project(tmp_path, {"a": member(server.url, sampling=sampling)}, ONE, seeds=5)
        with pytest.raises(MopdctlError, match=r"5 of 5 answers are rejected, the first: 400: .*min_p"):
            make(path, tmp_path / "w")
        with pytest.raises(MopdctlError, match="5 of 5 answers are rejected"):
            make(path, tmp_path / "w")
        assert server.stats()["requests"] == 5
        with pytest.raises(MopdctlError):
            make(path, tmp_path / "w", retry_rejected=True)
        assert server.stats()["requests"] == 10


def test_one_refused_row_of_many_is_in_quarantine_with_the_reason(tmp_path: Path) -> None:
    with run_in_thread(Faults(refuse_params=("min_p",))) as server:
        members = {"a": member(server.url, sampling={"extra": {"min_p": 0.1}}), "b": member(server.url)}
        path, _ = project(tmp_path, members, {"default": {"members": {"a": 1, "b": 3}}}, seeds=30)
        document = make(path, tmp_path / "w")
    rejected = stages(document)["generate"]["dropped"]["rejected"]
    held = (tmp_path / "w" / "datasets" / "made" / "quarantine" / "unanswered.jsonl").read_text("utf-8").splitlines()
    assert len(held) == rejected > 0
    assert all("min_p" in line for line in held)
    assert f"{rejected} of 30 answers are rejected" in document["warnings"][0]


# bespokelabsai/curator #135: stale answers after a change of settings
@pytest.mark.parametrize(
    "change",
    [
        {"model": "fake-chat:words=41"},
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"max_tokens": 77}},
        {"revision": "2"},
        {"route": {"system_prompt": "Be brief."}},
        {"gen": {"seed": 1}},
        {"sampling": {"extra": {"top_k": 3}}},
    ],
)
def test_any_change_of_a_request_asks_anew_and_none_asks_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    with run_in_thread(Faults()) as server:
        path, _ = project(tmp_path, {"a": member(server.url)}, ONE, seeds=5)
        assert make(path, tmp_path / "w")["requests"] == 5
        own = {k: v for k, v in change.items() if k not in ("route", "gen")}
        for settings, calls in ((change, 5), ({}, 0)):
            used = own if settings else {}
            route = ONE["default"] | (settings.get("route") or {})
            path, _ = project(
                tmp_path,
                {"a": member(server.url) | used},
                {"default": route},
                seeds=5,
                name=f"again{calls}",
                reuse=["made"],
                **(settings.get("gen") or {}),
            )
            assert make(path, tmp_path / "w")["requests"] == calls


# UKGovernmentBEIS/inspect_ai #2580, vllm-project/vllm #11953
def test_samples_of_a_prompt_have_seeds_of_their_own_that_no_run_changes(tmp_path: Path) -> None:
    with run_in_thread(Faults(strict_seed=True)) as server:
        path, _ = project(tmp_path, {"a": member(server.url)}, ONE, seeds=3, samples=8)
        make(path, tmp_path / "w")
        make(path, tmp_path / "v")
    rows = _rows(tmp_path / "w")
    assert len({(row["seed_id"], row["sampling_seed"]) for row in rows}) == len(rows) == 24
    assert len({row["messages"][-1]["content"] for row in rows}) == 24
    assert rows == _rows(tmp_path / "v")


def test_a_server_that_ignores_the_seed_is_suspected(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        # At temperature 0 by the server's own default every sample is the same; the request does not say so.
        path, _ = project(tmp_path, {"a": member(server.url, "fake-chat:copy=1")}, ONE, seeds=20, samples=2)
        document = make(path, tmp_path / "w")
    assert any("does the server take the seed" in line for line in document["warnings"])


# modelscope/speculators #835: "0 truncated" while a third was cut; NVIDIA-NeMo/DataDesigner #754
def test_cut_answers_are_counted_as_such(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        path, _ = project(tmp_path, {"a": member(server.url, sampling={"max_tokens": 5})}, ONE, seeds=10)
        document = make(path, tmp_path / "w")
    assert stages(document)["filter"]["dropped"] == {"truncated": 10}
    assert document["rows"] == {"train": 0, "validation": 0}


# argilla-io/distilabel #462: cost before and while running, with a stop
def test_a_budget_stops_cleanly_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        members = {"a": member(server.url, sampling={"max_tokens": 100})}
        path, _ = project(tmp_path, members, ONE, seeds=60, max_tokens=3000)
        document = make(path, tmp_path / "w")
        assert document["stopped"] == "the budget is used up"
        assert not document["complete"]
        generate = stages(document)["generate"]
        assert generate["dropped"] == {"pending": 60 - generate["out"]}
        spent = sum(m["prompt_tokens"] + m["completion_tokens"] for m in document["members"].values())
        assert 1500 < spent <= 3000
        path, _ = project(tmp_path, members, ONE, seeds=60)
        again = make(path, tmp_path / "w")
        assert again["complete"]
        assert again["requests"] == 60 - generate["out"]
        assert server.stats()["bodies_billed_twice"] == 0


def test_a_budget_in_money_needs_every_price(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        path, _ = project(tmp_path, {"a": member(server.url, price=None)}, ONE, max_cost=1)
        with pytest.raises(InputError, match="the price of member 'a' is unknown"):
            make(path, tmp_path / "w")


# NVIDIA-NeMo/Gym #1058
def test_a_dead_judge_stops_the_run_where_its_panel_has_no_quorum_without_it(tmp_path: Path) -> None:
    with run_in_thread(Faults(down_models=("dead",))) as server:
        members = {
            "a": member(server.url),
            "judge": member(server.url, "dead", max_attempts=1, max_concurrency=2),
            "other": member(server.url),
            "third": member(server.url),
        }
        path, _ = project(tmp_path, members, ONE, seeds=40, judges=JUDGES)
        with pytest.raises(MopdctlError, match="judges judge are down"):
            make(path, tmp_path / "w")
        panel = {"members": ["judge", "other", "third"], "kind": "rubric"}
        path, _ = project(tmp_path, members, ONE, seeds=40, judges=[panel])
        document = make(path, tmp_path / "w")
    assert document["judges"][0]["judges"]["judge"]["states"]["infra_error"] == 40
    assert all(row["score_state"] == "ok" for row in _rows(tmp_path / "w"))
    assert any("judge 'judge'" in line for line in document["warnings"])


def test_a_failed_answer_is_asked_for_again_by_the_next_run(tmp_path: Path) -> None:
    with run_in_thread(Faults(share_5xx=0.6, faults_for_s=3)) as server:
        path, _ = project(tmp_path, {"a": member(server.url, max_attempts=1, max_concurrency=64)}, ONE, seeds=15)
        document = make(path, tmp_path / "w")
        failed = stages(document)["generate"]["dropped"].get("infra_error", 0)
        assert 0 < failed < 15
        assert not document["complete"]
        time.sleep(3)
        again = make(path, tmp_path / "w")
    assert again["complete"]
    assert again["requests"] == failed
    assert stages(again)["generate"]["dropped"] == {}


def test_another_configuration_does_not_take_the_place_of_a_data_set(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        path, _ = project(tmp_path, {"a": member(server.url)}, ONE, seeds=5)
        make(path, tmp_path / "w")
        before = content(tmp_path / "w" / "datasets" / "made")
        path, _ = project(tmp_path, {"a": member(server.url)}, ONE, seeds=5, filter={"min_words": 30})
        with pytest.raises(InputError, match=r"config.filter.min_words was .*reuse"):
            make(path, tmp_path / "w")
        assert content(tmp_path / "w" / "datasets" / "made") == before
        document = make(path, tmp_path / "w", replace=True)
    assert document["requests"] == 0
    assert document["record"]["config"]["filter"]["min_words"] == 30


def test_how_fast_and_with_which_key_is_no_other_data_set(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        path, _ = project(tmp_path, {"a": member(server.url)}, ONE, seeds=5)
        make(path, tmp_path / "w")
        path, _ = project(tmp_path, {"a": member(server.url, max_concurrency=2, timeout_s=9)}, ONE, seeds=5)
        assert make(path, tmp_path / "w")["requests"] == 0


def test_rows_of_an_earlier_data_set_are_not_made_again(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        path, _ = project(tmp_path, {"a": member(server.url)}, ONE, seeds=10)
        make(path, tmp_path / "w")
        path, _ = project(tmp_path, {"a": member(server.url)}, ONE, seeds=15, name="more", dedup={"against": ["made"]})
        document = make(path, tmp_path / "w")
    assert stages(document)["dedup"]["dropped"]["against"] == 10
    assert len(_rows(tmp_path / "w", "more")) == 5


def test_only_one_process_writes_a_run(tmp_path: Path) -> None:
    with run_in_thread(Faults(latency_s=0.3)) as server:
        path, words = project(tmp_path, {"a": member(server.url, max_concurrency=1)}, ONE, seeds=30)
        process = subprocess.Popen(
            command(words, tmp_path / "w"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while server.stats()["requests"] == 0:
                time.sleep(0.05)
            with pytest.raises(InputError, match="another process is writing here"):
                make(path, tmp_path / "w")
        finally:
            process.kill()
            process.wait()


def test_os_environ_is_the_only_way_in_for_a_key(tmp_path: Path) -> None:
    assert "TEST_API_KEY" not in os.environ
    with run_in_thread(Faults()) as server:
        for bad in ({"api_key": "sk-1"}, {"api_key_env": "sk-1234"}, {"base_url": "http://u:p@127.0.0.1/v1"}):
            path, _ = project(tmp_path, {"a": member(server.url) | bad}, ONE)
            with pytest.raises(InputError) as refused:
                make(path, tmp_path / "w")
            assert "sk-1" not in str(refused.value)
            assert "u:p" not in str(refused.value)


def test_training_terms_are_asked_of_members_and_not_of_prompts(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        members = {"a": member(server.url, outputs_may_train=True), "b": member(server.url)}
        route = {"members": {"a": 1, "b": 1}}
        path, _ = project(tmp_path, members, {"default": route}, filter={"require_training_terms": True})
        document = make(path, tmp_path / "w")
    rules = stages(document)["filter"]
    assert stages(document)["seeds"]["out"] == rules["in"] == 30
    assert 0 < rules["out"] < 30
    assert {row["generator"] for row in _rows(tmp_path / "w")} == {"a"}


def test_a_server_that_knows_no_seed_is_asked_without_one_and_each_sample_anew(tmp_path: Path) -> None:
    with run_in_thread(Faults(refuse_params=("seed",))) as server:
        path, _ = project(tmp_path, {"a": member(server.url, takes_seed=False)}, ONE, seeds=4, samples=3)
        document = make(path, tmp_path / "w")
        assert server.stats()["requests"] == 12
    assert stages(document)["generate"]["out"] == 12
    assert {row["sampling_seed"] for row in _rows(tmp_path / "w")} == {None}


def test_a_budget_that_ends_before_the_judging_publishes_no_row_that_waits_for_it(tmp_path: Path) -> None:
    with run_in_thread(Faults()) as server:
        members = {alias: member(server.url, sampling={"max_tokens": 60}) for alias in ("a", "judge")}
        path, _ = project(tmp_path, members, ONE, seeds=40, judges=JUDGES, max_tokens=2500)
        document = make(path, tmp_path / "w")
        assert not document["complete"]
        assert document["rows"] == {"train": 0, "validation": 0}
        assert stages(document)["select"]["dropped"]["pending"] > 0
        path, _ = project(tmp_path, members, ONE, seeds=40, judges=JUDGES)
        again = make(path, tmp_path / "w")
    assert again["complete"]
    assert sum(again["rows"].values()) == stages(again)["decontaminate"]["out"] >= 39
