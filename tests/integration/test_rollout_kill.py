"""`kill -9` at random points of a running `mopdctl rollout`: nothing acknowledged is lost, nothing is there twice.

The command runs with a witness: after each append to the log and after each commit has returned, it tells through a
pipe what is safe by now. A deterministic engine hides a lost token by writing it again, so in half of the stores the
engine draws other random numbers in each process: what was lost would come out different. And since the kernel takes a
short write whole, in half of the stores a frame of the log is written in several pieces, so that tails are torn, too.
"""

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from threading import Timer

import pytest

from mopdctl.files import write_jsonl
from mopdctl.records import Sample
from mopdctl.store.replay import replay
from mopdctl.store.store import Store
from mopdctl.store.verify import unnamed, verify

WITNESS = r"""
import os, sys, time
from mopdctl.cli.app import main
from mopdctl.engines import fake
from mopdctl.store import store, wal

pipe, salt, pieces = map(int, sys.argv[1:4])
names, append, commit, uniforms, write = {}, wal.WalWriter.append, store.StoreWriter.commit, fake.uniforms, os.write

def tell(lines):
    write(pipe, "".join(f"{line}\n" for line in lines).encode())

def witnessed_append(self, records):
    records = list(records)
    append(self, records)
    lines = []
    for record in records:
        if isinstance(record, wal.Open):
            names[record.slot] = record.sample_id
        elif isinstance(record, wal.Tokens):
            for slot, position, token in zip(record.slots, record.positions, record.token_ids):
                lines.append(f"token {names[slot]} {position} {token}")
    tell(lines)

def witnessed_commit(self, samples):
    tell(["commit"])
    commit(self, samples)
    tell(f"committed {sample.sample_id}" for sample in samples)

def write_half(handle, data):
    time.sleep(0.001)
    return write(handle, data[:(len(data) + 1) // 2] if len(data) > 64 else data)

wal.WalWriter.append, store.StoreWriter.commit = witnessed_append, witnessed_commit
fake.uniforms = lambda seed, count: uniforms(seed ^ salt, count)
if pieces:
    os.write = write_half
sys.argv = ["mopdctl", *sys.argv[4:]]
main()
"""

SEED = 0
"""Of the kill schedule. When a signal arrives hangs on the machine as well."""
PROMPTS, SAMPLES = 80, 2
KILLS = 204
KILLS_PER_STORE = 17
CASES = [
    {"durability": "process", "fresh": False, "pieces": False},
    {"durability": "process", "fresh": True, "pieces": True},
    {"durability": "process", "fresh": True, "pieces": False},
    {"durability": "host", "fresh": False, "pieces": True},
    {"durability": "process", "fresh": False, "pieces": True},
    {"durability": "host", "fresh": True, "pieces": False},
]


def command(workspace: Path, prompts: Path, *, durability: str, batch_size: int, commit_every: int) -> list[str]:
    model = "fake:mean_length=25,sigma=0.8,step_s=0.002"
    flags = {
        "--samples": SAMPLES,
        "--max-new-tokens": 100,
        "--durability": durability,
        "--batch-size": batch_size,
        "--commit-every": commit_every,
        "--workspace": workspace,
    }
    return [
        *("rollout", "--engine", "fake", "--model", model, "--prompts", str(prompts), "--out", "store"),
        *(str(word) for pair in flags.items() for word in pair),
    ]


@dataclass
class Story:
    """What was acknowledged so far, what was seen on disk after each kill, and where the kills hit."""

    tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    left_over: set[str] = field(default_factory=set)
    hits: dict[str, int] = field(default_factory=dict)

    def hear(self, line: str) -> None:
        """Takes in what the witness told."""
        kind, *words = line.split(" ")
        if kind == "token":
            sample_id, position, token = words[0], int(words[1]), int(words[2])
            before = self.tokens.setdefault(sample_id, {}).setdefault(position, token)
            assert before == token, f"{sample_id}: position {position} was written twice, differently"
        elif kind == "committed":
            self.committed.add(words[0])

    def check(self, folder: Path) -> None:
        """Every acknowledged token is in the store or in the log, every acknowledged commit in the store."""
        if not list(folder.glob("manifest/*.json")):
            assert not self.tokens
            return
        store = Store(folder)
        assert not store.warnings
        ids = store.meta_table(["sample_id"])["sample_id"].to_pylist()
        assert len(ids) == len(set(ids))
        assert self.committed | self.read <= set(ids)
        fresh = [number for number, sample_id in enumerate(ids) if sample_id not in self.read]
        for sample in store.read(fresh):
            self.has(sample.sample_id, sample.response_ids.tolist())
            self.read.add(sample.sample_id)
        store.close()
        found = replay(folder / "wal")
        for sample_id in self.tokens.keys() - self.read:
            self.has(sample_id, found.samples[sample_id].tokens.tolist())
        left_over = {*unnamed(folder), *(path.name for path in (folder / "_staging").iterdir())}
        self._hit("in a sample", any(s.finish_reason is None for n, s in found.samples.items() if n not in self.read))
        self._hit("in a commit", bool(left_over - self.left_over or self.read - self.committed))
        self._hit("in a frame", bool(found.torn))
        self.left_over |= left_over
        self.committed |= self.read

    def has(self, sample_id: str, response: list[int]) -> None:
        """Whether a response holds what was acknowledged of it."""
        for position, token in self.tokens.get(sample_id, {}).items():
            assert response[position : position + 1] == [token], f"{sample_id}: acknowledged token {position} is lost"

    def _hit(self, where: str, yes: bool) -> None:
        self.hits[where] = self.hits.get(where, 0) + yes


