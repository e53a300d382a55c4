"""Any byte of a store flipped, any file cut anywhere: it is said or it is harmless, never other data than was written.

Said: a MopdctlError, or a warning and the manifest before. Harmless: what is read is the truth, or, of the log, a part
of it from the beginning. Nothing else is raised, whoever looks: `Store`, `replay`, `verify` or `repair`.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mopdctl.errors import MopdctlError
from mopdctl.records import Sample
from mopdctl.store import manifest as manifests
from mopdctl.store.repair import repair
from mopdctl.store.replay import replay
from mopdctl.store.store import Store, StoreWriter
from mopdctl.store.verify import verify
from mopdctl.store.wal import Call, Finish, Open, Tokens, Tool, WalWriter

KINDS = ["manifest", "meta", "payload", "wal"]
IDENTITY = {"tokenizer": "t", "command": "test"}


def sample(number: int, **changes: Any) -> Sample:
    rng = np.random.default_rng(number)
    fields: dict[str, Any] = {
        "sample_id": f"p{number}/0@0",
        "prompt_id": f"p{number}",
        "group_id": f"p{number}",
        "generation_index": 0,
        "domain": ("math", "code")[number % 2],
        "teacher_id": ("m", "c")[number % 2],
        "policy_version_min": 0,
        "policy_version_max": 1,
        "tokens": rng.integers(0, 5000, 6).astype(np.int32),
        "prompt_length": 3,
        "loss_mask": np.array([False] * 3 + [True] * 3),
        "behavior_logprobs": -rng.random(3).astype(np.float32),
        "finish_reason": "stop",
        "tokenizer_fingerprint": "t",
        "sampling_fingerprint": "s",
    }
    return Sample(**fields | changes)


def wide(number: int) -> Sample:
    """A sample that has everything."""
    rng = np.random.default_rng(number)
    return sample(
        number,
        teacher_logprobs=-rng.random(3).astype(np.float32),
        teacher_topk_ids=rng.integers(0, 99, (3, 2)).astype(np.int32),
        teacher_topk_logprobs=-rng.random((3, 2)).astype(np.float32),
        teacher_hidden=rng.integers(0, 2**16, (3, 4)).astype(np.uint16),
        reward=1.0,
        verdict="ok",
        verifier="x/1",
        rewards=np.array([0.25, 0.75], np.float32),
    )


def write_log(folder: Path, epoch: int, fence: dict[str, int], frames: range) -> dict[str, int]:
    """Two samples, a token of each in every frame; the one of slot 1 runs a command after its second token."""
    with WalWriter(folder, writer="rank-0", level="process", epoch=epoch, fence=fence) as log:
        log.append([Open(s, f"w{s}", epoch, np.array([7, 8], np.int32), {"domain": "d"}) for s in range(2)])
        for t in frames:
            positions = np.array([t, t + (2 if t >= 2 else 0)], np.uint32)
            tokens = np.array([10 + t, 20 + t], np.int32)
            log.append([Tokens(t, np.arange(2, dtype=np.uint32), positions, tokens, -tokens.astype(np.float32))])
            if t == 1:
                log.append([Call(1, 0, 2, "ls")])
                log.append([Tool(1, 0, 2, "ls", "a b", np.array([91, 92], np.int32))])
        if epoch == 2:
            log.append([Finish(0, "stop")])
            slot, position = np.array([1], np.uint32), np.array([7], np.uint32)
            log.append([Tokens(9, slot, position, np.array([5], np.int32), np.zeros(1, np.float32))])
    return {path.name: path.stat().st_size for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two commits under three manifests; a log of two processes and two samples, one finished and one not."""
    folder = tmp_path_factory.mktemp("damage") / "s"
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([wide(0), sample(1)])
        writer.commit([sample(2)])
    write_log(folder / "wal", 2, write_log(folder / "wal", 1, {}, range(3)), range(3, 5))
    assert verify(folder).problems == []
    return folder


