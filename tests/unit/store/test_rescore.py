"""Verdicts are replaced in one commit: payload stays, nothing else in `meta` changes, old or new values stand."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.errors import MopdctlError
from mopdctl.files import file_digest
from mopdctl.records import Sample
from mopdctl.store import disk, parquet, rows, schema
from mopdctl.store import manifest as manifests
from mopdctl.store.compact import compact
from mopdctl.store.manifest import File
from mopdctl.store.repair import repair
from mopdctl.store.store import Store, StoreWriter
from mopdctl.store.summary import summarize
from mopdctl.store.verify import verify

Make = Callable[..., Sample]
Same = Callable[[Sample, Sample], bool]
IDENTITY = {"tokenizer": "t"}


def ok(reward: float, *, version: int = 1, label: str | None = None) -> dict[str, Any]:
    return {"reward": reward, "verdict": "ok", "verifier": f"exact_match/{version}", "verdict_label": label}


TIMEOUT = {"reward": None, "verdict": "timeout", "verifier": "code/1", "verdict_label": None}


@pytest.fixture
def folder(tmp_path: Path, make_sample: Make) -> Path:
    """Three commits of 10 samples; of every third, somebody said something."""
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        for start in (0, 10, 20):
            writer.commit([make_sample(i, **(ok(0.0) if i % 3 == 0 else {})) for i in range(start, start + 10)])
    return tmp_path / "s"


def rescore(folder: Path, verdicts: dict[int, dict[str, Any]]) -> int:
    with StoreWriter(folder, IDENTITY) as writer:
        return writer.rescore(verdicts)


def verdicts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = Store(folder).meta_table(schema.VERDICT).to_pylist()
    return found


def payload_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "payload").iterdir()}


def test_only_the_verdicts_of_the_rows_named_change(folder: Path, make_sample: Make, same: Same) -> None:
    before, payload, old = verdicts(folder), payload_bytes(folder), Store(folder).manifest
    others = [name for name in schema.META.names if name not in schema.VERDICT]
    rest = Store(folder).meta_table(others)
    changes = {0: ok(1.0, version=2, label="correct"), 4: TIMEOUT, 29: ok(0.25)}
    assert rescore(folder, changes) == 2
    assert verdicts(folder) == [changes.get(row, verdict) for row, verdict in enumerate(before)]
    assert Store(folder).meta_table(others) == rest
    assert payload_bytes(folder) == payload
    new = Store(folder).manifest
    assert new.number == old.number + 1
    assert [a.meta == b.meta for a, b in zip(old.shards, new.shards, strict=True)] == [False, True, False]
    assert [a.payload == b.payload for a, b in zip(old.shards, new.shards, strict=True)] == [True] * 3
    for row, sample in enumerate(Store(folder).scan()):
        assert same(sample, replace(make_sample(row), **changes.get(row, before[row])))
    assert verify(folder).problems == []


def test_rescoring_nothing_makes_no_commit(folder: Path) -> None:
    number = Store(folder).manifest.number
    assert rescore(folder, {}) == 0
    assert Store(folder).manifest.number == number


def test_a_reader_that_opened_before_reads_what_it_opened(folder: Path) -> None:
    reader, before = Store(folder), verdicts(folder)
    rescore(folder, {row: ok(1.0) for row in range(30)})
    assert reader.meta_table(schema.VERDICT).to_pylist() == before
    assert len(list(reader.scan())) == 30


def test_a_store_that_was_rescored_can_be_added_to_and_compacted(folder: Path, make_sample: Make) -> None:
    rescore(folder, {3: ok(0.5), 13: TIMEOUT})
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(30, **ok(1.0))])
        before = verdicts(folder)
        assert compact(writer) == (4, 1)
    assert verdicts(folder) == before
    assert before[13] == TIMEOUT
    assert verify(folder).problems == []


@given(
    st.one_of(st.none(), st.floats(width=32)),
    st.sampled_from([None, "ok", "parse_error", "timeout"]),
    st.sampled_from([None, "exact_match/1"]),
    st.sampled_from([None, "correct"]),
)
@settings(deadline=None)
def test_a_reward_lies_in_its_range_and_stands_beside_ok_alone(
    make_sample: Make, reward: float | None, verdict: str | None, verifier: str | None, label: str | None
) -> None:
    sound = (
        (reward is None or 0 <= reward <= 1)
        and (reward is None) == (verdict != "ok")
        and (verdict is None) == (verifier is None)
        and (label is None or verdict is not None)
    )
    sample = make_sample(1, reward=reward, verdict=verdict, verifier=verifier, verdict_label=label)
    if sound:
        rows.check(sample)
    else:
        with pytest.raises(MopdctlError, match=r"sample p1/0@0: .*(reward|verdict)"):
            rows.check(sample)


def test_a_reward_without_a_verdict_is_neither_committed_nor_rescored_and_found_in_a_store(
    folder: Path, make_sample: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = ok(0.5) | {"verdict": "timeout"}
    with pytest.raises(MopdctlError, match="row 5: a reward beside the verdict timeout"):
        rescore(folder, {5: bad})
    with StoreWriter(folder, IDENTITY) as writer, pytest.raises(MopdctlError, match="a reward beside the verdict"):
        writer.commit([make_sample(99, **bad)])
    with monkeypatch.context() as patch:
        patch.setattr(rows, "verdict_problem", lambda row: None)
        rescore(folder, {5: bad, 6: ok(0.5) | {"reward": 1.5}})
    found = [(problem.what, problem.sample_ids, problem.rows) for problem in verify(folder).problems]
    then = "`mopdctl rollout --reverify` scores them again"
    assert found == [
        (f"a reward beside the verdict timeout for p5/0@0; {then}", ("p5/0@0",), 0),
        (f"a reward that is not between 0 and 1 for p6/0@0; {then}", ("p6/0@0",), 0),
    ]


def test_two_versions_of_a_verifier_in_one_store_are_said(folder: Path) -> None:
    assert summarize(Store(folder))["warnings"] == []
    rescore(folder, {0: ok(1.0, version=2), 1: TIMEOUT})
    found = summarize(Store(folder))
    assert found["warnings"] == [
        "scored by exact_match/1 and exact_match/2, which may differ; `mopdctl rollout --reverify` scores all by one"
    ]
    assert found["verifiers"] == {"code/1": 1, "exact_match/1": 9, "exact_match/2": 1}
    assert found["verdicts"] == {"ok": 10, "timeout": 1, "unjudged": 19}
    math = next(group for group in found["groups"] if group["domain"] == "math")
    assert (math["samples"], math["reward"], math["rewarded_pct"]) == (15, 0.2, 33.3)
    assert math["verdicts"] == {"ok": 5, "unjudged": 10}


# ------------------------------------------------------------------------------------------------------- older layouts


def as_layout_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns a store into what layout 1 wrote: no verdict beside the reward, which nobody gave."""
    old = [column for column in schema.META_COLUMNS if column.name not in schema.SINCE_2]
    manifest = Store(folder).manifest
    shards = []
    for shard in manifest.shards:
        path = folder / shard.meta.path
        table = pq.read_table(path).select([column.name for column in old])
        path.unlink()
        parquet.write(path, [table], old)
        shards.append(replace(shard, meta=File(shard.meta.path, path.stat().st_size, file_digest(path))))
    shutil.rmtree(folder / "manifest")
    (folder / "manifest").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(schema, "NAME", "mopdctl.store/1")
        manifests.publish(folder, replace(manifest, parent=None, shards=tuple(shards)), folder)


