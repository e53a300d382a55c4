"""A compaction changes nothing but the number of files; a summary says what is there in figures and in words."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Sample
from mopdctl.store import manifest as manifests
from mopdctl.store import schema, summary, wal
from mopdctl.store.compact import compact
from mopdctl.store.parquet import GroupReader
from mopdctl.store.store import Store, StoreWriter
from mopdctl.store.summary import summarize, text
from mopdctl.store.verify import verify
from mopdctl.store.wal import Finish, Open, Tokens, WalWriter

Make = Callable[..., Sample]
Same = Callable[[Sample, Sample], bool]
IDENTITY = {"tokenizer": "t", "command": "test"}
COMMIT = 40


@pytest.fixture(scope="module")
def samples(make_sample: Make) -> list[Sample]:
    rng = np.random.default_rng(0)
    full = make_sample(
        900,
        length=3,
        sample_id="雪/0@0",
        behavior_logprobs=np.array([-0.0, -1.5, -2.0], np.float32),
        teacher_topk_ids=rng.integers(0, 99, (3, 2)).astype(np.int32),
        teacher_topk_logprobs=-rng.random((3, 2)).astype(np.float32),
        teacher_hidden=rng.integers(0, 2**16, (3, 4)).astype(np.uint16),
        reward=0.25,
        verdict="ok",
        verifier="exact_match/1",
        verdict_label="correct",
        rewards=np.array([0.25], np.float32),
        attempt=2,
    )
    return [*(make_sample(i, scored=i % 4 > 0) for i in range(150)), full]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> Path:
    folder = tmp_path_factory.mktemp("store") / "s"
    with StoreWriter(folder, IDENTITY) as writer:
        for start in range(0, len(samples), COMMIT):
            writer.commit(samples[start : start + COMMIT])
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Four commits."""
    shutil.copytree(whole, tmp_path / "s")
    return tmp_path / "s"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# -------------------------------------------------------------------------------------------------------- compaction


def test_samples_and_their_order_stay(folder: Path, samples: list[Sample], same: Same) -> None:
    rows = Store(folder).meta().drop(schema.LOCATION[:3]).to_dicts()
    with StoreWriter(folder, IDENTITY) as writer:
        assert compact(writer) == (4, 1)
        found = list(writer.store.scan())
        assert writer.store.manifest.identity == IDENTITY
        assert writer.store.manifest.tokens == sum(len(s.tokens) for s in samples)
    assert all(same(a, b) for a, b in zip(found, samples, strict=True))
    assert Store(folder).meta().drop(schema.LOCATION[:3]).to_dicts() == rows
    verdict = verify(folder)
    assert (verdict.problems, verdict.samples, verdict.shards) == ([], len(samples), 1)


def test_a_row_number_names_the_same_sample_as_before(folder: Path, samples: list[Sample], same: Same) -> None:
    # Plans hold row numbers.
    with StoreWriter(folder, IDENTITY) as writer:
        compact(writer)
    numbers = [150, 0, 41, 39, 120]
    assert all(same(a, samples[i]) for a, i in zip(Store(folder).read(numbers), numbers, strict=True))


def test_a_reader_that_was_there_before_still_reads(folder: Path, samples: list[Sample], same: Same) -> None:
    fresh, begun = Store(folder), Store(folder)
    half = begun.scan()
    first = [next(half) for _ in range(50)]
    with StoreWriter(folder, IDENTITY) as writer:
        compact(writer)
        writer.commit(samples[:1])  # is there already
        assert len(writer.store.manifest.shards) == 1
    StoreWriter(folder, IDENTITY).close()  # sweeps
    assert all(same(a, b) for a, b in zip([*first, *half], samples, strict=True))
    assert all(same(a, b) for a, b in zip(fresh.scan(), samples, strict=True))
    assert len(fresh.meta()) == len(samples)
    assert same(fresh.read([149])[0], samples[149])


def test_with_nothing_to_merge_nothing_is_written(folder: Path) -> None:
    with StoreWriter(folder, IDENTITY) as writer:
        compact(writer)
        before, number = files(folder), writer.store.manifest.number
        assert compact(writer) == (1, 1)
        assert writer.store.manifest.number == number
        assert compact(writer, shard_tokens=1) == (1, 1)
    assert files(folder) == before
    empty = folder.with_name("empty")
    with StoreWriter(empty, IDENTITY) as writer:
        assert compact(writer) == (0, 0)
    assert manifests.numbers(empty) == [0]


