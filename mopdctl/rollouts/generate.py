"""Sampling that survives its process: every engine step is logged, and an answer goes on from its last logged token.

Restarting an interrupted answer would favour short ones: a long answer is interrupted more often than a short one, and
drawn again each time (DeepSeek-V4 report, section 5.2.3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mopdctl.engines.base import Sampler, Step
from mopdctl.errors import MopdctlError
from mopdctl.records import Sample
from mopdctl.rollouts.jobs import Job
from mopdctl.store.replay import LoggedSample, recover
from mopdctl.store.wal import Call, Finish, Open, Record, Tokens, Tool, WalWriter

TOOL_LOST = "tool_lost"


class Tools(Protocol):
    """Runs the commands that answers ask for."""

    def request(self, response_ids: Sequence[int]) -> str | None:
        """The command that an answer ends with; None if it ends without one, or has not come to an end."""
        ...

    def run(self, sample_id: str, number: int, request: str) -> tuple[str, tuple[int, ...]]:
        """Runs command `number` of a sample; returns its result and the tokens that stand for it in the context."""
        ...


@dataclass(slots=True)
class Draft:
    """An answer that is being written."""

    job: Job
    slot: int
    response: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: set[int] = field(default_factory=set)
    calls: int = 0
    """Commands whose result is in the response."""
    answered: int = 0
    """How long the response was after the last result, which may have no tokens."""
    attempt: int = 1
    opened: bool = False
    """Whether this process has logged that it writes here."""
    finish_reason: str | None = None
    lost_call: bool = False

    @classmethod
    def resumed(cls, job: Job, slot: int, logged: LoggedSample) -> "Draft":
        """Goes on from what the log holds."""
        return cls(
            job,
            slot,
            response=logged.tokens.tolist(),
            sampled=logged.sampled.tolist(),
            logprobs=logged.logprobs.tolist(),
            policy_versions={v for v in (logged.policy_version_min, logged.policy_version_max) if v is not None},
            calls=len(logged.tools),
            answered=max((tool.position + len(tool.token_ids) for tool in logged.tools), default=0),
            attempt=logged.attempt if logged.finish_reason else logged.attempt + 1,
            finish_reason=logged.finish_reason,
            lost_call=logged.pending_call is not None,
        )


class RolloutLog:
    """The write-ahead log of one writer, over all the processes that it has been.

    After `generate` has yielded a token's sample, or an engine step has been logged, the tokens outlive the process
    (level `process`) or the machine (`host`).
    """

    def __init__(self, folder: Path, *, writer: str, level: str, max_segment_bytes: int = 64 << 20) -> None:
        """Reads what earlier processes left, cuts a torn tail off, and fences them out.

        Raises MopdctlError naming file and offset if the log is damaged in the middle.
        """
        self.folder = folder
        found = recover(folder, writer=writer)
        self.notes = found.notes
        self._logged = found.samples
        self._segments = {name: set[str]() for name in found.lengths}
        for sample_id, logged in found.samples.items():
            for name in logged.segments:
                self._segments.setdefault(name, set()).add(sample_id)
        self._wal = WalWriter(
            folder,
            writer=writer,
            level=level,
            epoch=found.epoch + 1,
            fence=found.lengths,
            max_segment_bytes=max_segment_bytes,
        )
        self._next_slot = 0

    def __enter__(self) -> "RolloutLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._wal.close()

    def draft(self, job: Job) -> Draft:
        """The job's answer as far as it is logged."""
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        logged = self._logged.get(job.sample_id)
        return Draft.resumed(job, slot, logged) if logged else Draft(job, slot)

    def append(self, records: Sequence[Record], drafts: Sequence[Draft]) -> None:
        """Logs records about some drafts in one write; opens those that this process has not opened yet."""
        opened: list[Record] = []
        for draft in drafts:
            if not draft.opened:
                draft.opened = True
                opened.append(_open(draft))
        self._wal.append([*opened, *records])
        if self._wal.segment:
            self._segments.setdefault(self._wal.segment, set()).update(draft.job.sample_id for draft in drafts)

    def committed(self, sample_ids: Sequence[str]) -> None:
        """Forgets samples that are in a committed manifest, and removes the segments that hold nothing else."""
        for sample_id in sample_ids:
            self._logged.pop(sample_id, None)
        for name, waiting in list(self._segments.items()):
            waiting.difference_update(sample_ids)
            if not waiting and name != self._wal.segment:
                (self.folder / name).unlink(missing_ok=True)
                del self._segments[name]

    def finish(self) -> None:
        """Closes the log; removes it if every sample in it is committed."""
        self._wal.close()
        if not any(self._segments.values()):
            for name in self._segments:
                (self.folder / name).unlink(missing_ok=True)


