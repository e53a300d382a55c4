"""What is committed comes back to the bit; what is not committed is not there; a store has one writer and one maker."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Sample
from mopdctl.store import manifest as manifests
from mopdctl.store import parquet, rows, schema
from mopdctl.store.compact import compact
from mopdctl.store.store import GRACE_S, Store, StoreWriter, cut_groups

Make = Callable[..., Sample]
Same = Callable[[Sample, Sample], bool]
IDENTITY = {"tokenizer": "t", "command": "test", "seed": 0}


@pytest.fixture
def full(make_sample: Make) -> Sample:
    """A sample with everything that a sample may have, and with tokens that a tool wrote."""
    rng = np.random.default_rng(0)
    mask = np.array([False] * 3 + [True, True, False, True])
    return make_sample(
        0,
        tokens=np.arange(7, dtype=np.int32) + 2**30,
        prompt_length=3,
        loss_mask=mask,
        behavior_logprobs=np.array([-1, -2, -3], np.float32),
        teacher_logprobs=np.array([-0.5, -0.25, 0], np.float32),
        teacher_topk_ids=rng.integers(0, 99, (3, 5)).astype(np.int32),
        teacher_topk_logprobs=rng.random((3, 5)).astype(np.float32),
        teacher_hidden=rng.integers(0, 2**16, (3, 8)).astype(np.uint16),
        reward=0.5,
        verdict="ok",
        verifier="exact_match/1",
        verdict_label="correct",
        rewards=np.array([0.25, 0.75], np.float32),
        sample_id="Prüfung/雪\u2028/0@0",
    )


def test_what_is_committed_comes_back_to_the_bit(tmp_path: Path, make_sample: Make, same: Same, full: Sample) -> None:
    samples = [make_sample(i, scored=i % 3 > 0) for i in range(1, 150)]
    samples.insert(70, full)
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit(samples[:100])
        writer.commit(samples[100:])
    store = Store(tmp_path / "s")
    assert all(same(a, b) for a, b in zip(store.scan(), samples, strict=True))
    order = [149, 0, 70, 70, 3]
    assert all(same(a, samples[i]) for a, i in zip(store.read(order), order, strict=True))
    assert store.manifest.rows == 150
    assert store.manifest.tokens == sum(len(s.tokens) for s in samples)
    meta = store.meta()
    assert meta["sample_id"].to_list() == [s.sample_id for s in samples]
    assert meta["loss_tokens"].to_list() == [int(s.loss_mask.sum()) for s in samples]
    assert meta["response_length"].to_list() == [len(s.response_ids) for s in samples]


def test_a_sample_is_committed_once(tmp_path: Path, make_sample: Make) -> None:
    one, two, three = (make_sample(i) for i in range(3))
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([one, two])
        writer.commit([two, three])
        assert [s.sample_id for s in writer.store.scan()] == [s.sample_id for s in (one, two, three)]
        with pytest.raises(MopdctlError, match=r"sample p1/0@0 is there with another payload"):
            writer.commit([replace(two, behavior_logprobs=two.behavior_logprobs * 2)])
        with pytest.raises(MopdctlError, match="holds a sample twice"):
            writer.commit([make_sample(9), make_sample(9)])
        before = writer.store.manifest
        writer.commit([one])
        assert writer.store.manifest == before
    assert Store(tmp_path / "s").manifest.rows == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behavior_logprobs": np.array([np.nan], np.float32)}, "behavior_logprobs is nan at 0"),
        ({"teacher_logprobs": np.array([-np.inf], np.float32)}, "teacher_logprobs is -inf at 0"),
        ({"teacher_logprobs": np.array([-1, -1], np.float32)}, "2 teacher_logprobs for 1 loss-active tokens"),
        ({"loss_mask": np.array([True])}, "1 mask entries for"),
        ({"prompt_length": 0}, "prompt of 0 of"),
        ({"tokens": np.array([1, 2], np.int64)}, "tokens is int64 where int32 is kept"),
    ],
)
def test_a_sample_that_does_not_hold_together_is_refused(
    tmp_path: Path, make_sample: Make, changes: dict[str, Any], message: str
) -> None:
    sample = make_sample(5, length=1, **changes)
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        with pytest.raises(MopdctlError, match=r"sample p5/0@0") as caught:
            writer.commit([make_sample(1), sample])
        assert message in str(caught.value)
        assert writer.store.manifest.rows == 0


def test_a_loss_mask_over_the_prompt_is_refused(make_sample: Make) -> None:
    sample = make_sample(5, length=1)
    mask = np.zeros(len(sample.tokens), bool)
    mask[0] = True
    with pytest.raises(MopdctlError, match="covers tokens of the prompt"):
        rows.check(replace(sample, loss_mask=mask))


# -------------------------------------------------------------------------------------------------- files and footers


def test_row_groups_end_at_rows_or_tokens() -> None:
    limit = schema.PAYLOAD_GROUP_TOKENS
    assert list(cut_groups([1] * 130)) == [64, 64, 2]
    assert list(cut_groups([limit // 2, limit // 2, 1, limit + 5, 1])) == [2, 1, 1, 1]
    assert list(cut_groups([])) == []


def test_the_footer_says_what_was_asked_for(tmp_path: Path, make_sample: Make) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([make_sample(i) for i in range(100)])
        (shard,) = writer.store.manifest.shards
    footer = pq.read_metadata(tmp_path / "s" / shard.payload.path)
    assert [footer.row_group(i).num_rows for i in range(2)] == [64, 36]
    chunks = {c.path_in_schema: c for c in (footer.row_group(0).column(i) for i in range(footer.num_columns))}
    tokens, logprobs = chunks["tokens.list.element"], chunks["behavior_logprobs.list.element"]
    assert (tokens.compression, "RLE_DICTIONARY" in tokens.encodings) == ("ZSTD", True)
    assert (logprobs.compression, "BYTE_STREAM_SPLIT" in logprobs.encodings) == ("ZSTD", True)
    assert not logprobs.has_dictionary_page


@pytest.mark.parametrize("leaf", ["tokens", "tokens.list.item"])
def test_an_option_under_another_name_than_the_leaf_fails_the_write(
    tmp_path: Path, make_sample: Make, monkeypatch: pytest.MonkeyPatch, leaf: str
) -> None:
    # pyarrow takes such an option without a word and writes something else.
    monkeypatch.setattr(schema.Column, "leaf", property(lambda c: leaf if c.name == "tokens" else LEAF(c)))
    table = rows.payload_table([make_sample(1)])
    with pytest.raises(MopdctlError, match="first row group"):
        parquet.write(tmp_path / "x.parquet", [table], schema.PAYLOAD_COLUMNS)


LEAF = schema.Column.leaf.fget  # type: ignore[attr-defined]


def test_the_schema_in_the_file_is_the_schema_asked_for(tmp_path: Path, make_sample: Make) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([make_sample(1, scored=False)])  # a column of nulls alone keeps its type
        (shard,) = writer.store.manifest.shards
    assert pq.read_schema(tmp_path / "s" / shard.payload.path).remove_metadata() == schema.PAYLOAD
    assert pq.read_schema(tmp_path / "s" / shard.meta.path).remove_metadata() == schema.META


# -------------------------------------------------------------------------------------------------- who may read, write


def test_metadata_needs_no_payload_byte(tmp_path: Path, make_sample: Make) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([make_sample(i) for i in range(20)])
        (shard,) = writer.store.manifest.shards
    (tmp_path / "s" / shard.payload.path).unlink()
    assert len(Store(tmp_path / "s").meta()) == 20


def test_a_store_has_one_writer(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from mopdctl.store.store import StoreWriter\n"
        "StoreWriter(Path(sys.argv[1]), {'tokenizer': 't', 'command': 'test', 'seed': 0})"
    )
    with StoreWriter(tmp_path / "s", IDENTITY):
        done = subprocess.run([sys.executable, "-c", script, tmp_path / "s"], capture_output=True, text=True)
        assert "InputError" in done.stderr
        assert "another process is writing here" in done.stderr
    assert subprocess.run([sys.executable, "-c", script, tmp_path / "s"]).returncode == 0


def test_a_store_has_one_maker(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "s", IDENTITY).close()
    with pytest.raises(InputError, match=r"another configuration \(seed was \d, now \d\)"):
        StoreWriter(tmp_path / "s", IDENTITY | {"seed": 1})
    with pytest.raises(InputError, match=r"another tokenizer \(t, the run's is u\); use another name"):
        StoreWriter(tmp_path / "s", IDENTITY | {"tokenizer": "u"})
    StoreWriter(tmp_path / "s", IDENTITY).close()


def test_a_store_of_a_newer_layout_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "NAME", "mopdctl.store/3")
        (tmp_path / "s" / "manifest").mkdir(parents=True)
        data, _ = manifests.encode(manifests.Manifest(0, None, IDENTITY, ()))
        manifests.manifest_path(tmp_path / "s", 0).write_bytes(data)
    for use in (Store, lambda folder: StoreWriter(folder, IDENTITY)):
        with pytest.raises(InputError, match=r"layout mopdctl.store/3, this mopdctl reads mopdctl.store/2; upgrade"):
            use(tmp_path / "s")


def test_no_store_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rollout store"):
        Store(tmp_path / "nothing")


def test_a_folder_that_must_not_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    folder.mkdir()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"must not be written \(Permission denied\); check its permissions"):
        StoreWriter(folder, IDENTITY)


@pytest.mark.parametrize("limit", [200, 2_000, 6_000])
def test_a_full_disk_loses_nothing_that_is_committed(tmp_path: Path, make_sample: Make, same: Same, limit: int) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([make_sample(1)])
    script = f"""
