"""A process dies after any engine step and the next one goes on there: same tokens, same budget, nothing twice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from mopdctl.engines.base import Sampler, SampleRequest, Step, uniforms
from mopdctl.engines.fake import CALL, END, FakeModel
from mopdctl.errors import MopdctlError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.generate import TOOL_LOST, RolloutLog, Tools, generate
from mopdctl.rollouts.jobs import Job, make_job
from mopdctl.rollouts.run import RolloutSpec, load_engine
from mopdctl.runs import Workspace
from mopdctl.store import disk
from mopdctl.store.replay import replay
from mopdctl.store.wal import SegmentName, Tokens, WalWriter, read_frames

MODEL = FakeModel(mean_length=12, sigma=0.8, vocab_size=50, batch_size=4)
CALLING = replace(MODEL, calls=0.15)


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine dies here, and there are thousands of processes."""
    monkeypatch.setattr(disk, "sync_file", lambda path: None)


class DiedError(Exception):
    """What kills a process in these tests."""


def make_jobs(count: int, *, budget: int = 40, seed: int = 0) -> list[Job]:
    return [
        make_job(
            Prompt(f"p{i}", ({"role": "user", "content": "x"},), None, {}),
            "0",
            seed=seed,
            group_id=f"g{i}",
            generation_index=i % 3,
            domain="math",
            teacher_id="m",
            prompt_ids=(7, 8, 9 + i),
            max_new_tokens=budget,
        )
        for i in range(count)
    ]


@dataclass(frozen=True)
class Dying:
    """A sampler whose process dies instead of step `steps` of its life."""

    sampler: Sampler
    steps: int
    taken: list[Step] = field(default_factory=list)

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        for step in self.sampler.stream(requests, temperature=temperature):
            if len(self.taken) == self.steps:
                raise DiedError
            self.taken.append(step)
            yield step


@dataclass(frozen=True)
class Script:
    """A sampler that writes what is written down for a sample; what its process finds there counts as written."""

    answers: dict[str, Sequence[tuple[int, float]]]

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        for i, request in enumerate(requests):
            for token, logprob in self.answers[request.sample_id][len(request.response_ids) :]:
                ended = {i: "stop"} if token in (END, CALL) else {}
                yield Step(np.array([i]), np.array([token], np.int32), np.array([logprob], np.float32), ended)
                if ended:
                    break


class Unasked:
    """A sampler that must not be asked."""

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        raise AssertionError(f"asked for {[request.sample_id for request in requests]}")


@dataclass
class Echo:
    """Tools whose result says what was asked, in as many tokens as the sample has had commands."""

    ran: list[tuple[str, int, str]] = field(default_factory=list)
    width: int = 1
    repeatable: bool = False
    most: int | None = None

    def max_turns(self, job: Job) -> int | None:
        return self.most

    def request(self, job: Job, turn_ids: Sequence[int]) -> str | None:
        return f"after {len(turn_ids)}" if turn_ids[-1] == CALL else None

    def run(self, job: Job, commands: Sequence[str]) -> tuple[str, tuple[int, ...]]:
        number = len(commands) - 1
        self.ran.append((job.sample_id, number, commands[-1]))
        return f"result {number}", (40 + number,) * self.width * (number + 1)


def life(
    folder: Path,
    jobs: Sequence[Job],
    sampler: Sampler,
    *,
    tools: Tools | None = None,
    version: int = 0,
    level: str = "process",
    **options: Any,
) -> list[Sample]:
    """What one process yields before it is done or dies."""
    found: list[Sample] = []
    with RolloutLog(folder, writer="w", level=level, **options) as log:
        run_on(log, jobs, sampler, found, tools=tools, version=version)
    return found


