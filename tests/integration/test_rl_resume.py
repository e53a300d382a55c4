"""`mopdctl rl`, killed at any moment or shared among processes, ends as one run that nobody disturbed."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from mopdctl.config.rl import RlConfig
from mopdctl.files import write_json, write_jsonl
from mopdctl.rl.run import run_rl
from mopdctl.runs import Workspace, read_card, read_metrics
from mopdctl.store.store import Store
from mopdctl.train.session import Session

Stopped = Callable[..., AbstractContextManager[None]]
Cli = Callable[..., SimpleNamespace]
STEPS = 4


@pytest.fixture(scope="module")
def config(errands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An `rl.yaml`: conversations with tools and short texts, other prompts in place of groups that teach nothing."""
    folder = tmp_path_factory.mktemp("config")
    limit = {"constraints": [{"kind": "characters", "max": 20}]}
    texts = [{"id": str(i), "prompt": f"{i}-{i * i}", "verifier": "constraints", "reference": limit} for i in range(12)]
    write_jsonl(folder / "texts.jsonl", texts)
    document = {
        "name": "grpo",
        "model": str(errands / "model"),
        "environments": {
            "errands": {"prompts": str(errands / "errands.jsonl"), "weight": 2},
            "texts": {"prompts": "texts.jsonl", "max_new_tokens": 12},
        },
        "train": {
            "steps": STEPS,
            "batch_size": 6,
            "group_size": 4,
            "max_new_tokens": 90,
            "learning_rate": 1e-3,
            "zero_variance": "resample",
            "checkpoint_every": 2,
            "verifier_workers": 1,
        },
    }
    write_json(folder / "rl.yaml", document)
    return folder / "rl.yaml"


def read(root: Path) -> SimpleNamespace:
    """What a run left: metrics without times, weights, card, all that the store keeps, and the files in the log."""
    place = Workspace(root)
    samples = sorted(Store(place.rollouts("grpo")).scan(), key=lambda s: s.sample_id)
    return SimpleNamespace(
        metrics=[
            {k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(place.run("grpo"))
        ],
        weights=load_file(place.checkpoint("grpo") / "model.safetensors"),
        card=read_card(place.checkpoint("grpo")),
        samples=samples,
        kept=[
            (
                *(s.sample_id, s.prompt_id, s.group_id, s.generation_index, s.policy_version_min, s.finish_reason),
                *(s.tokens.tolist(), s.loss_mask.tolist(), s.behavior_logprobs.tolist(), s.sampling_fingerprint),
                *(s.reward, s.verdict, s.verifier, s.verdict_label),
            )
            for s in samples
        ],
        log=list((place.rollouts("grpo") / "wal").iterdir()),
    )


def assert_equal(straight: SimpleNamespace, resumed: SimpleNamespace) -> None:
    assert resumed.metrics == straight.metrics
    assert [row["step"] for row in straight.metrics] == list(range(STEPS))
    assert resumed.kept == straight.kept
    assert resumed.weights.keys() == straight.weights.keys()
    assert all(resumed.weights[name].equal(weight) for name, weight in straight.weights.items())
    assert resumed.card == straight.card
    assert resumed.log == straight.log == []


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("straight")
    run_rl(RlConfig.model_validate_json(config.read_text("utf-8")), Workspace(root), base=config.parent)
    return read(root)


def command(config: Path, root: Path) -> list[str]:
    return [sys.executable, "-m", "mopdctl", "rl", "--config", str(config), "--workspace", str(root), "--json"]


def metrics_of(root: Path) -> Path:
    return root / "runs" / "grpo" / "metrics.jsonl"


def test_the_run_holds_what_the_kills_are_to_hit(straight: SimpleNamespace) -> None:
    assert sum(row["rl/resample_rounds"] for row in straight.metrics) > 0
    talks = [s for s in straight.samples if s.domain == "errands"]
    assert {s.verdict for s in straight.samples} == {"ok"}
    assert {s.reward for s in talks} == {0.0, 1.0}
    assert sum(not s.response_mask.all() for s in talks) > len(talks) / 2
    # What a tool wrote is no token to learn.
    trained = sum(s.loss_mask.sum() for s in straight.samples)
    assert 0 < sum(row["rollout/tokens"] for row in straight.metrics) <= trained


def test_killed_and_started_again_equals_never_killed(
    cli: Cli, config: Path, straight: SimpleNamespace, tmp_path: Path, stopped_after: Stopped
) -> None:
    # In the middle of a step: the third line is written, the state after two steps is the last one.
    with stopped_after(metrics_of(tmp_path), 3, command(config, tmp_path), delay_s=0.15):
        second = cli("rl", "--config", config, "--workspace", tmp_path, "--json")
        assert (second.code, second.stdout) == (2, "")
        assert "another process is writing here" in second.stderr
    assert [p.name for p in (tmp_path / "runs" / "grpo" / "state").glob("[!.]*")] == ["step-000002"]
    again = cli("rl", "--config", config, "--workspace", tmp_path, "--json")
    assert again.code == 0, again.stderr
    assert json.loads(again.stdout)["checkpoint"] == str(tmp_path / "checkpoints" / "grpo")
    assert_equal(straight, read(tmp_path))
    assert [p for p in tmp_path.rglob("*") if ".building" in p.name or p.suffix == ".tmp"] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_many_times_equals_never_killed(
    config: Path, straight: SimpleNamespace, tmp_path: Path, seed: int, stopped_after: Stopped
) -> None:
    rng = random.Random(seed)
    # A resumed run keeps the lines before its state: none in the first two, then two.
    for lines in (0, 1, 2, 3, 3):
        with stopped_after(metrics_of(tmp_path), lines, command(config, tmp_path), delay_s=rng.uniform(0, 0.6)):
            pass
        if (tmp_path / "checkpoints" / "grpo").exists():
            break
    done = subprocess.run(command(config, tmp_path), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_equal(straight, read(tmp_path))


def test_a_run_that_broke_off_before_its_checkpoint_equals_one_that_did_not(
    config: Path, straight: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All rollouts are committed and compacted by then, and the log is closed.
    document = RlConfig.model_validate_json(config.read_text("utf-8"))
    with monkeypatch.context() as patch:
        patch.setattr(Session, "publish", _interrupted)
        with pytest.raises(InterruptedError):
            run_rl(document, Workspace(tmp_path), base=config.parent)
    assert not (tmp_path / "checkpoints" / "grpo").exists()
    run_rl(document, Workspace(tmp_path), base=config.parent)
    assert_equal(straight, read(tmp_path))


def _interrupted(*_: Any) -> None:
    raise InterruptedError


@pytest.mark.slow
def test_two_processes_do_what_one_does(config: Path, straight: SimpleNamespace, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port), *command(config, tmp_path)[1:]]
    environment = os.environ.copy()
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoint"] == str(tmp_path / "checkpoints" / "grpo")
    two = read(tmp_path)
    assert two.log == []
    for alone, together in zip(straight.metrics, two.metrics, strict=True):
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            if name in ("rl/labels", "rl/states", "rl/groups", "rl/resample_rounds", "rl/updates", "rollout/tokens"):
                assert together[name] == value, name
            else:
                assert together[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for mine, ours in zip(straight.samples, two.samples, strict=True):
        assert (mine.sample_id, mine.tokens.tolist()) == (ours.sample_id, ours.tokens.tolist())
        assert (mine.reward, mine.verdict, mine.verifier) == (ours.reward, ours.verdict, ours.verifier)
    assert max(float((two.weights[n] - w).abs().max()) for n, w in straight.weights.items()) < 1e-4
