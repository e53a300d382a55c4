import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.errors import InputError, MopdctlError
from mopdctl.store import wal
from mopdctl.store.replay import Replay, recover, replay, truncate_torn
from mopdctl.store.wal import (
    Call,
    Fence,
    Finish,
    Header,
    Open,
    Record,
    Tokens,
    Tool,
    WalWriter,
    decode,
    encode,
)


def opened(slot: int, sample_id: str, attempt: int = 1, prompt: Sequence[int] = (7, 8)) -> Open:
    return Open(slot, sample_id, attempt, np.array(prompt, np.int32), {"domain": "math", "seed": "0f"})


def step(*rows: tuple[int, int, int], version: int = 0) -> Tokens:
    """Slot, position, token; the log-probability is minus a tenth of the token."""
    slots, positions, ids = zip(*rows, strict=True)
    return Tokens(
        version,
        np.array(slots, np.uint32),
        np.array(positions, np.uint32),
        np.array(ids, np.int32),
        -np.array(ids, np.float32) / 10,
    )


def tool(slot: int, number: int, position: int, ids: Sequence[int], *, result: str = "42") -> Tool:
    return Tool(slot, number, position, "ask", result, np.array(ids, np.int32))


def write(
    folder: Path,
    frames: Sequence[Sequence[Record]],
    *,
    epoch: int = 1,
    fence: Mapping[str, int] | None = None,
    writer: str = "rank-0",
    level: str = "process",
    max_segment_bytes: int = 1 << 20,
) -> list[Path]:
    with WalWriter(
        folder, writer=writer, level=level, epoch=epoch, fence=fence or {}, max_segment_bytes=max_segment_bytes
    ) as log:
        for records in frames:
            log.append(records)
    return [folder / name for name in log.segments]


def tokens(found: Replay) -> dict[str, list[int]]:
    return {sample_id: sample.tokens.tolist() for sample_id, sample in found.samples.items()}


def frame_starts(path: Path) -> list[int]:
    data = path.read_bytes()
    starts, offset = [], 0
    while offset < len(data):
        starts.append(offset)
        offset += 20 + int.from_bytes(data[offset + 4 : offset + 8], "little")
    return [*starts, len(data)]


STORY: list[list[Record]] = [
    [opened(0, "a"), opened(1, "b"), step((0, 0, 10), (1, 0, 20))],
    [step((0, 1, 11), (1, 1, 21))],
    [Call(0, 0, 2, "ask")],
    [tool(0, 0, 2, [100, 101]), step((1, 2, 22))],
    [step((0, 4, 12), version=3), Finish(1, "stop")],
    [step((0, 5, 13), version=4)],
    [Finish(0, "length")],
]
A, B = [10, 11, 100, 101, 12, 13], [20, 21, 22]


def check_prefix(found: Replay) -> None:
    """Every sample is a true prefix of itself, with all that belongs to it."""
    for sample_id, truth in (("a", A), ("b", B)):
        if sample_id not in found.samples:
            continue
        sample = found.samples[sample_id]
        length = len(sample.tokens)
        sampled = [token < 100 for token in truth[:length]]
        assert sample.tokens.tolist() == truth[:length]
        assert sample.sampled.tolist() == sampled
        assert sample.logprobs.tolist() == (-np.array(truth[:length], np.float32) / 10)[sampled].tolist()
        assert sample.prompt_ids.tolist() == [7, 8]
        assert sample.finish_reason in (None, {"a": "length", "b": "stop"}[sample_id])
        assert sample.finish_reason is None or length == len(truth)
    assert set(found.samples) <= {"a", "b"}


# ------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("level", ["process", "host"])
def test_a_whole_story_comes_back(tmp_path: Path, level: str) -> None:
    [path] = write(tmp_path / "wal", STORY, level=level)
    assert path.name == "000001-0000-rank-0.wal"
    found = replay(tmp_path / "wal", writer="rank-0")
    a, b = found.samples["a"], found.samples["b"]
    check_prefix(found)
    assert (a.tokens.tolist(), b.tokens.tolist()) == (A, B)
    assert (a.tokens.dtype, a.sampled.dtype, a.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    assert a.sampled.tolist() == [True, True, False, False, True, True]
    assert a.policy_versions.tolist() == [0, 0, 3, 4]
    assert (a.policy_version_min, a.policy_version_max) == (0, 4)
    assert a.about == {"domain": "math", "seed": "0f"}
    assert (a.finish_reason, b.finish_reason, a.attempt) == ("length", "stop", 1)
    assert [(t.number, t.position, t.request, t.result, t.token_ids.tolist()) for t in a.tools] == [
        (0, 2, "ask", "42", [100, 101])
    ]
    assert a.pending_call is None
    assert a.segments == b.segments == (path.name,)
    assert (found.epoch, found.notes, found.torn) == (1, [], {})
    assert found.lengths == {path.name: path.stat().st_size}


def test_an_empty_log_and_a_missing_one_hold_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "wal"):
        found = recover(folder)
        assert (found.samples, found.lengths, found.epoch, found.notes) == ({}, {}, 0, [])


