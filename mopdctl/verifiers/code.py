"""Programs: a response passes if its code passes every test, each in a sandbox."""

import ast
import json
import re
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome
from mopdctl.verifiers.fences import without_reasoning
from mopdctl.verifiers.limits import LimitError, Limits, passed_limit
from mopdctl.verifiers.sandbox import Ran, python, run

_LIMITS = Limits(seconds=5.0, memory_mb=512, output_bytes=1 << 20, processes=16)
_MOST_SECONDS = 3600.0
_FENCE = re.compile(r"(`{3,}+|~{3,}+)\s*+([^\s`]*+)[^`]*+")
_PYTHON = ("python", "py", "python3")


def code(attempt: Attempt) -> Outcome:
    """1 if the program of the response (see `extract_code`) passes every test, else 0.

    `reference["tests"]` holds `{"stdin": ..., "expected": ...}`: what the program prints, with blanks at the ends of
    lines and empty lines at the end of the text left out, and its exit code is 0; or `{"assert": ...}`: Python that
    fails by an exception and finds what the solution defines under its own name and as module `solution`.
    `reference["entry"]` names the function under test, which is also `candidate`; `reference["seconds"]` limits each
    test, 5 by default. The solution sees neither what is expected nor the test.

    Raises LimitError if a test passes a limit, ParseError, InvalidReferenceError, and SandboxError where nothing can
    be run.
    """
    tests, entry, limits = _read(attempt.reference)
    program = extract_code(attempt.response)
    if not program.strip():
        return Outcome(0.0, "no code")
    for number, test in enumerate(tests, start=1):
        failed = _by_assertion(program, test["assert"], entry, limits) if "assert" in test else None
        if "stdin" in test:
            failed = _by_output(program, test["stdin"], test["expected"], limits)
        if failed:
            return Outcome(0.0, f"test {number} of {len(tests)}: {failed}")
    return Outcome(1.0)


def extract_code(response: str) -> str:
    """What stands in the last fence that says Python; without one in the last that says nothing; else the whole text.

    A fence that is still open ends with the text. Reasoning does not count: up to the first `</think>` where the text
    opens with `<think>`, and up to a line that ends with `</think>` outside of every fence. Raises ParseError for
    reasoning that never ends.
    """
    lines = (without_reasoning(response) if response.lstrip().startswith("<think>") else response).split("\n")
    fences: list[tuple[str, list[str]]] = []
    begin, mark = 0, ""
    for at, line in enumerate(lines):
        found = _FENCE.fullmatch(line.strip())
        language = found[2].lower() if found else ""
        if mark and found and found[1].startswith(mark) and not language:
            mark = ""
        elif found and (not mark or (language in _PYTHON and fences[-1][0] not in _PYTHON)):
            mark = found[1]
            fences.append((language, []))
        elif mark:
            fences[-1][1].append(line)
        elif line.rstrip().endswith("</think>"):
            begin, fences = at + 1, []
    for wanted in (_PYTHON, ("",)):
        if programs := [inside for language, inside in fences if language in wanted]:
            return "\n".join(programs[-1])
    return "\n".join(lines[begin:])


def _read(reference: Any) -> tuple[list[dict[str, str]], str | None, Limits]:
    """Tests, entry and limits. Raises InvalidReferenceError."""
    if not isinstance(reference, dict) or not isinstance(reference.get("tests"), list) or not reference["tests"]:
        raise InvalidReferenceError("reference has no list 'tests' with a test in it")
    if unknown := reference.keys() - {"tests", "entry", "seconds"}:
        raise InvalidReferenceError(f"reference has {min(unknown)!r}; there are 'tests', 'entry' and 'seconds'")
    entry, seconds = reference.get("entry"), reference.get("seconds", _LIMITS.seconds)
    if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
        raise InvalidReferenceError(f"'entry' {entry!r} is not the name of a function")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MOST_SECONDS:
        raise InvalidReferenceError(f"'seconds' {seconds!r} is not a number above 0, and at most {_MOST_SECONDS:g}")
    for number, test in enumerate(reference["tests"], start=1):
        keys = set(test) if isinstance(test, dict) else set()
        if keys not in ({"stdin", "expected"}, {"assert"}) or not all(isinstance(text, str) for text in test.values()):
            raise InvalidReferenceError(f"test {number} has to be texts 'stdin' and 'expected', or a text 'assert'")
        if "assert" in test:
            try:
                ast.parse(test["assert"])
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise InvalidReferenceError(
                    f"test {number} is not Python: {str(error) or type(error).__name__}"
                ) from None
    return reference["tests"], entry, replace(_LIMITS, seconds=float(seconds))


def _by_output(program: str, stdin: str, expected: str, limits: Limits) -> str | None:
    """What is wrong with what the program prints, None if nothing is."""
    ran = run(
        python("solution.py"), stdin=stdin.encode("utf-8", "replace"), files={"solution.py": program}, limits=limits
    )
    _raise_if_stopped(ran, limits)
    if ran.returncode:
        return _how_it_failed(ran)
    got, want = _lines(ran.stdout.decode("utf-8", "replace")), _lines(expected)
    if got == want:
        return None
    at = next((i for i, (mine, theirs) in enumerate(zip(got, want, strict=False)) if mine != theirs), None)
    if at is None:
        return f"prints {len(got)} lines instead of {len(want)}"
    return f"line {at + 1} is {got[at][:100]!r} instead of {want[at][:100]!r}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _by_assertion(program: str, test: str, entry: str | None, limits: Limits) -> str | None:
    """What is wrong with what the functions return, None if nothing is. See `code_peer`."""
    peer = Path(__file__).with_name("code_peer.py").read_text(encoding="utf-8")
    nonce = secrets.token_hex(16)
    order = json.dumps({"code": test, "entry": entry, "nonce": nonce}).encode()
    theirs, ours = (end.detach() for end in socket.socketpair())
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(
            run,
            python("peer.py", "serve", "solution.py"),
            files={"peer.py": peer, "solution.py": program},
            limits=limits,
            passed_on=theirs,
        )
        # What the test waits for is the solution, so that it is the solution that passes a limit first.
        patient = replace(limits, seconds=limits.seconds + 1)
        tested = run(python("peer.py", "test"), stdin=order, files={"peer.py": peer}, limits=patient, passed_on=ours)
        served = serving.result()
    said = _last_word(tested, nonce)
    if said == "":
        return None
    _raise_if_stopped(served, limits)
    _raise_if_stopped(tested, patient)
    if said is None:
        return f"the test ended early ({_how_it_failed(tested)})"
    return f"{said} ({_how_it_failed(served)})" if served.returncode else said


def _last_word(tested: Ran, nonce: str) -> str | None:
    """What the test says that failed; None if it ended before it could say so."""
    if tested.returncode or tested.stopped:
        return None
    for line in reversed(tested.stdout.decode("utf-8", "replace").splitlines()):
        if nonce in line:
            failed: str = json.loads(line)["failed"]
            return failed
    return None


def _raise_if_stopped(ran: Ran, limits: Limits) -> None:
    if ran.stopped:
        raise LimitError(passed_limit(ran.stopped, limits))


def _how_it_failed(ran: Ran) -> str:
    how = f"exit code {ran.returncode}" if ran.returncode >= 0 else f"signal {-ran.returncode}"
    said = ran.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{how}: {said[-1][:200]}" if said else how
