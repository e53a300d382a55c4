"""A command that an answer asks for runs at most once, whenever its process is killed; its result is used as logged.

The tool here is as unkind as tools are: it appends to a file, and its result says how often it has run. Processes are
killed from outside at any time, and kill themselves at the four points where a command hangs in the air. Each draws
other random numbers, so that nothing comes out the same by chance.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer

import pytest

from mopdctl.engines.fake import CALL
from mopdctl.records import Sample
from mopdctl.rollouts.generate import TOOL_LOST
from mopdctl.store.replay import replay
from mopdctl.store.store import Store
from mopdctl.store.summary import summarize
from mopdctl.store.verify import verify

OUTSIDE = "from outside"
POINTS = ["before it is logged", "before it runs", "before its result is there", "after its result is logged"]

WORKER = r"""
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
from mopdctl.engines import fake
from mopdctl.records import Prompt
from mopdctl.rollouts.generate import RolloutLog, generate
from mopdctl.rollouts.jobs import make_job
from mopdctl.store import store, wal

folder, pipe, salt, deadly, points, budget, samples = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
chance, uniforms, append, names = np.random.default_rng(salt), fake.uniforms, wal.WalWriter.append, {}
fake.uniforms = lambda seed, count: uniforms(seed ^ salt, count)

def tell(*words):
    os.write(pipe, (json.dumps(words) + "\n").encode())

def may_die(point):
    if points[point] == deadly and chance.random() < 0.3:
        tell("dies")
        os.kill(os.getpid(), signal.SIGKILL)

def watched_append(self, records):
    records = list(records)
    kinds = {type(record) for record in records}
    if wal.Call in kinds:
        may_die(0)
    append(self, records)
    names.update({record.slot: record.sample_id for record in records if isinstance(record, wal.Open)})
    tell("step")
    for record in records:
        if isinstance(record, wal.Tool):
            may_die(3)
            tell("result", names[record.slot], record.number, record.position, record.result, record.token_ids.tolist())

class Counting:
    repeatable = False

    def max_turns(self, job):
        return None

    def request(self, job, turn_ids):
        return f"count {len(turn_ids)}" if turn_ids[-1] == fake.CALL else None

    def run(self, job, commands):
        sample_id, number, request = job.sample_id, len(commands) - 1, commands[-1]
        may_die(1)
        with (folder.parent / "runs.txt").open("a") as file:
            file.write(f"{sample_id} {number}\n")
        time.sleep(0.003)
        runs = (folder.parent / "runs.txt").read_text().split("\n")[:-1]
        may_die(2)
        result = {"command": request, "runs": len(runs), "of_this": runs.count(f"{sample_id} {number}")}
        return json.dumps(result), tuple(10 + int(digit) for digit in str(len(runs)))

wal.WalWriter.append = watched_append
jobs = [
    make_job(Prompt(f"q{i}", (), None, {}), "0", seed=0, group_id="", generation_index=0, domain="", teacher_id="",
             prompt_ids=(5, 6), max_new_tokens=budget)
    for i in range(samples)
]
model = fake.FakeModel(mean_length=30, calls=0.08, vocab_size=50, step_s=0.001, batch_size=4)
with store.StoreWriter(folder, {"tokenizer": "t"}) as writer, RolloutLog(folder / "wal", writer="w", level="process",
                                                                         max_segment_bytes=4000) as log:
    log.committed(list(writer.committed))
    left = [job for job in jobs if job.sample_id not in writer.committed]
    for start in range(0, len(left), 6):
        found = list(generate(left[start : start + 6], model, log, temperature=1, policy_version=0,
                              tokenizer_fingerprint="", sampling_fingerprint="", tools=Counting()))
        writer.commit(found)
        log.committed([sample.sample_id for sample in found])
    log.finish()
