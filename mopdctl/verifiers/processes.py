"""Process trees as /proc shows them: who is in one, what it uses, and how to end it. Linux; standard library only."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Lets the kernel kill this process as soon as the thread of `parent` that started it is gone. Exits if it is."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends, so that none leaves its tree."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int, *, at_most: int | None = None) -> list[int]:
    """Process ids below `root`, zombies included; the search ends once there are more than `at_most`."""
    found: list[int] = []
    unseen = [root]
    while unseen and (at_most is None or len(found) <= at_most):
        children = _children(unseen.pop())
        found += children
        unseen += children
    return found


def _children(pid: int) -> list[int]:
    """Read from the lists that the kernel keeps: the cost is that of the tree, not of the machine."""
    children: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_bytes().split())
    except OSError:  # it has ended
        pass
    return children


def alive(pids: Collection[int]) -> dict[int, int]:
    """Process id to resident bytes, for those that are neither gone nor zombies. Shared pages count in each."""
    resident = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            size, pages = Path(f"/proc/{pid}/statm").read_bytes().split()[:2]
            if int(size):
                resident[pid] = int(pages) * _PAGE
    return resident


def kill_below(root: int, *, patience_s: float = 10.0) -> set[int]:
    """Kills every descendant of `root`, which has to adopt orphans, and returns them.

    All of them are stopped before any is killed: one that is stopped cannot fork, and a parent that is still there
    keeps its children in the tree. Waits `patience_s` for one that the kernel cannot end, as in a dead file system.
    """
    until = time.monotonic() + patience_s
    killed: set[int] = set()
    while time.monotonic() < until and (stopped := _stop_below(root)):
        _signal_all(stopped, signal.SIGKILL)
        killed |= stopped
        while alive(stopped) and time.monotonic() < until:  # until the kernel has taken it apart
            time.sleep(0.002)
    return killed


def _stop_below(root: int) -> set[int]:
    """Stops every descendant. The tree may grow meanwhile, so that each has to be looked at once and not in each round.

    A round over all of them comes only when there is nothing left to follow; it finds those that were just being born.
    """
    stopped: set[int] = set()
    while fresh := list(alive(descendants(root)).keys() - stopped):
        while fresh:
            pid = fresh.pop()
            if pid not in stopped:
                stopped.add(pid)
                _signal_all([pid], signal.SIGSTOP)
                fresh += _children(pid)
    return stopped


def kill_tree(root: int) -> set[int]:
    """Kills `root`, which has to adopt orphans, and every descendant. Returns them all."""
    _signal_all([root], signal.SIGSTOP)
    killed = kill_below(root) | {root}
    _signal_all([root], signal.SIGKILL)
    return killed


def _signal_all(pids: Collection[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def reap() -> None:
    """Collects children of this process that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