class Truth:
    """What is in the store, and whether what is read of it is that."""

    def __init__(self, folder: Path) -> None:
        self.samples = [bits(s) for s in Store(folder).scan()]
        self.meta = Store(folder).meta_table().to_pylist()
        self.logged = replay(folder / "wal").samples

    def read(self, folder: Path) -> bool:
        """Whether damage is said by who reads the store. Asserts that what is read is the truth."""
        try:
            store = Store(folder)
            meta = store.meta_table().to_pylist()
        except MopdctlError:
            return True
        assert meta == self.meta[: len(meta)]
        assert store.warnings or len(meta) == len(self.meta)
        said = bool(store.warnings)
        try:
            assert [bits(s) for s in store.scan()] == self.samples[: len(meta)]
            assert [bits(s) for s in store.read(range(len(meta)))] == self.samples[: len(meta)]
        except MopdctlError:
            said = True
        for number in range(len(meta)) if said else ():  # what is whole beside the damage comes out, too
            try:
                assert [bits(s) for s in store.read([number])] == [self.samples[number]]
            except MopdctlError:
                continue
        store.close()
        return said

    def read_log(self, folder: Path) -> tuple[str, list[str]]:
        """What is said by who reads the log, and its notes. Asserts that what is read is the beginning of the truth."""
        try:
            found = replay(folder / "wal")
        except MopdctlError as error:
            return str(error), []
        for sample_id, part in found.samples.items():
            it, length, sampled = self.logged[sample_id], len(part.tokens), len(part.logprobs)
            assert part.tokens.tolist() == it.tokens.tolist()[:length]
            assert part.sampled.tolist() == it.sampled.tolist()[:length]
            assert part.logprobs.tobytes() == it.logprobs[:sampled].tobytes()
            assert part.policy_versions.tolist() == it.policy_versions.tolist()[:sampled]
            assert part.prompt_ids.tolist() == it.prompt_ids.tolist()
            assert part.about == it.about
            assert [t.result for t in part.tools] == [t.result for t in it.tools][: len(part.tools)]
            assert part.finish_reason in (None, it.finish_reason)
            assert part.finish_reason is None or length == len(it.tokens)
        return "", found.notes


@pytest.fixture(scope="module")
def truth(whole: Path) -> Truth:
    return Truth(whole)


