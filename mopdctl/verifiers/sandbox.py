"""Runs a program that nobody vouches for: `run(python("print(1)"), limits=Limits(seconds=5))`."""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mopdctl.verifiers.limits import Limits
from mopdctl.verifiers.processes import kill_tree
from mopdctl.verifiers.supervisor import FOLDER

# The supervisor starts once for each program, so it takes its few modules from this folder without importing the
# package, which would load every verifier first.
_START = """
import sys, types
for name in ("mopdctl", "mopdctl.verifiers"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[2]]
from mopdctl.verifiers.supervisor import main
main()
"""
_SYSTEM = (
    "bin",
    "boot",
    "dev",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "nix",
    "opt",
    "proc",
    "run",
    "sbin",
    "snap",
    "sys",
    "usr",
    "var",
)
"""Folders below the root that hold what every program needs."""
_GRACE_S = 30.0
"""How long the supervisor may take for everything besides the program."""


class SandboxError(RuntimeError):
    """Raised where a program could not be run at all: the machine is at fault, or whoever named the program."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended."""

    returncode: int
    """As it exited; minus the number of the signal that killed it."""
    stdout: bytes
    """At most `output_bytes` from its beginning, as is stderr."""
    stderr: bytes
    stopped: str | None
    """The limit that it passed, for which it was killed: `time`, `memory`, `processes` or `output`; else None."""


def python(*arguments: str) -> list[str]:
    """The command line of this interpreter in a state that no environment and no folder can change."""
    return [sys.executable, "-s", "-P", "-B", *arguments]


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    passed_on: int | None = None,
    namespaces: bool = True,
) -> Ran:
    """Runs `argv` (an absolute path first) in an empty folder that holds `files`, and kills all that came of it.

    A guard rail, not a jail: it is made for code that a model wrote, which loops, forks, floods or meddles, and not
    for somebody who attacks the kernel. Whatever the program does, it and every process below it are gone when this
    returns, at the latest about a second after `limits.seconds`. It gets no environment but PATH, LANG and a folder,
    and no file descriptors but its own three and `passed_on`, which it sees as number 3 and this process gives away.
    Where the kernel allows (`namespaces`, as root or by user namespaces) it has no network, sees no other process, can
    write only to its /tmp of 64 MiB, and finds the working folder of this process empty, where prompts may lie with
    their answers (see `_hidden`). Started by root it runs as a user of its own (`other_user`), unless its interpreter
    lies where other users may not go and there are no namespaces to change that; then it stays root, without
    capabilities, and can write what belongs to root. A user other than root runs it as itself, so that it can read what
    that user can read.

    Linux only. Works in any thread, uses no signals. Raises SandboxError where nothing could be run.
    """
    limits = limits or Limits()
    keep = sorted({sys.base_prefix, sys.prefix})
    order = {
        "argv": list(argv),
        "stdin": base64.b64encode(stdin).decode(),
        "files": dict(files or {}),
        "folder": tempfile.gettempdir(),
        "keep": keep,
        "hidden": _hidden(argv[0], keep),
        "passed_on": passed_on,
        "namespaces": namespaces,
        "seconds": limits.seconds,
        "memory_mb": limits.memory_mb,
        "output_bytes": limits.output_bytes,
        "processes": limits.processes,
    }
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=() if passed_on is None else (passed_on,),
            start_new_session=True,
            env={"PATH": os.defpath},
        )
    finally:
        if passed_on is not None:
            os.close(passed_on)
    try:
        said, _ = supervisor.communicate(json.dumps(order).encode(), timeout=limits.seconds + _GRACE_S)
        report = json.loads(said)
    except (subprocess.TimeoutExpired, ValueError):
        raise SandboxError("the supervisor of the sandbox did not answer") from None
    finally:
        if supervisor.poll() is None:
            end_tree(supervisor.pid)
            supervisor.communicate()
    if "error" in report:
        raise SandboxError(f"the sandbox could not start {argv[0]}: {report['error']}")
    return Ran(
        report["returncode"],
        base64.b64decode(report["stdout"]),
        base64.b64decode(report["stderr"]),
        report["stopped"],
    )


def _hidden(program: str, keep: Sequence[str]) -> str | None:
    """The working folder, unless the system, or `program` on its way to the folders `keep`, needs what is in it."""
    here, kept = Path.cwd(), [Path(folder).resolve() for folder in keep]
    if here == Path(here.anchor) or here.parts[1] in _SYSTEM or any(here.is_relative_to(folder) for folder in kept):
        return None
    links = [Path(program)]
    while links[-1].is_symlink():
        links.append(Path(os.path.normpath(links[-1].parent / links[-1].readlink())))
    needed = (link for link in links if link.is_relative_to(here))
    return str(here) if all(any(link.is_relative_to(folder) for folder in kept) for link in needed) else None


def end_tree(root: int) -> None:
    """Kills `root` and every descendant, and removes the folders of the programs that ran below it."""
    killed = {str(pid) for pid in kill_tree(root)}
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        if folder.name.removeprefix(FOLDER).partition("-")[0] in killed:
            subprocess.run(["rm", "-rf", "--", folder], check=False)
