import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.errors import InputError, MopdctlError
from mopdctl.store import disk
from mopdctl.store.plan import Filter, Plan, load_plan, make_plan

ALL = Filter(min_loss_tokens=0)
OPTIONS: dict[str, Any] = {"capacity": 64, "seed": 0, "filters": ALL, "store_version": 3}


def metadata(num_rows: int, seed: int = 0) -> pl.DataFrame:
    """Rows of 2 to 50 tokens."""
    generator = np.random.default_rng(seed)
    version = generator.integers(0, 10, num_rows)
    response = generator.integers(1, 41, num_rows)
    return pl.DataFrame(
        {
            "domain": generator.choice(["maths", "code", "chat"], num_rows),
            "teacher_id": generator.choice(["", "Ada", "Blaise"], num_rows),
            "policy_version_min": version.astype(np.int32),
            "policy_version_max": (version + generator.integers(0, 3, num_rows)).astype(np.int32),
            "prompt_length": generator.integers(1, 11, num_rows).astype(np.int32),
            "response_length": response.astype(np.int32),
            "loss_tokens": (response * generator.integers(0, 2, num_rows)).astype(np.int32),
            "finish_reason": generator.choice(["stop", "length"], num_rows),
        },
        schema_overrides={"domain": pl.String, "teacher_id": pl.String, "finish_reason": pl.String},
    )


def lengths_of(meta: pl.DataFrame) -> np.ndarray:
    return (meta["prompt_length"] + meta["response_length"]).to_numpy()


names = st.none() | st.sets(st.sampled_from(["maths", "code", "Ada", "", "stop", "x"]), max_size=4).map(
    lambda found: tuple(sorted(found))
)
filters = st.builds(
    Filter,
    domains=names,
    teachers=names,
    finish_reasons=names,
    min_policy_version=st.none() | st.integers(0, 10),
    max_policy_version=st.none() | st.integers(0, 12),
    min_loss_tokens=st.integers(0, 40),
    max_length=st.none() | st.integers(2, 50),
)


def reason_to_drop(row: dict[str, Any], asked: Filter) -> str | None:
    if asked.domains is not None and row["domain"] not in asked.domains:
        return "domain"
    if asked.teachers is not None and row["teacher_id"] not in asked.teachers:
        return "teacher"
    if asked.finish_reasons is not None and row["finish_reason"] not in asked.finish_reasons:
        return "finish_reason"
    if asked.min_policy_version is not None and row["policy_version_min"] < asked.min_policy_version:
        return "policy_too_old"
    if asked.max_policy_version is not None and row["policy_version_max"] > asked.max_policy_version:
        return "policy_too_new"
    if row["loss_tokens"] < asked.min_loss_tokens:
        return "too_few_loss_tokens"
    if asked.max_length is not None and row["prompt_length"] + row["response_length"] > asked.max_length:
        return "too_long"
    return None


@given(filters, st.integers(0, 60), st.booleans())
def test_every_row_is_in_one_bin_or_counted_under_one_reason(asked: Filter, num_rows: int, by_teacher: bool) -> None:
    meta = metadata(num_rows)
    plan = make_plan(meta, **OPTIONS | {"filters": asked}, by_teacher=by_teacher)
    reasons = [reason_to_drop(row, asked) for row in meta.iter_rows(named=True)]
    assert sorted(plan.rows.tolist()) == [row for row, reason in enumerate(reasons) if reason is None]
    assert {name: count for name, count in plan.dropped.items() if count} == {
        name: reasons.count(name) for name in set(reasons) if name is not None
    }
    assert plan.total == num_rows == plan.kept + sum(plan.dropped.values())


