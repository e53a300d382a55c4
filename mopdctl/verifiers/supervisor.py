"""Holds one untrusted program inside its limits. Runs in a process of its own, which `sandbox.run` starts.

    supervisor          watches the tree below it, pumps the pipes, ends it
    └── keeper          first process of the namespaces: when it ends, the kernel kills whatever else is in them
        └── program     another user, limits, then exec

Where there are no namespaces the tree is all there is: orphans are adopted by the supervisor, so that a daemon that
forks twice and opens a session of its own is still below it. Standard library only.
"""

import base64
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from mopdctl.verifiers import confine, processes

_TICK_S = 0.02
_PIECE = 1 << 16
_ENDED = "ended "
FOLDER = "mopdctl-sandbox-"
"""What the names of the folders begin with in which programs run, before the supervisor's process id."""
PASSED_ON = 3
"""The program's number for the file descriptor that it may be given."""


def main() -> None:
    """Reads one order (JSON) from stdin, runs it, writes one report (JSON) to stdout."""
    parent = int(sys.argv[1])
    order = json.load(sys.stdin.buffer)
    scratch = f"{order['folder']}/{FOLDER}{os.getpid()}-{os.urandom(8).hex()}"
    os.mkdir(scratch, 0o700)  # noqa: PTH102 - pathlib would come with what it needs itself
    try:
        report = _run(order, scratch, parent)
    except OSError as error:
        report = {"error": str(error)}
    finally:
        processes.kill_below(os.getpid())
        try:
            os.rmdir(scratch)  # noqa: PTH106
        except OSError:  # something is in it, and may be nested deeper than Python can follow
            os.spawnvp(os.P_WAIT, "rm", ["rm", "-rf", "--", scratch])
    sys.stdout.write(json.dumps(report))


def _run(order: dict[str, Any], scratch: str, parent: int) -> dict[str, Any]:
    processes.adopt_orphans()
    namespaces = order["namespaces"] and confine.unshare()
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "status")}
    supervisor, priority = os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)
    # A fork bomb shall not starve the one that ends it. A real-time priority would do less: whatever it waits for is
    # held by the others, who do not get their turn then.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    uid = confine.spare_user()
    keeper = os.fork()
    if keeper == 0:
        with _told_to(pipes["status"][1]):
            os.setpriority(os.PRIO_PROCESS, 0, priority)
            processes.adopt_orphans()
            processes.die_with(0 if namespaces else supervisor)
            _keep(order, scratch, namespaces, uid, pipes)
    for name, (read, write) in pipes.items():
        os.close(read if name == "stdin" else write)
    if order["passed_on"] is not None:
        os.close(order["passed_on"])
    stopped, texts = _watch(order, keeper, parent, namespaces, pipes)
    said = os.read(pipes["status"][0], _PIECE).decode(errors="replace")
    if said and not said.startswith(_ENDED):
        return {"error": said.partition(_ENDED)[0]}
    number, _, too_many = said.removeprefix(_ENDED).partition(" ")
    status = int(number or signal.SIGKILL)  # nothing was said: it was killed with all below it
    out_of_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    return {
        "returncode": os.waitstatus_to_exitcode(status),
        "stopped": stopped or too_many or ("time" if out_of_time else None),
        **{name: base64.b64encode(text[: order["output_bytes"]]).decode() for name, text in texts.items()},
    }