def test_a_sample_without_tokens_has_empty_arrays(tmp_path: Path) -> None:
    write(tmp_path, [[opened(0, "a", prompt=[])]])
    a = replay(tmp_path).samples["a"]
    assert [len(x) for x in (a.prompt_ids, a.tokens, a.sampled, a.logprobs)] == [0, 0, 0, 0]
    assert (a.policy_version_min, a.policy_version_max) == (None, None)


def test_a_command_without_its_result_is_pending(tmp_path: Path) -> None:
    write(tmp_path, STORY[:3])
    assert replay(tmp_path).samples["a"].pending_call == Call(0, 0, 2, "ask")


def test_a_sample_may_have_several_tokens_in_one_record(tmp_path: Path) -> None:
    write(tmp_path, [[opened(0, "a"), opened(1, "b"), step((0, 0, 10), (0, 1, 11), (1, 0, 20), (0, 2, 12))]])
    assert tokens(replay(tmp_path)) == {"a": [10, 11, 12], "b": [20]}


u32 = st.integers(0, 2**32 - 1)
text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates, too
int32 = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(lambda x: np.array(x, np.int32))
about = st.dictionaries(text, st.none() | st.integers() | text | st.lists(st.booleans()), max_size=3)


@st.composite
def some_tokens(draw: st.DrawFn) -> Tokens:
    count = draw(st.integers(0, 4))
    slots, positions = (np.array(draw(st.lists(u32, min_size=count, max_size=count)), np.uint32) for _ in range(2))
    bits = np.array(draw(st.lists(u32, min_size=count, max_size=count)), np.uint32)
    return Tokens(draw(u32), slots, positions, bits.view(np.int32), bits.view(np.float32))


RECORDS = st.one_of(
    some_tokens(),
    st.builds(Open, u32, text, u32, int32, about),
    st.builds(Call, u32, u32, u32, text),
    st.builds(Tool, u32, u32, u32, text, text, int32),
    st.builds(Finish, u32, text),
    st.builds(Fence, u32, st.dictionaries(text, u32, max_size=3)),
    st.builds(Header, u32, u32, text, about),
)


@given(st.lists(RECORDS, max_size=4))
@settings(max_examples=100, deadline=None)
def test_every_record_comes_back_bit_by_bit(records: list[Any]) -> None:
    back = decode(memoryview(b"".join(map(encode, records))))
    assert [type(record) for record in back] == [type(record) for record in records]
    for one, two in zip(records, back, strict=True):
        for name in (f.name for f in fields(one)):
            before, after = getattr(one, name), getattr(two, name)
            if isinstance(before, np.ndarray):
                assert (before.dtype, before.tobytes()) == (after.dtype, after.tobytes())
            else:
                assert before == after


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_record_of_any_bytes_parses_or_is_a_value_error(data: st.DataObject) -> None:
    sound = b"".join(map(encode, data.draw(st.lists(RECORDS, min_size=1, max_size=2))))
    at = data.draw(st.integers(0, len(sound) - 1))
    broken = sound[:at] + data.draw(st.binary(max_size=6)) + sound[at + data.draw(st.integers(0, 6)) :]
    with contextlib.suppress(ValueError):
        decode(memoryview(broken))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tokens(0, np.zeros(2, np.uint32), np.zeros(1, np.uint32), np.zeros(2, np.int32), np.zeros(2)),
        lambda: encode(Tokens(0, np.array([-1]), np.array([0]), np.array([1]), np.array([0.0]))),
        lambda: encode(Open(0, "a", 1, np.array([2**31]), {})),
        lambda: encode(Open(0, "a", 1, np.array([1], np.int32), {"reward": float("nan")})),
    ],
)
def test_what_does_not_fit_is_not_logged(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"columns of different|holds a number that|not JSON compliant"):
        make()


def test_a_record_that_does_not_fit_leaves_the_log_usable(tmp_path: Path) -> None:
    log = WalWriter(tmp_path, writer="rank-0", level="process", epoch=1, fence={})
    with pytest.raises(ValueError, match="prompt_ids holds a number that is not int32"):
        log.append([Open(0, "a", 1, np.array([2**40]), {})])
    log.append([opened(0, "a"), step((0, 0, 5))])
    log.close()
    assert tokens(replay(tmp_path)) == {"a": [5]}


# ------------------------------------------------------------------------------------------------- torn and flipped