@given(st.integers(0, 3), st.integers(1, 7), st.integers(1, 4))
def test_a_bin_keeps_to_one_teacher_and_to_its_capacity(seed: int, multiple_of: int, align: int) -> None:
    meta = metadata(100)
    plan = make_plan(meta, **OPTIONS | {"seed": seed}, multiple_of=multiple_of, align=align)
    padded = -(-lengths_of(meta) // align) * align
    teachers = meta["teacher_id"].to_list()
    assert plan.num_bins % multiple_of == 0
    for number in range(plan.num_bins):
        assert 0 < padded[plan.bin(number)].sum() <= 64
        assert {teachers[row] for row in plan.bin(number)} == {plan.teachers[plan.bin_teacher[number]]}
    assert lengths_of(meta)[plan.rows].sum() == lengths_of(meta).sum()
    assert plan.fill == pytest.approx(lengths_of(meta).sum() / (plan.num_bins * 64))


def test_bins_of_all_teachers_are_shuffled_together() -> None:
    plan = make_plan(metadata(2000), **OPTIONS)
    changes = np.mean(np.diff(plan.bin_teacher) != 0)
    assert plan.teachers == ("", "Ada", "Blaise")
    assert abs(changes - 2 / 3) < 0.1  # in three runs it would be next to 0


def test_without_teachers_bins_mix_them() -> None:
    meta = metadata(200)
    plan = make_plan(meta.drop("teacher_id"), **OPTIONS, by_teacher=False)
    assert plan.teachers == ()
    assert set(plan.bin_teacher.tolist()) == {-1}
    assert plan.num_bins <= make_plan(meta, **OPTIONS).num_bins


def test_same_seed_same_plan_other_seed_other_order() -> None:
    meta = metadata(200)
    plan, other = make_plan(meta, **OPTIONS), make_plan(meta, **OPTIONS | {"seed": 1})
    assert plan == make_plan(meta, **OPTIONS)
    assert plan != other
    assert plan.rows.tolist() != other.rows.tolist()
    assert sorted(plan.rows.tolist()) == sorted(other.rows.tolist())


def test_the_fingerprint_tells_inputs_apart() -> None:
    meta = metadata(50)
    longer = meta.with_columns(pl.col("prompt_length") + pl.when(pl.row_index() == 7).then(1).otherwise(0))
    judged = meta.with_columns(pl.col("teacher_id").replace("Ada", "Bada"))
    options: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"capacity": 65},
        {"store_version": 4},
        {"filters": Filter(min_loss_tokens=0, max_length=50)},
        {"align": 2},
        {"multiple_of": 2},
        {"over_long": "drop"},
        {"by_teacher": False},
    ]
    plans = [make_plan(meta, **OPTIONS | change) for change in options]
    plans += [make_plan(changed, **OPTIONS) for changed in (longer, judged)]
    assert len({plan.fingerprint for plan in plans}) == len(plans)


def test_a_parquet_file_of_dictionaries_gives_the_same_plan_as_a_frame(tmp_path: Path) -> None:
    meta = metadata(300)
    table = meta.to_arrow()
    for number, name in enumerate(table.column_names):
        if name in ("domain", "teacher_id", "finish_reason"):
            column = table[name].cast(pa.string()).dictionary_encode()
            table = table.set_column(number, name, column)
    pq.write_table(table.append_column("unread", pa.array(range(300))), tmp_path / "meta.parquet", row_group_size=70)
    options = OPTIONS | {"filters": Filter(domains=("maths", "code"), finish_reasons=("stop",))}
    assert make_plan(pl.scan_parquet(tmp_path / "meta.parquet"), **options) == make_plan(meta, **options)


def test_over_long_rows_are_counted() -> None:
    meta = metadata(20).with_columns(prompt_length=pl.when(pl.row_index() == 3).then(100).otherwise(1))
    with pytest.raises(InputError, match="1 of 20 samples are longer than the capacity of 64"):
        make_plan(meta, **OPTIONS)
    dropped = make_plan(meta, **OPTIONS, over_long="drop")
    assert (dropped.dropped["over_long"], dropped.kept, dropped.alone) == (1, 19, 0)
    alone = make_plan(meta, **OPTIONS, over_long="alone")
    assert (alone.dropped["over_long"], alone.kept, alone.alone) == (0, 20, 1)
    assert [3] in [alone.bin(number).tolist() for number in range(alone.num_bins)]


def test_metadata_that_cannot_be_planned_with_is_refused() -> None:
    meta = metadata(5)
    with pytest.raises(InputError, match="no column loss_tokens, teacher_id"):
        make_plan(meta.drop("loss_tokens", "teacher_id"), **OPTIONS)
    for change in ({"teacher_id": None}, {"loss_tokens": None}, {"prompt_length": -40}):
        ((name, value),) = change.items()
        broken = meta.with_columns(pl.when(pl.row_index() >= 3).then(pl.lit(value)).otherwise(name).alias(name))
        with pytest.raises(InputError, match="2 rows, first row 3, have no tokens or a null"):
            make_plan(broken, **OPTIONS)


def test_long_prompts_do_not_overflow() -> None:
    meta = metadata(1).with_columns(prompt_length=pl.lit((1 << 31) - 1, pl.Int32), response_length=pl.lit(5, pl.Int32))
    assert make_plan(meta, **OPTIONS, over_long="alone").alone == 1