def test_a_store_of_layout_1_is_read_and_rescored(
    tmp_path: Path, make_sample: Make, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(i) for i in range(5)])
        writer.commit([make_sample(i) for i in range(5, 8)])
    as_layout_1(folder, monkeypatch)
    assert verify(folder).problems == []
    assert all(same(sample, make_sample(i)) for i, sample in enumerate(Store(folder).scan()))
    assert Store(folder).meta(["verdict"], encoded=True)["verdict"].to_list() == [None] * 8
    assert summarize(Store(folder))["verdicts"] == {"unjudged": 8}
    rescore(folder, {2: ok(1.0)})
    assert [row["reward"] for row in verdicts(folder)] == [None, None, 1.0, *[None] * 5]
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(8, **TIMEOUT)])
        compact(writer)
    assert [row["verdict"] for row in verdicts(folder)] == [None, None, "ok", *[None] * 5, "timeout"]
    assert verify(folder).problems == []


def test_metadata_that_lacks_some_of_the_later_columns_is_refused(tmp_path: Path, make_sample: Make) -> None:
    table = rows.meta_table([make_sample(1)], file="payload/x", groups=[1])
    pq.write_table(table.drop_columns(["verifier"]), tmp_path / "x.parquet")
    with pytest.raises(MopdctlError, match="its columns are not those of this store's schema"):
        parquet.read_table(str(tmp_path / "x.parquet"), schema=schema.META, later=schema.SINCE_2)


# ---------------------------------------------------------------------------------------------------- what may go wrong


def test_a_damaged_rescore_leaves_the_scores_of_before(folder: Path) -> None:
    before = verdicts(folder)
    rescore(folder, {row: ok(1.0) for row in range(30)})
    manifests.manifest_path(folder, 4).write_bytes(b"{")
    done = repair(folder)
    assert (done.samples, done.lost, len(done.moved)) == (30, [], 1)
    assert verdicts(folder) == before
    assert verify(folder).problems == []