import resource, sys
import numpy as np
from pathlib import Path
from dataclasses import replace
from mopdctl.errors import InputError
from mopdctl.store.store import StoreWriter
with StoreWriter(Path(sys.argv[1]), {IDENTITY!r}) as writer:
    (one,) = writer.store.scan()
    more = [replace(one, sample_id=f"n{{i}}", tokens=np.arange(5000, dtype=np.int32), loss_mask=np.arange(5000) > 3,
            behavior_logprobs=np.random.default_rng(i).random(4996).astype(np.float32), prompt_length=4,
            teacher_logprobs=None) for i in range(3)]
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
    try:
        writer.commit(more)
    except InputError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.commit(more)
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "s"], capture_output=True, text=True)
    assert "the disk is full or a size limit is reached; make room" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    found = list(Store(tmp_path / "s").scan())
    assert [s.sample_id for s in found] == ["p1/0@0", "n0", "n1", "n2"]
    assert same(found[0], make_sample(1))
    assert list((tmp_path / "s" / "_staging").iterdir()) == []


# ------------------------------------------------------------------------------------------------------ commit protocol


def test_manifests_are_a_chain_and_the_last_three_stay(tmp_path: Path, make_sample: Make) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        for i in range(6):
            writer.commit([make_sample(i)])
    assert manifests.numbers(tmp_path / "s") == [4, 5, 6]
    read = [manifests.read(tmp_path / "s", n) for n in (4, 5, 6)]
    assert [m.rows for m, _ in read] == [4, 5, 6]
    assert [m.parent for m, _ in read[1:]] == [digest for _, digest in read[:2]]