def test_ranks_share_the_bins_evenly() -> None:
    plan = make_plan(metadata(100), **OPTIONS, multiple_of=4)
    for world in (1, 2, 4):
        shares = [plan.bins_of_rank(rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        assert np.stack(shares, axis=1).ravel().tolist() == list(range(plan.num_bins))  # step by step
    with pytest.raises(InputError, match="multiple_of=1000"):
        plan.bins_of_rank(0, 1000)
    for rank in (-1, 4):
        with pytest.raises(InputError, match="ranks go from 0 to 3"):
            plan.bins_of_rank(rank, 4)


@pytest.mark.parametrize("by_teacher", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_a_saved_plan_loads_equal(tmp_path: Path, num_rows: int, by_teacher: bool) -> None:
    asked = Filter(domains=("maths", "chat"), min_loss_tokens=0, max_length=40)
    plan = make_plan(metadata(num_rows), **OPTIONS | {"filters": asked}, by_teacher=by_teacher)
    plan.save(tmp_path / "deep" / "plan.parquet")
    loaded = load_plan(tmp_path / "deep" / "plan.parquet")
    assert loaded == plan
    assert loaded.rows.tolist() == plan.rows.tolist()
    assert loaded.offsets.tolist() == plan.offsets.tolist()
    assert loaded.bin_teacher.tolist() == plan.bin_teacher.tolist()
    for name in ("teachers", "settings", "dropped", "fill", "seed", "store_version", "fingerprint", "total"):
        assert getattr(loaded, name) == getattr(plan, name)
    assert loaded.settings["filters"]["max_length"] == 40
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plan.parquet"]


def test_plans_differ_by_any_field() -> None:
    plan = make_plan(metadata(50), **OPTIONS)
    changes: list[dict[str, Any]] = [
        {"rows": plan.rows[::-1]},
        {"bin_teacher": (plan.bin_teacher + 1) % 3},
        {"capacity": 65},
        {"fill": None},
        {"dropped": {}},
    ]
    assert all(replace(plan, **change) != plan for change in changes)


def test_others_read_a_plan_as_a_plain_table(tmp_path: Path) -> None:
    meta = metadata(100)
    plan = make_plan(meta, **OPTIONS)
    plan.save(tmp_path / "plan.parquet")
    table = pl.read_parquet(tmp_path / "plan.parquet")
    assert table.columns == ["bin", "row", "teacher"]
    assert table["bin"].is_sorted()
    assert table["row"].to_list() == plan.rows.tolist()
    assert table["teacher"].cast(pl.String).to_list() == meta["teacher_id"].gather(plan.rows).to_list()


def test_a_save_that_fails_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.parquet"
    plan = make_plan(metadata(50), **OPTIONS)
    plan.save(path)

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "sync_file", fail)
    with pytest.raises(MopdctlError, match=r"plan\.parquet"):
        make_plan(metadata(50), **OPTIONS | {"seed": 1}).save(path)
    assert load_plan(path) == plan
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, bytes, Path]:
    plan = make_plan(metadata(200), **OPTIONS)
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    plan.save(path)
    return plan, path.read_bytes(), path


@given(data=st.data())
@settings(max_examples=300)
def test_a_flipped_bit_is_noticed_or_does_no_harm(saved: tuple[Plan, bytes, Path], data: st.DataObject) -> None:
    plan, content, path = saved
    broken = bytearray(content)
    broken[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.with_name("broken.parquet").write_bytes(broken)
    try:
        loaded = load_plan(path.with_name("broken.parquet"))
    except InputError:
        return
    assert loaded == plan  # a bit that nobody reads, such as one of a statistic


@given(data=st.data())
def test_a_cut_file_is_refused(saved: tuple[Plan, bytes, Path], data: st.DataObject) -> None:
    _, content, path = saved
    path.with_name("cut.parquet").write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(InputError, match=r"cut\.parquet: damaged, or no plan at all"):
        load_plan(path.with_name("cut.parquet"))


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_plan(tmp_path / "none.parquet")
    with pytest.raises(InputError, match="no plan at all"):
        load_plan(tmp_path)
    pq.write_table(pa.table({"bin": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match="is a Parquet file but no plan"):
        load_plan(tmp_path / "foreign.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "mopdctl.plan/2", "new_field": 1}, "newer than this one; update mopdctl"),
        ({"schema": "other/1"}, "damaged"),
        ({"capacity": 65}, "damaged"),
        ({"new_field": 1}, "damaged"),
    ],
)
def test_a_changed_header_is_refused(
    tmp_path: Path, saved: tuple[Plan, bytes, Path], change: dict[str, Any], message: str
) -> None:
    table = pq.read_table(saved[2])
    header = json.loads(table.schema.metadata[b"mopdctl.plan"]) | change
    changed = table.schema.metadata | {b"mopdctl.plan": json.dumps(header).encode()}
    pq.write_table(table.replace_schema_metadata(changed), tmp_path / "changed.parquet")
    with pytest.raises(InputError, match=message):
        load_plan(tmp_path / "changed.parquet")
