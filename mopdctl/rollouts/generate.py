"""Sampling that survives its process: every engine step is logged, and an answer goes on from its last logged token.

Restarting an interrupted answer would favour short ones: a long answer is interrupted more often than a short one, and
drawn again each time (DeepSeek-V4 report, section 5.2.3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mopdctl.engines.base import Sampler, SampleRequest, Step
from mopdctl.errors import MopdctlError
from mopdctl.records import Sample
from mopdctl.rollouts.jobs import Job
from mopdctl.store.replay import LoggedSample, recover
from mopdctl.store.wal import Call, Finish, Open, Record, Tokens, Tool, WalWriter

TOOL_LOST = "tool_lost"
MAX_TURNS = "max_turns"


class Tools(Protocol):
    """Runs the commands that answers ask for."""

    repeatable: bool
    """Whether a command may run twice: it acts on nothing but what the answer's own later commands see."""

    def max_turns(self, job: Job) -> int | None:
        """How many turns an answer has before it ends even with a command; None for any number."""
        ...

    def request(self, job: Job, turn_ids: Sequence[int]) -> str | None:
        """The command that a turn ends with, by the tokens that were sampled since the last result.

        None if the turn ends without one, or has not come to an end.
        """
        ...

    def run(self, job: Job, commands: Sequence[str]) -> tuple[str, tuple[int, ...]]:
        """Runs the last of `commands`, which are all of an answer so far.

        Returns its result and the tokens that stand for it in the context. Tools without a state of their own run the
        earlier ones again to find the one that they need.
        """
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
    commands: list[str] = field(default_factory=list)
    """Those whose result is in the response."""
    results: list[tuple[int, int]] = field(default_factory=list)
    """Where each result begins and ends in the response; it may have no tokens."""
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
            commands=[tool.request for tool in logged.tools],
            results=[(tool.position, tool.position + len(tool.token_ids)) for tool in logged.tools],
            attempt=logged.attempt if logged.finish_reason else logged.attempt + 1,
            finish_reason=logged.finish_reason,
            lost_call=logged.pending_call is not None,
        )

    @property
    def turn(self) -> int:
        """Number of the turn that is being written, or was written last."""
        return len(self.results)

    @property
    def turn_start(self) -> int:
        """Where that turn begins in the response."""
        return self.results[-1][1] if self.results else 0

    def writes(self, turn: int) -> bool:
        """Whether the engine is still to write at this turn."""
        return self.finish_reason is None and self.turn == turn

    def wrote(self, turn: int) -> bool:
        """Whether there was room for this turn, and the one before it did not end the answer."""
        return turn == 0 or (turn <= self.turn and self.results[turn - 1][1] < self.job.max_new_tokens)

    def decode_turn(self, turn: int) -> SampleRequest:
        """The engine's part in a turn from its beginning, with what is there of it decoded again."""
        start = self.results[turn - 1][1] if turn else 0
        end = self.results[turn][0] if turn < self.turn else len(self.response)
        before, own = tuple(self.response[:start]), tuple(self.response[start:end])
        return self.job.forced(before, own, whole=not self.writes(turn))


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
    its sample ends as `tool_lost` instead of running it a second time, unless the tools are repeatable.

    Answers with commands are written in turns. All that go on after a command are asked for together, in the order of
    their jobs, once every answer has come to an end or to its command.

    `redecode` has the engine decode logged tokens again, those of finished answers beside them, instead of reading them
    in one pass: dearer, and every number after them is that of an undisturbed run, to the bit. A turn of which nothing
    is missing is not decoded again.
    """

    def sample(draft: Draft) -> Sample:
        return _sample(draft, policy_version, tokenizer_fingerprint, sampling_fingerprint)

    drafts = [log.draft(job) for job in jobs]
    for draft in drafts:
        _settle(draft, tools, log)
        if draft.finish_reason:
            yield sample(draft)
    while waiting := [draft for draft in drafts if draft.finish_reason is None]:
        turn = min(draft.turn for draft in waiting)
        if redecode:
            asked = [draft for draft in drafts if draft.wrote(turn)]
            running = [draft.writes(turn) for draft in asked]
            requests = [draft.decode_turn(turn) for draft in asked]
        else:
            asked, running = waiting, [True] * len(waiting)
            requests = [draft.job.request(tuple(draft.response)) for draft in asked]
        missing = due = sum(running)
        for step in sampler.stream(requests, temperature=temperature):
            ended = [i for i in step.finished if running[i]]
            _log_step(step, asked, ended, log, policy_version, tools)
            missing -= len(ended)
            for i in ended:
                running[i] = False
                _settle(asked[i], tools, log)
                if asked[i].finish_reason:
                    yield sample(asked[i])
        if missing:
            raise MopdctlError(f"the engine stopped after {due - missing} of {due} answers; what is logged is safe")


def _log_step(
    step: Step, drafts: Sequence[Draft], ended: Sequence[int], log: RolloutLog, policy_version: int, tools: Tools | None
) -> None:
    """Logs one engine step and adds it to its drafts; those that it `ended` without a command are finished."""
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
    for i in ended:
        draft = drafts[i]
        draft.finish_reason = _finish_reason(draft, step.finished[i], tools)
        if draft.finish_reason:
            records.append(Finish(draft.slot, draft.finish_reason))
    if records:
        log.append(records, list({d.slot: d for d in (*running, *(drafts[i] for i in ended))}.values()))


def _command(draft: Draft, tools: Tools | None) -> str | None:
    """The command that an unfinished answer ends with."""
    turn_ids = draft.response[draft.turn_start :]
    return tools.request(draft.job, turn_ids) if tools and turn_ids and not draft.finish_reason else None


def _finish_reason(draft: Draft, reason: str, tools: Tools | None) -> str | None:
    """Why an answer is over that the engine ended for `reason`; None if it ends with a command that is to be run."""
    if tools is None or _command(draft, tools) is None:
        return reason
    if len(draft.response) >= draft.job.max_new_tokens:
        return "length"
    most = tools.max_turns(draft.job)
    return MAX_TURNS if most is not None and draft.turn + 1 >= most else None


def _settle(draft: Draft, tools: Tools | None, log: RolloutLog) -> None:
    """Runs the command that an unfinished answer ends with, if it may run."""
    if draft.lost_call and not draft.finish_reason and not (tools and tools.repeatable):
        draft.finish_reason = TOOL_LOST
        log.append([Finish(draft.slot, TOOL_LOST)], [draft])
    command = _command(draft, tools)
    if command is not None and tools:
        _run_tool(draft, command, tools, log)
        draft.lost_call = False


def _run_tool(draft: Draft, command: str, tools: Tools, log: RolloutLog) -> None:
    """Runs a command and appends its result to the answer, which ends if that spends its budget."""
    number, position = draft.turn, len(draft.response)
    log.append([Call(draft.slot, number, position, command)], [draft])
    result, token_ids = tools.run(draft.job, [*draft.commands, command])
    kept = token_ids[: draft.job.max_new_tokens - position]
    records: list[Record] = [Tool(draft.slot, number, position, command, result, np.array(kept, np.int32))]
    draft.response += kept
    draft.sampled += [False] * len(kept)
    draft.commands.append(command)
    draft.results.append((position, len(draft.response)))
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