def test_no_shard_grows_beyond_the_limit(folder: Path, samples: list[Sample], same: Same) -> None:
    sizes = [shard.tokens for shard in Store(folder).manifest.shards]
    for limit in (1, max(sizes) - 1, sizes[0] + sizes[1] - 1, sizes[0] + sizes[1], sum(sizes) - 1, sum(sizes)):
        place = folder.with_name(str(limit))
        shutil.copytree(folder, place)
        old = Store(place).manifest.shards
        with StoreWriter(place, IDENTITY) as writer:
            before, after = compact(writer, shard_tokens=limit)
            made = writer.store.manifest.shards
        assert (before, after) == (4, len(made))
        assert all(shard.tokens <= limit or shard in old for shard in made), limit
        merged = [a.tokens + b.tokens for a, b in pairwise(made)]
        assert all(tokens > limit for tokens in merged), f"{limit}: two neighbours would fit into one shard"
        assert all(same(a, b) for a, b in zip(Store(place).scan(), samples, strict=True))


def test_a_shard_that_stays_is_neither_read_nor_written(folder: Path, samples: list[Sample]) -> None:
    first, *_ = Store(folder).manifest.shards
    (folder / first.payload.path).write_bytes(b"")
    with StoreWriter(folder, IDENTITY) as writer:
        sizes = [shard.tokens for shard in writer.store.manifest.shards]
        assert compact(writer, shard_tokens=max(sizes[0], sum(sizes[2:]))) == (4, 3)
        assert writer.store.manifest.shards[0] == first