def run_on(
    log: RolloutLog,
    jobs: Sequence[Job],
    sampler: Sampler,
    found: list[Sample],
    *,
    tools: Tools | None = None,
    version: int = 0,
) -> None:
    try:
        for sample in generate(
            jobs,
            sampler,
            log,
            temperature=1.0,
            policy_version=version,
            tokenizer_fingerprint="tok",
            sampling_fingerprint="smp",
            tools=tools,
        ):
            found.append(sample)
    except DiedError:
        pass


def by_id(samples: Sequence[Sample]) -> dict[str, Sample]:
    found = {sample.sample_id: sample for sample in samples}
    assert len(found) == len(samples)
    return found


def content(sample: Sample) -> tuple[Any, ...]:
    """Everything that does not hang on how often the process died, to the bit."""
    return (
        sample.tokens.tolist(),
        sample.prompt_length,
        sample.loss_mask.tolist(),
        sample.behavior_logprobs.tobytes(),
        sample.finish_reason,
    )


def contents(samples: Sequence[Sample]) -> dict[str, tuple[Any, ...]]:
    return {sample_id: content(sample) for sample_id, sample in by_id(samples).items()}


# --------------------------------------------------------------------------------------------------- what a sample says


def test_a_sample_says_all_that_is_known_of_it(tmp_path: Path) -> None:
    (job,) = make_jobs(1)
    script = Script({job.sample_id: [(20, -1.5), (CALL, -0.25), (-1, 0), (21, -2.0), (END, -0.5)]})
    (sample,) = life(tmp_path, [job], script, tools=Echo(), version=6)
    assert job.sample_id == "p0/0@0"
    expected = {
        "sample_id": "p0/0@0",
        "prompt_id": "p0",
        "group_id": "g0",
        "generation_index": 0,
        "domain": "math",
        "teacher_id": "m",
        "policy_version_min": 6,
        "policy_version_max": 6,
        "tokens": [7, 8, 9, 20, CALL, 40, 21, END],
        "prompt_length": 3,
        "loss_mask": [False, False, False, True, True, False, True, True],
        "behavior_logprobs": [-1.5, -0.25, -2.0, -0.5],
        "finish_reason": "stop",
        "attempt": 1,
        "tokenizer_fingerprint": "tok",
        "sampling_fingerprint": "smp",
        "teacher_logprobs": None,
        "teacher_topk_ids": None,
        "teacher_topk_logprobs": None,
        "teacher_hidden": None,
        "reward": None,
        "rewards": None,
        "verifier": None,
        "verdict": None,
        "verdict_label": None,
    }
    found = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    assert {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()} == expected
    assert (sample.tokens.dtype, sample.loss_mask.dtype, sample.behavior_logprobs.dtype) == (np.int32, bool, np.float32)


def test_the_log_knows_whose_answer_it_holds(tmp_path: Path) -> None:
    (job,) = make_jobs(1)
    life(tmp_path, [job], Dying(MODEL, 1))
    logged = replay(tmp_path).samples[job.sample_id]
    assert logged.prompt_ids.tolist() == [7, 8, 9]
    assert logged.about == {
        "prompt_id": "p0",
        "group_id": "g0",
        "generation_index": 0,
        "domain": "math",
        "teacher_id": "m",
        "max_new_tokens": 40,
        "seed": f"{job.seed:032x}",
    }


def test_an_engine_step_is_one_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appends: list[list[Any]] = []
    real = WalWriter.append

    def append(self: WalWriter, records: Any) -> None:
        appends.append(list(records))
        real(self, appends[-1])

    monkeypatch.setattr(WalWriter, "append", append)
    sampler = Dying(MODEL, 10**9)
    life(tmp_path, make_jobs(10), sampler)
    assert len(appends) == len(sampler.taken)
    for records, step in zip(appends, sampler.taken, strict=True):
        (tokens,) = [record for record in records if isinstance(record, Tokens)]
        assert tokens.token_ids.tolist() == step.token_ids.tolist()


