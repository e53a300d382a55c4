"""`mopdctl rl` with a judge behind a real socket: what it is asked, what answers earn, what a kill costs."""

import gc
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.config.rl import RlConfig
from mopdctl.engines import fake_chat
from mopdctl.engines.fake_server import Faults, Running, run_in_thread
from mopdctl.errors import MopdctlError
from mopdctl.files import write_json, write_jsonl
from mopdctl.records import Sample
from mopdctl.rl import judge_ask
from mopdctl.rl.judge_journal import Entry, ReplyJournal
from mopdctl.rl.run import run_rl
from mopdctl.runs import Workspace, read_card, read_metrics
from mopdctl.store.store import Store

Cli = Callable[..., SimpleNamespace]
Reply = Callable[[str, str], str]
GROUPS, GROUP_SIZE, STEPS = 3, 4, 2


class StopError(Exception):
    pass


def let_go() -> None:
    """A run that broke off in this process holds its store until its frames are gone; a process of its own does not."""
    gc.collect()


def taste(text: str) -> int:
    """A judge's opinion of a text, from 1 to 5."""
    return 1 + hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 5


def verdict(first: str, second: str) -> str:
    one, other = taste(first), taste(second)
    ranking = 2 if (one, first) > (other, second) else 5
    return f"Hm.\n{json.dumps({'score_1': one, 'score_2': other, 'ranking': ranking})}"


def responses(body: dict[str, Any]) -> tuple[str, str]:
    text = body["messages"][0]["content"]
    one, other = (re.search(rf"<response_{n}-(\w+)>\n(.*)\n</response_{n}-\1>", text, re.DOTALL) for n in (1, 2))
    assert one is not None
    assert other is not None
    return one[2], other[2]


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Callable[[Reply], None]:
    """Sets what the judge at the fake server says of two responses."""
    answer = fake_chat.answer

    def use(reply: Reply) -> None:
        def scripted(body: dict[str, Any]) -> dict[str, Any]:
            document = answer({"model": "fake-chat", "messages": [{"role": "user", "content": "hello"}]})
            document["choices"][0]["message"]["content"] = reply(*responses(body))
            document["choices"][0]["finish_reason"] = "stop"
            return document

        monkeypatch.setattr(fake_chat, "answer", scripted)

    use(verdict)
    return use


