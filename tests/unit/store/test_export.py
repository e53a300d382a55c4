"""An export that other libraries read unchanged, to the bit, and whose card says what is in it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Sample
from mopdctl.store import schema
from mopdctl.store.compact import compact
from mopdctl.store.export import COLUMNS, export
from mopdctl.store.store import Store, StoreWriter

Make = Callable[..., Sample]
IDENTITY = {"tokenizer": "t", "command": "test"}
FILE_TOKENS = 2000


@pytest.fixture(scope="module")
def samples(make_sample: Make) -> list[Sample]:
    """Some without a teacher; one that has everything, unicode and a minus zero; one whose answer has no token."""
    rng = np.random.default_rng(0)
    full = make_sample(
        900,
        length=3,
        sample_id="Prüfung/雪\u2028😀/0@0",
        prompt_id="Prüfung/雪\u2028😀",
        domain="",
        behavior_logprobs=np.array([-0.0, -1.5, -2.0], np.float32),
        teacher_topk_ids=rng.integers(0, 99, (3, 2)).astype(np.int32),
        teacher_topk_logprobs=np.array([[-0.0, -1e-30], [-1, -2], [-3, -4]], np.float32),
        teacher_hidden=np.arange(12, dtype=np.uint16).reshape(3, 4) * 5461,
        reward=0.25,
        verdict="ok",
        verifier="exact_match/1",
        verdict_label="correct",
        rewards=np.array([0.25, -0.0], np.float32),
    )
    one = make_sample(901, length=1, scored=False)
    silent = replace(
        one, tokens=one.tokens[:-1], loss_mask=one.loss_mask[:-1], behavior_logprobs=one.behavior_logprobs[:0]
    )
    return [*(make_sample(i, scored=i % 2 > 0) for i in range(150)), full, silent]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> Path:
    """Four commits. Nothing may write here."""
    folder = tmp_path_factory.mktemp("store") / "s"
    with StoreWriter(folder, IDENTITY) as writer:
        for start in range(0, len(samples), 40):
            writer.commit(samples[start : start + 40])
    return folder


@pytest.fixture
def files(folder: Path, tmp_path: Path) -> list[str]:
    return [str(path) for path in export(Store(folder), tmp_path / "out", file_tokens=FILE_TOKENS)]


def expected(samples: list[Sample]) -> list[dict[str, Any]]:
    own: dict[str, Callable[[Sample], Any]] = {
        "response_length": lambda s: len(s.response_ids),
        "loss_tokens": lambda s: int(s.loss_mask.sum()),
    }

    def value(sample: Sample, name: str) -> Any:
        found = own[name](sample) if name in own else getattr(sample, name)
        if name == "teacher_hidden" and found is not None:
            return found.astype("<u2").tobytes()
        return found.reshape(-1).tolist() if isinstance(found, np.ndarray) else found

    return [{c.name: exact(value(s, c.name)) for c in COLUMNS} for s in samples]


def exact(value: Any) -> Any:
    """Numbers as texts that tell 0 from -0, and True from 1."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    return value.hex() if isinstance(value, float) else repr(value) if isinstance(value, int) else value


# ----------------------------------------------------------------------------------------------------- who can read it


def test_pyarrow_reads_an_export(files: list[str], samples: list[Sample]) -> None:
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(files).to_table()
    assert exact(table.to_pylist()) == expected(samples)


def test_polars_reads_an_export(files: list[str], samples: list[Sample]) -> None:
    import polars as pl

    assert exact(pl.read_parquet(files).to_dicts()) == expected(samples)
    lazy = pl.scan_parquet(files).filter(pl.col("domain") == "math").select("sample_id").collect()
    assert lazy["sample_id"].to_list() == [s.sample_id for s in samples if s.domain == "math"]


def test_duckdb_reads_an_export(files: list[str], samples: list[Sample]) -> None:
    import duckdb

    with duckdb.connect() as connection:
        rows = connection.sql(f"select * from read_parquet({files!r})")
        assert rows is not None
        found = rows.to_arrow_table().to_pylist()
        where = "where teacher_logprobs is null"
        count = connection.execute(f"select count(*) from read_parquet({files!r}) {where}").fetchall()
    assert exact(found) == expected(samples)
    assert count == [(sum(s.teacher_logprobs is None for s in samples),)]


@pytest.mark.parametrize("split", ["train", "validation", "no", "2026", "held_out.v1"])
def test_datasets_reads_an_export(folder: Path, tmp_path: Path, samples: list[Sample], split: str) -> None:
    import datasets

    out = tmp_path / "out"
    export(Store(folder), out, split=split, file_tokens=FILE_TOKENS)
    found = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert list(found) == [split]
    assert exact(found[split].to_list()) == expected(samples)


def test_hidden_states_come_back_to_the_bit(files: list[str], samples: list[Sample]) -> None:
    import polars as pl

    full = next(s for s in samples if s.teacher_hidden is not None)
    assert full.teacher_hidden is not None
    row = pl.read_parquet(files).filter(pl.col("sample_id") == full.sample_id).row(0, named=True)
    found = np.frombuffer(row["teacher_hidden"], "<u2").reshape(row["loss_tokens"], -1)
    assert found.tolist() == full.teacher_hidden.tolist()
    assert np.array(row["teacher_topk_ids"]).reshape(row["loss_tokens"], -1).shape == (3, 2)