# ------------------------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 29])
def test_a_resumed_sample_equals_an_uninterrupted_one(tmp_path: Path, steps: int, tools: bool) -> None:
    jobs, model = make_jobs(9), CALLING if tools else MODEL
    whole = contents(life(tmp_path / "whole", jobs, model, tools=Echo() if tools else None))
    done: dict[str, Sample] = {}
    lives = 0
    while len(done) < len(jobs):
        done |= by_id(life(tmp_path / "cut", jobs, Dying(model, steps), tools=Echo() if tools else None))
        lives += 1
    assert lives > 1
    assert contents(list(done.values())) == whole
    assert not tools or any(False in sample.response_mask for sample in done.values())


@pytest.mark.parametrize("tools", [False, True])
def test_no_answer_passes_its_budget_however_often_it_is_resumed(tmp_path: Path, tools: bool) -> None:
    jobs = make_jobs(8, budget=9)
    model = replace(CALLING if tools else MODEL, mean_length=30)
    echo = Echo(width=2) if tools else None
    done: dict[str, Sample] = {}
    asked: list[SampleRequest] = []

    class Watched:
        def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
            asked.extend(requests)
            return model.stream(requests, temperature=temperature)

    while len(done) < 8:
        done |= by_id(life(tmp_path, jobs, Dying(Watched(), 1), tools=echo))
    assert {sample.finish_reason for sample in done.values()} == {"stop", "length"}
    for sample in done.values():
        assert len(sample.response_ids) <= 9
        assert sample.finish_reason != "length" or len(sample.response_ids) == 9
    assert {request.max_new_tokens for request in asked} == {9}
    assert max(len(request.response_ids) for request in asked) == 8  # a spent budget is not asked for


def test_a_sample_knows_the_oldest_and_the_newest_policy_that_wrote_it(tmp_path: Path) -> None:
    jobs = make_jobs(3)
    script = Script({job.sample_id: [(20, -1.0), (21, -1.0), (END, -1.0)] for job in jobs})
    life(tmp_path, jobs, Dying(script, 4), version=2)  # the first sample and a token of the second
    life(tmp_path, jobs, Dying(script, 1), version=5)
    samples = life(tmp_path, jobs, script, version=3)
    assert [(s.policy_version_min, s.policy_version_max) for s in samples] == [(2, 2), (2, 5), (3, 3)]
    again = life(tmp_path, jobs, Unasked(), version=9)
    assert [(s.policy_version_min, s.policy_version_max) for s in again] == [(2, 2), (2, 5), (3, 3)]


def test_an_answer_without_a_sampled_token_has_the_version_of_its_time(tmp_path: Path) -> None:
    (job,) = make_jobs(1, budget=0)
    (sample,) = life(tmp_path, [job], MODEL, version=4)
    assert (sample.policy_version_min, sample.policy_version_max, sample.finish_reason) == (4, 4, "length")
    assert len(sample.response_ids) == 0


def test_attempts_count_the_processes_that_wrote(tmp_path: Path) -> None:
    (job,) = make_jobs(1)
    script = Script({job.sample_id: [(20, -1.0), (21, -1.0), (22, -1.0), (END, -1.0)]})
    for steps in (0, 1, 0, 0, 2, 0):  # one that dies before its first step has not written
        assert life(tmp_path, [job], Dying(script, steps)) == []
    (sample,) = life(tmp_path, [job], script)
    assert sample.attempt == 3
    (again,) = life(tmp_path, [job], Unasked())  # one that finds it finished has not, either
    assert (again.attempt, content(again)) == (3, content(sample))


def test_a_finished_sample_in_the_log_is_not_sampled_again_and_comes_first(tmp_path: Path) -> None:
    jobs = make_jobs(12)
    finished = life(tmp_path, jobs, Dying(MODEL, 8))
    assert 0 < len(finished) < 12
    again = life(tmp_path, jobs, Dying(MODEL, 0))
    assert contents(again) == contents(finished)
    rest = life(tmp_path, jobs, MODEL)
    assert contents(rest[: len(finished)]) == contents(finished)
    assert contents(life(tmp_path, jobs, Unasked())) == contents(rest)


