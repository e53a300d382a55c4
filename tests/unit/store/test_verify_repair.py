"""What is damaged is named, what is whole is saved, what is lost is said, and nothing is deleted."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Sample
from mopdctl.store import manifest as manifests
from mopdctl.store.manifest import Shard
from mopdctl.store.repair import repair
from mopdctl.store.replay import recover, replay
from mopdctl.store.store import Store, StoreWriter
from mopdctl.store.verify import verify
from mopdctl.store.wal import Call, Finish, Open, Tokens, Tool, WalWriter

Make = Callable[..., Sample]
Same = Callable[[Sample, Sample], bool]
IDENTITY = {"tokenizer": "t"}


@pytest.fixture
def folder(tmp_path: Path, make_sample: Make) -> Path:
    """Three commits of 100 samples: two row groups each."""
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        for start in (0, 100, 200):
            writer.commit([make_sample(i) for i in range(start, start + 100)])
    return tmp_path / "s"


def shards(folder: Path) -> tuple[Shard, ...]:
    return Store(folder).manifest.shards


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    path.write_bytes(data)


def ids(folder: Path) -> list[str]:
    return [s.sample_id for s in Store(folder).scan()]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_whole_store_is_whole_and_stays_as_it_is(folder: Path) -> None:
    before = files(folder)
    verdict = verify(folder)
    assert (verdict.problems, verdict.notes) == ([], [])
    assert (verdict.manifest, verdict.shards, verdict.samples, verdict.waiting) == (3, 3, 300, 0)
    done = repair(folder)
    assert (done.manifest, done.samples, done.lost, done.moved) == (3, 300, [], [])
    assert files(folder) == before


def test_a_damaged_payload_costs_the_samples_that_it_hits(folder: Path, make_sample: Make, same: Same) -> None:
    victim = shards(folder)[1]
    flip(folder / victim.payload.path, 0.2)
    problems = verify(folder).problems
    assert {p.path for p in problems} == {victim.payload.path}
    lost = {name for p in problems for name in p.sample_ids}
    assert lost <= {f"p{i}/0@0" for i in range(100, 200)}
    assert 0 < len(lost) <= 64
    done = repair(folder)
    assert done.samples == 300 - len(lost)
    assert done.lost == [f"{victim.payload.path}: {len(lost)} of 100 samples are lost ({done.lost[0].split('(')[1]}"]
    assert set(done.moved) == {f"lost/{p.replace('/', '-')}" for p in (victim.meta.path, victim.payload.path)}
    found = list(Store(folder).scan())
    assert [s.sample_id for s in found] == [f"p{i}/0@0" for i in range(300) if f"p{i}/0@0" not in lost]
    assert all(same(s, make_sample(int(s.prompt_id[1:]))) for s in found)
    assert verify(folder).problems == []
    again = repair(folder)
    assert (again.manifest, again.lost, again.moved) == (done.manifest, [], [])
    # What is lost is missing, no more: the writer takes it in again.
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(i) for i in range(300)])
    assert len(ids(folder)) == 300


@pytest.mark.parametrize("how", ["flipped", "missing", "cut", "empty"])
@pytest.mark.parametrize("kind", ["meta", "payload"])
def test_a_shard_whose_file_is_gone_is_named_and_the_others_stay(folder: Path, kind: str, how: str) -> None:
    victim = shards(folder)[0]
    path = folder / getattr(victim, kind).path
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        flip(path, 0.99)  # in the footer
    else:
        path.write_bytes(b"" if how == "empty" else data[: len(data) // 2])
    problems = verify(folder).problems
    assert {p.path for p in problems} == {f"{kind}/{path.name}"}
    assert how == "flipped" or sum(p.rows for p in problems) == 100
    done = repair(folder)
    assert how == "flipped" or len(done.lost) == 1
    assert set(ids(folder)) >= {f"p{i}/0@0" for i in range(100, 300)}
    assert len(ids(folder)) == done.samples
    assert verify(folder).problems == []


def test_a_damaged_newest_manifest_costs_nothing(folder: Path) -> None:
    for number in (3, 2):
        manifests.manifest_path(folder, number).write_bytes(b"{")
    assert len(ids(folder)) == 100
    problems = verify(folder).problems
    assert [p.path[-6:] for p in problems] == ["3.json", "2.json"]
    done = repair(folder)
    assert (done.manifest, done.samples, done.lost) == (4, 300, [])
    assert len([line for line in done.notes if "a damaged manifest named" in line]) == 2
    assert sorted(ids(folder)) == sorted(f"p{i}/0@0" for i in range(300))
    assert verify(folder).problems == []
    StoreWriter(folder, IDENTITY).close()


def test_without_a_manifest_nobody_knows(folder: Path) -> None:
    for number in manifests.numbers(folder):
        manifests.manifest_path(folder, number).write_bytes(b"")
    assert len(verify(folder).problems) == 3
    with pytest.raises(InputError, match="no manifest in it can be read"):
        repair(folder)
    with pytest.raises(MopdctlError, match="no sound manifest"):
        Store(folder)


def test_no_store_is_no_store(tmp_path: Path) -> None:
    for look in (verify, repair):
        with pytest.raises(InputError, match="no rollout store"):
            look(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_what_stands_twice_is_a_problem(folder: Path) -> None:
    one, *_ = shards(folder)
    manifest, digest = manifests.read(folder, 3)
    twice = manifests.Manifest(4, digest, manifest.identity, (*manifest.shards, one))
    manifests.publish(folder, twice, folder / "_staging")
    problems = verify(folder).problems
    assert len(problems) == 100
    assert f"sample p0/0@0 is also in {one.meta.path}" in problems[0].what


def test_metadata_that_points_elsewhere_is_a_problem(folder: Path, tmp_path: Path) -> None:
    # The payload of one shard under the name of another: digests, ids and checksums disagree.
    one, two, _ = shards(folder)
    shutil.copy(folder / two.payload.path, folder / one.payload.path)
    problems = verify(folder).problems
    assert {p.path for p in problems} == {one.payload.path}
    assert sum(p.rows for p in problems) == 100


# ------------------------------------------------------------------------------------------------------------ the log


def log_of(folder: Path, epoch: int, fence: dict[str, int], frames: range, *, done: bool = False) -> None:
    """Three samples, a token of each in every frame; sample 1 has a tool result after its second token."""
    with WalWriter(folder / "wal", writer="rank-0", level="process", epoch=epoch, fence=fence) as log:
        log.append([Open(s, f"w{s}", epoch, np.array([7, 8], np.int32), {"domain": "d"}) for s in range(3)])
        for t in frames:
            shift = np.array([0, 2 if t >= 2 else 0, 0], np.uint32)
            tokens = np.array([10 + t, 20 + t, 30 + t], np.int32)
            log.append([Tokens(t // 2, np.arange(3, dtype=np.uint32), t + shift, tokens, -tokens.astype(np.float32))])
            if t == 1:
                log.append([Call(1, 0, 2, "ls")])
                log.append([Tool(1, 0, 2, "ls", "a b", np.array([91, 92], np.int32))])
        if done:
            log.append([Finish(2, "stop")])


def test_a_torn_tail_is_a_note(folder: Path) -> None:
    log_of(folder, 1, {}, range(4))
    (segment,) = (folder / "wal").iterdir()
    segment.write_bytes(segment.read_bytes()[:-3])
    verdict = verify(folder)
    assert (verdict.problems, verdict.waiting) == ([], 3)
    assert "torn" in verdict.notes[0]
    done = repair(folder)
    assert (done.lost, done.moved) == ([], [])
    assert verify(folder).notes == []


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_log_that_is_damaged_in_the_middle_keeps_what_stands_before(folder: Path, epochs: int) -> None:
    log_of(folder, 1, {}, range(6), done=epochs == 1)
    if epochs == 2:
        lengths = recover(folder / "wal").lengths
        log_of(folder, 2, lengths, range(6, 9), done=True)
    truth = replay(folder / "wal").samples
    first = min((folder / "wal").iterdir())
    flip(first, 0.7)
    problems = verify(folder).problems
    assert [p.path for p in problems] == ["wal"]
    assert first.name in problems[0].what
    with pytest.raises(MopdctlError, match="repair"):
        recover(folder / "wal", writer="rank-0")
    done = repair(folder)
    assert len(done.lost) == 1
    assert "sampled again" in done.lost[0]
    assert all(place.startswith("lost/wal-") for place in done.moved)
    assert len(done.moved) == epochs
    saved = recover(folder / "wal", writer="rank-0")
    assert saved.notes == []
    for name, sample in saved.samples.items():
        whole, length = truth[name], len(sample.tokens)
        assert 0 < length < len(whole.tokens)
        assert sample.tokens.tolist() == whole.tokens.tolist()[:length]
        assert sample.sampled.tolist() == whole.sampled.tolist()[:length]
        count = int(sample.sampled.sum())
        assert sample.logprobs.tolist() == whole.logprobs.tolist()[:count]
        assert sample.policy_versions.tolist() == whole.policy_versions.tolist()[:count]
        assert sample.about == whole.about
        assert sample.prompt_ids.tolist() == [7, 8]
        assert sample.finish_reason is None
    assert [tool.result for tool in saved.samples["w1"].tools] == ["a b"]
    assert verify(folder).problems == []
    assert repair(folder).moved == []
