"""The store bench on a tiny scale: what it measures is what it says, whatever the figures are."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mopdctl.bench import frame, store, store_data, store_processes
from mopdctl.bench.store_data import CAPACITY, Sizes, lengths, metadata
from mopdctl.errors import MopdctlError
from mopdctl.runs import Workspace
from mopdctl.store import schema
from mopdctl.store.store import Store

TINY = Sizes(
    plan_rows=1000,
    pack_samples=500,
    payload_samples=100,
    payload_mean_tokens=100,
    rows_read=3,
    log_requests=5,
    log_steps=4,
    workers=2,
    meta_rows=300,
    meta_payload_tokens=4,
)
TRL = """
def pack_dataset(dataset, seq_length, strategy):
    assert strategy == "bfd"
    return dataset.from_dict({"seq_lengths": [[len(row)] for row in dataset["input_ids"]]})
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metadata in several shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_data, "SHARD_TOKENS", 200_000)
        return metadata(TINY, tmp_path_factory.mktemp("cache"))


def test_lengths_are_those_of_the_issue() -> None:
    tokens = lengths(np.random.default_rng(0), 200_000)
    assert tokens.min() >= 16
    assert tokens.max() == CAPACITY
    assert tokens.mean() == pytest.approx(1500, rel=0.01)
    bins = store_processes._next_fit(tokens, CAPACITY).max() + 1
    assert tokens.sum() / (bins * CAPACITY) == pytest.approx(0.903, abs=0.003)


@pytest.mark.parametrize(("name", "samples"), [("plan", TINY.plan_rows), ("load", TINY.meta_rows)])
def test_metadata_is_whole_and_its_payload_is_not_there(data: Path, name: str, samples: int) -> None:
    found = Store(Workspace(data).rollouts(name))
    assert len(found.manifest.shards) > 1
    assert found.manifest.rows == samples
    table = found.meta_table()
    assert len(set(table["sample_id"].to_pylist())) == samples
    tokens = table["prompt_length"].to_numpy() + table["response_length"].to_numpy()
    assert tokens.sum() == found.manifest.tokens
    assert table["prompt_length"].to_numpy().min() > 0
    routed = list(zip(table["prompt_id"].to_pylist(), table["domain"].to_pylist(), strict=True))
    assert set(routed) == set(dict(routed).items())
    with pytest.raises(MopdctlError, match="missing"):
        found.read([0])


def test_the_one_file_has_the_same_metadata(data: Path) -> None:
    with pq.ParquetFile(data / "combined.parquet") as file:
        assert file.schema_arrow.names == [*schema.META.names, *schema.PAYLOAD.names[1:]]
        assert file.metadata.row_group(0).num_rows == schema.PAYLOAD_GROUP_ROWS
        ours = Store(Workspace(data).rollouts("load")).meta_table()
        assert file.read(columns=schema.META.names).combine_chunks().equals(ours.combine_chunks())
        assert pa.compute.list_value_length(file.read(columns=["tokens"])["tokens"]).unique().to_pylist() == [4]


def test_metadata_is_made_once(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    assert metadata(TINY, data.parent) == data
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    assert capsys.readouterr().err == ""


def test_metadata_cases_count_every_byte_and_want_no_payload_around(data: Path) -> None:
    time_case, bytes_case = store.metadata_cases(TINY, data)
    assert time_case.ours() > 0
    assert time_case.rival() > 0
    folder = Workspace(data).rollouts("load")
    files = [path for kind in ("meta", "manifest") for path in (folder / kind).iterdir()]
    assert bytes_case.ours() == pytest.approx(sum(path.stat().st_size for path in files) / TINY.meta_rows, rel=0.1)
    assert 0 < bytes_case.rival() * TINY.meta_rows < 2 * (data / "combined.parquet").stat().st_size
    part = folder / "payload" / "part-0.parquet"
    part.touch()
    with pytest.raises(MopdctlError, match="has payload files"):
        store.metadata_cases(TINY, data)
    part.unlink()


def test_next_fit_makes_a_plan(data: Path, tmp_path: Path) -> None:
    folder = Workspace(data).rollouts("plan")
    store_processes.next_fit(str(folder), str(CAPACITY), str(tmp_path / "plan.parquet"))
    plan = pq.read_table(tmp_path / "plan.parquet")
    bins, rows = plan["bin"].to_numpy(), plan["row"].to_numpy()
    meta = pa.concat_tables([pq.read_table(file) for file in sorted((folder / "meta").glob("*.parquet"))])
    assert sorted(rows.tolist()) == list(range(TINY.plan_rows))
    tokens = (meta["prompt_length"].to_numpy() + meta["response_length"].to_numpy())[rows]
    assert np.bincount(bins, weights=tokens).max() <= CAPACITY
    teachers = np.array(meta["teacher_id"].to_pylist())[rows]
    assert teachers.tolist() == plan["teacher"].cast(pa.string()).to_pylist()
    assert all(len(set(teachers[bins == number])) == 1 for number in range(bins.max() + 1))


def test_log_rival_writes_the_same_bytes(tmp_path: Path) -> None:
    (case,) = store.log_cases(TINY, tmp_path)
    (segment,) = (path.read_bytes() for path in tmp_path.rglob("*.wal"))
    assert case.ours() > 0
    assert case.rival() > 0
    (bare,) = (path.read_bytes() for path in tmp_path.iterdir() if path.is_file() and path.stat().st_size)
    assert len(bare) > TINY.log_steps * TINY.log_requests * 16
    assert segment.endswith(bare)


def test_child_that_ends_is_an_error() -> None:
    with store.Child([sys.executable, "-S", "-c", "import sys; print('{}'); sys.exit(4)"]) as child:
        assert child.answer() == {}
        with pytest.raises(MopdctlError, match="ended with 4"):
            child.answer()


@pytest.mark.slow
def test_every_case_measures_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text(TRL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    environment = frame.Environment(Path(sys.prefix), {"trl": "none"})
    made: Callable[..., frame.Environment] = lambda *_, **__: environment  # noqa: E731
    monkeypatch.setattr(store, "rival_environment", made)
    kept, shared = tmp_path / "cache", Path("/dev/shm") / f"mopdctl-{os.getuid()}"
    kept.mkdir()
    before = set(shared.iterdir()) if shared.is_dir() else set()

    rows = frame.report(store.bench(TINY, cache=kept), runs=1)["rows"]

    assert [(row["unit"], row["bar"]) for row in rows] == [
        ("s", "ours <= 15 s"),
        ("GiB", "ours <= 4 GiB"),
        ("CPU s per 1M", "ratio >= 1"),
        ("per mille", "ours <= 1 per mille"),
        ("ms", "ratio >= 0.5"),
        ("ms", "ratio >= 50"),
        ("ms", "none"),
        ("ms", "none"),
        ("us", "ratio >= 0.7"),
        ("MB", "ours <= 20 MB"),
        ("s", "ratio >= 1"),
        ("bytes", "ratio >= 1"),
    ]
    assert all(row["ours"] > 0 and row["rival"] > 0 for row in rows)
    assert len({row["case"] for row in rows}) == len(rows)
    tokens = lengths(np.random.default_rng(0), TINY.pack_samples)
    assert rows[3]["rival"] == pytest.approx(1000 - 1000 * tokens.sum() / (len(tokens) * CAPACITY))
    assert {path.name for path in kept.iterdir()} == {".lock", metadata(TINY, kept).name}
    assert (set(shared.iterdir()) if shared.is_dir() else set()) == before
