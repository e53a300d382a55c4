"""`kill -9` at random points of a running `mopdctl rollout`: nothing acknowledged is lost, nothing is there twice.

The command runs with a witness: after each append to the log and after each commit has returned, it writes down what is
safe by now. A deterministic engine hides a lost token by writing it again, so a part of the kills has an engine that
draws other random numbers in each process: what was lost would come out different.
"""

import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mopdctl.files import write_jsonl
from mopdctl.records import Sample
from mopdctl.store.replay import replay
from mopdctl.store.store import Store
from mopdctl.store.verify import unnamed, verify

WITNESS = r"""
import os, sys
from mopdctl.cli.app import main
from mopdctl.engines import fake
from mopdctl.store import store, wal

salt, handle = int(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
names, append, commit, uniforms = {}, wal.WalWriter.append, store.StoreWriter.commit, fake.uniforms

def witnessed_append(self, records):
    records = list(records)
    append(self, records)
    lines = []
    for record in records:
        if isinstance(record, wal.Open):
            names[record.slot] = record.sample_id
        elif isinstance(record, wal.Tokens):
            for slot, position, token in zip(record.slots, record.positions, record.token_ids):
                lines.append(f"{names[slot]} {position} {token}\n")
    os.write(handle, "".join(lines).encode())

def witnessed_commit(self, samples):
    commit(self, samples)
    os.write(handle, "".join(f"{sample.sample_id} committed\n" for sample in samples).encode())

wal.WalWriter.append, store.StoreWriter.commit = witnessed_append, witnessed_commit
fake.uniforms = lambda seed, count: uniforms(seed ^ salt, count)
sys.argv = ["mopdctl", *sys.argv[3:]]
main()
"""


@dataclass
class Story:
    """What was acknowledged so far, and where the kills hit."""

    tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    kills: int = 0
    in_a_sample: int = 0
    in_a_commit: int = 0

    def hear(self, path: Path, start: int) -> int:
        """Takes in what the witness wrote from byte `start` on; a line that was cut short is none."""
        data = path.read_bytes()[start:] if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.decode().splitlines():
            sample_id, position, *token = line.split(" ")
            if token:
                before = self.tokens.setdefault(sample_id, {}).setdefault(int(position), int(token[0]))
                assert before == int(token[0]), f"{sample_id}: position {position} was written twice, differently"
            else:
                self.committed.add(sample_id)
        return start + len(data)

    def check(self, folder: Path) -> None:
        """Every acknowledged token is in the store or in the log, every acknowledged commit in the store."""
        if not (folder / "manifest").exists():
            assert not self.tokens
            return
        store = Store(folder)
        assert not store.warnings
        ids = store.meta_table(["sample_id"])["sample_id"].to_pylist()
        assert len(ids) == len(set(ids))
        assert self.committed <= set(ids)
        fresh = [number for number, sample_id in enumerate(ids) if sample_id not in self.read]
        for sample in store.read(fresh):
            self.has(sample.sample_id, sample.response_ids.tolist())
            self.read.add(sample.sample_id)
        logged = replay(folder / "wal").samples
        for sample_id in self.tokens.keys() - self.read:
            self.has(sample_id, logged[sample_id].tokens.tolist())
        self.in_a_sample += any(s.finish_reason is None for n, s in logged.items() if n not in self.read)
        self.in_a_commit += bool(unnamed(folder) or list((folder / "_staging").iterdir()))

    def has(self, sample_id: str, response: list[int]) -> None:
        for position, token in self.tokens.get(sample_id, {}).items():
            assert response[position] == token, f"{sample_id}: token {position} was acknowledged and is lost"


def command(workspace: Path, prompts: Path, durability: str, step_s: float) -> list[str]:
    options = {"mean_length": 15, "sigma": 0.8, "step_s": step_s}
    model = "fake:" + ",".join(f"{name}={value}" for name, value in options.items())
    flags = {"--samples": 2, "--max-new-tokens": 60, "--commit-every": 48, "--durability": durability}
    return [
        *("rollout", "--engine", "fake", "--model", model, "--prompts", str(prompts), "--out", "killed"),
        *("--workspace", str(workspace), *(str(word) for pair in flags.items() for word in pair)),
    ]


def killed_time_and_again(root: Path, name: str, prompts: Path, *, kills: int, fresh: bool, durability: str) -> Story:
    """Kills the command `kills` times, then lets it end. The schedule hangs on `name` alone."""
    rng = random.Random(name)
    workspace, heard, story = root / name, root / f"{name}.txt", Story()
    folder, start = workspace / "rollouts" / "killed", 0
    arguments = command(workspace, prompts, durability, 0.004)
    for life in range(kills + 1):
        salt = rng.getrandbits(64) if fresh else 0
        witnessed = [sys.executable, "-c", WITNESS, str(salt), str(heard), *arguments]
        process = subprocess.Popen(witnessed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if life < kills:
            size = heard.stat().st_size if heard.exists() else 0
            while process.poll() is None and (not heard.exists() or heard.stat().st_size == size):
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.25))
            process.kill()
        _, errors = process.communicate()
        assert process.returncode in ((-signal.SIGKILL,) if life < kills else (0,)), errors
        story.kills += process.returncode == -signal.SIGKILL
        start = story.hear(heard, start)
        story.check(folder)
    assert verify(folder).problems == []
    assert list((folder / "wal").iterdir()) == []
    return story


def samples_of(folder: Path) -> dict[str, Sample]:
    found = list(Store(folder).scan())
    assert len({s.sample_id for s in found}) == len(found)
    return {s.sample_id: s for s in found}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    write_jsonl(prompts, [{"id": f"q{i}", "prompt": f"question {i}", "domain": "math"} for i in range(1500)])
    schedule = {
        "process": {"kills": 90, "fresh": False, "durability": "process"},
        "fresh": {"kills": 90, "fresh": True, "durability": "process"},
        "host": {"kills": 30, "fresh": False, "durability": "host"},
    }
    straight = [sys.executable, "-m", "mopdctl", *command(tmp_path / "straight", prompts, "process", 0)]
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(killed_time_and_again, tmp_path, name, prompts, **s) for name, s in schedule.items()}
        stories = {name: run.result() for name, run in runs.items()}
    print({n: (s.kills, s.in_a_sample, s.in_a_commit) for n, s in stories.items()})
    assert sum(story.kills for story in stories.values()) >= 200
    assert sum(story.in_a_sample for story in stories.values()) >= 100
    assert sum(story.in_a_commit for story in stories.values()) >= 5
    done = subprocess.run(straight, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    truth = samples_of(tmp_path / "straight" / "rollouts" / "killed")
    assert len(truth) == 3000
    for name, story in stories.items():
        found = samples_of(tmp_path / name / "rollouts" / "killed")
        assert found.keys() == truth.keys()
        assert max(sample.attempt for sample in found.values()) > 1
        for sample_id, sample in found.items():
            if not schedule[name]["fresh"]:
                assert sample.tokens.tolist() == truth[sample_id].tokens.tolist()
                assert sample.behavior_logprobs.tolist() == truth[sample_id].behavior_logprobs.tolist()
                assert sample.finish_reason == truth[sample_id].finish_reason
            story.has(sample_id, sample.response_ids.tolist())