def test_level_off_keeps_nothing(tmp_path: Path) -> None:
    jobs = make_jobs(5)
    whole = contents(life(tmp_path / "whole", jobs, MODEL))
    life(tmp_path / "off", jobs, Dying(MODEL, 9), level="off")
    assert not list(tmp_path.glob("off/*"))
    found = life(tmp_path / "off", jobs, MODEL, level="off")
    assert contents(found) == whole
    assert {sample.attempt for sample in found} == {1}


# ------------------------------------------------------------------------------------------------------------- segments


def test_a_segment_goes_with_the_last_sample_in_it(tmp_path: Path) -> None:
    jobs = make_jobs(8)
    first = life(tmp_path, jobs, Dying(MODEL, 8))
    (segment,) = tmp_path.glob("*.wal")
    with RolloutLog(tmp_path, writer="w", level="process") as log:
        log.committed([sample.sample_id for sample in first])
        assert segment.exists()
        found: list[Sample] = []
        run_on(log, [job for job in jobs if job.sample_id not in by_id(first)], MODEL, found)
        (own,) = set(tmp_path.glob("*.wal")) - {segment}
        resumed = next(sample.sample_id for sample in found if sample.attempt == 2)
        log.committed([sample.sample_id for sample in found if sample.sample_id != resumed])
        assert segment.exists()
        log.committed([resumed])
        assert (segment.exists(), own.exists()) == (False, True)  # it may still be written to
        log.finish()
    assert not list(tmp_path.iterdir())
    assert len(by_id([*first, *found])) == 8


def test_a_log_that_is_closed_before_all_is_committed_stays(tmp_path: Path) -> None:
    jobs = make_jobs(5)
    with RolloutLog(tmp_path, writer="w", level="process") as log:
        found: list[Sample] = []
        run_on(log, jobs, MODEL, found)
        log.committed([sample.sample_id for sample in found[1:]])
        log.finish()
    (kept,) = life(tmp_path, [job for job in jobs if job.sample_id == found[0].sample_id], Unasked())
    assert content(kept) == content(found[0])


@pytest.mark.parametrize("steps", [5, 23])
@pytest.mark.parametrize("max_segment_bytes", [300, 1000])
def test_segments_of_any_size_hold_the_same_and_go_while_the_log_is_written(
    tmp_path: Path, steps: int, max_segment_bytes: int
) -> None:
    jobs, size = make_jobs(24), max_segment_bytes
    whole = contents(life(tmp_path / "whole", jobs, MODEL))
    done: dict[str, Sample] = {}
    made: set[str] = set()
    most = 0
    while len(done) < len(jobs):
        with RolloutLog(tmp_path / "cut", writer="w", level="process", max_segment_bytes=size) as log:
            log.committed(list(done))
            sampler = Dying(MODEL, steps)
            for start in range(0, len(jobs), 4):  # as a run does it: batch by batch, committed as they are done
                found: list[Sample] = []
                batch = [job for job in jobs[start : start + 4] if job.sample_id not in done]
                run_on(log, batch, sampler, found)
                if len(found) < len(batch):
                    break
                done |= by_id(found)
                log.committed([sample.sample_id for sample in found])
            present = {path.name for path in (tmp_path / "cut").iterdir()}
            made, most = made | present, max(most, len(present))
            if len(done) == len(jobs):
                log.finish()
    assert contents(list(done.values())) == whole
    assert len(made) > most > 2
    assert not list((tmp_path / "cut").iterdir())


# ---------------------------------------------------------------------------------------------------------------- tools