"""

SAMPLES, BUDGET, KILLS, SEED = 120, 60, 50, 0


@dataclass
class Story:
    """What became known of a run while it was killed time and again."""

    results: dict[tuple[str, int], tuple[int, str, list[int]]] = field(default_factory=dict)
    """Sample and number of a command to position, result and tokens, as they were first logged."""
    lost: set[str] = field(default_factory=set)
    """Samples whose command hung in the air when their process died."""
    deaths: Counter[str] = field(default_factory=Counter)

    def logged(self, sample_id: str, number: int, position: int, result: str, token_ids: list[int]) -> None:
        found = (position, result, token_ids)
        assert self.results.setdefault((sample_id, number), found) == found

    def look(self, folder: Path) -> None:
        """Takes in what the log holds after a death."""
        for sample_id, sample in replay(folder / "wal").samples.items():
            for tool in sample.tools:
                self.logged(sample_id, tool.number, tool.position, tool.result, tool.token_ids.tolist())
            if sample.pending_call:
                assert sample.finish_reason in (None, TOOL_LOST)
                assert sample.pending_call.number == len(sample.tools)
                self.lost.add(sample_id)


def live(folder: Path, story: Story, *, salt: int, deadly: str, after: int | None, delay_s: float) -> int:
    """One process, killed `delay_s` after it has told so many lines, or by itself at `deadly`; its exit code."""
    read, write = os.pipe()
    words = map(json.dumps, (write, salt, deadly, POINTS, BUDGET, SAMPLES))
    with subprocess.Popen([sys.executable, "-c", WORKER, folder, *words], pass_fds=[write]) as process:
        os.close(write)
        timer = Timer(delay_s, process.kill)
        with os.fdopen(read, "rb") as pipe:
            for number, line in enumerate(pipe, start=1):
                if line.endswith(b"\n"):  # else the process died over it
                    kind, *told = json.loads(line)
                    if kind == "result":
                        story.logged(*told)
                if number == after:
                    timer.start()
        code = process.wait()
        timer.cancel()
    story.deaths[deadly] += code == -signal.SIGKILL
    return code


def run_until_done(folder: Path, *, kills: int) -> tuple[Story, dict[str, Sample]]:
    """A run that is killed up to `kills` times, and the samples that it left, held against what became known."""
    rng, story, code = random.Random(SEED), Story(), -signal.SIGKILL
    while code == -signal.SIGKILL:
        more = story.deaths.total() < kills
        deadly = rng.choice([OUTSIDE] * 4 + POINTS)
        code = live(
            folder,
            story,
            salt=rng.getrandbits(64),
            deadly=deadly if more else "",
            after=rng.randint(1, 60) if more and deadly == OUTSIDE else None,
            delay_s=rng.uniform(0, 0.008),
        )
        story.look(folder)
    assert code == 0
    assert verify(folder).problems == []
    assert list((folder / "wal").iterdir()) == []
    samples = list(Store(folder).scan())
    assert sorted(sample.sample_id for sample in samples) == sorted(f"q{i}/0@0" for i in range(SAMPLES))
    lines = (folder.parent / "runs.txt").read_text().splitlines()
    ran = Counter((sample_id, int(number)) for sample_id, number in (line.split(" ") for line in lines))
    for sample in samples:
        check(sample, story, ran)
    return story, {sample.sample_id: sample for sample in samples}


def check(sample: Sample, story: Story, ran: Counter[tuple[str, int]]) -> None:
    """Holds a final sample against the log and against what really ran."""
    response, lost = sample.response_ids.tolist(), sample.sample_id in story.lost
    own = {number: result for (sample_id, number), result in story.results.items() if sample_id == sample.sample_id}
    mask = [True] * len(response)
    assert sorted(own) == list(range(len(own)))
    for number, (position, result, token_ids) in own.items():
        end = position + len(token_ids)
        assert response[position - 1] == CALL
        assert response[position:end] == token_ids
        mask[position:end] = [False] * len(token_ids)
        assert ran[sample.sample_id, number] == 1
        told = json.loads(result)
        begun = own[number - 1][0] + len(own[number - 1][2]) if number else 0
        assert (told["command"], told["of_this"]) == (f"count {position - begun}", 1)
        whole = [10 + int(digit) for digit in str(told["runs"])]
        assert token_ids == whole[: BUDGET - position]
    asked = [place + 1 for place, token in enumerate(response) if token == CALL]
    assert [position for position in asked if position < len(response)] == [own[n][0] for n in sorted(own)]
    assert sample.response_mask.tolist() == mask
    assert len(sample.behavior_logprobs) == sum(mask)
    assert len(response) <= BUDGET
    # Nothing else has run, except for a command whose process died before its result was logged: once, and no more.
    others = {
        number: n for (sample_id, number), n in ran.items() if sample_id == sample.sample_id and number not in own
    }
    assert others in ({}, {len(own): 1} if lost else {})
    assert (sample.finish_reason == TOOL_LOST) == lost
    assert not lost or response[-1] == CALL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_command_runs_at_most_once_wherever_its_process_is_killed(tmp_path: Path) -> None:
    story, samples = run_until_done(tmp_path / "store", kills=KILLS)
    print(f"seed {SEED}: {dict(story.deaths)}, {len(story.results)} results, {len(story.lost)} lost")  # noqa: T201
    assert story.deaths.total() >= 40
    assert all(story.deaths[point] > 1 for point in (OUTSIDE, *POINTS))
    assert len(story.results) > 100
    assert max(sample.attempt for sample in samples.values()) > 1
    # A command that had not begun is no loss, one that may have begun is.
    assert story.deaths[POINTS[1]] + story.deaths[POINTS[2]] <= len(story.lost) < len(samples) / 2
    assert summarize(Store(tmp_path / "store"))["finish_reasons"][TOOL_LOST] == len(story.lost)


@pytest.mark.slow
def test_without_a_death_no_command_is_lost(tmp_path: Path) -> None:
    story, samples = run_until_done(tmp_path / "store", kills=0)
    assert story.deaths.total() == 0
    assert len(story.results) > 100
    assert {sample.finish_reason for sample in samples.values()} == {"stop", "length"}
