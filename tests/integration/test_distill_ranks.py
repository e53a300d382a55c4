"""The whole command on two processes against one."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.files import write_json


@pytest.mark.slow
def test_two_processes_do_what_one_does(
    teachers_document: Callable[..., dict[str, Any]],
    finished: Callable[..., SimpleNamespace],
    distil: Callable[..., SimpleNamespace],
    tmp_path: Path,
) -> None:
    # Seven prompts of three teachers: ranks hold four and three samples, and one of them lacks a teacher now and then.
    train: dict[str, Any] = {"steps": 2, "batch_size": 7, "learning_rate": 1e-4, "checkpoint_every": 1}
    document = teachers_document(**train, grad_share_every=1)
    write_json(tmp_path / "teachers.yaml", document)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "mopdctl", "distill", "--json"]
    launch += ["--teachers", str(tmp_path / "teachers.yaml"), "--workspace", str(tmp_path / "two"), "--controls"]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=240, check=False)
    told = json.loads(done.stdout)
    # Answers of random teachers have no end and train nobody. That is said, and keeps no other control from being made.
    assert done.returncode == 1, done.stderr
    assert told["controls"]["merged.seqkd"].startswith("failed: teacher 'arithmetic': none of its 5 answers")
    assert told["checkpoint"] == str(tmp_path / "two" / "checkpoints" / "merged")
    # One rank writes a control, whatever trains it: a merge is made by each and saved by the first.
    made = [name for name, what in told["controls"].items() if not what.startswith(("not made", "failed"))]
    assert {"merged.merge", "merged.linear", "merged.ties", "merged.only-tools"} <= set(made)
    assert all((tmp_path / "two" / "checkpoints" / name / "card.json").exists() for name in made)
    one, two = distil(document), finished(tmp_path / "two")
    assert len(two.metrics) == 2
    for alone, together, mine, ours in zip(one.metrics, two.metrics, one.rollouts, two.rollouts, strict=True):
        assert together["train/loss"] == pytest.approx(alone["train/loss"], abs=1e-6)
        assert together["train/grad_norm"] == pytest.approx(alone["train/grad_norm"], rel=1e-5)
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            assert together[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert [r["sample_id"] for r in ours] == [r["sample_id"] for r in mine]
        assert [r["response_ids"] for r in ours] == [r["response_ids"] for r in mine]
        for row, other in zip(mine, ours, strict=True):
            assert other["teacher_logprobs"] == pytest.approx(row["teacher_logprobs"], abs=1e-5)
    assert max(float((two.weights[n] - w).abs().max()) for n, w in one.weights.items()) < 1e-5