def test_a_command_runs_once_and_its_result_carries_no_loss(tmp_path: Path) -> None:
    jobs, echo = make_jobs(12), Echo()
    samples = by_id(life(tmp_path, jobs, CALLING, tools=echo))
    assert len(set(echo.ran)) == len(echo.ran) > 5
    logged = replay(tmp_path).samples
    for sample_id, sample in samples.items():
        assert len(sample.behavior_logprobs) == sample.loss_mask.sum()
        written = iter(sample.response_ids[~sample.response_mask].tolist())
        tools = logged[sample_id].tools
        assert [(sample_id, tool.number, tool.request) for tool in tools] == [c for c in echo.ran if c[0] == sample_id]
        begun = 0
        for number, tool in enumerate(tools):
            assert (tool.number, tool.result) == (number, f"result {number}")
            assert sample.response_ids[tool.position - 1] == CALL
            assert tool.request == f"after {tool.position - begun}"
            begun = tool.position + len(tool.token_ids)
            ids = [next(written) for _ in tool.token_ids]
            assert ids == tool.token_ids.tolist() == [40 + number] * len(ids)
            assert len(ids) == number + 1 or len(sample.response_ids) == 40
        assert next(written, None) is None
        assert sample.finish_reason != TOOL_LOST


def test_a_logged_result_is_never_asked_for_again(tmp_path: Path) -> None:
    jobs, echo = make_jobs(6), Echo()
    whole = Echo()
    life(tmp_path / "whole", jobs, CALLING, tools=whole)
    samples: list[Sample] = []
    while len(samples) < 6:
        samples = life(tmp_path / "cut", jobs, Dying(CALLING, 1), tools=echo)
    assert sorted(echo.ran) == sorted(whole.ran)


@pytest.mark.parametrize("budget", [10, 20])
def test_a_result_without_tokens_is_not_asked_for_again(tmp_path: Path, budget: int) -> None:
    (job,) = make_jobs(1, budget=budget)
    script = Script({job.sample_id: [(20, -1.0), (CALL, -1.0), (21, -1.0), (CALL, -1.0), (END, -1.0)]})
    echo = Echo(width=0)
    for _ in range(8):
        samples = life(tmp_path, [job], Dying(script, 1), tools=echo)
    assert echo.ran == [(job.sample_id, 0, "after 2"), (job.sample_id, 1, "after 2")]
    assert samples[0].response_ids.tolist() == [20, CALL, 21, CALL, END]


def test_a_result_is_cut_where_the_budget_ends_and_ends_the_answer(tmp_path: Path) -> None:
    (job,) = make_jobs(1, budget=4)
    script = Script({job.sample_id: [(20, -1.0), (CALL, -1.0)]})
    (sample,) = life(tmp_path, [job], script, tools=Echo(width=5))
    assert sample.response_ids.tolist() == [20, CALL, 40, 40]
    assert sample.response_mask.tolist() == [True, True, False, False]
    assert sample.finish_reason == "length"
    assert content(life(tmp_path, [job], Unasked(), tools=Echo())[0]) == content(sample)


def test_a_command_without_room_for_its_result_does_not_run(tmp_path: Path) -> None:
    (job,) = make_jobs(1, budget=2)
    echo = Echo()
    (sample,) = life(tmp_path, [job], Script({job.sample_id: [(20, -1.0), (CALL, -1.0)]}), tools=echo)
    assert (echo.ran, sample.response_ids.tolist()) == ([], [20, CALL])
    assert sample.finish_reason == "length"


@dataclass
class Deadly(Echo):
    """Tools whose process dies in its command, before or after it had its effect."""

    after: bool = False

    def run(self, job: Job, commands: Sequence[str]) -> tuple[str, tuple[int, ...]]:
        if self.after:
            super().run(job, commands)
        raise DiedError


