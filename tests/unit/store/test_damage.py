"""Any byte of a store flipped, any file cut anywhere: it is said or it is harmless, never other data than was written.

Said: a MopdctlError, or a warning and the manifest before. Harmless: what is read is the truth, or, of the log, a part
of it from the beginning.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mopdctl.errors import MopdctlError
from mopdctl.records import Sample
from mopdctl.store.replay import LoggedSample, replay
from mopdctl.store.store import Store, StoreWriter
from mopdctl.store.verify import verify
from mopdctl.store.wal import Finish, Open, Tokens, WalWriter

Make = Callable[..., Sample]
Same = Callable[[Sample, Sample], bool]
IDENTITY = {"tokenizer": "t"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, make_sample: Make) -> Path:
    """Two commits, three manifests, a log of two samples in several frames."""
    rng = np.random.default_rng(0)
    wide = make_sample(
        1,
        length=2,
        teacher_topk_ids=rng.integers(0, 9, (2, 2)).astype(np.int32),
        teacher_topk_logprobs=-rng.random((2, 2)).astype(np.float32),
        teacher_hidden=rng.integers(0, 99, (2, 3)).astype(np.uint16),
        reward=1.0,
        verdict="ok",
        verifier="x/1",
    )
    folder = tmp_path_factory.mktemp("damage") / "s"
    with StoreWriter(folder, IDENTITY) as writer:
        writer.commit([wide, make_sample(2, length=3)])
        writer.commit([make_sample(3, length=2)])
    with WalWriter(folder / "wal", writer="rank-0", level="process", epoch=1, fence={}) as log:
        log.append([Open(s, f"w{s}", 1, np.array([7, 8], np.int32), {"domain": "d"}) for s in range(2)])
        for t in range(6):
            both = np.arange(2, dtype=np.uint32)
            at, ids = np.full(2, t, np.uint32), np.array([10 + t, 20 + t], np.int32)
            log.append([Tokens(0, both, at, ids, -ids.astype(np.float32))])
        log.append([Finish(1, "stop")])
    return folder


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    for at in range(len(data)):
        yield f"byte {at}", data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
    for at in range(len(data)):
        yield f"cut at {at}", data[:at]


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def read_store(folder: Path, truth: list[Sample], same: Same) -> bool:
    """Whether the damage is said. Asserts that what is read is the truth."""
    try:
        store = Store(folder)
        found = list(store.scan())
        ids = store.meta_table(["sample_id"])["sample_id"].to_pylist()
    except MopdctlError:
        return True
    assert all(same(a, b) for a, b in zip(found, truth, strict=False))
    assert ids == [s.sample_id for s in found]
    assert store.warnings or len(found) == len(truth)
    return bool(store.warnings)


def read_log(folder: Path, truth: dict[str, LoggedSample]) -> bool:
    """Whether the damage is said. Asserts that what is read is the beginning of the truth."""
    try:
        found = replay(folder / "wal")
    except MopdctlError:
        return True
    for sample_id, part in found.samples.items():
        whole, length = truth[sample_id], len(part.tokens)
        assert part.tokens.tolist() == whole.tokens.tolist()[:length]
        assert part.logprobs.tolist() == whole.logprobs.tolist()[:length]
        assert part.prompt_ids.tolist() == whole.prompt_ids.tolist()
        assert part.finish_reason is None or (part.finish_reason, length) == (whole.finish_reason, len(whole.tokens))
    return bool(found.notes)  # none if it was cut where a frame ends, as by a process that died there


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["manifest", "meta", "payload", "wal"])
def test_damage_anywhere_is_said_or_harmless(whole: Path, tmp_path: Path, same: Same, kind: str) -> None:
    truth, log = list(Store(whole).scan()), replay(whole / "wal").samples
    folder = tmp_path / "s"
    shutil.copytree(whole, folder)
    (path, *_) = files_of(folder / kind)[::-1]
    data = path.read_bytes()
    said = total = 0
    for what, broken in damaged(data):
        path.write_bytes(broken)
        try:
            found = read_log(folder, log) if kind == "wal" else read_store(folder, truth, same)
            # Now and then the slow look, which must see whatever a reader saw.
            if total % 37 == 0:
                verdict = verify(folder)
                assert verdict.problems or verdict.notes or not found
                assert kind not in ("meta", "payload") or verdict.problems
        except Exception as error:
            raise AssertionError(f"{path.relative_to(folder)}, {what}: {error!r}") from error
        assert found or kind in ("payload", "wal") or broken + b"\n" == data, what
        said, total = said + found, total + 1
    assert total == 2 * len(data)
    assert said > total / 2
    path.write_bytes(data)
    assert verify(folder).problems == []
