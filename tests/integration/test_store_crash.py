"""The plug is pulled at every step of a commit, a compaction and a repair: before it or after it, never in between.

A step is a call into `mopdctl.store.disk`. Each run dies at one of them, by `os._exit`, so that nothing is cleaned up.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ZYGOTE = r"""
import json, os, sys, traceback
from dataclasses import replace
from pathlib import Path
import numpy as np
from mopdctl.records import Sample
from mopdctl.store import compact, disk, repair, store, verify, wal

folder, what = Path(sys.argv[1]), sys.argv[2]
IDENTITY = {"tokenizer": "t"}
NAMES = [n for n in ("make_folder", "write_file", "sync_file", "rename", "publish", "remove", "sync_folder")]

def sample(i):
    rng = np.random.default_rng(i)
    tokens = rng.integers(0, 99, 8 + i).astype(np.int32)
    return Sample(f"s{i}", f"p{i}", f"p{i}", 0, "d", "t", 0, 0, tokens, 4, np.arange(8 + i) >= 4,
                  -rng.random(4 + i).astype(np.float32), "stop")

def arm(deadly, after):
    count = 0
    for name in NAMES:
        real = getattr(disk, name)
        def step(*args, real=real, **kwargs):
            nonlocal count
            count += 1
            if count == deadly and not after:
                os._exit(9)
            found = real(*args, **kwargs)
            if count == deadly:
                os._exit(9)
            return found
        setattr(disk, name, step)

def child(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def prepare(place):
    with store.StoreWriter(place, IDENTITY) as writer:
        for i in range(3):
            writer.commit([sample(2 * i), sample(2 * i + 1)])
        victim = writer.store.manifest.shards[1].payload.path
    if what == "repair":
        path = place / victim
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 0xFF
        path.write_bytes(data)

def act(place):
    if what == "create":
        store.StoreWriter(place, IDENTITY).close()
        return
    if what == "repair":
        repair.repair(place)
        return
    with store.StoreWriter(place, IDENTITY) as writer:
        if what == "commit":
            writer.commit([sample(6), sample(7)])
        else:
            compact.compact(writer)

def ids(place):
    return sorted(s.sample_id for s in store.Store(place).scan())

def check(place):
    known = {f"s{i}": sample(i) for i in range(8)}
    if what == "create":
        act(place)
        assert ids(place) == []
        return
    if what == "repair":
        act(place)
        assert not verify.verify(place).problems
        found = ids(place)
        assert {"s0", "s1", "s4", "s5"} <= set(found) <= {f"s{i}" for i in range(6)}, found
    else:
        before = ids(place)
        allowed = [[f"s{i}" for i in range(6)], [f"s{i}" for i in range(8)]][: 2 if what == "commit" else 1]
        assert before in allowed, before
        act(place)
        assert ids(place) == allowed[-1]
        assert not verify.verify(place).problems
    for found in store.Store(place).scan():
        assert found.tokens.tobytes() == known[found.sample_id].tokens.tobytes()
    assert not list((place / "_staging").iterdir())

points, deadly = 0, 0
while True:
    deadly += 1
    codes = []
    for after in (False, True):
        place = folder / f"{what}-{deadly}-{after}"
        if what != "create":
            assert child(lambda: prepare(place)) == 0
        code = child(lambda: (arm(deadly, after), act(place)))
        assert code in (0, 9), code
        assert child(lambda: check(place)) == 0, (what, deadly, after)
        codes.append(code)
        points += code == 9
    if codes == [0, 0]:
        break
print(json.dumps(points))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "at_least"), [("create", 10), ("commit", 20), ("compact", 20), ("repair", 20)])
def test_a_process_that_dies_at_any_step_leaves_a_whole_store(tmp_path: Path, what: str, at_least: int) -> None:
    done = subprocess.run([sys.executable, "-c", ZYGOTE, tmp_path, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) >= at_least