def generate(
    jobs: Sequence[Job],
    sampler: Sampler,
    log: RolloutLog,
    *,
    temperature: float,
    policy_version: int,
    tokenizer_fingerprint: str,
    sampling_fingerprint: str,
    tools: Tools | None = None,
    redecode: bool = False,
) -> Iterator[Sample]:
    """Yields the sample of every job as it finishes, first those that the log already holds whole.

    Each engine step is one append to the log. A command of an answer is logged before it runs and again with its
    result; a logged result is used, never asked for again. Whether a command ran whose result is missing nobody knows:
    its sample ends as `tool_lost` instead of running it a second time.

    `redecode` has the engine decode logged tokens again, those of finished answers beside them, instead of reading them
    in one pass: dearer, and every number after them is that of an undisturbed run, to the bit. Not for use with tools.
    """

    def sample(draft: Draft) -> Sample:
        return _sample(draft, policy_version, tokenizer_fingerprint, sampling_fingerprint)

    assert not (redecode and tools), "a tool's tokens were not decoded"
    waiting = []
    drafts = [log.draft(job) for job in jobs]
    for draft in drafts:
        if draft.lost_call and not draft.finish_reason:
            draft.finish_reason = TOOL_LOST
            log.append([Finish(draft.slot, TOOL_LOST)], [draft])
        command = _command(draft, tools)
        if command is not None and tools:  # the process died between the call and its record
            _run_tool(draft, command, tools, log)
        if draft.finish_reason:
            yield sample(draft)
        else:
            waiting.append(draft)
    while waiting:
        again, ended = [], 0
        asked = drafts if redecode else waiting
        requests = [
            d.job.forced(tuple(d.response), finished=d.finish_reason is not None)
            if redecode
            else d.job.request(tuple(d.response))
            for d in asked
        ]
        for step in sampler.stream(requests, temperature=temperature):
            done = _log_step(step, asked, log, policy_version, tools)
            ended += len(done)
            for draft in done:
                command = _command(draft, tools)
                if command is not None and tools:
                    _run_tool(draft, command, tools, log)
                if draft.finish_reason:
                    yield sample(draft)
                else:
                    again.append(draft)
        if ended != len(waiting):
            raise MopdctlError(f"the engine stopped after {ended} of {len(waiting)} answers; what is logged is safe")
        waiting = again


def _log_step(
    step: Step, drafts: Sequence[Draft], log: RolloutLog, policy_version: int, tools: Tools | None
) -> list[Draft]:
    """Logs one engine step and adds it to its drafts; returns those that it ended."""
    running = [drafts[i] for i in step.requests]
    positions = np.fromiter((len(d.response) for d in running), np.uint32, len(running))
    slots = np.fromiter((d.slot for d in running), np.uint32, len(running))
    for draft, token, logprob in zip(running, step.token_ids.tolist(), step.logprobs.tolist(), strict=True):
        draft.response.append(token)
        draft.sampled.append(True)
        draft.logprobs.append(logprob)
        draft.policy_versions.add(policy_version)
    records: list[Record] = []
    if running:
        records.append(Tokens(policy_version, slots, positions, step.token_ids, step.logprobs))
    ended = {i: reason for i, reason in step.finished.items() if drafts[i].finish_reason is None}
    done = [drafts[i] for i in ended]
    for i, reason in ended.items():
        draft = drafts[i]
        if _command(draft, tools) is None:
            draft.finish_reason = "length" if _cut_command(draft, tools) else reason
            records.append(Finish(draft.slot, draft.finish_reason))
    if records:
        log.append(records, list({d.slot: d for d in (*running, *done)}.values()))
    return done


def _command(draft: Draft, tools: Tools | None) -> str | None:
    """The command that an unfinished answer ends with, as long as there is room for its result."""
    if tools is None or draft.finish_reason or not draft.answered < len(draft.response) < draft.job.max_new_tokens:
        return None
    return tools.request(draft.response)


def _cut_command(draft: Draft, tools: Tools | None) -> bool:
    """Whether an answer ends with a command that its budget leaves no room to answer."""
    full = len(draft.response) >= draft.job.max_new_tokens
    return tools is not None and full and tools.request(draft.response) is not None


def _run_tool(draft: Draft, command: str, tools: Tools, log: RolloutLog) -> None:
    """Runs a command and appends its result to the answer, which ends if that spends its budget."""
    position = len(draft.response)
    log.append([Call(draft.slot, draft.calls, position, command)], [draft])
    result, token_ids = tools.run(draft.job.sample_id, draft.calls, command)
    kept = token_ids[: draft.job.max_new_tokens - position]
    records: list[Record] = [Tool(draft.slot, draft.calls, position, command, result, np.array(kept, np.int32))]
    draft.response += kept
    draft.sampled += [False] * len(kept)
    draft.calls += 1
    draft.answered = len(draft.response)
    if len(draft.response) >= draft.job.max_new_tokens:
        draft.finish_reason = "length"
        records.append(Finish(draft.slot, "length"))
    log.append(records, [draft])


def _sample(draft: Draft, policy_version: int, tokenizer_fingerprint: str, sampling_fingerprint: str) -> Sample:
    job = draft.job
    assert draft.finish_reason is not None
    versions = draft.policy_versions or {policy_version}
    return Sample(
        sample_id=job.sample_id,
        prompt_id=job.prompt_id,
        group_id=job.group_id,
        generation_index=job.generation_index,
        domain=job.domain,
        teacher_id=job.teacher_id,
        policy_version_min=min(versions),
        policy_version_max=max(versions),
        tokens=np.array([*job.prompt_ids, *draft.response], np.int32),
        prompt_length=len(job.prompt_ids),
        loss_mask=np.array([False] * len(job.prompt_ids) + draft.sampled, np.bool_),
        behavior_logprobs=np.array(draft.logprobs, np.float32),
        finish_reason=draft.finish_reason,
        attempt=draft.attempt,
        tokenizer_fingerprint=tokenizer_fingerprint,
        sampling_fingerprint=sampling_fingerprint,
    )


def _open(draft: Draft) -> Open:
    prompt_ids = np.array(draft.job.prompt_ids, np.int32)
    return Open(draft.slot, draft.job.sample_id, draft.attempt, prompt_ids, _about(draft.job))


def _about(job: Job) -> dict[str, object]:
    return {
        "prompt_id": job.prompt_id,
        "group_id": job.group_id,
        "generation_index": job.generation_index,
        "domain": job.domain,
        "teacher_id": job.teacher_id,
        "max_new_tokens": job.max_new_tokens,
        "seed": f"{job.seed:032x}",
    }