@contextlib.contextmanager
def _told_to(status: int) -> Iterator[None]:
    """For a forked child: never returns into the parent's code, and says what went wrong."""
    try:
        yield
    except BaseException as error:
        os.write(status, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def _keep(
    order: dict[str, Any], scratch: str, namespaces: bool, uid: int | None, pipes: dict[str, tuple[int, int]]
) -> None:
    """The keeper: starts the program, collects whatever ends below it, and ends with the program."""
    sealed = namespaces and confine.seal(order["keep"], uid, order["hidden"])
    closed = not sealed and any(map(confine.closed_to_others, [*order["keep"], order["folder"]]))
    alone = uid is not None or (namespaces and os.geteuid() != 0 and confine.counted_by_namespace())
    most = confine.most_processes(order["processes"], alone=alone)
    status = pipes["status"][1]
    program = os.fork()
    if program == 0:
        with _told_to(status):
            os.chdir("/tmp" if sealed else scratch)
            _become_program(order, pipes, uid, most, closed)
    os.closerange(0, status)
    os.closerange(status + 1, os.sysconf("SC_OPEN_MAX"))
    while True:
        pid, ended = os.wait()
        if pid == program:
            # A fork bomb may end at its first refusal, before anybody looked, and leave all the others.
            below = processes.descendants(int(os.readlink("/proc/self")), at_most=order["processes"])  # noqa: PTH115
            many = len(processes.alive(below)) > order["processes"]
            os.write(status, f"{_ENDED}{ended} {'processes' if many else ''}".encode())
            os._exit(0)


def _become_program(
    order: dict[str, Any], pipes: dict[str, tuple[int, int]], uid: int | None, most: int, may_read_all: bool
) -> None:
    os.setsid()
    for name, text in order["files"].items():
        with open(name, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            file.write(text)
        os.chmod(name, 0o444)  # noqa: PTH101
    if uid is not None:
        os.chown(".", uid, uid)
    # Pipes are numbered from 3 and the status comes last, so nothing is overwritten before it is where it belongs. What
    # Python opens is closed by exec.
    for number, end in enumerate((pipes["stdin"][0], pipes["stdout"][1], pipes["stderr"][1])):
        os.dup2(end, number)
    if order["passed_on"] not in (None, PASSED_ON):
        os.dup2(order["passed_on"], PASSED_ON)
        os.close(order["passed_on"])
    confine.limit_resources(seconds=order["seconds"], memory_mb=order["memory_mb"], processes=most)
    confine.drop_rights(uid, may_read_all=may_read_all)
    folder = os.getcwd()  # noqa: PTH109
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",  # numerical libraries reserve memory for each core of the machine
        "PYTHONHASHSEED": "0",  # the same program does the same twice
    }
    os.execve(order["argv"][0], order["argv"], environment)


def _watch(
    order: dict[str, Any], keeper: int, parent: int, namespaces: bool, pipes: dict[str, tuple[int, int]]
) -> tuple[str | None, dict[str, bytearray]]:
    """Feeds and reads until the keeper ends or a limit is passed; nothing is left below us then.

    Returns which limit it was and what the program wrote, of each output little more than `output_bytes`.
    """
    now = time.monotonic()
    until, next_look = now + order["seconds"], now
    stdin, stopped = pipes["stdin"][1], None
    to_write = memoryview(base64.b64decode(order["stdin"]))
    texts = {pipes[name][0]: bytearray() for name in ("stdout", "stderr")}
    poller = select.poll()
    for end in (stdin, *texts):
        os.set_blocking(end, False)
        poller.register(end, select.POLLOUT if end == stdin else select.POLLIN)
    ending = os.pidfd_open(keeper)
    poller.register(ending, select.POLLIN)
    while stopped is None:
        ready = [end for end, _ in poller.poll(_TICK_S * 1000)]
        for end in ready:
            if end == stdin:
                to_write = _feed(stdin, to_write)
                if not to_write:
                    poller.unregister(stdin)
                    os.close(stdin)
            elif end in texts and not _take(end, texts[end]):
                poller.unregister(end)
        if ending in ready:
            break
        if any(len(text) > order["output_bytes"] for text in texts.values()):
            stopped = "output"
        elif time.monotonic() > until:
            stopped = "time"
        elif time.monotonic() > next_look:
            stopped = _over(order, keeper)
            next_look = time.monotonic() + _TICK_S
        if os.getppid() != parent:
            raise OSError("whoever asked is gone")
    if namespaces:  # and with it all that is in them
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(ending, signal.SIGKILL)
    processes.kill_below(os.getpid())
    for end, text in texts.items():
        while len(text) <= order["output_bytes"] and _take(end, text):
            pass
        if len(text) > order["output_bytes"]:
            stopped = stopped or "output"
    return stopped, {name: texts[pipes[name][0]] for name in ("stdout", "stderr")}


def _over(order: dict[str, Any], keeper: int) -> str | None:
    """Which limit all that is below the keeper passes by now."""
    resident = processes.alive(processes.descendants(keeper, at_most=order["processes"]))
    if len(resident) > order["processes"]:
        return "processes"
    return "memory" if sum(resident.values()) > order["memory_mb"] * 2**20 else None


def _feed(end: int, data: memoryview) -> memoryview:
    """Writes what the pipe takes; returns what is left, nothing if nobody reads."""
    try:
        return data[os.write(end, data[:_PIECE]) :] if data else data
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


def _take(end: int, text: bytearray) -> bool:
    """Reads one piece; False if there is none: at the end, and where the pipe is empty for now."""
    try:
        piece = os.read(end, _PIECE)
    except BlockingIOError:
        return False
    text += piece
    return bool(piece)