@pytest.mark.parametrize("after", [False, True])
def test_a_command_whose_result_is_lost_ends_its_sample_and_is_never_run_again(tmp_path: Path, after: bool) -> None:
    first, other = make_jobs(2)
    script = Script(
        {
            first.sample_id: [(20, -1.0), (CALL, -2.0), (-1, 0), (END, -3.0)],
            other.sample_id: [(21, -1.0), (END, -1.0)],
        }
    )
    assert life(tmp_path, [first, other], script, tools=Deadly(after=after), version=1) == []
    logged = replay(tmp_path).samples[first.sample_id]
    assert logged.pending_call is not None
    assert (logged.pending_call.number, logged.pending_call.request) == (0, "after 2")
    echo = Echo()
    for _ in range(2):
        lost, whole = life(tmp_path, [first, other], script, tools=echo, version=2)
        assert (lost.finish_reason, lost.response_ids.tolist(), lost.attempt) == (TOOL_LOST, [20, CALL], 2)
        assert (lost.policy_version_min, lost.policy_version_max) == (1, 1)
        assert lost.behavior_logprobs.tolist() == [-1.0, -2.0]
        assert (whole.finish_reason, whole.attempt) == ("stop", 1)
    assert echo.ran == []


def test_a_command_that_was_asked_for_and_not_begun_runs_after_the_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = make_jobs(1)
    script = Script({job.sample_id: [(20, -1.0), (CALL, -1.0), (-1, 0), (END, -1.0)]})
    real = WalWriter.append

    def append(self: WalWriter, records: Any) -> None:
        records = list(records)
        if any(type(record).__name__ == "Call" for record in records):
            raise DiedError
        real(self, records)

    with monkeypatch.context() as patch:
        patch.setattr(WalWriter, "append", append)
        echo = Echo()
        assert life(tmp_path, [job], script, tools=echo) == []
        assert echo.ran == []
    (sample,) = life(tmp_path, [job], script, tools=echo)
    assert echo.ran == [(job.sample_id, 0, "after 2")]
    assert (sample.response_ids.tolist(), sample.finish_reason) == ([20, CALL, 40, END], "stop")


def test_a_repeatable_command_whose_result_is_lost_runs_again(tmp_path: Path) -> None:
    (job,) = make_jobs(1)
    script = Script({job.sample_id: [(20, -1.0), (CALL, -2.0), (-1, 0), (CALL, -1.5), (-1, 0), (-1, 0), (END, -3.0)]})
    straight = life(tmp_path / "straight", [job], script, tools=Echo(repeatable=True))
    assert life(tmp_path / "cut", [job], script, tools=Deadly(repeatable=True)) == []
    assert life(tmp_path / "cut", [job], script, tools=Deadly(repeatable=True, after=True)) == []
    echo = Echo(repeatable=True)
    again = life(tmp_path / "cut", [job], script, tools=echo)
    assert contents(again) == contents(straight)
    assert echo.ran == [(job.sample_id, 0, "after 2"), (job.sample_id, 1, "after 1")]
    assert contents(life(tmp_path / "cut", [job], Unasked(), tools=Deadly())) == contents(straight)


@pytest.mark.parametrize(("most", "ran"), [(1, 0), (2, 1), (3, 2), (4, 2), (None, 2)])
def test_an_answer_ends_with_the_command_of_its_last_turn(tmp_path: Path, most: int | None, ran: int) -> None:
    (job,) = make_jobs(1)
    written = [(20, -1.0), (CALL, -2.0), (-1, 0), (CALL, -1.5), (-1, 0), (-1, 0), (END, -3.0)]
    echo = Echo(most=most)
    samples: list[Sample] = []
    while not samples:
        samples = life(tmp_path, [job], Dying(Script({job.sample_id: written}), 1), tools=echo)
    whole = [20, CALL, 40, CALL, 41, 41, END]
    (sample,) = samples
    assert len(echo.ran) == ran
    if most in (1, 2):
        assert (sample.finish_reason, sample.response_ids.tolist()) == ("max_turns", whole[: 2 * most])
    else:
        assert (sample.finish_reason, sample.response_ids.tolist()) == ("stop", whole)
    assert contents(life(tmp_path, [job], Unasked(), tools=Echo(most=most))) == contents(samples)


