"""The only module that prints. stdout is the result; progress, notes and errors go to stderr."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any


def note(text: str) -> None:
    """One line for a human, on stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def result(text: str) -> None:
    """The result of a command, on stdout; of the processes that `torchrun` starts, the first one's alone."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)  # noqa: T201


def result_json(document: Any) -> None:
    """The result of a command as the one JSON document on stdout."""
    result(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2))


def show(document: dict[str, Any], *, as_json: bool) -> None:
    """A flat result: JSON, or one `key: value` line each, what is nested indented under its key."""
    result_json(document) if as_json else result("\n".join(_lines(document)))


def _lines(document: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_word(value)}"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "none"
    return {"None": "-", "True": "yes", "False": "no", "{}": "none"}.get(str(value), str(value))


@contextlib.contextmanager
def stdout_reserved() -> Iterator[None]:
    """Sends what libraries print, from Python or from C, to stderr, so that stdout holds the result alone."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


class Progress:
    """A progress line with rate and time left: redrawn in place on a terminal, else one plain line every 30 seconds."""

    def __init__(self, label: str, total: int | None, *, done: int = 0) -> None:
        """`total` is None where nobody knows it."""
        self._label, self._total, self._start_done = label, total, done
        self._start = self._shown = time.monotonic()
        self._live = sys.stderr.isatty()

    def update(self, done: int, detail: str = "") -> None:
        """Shows that `done` of the total are done; the last one is always shown."""
        now = time.monotonic()
        last = self._total is not None and done >= self._total
        if not last and now - self._shown < (0.1 if self._live else 30):
            return
        self._shown = now
        rate = (done - self._start_done) / max(now - self._start, 1e-9)
        if self._total is None:
            line = f"{self._label} {done}  {rate:.2f}/s  {detail}"
        else:
            left = f"{(self._total - done) / rate:.0f}s left" if rate > 0 else "-"
            line = f"{self._label} {done}/{self._total}  {rate:.2f}/s  {left}  {detail}"
        if self._live:
            print("\r\x1b[K" + line[:200], end="\n" if last else "", file=sys.stderr, flush=True)  # noqa: T201
        else:
            note(line)