def bits(sample: Sample) -> list[Any]:
    values = [getattr(sample, name) for name in Sample.__dataclass_fields__]
    return [(v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values]


def files_of(folder: Path) -> list[Path]:
    return sorted(p for kind in KINDS for p in (folder / kind).iterdir())


def damaged(data: bytes, offsets: range) -> Iterator[tuple[int, str, bytes]]:
    for at in offsets:
        yield at, "flip", data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
        yield at, "cut", data[:at]


def frames(data: bytes) -> list[int]:
    """Where the frames of a segment begin."""
    found = [0]
    while found[-1] < len(data):
        found.append(found[-1] + 20 + int(struct.unpack_from("<I", data, found[-1] + 4)[0]))
    return found[:-1]


def check(folder: Path, truth: Truth, path: Path, data: bytes, how: str, at: int, broken: bytes) -> None:
    """One damage to one file, which lies in `folder` already: all who look say it, or it does no harm."""
    verdict = verify(folder)
    problems = [line for p in verdict.problems if (line := p.line()).startswith(f"{path.parent.name}/{path.name}: ")]
    assert len(problems) == len(verdict.problems), verdict.problems
    if path.parent.name == "wal":
        newest = path == max(path.parent.iterdir())
        log_error, log_notes = truth.read_log(folder)
        starts = frames(data)
        if newest and (how == "cut" or at >= starts[-1]):
            begun = max(start for start in starts if start <= at)  # what was cut off after it nobody misses
            assert (log_error, problems) == ("", [])
            assert verdict.notes == log_notes
            torn = [f"{path}: torn tail of {len(broken) - begun} bytes at offset {begun}; left out"]
            assert log_notes == ([] if len(broken) == begun else torn)
        else:
            assert log_error.startswith(f"{path}: ")
            assert problems
        return
    harmless = path.parent.name == "manifest" and parsed(broken) == parsed(data)
    assert bool(problems) is not harmless
    if path.parent.name == "meta" or path == max(path.parent.parent.glob("manifest/*")):
        assert truth.read(folder) is not harmless
    else:
        truth.read(folder)


def parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data


def sweep(whole: Path, folder: Path, truth: Truth, kind: str, step: int) -> int:
    """Damages every file of a kind at every `step`-th byte, one at a time."""
    shutil.copytree(whole, folder)
    count = 0
    for path in files_of(folder):
        if path.parent.name != kind:
            continue
        data = path.read_bytes()
        for at, how, broken in damaged(data, range(count % step, len(data), step)):
            path.write_bytes(broken)
            try:
                check(folder, truth, path, data, how, at, broken)
            except Exception as error:
                raise AssertionError(f"{path.relative_to(folder)}, {how} at {at}: {error!r}") from error
            count += 1
        path.write_bytes(data)
    assert verify(folder).problems == []
    return count


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_all_over_is_said_or_harmless(whole: Path, tmp_path: Path, truth: Truth, kind: str) -> None:
    # Every single byte is the business of tests/unit/store/test_damage.py; here whole commands look at what is left.
    size = sum(path.stat().st_size for path in (whole / kind).iterdir())
    assert sweep(whole, tmp_path / "s", truth, kind, 11) > size // 8


@pytest.mark.parametrize("kind", KINDS)
def test_damage_here_and_there_is_said_or_harmless(whole: Path, tmp_path: Path, truth: Truth, kind: str) -> None:
    assert sweep(whole, tmp_path / "s", truth, kind, {"wal": 37, "manifest": 97}.get(kind, 307)) > 30


@pytest.mark.slow
def test_any_damage_to_one_byte_of_a_payload_is_said_or_harmless(whole: Path, tmp_path: Path, truth: Truth) -> None:
    # All 255 other values of bytes drawn at random: one bit alone may be what a parser does not look at.
    rng = random.Random(0)
    shutil.copytree(whole, tmp_path / "s")
    path = max((tmp_path / "s" / "payload").iterdir(), key=lambda path: path.stat().st_size)
    data = path.read_bytes()
    for at in rng.sample(range(len(data)), 12):
        for value in range(256):
            path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            try:
                truth.read(tmp_path / "s")
            except Exception as error:
                raise AssertionError(f"byte {at} is {value}: {error!r}") from error


@pytest.mark.parametrize("count", [24, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_whatever_is_damaged_a_repair_saves_the_rest(whole: Path, tmp_path: Path, truth: Truth, count: int) -> None:
    rng = random.Random(count)
    known = {one[0]: one for one in truth.samples}
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        path = rng.choice(files_of(folder))
        data = path.read_bytes()
        at = rng.randrange(len(data))
        how = rng.choice(["flip", "cut", "gone"] if path.parent.name in ("meta", "payload") else ["flip", "cut"])
        broken = {"flip": data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :], "cut": data[:at]}.get(how)
        path.unlink() if broken is None else path.write_bytes(broken)
        try:
            hit = {i for p in verify(folder).problems for i in p.sample_ids}
            done = repair(folder)
            verdict = verify(folder)
            assert (verdict.problems, verdict.notes) == ([], []), verdict
            found = [bits(s) for s in Store(folder).scan()]
            assert len(found) == done.samples
            assert all(one == known[one[0]] for one in found)
            lost = known.keys() - {one[0] for one in found}
            assert hit <= lost, "what is lost was named before"
            assert not lost or done.lost, "what is lost is said"
            assert path.parent.name in ("meta", "payload") or not lost, "the log and manifests cost no committed sample"
            assert truth.read_log(folder) == ("", [])
            again = repair(folder)
            assert (again.manifest, again.lost, again.notes, again.moved) == (done.manifest, [], [], [])
            with StoreWriter(folder, IDENTITY) as writer:
                writer.commit([wide(0), sample(1), sample(2)])
            assert sorted(bits(s) for s in Store(folder).scan()) == sorted(truth.samples)
        except Exception as error:
            raise AssertionError(f"{path.relative_to(folder)}, {how} at {at}: {error!r}") from error
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_exits_with_3_and_names_file_and_rows(
    whole: Path, tmp_path: Path, cli: Callable[..., SimpleNamespace], kind: str
) -> None:
    folder = tmp_path / "rollouts" / "s"
    shutil.copytree(whole, folder)
    path = min((folder / kind).iterdir(), key=lambda path: (-path.stat().st_size, path.name))
    data = path.read_bytes()
    at = len(data) // 3
    path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    ended = cli("store", "verify", "s", "--workspace", tmp_path)
    assert ended.code == 3
    assert f"{kind}/{path.name}: " in ended.stdout
    assert ended.stderr == f"error: {folder}: damaged; `mopdctl store repair s` saves what is whole\n"
    document = json.loads(cli("store", "verify", "s", "--workspace", tmp_path, "--json").stdout)
    (problem,) = document["problems"]
    assert problem["path"] == f"{kind}/{path.name}"
    assert not document["whole"]
    if kind == "meta":
        assert problem["rows"] == 2
        assert "(2 samples)" in ended.stdout
    if kind == "payload":
        assert problem["sample_ids"]
        assert all(f"{name}" in ended.stdout for name in problem["sample_ids"])


def test_who_may_write_stops_at_a_damaged_manifest(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "s")
    path = manifests.manifest_path(tmp_path / "s", 2)
    data = path.read_bytes()
    for at, _, broken in damaged(data, range(0, len(data), 23)):
        path.write_bytes(broken)
        if parsed(broken) == parsed(data):
            continue
        with pytest.raises(MopdctlError, match="run `mopdctl store repair`"):
            StoreWriter(tmp_path / "s", IDENTITY)
        assert Store(tmp_path / "s").manifest.number == 1, at