def live(story: Story, arguments: list[str], *, salt: int, pieces: bool, aim: str, after: int, delay_s: float) -> int:
    """One process, killed `delay_s` after the witness told the `after`-th line of kind `aim`; returns its exit code."""
    read, write = os.pipe()
    witnessed = [sys.executable, "-c", WITNESS, str(write), str(salt), str(int(pieces)), *arguments]
    with subprocess.Popen(witnessed, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        os.close(write)
        timer = Timer(delay_s, process.kill)
        if aim == "start":
            timer.start()
        with os.fdopen(read, "rb") as pipe:
            for line in pipe:
                if line.endswith(b"\n"):  # else the witness died over it
                    story.hear(line[:-1].decode())
                    after -= line.startswith(aim.encode() + (b" " if aim == "token" else b"\n"))
                    if not after and timer.ident is None:
                        timer.start()
        code = process.wait()
        timer.cancel()
    return code


def killed_time_and_again(workspace: Path, prompts: Path, *, durability: str, fresh: bool, pieces: bool) -> Story:
    """Kills a command so often, then lets it end. The schedule hangs on the workspace's name and the seed."""
    rng, story = random.Random(f"{SEED} {workspace.name}"), Story(hits={"kills": 0})
    folder, code = workspace / "rollouts" / "store", -signal.SIGKILL
    while code == -signal.SIGKILL:
        more = story.hits["kills"] < KILLS_PER_STORE
        aim = rng.choices(["start", "token", "commit"], [1, 5, 4])[0] if more else "nothing"
        code = live(
            story,
            command(
                workspace,
                prompts,
                durability=durability,
                batch_size=rng.choice([4, 8]),
                commit_every=rng.choice([4, 12]),
            ),
            salt=rng.getrandbits(64) if fresh else 0,
            pieces=pieces,
            aim=aim,
            after=rng.randint(1, 300) if aim == "token" else rng.randint(1, 2),
            delay_s=rng.uniform(0, {"start": 1.0, "token": 0.006, "commit": 0.03, "nothing": 0}[aim]),
        )
        story.hits["kills"] += code == -signal.SIGKILL
        story.check(folder)
    assert code == 0
    assert verify(folder).problems == []
    assert [*(folder / "wal").iterdir(), *(folder / "_staging").iterdir()] == []
    return story


def samples_of(workspace: Path) -> dict[str, Sample]:
    found = list(Store(workspace / "rollouts" / "store").scan())
    assert len({sample.sample_id for sample in found}) == len(found)
    return {sample.sample_id: sample for sample in found}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    write_jsonl(prompts, [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(PROMPTS)])
    straight = command(tmp_path / "straight", prompts, durability="process", batch_size=64, commit_every=1000)
    done = subprocess.run([sys.executable, "-m", "mopdctl", *straight], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    truth = samples_of(tmp_path / "straight")
    assert len(truth) == PROMPTS * SAMPLES

    def kill_stores(half: int) -> dict[str, int]:
        """Kills half of the stores until there were enough kills, and holds what they have against the truth."""
        hits: dict[str, int] = {}
        for number, case in enumerate(cycle(CASES[half::2])):
            if hits.get("kills", 0) >= KILLS / 2:
                break
            workspace = tmp_path / f"{half}-{number}"
            story = killed_time_and_again(workspace, prompts, **case)
            hits = {where: hits.get(where, 0) + count for where, count in story.hits.items()}
            found = samples_of(workspace)
            assert found.keys() == truth.keys()
            assert max(sample.attempt for sample in found.values()) > 1
            for sample_id, sample in found.items():
                story.has(sample_id, sample.response_ids.tolist())
                if not case["fresh"]:
                    assert sample.tokens.tolist() == truth[sample_id].tokens.tolist()
                    assert sample.behavior_logprobs.tolist() == truth[sample_id].behavior_logprobs.tolist()
                    assert sample.finish_reason == truth[sample_id].finish_reason
        return hits

    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(kill_stores, range(2)))
    hits = {where: sum(half[where] for half in halves) for where in halves[0]}
    print(f"seed {SEED}: {hits}")  # noqa: T201 - pytest shows it where the test fails
    assert hits["kills"] >= 200
    assert hits["in a sample"] >= 60
    assert hits["in a commit"] >= 20
    assert hits["in a frame"] >= 5