def test_columns_that_are_null_throughout_keep_their_types(tmp_path: Path, make_sample: Make) -> None:
    import datasets
    import duckdb
    import polars as pl

    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([make_sample(1, scored=False)])
    (file,) = export(Store(tmp_path / "s"), tmp_path / "out")
    null = ["reward", *(c.name for c in schema.PAYLOAD_COLUMNS if c.nullable)]
    table = pq.read_table(file)
    assert all(table[name].null_count == 1 for name in null)
    assert table.schema.remove_metadata().names == [c.name for c in COLUMNS]
    assert all(table.schema.field(c.name).equals(c.field) for c in COLUMNS)
    assert pl.read_parquet(file).schema["teacher_topk_ids"] == pl.List(pl.Int32)
    assert pl.read_parquet(file).schema["teacher_hidden"] == pl.Binary
    with duckdb.connect() as connection:
        described = connection.execute(f"select column_name, column_type from (describe select * from '{file}')")
        types = dict(described.fetchall())
    assert {name: types[name] for name in null} == {
        "reward": "FLOAT",
        "teacher_logprobs": "FLOAT[]",
        "teacher_topk_ids": "INTEGER[]",
        "teacher_topk_logprobs": "FLOAT[]",
        "teacher_hidden": "BLOB",
        "rewards": "FLOAT[]",
    }
    read = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert str(read.features["teacher_logprobs"]) == "List(Value('float32'))"
    assert str(read.features["reward"]) == "Value('float32')"


# --------------------------------------------------------------------------------------------------- files and the card


def test_files_are_numbered_bounded_and_in_store_order(files: list[str], samples: list[Sample]) -> None:
    count = len(files)
    assert count > 2
    assert [Path(f).name for f in files] == [f"train-{i:05d}-of-{count:05d}.parquet" for i in range(count)]
    ids: list[str] = []
    for file in files:
        table, footer = pq.read_table(file), pq.read_metadata(file)
        ids += table["sample_id"].to_pylist()
        tokens = sum(map(len, table["tokens"].to_pylist()))
        assert tokens <= FILE_TOKENS or footer.num_row_groups == 1
    assert ids == [s.sample_id for s in samples]


def test_the_card_says_what_is_in_the_files(files: list[str], tmp_path: Path, samples: list[Sample]) -> None:
    from datasets import Features
    from huggingface_hub import DatasetCard

    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "data"]
    card = DatasetCard.load(out / "README.md")
    info = card.data.to_dict()["dataset_info"]
    (split,) = info["splits"]
    assert split == {
        "name": "train",
        "num_bytes": sum(Path(f).stat().st_size for f in files),
        "num_examples": sum(pq.read_metadata(f).num_rows for f in files),
    }
    assert split["num_examples"] == len(samples)
    features = Features._from_yaml_list(info["features"])
    assert features == Features.from_arrow_schema(pq.read_schema(files[0]))
    tokens = sum(len(s.tokens) for s in samples)
    assert f"{len(samples)} samples, {tokens} tokens, from commit 4 of a rollout store" in card.text
    assert all(f"| `{c.name}` | {c.doc} |" in card.text for c in COLUMNS)


def test_an_export_says_nothing_of_where_a_sample_was(files: list[str]) -> None:
    assert set(schema.LOCATION).isdisjoint(pq.read_schema(files[0]).names)


def test_a_compacted_store_exports_the_same(
    tmp_path: Path, files: list[str], samples: list[Sample], folder: Path
) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        for start in range(0, len(samples), 40):
            writer.commit(samples[start : start + 40])
        compact(writer)
        (file,) = export(writer.store, tmp_path / "compacted")
    assert exact(pq.read_table(file).to_pylist()) == expected(samples)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_nothing_that_is_there_is_written_over(folder: Path, tmp_path: Path, there: str) -> None:
    out = tmp_path / "out"
    if there == "file":
        out.write_text("mine")
    else:
        (tmp_path / "real").mkdir()
        (tmp_path / "real").rename(out) if there == "folder" else out.symlink_to(tmp_path / "real")
    with pytest.raises(InputError, match="out: exists already; export into another folder"):
        export(Store(folder), out)
    assert out.is_dir() or out.read_text() == "mine"


@pytest.mark.parametrize("split", ["", "held-out", "../x", "a/b", "a b", ".a", "a.", "a..b", "all", "prüfung", "a\n"])
def test_a_split_that_datasets_would_not_load_is_refused(folder: Path, tmp_path: Path, split: str) -> None:
    with pytest.raises(InputError, match="`datasets` wants letters"):
        export(Store(folder), tmp_path / "out", split=split)
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_samples_is_not_exported(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "s", IDENTITY).close()
    with pytest.raises(InputError, match="holds no samples"):
        export(Store(tmp_path / "s"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_sample_is_not_exported_and_nothing_is_left(tmp_path: Path, make_sample: Make) -> None:
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit([make_sample(i) for i in range(200)])
        path = tmp_path / "s" / writer.store.manifest.shards[0].payload.path
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(MopdctlError, match="run `mopdctl store verify`"):
        export(Store(tmp_path / "s"), tmp_path / "out", file_tokens=FILE_TOKENS)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_folder_that_cannot_be_made_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MopdctlError, match=r"file/out: cannot be written \((Not a directory|File exists)\)"):
        export(Store(folder), tmp_path / "file" / "out")
