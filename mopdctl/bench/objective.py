"""What the exact reverse KL from hidden states costs, loss and gradients, beside other ways to compute it.

On two cores (Linux), 512 tokens, widths 256 and 384, float32, at vocabularies of 32,768 and 151,936:

- Time, beside the chunked kernel of TRL 1.16's distillation trainer (in its own environment, on our torch) and beside
  naive torch: all logits at once and autograd.
- Extra memory, without inputs and without the gradients that come out, beside naive torch and TRL. And how it grows: at
  2,048 tokens over that at 512.

Where there is a GPU, on that: 8,192 tokens, V = 151,936, widths 4,096 and 2,048 on both sides, bfloat16:

- Time, beside the four products that any exact method has to make (logits of student and teacher, gradients of hidden
  states and head), beside naive torch, and beside Liger's fused linear JSD if `liger_kernel` is installed.
- Extra memory, beside the same.

Every side is a process of its own with the same inputs, which stays for all timed runs; memory is that of a fresh one.
Before a side is timed its loss and gradients are held against float64: ours always, rivals where they compute in
float32 (in bfloat16 how far they are is shown).
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

import torch

from mopdctl.bench.frame import Bar, Bench, Case, rival_environment
from mopdctl.bench.objective_rivals import sides
from mopdctl.bench.objective_rivals.sides import Problem
from mopdctl.cli.output import note
from mopdctl.errors import InputError, MopdctlError
from mopdctl.runs import package_versions

CPU_PROBLEMS = (Problem(512, 32_768, 256, 384), Problem(512, 151_936, 256, 384))
GPU_PROBLEMS = (Problem(8192, 151_936, 4096, 4096, "cuda"), Problem(8192, 151_936, 2048, 2048, "cuda"))
_MORE_TOKENS = 4
"""How many times the tokens, where growth is measured."""
TOLERANCES = {"cpu": (1e-5, 1e-5), "cuda": (1e-3, 2e-2)}
"""Of loss (nats) and gradients (relative) against float64. On the GPU gradients come out in bfloat16."""
_GIB, _MIB = 2**30, 2**20
Commands = Mapping[str, Sequence[str]]
"""Side to the command that runs it, without the problem."""


def bench() -> Bench:
    """The cases of `python -m mopdctl.bench objective`."""
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("the objective bench reads memory and holds processes to cores as Linux can; run it there")
    note(f"load average at the start: {os.getloadavg()[0]:.1f}")
    here = [sys.executable, "-m", sides.__name__]
    commands: dict[str, Sequence[str]] = {name: [*here, name] for name in ("ours", "naive", "products")}
    if torch.cuda.is_available():
        if importlib.util.find_spec("liger_kernel") is None:
            note("liger-kernel is not installed: its cases are left out")
        else:
            commands["liger"] = [*here, "liger"]
        return gpu_bench(commands, GPU_PROBLEMS)
    rival = rival_environment("trl", ["trl==1.16.*"], report_versions=["trl", "torch"], share_ours=True)
    commands["trl"] = [str(rival.program("python")), "-P", sides.__file__, "trl"]
    return cpu_bench(commands, CPU_PROBLEMS, rival.versions)


def cpu_bench(commands: Commands, problems: Sequence[Problem], rival_versions: dict[str, str]) -> Bench:
    """Time beside both rivals, extra memory beside both, and its growth with the tokens."""
    with ExitStack() as held:
        workers = Workers(commands, held)
        cases: list[Case] = []
        for problem in problems:
            where = f"{problem.num_tokens} tokens, V = {problem.vocab_size:,}"
            for side, name, bar in (
                ("trl", "TRL chunked kernel", Bar(ratio_at_least=2.5)),
                ("naive", "naive torch", Bar(ratio_at_least=1 / 1.1)),
            ):
                cases.append(
                    Case(f"{where} | {name}", "s", workers.time("ours", problem), workers.time(side, problem), bar)
                )
            for side, name, memory_bar in (
                ("naive", "naive torch", Bar(ratio_at_least=2)),
                ("trl", "TRL chunked kernel", None),
            ):
                ours, rival = workers.extra("ours", problem, _MIB), workers.extra(side, problem, _MIB)
                cases.append(Case(f"extra memory, {where} | {name}", "MiB", ours, rival, memory_bar, max_runs=1))
            cases.append(
                Case(
                    f"extra memory, {_MORE_TOKENS} times the tokens over {where} | TRL chunked kernel",
                    "times",
                    workers.growth("ours", problem),
                    workers.growth("trl", problem),
                    Bar(ours_at_most=1.1),
                    max_runs=1,
                )
            )
        return Bench(cases, rival_versions, held.pop_all())


def gpu_bench(commands: Commands, problems: Sequence[Problem]) -> Bench:
    """Time and extra memory beside the bare products, naive torch and, where it is installed, Liger."""
    with ExitStack() as held:
        workers = Workers(commands, held)
        cases: list[Case] = []
        names = {"products": "bare head products", "naive": "naive torch", "liger": "Liger fused linear JSD"}
        for problem in problems:
            where = f"{problem.num_tokens:,} tokens, V = {problem.vocab_size:,}, H = {problem.width:,}, bf16"
            for side in [side for side in names if side in commands]:
                bar = Bar(ratio_at_least=1 / 1.5) if side == "products" else None
                cases.append(
                    Case(
                        f"{where} | {names[side]}", "s", workers.time("ours", problem), workers.time(side, problem), bar
                    )
                )
                bar = Bar(ours_at_most=3) if side == "products" else None
                ours, rival = workers.extra("ours", problem, _GIB), workers.extra(side, problem, _GIB)
                cases.append(Case(f"extra memory, {where} | {names[side]}", "GiB", ours, rival, bar, max_runs=1))
        return Bench(cases, package_versions(), held.pop_all())


class Workers:
    """The processes of the sides: one for each side and problem that is timed, a fresh one for each look at memory."""

    def __init__(self, commands: Commands, held: ExitStack) -> None:
        """They end when `held` is closed."""
        self._commands, self._held = commands, held
        self._running: dict[tuple[str, Problem], subprocess.Popen[str]] = {}
        self._extra_bytes: dict[tuple[str, Problem], float] = {}

    def time(self, side: str, problem: Problem) -> Callable[[], float]:
        """Seconds of one loss with gradients, by a process that stays. Its first run is checked against float64."""

        def run() -> float:
            if (side, problem) not in self._running:
                process = self._running[side, problem] = self._held.enter_context(self._start(side, problem))
                self._held.callback(process.terminate)
                if side != "products":
                    _hold_to_float64(side, problem, _ask(process, "check"))
            return _ask(self._running[side, problem], "time")["seconds"]

        return run

    def extra(self, side: str, problem: Problem, unit_bytes: int) -> Callable[[], float]:
        """Extra memory of one loss with gradients, in a fresh process; looked at once."""

        def run() -> float:
            if (side, problem) not in self._extra_bytes:
                with self._start(side, problem) as process:
                    try:
                        self._extra_bytes[side, problem] = _ask(process, "peak")["extra_bytes"]
                    finally:
                        process.terminate()
            return self._extra_bytes[side, problem] / unit_bytes

        return run

    def growth(self, side: str, problem: Problem) -> Callable[[], float]:
        """Extra memory at more tokens over that at the problem's own."""
        more = Problem(**(asdict(problem) | {"num_tokens": _MORE_TOKENS * problem.num_tokens}))
        return lambda: self.extra(side, more, 1)() / self.extra(side, problem, 1)()

    def _start(self, side: str, problem: Problem) -> subprocess.Popen[str]:
        command = [*self._commands[side], json.dumps(asdict(problem))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(process: subprocess.Popen[str], command: str) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise MopdctlError(f"bench objective: a side ended with {process.wait()} instead of an answer to {command!r}")
    found: dict[str, float] = json.loads(answer)
    return found


def _hold_to_float64(side: str, problem: Problem, found: dict[str, float]) -> None:
    loss, gradient = found["loss_error"], found["gradient_error"]
    note(f"{side}, V = {problem.vocab_size:,}: loss within {loss:.1e}, gradients within {gradient:.1e} of float64")
    loss_bound, gradient_bound = TOLERANCES[problem.device]
    held = side == "ours" or problem.device == "cpu"
    if held and not (loss <= loss_bound and gradient <= gradient_bound):
        raise MopdctlError(
            f"bench objective: {side} is off float64 by {loss:.1e} in the loss (at most {loss_bound:g}) and by "
            f"{gradient:.1e} in the gradients (at most {gradient_bound:g}); its figures would mean nothing"
        )