# ------------------------------------------------------------------------------------------------------ decoding again


@dataclass(frozen=True)
class Fussy:
    """A sampler whose log-probabilities hang on all that runs beside a sample, as those of models do by rounding."""

    batch_size: int = 3

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].response_ids), i))
        for start in range(0, len(order), self.batch_size):
            yield from self._batch(order[start : start + self.batch_size], requests)

    def _batch(self, chosen: list[int], requests: Sequence[SampleRequest]) -> Iterator[Step]:
        rows = {i: [*requests[i].prompt_ids, *requests[i].response_ids] for i in chosen}
        alive, number = list(chosen), 0
        while alive:
            noise = crc32(repr([(rows[i], i in alive) for i in chosen]).encode()) / 2**32
            free, tokens, logprobs, finished = [], [], [], {}
            for i in alive:
                request, place = requests[i], len(requests[i].response_ids) + number
                chance = uniforms(request.seed, request.max_new_tokens)[place]
                token = END if chance < 0.08 else CALL if chance < 0.25 else int(10 + 30 * chance)
                if number < len(request.forced_ids):
                    token = request.forced_ids[number]
                else:
                    free.append(i)
                    tokens.append(token)
                    logprobs.append(-noise - chance)
                rows[i].append(token)
                if token in (END, CALL) or place + 1 == request.max_new_tokens:
                    finished[i] = "stop" if token in (END, CALL) else "length"
            alive = [i for i in alive if i not in finished]
            number += 1
            yield Step(np.array(free, np.int64), np.array(tokens, np.int32), np.array(logprobs, np.float32), finished)


def decoded(folder: Path, jobs: Sequence[Job], sampler: Sampler, tools: Tools | None) -> list[Sample]:
    with RolloutLog(folder, writer="w", level="process") as log:
        return list(
            generate(
                jobs,
                sampler,
                log,
                temperature=1.0,
                policy_version=0,
                tokenizer_fingerprint="tok",
                sampling_fingerprint="smp",
                tools=tools,
                redecode=True,
            )
        )


def cut_everywhere(folder: Path, other: Path) -> Iterator[tuple[int, Path]]:
    """Copies of a log of one segment that end after each of its frames, as a process leaves it that dies there."""
    (segment,) = folder.glob("*.wal")
    data, name = segment.read_bytes(), SegmentName.parse(segment.name)
    assert name is not None
    for number, (offset, _) in enumerate(read_frames(data, name)):
        (other / str(number)).mkdir(parents=True)
        (other / str(number) / segment.name).write_bytes(data[:offset])
        yield number, other / str(number)


@pytest.mark.parametrize(("sampler", "seed"), [(Fussy(), 0), (Fussy(), 1), (Fussy(2), 2), (CALLING, 0)])
@pytest.mark.parametrize("most", [None, 3])
def test_a_run_that_decodes_again_repeats_every_number_wherever_it_died(
    tmp_path: Path, sampler: Sampler, seed: int, most: int | None
) -> None:
    jobs = make_jobs(7, budget=25, seed=seed)
    tools = Echo(repeatable=True, most=most)
    straight = decoded(tmp_path / "straight", jobs, sampler, tools)
    assert max(sum(np.diff(sample.response_mask.astype(int)) == 1) for sample in straight) >= 2  # turns after the first
    cuts = 0
    for number, folder in cut_everywhere(tmp_path / "straight", tmp_path):
        assert contents(decoded(folder, jobs, sampler, tools)) == contents(straight), number
        cuts += 1
    assert cuts > 30


def test_a_run_that_dies_again_and_again_repeats_every_number_too(tmp_path: Path) -> None:
    jobs, tools = make_jobs(7, budget=25), Echo(repeatable=True)
    straight = decoded(tmp_path / "straight", jobs, Fussy(), tools)
    done: list[Sample] = []
    lives = 0
    while len(done) < len(jobs):
        lives += 1
        try:
            done = decoded(tmp_path / "cut", jobs, Dying(Fussy(), 9 + lives), tools)
        except DiedError:
            continue
    assert lives > 2
    assert contents(done) == contents(straight)


