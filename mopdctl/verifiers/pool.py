"""Checks in processes that can be killed: one that hangs, eats memory or crashes takes nothing else with it."""

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Verdict, VerdictState, check_depth
from mopdctl.verifiers.limits import LimitError, Limits, passed_limit
from mopdctl.verifiers.processes import alive, descendants
from mopdctl.verifiers.sandbox import end_tree
from mopdctl.verifiers.workers import LENGTH, attempt_to_json

__all__ = ["Limits", "VerifierPool"]

_START_S = 120.0
"""How long a worker may take to load the verifiers. A machine that is busy with training is slow at that."""
_CLOSED = "the pool of verifiers was closed"
_LOOK_S = 0.1
"""How often a worker's memory and processes are looked at."""
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME")
"""What a worker is told of the environment: no keys, since what it runs may find a way to read them."""


class WorkerLostError(Exception):
    """Raised where a worker ended without a verdict. The message says how."""


class NotStartedError(WorkerLostError):
    """Raised where it ended before the check began, so that the check had no part in it and can be tried again."""


class VerifierPool:
    """Runs checks in worker processes, each with its limits. Any thread may use it; no signals are used.

    A check that passes a limit is a `timeout` that says which; one whose worker dies is an `infra_error`. Neither
    touches a neighbour. Use it as a context manager, or `close` it; its workers die with this process in any case.
    """

    def __init__(
        self, workers: int | None = None, limits: Limits | None = None, *, registry: str = "mopdctl.verifiers.registry"
    ) -> None:
        """Starts nothing yet. `workers` defaults to one a core; `registry` is the module whose VERIFIERS are run."""
        self.limits = limits or Limits()
        self._registry = registry
        self._verifiers = importlib.import_module(registry).VERIFIERS
        self._owner = os.getpid()
        self._idle: list[_Worker] = []
        self._closing = threading.Event()
        self._submitting = threading.Lock()
        # A worker dies with the thread that started it, and the threads of an executor live as long as it does.
        self._threads = ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "verifiers")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers. A check that still runs or waits becomes an `infra_error`. In a fork it does nothing."""
        if os.getpid() != self._owner:
            return
        self._closing.set()
        with self._submitting:  # checks are taken all or none
            self._threads.shutdown(wait=False)
        self._threads.shutdown()
        while self._idle:
            self._idle.pop().end()

    def check(self, attempts: Iterable[tuple[str, Attempt]]) -> list[Verdict]:
        """A verdict for each (verifier's name, attempt), in order.

        Raises KeyError for an unknown verifier before anything runs, and RuntimeError if the pool is closed or this
        process is a fork of the one that made it.
        """
        if os.getpid() != self._owner:
            raise RuntimeError("this pool of verifiers belongs to another process; make one in each")
        named = [(self._verifiers[name], attempt) for name, attempt in attempts]
        with self._submitting:
            waiting = [self._threads.submit(self._judge, verifier.name, attempt) for verifier, attempt in named]
        try:
            said = [future.result() for future in waiting]
        finally:  # an interrupt shall not leave the rest in the queue
            for future in waiting:
                future.cancel()
        return [
            Verdict(state, reward, verifier.name, verifier.version, detail, label)
            for (verifier, _), (state, reward, detail, label) in zip(named, said, strict=True)
        ]

    def _judge(self, name: str, attempt: Attempt) -> tuple[VerdictState, float | None, str, str]:
        """Runs in a thread of the pool, one check at a time. Never raises: a thread has nobody to tell."""
        try:
            if self._closing.is_set():
                raise WorkerLostError(_CLOSED)
            check_depth(attempt)  # before JSON runs out of stack
            request = json.dumps({"name": name, "attempt": attempt_to_json(attempt)}).encode()
            try:
                said = self._check_in(self._idle_worker() or self._new_worker(), request)
            except NotStartedError:
                said = self._check_in(self._new_worker(), request)
            return VerdictState(said["state"]), said["reward"], said["detail"], said["label"]
        except InvalidReferenceError as error:
            return VerdictState.INVALID_REFERENCE, None, str(error), ""
        except LimitError as error:
            return VerdictState.TIMEOUT, None, str(error), ""
        except WorkerLostError as error:
            return VerdictState.INFRA_ERROR, None, str(error), ""
        except Exception as error:  # an attempt that is not JSON, a machine without processes to spare
            return VerdictState.INFRA_ERROR, None, f"{type(error).__name__}: {error}", ""

    def _idle_worker(self) -> "_Worker | None":
        try:
            return self._idle.pop()
        except IndexError:  # asking first would race with the other threads
            return None

    def _new_worker(self) -> "_Worker":
        return _Worker(self._registry, self.limits, self._closing)

    def _check_in(self, worker: "_Worker", request: bytes) -> dict[str, Any]:
        said = worker.check(request)
        self._idle.append(worker)
        return said


class _Worker:
    """This side of one worker process. Whatever goes wrong ends it."""

    def __init__(self, registry: str, limits: Limits, closing: threading.Event) -> None:
        """Raises NotStartedError if it does not come up."""
        self._limits, self._closing = limits, closing
        self._unread = bytearray()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        start = "from mopdctl.verifiers.workers import main; main()"
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
        environment["TMPDIR"] = tempfile.gettempdir()
        environment["OMP_NUM_THREADS"] = "1"  # there is one worker a core
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", start, str(os.getpid()), registry, str(limits.memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._replies = self._process.stdout.fileno()
        self._poller = select.poll()
        self._poller.register(self._replies, select.POLLIN)
        with self._or_end():
            self._next(time.monotonic() + _START_S)

    def check(self, request: bytes) -> dict[str, Any]:
        """The worker's verdict. Raises LimitError, WorkerLostError, NotStartedError if the check had no part in it."""
        with self._or_end():
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(LENGTH.pack(len(request)) + request)
            except BrokenPipeError:
                raise NotStartedError(self._how_it_ended()) from None
            self._next(time.monotonic() + _START_S)
            try:
                return self._next(time.monotonic() + self._limits.seconds, watched=True)
            except NotStartedError as error:
                raise WorkerLostError(str(error)) from None

    def end(self) -> None:
        """Kills the process and all below it."""
        if self._process.poll() is None:
            end_tree(self._process.pid)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @contextlib.contextmanager
    def _or_end(self) -> Any:
        try:
            yield
        except BaseException:
            self.end()
            raise

    def _next(self, until: float, *, watched: bool = False) -> dict[str, Any]:
        """The next message. `watched` is a check: the limits hold. What has arrived counts, however late it is read."""
        looked = time.monotonic()
        while True:
            message = self._message()
            if message is not None:
                return message
            now = time.monotonic()
            if self._closing.is_set():
                raise WorkerLostError(_CLOSED)
            if now > until:
                if watched:
                    raise LimitError(passed_limit("time", self._limits))
                raise NotStartedError(f"a worker of the verifiers did not answer within {_START_S:g} s")
            if watched and now > looked + _LOOK_S:
                self._look()
                looked = now
            if self._poller.poll(max(0.0, min(_LOOK_S, until - now)) * 1000 + 1):
                piece = os.read(self._replies, 1 << 16)
                if not piece:
                    raise NotStartedError(self._how_it_ended())
                self._unread += piece

    def _message(self) -> dict[str, Any] | None:
        if len(self._unread) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
        if len(self._unread) < end:
            return None
        message: dict[str, Any] = json.loads(self._unread[LENGTH.size : end])
        del self._unread[:end]
        return message

    def _look(self) -> None:
        """Raises LimitError if the worker and all below it use more than they may."""
        resident = alive([self._process.pid, *descendants(self._process.pid)])
        if sum(resident.values()) > self._limits.memory_mb * 2**20:
            raise LimitError(passed_limit("memory", self._limits))
        if len(resident) > self._limits.processes:
            raise LimitError(passed_limit("processes", self._limits))

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"a worker of the verifiers ended with {how}" + (f": {lines[-1]}" if lines else "")