def test_a_number_is_given_once(tmp_path: Path, make_sample: Make) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        other = manifests.Manifest(1, "someone else", IDENTITY, ())
        manifests.manifest_path(tmp_path / "s", 1).write_bytes(manifests.encode(other)[0])
        with pytest.raises(MopdctlError, match="written by someone else"):
            writer.commit([make_sample(1)])
    assert Store(tmp_path / "s").manifest == other


def test_an_ambiguous_publish_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "manifest").mkdir()
    (tmp_path / "_staging").mkdir()
    manifest = manifests.Manifest(0, None, IDENTITY, ())
    one = manifests.publish(tmp_path, manifest, tmp_path / "_staging")
    assert manifests.publish(tmp_path, manifest, tmp_path / "_staging") == one


@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "foreign"])
def test_readers_fall_back_and_writers_stop_at_a_damaged_manifest(
    tmp_path: Path, make_sample: Make, damage: str
) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([make_sample(1)])
        writer.commit([make_sample(2)])
    path = manifests.manifest_path(tmp_path / "s", 2)
    data = path.read_bytes()
    broken = {
        "empty": b"",
        "cut": data[:-20],
        "flip": data.replace(b'"rows": 1', b'"rows": 3', 1),
        "foreign": json.dumps({"digest": "x"}).encode(),
    }
    path.write_bytes(broken[damage])
    store = Store(tmp_path / "s")
    assert store.manifest.number == 1
    assert len(store.warnings) == 1
    assert store.warnings[0].endswith("run `mopdctl store repair`")
    with pytest.raises(MopdctlError, match="run `mopdctl store repair`"):
        StoreWriter(tmp_path / "s", IDENTITY)


def test_leftovers_of_a_dead_writer_go_and_what_is_live_stays(tmp_path: Path, make_sample: Make) -> None:
    folder = tmp_path / "s"
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([make_sample(1)])
    (folder / "_staging" / "dead").mkdir()
    old, fresh = folder / "payload" / "part-old.parquet", folder / "meta" / "part-fresh.parquet"
    for path in (old, fresh):
        path.write_bytes(b"")
    os.utime(old, (0, old.stat().st_mtime - GRACE_S - 1))
    StoreWriter(folder, IDENTITY).close()
    assert (old.exists(), fresh.exists(), list((folder / "_staging").iterdir())) == (False, True, [])
    assert len(list(Store(folder).scan())) == 1


def test_dropping_history_leaves_what_is_live_and_nothing_else(tmp_path: Path, make_sample: Make) -> None:
    folder = tmp_path / "s"
    with StoreWriter(folder, IDENTITY) as writer:
        for i in range(4):
            writer.commit([make_sample(i)])
        compact(writer)
        writer.drop_history()
    assert [len(list((folder / kind).iterdir())) for kind in ("manifest", "meta", "payload")] == [1, 1, 1]
    assert len(list(Store(folder).scan())) == 4
    StoreWriter(folder, IDENTITY).close()


def test_other_engines_read_the_metadata(tmp_path: Path, make_sample: Make, full: Sample) -> None:
    import datasets
    import duckdb
    import polars as pl
    import pyarrow.dataset

    samples = [make_sample(i) for i in range(1, 5)] + [full]
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit(samples)
        path = str(tmp_path / "s" / writer.store.manifest.shards[0].meta.path)
    expected = {
        "sample_id": [s.sample_id for s in samples],
        "reward": [s.reward for s in samples],
        "prompt_length": [s.prompt_length for s in samples],
    }
    names = list(expected)
    assert pyarrow.dataset.dataset(path).to_table(columns=names).to_pydict() == expected
    assert pl.read_parquet(path, columns=names).to_dict(as_series=False) == expected
    found = duckdb.sql(f"select {', '.join(names)} from '{path}'").to_arrow_table()
    assert pa.table(found).to_pydict() == expected
    read = datasets.Dataset.from_parquet(path, cache_dir=str(tmp_path / "cache"))
    assert read.select_columns(names).to_dict() == expected
