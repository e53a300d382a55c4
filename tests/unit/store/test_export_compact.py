"""An export that other libraries read unchanged; a compaction that changes nothing but the number of files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopdctl.errors import InputError
from mopdctl.records import Sample
from mopdctl.store.compact import compact
from mopdctl.store.export import COLUMNS, export
from mopdctl.store.store import Store, StoreWriter
from mopdctl.store.summary import summarize, text

Make = Callable[..., Sample]
Same = Callable[[Sample, Sample], bool]
IDENTITY = {"tokenizer": "t", "command": "test"}


@pytest.fixture(scope="module")
def samples(make_sample: Make) -> list[Sample]:
    """With null columns, unicode, an answer without a token, a minus zero and a sample that has everything."""
    rng = np.random.default_rng(0)
    full = make_sample(
        900,
        length=3,
        sample_id="Prüfung/雪\u2028/0@0",
        behavior_logprobs=np.array([-0.0, -1.5, -2.0], np.float32),
        teacher_topk_ids=rng.integers(0, 99, (3, 2)).astype(np.int32),
        teacher_topk_logprobs=-rng.random((3, 2)).astype(np.float32),
        teacher_hidden=rng.integers(0, 2**16, (3, 4)).astype(np.uint16),
        reward=0.25,
        rewards=np.array([0.25], np.float32),
    )
    silent = make_sample(901, length=1, scored=False)
    silent = replace(
        silent,
        tokens=silent.tokens[:-1],
        loss_mask=silent.loss_mask[:-1],
        behavior_logprobs=silent.behavior_logprobs[:0],
    )
    return [*(make_sample(i, scored=i % 2 > 0) for i in range(150)), full, silent]


@pytest.fixture
def folder(tmp_path: Path, samples: list[Sample]) -> Path:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        for start in range(0, len(samples), 40):
            writer.commit(samples[start : start + 40])
    return tmp_path / "s"


def as_rows(samples: list[Sample]) -> list[dict[str, Any]]:
    own = {"response_length": lambda s: len(s.response_ids), "loss_tokens": lambda s: int(s.loss_mask.sum())}

    def value(sample: Sample, name: str) -> Any:
        found = own[name](sample) if name in own else getattr(sample, name)
        if name == "teacher_hidden" and found is not None:
            return found.tobytes()
        return found.reshape(-1).tolist() if isinstance(found, np.ndarray) else found

    return [{c.name: value(s, c.name) for c in COLUMNS} for s in samples]


def exported(folder: Path, out: Path) -> list[str]:
    return [str(path) for path in export(Store(folder), out, file_tokens=2000)]


def test_an_export_is_numbered_files_and_a_card(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    files = exported(folder, tmp_path / "out")
    count = len(files)
    assert count > 2
    assert [Path(f).name for f in files] == [f"train-{i:05d}-of-{count:05d}.parquet" for i in range(count)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "data"]
    assert f"num_examples: {len(samples)}" in (tmp_path / "out" / "README.md").read_text("utf-8")
    with pytest.raises(InputError, match="exists already; export into another folder"):
        export(Store(folder), tmp_path / "out")


def test_pyarrow_reads_an_export(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(exported(folder, tmp_path / "out")).to_table()
    assert table.to_pylist() == as_rows(samples)
    assert str(np.float32(table["behavior_logprobs"][150][0].as_py())) == "-0.0"


def test_polars_reads_an_export(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    import polars as pl

    assert pl.read_parquet(exported(folder, tmp_path / "out")).to_dicts() == as_rows(samples)


def test_duckdb_reads_an_export(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    import duckdb

    files = exported(folder, tmp_path / "out")
    found = duckdb.sql(f"select * from read_parquet({files!r})").to_arrow_table().to_pylist()
    assert found == as_rows(samples)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_datasets_reads_an_export_folder(folder: Path, tmp_path: Path, samples: list[Sample], split: str) -> None:
    import datasets

    export(Store(folder), tmp_path / "out", split=split, file_tokens=2000)
    found = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert list(found) == [split]
    assert found[split].to_list() == as_rows(samples)
    assert str(found[split].features["tokens"]) == "List(Value('int32'))"
    assert str(found[split].features["teacher_hidden"]) == "Value('binary')"


def test_columns_that_are_null_throughout_keep_their_types(tmp_path: Path, make_sample: Make) -> None:
    import datasets

    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([make_sample(1, scored=False)])
    export(Store(tmp_path / "s"), tmp_path / "out")
    found = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert str(found.features["teacher_logprobs"]) == "List(Value('float32'))"
    assert str(found.features["reward"]) == "Value('float32')"


def test_a_store_without_samples_is_not_exported(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "s", IDENTITY).close()
    with pytest.raises(InputError, match="holds no samples"):
        export(Store(tmp_path / "s"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------- compaction


def test_compaction_keeps_samples_and_order(folder: Path, samples: list[Sample], same: Same) -> None:
    reader = Store(folder)
    with StoreWriter(folder, IDENTITY) as writer:
        assert compact(writer) == (4, 1)
        number = writer.store.manifest.number
        assert compact(writer) == (1, 1)
        assert writer.store.manifest.number == number
    assert all(same(a, b) for a, b in zip(Store(folder).scan(), samples, strict=True))
    assert len(list(reader.scan())) == len(samples)  # opened before, still whole


def test_compaction_stops_at_its_limit(folder: Path, samples: list[Sample], same: Same) -> None:
    sizes = [shard.tokens for shard in Store(folder).manifest.shards]
    with StoreWriter(folder, IDENTITY) as writer:
        assert compact(writer, shard_tokens=sizes[0] + sizes[1]) == (4, 2 if sum(sizes[2:]) <= sum(sizes[:2]) else 3)
        assert writer.store.manifest.shards[0].tokens == sizes[0] + sizes[1]
    assert all(same(a, b) for a, b in zip(Store(folder).scan(), samples, strict=True))


# ------------------------------------------------------------------------------------------------------------ summary


def test_a_summary_counts_what_is_there(folder: Path, samples: list[Sample]) -> None:
    found = summarize(Store(folder))
    assert found["samples"] == len(samples)
    assert found["tokens"] == sum(len(s.tokens) for s in samples)
    assert found["loss_tokens"] == sum(int(s.loss_mask.sum()) for s in samples)
    by_key = {(g["domain"], g["teacher_id"]): g for g in found["groups"]}
    assert set(by_key) == {("math", "m"), ("code", "c")}
    mine = [s for s in samples if s.domain == "code"]
    group = by_key["code", "c"]
    assert group["samples"] == len(mine)
    assert group["response_length"]["max"] == max(len(s.response_ids) for s in mine)
    everything = np.concatenate([s.behavior_logprobs for s in mine])
    assert group["behavior_logprob"] == pytest.approx(float(everything.mean()), abs=1e-4)
    scored = [s for s in mine if s.teacher_logprobs is not None]
    gaps = np.concatenate([s.teacher_logprobs - s.behavior_logprobs for s in scored])  # type: ignore[operator]
    assert group["teacher_minus_behavior"] == pytest.approx(float(gaps.mean()), abs=1e-4)
    assert found["finish_reasons"] == {
        r: sum(s.finish_reason == r for s in samples) for r in sorted({s.finish_reason for s in samples})
    }
    assert "math" in text(found)


def test_an_empty_store_has_a_summary(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "s", IDENTITY).close()
    found = summarize(Store(tmp_path / "s"))
    assert (found["samples"], found["groups"], found["policy_versions"]) == (0, [], None)
    assert "0 samples" in text(found)