@pytest.fixture
def document(tiny: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """An `rl.yaml` as a mapping; keywords go into `judge`."""
    rows = [
        {"id": str(n), "prompt": f"{n}+{n}", "verifier": "exact_match", "reference": {"answer": str(2 * n)}}
        for n in range(9)
    ]
    write_jsonl(tmp_path / "prompts.jsonl", rows)

    def make(url: str, *, train: dict[str, Any] | None = None, **judge: Any) -> dict[str, Any]:
        judge = {"base_url": url, "model": "genrm", "max_concurrency": 4, "max_attempts": 2, **judge}
        settings = {"steps": STEPS, "batch_size": GROUPS, "group_size": GROUP_SIZE, "max_new_tokens": 8}
        return {
            "model": str(tiny / "models" / "student"),
            "name": "judged",
            "environments": {"sums": {"prompts": str(tmp_path / "prompts.jsonl"), "judge": judge}},
            "train": {**settings, "verifier_workers": 1, "learning_rate": 1e-3, **(train or {})},
        }

    return make


def run(document: dict[str, Any], root: Path, **more: Any) -> SimpleNamespace:
    """Runs a document in a workspace and reads what it left."""
    run_rl(RlConfig.model_validate(document), Workspace(root), base=root, **more)
    return finished(root)


def finished(root: Path) -> SimpleNamespace:
    place = Workspace(root)
    metrics = read_metrics(place.run("judged"))
    return SimpleNamespace(
        metrics=[{k: v for k, v in row.items() if not k.startswith("perf/")} for row in metrics],
        samples=sorted(Store(place.rollouts("judged")).scan(), key=lambda sample: sample.sample_id),
        digest=read_card(place.checkpoint("judged"))["digest"],
    )


def said(samples: list[Sample]) -> list[tuple[Any, ...]]:
    return [(s.sample_id, s.response_ids.tolist(), s.reward, s.verdict, s.verifier, s.verdict_label) for s in samples]


def assert_equal(one: SimpleNamespace, other: SimpleNamespace) -> None:
    assert one.metrics == other.metrics
    assert said(one.samples) == said(other.samples)
    assert one.digest == other.digest


def assert_asked_once(server: Running) -> None:
    figures = server.stats()
    assert figures["bodies_billed_twice"] == 0
    assert figures["billed"] == figures["distinct_bodies_billed"]


def test_answers_earn_what_judge_and_verifier_give_together(
    document: Callable[..., dict[str, Any]], replies: Callable[[Reply], None], tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    with run_in_thread(on_request=asked.append) as server:
        found = run(document(server.url, weight=3, principles=["Be brief."]), tmp_path / "w")
    assert len(found.samples) == STEPS * GROUPS * GROUP_SIZE
    assert {s.verifier for s in found.samples} == {"mix:exact_match/2+judge/2"}
    assert {s.verdict for s in found.samples} == {"ok"}
    assert all("1. Be brief." in body["messages"][0]["content"] for body in asked)
    # The verifier gives a random text 0; the judge has 3 of 4 parts.
    pairs = {responses(body) for body in asked}
    assert all(pair[::-1] in pairs for pair in pairs)
    values = {text: (taste(text) - 1) / 4 for pair in pairs for text in pair}
    for row in found.metrics:
        judged = row["rl/judge"]["sums"]
        assert judged["decided"] == judged["comparisons"] > 0
        assert judged["position_bias"] == 0
        assert row["rl/reward"]["sums"] == pytest.approx(0.75 * judged["reward"], abs=1e-6)
        assert min(values.values()) - 0.125 <= judged["reward"] <= max(values.values()) + 0.125
    assert all(0 <= s.reward <= 0.75 for s in found.samples)
    assert len({s.reward for s in found.samples}) > 2
    assert_asked_once(server)


def test_a_run_that_broke_off_time_and_again_asks_nothing_twice_and_ends_alike(
    document: Callable[..., dict[str, Any]],
    replies: Callable[[Reply], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with run_in_thread() as server:
        straight = run(document(server.url), tmp_path / "straight")
        billed = server.stats()["billed"]
    port = int(server.url.rpartition(":")[2].removesuffix("/v1"))
    with run_in_thread(port=port) as server:
        add, left = ReplyJournal.add, 5

        def add_and_stop(self: ReplyJournal, entry: Entry) -> None:
            nonlocal left
            add(self, entry)
            left -= 1
            if left <= 0:
                raise StopError

        monkeypatch.setattr(ReplyJournal, "add", add_and_stop)
        with pytest.raises(StopError):
            run(document(server.url), tmp_path / "broken")
        let_go()
        assert 5 <= server.stats()["billed"] < billed
        monkeypatch.setattr(ReplyJournal, "add", add)

        def on_step(done: int, metrics: dict[str, Any]) -> None:
            raise StopError

        # Its samples are committed, its weights are lost: the step is repeated without a question.
        with pytest.raises(StopError):
            run(document(server.url), tmp_path / "broken", on_step=on_step)
        let_go()
        broken = run(document(server.url), tmp_path / "broken")
        assert server.stats()["billed"] == billed
        assert_asked_once(server)
    assert_equal(straight, broken)


def test_a_judge_that_is_down_ends_the_run_with_one_line_and_the_same_command_goes_on(
    document: Callable[..., dict[str, Any]],
    replies: Callable[[Reply], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    monkeypatch.setattr(judge_ask, "_DOWN_AFTER_S", 0.0)
    with run_in_thread() as server:
        straight = run(document(server.url), tmp_path / "straight")
    port = int(server.url.rpartition(":")[2].removesuffix("/v1"))
    write_json(tmp_path / "rl.yaml", document(server.url))
    command = ("rl", "--config", tmp_path / "rl.yaml", "--workspace", tmp_path / "w", "--json")
    down = cli(*command)
    assert down.code == 1
    assert down.stdout == ""
    note, line = [line for line in down.stderr.splitlines() if "environment 'sums'" in line]
    assert "5 failures of the judge in a row" in note
    assert f"the judge at {server.url} is down (no answer to " in line
    assert "Traceback" not in down.stderr
    let_go()
    with run_in_thread(port=port):
        assert cli(*command).code == 0
    assert_equal(straight, finished(tmp_path / "w"))


def test_the_key_comes_from_the_environment_and_stands_nowhere(
    document: Callable[..., dict[str, Any]],
    replies: Callable[[Reply], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    key = "sk-very-secret-0123456789"
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with run_in_thread(Faults(api_key=key)) as server:
        write_json(tmp_path / "rl.yaml", document(server.url, api_key_env="JUDGE_KEY", max_attempts=1))
        command = ("rl", "--config", tmp_path / "rl.yaml", "--workspace", tmp_path / "w")
        unset = cli(*command, "--dry-run")
        assert unset.code == 2
        assert "environment variable JUDGE_KEY: not set" in unset.stderr
        monkeypatch.setenv("JUDGE_KEY", "sk-wrong-0123456789abc")
        refused = cli(*command)
        assert refused.code == 1
        assert "Incorrect API key provided: [key]" in refused.stderr
        let_go()
        monkeypatch.setenv("JUDGE_KEY", key)
        done = cli(*command)
        assert done.code == 0
    files = [path for path in (tmp_path / "w").rglob("*") if path.is_file()]
    assert any(path.parent.name == "judge" for path in files)
    for secret in (key, "sk-wrong-0123456789abc"):
        assert not [path for path in files if secret.encode() in path.read_bytes()]
        assert secret not in unset.stderr + refused.stderr + done.stderr + done.stdout


def test_without_a_verifier_the_judge_alone_pays(
    document: Callable[..., dict[str, Any]], replies: Callable[[Reply], None], tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "free.jsonl", [{"id": str(n), "prompt": f"{n}+{n}"} for n in range(5)])
    with run_in_thread() as server:
        made = document(server.url, verifier_weight=0)
        made["environments"]["sums"]["prompts"] = str(tmp_path / "free.jsonl")
        found = run(made, tmp_path / "w")
    assert {s.verifier for s in found.samples} == {"judge/2"}
    assert [row["rl/reward"]["sums"] for row in found.metrics] == pytest.approx(
        [row["rl/judge"]["sums"]["reward"] for row in found.metrics], abs=1e-6
    )


def test_a_step_of_replies_that_cannot_be_read_ends_the_run_instead_of_counting_as_zero(
    document: Callable[..., dict[str, Any]], replies: Callable[[Reply], None], tmp_path: Path
) -> None:
    replies(lambda first, second: "SCORE A: 10")
    with run_in_thread() as server, pytest.raises(MopdctlError, match=f"{GROUPS * GROUP_SIZE} judge_error"):
        run(document(server.url), tmp_path / "w")
    assert not Workspace(tmp_path / "w").checkpoint("judged").exists()


@pytest.mark.slow
@pytest.mark.parametrize("after", [3, 20, 40])
def test_killed_while_the_judge_is_asked_and_started_again_equals_never_killed(
    document: Callable[..., dict[str, Any]], replies: Callable[[Reply], None], tmp_path: Path, after: int
) -> None:
    with run_in_thread() as server:
        straight = run(document(server.url), tmp_path / "straight")
        billed = server.stats()["billed"]
    port = int(server.url.rpartition(":")[2].removesuffix("/v1"))
    write_json(tmp_path / "rl.yaml", document(server.url))
    arguments = ["rl", "--config", str(tmp_path / "rl.yaml"), "--workspace", str(tmp_path / "w")]
    with run_in_thread(Faults(latency_s=0.05), port=port) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "mopdctl", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while server.stats()["billed"] < after:
            assert process.poll() is None
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        resumed = run(document(server.url), tmp_path / "w")
        figures = server.stats()
        # What was on its way comes again under its own key, which a server can know.
        assert figures["billed"] == billed
        assert figures["bodies_billed_twice"] == 0
        assert figures["replayed"] <= 4
    assert_equal(straight, resumed)


@pytest.mark.slow
def test_groups_that_lie_on_two_processes_are_compared_as_on_one(
    document: Callable[..., dict[str, Any]], replies: Callable[[Reply], None], tmp_path: Path
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        launch += ["--master-addr", "127.0.0.1", "--master-port", str(probe.getsockname()[1])]
    with run_in_thread() as server:
        made = document(server.url, train={"steps": 1})
        one = run(made, tmp_path / "one")
        billed = server.stats()["billed"]
        write_json(tmp_path / "rl.yaml", made)
        launch += ["-m", "mopdctl", "rl", "--config", str(tmp_path / "rl.yaml"), "--workspace", str(tmp_path / "two")]
        environment = os.environ.copy()
        done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        # The same questions under the same keys: a server that knows them bills none again.
        assert server.stats()["billed"] == server.stats()["replayed"] == billed
    two = finished(tmp_path / "two")
    assert said(two.samples) == said(one.samples)
    assert [row["rl/judge"] for row in two.metrics] == [row["rl/judge"] for row in one.metrics]