def test_row_groups_stay_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "PAYLOAD_GROUP_ROWS", 16)
    with StoreWriter(folder, IDENTITY) as writer:
        compact(writer)
        (shard,) = writer.store.manifest.shards
    assert GroupReader(folder / shard.payload.path, schema.PAYLOAD).num_groups == -(-151 // 16)


def test_a_damaged_store_is_not_compacted(folder: Path) -> None:
    path = folder / Store(folder).manifest.shards[1].payload.path
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 0xFF
    path.write_bytes(data)
    before = files(folder)
    with StoreWriter(folder, IDENTITY) as writer, pytest.raises(MopdctlError, match="run `mopdctl store verify`"):
        compact(writer)
    assert files(folder) == before


def test_a_compaction_without_room_is_one_line_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    before = files(folder)
    with StoreWriter(folder, IDENTITY) as writer:
        with monkeypatch.context() as patch:
            patch.setattr("mopdctl.store.disk.sync_file", full)
            with pytest.raises(InputError, match="the disk is full or a size limit is reached; make room"):
                compact(writer)
        assert files(folder) == before
        assert compact(writer) == (4, 1)


# ------------------------------------------------------------------------------------------------------------ summary


def test_a_summary_counts_what_is_there(whole: Path, samples: list[Sample]) -> None:
    found = summarize(Store(whole))
    assert found["samples"] == len(samples)
    assert found["tokens"] == sum(len(s.tokens) for s in samples)
    assert found["loss_tokens"] == sum(int(s.loss_mask.sum()) for s in samples)
    assert found["bytes"] == sum(p.stat().st_size for k in ("meta", "payload") for p in (whole / k).iterdir())
    assert (found["commit"], found["files"], found["resumed"], found["warnings"]) == (4, 8, 1, [])
    assert found["policy_versions"] == [0, 90]
    assert found["finish_reasons"] == {r: sum(s.finish_reason == r for s in samples) for r in ("length", "stop")}
    assert [(g["domain"], g["teacher_id"]) for g in found["groups"]] == [("code", "c"), ("math", "m")]
    for group in found["groups"]:
        mine = [s for s in samples if s.domain == group["domain"]]
        lengths = [len(s.response_ids) for s in mine]
        assert group["samples"] == group["logprobs_of"] == len(mine)
        assert group["prompt_length"] == pytest.approx(np.mean([s.prompt_length for s in mine]), abs=0.05)
        assert group["response_length"] == {
            "mean": round(float(np.mean(lengths)), 1),
            "p50": int(np.median(lengths)),
            "p95": int(np.quantile(lengths, 0.95)),
            "max": max(lengths),
        }
        cut = sum(s.finish_reason == "length" for s in mine)
        assert group["truncated_pct"] == pytest.approx(100 * cut / len(mine), abs=0.05)
        behavior = np.concatenate([s.behavior_logprobs for s in mine])
        assert group["behavior_logprob"] == pytest.approx(float(behavior.mean()), abs=1e-4)
        scored = [(s.teacher_logprobs, s.behavior_logprobs) for s in mine if s.teacher_logprobs is not None]
        gaps = np.concatenate([teacher - student for teacher, student in scored])
        assert group["teacher_minus_behavior"] == pytest.approx(float(gaps.mean()), abs=1e-4)
    assert [(g["reward"], g["rewarded_pct"]) for g in found["groups"]] == [(None, None), (0.25, 1.3)]
    assert (found["verdicts"], found["verifiers"]) == ({"ok": 1, "unjudged": 150}, {"exact_match/1": 1})
    assert "verdicts: ok 1, unjudged 150 (by exact_match/1)" in text(found).split("\n")


def test_the_text_of_a_summary_is_a_table_with_its_legend(tmp_path: Path, make_sample: Make) -> None:
    half = np.full(2, -0.5, np.float32)
    made = [
        make_sample(i, length=2, behavior_logprobs=half, teacher_logprobs=half / 2, finish_reason=reason, attempt=i + 1)
        for i, reason in enumerate(["stop", "length"])
    ]
    with StoreWriter(tmp_path / "s", IDENTITY) as writer:
        writer.commit(made)
        found = summarize(writer.store)
    prompts = [f"{s.prompt_length:.1f}" for s in made]
    lines = text({**found, "store": "rollouts/s", "bytes": 1234}).split("\n")
    assert lines == [
        "rollouts/s, made by mopdctl test (commit 1)",
        f"2 samples, {sum(len(s.tokens) for s in made)} tokens (4 with loss), 1.2 kB in 2 files",
        "1 of them were interrupted and went on from their last token",
        "sampled by policy version 0",
        "endings: length 1, stop 1",
        "",
        "domain  teacher  samples  prompt  mean  median  p95  max  truncated %  student  teacher    gap",
        f"code    c              1  {prompts[1]:>6}   2.0       2    2    2        100.0   -0.500   -0.250  0.250",
        f"math    m              1  {prompts[0]:>6}   2.0       2    2    2          0.0   -0.500   -0.250  0.250",
        "",
        "prompt       mean length of the prompts, in tokens",
        "mean .. max  lengths of the answers, in tokens",
        "truncated %  answers that their token budget ended",
        "student      mean log-probability of a sampled token under the student that sampled it, in nats",
        "teacher      the same under its teacher",
        "gap          teacher - student; at temperature 1 an estimate of -KL(student || teacher)",
    ]


def test_a_text_shows_no_column_that_nothing_stands_in(tmp_path: Path, make_sample: Make) -> None:
    judged = {"reward": 0.5, "verdict": "ok", "verifier": "x/1"}
    with StoreWriter(tmp_path / "s", {"tokenizer": "t"}) as writer:
        writer.commit([make_sample(1, scored=False, domain="a\x1b[31m\nb", teacher_id="", **judged)])
        found = text(summarize(writer.store))
    assert "made by" not in found
    assert "teacher -" not in found
    (head,) = (line for line in found.split("\n") if line.startswith("domain"))
    assert head.split()[-4:] == ["student", "rewarded", "%", "reward"]
    assert "\x1b" not in found
    (row,) = (line for line in found.split("\n") if line.startswith("a\N{REPLACEMENT CHARACTER}[31m"))
    assert row.split()[1] == "-"


def test_log_probabilities_of_a_part_are_said_to_be_that(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "SAMPLED_ROWS", 10)
    found = summarize(Store(whole))
    assert [g["logprobs_of"] for g in found["groups"]] == [10, 10]
    assert "Log-probabilities are those of 20 of the 151 samples, evenly spread." in text(found)


def test_an_empty_store_has_a_summary(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "s", IDENTITY).close()
    found = summarize(Store(tmp_path / "s"))
    assert (found["samples"], found["groups"], found["policy_versions"]) == (0, [], None)
    assert "0 samples" in text(found)


def log(folder: Path, sample_ids: list[str]) -> Path:
    with WalWriter(folder / "wal", writer="rank-0", level="process", epoch=1, fence={}) as writer:
        prompt = np.array([7], np.int32)
        writer.append([Open(slot, name, 1, prompt, {}) for slot, name in enumerate(sample_ids)])
        zero = np.zeros(1, np.uint32)
        writer.append([Tokens(0, zero, zero, np.array([5], np.int32), np.zeros(1, np.float32))])
        writer.append([Finish(0, "stop")])
    return next((folder / "wal").iterdir())


def test_what_waits_in_the_log_is_counted_once(folder: Path, samples: list[Sample]) -> None:
    log(folder, [samples[0].sample_id, "new", "newer"])
    found = summarize(Store(folder))
    assert found["waiting_in_log"] == 2
    assert "2 more wait in the log; the same command goes on with them" in text(found)


def test_a_damaged_log_hides_nothing_of_the_store(folder: Path, samples: list[Sample]) -> None:
    path = log(folder, ["new"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    found = summarize(Store(folder))
    assert (found["samples"], found["waiting_in_log"]) == (len(samples), None)
    (warning,) = found["warnings"]
    assert warning.startswith(f"{path}: damaged at offset ")
    assert warning.endswith("; run `mopdctl store repair`")


def test_a_log_of_a_newer_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(wal, "VERSION", 2)
        log(folder, ["new"])
    with pytest.raises(InputError, match="a token log of version 2"):
        summarize(Store(folder))


def test_a_damaged_newest_manifest_is_a_warning(folder: Path) -> None:
    manifests.manifest_path(folder, 4).write_bytes(b"")
    found = summarize(Store(folder))
    assert found["samples"] == 3 * COMMIT
    assert found["warnings"] == Store(folder).warnings
    assert len(found["warnings"]) == 1
