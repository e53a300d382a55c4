import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Sample
from mopdctl.store import loader, parquet, schema
from mopdctl.store.loader import Loader, Shared, share, sweep
from mopdctl.store.plan import Filter, Plan, make_plan
from mopdctl.store.store import Store, StoreWriter

IDENTITY = {"tokenizer": "t"}
Usage = namedtuple("Usage", "total used free")


def make_sample(number: int, *, most: int = 40, wide: int = 2) -> Sample:
    """A sample whose optional streams come and go with its number, and which may have no loss-active token."""
    random = np.random.default_rng(number)
    length = int(random.integers(2, most))
    prompt = int(random.integers(1, length + 1))
    mask = (random.random(length) < 0.8) & (np.arange(length) >= prompt)
    active = int(mask.sum())

    def floats(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    return Sample(
        sample_id=f"s{number}",
        prompt_id=f"p{number // 2}",
        group_id=f"g{number // 2}",
        generation_index=number % 2,
        domain=("math", "code")[number % 3 == 0],
        teacher_id=("a", "b")[number % 3 == 0],
        policy_version_min=number // 50,
        policy_version_max=number // 50 + 1,
        tokens=random.integers(0, 1 << 17, length).astype(np.int32),
        prompt_length=prompt,
        loss_mask=mask,
        behavior_logprobs=floats(active),
        finish_reason="stop",
        tokenizer_fingerprint="t",
        teacher_logprobs=floats(active) if number % 4 else None,
        teacher_topk_ids=random.integers(0, 99, (active, wide)).astype(np.int32) if number % 5 else None,
        teacher_topk_logprobs=floats(active, wide) if number % 5 else None,
        teacher_hidden=random.integers(0, 1 << 16, (active, 8)).astype(np.uint16) if number % 7 else None,
        **({} if number % 2 else {"reward": 0.5, "verdict": "ok", "verifier": "x/1"}),
        rewards=floats(number % 3) if number % 6 else None,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """400 samples in three commits and eight row groups."""
    folder = tmp_path_factory.mktemp("store") / "rollouts"
    with StoreWriter(folder, IDENTITY) as writer:
        for first, last in ((0, 150), (150, 170), (170, 400)):
            writer.commit([make_sample(number) for number in range(first, last)])
    return Store(folder)


def plan_of(store: Store, *, seed: int = 0, ranks: int = 4, **filters: Any) -> Plan:
    return make_plan(
        store.meta(),
        capacity=128,
        seed=seed,
        filters=Filter(**filters),
        store_version=store.manifest.number,
        multiple_of=ranks,
    )


def arrays_of(sample: Sample) -> dict[str, Any]:
    found = {name: getattr(sample, name) for name in schema.STREAMS}
    return {name: array for name, array in found.items() if array is not None}


def same(one: Sample, other: Sample) -> bool:
    plain = [field.name for field in fields(Sample) if field.name not in schema.STREAMS]
    a, b = arrays_of(one), arrays_of(other)
    return [getattr(one, n) for n in plain] == [getattr(other, n) for n in plain] and [
        (n, v.dtype, v.shape, v.tobytes()) for n, v in a.items()
    ] == [(n, v.dtype, v.shape, v.tobytes()) for n, v in b.items()]


@pytest.fixture
def shared(store: Store, tmp_path: Path) -> Iterator[Shared]:
    with share(store, run_id="run", folder=tmp_path / "shared") as found:
        yield found


Source = Callable[[], Store | Shared]


@pytest.fixture(params=["parquet", "shared"])
def source(request: pytest.FixtureRequest, store: Store) -> Any:
    return store if request.param == "parquet" else request.getfixturevalue("shared")


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(("bins_per_batch", "window"), [(1, 1), (3, 1), (2, 4), (1, 1000)])
def test_each_rank_gets_the_samples_of_its_bins_in_the_order_of_the_plan(
    store: Store, source: Any, bins_per_batch: int, window: int
) -> None:
    plan = plan_of(store)
    seen = []
    for rank in range(4):
        batches = Loader(source, plan, rank=rank, world=4, bins_per_batch=bins_per_batch, window=window)
        bins = plan.bins_of_rank(rank, 4).tolist()
        expected = [
            [row for number in bins[at : at + bins_per_batch] for row in plan.bin(number).tolist()]
            for at in range(0, len(bins), bins_per_batch)
        ]
        assert len(batches) == len(expected)
        found = list(batches)
        assert [[sample.sample_id for sample in batch] for batch in found] == [
            [f"s{row}" for row in numbers] for numbers in expected
        ]
        for batch, numbers in zip(found, expected, strict=True):
            assert all(map(same, batch, store.read(numbers)))
        seen += [row for numbers in expected for row in numbers]
    assert len(seen) == len(set(seen)) == plan.kept > 300


def test_a_stopped_pass_goes_on_where_it_was_even_with_other_ranks(store: Store, source: Any) -> None:
    plan = plan_of(store)
    stopped, done = [Loader(source, plan, rank=rank, world=4, window=3) for rank in range(4)], []
    for _ in range(5):
        done += [sample.sample_id for batches in stopped for sample in next(batches)]
    states = [json.loads(json.dumps(batches.state())) for batches in stopped]
    assert all(state == states[0] for state in states)
    for world in (1, 2, 4):
        again = [Loader(source, plan, rank=rank, world=world, state=states[0]) for rank in range(world)]
        rest = [sample.sample_id for batches in again for batch in batches for sample in batch]
        assert sorted(done + rest) == sorted(f"s{row}" for row in plan.rows.tolist())
    rest = [[sample.sample_id for sample in batch] for batch in Loader(source, plan, rank=1, world=4, state=states[1])]
    assert rest == [[sample.sample_id for sample in batch] for batch in stopped[1]]


def test_a_state_that_does_not_fit_is_refused(store: Store) -> None:
    plan = plan_of(store)
    with pytest.raises(InputError, match=plan.fingerprint):
        Loader(store, plan, state=Loader(store, plan_of(store, seed=1)).state())
    with pytest.raises(InputError, match="6 bins, 4 ranks"):
        Loader(store, plan, world=4, state={"plan": plan.fingerprint, "start_at": 6})


def test_no_batch_is_kept_after_the_next_one_is_asked_for(store: Store, source: Any) -> None:
    batches = Loader(source, plan_of(store), bins_per_batch=2, window=3)
    for _ in range(7):
        batch = next(batches)
        alive = [weakref.ref(array) for sample in batch for array in arrays_of(sample).values()]
        assert alive
        del batch
        gc.collect()
        assert not any(array() is not None for array in alive)


def test_a_sample_from_parquet_does_not_hold_its_row_group(store: Store) -> None:
    for sample in next(Loader(store, plan_of(store))):
        assert all(array.base is None for array in arrays_of(sample).values())


def test_row_groups_are_read_in_order_and_once_for_a_window(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[Path, int]] = []
    original = parquet.GroupReader.read

    def counting(self: parquet.GroupReader, group: int) -> Any:
        read.append((self._path, group))
        return original(self, group)

    monkeypatch.setattr(parquet.GroupReader, "read", counting)
    plan = plan_of(store)
    batches = Loader(store, plan, window=1000)
    assert read == []
    next(batches)
    files = [store.folder / shard.payload.path for shard in store.manifest.shards]
    groups = [sum(1 for path, _ in read if path == file) for file in files]
    assert groups == [3, 1, 4]
    assert read == [(file, group) for file, count in zip(files, groups, strict=True) for group in range(count)]
    list(batches)
    assert len(read) == 8
    read.clear()
    next(Loader(store, plan))
    assert 0 < len(read) <= len(plan.bin(0))


def test_a_plan_of_another_manifest_is_refused_by_number(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.folder, tmp_path / "store")
    with StoreWriter(tmp_path / "store", IDENTITY) as writer:
        writer.commit([make_sample(1000)])
    later = Store(tmp_path / "store")
    with pytest.raises(InputError, match=r"for manifest 3 with 400 .* at manifest 4 with 401"):
        Loader(later, plan_of(store))
    with share(later, run_id="run", folder=tmp_path) as shared, pytest.raises(InputError, match="at manifest 4"):
        Loader(shared, plan_of(store))
    with StoreWriter(tmp_path / "other", IDENTITY) as writer:
        for number in range(3):
            writer.commit([make_sample(number)])
    with pytest.raises(InputError, match=r"for manifest 3 with 3 .* at manifest 3 with 400"):
        Loader(store, plan_of(Store(tmp_path / "other"), ranks=1))


# -------------------------------------------------------------------------------------------------------------- sharing


def test_every_sample_comes_out_as_the_store_reads_it(store: Store, shared: Shared) -> None:
    opened = Shared(shared.path)
    assert (opened.number, opened.rows) == (3, 400)
    assert all(map(same, map(opened.sample, range(400)), store.read(range(400))))
    for number in (-1, 400):
        with pytest.raises(InputError, match=f"no row {number}"):
            opened.sample(number)


def test_arrays_are_read_only_views_of_the_map(store: Store, shared: Shared) -> None:
    maps = []
    views = arrays_of(shared.sample(1))
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(shared.path / "payload.arrow")):
            assert line.split()[1].startswith("r--")
            maps.append([int(edge, 16) for edge in line.split()[0].split("-")])
    assert views.keys() == set(schema.STREAMS)
    for name, array in views.items():
        assert len(array)
        address = array.__array_interface__["data"][0]
        assert name == "loss_mask" or any(start <= address < end for start, end in maps)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_only_the_rows_asked_for_are_shared(store: Store, tmp_path: Path) -> None:
    plan = plan_of(store, teachers=("b",))
    with share(store, run_id="all", folder=tmp_path) as every:
        size = (every.path / "payload.arrow").stat().st_size
    with share(store, run_id="some", folder=tmp_path, numbers=plan.rows) as some:
        assert (some.path / "payload.arrow").stat().st_size < size / 2
        found = {sample.sample_id for batch in Loader(some, plan) for sample in batch}
        assert found == {f"s{row}" for row in plan.rows.tolist()}
        with pytest.raises(InputError, match="row 1 was not shared"):
            some.sample(1)


def test_streams_that_no_sample_has_are_none(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", IDENTITY) as writer:
        optional = {name: None for name in schema.STREAMS if name.startswith("teacher")}
        samples = [replace(make_sample(number), rewards=None, **optional) for number in range(9)]
        writer.commit(samples)
        with share(writer.store, run_id="run", folder=tmp_path / "shared") as shared:
            assert all(map(same, map(shared.sample, range(9)), samples))


def test_an_empty_store_can_be_shared(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", IDENTITY) as writer:
        empty = writer.store
    with share(empty, run_id="run", folder=tmp_path / "shared") as shared:
        assert shared.rows == 0
        assert list(Loader(shared, plan_of(empty))) == []


def test_a_damaged_payload_is_refused_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.folder, tmp_path / "store")
    damaged = tmp_path / "store" / store.manifest.shards[2].payload.path
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(MopdctlError, match=r"part-.*damaged"):
        share(Store(tmp_path / "store"), run_id="run", folder=tmp_path / "shared")
    assert list((tmp_path / "shared").iterdir()) == []


def test_samples_outlive_the_files_and_the_files_do_not_outlive_the_owner(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with share(store, run_id="run", folder=tmp_path) as owner:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", owner.path.name]
        worker = Shared(owner.path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    sample = owner.sample(7)
    del owner
    assert same(sample, store.read([7])[0])
    assert all(map(same, map(worker.sample, range(400)), store.read(range(400))))
    with pytest.raises(InputError, match="owner"):
        Shared(worker.path)
    dropped = share(store, run_id="run", folder=tmp_path)
    del dropped
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "-x"])
def test_a_run_id_cannot_lead_out_of_the_folder(store: Store, tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError, match="name"):
        share(store, run_id=run_id, folder=tmp_path)


# ----------------------------------------------------------------------------------------------------------------- room


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Stands in for `/dev/shm` and the temporary folder: what is made there."""
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(loader, "_SHM", tmp_path / "shm")
    monkeypatch.setattr(loader.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "shm" / f"mopdctl-{os.getuid()}", tmp_path / "tmp" / f"mopdctl-{os.getuid()}"


def full_after(monkeypatch: pytest.MonkeyPatch, folder: Path, looks: int) -> list[Path]:
    """The file system of `folder` has room for so many looks."""
    seen: list[Path] = []

    def usage(path: Path) -> Usage:
        if folder in Path(path).parents:
            seen.append(path)
            if len(seen) > looks:
                return Usage(100 << 20, 90 << 20, 10 << 20)  # all of what is free is margin
        return Usage(100 << 20, 0, 100 << 20)

    monkeypatch.setattr(loader.shutil, "disk_usage", usage)
    return seen


def test_memory_is_taken_first(store: Store, places: tuple[Path, Path]) -> None:
    notes: list[str] = []
    with share(store, run_id="run", on_note=notes.append) as shared:
        assert shared.path.parent == places[0]
        assert places[0].stat().st_mode & 0o777 == shared.path.stat().st_mode & 0o777 == 0o700
    assert notes == []


@pytest.mark.parametrize("looks", [0, 4, 9])
def test_disk_takes_over_where_memory_has_no_room_or_runs_out(
    store: Store, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    notes: list[str] = []
    seen = full_after(monkeypatch, places[0], looks)
    with share(store, run_id="run", on_note=notes.append) as shared:
        assert shared.path.parent == places[1]
        assert all(map(same, map(shared.sample, range(400)), store.read(range(400))))
        assert list(places[0].iterdir()) == []
    assert len(seen) == looks + 1
    assert len(notes) == 1
    assert notes[0].startswith(f"{places[0]}: no room, 10 MiB are free")
    assert notes[0].endswith(f"shared in {places[1]} instead")


def test_a_folder_that_was_named_is_used_or_nothing_is(
    store: Store, places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_after(monkeypatch, tmp_path / "here", 3)
    with pytest.raises(InputError, match=r"here: no room.*make room"):
        share(store, run_id="run", folder=tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []


def test_a_folder_that_someone_else_put_there_is_not_used(store: Store, places: tuple[Path, Path]) -> None:
    notes: list[str] = []
    places[0].symlink_to(places[1].parent)
    with share(store, run_id="run", on_note=notes.append) as shared:
        assert shared.path.parent == places[1]
    assert "someone else" in notes[0]


TINY = """
import sys
from pathlib import Path
from mopdctl.store import loader
from mopdctl.store.store import Store

loader._SHM = Path(sys.argv[2])
if sys.argv[3] == "blind":
    loader._check_room = lambda path, needed: None
notes = []
with loader.share(Store(Path(sys.argv[1])), run_id="run", on_note=notes.append) as shared:
    assert loader._SHM not in shared.path.parents and len(notes) == 1, (shared.path, notes)
    assert [shared.sample(number).sample_id for number in range(200)] == [f"s{number}" for number in range(200)]
    assert not list((loader._SHM / shared.path.parent.name).iterdir())
print(notes[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("checked", "no room"), ("blind", "the disk is full")])
def test_a_file_system_that_is_really_full(tmp_path: Path, how: str, said: str) -> None:
    (tmp_path / "shm").mkdir()
    with StoreWriter(tmp_path / "store", IDENTITY) as writer:
        writer.commit([make_sample(number, most=4000, wide=8) for number in range(200)])
    mounted = "mount -t tmpfs -o size=8m none $0"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted, tmp_path / "shm"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    program = [sys.executable, "-c", TINY, tmp_path / "store", tmp_path / "shm", how]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mounted}; exec "$@"', tmp_path / "shm", *program],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


# ------------------------------------------------------------------------------------------------------------ processes

# Each says a line when it is ready and ends with its standard input.
OWNER = """
import os
import sys
from pathlib import Path
from mopdctl.store import loader
from mopdctl.store.store import Store

if sys.argv[3] == "writing":
    def stuck(samples):
        print("stuck", flush=True)
        sys.stdin.read()
    loader.rows.payload_table = stuck
shared = loader.share(Store(Path(sys.argv[1])), run_id="run", folder=Path(sys.argv[2]))
if sys.argv[3] == "forks":
    if os.fork() == 0:
        sys.exit()  # as an owner would end
    os.wait()
print(shared.path, flush=True)
sys.stdin.read()
"""
WORKER = """
import sys
from pathlib import Path
from mopdctl.store import rows
from mopdctl.store.loader import Shared

if len(sys.argv) > 1:
    shared = Shared(Path(sys.argv[1]))
    print([rows.sample_crc(shared.sample(number)) for number in range(shared.rows)], flush=True)
else:
    print(flush=True)
sys.stdin.read()
"""


@contextmanager
def running(program: str, *arguments: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and what it said when it was ready. It is ended here if it did not end before."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            with suppress(BrokenPipeError):
                process.communicate()


def private_mib(process: subprocess.Popen[str]) -> float:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1024


@pytest.mark.slow
def test_four_workers_see_equal_data_and_have_next_to_no_memory_of_their_own(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", IDENTITY) as writer:
        writer.commit([make_sample(number, most=6000, wide=8) for number in range(800)])
        expected = writer.store.meta_table(["payload_crc"])["payload_crc"].to_pylist()
    with share(writer.store, run_id="run") as shared:
        assert (shared.path / "payload.arrow").stat().st_size > 60e6
        with (
            running(WORKER) as (idle, _),
            running(WORKER, shared.path) as (a, in_a),
            running(WORKER, shared.path) as (b, in_b),
            running(WORKER, shared.path) as (c, in_c),
            running(WORKER, shared.path) as (d, in_d),
        ):
            assert [json.loads(found) for found in (in_a, in_b, in_c, in_d)] == [expected] * 4
            above = [private_mib(worker) - private_mib(idle) for worker in (a, b, c, d)]
            assert max(above) < 20, above


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shares", "writing"])
def test_what_a_killed_owner_left_is_swept_and_what_a_living_one_has_is_not(
    store: Store, tmp_path: Path, how: str
) -> None:
    (tmp_path / "mopdctl-share-notes").mkdir()
    (tmp_path / "x.arrow").touch()
    before = sorted(tmp_path.iterdir())
    with running(OWNER, store.folder, tmp_path, how) as (owner, _):
        (left,) = set(tmp_path.iterdir()) - set(before)
        assert left.name.startswith(".") == (how == "writing")
        assert sweep(tmp_path) == []
        assert left.exists()
        if how == "shares":
            with running(WORKER, left) as (worker, _):
                worker.send_signal(signal.SIGKILL)
                worker.wait()
            assert sweep(tmp_path) == []
            assert left.exists()
        owner.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        assert left.exists()
        assert sweep(tmp_path) == [left]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_sharing_sweeps_first(store: Store, places: tuple[Path, Path]) -> None:
    for place in places:
        with running(OWNER, store.folder, place, "shares") as (owner, path):
            owner.kill()
        assert list(place.iterdir()) == [Path(path)]
    with share(store, run_id="run") as shared:
        assert list(places[0].iterdir()) == [shared.path]
        assert list(places[1].iterdir()) == []


@pytest.mark.slow
def test_a_normal_end_leaves_nothing_and_a_fork_does_not_end_its_owner(store: Store, tmp_path: Path) -> None:
    with running(OWNER, store.folder, tmp_path, "forks") as (_, path):
        assert list(tmp_path.iterdir()) == [Path(path)]
    assert list(tmp_path.iterdir()) == []