def test_a_turn_of_which_nothing_is_missing_is_not_decoded_again(tmp_path: Path) -> None:
    jobs = make_jobs(2)
    written = {
        jobs[0].sample_id: [(20, -1.0), (CALL, -2.0), (-1, 0), (22, -1.0), (END, -3.0)],
        jobs[1].sample_id: [(21, -1.0), (CALL, -2.0), (-1, 0), (END, -3.0)],
    }
    asked: list[SampleRequest] = []

    class Watched:
        def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
            asked.extend(requests)
            return Dying(Script(written), 1).stream(requests, temperature=temperature)

    with pytest.raises(DiedError):
        decoded(tmp_path, jobs, Dying(Script(written), 5), Echo(repeatable=True))
    with pytest.raises(DiedError):
        decoded(tmp_path, jobs, Watched(), Echo(repeatable=True))
    first, second = asked
    assert (first.response_ids, first.forced_ids, first.max_new_tokens) == ((20, CALL, 40), (22,), 40)
    assert (second.response_ids, second.forced_ids) == ((21, CALL, 40), ())


def test_later_rounds_keep_the_order_of_the_jobs_whoever_ended_first(tmp_path: Path) -> None:
    jobs = make_jobs(3)
    orders: list[list[str]] = []

    class Backwards:
        def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
            orders.append([request.sample_id for request in requests])
            for i in reversed(range(len(requests))):
                token = END if requests[i].response_ids else CALL
                yield Step(np.array([i]), np.array([token], np.int32), np.array([-1.0], np.float32), {i: "stop"})

    life(tmp_path, jobs, Backwards(), tools=Echo())
    assert orders == [[job.sample_id for job in jobs]] * 2


@pytest.mark.parametrize("cut_step", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_transformers_model_repeats_every_number_of_its_conversations(
    tmp_path: Path, make_llama: Any, tokenizer: Any, cut_step: int
) -> None:
    from mopdctl.engines.hf import HFModel

    class Asking(Echo):
        def request(self, job: Job, turn_ids: Sequence[int]) -> str | None:
            return "more" if turn_ids[-1] in range(5, 30) else None

    model = HFModel(make_llama(), tokenizer, batch_size=3)
    model.eos_ids = frozenset(range(30))  # a random model rarely writes one certain token
    jobs, tools = make_jobs(5, budget=40), Asking(repeatable=True, most=4)
    straight = decoded(tmp_path / "straight", jobs, model, tools)
    assert len({sample.finish_reason for sample in straight}) > 1
    assert sum(not sample.response_mask.all() for sample in straight) > 2
    for number, folder in cut_everywhere(tmp_path / "straight", tmp_path):
        if number % cut_step == 0:
            assert contents(decoded(folder, jobs, model, tools)) == contents(straight), number


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_number_of_answers_at_the_same_time_reaches_the_engine(tmp_path: Path) -> None:
    spec = RolloutSpec("x", "fake:mean_length=5", tmp_path / "none", engine="fake", batch_size=3)
    assert load_engine(spec, Workspace(tmp_path)).sampler == FakeModel(mean_length=5, batch_size=3)


def test_an_engine_that_stops_early_is_an_error(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Quitter:
        def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
            yield next(MODEL.stream(requests, temperature=temperature))

    with (
        RolloutLog(tmp_path, writer="rank-0", level="process") as log,
        pytest.raises(MopdctlError, match="stopped after"),
    ):
        list(
            generate(
                make_jobs(3),
                Quitter(),
                log,
                temperature=1.0,
                policy_version=0,
                tokenizer_fingerprint="t",
                sampling_fingerprint="s",
            )
        )
    assert len(replay(tmp_path).samples) == 3
