"""What is damaged is named, what is whole is saved, what is lost is said, and nothing is deleted."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest
from mopdctl.records import Sample
from mopdctl.runs import locked
from mopdctl.store import manifest as manifests
from mopdctl.store import parquet, rows, schema, wal
from mopdctl.store import verify as verifying
from mopdctl.store.compact import compact
from mopdctl.store.manifest import File, Shard
from mopdctl.store.repair import repair
from mopdctl.store.replay import recover, replay
from mopdctl.store.store import Store, StoreWriter, write_shard
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
    assert [p.path for p in problems] == [victim.payload.path]
    lost = set(problems[0].sample_ids)
    assert lost <= {f"p{i}/0@0" for i in range(100, 200)}
    assert 0 < len(lost) <= 64
    assert problems[0].sample_ids[0] in problems[0].line()
    assert problems[0].line().endswith(f"({len(lost)} samples)" if len(lost) > 1 else "(1 sample)")
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
    (problem,) = verify(folder).problems
    assert (problem.path, problem.rows) == (one.meta.path, 100)
    assert problem.what.startswith("p0/0@0, p1/0@0, ")
    assert problem.what.endswith(f": also in {one.meta.path}")


def publish(folder: Path, *changed: Shard) -> None:
    """A sound manifest over other shards, which no writer of ours would publish."""
    newest = Store(folder)
    number = newest.manifest.number + 1
    made = manifests.Manifest(number, newest.digest, newest.manifest.identity, changed)
    manifests.publish(folder, made, folder / "_staging")


def committed(folder: Path, path: Path) -> File:
    return File(str(path.relative_to(folder)), path.stat().st_size, file_digest(path))


def test_a_payload_under_the_name_of_another_is_a_problem(folder: Path) -> None:
    one, two, _ = shards(folder)
    shutil.copy(folder / two.payload.path, folder / one.payload.path)
    (problem,) = verify(folder).problems
    assert (problem.path, problem.rows) == (one.payload.path, 100)


def test_metadata_that_points_into_another_shard_is_a_problem(folder: Path) -> None:
    one, two, three = shards(folder)
    publish(folder, replace(one, payload=two.payload), two, three)
    (problem,) = verify(folder).problems
    assert (problem.path, problem.rows) == (one.meta.path, 100)
    assert problem.what.startswith(f"points away from {two.payload.path} for p0/0@0, ")


@pytest.mark.parametrize(("field", "found"), [("rows", "100 samples of"), ("tokens", "the manifest says 100 of ")])
def test_other_counts_than_the_manifest_says_are_a_problem(folder: Path, field: str, found: str) -> None:
    one, *others = shards(folder)
    publish(folder, replace(one, **{field: getattr(one, field) - 1}), *others)
    (problem,) = verify(folder).problems
    assert problem.path == one.meta.path
    assert found in problem.what


def test_payload_that_no_metadata_knows_is_a_problem(folder: Path, make_sample: Make) -> None:
    samples = [make_sample(i) for i in (300, 301)]
    shard, _ = write_shard(folder, folder / "_staging", samples)
    meta = folder / shard.meta.path
    meta.unlink()
    parquet.write(meta, [rows.meta_table(samples[:1], file=shard.payload.path, groups=[1])], schema.META_COLUMNS)
    tokens = len(samples[0].tokens)
    publish(folder, *shards(folder), replace(shard, rows=1, tokens=tokens, meta=committed(folder, meta)))
    (problem,) = verify(folder).problems
    assert problem.line() == f"{shard.payload.path}: 2 rows, the metadata knows of 1"


def test_metadata_that_does_not_fit_its_payload_is_a_problem(folder: Path, make_sample: Make) -> None:
    # Right digests, right checksums of what is there: only the two tables disagree.
    good = make_sample(300)
    shard, _ = write_shard(folder, folder / "_staging", [good])
    table = rows.meta_table([replace(good, prompt_length=good.prompt_length - 1)], file=shard.payload.path, groups=[1])
    field = schema.META.field("response_length")
    shorter = pa.array([table["response_length"][0].as_py() - 1], field.type)
    table = table.set_column(schema.META.get_field_index(field.name), field, shorter)
    meta = folder / shard.meta.path
    meta.unlink()
    parquet.write(meta, [table], schema.META_COLUMNS)
    publish(folder, *shards(folder), replace(shard, tokens=len(good.tokens) - 1, meta=committed(folder, meta)))
    (problem,) = verify(folder).problems
    assert problem.line() == f"{shard.payload.path}: payload of p300/0@0 is not what its metadata says (1 sample)"


def test_a_file_that_the_device_does_not_give_is_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = folder / shards(folder)[0].meta.path
    real = file_digest

    def digest(path: Path) -> str:
        if path == victim:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(verifying, "file_digest", digest)
    (problem,) = verify(folder).problems
    assert problem.line() == f"meta/{victim.name}: cannot be read (Input/output error) (100 samples)"
    assert repair(folder).samples == 200


# ----------------------------------------------------------------------------------------------------------- manifests


def test_a_damaged_older_manifest_goes_and_nothing_else_changes(folder: Path) -> None:
    before = files(folder)
    manifests.manifest_path(folder, 2).write_bytes(b"")
    (problem,) = verify(folder).problems
    assert problem.path == "manifest/00000000000000000002.json"
    assert Store(folder).warnings == []
    done = repair(folder)
    assert (done.manifest, done.samples, done.lost) == (3, 300, [])
    assert done.moved == ["lost/manifest-00000000000000000002.json"]
    assert verify(folder).problems == []
    after = files(folder)
    assert {name: after[name] for name in before if name in after} == {
        name: data for name, data in before.items() if not name.endswith("2.json")
    }


def test_a_manifest_that_the_next_one_does_not_know_goes(folder: Path) -> None:
    stranger = manifests.Manifest(2, manifests.read(folder, 1)[1], IDENTITY, ())
    manifests.manifest_path(folder, 2).write_bytes(manifests.encode(stranger)[0])
    (problem,) = verify(folder).problems
    assert problem.line() == "manifest/00000000000000000003.json: does not follow the manifest before it"
    done = repair(folder)
    assert (done.manifest, done.samples, done.moved) == (3, 300, ["lost/manifest-00000000000000000002.json"])
    assert verify(folder).problems == []


def test_a_damaged_manifest_and_its_payload_cost_what_is_hit(folder: Path, make_sample: Make, same: Same) -> None:
    victim = shards(folder)[2]
    manifests.manifest_path(folder, 3).write_bytes(b"{")
    path = folder / victim.payload.path
    path.write_bytes(path.read_bytes()[:-4] + b"xxxx")
    assert repair_of_newest(folder, victim) == 200
    # The same with its last row group alone: the first one comes back.
    shutil.rmtree(folder)
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(0)])
        writer.commit([make_sample(i) for i in range(1, 101)])
    victim = shards(folder)[1]
    manifests.manifest_path(folder, 2).write_bytes(b"{")
    flip(folder / victim.payload.path, 0.75)
    assert 1 + 64 <= repair_of_newest(folder, victim) < 101
    assert all(same(s, make_sample(int(s.prompt_id[1:]))) for s in Store(folder).scan())


def repair_of_newest(folder: Path, victim: Shard) -> int:
    """Repairs a store whose newest manifest and whose newest payload are damaged; returns the samples that it has."""
    done = repair(folder)
    assert [line.partition(": ")[0] for line in done.lost] == [victim.payload.path]
    assert "of 100 samples are lost (" in done.lost[0]
    assert len(done.moved) == 3
    assert (verify(folder).problems, verify(folder).notes) == ([], [])
    assert len(ids(folder)) == done.samples
    return done.samples


@pytest.mark.parametrize("kind", ["meta", "payload"])
def test_a_damaged_manifest_of_which_only_half_a_pair_is_left_is_said(folder: Path, kind: str) -> None:
    victim = shards(folder)[2]
    (folder / getattr(victim, kind).path).unlink()
    manifests.manifest_path(folder, 3).write_bytes(b"{")
    other = victim.payload.path if kind == "meta" else victim.meta.path
    notes = verify(folder).notes
    assert notes == [f"{other}: no sound manifest names it; `mopdctl store repair` finds out whether a damaged one did"]
    done = repair(folder)
    assert done.lost == [f"{other}: its other half is missing; samples of a damaged manifest may be lost"]
    assert (done.samples, len(done.moved)) == (200, 2)
    assert (verify(folder).problems, verify(folder).notes) == ([], [])


def test_metadata_that_a_damaged_manifest_named_and_that_cannot_be_read_is_said(folder: Path) -> None:
    victim = shards(folder)[2]
    (folder / victim.meta.path).write_bytes(b"PAR1")
    manifests.manifest_path(folder, 3).write_bytes(b"{")
    done = repair(folder)
    assert done.samples == 200
    assert done.lost[0].startswith(f"{victim.meta.path}: cannot be read (")
    assert len(done.lost) == 2
    assert verify(folder).problems == []


def test_a_damaged_compaction_brings_nothing_twice(folder: Path, make_sample: Make) -> None:
    before = ids(folder)
    with StoreWriter(folder, IDENTITY) as writer:
        compact(writer)
    manifests.manifest_path(folder, 4).write_bytes(b"{")
    assert repair(folder).lost == []
    assert ids(folder) == before
    # With a commit on top of the compaction, and both manifests damaged.
    with StoreWriter(folder, IDENTITY) as writer:
        compact(writer)
        writer.commit([make_sample(i) for i in range(300, 310)])
    newest = manifests.numbers(folder)[-1]
    for number in (newest, newest - 1):
        manifests.manifest_path(folder, number).write_bytes(b"{")
    done = repair(folder)
    assert (done.samples, done.lost) == (310, [])
    assert sorted(ids(folder)) == sorted([*before, *(f"p{i}/0@0" for i in range(300, 310))])
    assert verify(folder).problems == []


def test_a_repair_needs_no_empty_folder(folder: Path) -> None:
    for name in ("_staging", "wal"):
        (folder / name).rmdir()
    assert verify(folder).problems == []
    done = repair(folder)
    assert (done.manifest, done.lost, done.moved) == (3, [], [])


def test_a_shard_that_is_lost_whole_is_gone_from_the_manifest(folder: Path, make_sample: Make) -> None:
    shutil.rmtree(folder / "meta")
    done = repair(folder)
    assert (done.samples, len(done.lost), len(done.moved)) == (0, 3, 3)
    assert verify(folder).problems == []
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(i) for i in range(300)])
    assert len(ids(folder)) == 300


def test_a_store_that_is_being_written_is_not_repaired(folder: Path) -> None:
    with locked(folder), pytest.raises(InputError, match="another process is writing here"):
        repair(folder)


def test_a_store_of_a_newer_layout_is_neither_verified_nor_repaired(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "NAME", "mopdctl.store/3")
        data, _ = manifests.encode(manifests.Manifest(4, None, IDENTITY, ()))
    manifests.manifest_path(folder, 4).write_bytes(data)
    before = files(folder)
    for look in (verify, repair):
        with pytest.raises(InputError, match=r"layout mopdctl.store/3, this mopdctl reads mopdctl.store/2; upgrade"):
            look(folder)
    assert files(folder) == before


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
    assert [p.path for p in problems] == [f"wal/{first.name}"]
    assert problems[0].what.startswith("damaged at offset ")
    assert "`" not in problems[0].what  # what to do stands once, at the end
    with pytest.raises(MopdctlError, match="repair"):
        recover(folder / "wal", writer="rank-0")
    done = repair(folder)
    assert len(done.lost) == 1
    assert done.lost[0].startswith(f"wal/{first.name}: damaged at offset ")
    assert done.lost[0].endswith("; what was logged after that is lost and will be sampled again")
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


def one_token(folder: Path, writer: str, token: int) -> str:
    with WalWriter(folder / "wal", writer=writer, level="process", epoch=1, fence={}) as log:
        log.append([Open(0, "w", 1, np.array([7], np.int32), {})])
        for position in range(3):
            at = [np.array([n], np.uint32) for n in (0, position)]
            log.append([Tokens(0, at[0], at[1], np.array([token], np.int32), np.zeros(1, np.float32))])
        assert log.segment
        return log.segment


def test_each_writer_has_a_log_of_its_own(folder: Path) -> None:
    # After a change of the world size another rank samples it, and nobody reads both.
    one_token(folder, "rank-0", 5), one_token(folder, "rank-1", 6)
    verdict = verify(folder)
    assert (verdict.problems, verdict.waiting) == ([], 1)
    assert (repair(folder).lost, repair(folder).moved) == ([], [])


def test_every_damaged_log_is_named(folder: Path) -> None:
    names = [one_token(folder, writer, 5) for writer in ("rank-0", "rank-1")]
    for name in names:
        flip(folder / "wal" / name, 0.5)
    assert [p.path for p in verify(folder).problems] == [f"wal/{name}" for name in names]
    done = repair(folder)
    assert [line.partition(": ")[0] for line in done.lost] == [f"wal/{name}" for name in names]
    assert done.moved == [f"lost/wal-{name}" for name in names]
    assert verify(folder).problems == []


def test_what_was_put_away_before_stays(folder: Path) -> None:
    # A log that was removed at the end of a run begins with the names of the last one.
    kept = []
    for token in (5, 6):
        name = one_token(folder, "rank-0", token)
        flip(folder / "wal" / name, 0.5)
        kept.append((folder / "wal" / name).read_bytes())
        assert len(repair(folder).moved) == 1
        for path in (folder / "wal").iterdir():
            path.unlink()
    assert sorted(path.read_bytes() for path in (folder / "lost").iterdir()) == sorted(kept)


def test_a_log_of_a_newer_version_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(wal, "VERSION", 2)
        one_token(folder, "rank-0", 5)
    before = files(folder)
    for look in (verify, repair):
        with pytest.raises(InputError, match="a token log of version 2, this mopdctl reads 1; upgrade it"):
            look(folder)
    assert files(folder) == before


def crash(*_: Any) -> None:
    raise RuntimeError("the machine is gone")


def test_a_repair_that_was_cut_off_is_taken_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_of(folder, 1, {}, range(6))
    flip(next((folder / "wal").iterdir()), 0.7)
    flip(folder / shards(folder)[1].payload.path, 0.2)
    manifests.manifest_path(folder, 1).write_bytes(b"{")
    with monkeypatch.context() as patch:
        patch.setattr("mopdctl.store.repair._put_away", crash)
        with pytest.raises(RuntimeError):
            repair(folder)
    saved = ids(folder)
    done = repair(folder)
    assert ids(folder) == saved
    assert done.samples == len(saved)
    assert verify(folder).problems == []
