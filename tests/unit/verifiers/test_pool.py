import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mopdctl.verifiers import Attempt, Limits, Verdict, VerdictState, VerifierPool
from mopdctl.verifiers.workers import attempt_from_json, attempt_to_json

CHECKS = """
    import os, pathlib, signal, subprocess, sys, time
    from mopdctl.verifiers.base import InvalidReferenceError, Outcome, ParseError, Verifier

    def equal(attempt): return Outcome(float(attempt.response == attempt.reference), "held against it", "a label")
    def hang(attempt):
        while True: pass
    def power(attempt): return 7 ** 7 ** 11
    def sleep(attempt): time.sleep(attempt.reference); return Outcome(1.0)
    def grow(attempt):
        kept = []
        while True: kept.append(b"x" * 1_000_000)
    def demand(attempt): return Outcome(float(len(b"x" * 10**13)))
    def talk(attempt): return Outcome(1.0, "x" * 200_000)
    def multiply(attempt):
        for _ in range(20): subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)
    def crash(attempt): os.kill(os.getpid(), signal.SIGSEGV)
    def leave(attempt): sys.exit(0)
    def raises(attempt): raise KeyError("gone")
    def unreadable(attempt): raise ParseError("no number")
    def unusable(attempt): raise InvalidReferenceError("no answer")
    def prints(attempt):
        print("\\0\\0\\0\\2{}" * 1000, flush=True); os.write(1, b"{}" * 1000); sys.stdin.read()
        return Outcome(1.0)
    def forgets(attempt):
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        return Outcome(1.0, str(child.pid))
    def environment(attempt): return Outcome(1.0, " ".join(sorted(os.environ)))
    def whereabouts(attempt): return Outcome(1.0, str(os.getpid()))
    def loaded(attempt): return Outcome(1.0, " ".join({"torch", "numpy", "transformers"} & set(sys.modules)))

    VERIFIERS = {name: Verifier(name, 7, check) for name, check in list(globals().items()) if callable(check)
                 and getattr(check, "__module__", "") == __name__}
    """


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checks")


@pytest.fixture(scope="module")
def checks(folder: Path) -> Iterator[str]:
    """The name of a module with the verifiers above."""
    (folder / "checks_of_the_pool.py").write_text(textwrap.dedent(CHECKS))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "checks_of_the_pool"


@pytest.fixture(scope="module")
def pool(checks: str) -> Iterator[VerifierPool]:
    limits = Limits(seconds=20, memory_mb=200, processes=10)
    with VerifierPool(1, limits, registry=checks) as pool:
        yield pool


def one(pool: VerifierPool, name: str, response: str = "", reference: Any = None) -> Verdict:
    return pool.check([(name, Attempt(response, reference))])[0]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.02)


def test_verdicts_come_in_order_with_name_and_version(pool: VerifierPool) -> None:
    verdicts = pool.check([("equal", Attempt(str(i), str(i % 3))) for i in range(10)])
    assert verdicts == [
        Verdict(VerdictState.OK, float(i == i % 3), "equal", 7, "held against it", "a label") for i in range(10)
    ]
    assert pool.check([]) == []


@pytest.mark.parametrize(
    ("name", "state", "detail"),
    [
        ("grow", VerdictState.TIMEOUT, "memory: stopped at 200 MiB"),
        ("demand", VerdictState.TIMEOUT, "memory: asked for more than the limit in one go"),
        ("multiply", VerdictState.TIMEOUT, "processes: stopped at 10 processes"),
        ("crash", VerdictState.INFRA_ERROR, "a worker of the verifiers ended with signal 11"),
        ("leave", VerdictState.INFRA_ERROR, "SystemExit: 0"),
        ("raises", VerdictState.INFRA_ERROR, "KeyError: 'gone'"),
        ("unreadable", VerdictState.PARSE_ERROR, "no number"),
        ("unusable", VerdictState.INVALID_REFERENCE, "no answer"),
    ],
)
def test_a_check_without_a_verdict_is_a_state_that_says_why(
    pool: VerifierPool, name: str, state: VerdictState, detail: str
) -> None:
    assert one(pool, name) == Verdict(state, None, name, 7, detail)
    assert one(pool, "equal", "a", "a").reward == 1.0


