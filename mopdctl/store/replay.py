"""Reading the token write-ahead log back: what is logged of every sample, what is torn, what is damaged."""

import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopdctl.errors import MopdctlError
from mopdctl.store import disk
from mopdctl.store.wal import (
    BadFrameError,
    Call,
    Entry,
    Fence,
    Finish,
    Header,
    Open,
    Record,
    SegmentName,
    Tokens,
    Tool,
    encode,
    read_frames,
)


@dataclass(frozen=True, slots=True, eq=False)
class LoggedSample:
    """A sample as far as it is logged. R tokens of its response, N of them sampled by the policy."""

    sample_id: str
    attempt: int
    prompt_ids: NDArray[np.int32]
    about: Mapping[str, Any]
    """As its first `Open` has it."""
    tokens: NDArray[np.int32]
    """The response, [R]."""
    sampled: NDArray[np.bool_]
    """[R]"""
    logprobs: NDArray[np.float32]
    """[N]"""
    policy_versions: NDArray[np.uint32]
    """[N]"""
    tools: tuple[Tool, ...]
    pending_call: Call | None
    """A command that may have run, and whose result nobody knows."""
    finish_reason: str | None
    segments: tuple[str, ...]
    """Which ones hold something of it."""

    @property
    def policy_version_min(self) -> int | None:
        """Of its oldest sampled token; None without one."""
        return int(self.policy_versions.min()) if self.policy_versions.size else None

    @property
    def policy_version_max(self) -> int | None:
        """Of its newest sampled token; None without one."""
        return int(self.policy_versions.max()) if self.policy_versions.size else None

    def records(self, slot: int) -> Iterator[Record]:
        """What a new segment has to hold for the sample to be there as it is here."""
        yield Open(slot, self.sample_id, self.attempt, self.prompt_ids, self.about)
        start = taken = 0
        for tool in self.tools:
            yield from self._tokens(slot, start, tool.position, taken)
            yield Call(slot, tool.number, tool.position, tool.request)
            yield replace(tool, slot=slot)
            taken += tool.position - start
            start = tool.position + len(tool.token_ids)
        yield from self._tokens(slot, start, len(self.tokens), taken)
        if self.pending_call:
            yield replace(self.pending_call, slot=slot)
        if self.finish_reason is not None:
            yield Finish(slot, self.finish_reason)

    def _tokens(self, slot: int, start: int, stop: int, taken: int) -> Iterator[Tokens]:
        """Positions `start` to `stop` of the response, all of them sampled; `taken` were sampled before."""
        versions = self.policy_versions[taken : taken + stop - start]
        edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), stop - start]
        for a, b in pairwise(edges):
            if a < b:
                yield Tokens(
                    int(versions[a]),
                    np.full(b - a, slot, np.uint32),
                    np.arange(start + a, start + b, dtype=np.uint32),
                    self.tokens[start + a : start + b],
                    self.logprobs[taken + a : taken + b],
                )


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What a log holds.

    Samples that are committed may still be here, whole or in part: a segment stays until the last sample in it is
    committed, and others of that sample's may not. Which those are the store knows.
    """

    folder: Path
    samples: dict[str, LoggedSample]
    """By id, in the order of their first records."""
    lengths: dict[str, int]
    """Bytes of each segment that count: the fence for the next writer."""
    torn: dict[str, int]
    """Segments with a torn tail, and where it begins."""
    epoch: int
    """The highest one; 0 if there are no segments."""
    notes: list[str]
    """What a person should know, one line each."""


def writers(folder: Path) -> list[str]:
    """Who has written in a log, sorted."""
    names = (SegmentName.parse(path.name) for path in folder.glob("*.wal"))
    return sorted({name.writer for name in names if name})


def recover(folder: Path, *, writer: str | None = None) -> Replay:
    """Replays a log for a process that takes it over: torn tails are cut off, and what counts is safe from now on.

    A process takes over whose log it reads: where several write side by side, each recovers its own.
    """
    found = replay(folder, writer=writer)
    truncate_torn(found)
    for name in found.lengths:  # a token that others will follow must not be lost to a power cut that they survive
        with disk.writing(folder / name):
            disk.sync_file(folder / name)
    return found


def truncate_torn(found: Replay) -> None:
    """Cuts torn tails off on disk, which has to be done before anything is appended."""
    for name, length in found.torn.items():
        with disk.writing(found.folder / name):
            os.truncate(found.folder / name, length)


def replay(folder: Path, *, writer: str | None = None, salvage: bool = False) -> Replay:
    """Reads the log of one writer, or of all. Changes nothing.

    With `salvage`, damage is noted instead of raised. Samples that were being written when it begins keep what stands
    before it and nothing after it. The log stays damaged: what was saved has to be written elsewhere.

    Raises MopdctlError naming file and offset for damage, and for records that contradict each other; InputError if a
    newer mopdctl wrote the log.
    """
    names, fences = [], {}
    for path in folder.glob("*.wal"):
        name = SegmentName.parse(path.name)
        if name and writer in (None, name.writer) and (data := _read(path)) is not None:
            names.append(name)
            with suppress(BadFrameError):  # told when the segment is read
                _, records = next(read_frames(data, name), (0, []))
                if records and isinstance(records[0], Fence):
                    fences[name] = records[0]
    limits: dict[str, int] = {}
    for owner, fence in fences.items():
        for text, length in fence.lengths.items():
            limits[text] = min(length, limits.get(text, length))
        replaced = {owner.writer} | {name.writer for name in map(SegmentName.parse, fence.lengths) if name}
        for name in names:  # one that the fence does not know was made after it
            if name.writer in replaced and name.epoch < owner.epoch and str(name) not in fence.lengths:
                limits[str(name)] = 0
    last = {(name.epoch, name.writer): name for name in sorted(names)}
    gone = {SegmentName(end.epoch, end.writer, part) for end in last.values() for part in range(end.part)}
    gone |= {name for text, length in limits.items() if length and (name := SegmentName.parse(text))}
    state = _State(folder, salvage, gone.difference(names))
    for name in sorted(names):
        state.segment(name, limits.get(str(name)), last=name in last.values())
    if state.left_out:
        count = len(state.left_out)
        state.notes.append(f"{folder}: {count} samples left out: their first segments are gone, as once committed")
    return Replay(
        folder,
        samples={sample_id: draft.logged() for sample_id, draft in state.samples.items()},
        lengths=state.lengths,
        torn=state.torn,
        epoch=max((name.epoch for name in names), default=0),
        notes=state.notes,
    )


@dataclass(slots=True)
class _Draft:
    """A sample while it is read."""

    first: Open
    attempt: int
    segments: list[SegmentName]
    holed: bool
    """Whether a segment is gone that could have held some of it."""
    cut: bool = False
    """Whether nothing more is believed of it."""
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    sampled: bytearray = field(default_factory=bytearray)
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("I"))
    tools: list[Tool] = field(default_factory=list)
    pending: Call | None = None
    finish: str | None = None

    def logged(self) -> LoggedSample:
        return LoggedSample(
            sample_id=self.first.sample_id,
            attempt=self.attempt,
            prompt_ids=self.first.prompt_ids,
            about=self.first.about,
            tokens=np.array(self.ids, np.int32),
            sampled=np.array(self.sampled, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            policy_versions=np.array(self.versions, np.uint32),
            tools=tuple(self.tools),
            pending_call=self.pending,
            finish_reason=self.finish,
            segments=tuple(map(str, self.segments)),
        )


class _State:
    """What was read so far."""

    def __init__(self, folder: Path, salvage: bool, gone: set[SegmentName]) -> None:
        self.samples: dict[str, _Draft] = {}
        self.lengths: dict[str, int] = {}
        self.torn: dict[str, int] = {}
        self.notes: list[str] = []
        self.left_out: set[object] = set()
        self._folder, self._salvage = folder, salvage
        self._gone = gone
        """Segments that were there once; with `salvage`, damaged ones as well."""
        self._damaged = False
        self._name, self._offset = SegmentName(0, "", 0), 0
        self._slots: dict[int, _Draft | None] = {}
        """Of the writer and epoch that are being read; None for a sample that is left out."""

    def segment(self, name: SegmentName, limit: int | None, *, last: bool) -> None:
        """Reads one segment, of which `limit` bytes count; None if no later epoch says how many."""
        path = self._folder / str(name)
        if (name.epoch, name.writer) != (self._name.epoch, self._name.writer):
            self._slots = {}
        self._name = name
        if (data := _read(path)) is None:
            self._gone.add(name)
            return
        size, fault = len(data), None
        end = size if limit is None else min(size, limit)
        try:
            for self._offset, records in read_frames(data[:end], name):
                for record in records:
                    self._apply(record)
            if limit is not None and size < limit:
                raise BadFrameError(size, f"{limit} bytes were there once")
        except BadFrameError as error:
            fault, end = error, error.offset
        self.lengths[str(name)] = end
        if fault is None:
            if size > end:
                self.notes.append(f"{path}: {size - end} bytes at offset {end} came from a replaced process; ignored")
        elif fault.torn and last and limit is None:
            self.torn[str(name)] = end
            self.notes.append(f"{path}: torn tail of {size - end} bytes at offset {end}; left out")
        elif not self._salvage:
            raise MopdctlError(f"{path}: damaged at offset {end} ({fault}); run `mopdctl store repair`")
        else:
            self._damaged = True
            self._gone.add(name)
            self.notes.append(f"{path}: damaged at offset {end} ({fault}); what follows of its samples is lost")
            for draft in self.samples.values():  # in an earlier epoch, too: it may have gone on in what is lost
                at = draft.segments[-1]
                draft.cut |= draft.finish is None and (at.epoch < name.epoch or at.writer == name.writer)

    def _apply(self, record: Entry) -> None:
        if isinstance(record, Tokens):
            self._tokens(record)
        elif isinstance(record, Open):
            self._open(record)
        elif isinstance(record, Header | Fence) or (draft := self._draft(record.slot)) is None:
            pass
        elif isinstance(record, Finish):
            if draft.finish not in (None, record.reason):
                return self._refuse(draft, f"ends with {draft.finish!r} and with {record.reason!r}")
            draft.finish = record.reason
        elif self._is_next(draft, record):
            if isinstance(record, Call):
                draft.pending = record
            else:
                draft.pending = None
                draft.tools.append(record)
                draft.ids.extend(record.token_ids.tolist())
                draft.sampled.extend(bytes(len(record.token_ids)))
        return None

    def _open(self, record: Open) -> None:
        draft = self.samples.get(record.sample_id)
        if draft is None and record.attempt > 1 and self._damaged:  # it began in what is lost, perhaps
            self._slots[record.slot] = None
            self.left_out.add(record.sample_id)
            return None
        if draft is None:
            holed = record.attempt > 1 and any(name < self._name for name in self._gone)
            draft = self.samples[record.sample_id] = _Draft(record, record.attempt, [self._name], holed)
        if self._slots.setdefault(record.slot, draft) is not draft:
            return self._refuse(draft, f"is given slot {record.slot}, which is another's")
        if self._draft(record.slot) is None:
            return None
        if not np.array_equal(draft.first.prompt_ids, record.prompt_ids):
            return self._refuse(draft, "is opened with two prompts")
        if record.attempt < draft.attempt:
            return self._refuse(draft, f"is opened for attempt {record.attempt} after attempt {draft.attempt}")
        draft.attempt = record.attempt
        return None

    def _tokens(self, record: Tokens) -> None:
        columns = (record.slots, record.positions, record.token_ids, record.logprobs)
        slots, name = self._slots, self._name
        for slot, position, token, logprob in zip(*(column.tolist() for column in columns), strict=True):
            draft = slots.get(slot)
            # Nearly all tokens need no look at the rest, which would cost as much again.
            if (draft is None or draft.segments[-1] is not name or draft.cut) and (draft := self._draft(slot)) is None:
                continue
            length = len(draft.ids)
            if position == length and draft.finish is None:
                draft.ids.append(token)
                draft.sampled.append(True)
                draft.logprobs.append(logprob)
                draft.versions.append(record.policy_version)
            elif position > length:
                self._gap(draft, slot, f"lacks positions {length} to {position - 1}")
            elif position == length:
                self._refuse(draft, "goes on after its end")
            elif draft.ids[position] != token or not draft.sampled[position]:
                self._refuse(draft, f"holds token {draft.ids[position]} at position {position}, and then {token}")

    def _is_next(self, draft: _Draft, record: Call | Tool) -> bool:
        """Whether a record of a command comes where it belongs. One that repeats what is there is passed over."""
        number, position = record.number, record.position
        if number > len(draft.tools) or position > len(draft.ids):
            self._gap(draft, record.slot, f"lacks what stands before command {number}")
            return False
        before = draft.tools[number] if number < len(draft.tools) else draft.pending
        if before and (before.position, before.request) != (position, record.request):
            self._refuse(draft, f"holds two versions of command {number}")
        elif isinstance(before, Tool):
            if isinstance(record, Tool) and encode(replace(before, slot=record.slot)) != encode(record):
                self._refuse(draft, f"holds two results of command {number}")
        elif position < len(draft.ids) or draft.finish is not None:
            self._refuse(draft, f"goes on before the result of command {number}")
        else:
            return True
        return False

    def _draft(self, slot: int) -> _Draft | None:
        """The sample of a slot; None if its records are to be skipped."""
        if slot not in self._slots:
            first = SegmentName(self._name.epoch, self._name.writer, 0)
            if not any(first <= name < self._name for name in self._gone):
                raise BadFrameError(self._offset, f"slot {slot} was never opened")
            self._slots[slot] = None
            self.left_out.add((first, slot))
        draft = self._slots[slot]
        if draft is None or draft.cut:
            return None
        if (before := draft.segments[-1]) is not self._name:
            draft.holed |= any(before < name < self._name for name in self._gone)
            draft.segments.append(self._name)
        return draft

    def _gap(self, draft: _Draft, slot: int, what: str) -> None:
        """Segments are removed when all their samples are committed, so one that was in a segment now gone is."""
        if not draft.holed:
            return self._refuse(draft, what)
        del self.samples[draft.first.sample_id]
        self._slots[slot] = None
        self.left_out.add(draft.first.sample_id)
        return None

    def _refuse(self, draft: _Draft, what: str) -> None:
        line = f"{self._folder / str(self._name)}: sample {draft.first.sample_id} {what} (offset {self._offset})"
        if not self._salvage:
            raise MopdctlError(f"{line}; run `mopdctl store repair`")
        draft.cut = True
        self.notes.append(f"{line}; the rest of it is left out")


def _read(path: Path) -> bytes | None:
    """A whole segment; None if it was removed meanwhile."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MopdctlError(f"{path}: cannot be read ({error.strerror})") from error
