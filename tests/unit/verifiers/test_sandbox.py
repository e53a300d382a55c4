import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from mopdctl.verifiers import Limits
from mopdctl.verifiers.confine import closed_to_others
from mopdctl.verifiers.sandbox import Ran, SandboxError, _hidden, python, run

LIMITS = Limits(seconds=20, memory_mb=150, output_bytes=100_000, processes=12)


def running(mark: str) -> list[int]:
    """Processes whose command line holds `mark`. A fork has that of its parent."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def wait_until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.02)


def run_code(code: str, *, namespaces: bool = True, limits: Limits = LIMITS, stdin: bytes = b"") -> Ran:
    """Runs Python code and holds that nothing of it is left, no process and no folder."""
    mark, folder = uuid.uuid4().hex, Path(tempfile.mkdtemp())
    started = time.monotonic()
    with mock.patch("tempfile.tempdir", str(folder)):
        ran = run(python("-c", textwrap.dedent(code), mark), stdin=stdin, limits=limits, namespaces=namespaces)
    assert time.monotonic() - started < limits.seconds + 3
    assert running(mark) == []
    folder.rmdir()  # fails if something is in it
    return ran


both = pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "watched"])

# A bomb of 600 forks in all: what it can do to the machine if it gets away ends there.
BOMB = "import os\nr, w = os.pipe()\nos.write(w, b'x' * 600)\nwhile os.read(r, 1): os.fork()"
BOMB_OF_SESSIONS = """
    import os, time
    r, w = os.pipe()
    os.write(w, b"x" * 600)
    while os.read(r, 1):
        if os.fork() == 0:
            os.setsid()
    """
HOARD = "kept = []\nwhile True: kept.append(b'x' * 1_000_000)"


@both
@pytest.mark.parametrize(
    ("code", "stopped"),
    [
        pytest.param(BOMB, "processes", id="fork bomb"),
        pytest.param(BOMB_OF_SESSIONS, "processes", id="fork bomb in sessions of its own"),
        pytest.param(HOARD, "memory", id="allocation bomb"),
        pytest.param("import sys\nwhile True: sys.stdout.write('x' * 1000)", "output", id="flood of output"),
        pytest.param("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output", id="flood of errors"),
    ],
)
def test_a_program_that_uses_too_much_is_stopped_and_nothing_of_it_is_left(
    code: str, stopped: str, namespaces: bool
) -> None:
    ran = run_code(code, namespaces=namespaces)
    assert ran.stopped == stopped
    assert ran.returncode == -signal.SIGKILL or b"Resource temporarily unavailable" in ran.stderr
    assert max(len(ran.stdout), len(ran.stderr)) <= LIMITS.output_bytes


@both
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("while True: pass", id="endless loop"),
        pytest.param("import sys\nsys.stdin.read()\nimport time\ntime.sleep(60)", id="sleeper after its input"),
        pytest.param(
            """
            import signal, time
            for number in range(1, 65):
                try: signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError): pass
            time.sleep(60)
            """,
            id="deaf to signals",
        ),
    ],
)
def test_a_program_that_does_not_end_is_stopped_in_time(code: str, namespaces: bool) -> None:
    started = time.monotonic()
    ran = run_code(code, namespaces=namespaces, limits=Limits(seconds=0.2, memory_mb=150))
    assert ran.stopped == "time"
    assert time.monotonic() - started < 2.5


@both
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            "import os, time\nif os.fork() == 0: time.sleep(60)\nprint('done')", id="child with the pipes open"
        ),
        pytest.param(
            """
            import os, time
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(60)
                os._exit(0)
            os.wait()
            print("done")
            """,
            id="daemon",
        ),
        pytest.param(
            """
            import subprocess, sys
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *sys.argv], start_new_session=True)
            print("done")
            """,
            id="program in a session of its own",
        ),
    ],
)
def test_what_a_program_leaves_behind_ends_with_it(code: str, namespaces: bool) -> None:
    ran = run_code(code, namespaces=namespaces)
    assert (ran.returncode, ran.stdout, ran.stopped) == (0, b"done\n", None)


@both
@pytest.mark.slow
def test_memory_is_counted_over_all_processes(namespaces: bool) -> None:
    code = """
        import os, time
        for _ in range(5):
            if os.fork() == 0:
                kept = b"x" * 60_000_000
                time.sleep(60)
        time.sleep(60)
        """
    assert run_code(code, namespaces=namespaces).stopped == "memory"


def test_a_crash_is_told_by_its_code_or_signal_and_not_as_a_limit() -> None:
    ran = run_code("def f(): f()\nf()")
    assert (ran.returncode, ran.stderr.split()[-1]) == (1, b"exceeded")
    assert run_code("import sys\nsys.exit(7)").returncode == 7
    ran = run_code("import os\nos.abort()")
    assert (ran.returncode, ran.stopped) == (-signal.SIGABRT, None)
    ran = run_code("kept = b'x' * 10**13")
    assert (ran.returncode, ran.stopped) == (1, None)
    assert b"MemoryError" in ran.stderr


def test_output_up_to_the_limit_is_whole_and_one_byte_more_is_too_much() -> None:
    limits = Limits(seconds=20, output_bytes=100_000)
    ran = run_code("print('x' * 99_999)", limits=limits)
    assert (ran.stdout, ran.stopped) == (b"x" * 99_999 + b"\n", None)
    ran = run_code("print('x' * 100_000)", limits=limits)
    assert (ran.stdout, ran.stopped) == (b"x" * 100_000, "output")


def test_any_bytes_go_in_and_come_out() -> None:
    data = bytes(range(256)) * 2000
    copy = "import shutil, sys\nshutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"
    assert run_code(copy, stdin=data, limits=Limits(seconds=20)).stdout == data
    assert run_code("print('reads nothing')", stdin=data).stdout == b"reads nothing\n"


@both
def test_a_program_sees_no_secret_no_open_file_and_an_empty_folder(
    namespaces: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = """
        import os
        print(sorted(os.environ), os.environ["HOME"] == os.environ["TMPDIR"] == os.getcwd())
        print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1])  # the last is that of the listing
        print([name for name in os.listdir(".") if os.path.isfile(name)])
        print(os.getuid())
        """
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        lines = run_code(code, namespaces=namespaces).stdout.decode().splitlines()
    names = ["HOME", "LANG", "OMP_NUM_THREADS", "PATH", "PYTHONHASHSEED", "TMPDIR"]
    assert lines[:3] == [f"{names} True", "[0, 1, 2]", "[]"]
    assert int(lines[3]) != 0, "root's program has to run as somebody else"


@both
def test_a_program_cannot_change_files_of_others(namespaces: bool, tmp_path: Path) -> None:
    if os.geteuid() != 0 and not namespaces:
        pytest.skip("a user without namespaces runs programs as itself")
    target = tmp_path / "reward.txt"
    target.write_text("0")
    ran = run_code(f"open({str(target)!r}, 'w').write('1')", namespaces=namespaces)
    assert ran.returncode == 1
    assert target.read_text() == "0"


def has_namespaces() -> bool:
    return run(python("-c", "import os; print(os.getpid())"), limits=LIMITS).stdout == b"2\n"


@pytest.mark.skipif("not has_namespaces()", reason="this kernel gives no namespaces to this user")
def test_in_namespaces_there_is_no_network_and_nobody_else() -> None:
    code = """
        import os, socket
        print(sorted(name for _, name in socket.if_nameindex()))
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        except OSError as error:
            print(error.strerror)
        print(len([name for name in os.listdir("/proc") if name.isdigit()]))
        """
    assert run_code(code).stdout.decode().splitlines() == ["['lo']", "Network is unreachable", "2"]


@pytest.mark.skipif("not has_namespaces()", reason="this kernel gives no namespaces to this user")
def test_in_namespaces_the_working_folder_is_empty_and_the_interpreter_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A program shall not read what is expected of it where the prompts lie.
    here = Path(__file__).parent
    # Below /tmp, which the sandbox has for itself, not even the folder is there.
    listed = f"os.listdir({str(here)!r}) if os.path.isdir({str(here)!r}) else []"
    code = f"import json, os; print({listed}, os.path.exists({__file__!r}))"
    monkeypatch.chdir(here)
    assert run_code(code).stdout == b"[] False\n"
    monkeypatch.chdir(sys.prefix)
    assert run_code("import json, hypothesis").returncode == 0


def test_the_working_folder_stays_where_the_program_or_the_system_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment, elsewhere = tmp_path / "work" / ".venv", tmp_path / "python"
    for folder in (environment / "bin", elsewhere / "bin"):
        folder.mkdir(parents=True)
    (elsewhere / "bin" / "python").touch()
    program = environment / "bin" / "python"
    program.symlink_to("../../link/bin/python")
    (tmp_path / "work" / "link").symlink_to(elsewhere)
    keep = [str(environment), str(elsewhere)]
    hidden = {}
    for folder in (tmp_path / "work", environment, tmp_path, elsewhere, Path("/"), Path("/usr/bin")):
        monkeypatch.chdir(folder)
        hidden[folder] = _hidden(str(program), keep)
    assert set(hidden.values()) == {None}  # on its way the program passes `work/link`
    program.unlink()
    program.symlink_to(elsewhere / "bin" / "python")
    for folder, found in (
        (tmp_path / "work", True),
        (tmp_path, True),
        (environment, False),
        (elsewhere / "bin", False),
    ):
        monkeypatch.chdir(folder)
        assert _hidden(str(program), keep) == (str(folder) if found else None)


def test_the_interpreter_of_this_test_may_lie_in_a_folder_that_only_root_enters() -> None:
    folders = [closed_to_others(prefix) for prefix in (sys.base_prefix, sys.prefix)]
    assert run_code("import json, os; print(os.getuid() != 0)").stdout.split() == [b"True"], folders


@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("parent", ["/tmp", "/var/tmp"])
def test_an_environment_may_lie_below_a_folder_of_temporary_files(parent: str, mode: int) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        Path(folder).chmod(mode)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        code = "from mopdctl.verifiers.sandbox import python, run; print(run(python('-c', 'import os; print(os.sep)')))"
        modules = os.pathsep.join(filter(None, sys.path))
        ran = subprocess.run(
            [f"{folder}/venv/bin/python", "-c", code],
            env={**os.environ, "PYTHONPATH": modules},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "stdout=b'/\\n'" in ran.stdout, ran.stderr


def test_a_program_that_is_not_there_is_an_error_of_the_caller() -> None:
    with pytest.raises(SandboxError, match="could not start /no/such/program: FileNotFoundError"):
        run(["/no/such/program"], limits=LIMITS)


@pytest.mark.slow
def test_a_folder_nested_deeper_than_python_follows_is_removed() -> None:
    ran = run_code("import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')", namespaces=False)
    assert ran.returncode == 0


def test_it_runs_in_any_thread() -> None:  # huggingface/Math-Verify #50, #55; huggingface/trl #5281
    found: list[Ran] = []
    threads = [
        threading.Thread(target=lambda: found.append(run(python("-c", "print(1)"), limits=LIMITS))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ran.stdout for ran in found] == [b"1\n"] * 3


@both
def test_a_program_ends_when_whoever_asked_for_it_is_killed(namespaces: bool) -> None:
    mark = uuid.uuid4().hex
    code = f"""
from mopdctl.verifiers.sandbox import python, run
code = "import os, time; os.fork(); time.sleep(60)"
run(python("-c", code, "mark" + {mark[:16]!r} + {mark[16:]!r}), namespaces={namespaces})
"""
    caller = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: len(running("mark" + mark)) >= 2)
    finally:
        caller.kill()
        caller.wait()
    wait_until(lambda: running("mark" + mark) == [])


@pytest.mark.parametrize("changes", [{"seconds": 0}, {"memory_mb": -1}, {"processes": 0}, {"seconds": float("nan")}])
def test_a_limit_has_to_be_positive(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} is .*; a limit has to be positive"):
        Limits(**changes)  # type: ignore[arg-type]