@pytest.mark.parametrize("name", ["hang", pytest.param("power", marks=pytest.mark.slow)])
def test_a_check_that_hangs_is_killed_at_its_limit(checks: str, name: str) -> None:
    # huggingface/Math-Verify #65, areal-project/AReaL #1426
    with VerifierPool(1, Limits(seconds=0.5, memory_mb=4000), registry=checks) as pool:
        started = time.monotonic()
        assert one(pool, name) == Verdict(VerdictState.TIMEOUT, None, name, 7, "time: stopped at 0.5 s")
        assert time.monotonic() - started < 10
        assert one(pool, "equal", "a", "a").reward == 1.0


def test_the_clock_of_a_check_does_not_run_while_it_waits(checks: str) -> None:  # PrimeIntellect-ai/verifiers #831
    with VerifierPool(1, Limits(seconds=1.0), registry=checks) as pool:
        verdicts = pool.check([("sleep", Attempt("", 0.2))] * 6)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 6


@pytest.mark.slow
def test_among_200_checks_at_once_none_is_lost_and_no_innocent_is_blamed(checks: str) -> None:
    bad = {13: "hang", 60: "crash", 61: "crash", 100: "grow", 101: "leave", 150: "talk", 151: "crash"}
    attempts = [(bad.get(i, "equal"), Attempt(str(i), str(i))) for i in range(200)]
    verdicts: list[Verdict | None] = [None] * 200
    limits = Limits(seconds=1.0, memory_mb=200)
    with VerifierPool(3, limits, registry=checks) as pool:

        def ask(start: int) -> None:  # from four threads
            verdicts[start::4] = pool.check(attempts[start::4])

        threads = [threading.Thread(target=ask, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    states = {"hang": "timeout", "grow": "timeout", "crash": "infra_error", "leave": "infra_error"}
    assert [(v.verifier, v.state) for v in verdicts if v] == [(n, states.get(n, "ok")) for n, _ in attempts]
    assert [v.reward for v in verdicts if v] == [None if n in states else 1.0 for n, _ in attempts]


def test_what_a_check_prints_or_reads_does_not_touch_the_conversation(pool: VerifierPool) -> None:
    assert [verdict.reward for verdict in pool.check([("prints", Attempt(""))] * 3)] == [1.0] * 3


def test_what_a_check_leaves_running_ends_with_it(pool: VerifierPool) -> None:
    child = int(one(pool, "forgets").detail)
    wait_until(lambda: gone(child))


def test_a_worker_knows_no_secret_and_loads_nothing_heavy(checks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with VerifierPool(1, registry=checks) as pool:
        assert "OPENAI_API_KEY" not in one(pool, "environment").detail.split()
        assert one(pool, "loaded").detail == ""


def test_a_check_whose_worker_was_killed_before_it_began_is_tried_again(pool: VerifierPool) -> None:
    first = int(one(pool, "whereabouts").detail)
    os.kill(first, signal.SIGKILL)
    second = one(pool, "whereabouts")
    assert second.state == VerdictState.OK
    assert int(second.detail) != first


@pytest.mark.slow
def test_a_worker_that_fails_to_start_is_tried_again_once(checks: str, folder: Path, tmp_path: Path) -> None:
    module = folder / "checks_that_fail.py"
    left = tmp_path / "failures"
    failing = f"""
import sys
if "-c" in sys.argv[0]:
    import pathlib
    left = pathlib.Path({str(left)!r})
    n = int(left.read_text())
    left.write_text(str(n - 1))
    if n > 0: raise RuntimeError("no luck")
"""
    module.write_text(f"{failing}\nfrom {checks} import VERIFIERS\n")
    left.write_text("1")
    with VerifierPool(1, registry="checks_that_fail") as pool:
        assert one(pool, "equal", "a", "a").reward == 1.0
    left.write_text("2")
    with VerifierPool(1, registry="checks_that_fail") as pool:
        detail = "a worker of the verifiers ended with exit code 1: RuntimeError: no luck"
        assert one(pool, "equal", "a", "a") == Verdict(VerdictState.INFRA_ERROR, None, "equal", 7, detail)
        assert one(pool, "equal", "a", "a").reward == 1.0


def test_an_unknown_verifier_is_an_error_before_anything_runs(pool: VerifierPool) -> None:
    with pytest.raises(KeyError, match="no_such"):
        pool.check([("equal", Attempt("a", "a")), ("no_such", Attempt("a"))])


def test_an_attempt_that_is_not_json_is_the_machinerys_fault(pool: VerifierPool) -> None:
    assert one(pool, "equal", "a", {1, 2}).detail == "TypeError: Object of type set is not JSON serializable"


def test_closing_ends_what_runs_and_refuses_what_comes(checks: str) -> None:
    before = len(workers_of(os.getpid()))
    pool = VerifierPool(1, registry=checks)
    verdicts: list[Verdict] = []
    asking = threading.Thread(
        target=lambda: verdicts.extend(pool.check([("hang", Attempt("")), ("hang", Attempt(""))]))
    )
    asking.start()
    wait_until(lambda: len(workers_of(os.getpid())) == before + 1)
    pool.close()
    asking.join(20)
    assert [v.state for v in verdicts] == [VerdictState.INFRA_ERROR] * 2
    assert {v.detail for v in verdicts} == {"the pool of verifiers was closed"}
    with pytest.raises(RuntimeError):
        one(pool, "equal")
    assert len(workers_of(os.getpid())) == before


def test_closing_starts_no_worker_for_what_still_waits(checks: str) -> None:
    pool = VerifierPool(1, registry=checks)
    verdicts: list[Verdict] = []
    asking = threading.Thread(target=lambda: verdicts.extend(pool.check([("hang", Attempt(""))] * 300)))
    asking.start()
    wait_until(lambda: len(pool._threads._threads) == 1)
    with mock.patch.object(pool, "_new_worker", wraps=pool._new_worker) as started:
        pool.close()
        asking.join(20)
        assert started.call_count <= 1
    assert [v.detail for v in verdicts] == ["the pool of verifiers was closed"] * 300


def test_a_fork_that_closes_a_pool_leaves_the_workers_alone(checks: str) -> None:
    with VerifierPool(1, registry=checks) as pool:
        worker = one(pool, "whereabouts").detail
        child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert one(pool, "whereabouts").detail == worker


def workers_of(pid: int) -> list[int]:
    """Workers of pools among the children of a process."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, thread.read_text().split()):
            if not gone(child) and b"mopdctl.verifiers.workers" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def test_workers_end_when_the_process_with_the_pool_is_killed(checks: str, folder: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from mopdctl.verifiers import Attempt, VerifierPool
VerifierPool(2, registry={checks!r}).check([("hang", Attempt("")), ("whereabouts", Attempt(""))])
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: len(workers_of(parent.pid)) == 2)
        workers = workers_of(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: all(map(gone, workers)))


def test_a_forked_process_is_told_that_the_pool_is_not_its_own(pool: VerifierPool, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="belongs to another process"):
        one(pool, "equal")


def test_an_attempt_is_the_same_on_the_other_side() -> None:
    attempt = Attempt(
        "text \ud83d\ude00",
        {"answer": [1, None, {"a": 2.5}]},
        ({"role": "user", "content": "x"},),
        ({"type": "function"},),
        {"name": "errands", "setup": {}},
        ({"role": "tool", "content": "y"}, {"role": "assistant", "content": "z"}),
    )
    assert attempt_from_json(attempt_to_json(attempt)) == attempt
    assert attempt_from_json(attempt_to_json(Attempt("x"))) == Attempt("x")