def test_a_log_cut_at_any_byte_holds_a_prefix_and_goes_on(tmp_path: Path) -> None:
    [path] = write(tmp_path / "wal", STORY)
    whole, starts = path.read_bytes(), frame_starts(path)
    seen = len(A) + len(B)
    for length in reversed(range(len(whole) + 1)):
        os.truncate(path, length)
        good = max(start for start in starts if start <= length)
        if good < length:
            found = replay(path.parent)
            assert found.torn == {path.name: good}
            assert found.notes == [f"{path}: torn tail of {length - good} bytes at offset {good}; left out"]
        else:
            found = recover(path.parent)
            assert (found.torn, found.notes) == ({}, [])
        check_prefix(found)
        assert found.lengths == {path.name: good}
        assert path.stat().st_size == length
        count = sum(len(sample.tokens) for sample in found.samples.values())
        assert count <= seen
        seen = count
    assert seen == 0


@pytest.mark.parametrize("missing", [1, 20, 21, 40])
def test_a_torn_tail_is_cut_off_before_anything_is_appended(tmp_path: Path, missing: int) -> None:
    [path] = write(tmp_path, STORY)
    os.truncate(path, path.stat().st_size - missing)
    found = replay(tmp_path)
    truncate_torn(found)
    assert path.stat().st_size == found.lengths[path.name] in frame_starts(path)
    after = replay(tmp_path)
    assert (tokens(after), after.notes, after.torn) == (tokens(found), [], {})


def flipped(path: Path, mask: Callable[[int], int]) -> Iterator[int]:
    """Changes one byte after the other, and back; yields its place."""
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(path.read_bytes()):
            for value in (byte ^ mask(at), byte):
                file.seek(at)
                file.write(bytes([value]))
                if value != byte:
                    yield at


def test_a_flipped_bit_is_refused_or_costs_the_tail_alone(tmp_path: Path) -> None:
    [first] = write(tmp_path, STORY[:4])
    more: list[list[Record]] = [
        [opened(5, "a", 2), step((5, 4, 12), version=3)],
        [step((5, 5, 13), version=4)],
        [Finish(5, "length")],
    ]
    [second] = write(tmp_path, more, epoch=2, fence=replay(tmp_path).lengths)
    size, last_frame = second.stat().st_size, frame_starts(second)[-2]
    assert tokens(replay(tmp_path)) == {"a": A, "b": B}
    for path in (first, second):
        for at in flipped(path, lambda at: 1 << at % 8):
            if path == second and at >= last_frame:
                found = replay(tmp_path)
                check_prefix(found)
                assert (tokens(found), found.samples["a"].finish_reason) == ({"a": A, "b": B}, None)
                [note] = found.notes
                assert note == f"{path}: torn tail of {size - last_frame} bytes at offset {last_frame}; left out"
            else:
                with pytest.raises(MopdctlError, match=r"damaged at offset \d+ .*run `mopdctl store repair`") as caught:
                    replay(tmp_path)
                assert str(caught.value).startswith(f"{path}: ")


def test_a_flipped_byte_never_makes_salvage_invent_anything(tmp_path: Path) -> None:
    [path] = write(tmp_path, STORY)
    for _ in flipped(path, lambda _: 0xFF):
        found = replay(tmp_path, salvage=True)
        check_prefix(found)
        assert len(found.notes) == 1


def test_garbage_after_the_last_frame_is_a_torn_tail(tmp_path: Path) -> None:
    [path] = write(tmp_path, STORY)
    size = path.stat().st_size
    for garbage in (b"\0" * 5000, b"\xf5MW\xc1" * 9, b"\xf5MW\xc1" + b"\xff" * 60):  # the last announces 4 GiB
        with path.open("ab") as file:
            file.write(garbage)
        found = recover(tmp_path)
        assert tokens(found) == {"a": A, "b": B}
        assert found.torn == {path.name: size}
        assert path.stat().st_size == size


def test_a_frame_of_another_segment_is_no_frame_here(tmp_path: Path) -> None:
    [one] = write(tmp_path / "one", STORY)
    [two] = write(tmp_path / "two", STORY)
    start = frame_starts(two)[5]
    two.write_bytes(two.read_bytes()[:start] + one.read_bytes()[start:])
    assert replay(two.parent).torn == {two.name: start}