def test_samples_of_damaged_manifests_come_back_with_their_newest_scores(folder: Path, make_sample: Make) -> None:
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(i) for i in range(30, 35)])
        writer.rescore({row: ok(1.0) for row in range(30, 35)})
        meta, payload = writer.store.manifest.shards[3].meta.path, writer.store.manifest.shards[3].payload.path
    later = (folder / meta).stat().st_mtime + 1
    os.utime(folder / meta, (later, later))
    for number in (4, 5):
        manifests.manifest_path(folder, number).write_bytes(b"{")
    done = repair(folder)
    assert (done.samples, done.lost) == (35, [])
    assert [row["reward"] for row in verdicts(folder)[30:]] == [1.0] * 5
    assert Store(folder).manifest.shards[3].payload.path == payload
    assert verify(folder).problems == []


def test_rescored_metadata_without_its_payload_is_said_once(folder: Path, make_sample: Make) -> None:
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(30)])
        writer.rescore({30: ok(1.0)})
        shard = writer.store.manifest.shards[3]
    for number in (4, 5):
        manifests.manifest_path(folder, number).write_bytes(b"{")
    (folder / shard.payload.path).unlink()
    done = repair(folder)
    assert done.samples == 30
    assert len(done.lost) == 1
    assert "its other half is missing; samples of a damaged manifest may be lost" in done.lost[0]


class PlugPulledError(Exception):
    """Stands for the end of the process."""


@contextmanager
def deadly(step: int, *, after: bool) -> Iterator[None]:
    """Ends at one of the steps by which files become durable."""
    patch = pytest.MonkeyPatch()
    count = [0]
    for name in ("make_folder", "write_file", "sync_file", "rename", "publish", "remove", "sync_folder"):
        before = getattr(disk, name)

        def wrapped(*args: Any, real: Any = before, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == step and not after:
                raise PlugPulledError
            found = real(*args, **kwargs)
            if count[0] == step:
                raise PlugPulledError
            return found

        patch.setattr(disk, name, wrapped)
    with suppress(PlugPulledError):
        yield
    patch.undo()


@pytest.mark.parametrize("after", [False, True])
def test_whatever_step_it_dies_at_old_or_new_scores_stand(folder: Path, tmp_path: Path, after: bool) -> None:
    before, changes = verdicts(folder), {row: ok(1.0) for row in range(5, 25)}
    new = [changes.get(row, verdict) for row, verdict in enumerate(before)]
    step, seen = 0, []
    while True:
        step += 1
        place = tmp_path / f"{step}"
        shutil.copytree(folder, place)
        died = True
        with StoreWriter(place, IDENTITY) as writer, deadly(step, after=after):
            writer.rescore(changes)
            died = False
        seen.append(verdicts(place))
        assert verify(place).problems == []
        assert rescore(place, changes) == 3
        assert verdicts(place) == new
        if not died:
            break
    assert step > 10
    assert all(found in (before, new) for found in seen)
    assert seen[0] == before
    assert seen[-1] == new
    assert seen == sorted(seen, key=lambda found: found == new)  # there is one step before which nothing, then all


KILL = """
import os, sys
from pathlib import Path
from mopdctl.store import disk, store
step, count = int(sys.argv[2]), 0
def arm(name):
    real = getattr(disk, name)
    def wrapped(*args, **kwargs):
        global count
        found = real(*args, **kwargs)
        count += 1
        if count == step: os._exit(9)
        return found
    setattr(disk, name, wrapped)
with store.StoreWriter(Path(sys.argv[1]), {"tokenizer": "t"}) as writer:
    for name in ("make_folder", "write_file", "sync_file", "rename", "publish", "remove", "sync_folder"):
        arm(name)
    ok = {"reward": 1.0, "verdict": "ok", "verifier": "exact_match/1", "verdict_label": None}
    writer.rescore(dict.fromkeys(range(5, 25), ok))
"""


@pytest.mark.slow
def test_a_process_that_is_gone_at_any_step_leaves_old_or_new_scores(folder: Path, tmp_path: Path) -> None:
    before = verdicts(folder)
    new = [ok(1.0) if 5 <= row < 25 else verdict for row, verdict in enumerate(before)]
    for step in range(1, 100):
        place = tmp_path / f"{step}"
        shutil.copytree(folder, place)
        code = subprocess.run([sys.executable, "-c", KILL, place, str(step)]).returncode
        assert verdicts(place) in (before, new)
        assert verify(place).problems == []
        assert rescore(place, {row: ok(1.0) for row in range(5, 25)}) == 3
        assert not list((place / "_staging").iterdir())
        if code == 0:
            break
        assert code == 9
    assert step > 10