def test_damage_in_the_middle_is_refused_and_can_be_salvaged(tmp_path: Path) -> None:
    [path] = write(tmp_path, STORY)
    [other] = write(tmp_path, [[opened(0, "c"), step((0, 0, 30))]], writer="rank-1")
    start = frame_starts(path)[3]
    data = bytearray(path.read_bytes())
    data[start + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(MopdctlError, match=f"{path.name}: damaged at offset {start} .*mopdctl store repair"):
        replay(tmp_path)
    with pytest.raises(MopdctlError, match="damaged"):
        recover(tmp_path)
    assert path.read_bytes() == data
    found = replay(tmp_path, salvage=True)
    assert tokens(found) == {"a": [10], "b": [20], "c": [30]}
    assert found.lengths == {path.name: start, other.name: other.stat().st_size}
    assert found.torn == {}
    [note] = found.notes
    assert note.startswith(f"{path}: damaged at offset {start} (a sound frame follows at ")


def test_salvage_believes_nothing_of_a_sample_after_damage(tmp_path: Path) -> None:
    """Its end would otherwise stand right behind tokens in whose middle some are lost."""
    frames: list[list[Record]] = [
        [opened(0, "done"), step((0, 0, 1)), Finish(0, "stop")],
        [opened(1, "cut"), step((1, 0, 2))],
        [opened(2, "lost"), step((1, 1, 3), (2, 0, 4))],
    ]
    [first, *_] = write(tmp_path, frames, max_segment_bytes=900)
    write(
        tmp_path,
        [
            [opened(0, "cut", 2), Finish(0, "stop")],
            [opened(1, "lost", 2), Finish(1, "stop")],
            [opened(2, "new"), step((2, 0, 5)), Finish(2, "stop")],
        ],
        epoch=2,
        fence=replay(tmp_path).lengths,
    )
    data = bytearray(first.read_bytes())
    data[frame_starts(first)[4] + 30] ^= 1
    first.write_bytes(data)
    found = replay(tmp_path, salvage=True)
    assert tokens(found) == {"done": [1], "cut": [2], "new": [5]}
    assert {k: v.finish_reason for k, v in found.samples.items()} == {"done": "stop", "cut": None, "new": "stop"}


def test_records_that_do_not_parse_under_a_right_checksum_are_damage(tmp_path: Path) -> None:
    bodies = {
        "unknown type": b"\x63\x00\x00\x00\x00",
        "record beyond the frame": b"\x06\xff\xff\xff\xff" + bytes(4),
        "field beyond the record": b"\x06\x08\x00\x00\x00" + bytes(4) + b"\xff\xff\xff\xff",
        "half a record": encode(Finish(0, "stop"))[:-1],
        "no record": b"",
        "record too long": b"\x06\x09\x00\x00\x00" + bytes(9),
        "about is a list": encode(opened(0, "a")).replace(b'{"domain":"math","seed":"0f"}', b"[" + b" " * 27 + b"]"),
        "array of half numbers": b"\x02" + (25).to_bytes(4, "little") + bytes(12) + b"\x03\0\0\0abc" + b"\x02\0\0\0{}",
    }
    for what, body in bodies.items():
        folder = tmp_path / what
        log = WalWriter(folder, writer="rank-0", level="process", epoch=1, fence={})
        log.append([opened(3, "x")])
        log._write(wal._frame(log._number, log._salt, body), frames=1)
        log.close()
        with pytest.raises(MopdctlError, match="damaged at offset"):
            replay(folder)
        assert tokens(replay(folder, salvage=True)) == {"x": []}, what


def test_a_missing_and_a_repeated_frame_are_damage(tmp_path: Path) -> None:
    [path] = write(tmp_path, STORY)
    whole, starts = path.read_bytes(), frame_starts(path)
    a, b = starts[3], starts[4]
    for data in (whole[:a] + whole[b:], whole[:b] + whole[a:b] + whole[b:]):
        path.write_bytes(data)
        with pytest.raises(MopdctlError, match=r"damaged at offset \d+ \(frame \d where \d belongs\)"):
            replay(tmp_path)


def test_a_renamed_segment_and_one_of_a_newer_version_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    [path] = write(tmp_path, STORY)
    for name in ("000002-0000-rank-0.wal", "000001-0000-rank-1.wal"):
        path = path.rename(tmp_path / name)
        with pytest.raises(MopdctlError, match="the header is that of another segment"):
            replay(tmp_path)
    monkeypatch.setattr(wal, "VERSION", 2)
    write(tmp_path / "new", STORY)
    monkeypatch.undo()
    with pytest.raises(InputError, match="version 2, this mopdctl reads 1; upgrade it"):
        replay(tmp_path / "new")


# ------------------------------------------------------------------------------------------- processes that follow


def test_a_sample_goes_on_over_epochs(tmp_path: Path) -> None:
    [first] = write(tmp_path, STORY[:3])
    with first.open("ab") as file:
        file.write(b"torn")
    found = recover(tmp_path, writer="rank-0")
    assert found.torn == {first.name: found.lengths[first.name]}
    frames: list[list[Record]] = [
        [opened(0, "b", 2), step((0, 2, 22)), Finish(0, "stop")],
        [opened(1, "a", 2), tool(1, 0, 2, [100, 101])],
    ]
    [second] = write(tmp_path, frames, epoch=found.epoch + 1, fence=found.lengths)
    found = recover(tmp_path, writer="rank-0")
    [third] = write(
        tmp_path,
        [[opened(9, "a", 3), step((9, 4, 12), (9, 5, 13), version=8), Finish(9, "length")]],
        epoch=found.epoch + 1,
        fence=found.lengths,
    )
    found = replay(tmp_path, writer="rank-0")
    check_prefix(found)
    assert tokens(found) == {"a": A, "b": B}
    a = found.samples["a"]
    assert (a.attempt, a.pending_call, len(a.tools), a.policy_version_max) == (3, None, 1, 8)
    assert a.segments == (first.name, second.name, third.name)
    assert found.samples["b"].segments == (first.name, second.name)
    assert (found.epoch, found.notes) == (3, [])


def test_a_torn_tail_stays_legitimate_in_the_last_segment_of_an_earlier_epoch(tmp_path: Path) -> None:
    """A second process died before it wrote anything that could have said how far it had read."""
    [first] = write(tmp_path, STORY)
    with first.open("r+b") as file:
        file.truncate(first.stat().st_size - 1)
    (tmp_path / "000002-0000-rank-0.wal").write_bytes(b"\xf5MW")
    found = replay(tmp_path)
    assert found.torn == {first.name: frame_starts(first)[-2], "000002-0000-rank-0.wal": 0}
    assert found.samples["a"].tokens.tolist() == A
    assert (found.epoch, len(found.notes)) == (2, 2)


def test_what_a_replaced_process_adds_is_ignored(tmp_path: Path) -> None:
    late = WalWriter(tmp_path, writer="rank-0", level="process", epoch=1, fence={})
    late.append([opened(0, "a"), step((0, 0, 10))])
    found = recover(tmp_path)
    write(tmp_path, [[opened(0, "a", 2), step((0, 1, 11))]], epoch=2, fence=found.lengths)
    late.append([step((0, 1, 66)), Finish(0, "stop")])
    late.rotate()
    late.append([step((0, 2, 67))])
    late.close()
    first, more = (tmp_path / name for name in late.segments)
    size = found.lengths[first.name]
    again = replay(tmp_path)
    assert tokens(again) == {"a": [10, 11]}
    assert again.samples["a"].finish_reason is None
    assert again.notes == [
        f"{first}: {first.stat().st_size - size} bytes at offset {size} came from a replaced process; ignored",
        f"{more}: {more.stat().st_size} bytes at offset 0 came from a replaced process; ignored",
    ]
    assert (again.lengths[first.name], again.lengths[more.name]) == (size, 0)
    write(tmp_path, [[opened(0, "a", 3), step((0, 2, 12))]], epoch=3, fence=again.lengths)
    assert tokens(replay(tmp_path)) == {"a": [10, 11, 12]}


def test_a_replaced_process_that_was_torn_leaves_no_hole(tmp_path: Path) -> None:
    late = WalWriter(tmp_path, writer="rank-0", level="process", epoch=1, fence={})
    late.append([opened(0, "a"), step((0, 0, 10))])
    assert late._handle is not None
    os.write(late._handle, b"half a frame")
    found = recover(tmp_path)
    late.append([step((0, 1, 66))])
    late.close()
    [path] = tmp_path.iterdir()
    assert frame_starts(path)[3] == found.lengths[path.name]


def test_a_segment_shorter_than_it_once_was_is_damage(tmp_path: Path) -> None:
    [first] = write(tmp_path, STORY[:4])
    lengths = replay(tmp_path).lengths
    write(tmp_path, [[opened(0, "a", 2), step((0, 4, 12), version=3)]], epoch=2, fence=lengths)
    whole, starts = first.read_bytes(), frame_starts(first)
    for length in range(len(whole)):
        first.write_bytes(whole[:length])
        with pytest.raises(MopdctlError, match=f"{first.name}: damaged at offset"):
            replay(tmp_path)
    first.write_bytes(whole[: starts[-2]])
    found = replay(tmp_path, salvage=True)
    assert tokens(found) == {"a": [10, 11], "b": [20, 21]}
    assert f"at offset {starts[-2]} ({len(whole)} bytes were there once)" in found.notes[0]


def test_the_shortest_fence_counts_and_every_part_carries_it(tmp_path: Path) -> None:
    [first] = write(tmp_path, STORY[:2])
    lengths = replay(tmp_path).lengths
    size = lengths[first.name]
    frames: list[list[Record]] = [[opened(0, "a", 2)], [step((0, 2, 50))], [step((0, 3, 51))]]
    parts = write(tmp_path, frames, epoch=2, fence=lengths, max_segment_bytes=1)
    assert len(parts) == 3
    with first.open("ab") as file:
        file.write(b"late")
    parts[0].unlink()
    assert replay(tmp_path).lengths[first.name] == size
    write(tmp_path, [[opened(0, "z")]], epoch=3, fence={p.name: p.stat().st_size for p in (first, *parts[1:])})
    assert replay(tmp_path).lengths[first.name] == size


def test_two_processes_cannot_be_the_same_epoch_of_a_writer(tmp_path: Path) -> None:
    write(tmp_path, STORY)
    log = WalWriter(tmp_path, writer="rank-0", level="process", epoch=1, fence={})
    for message in ("is there already; does another process write here", "closed or has failed"):
        with pytest.raises(MopdctlError, match=message):
            log.append([opened(0, "a")])


def test_several_writers_share_a_folder_until_one_takes_over(tmp_path: Path) -> None:
    write(tmp_path, [[opened(0, "a"), step((0, 0, 10))]], writer="rank-0")
    late = WalWriter(tmp_path, writer="rank-1", level="process", epoch=1, fence={})
    late.append([opened(0, "b"), step((0, 0, 20))])
    assert tokens(replay(tmp_path, writer="rank-0")) == {"a": [10]}
    assert tokens(replay(tmp_path, writer="rank-1")) == {"b": [20]}
    found = recover(tmp_path)
    assert tokens(found) == {"a": [10], "b": [20]}
    more: list[list[Record]] = [[opened(0, "b", 2), opened(1, "a", 2), step((0, 1, 21), (1, 1, 11))]]
    write(tmp_path, more, epoch=2, fence=found.lengths)
    late.append([step((0, 1, 66))])
    late.rotate()
    late.append([step((0, 2, 67))])
    late.close()
    found = replay(tmp_path)
    assert tokens(found) == {"a": [10, 11], "b": [20, 21]}
    assert len(found.notes) == 2


# ------------------------------------------------------------------------------------------- segments that are gone


def test_a_full_segment_is_followed_by_another(tmp_path: Path) -> None:
    paths = write(tmp_path, STORY, max_segment_bytes=400)
    assert [path.name for path in paths] == [f"000001-{part:04d}-rank-0.wal" for part in range(len(paths))]
    assert len(paths) > 2
    assert all(path.stat().st_size <= 400 for path in paths[1:])
    found = replay(tmp_path)
    check_prefix(found)
    assert tokens(found) == {"a": A, "b": B}
    assert found.samples["a"].segments == tuple(path.name for path in paths)
    assert found.epoch == 1
    with paths[0].open("r+b") as file:  # no crash tears a segment that another part follows
        file.truncate(paths[0].stat().st_size - 1)
    with pytest.raises(MopdctlError, match=f"{paths[0].name}: damaged at offset"):
        replay(tmp_path)


def test_rotation_by_hand_begins_a_part_at_the_next_append(tmp_path: Path) -> None:
    log = WalWriter(tmp_path, writer="rank-0", level="process", epoch=1, fence={})
    assert (log.segment, log.segments) == (None, ())
    log.append([opened(0, "a")])
    assert log.segment == "000001-0000-rank-0.wal"
    log.rotate()
    assert (log.segment, log.segments) == (None, ("000001-0000-rank-0.wal",))
    log.append([step((0, 0, 1))])
    log.close()
    assert log.segments == ("000001-0000-rank-0.wal", "000001-0001-rank-0.wal")
    assert tokens(replay(tmp_path)) == {"a": [1]}


def test_records_of_samples_whose_segments_were_removed_are_skipped(tmp_path: Path) -> None:
    """`x` began in the first segment, `y` has a part in the middle one; both are committed. `z` has neither."""
    frames: list[list[Record]] = [
        [opened(0, "x"), step((0, 0, 1))],
        [opened(1, "y"), opened(2, "z"), step((1, 0, 2), (2, 0, 3))],
        [step((0, 1, 1), (1, 1, 2))],
        [step((0, 2, 1), (1, 2, 2), (2, 1, 3)), Finish(0, "stop"), Finish(1, "stop")],
    ]
    parts = write(tmp_path, frames, max_segment_bytes=1)
    parts[0].unlink()
    parts[2].unlink()
    found = replay(tmp_path)
    assert tokens(found) == {"z": [3, 3]}
    (note,) = found.notes
    assert note == f"{tmp_path}: 2 samples left out: their first segments are gone, as once committed"
    assert set(found.lengths) == {parts[1].name, parts[3].name}


def test_a_removed_segment_that_a_fence_names_is_no_damage(tmp_path: Path) -> None:
    frames: list[list[Record]] = [[opened(0, "x"), opened(1, "y"), step((0, 0, 1), (1, 0, 1))], [step((0, 1, 1))]]
    parts = write(tmp_path, frames, max_segment_bytes=1)
    again: list[list[Record]] = [[opened(4, "x", 2), opened(5, "y", 2), step((4, 2, 1), (5, 1, 1))]]
    write(tmp_path, again, epoch=2, fence=replay(tmp_path).lengths)
    parts[1].unlink()
    assert tokens(replay(tmp_path)) == {"y": [1, 1]}
    parts[0].unlink()
    assert tokens(replay(tmp_path)) == {}


# -------------------------------------------------------------------------------------------- repeats and conflicts


def test_repeated_records_change_nothing(tmp_path: Path) -> None:
    write(tmp_path, [*STORY, *STORY, [record for frame in STORY for record in frame]])
    found = replay(tmp_path)
    check_prefix(found)
    assert tokens(found) == {"a": A, "b": B}
    assert len(found.samples["a"].tools) == 1
    assert found.samples["a"].pending_call is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([step((0, 1, 99))], "sample a holds token 11 at position 1, and then 99"),
        ([step((0, 2, 100))], "sample a holds token 100 at position 2, and then 100"),  # sampled is not returned
        ([step((0, 7, 14))], "sample a lacks positions 4 to 6"),
        ([step((1, 3, 23))], "sample b goes on after its end"),
        ([Finish(1, "length")], "sample b ends with 'stop' and with 'length'"),
        ([tool(0, 0, 2, [100, 102])], "sample a holds two results of command 0"),
        ([tool(0, 0, 2, [100, 101], result="43")], "sample a holds two results of command 0"),
        ([tool(0, 0, 1, [100, 101])], "sample a holds two versions of command 0"),
        ([Call(0, 0, 2, "other")], "sample a holds two versions of command 0"),
        ([Call(0, 1, 4, "one"), Call(0, 1, 4, "two")], "sample a holds two versions of command 1"),
        ([Call(0, 1, 4, "one"), tool(0, 1, 4, [1])], "sample a holds two versions of command 1"),
        ([Call(0, 1, 3, "one")], "sample a goes on before the result of command 1"),
        ([tool(0, 2, 4, [1])], "sample a lacks what stands before command 2"),
        ([tool(0, 1, 5, [1])], "sample a lacks what stands before command 1"),
        ([opened(2, "a", 1, [7])], "sample a is opened with two prompts"),
        ([opened(2, "a", 3), opened(3, "a", 2)], "sample a is opened for attempt 2 after attempt 3"),
        ([opened(1, "c")], "sample c is given slot 1, which is another's"),
        ([step((7, 0, 1))], "slot 7 was never opened"),
    ],
)
def test_records_that_contradict_each_other_are_refused(tmp_path: Path, records: list[Record], message: str) -> None:
    story = [*STORY[:4], [Finish(1, "stop")]]
    [path] = write(tmp_path, [*story, records])
    start = frame_starts(path)[-2]
    with pytest.raises(MopdctlError) as caught:
        replay(tmp_path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert f"offset {start}" in str(caught.value)
    found = replay(tmp_path, salvage=True)
    assert (found.samples["a"].tokens.tolist(), found.samples["b"].tokens.tolist()) == ([10, 11, 100, 101], B)
    assert found.samples["b"].finish_reason == "stop"
    assert len(found.notes) == 1


# ------------------------------------------------------------------------------------------------- levels and disks


def test_level_off_makes_no_file(tmp_path: Path) -> None:
    with WalWriter(tmp_path / "wal", writer="rank-0", level="off", epoch=1, fence={}) as log:
        log.append([opened(0, "a"), step((0, 0, 10))])
        assert (log.segment, log.segments) == (None, ())
    assert list(tmp_path.iterdir()) == []


def test_an_append_of_nothing_makes_no_file(tmp_path: Path) -> None:
    with WalWriter(tmp_path / "wal", writer="rank-0", level="host", epoch=1, fence={}) as log:
        log.append([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("writer", "level", "message"),
    [("rank-0", "disk", "durability level 'disk': use one of off, process, host"), ("../x", "host", "log writer")],
)
def test_unknown_levels_and_names_that_lead_elsewhere_are_refused(
    tmp_path: Path, writer: str, level: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        WalWriter(tmp_path, writer=writer, level=level, epoch=1, fence={})


@pytest.mark.parametrize(("level", "expected"), [("process", {}), ("host", {"data": 4, "folder": 1})])
def test_an_append_is_one_write_and_at_level_host_one_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, expected: dict[str, int]
) -> None:
    syncs: dict[str, int] = {}
    writes = []
    real = os.write

    def count(kind: str) -> Callable[[object], None]:
        return lambda _: syncs.update({kind: syncs.get(kind, 0) + 1})

    monkeypatch.setattr(os, "fdatasync", count("data"))
    monkeypatch.setattr(wal.disk, "sync_folder", count("folder"))
    monkeypatch.setattr(os, "write", lambda handle, data: writes.append(len(data)) or real(handle, data))
    write(tmp_path, STORY[:3], level=level)
    assert syncs == expected
    assert len(writes) == 4  # what a segment begins with is one more of each


@given(st.lists(st.integers(1, 3), min_size=1, max_size=10))
@settings(max_examples=5, deadline=None)
def test_short_writes_are_gone_on_with(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("wal")
    real, calls = os.write, 0

    def short(handle: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        return real(handle, data[: sizes[calls % len(sizes)]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", short)
        write(folder, STORY)
    assert tokens(replay(folder)) == {"a": A, "b": B}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("where", ["write", "fdatasync"])
def test_a_failed_append_is_taken_back_and_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    log = WalWriter(tmp_path, writer="rank-0", level="host", epoch=1, fence={})
    log.append(STORY[0])
    path = tmp_path / str(log.segment)
    good, real = path.stat().st_size, os.write

    def fail(handle: int, data: bytes = b"") -> int:
        if len(data) > 40:
            return real(handle, data[:5])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(MopdctlError) as caught:
        log.append([step((0, 1, 11), (1, 1, 21))])
    monkeypatch.undo()
    assert isinstance(caught.value, InputError) == (number != errno.EIO)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert path.stat().st_size == good
    with pytest.raises(MopdctlError, match="closed or has failed; nothing more can be logged"):
        log.append(STORY[1])
    log.close()
    assert tokens(replay(tmp_path)) == {"a": [10], "b": [20]}


def test_an_interrupted_append_is_taken_back_and_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = WalWriter(tmp_path, writer="rank-0", level="process", epoch=1, fence={})
    log.append(STORY[0])
    real = os.write

    def interrupted(handle: int, data: bytes) -> int:
        real(handle, data[:30])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.append(STORY[1])
    monkeypatch.undo()
    with pytest.raises(MopdctlError, match="closed or has failed"):
        log.append(STORY[1])
    found = replay(tmp_path)
    assert (tokens(found), found.notes) == ({"a": [10], "b": [20]}, [])


PROCESS = """
import resource, sys
from pathlib import Path
import numpy as np
from mopdctl.errors import InputError
from mopdctl.store.wal import Open, Tokens, WalWriter

folder, level, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
log = WalWriter(folder, writer="rank-0", level=level, epoch=1, fence={}, max_segment_bytes=1 << 14)
slots = np.arange(8, dtype=np.uint32)
log.append([Open(i, f"s{i}", 1, np.array([1], np.int32), {}) for i in range(8)])
for n in range(1_000_000):
    position = np.full(8, n, np.uint32)
    try:
        log.append([Tokens(0, slots, position, (n + slots).astype(np.int32), np.zeros(8, np.float32))])
    except InputError as error:
        print("full", n, error, flush=True)
        break
    print(n, flush=True)
"""


def start(folder: Path, level: str, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(folder), level, str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_counting(found: Replay, at_least: int) -> int:
    lengths = {len(sample.tokens) for sample in found.samples.values()}
    assert len(lengths) == 1
    [length] = lengths
    assert length >= at_least
    assert tokens(found) == {f"s{i}": list(range(i, i + length)) for i in range(8)}
    return length


def test_a_full_disk_is_one_clear_line_and_costs_nothing_that_was_logged(tmp_path: Path) -> None:
    output, _ = start(tmp_path, "process", limit=10_000).communicate(timeout=60)
    *logged, last = output.splitlines()
    assert last.startswith(f"full {len(logged)} {tmp_path}/000001-0000-rank-0.wal: the disk is full")
    found = replay(tmp_path)
    assert len(logged) > 20
    assert check_counting(found, len(logged)) == len(logged)
    assert found.notes == []


@pytest.mark.parametrize(("level", "pause_s"), [("process", 0.01), ("process", 0.13), ("host", 0.05)])
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, level: str, pause_s: float) -> None:
    process = start(tmp_path, level)
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    time.sleep(pause_s)
    process.send_signal(signal.SIGKILL)
    acknowledged = [0, *(int(line) for line in process.stdout.read().split("\n")[:-1])]
    process.wait()
    process.stdout.close()
    found = recover(tmp_path, writer="rank-0")
    length = check_counting(found, acknowledged[-1] + 1)
    assert length <= acknowledged[-1] + 2
    frames: list[list[Record]] = [
        [opened(0, "s0", 2, [1]), Tokens(1, *(np.array([x]) for x in (0, length, length)), np.zeros(1, np.float32))]
    ]
    write(tmp_path, frames, epoch=found.epoch + 1, fence=found.lengths)
    assert len(replay(tmp_path).samples["s0"].tokens) == length + 1


def test_recovery_syncs_what_the_next_process_builds_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path, STORY, max_segment_bytes=400)
    synced = []
    monkeypatch.setattr(wal.disk, "sync_file", synced.append)
    recover(tmp_path)
    assert synced == paths


def test_logging_a_step_costs_little_beside_the_write(tmp_path: Path) -> None:
    n = 64
    record = Tokens(
        1,
        np.arange(n, dtype=np.uint32),
        np.zeros(n, np.uint32),
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.float32),
    )
    seconds = []
    for _ in range(300):
        began = time.perf_counter()
        wal._frame(1, b"12345678", encode(record))
        seconds.append(time.perf_counter() - began)
    assert np.median(seconds) < 200e-6  # about 10 us; the rest is room for busy machines


def test_the_checksum_is_the_one_that_is_documented(tmp_path: Path) -> None:
    [path] = write(tmp_path, STORY)
    data = path.read_bytes()
    a, b = frame_starts(path)[2:4]
    length, number = data[a + 4 : a + 8], data[a + 12 : a + 20]
    header = decode(memoryview(data)[20 : frame_starts(path)[1]])[0]
    assert isinstance(header, Header)
    assert data[a : a + 4] == b"\xf5MW\xc1"
    assert int.from_bytes(data[a + 8 : a + 12], "little") == zlib.crc32(
        length + number + bytes.fromhex(header.salt) + data[a + 20 : b]
    )
    assert int.from_bytes(number, "little") == 2
    assert {"writer": "rank-0", "part": 0, "level": "process"}.items() <= header.about.items()
