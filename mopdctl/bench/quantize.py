"""What quantizing to NVFP4 costs beside llm-compressor 0.14, and how near the results are to their source.

    python -m mopdctl.bench quantize [--model FOLDER] [--text-model FOLDER] [--quick]

Linux only, on two cores; the rival in its own environment on our torch. Run it on a quiet computer.

- Time, on `--model` (a folder or hub id; default: random weights in the shapes of SmolLM2-135M). In memory, matrices
  to packed bytes: `max` beside their `memoryless_minmax`, both over the whole model; `sweep` beside their
  `nvfp4_expanded_mse`, over one decoder layer, since theirs takes minutes for that. Theirs is what `model_free_ptq`
  does between reading and writing. Then from file to file, beside `model_free_ptq` and beside `oneshot` with load and
  save: ours also looks at every weight first, measures its error and checks what it wrote. Peak memory of those runs.
- A billion random weights, in pieces.
- Quality, on a model of ten million parameters that was never rounded (`mopdctl.world.text_model`, trained on first
  use, or `--text-model`): error of the weights, and KL per token on held-out text against the model itself, both read
  from the files that each side wrote and dequantized by the same code. GPTQ on the same 128 calibration rows, its time
  too. Then our own settings beside each other.

Every side is a process of its own, in which libraries are loaded before the clock runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from mopdctl.bench.frame import Bar, Bench, Case, rival_environment, spent
from mopdctl.bench.quantize_quality import Subject, Table, figures, quality_cases, subject
from mopdctl.bench.quantize_rivals import sides
from mopdctl.cli.output import note
from mopdctl.engines.weights import open_tensors
from mopdctl.errors import InputError, MopdctlError
from mopdctl.quant.run import local_folder
from mopdctl.train.runtime import IDLE_SPINS
from mopdctl.world.pretrain import BASE
from mopdctl.world.text_model import Size

CORES = 2
PAIRS = {"max": "memoryless_minmax", "sweep": "nvfp4_expanded_mse", "gptq": "gptq"}
"""Our methods to theirs."""
SAME = 0.995
"""How near counts as equal where both sides do the same but for rounding: near-ties fall either way."""
_MB = 1_000_000
Commands = Mapping[str, Sequence[str]]
"""Side to the command that runs it."""


_TEXT = Size()


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    text: Size = _TEXT
    held_out_rows: int = 300
    layers: int = 30
    """Of the default model."""
    vocab_size: int = 49_152
    swept_layers: int = 1
    millions: int = 1000
    few_millions: int = 20
    """Random weights of the first run, which is not measured."""


QUICK = Scale(
    text=Size(64, 2, 128, 4, 2, steps=4, batch=12),
    held_out_rows=24,
    layers=2,
    vocab_size=1000,
    millions=2,
    few_millions=1,
)


def parse(arguments: Sequence[str]) -> Bench:
    """The bench as its options say."""
    parser = argparse.ArgumentParser(prog="python -m mopdctl.bench quantize")
    parser.add_argument("--model", default=None, help="folder or hub id to measure time on")
    parser.add_argument("--text-model", type=Path, default=None, help="folder of the model to measure quality on")
    parser.add_argument("--quick", action="store_true", help="everything at a size that shows whether it runs")
    options = parser.parse_args(arguments)
    return bench(QUICK if options.quick else Scale(), model=options.model, text_model=options.text_model)


def bench(
    scale: Scale | None = None, *, model: str | None = None, text_model: Path | None = None, home: Path | None = None
) -> Bench:
    """The cases of `python -m mopdctl.bench quantize`."""
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("the quantize bench holds processes to cores as Linux can; run it there")
    note(f"load average at the start: {os.getloadavg()[0]:.1f}")
    scale = scale or Scale()
    home = home or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mopdctl-bench"
    rival = rival_environment(
        "llm-compressor",
        ["llmcompressor==0.14.*"],
        report_versions=["llmcompressor", "compressed-tensors", "transformers", "torch"],
        share_ours=True,
    )
    commands = {
        "ours": [sys.executable, "-m", sides.__name__, "ours", str(CORES)],
        "rival": [str(rival.program("python")), "-P", sides.__file__, "llm-compressor", str(CORES)],
    }
    own = text_model.resolve() if text_model else None
    on = subject(scale.text, home, held_out_rows=scale.held_out_rows, model=own)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir=home, prefix="quantize-")))
        timed = local_folder(model).resolve() if model else random_model(folder / "random", scale)
        found = cases(scale, timed, on, Workers(commands, folder, held), PAIRS)
        return Bench(found, rival.versions, held.pop_all())


def random_model(folder: Path, scale: Scale) -> Path:
    """A Llama in the shapes of SmolLM2-135M, of random weights in bfloat16."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=scale.vocab_size,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=scale.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


def cases(scale: Scale, model: Path, on: Subject, workers: "Workers", pairs: Mapping[str, str]) -> list[Case]:
    """Time, memory, quality beside the rival's, quality of our own settings."""
    return [
        *_weights(scale, model, workers, pairs),
        *_files(model, workers, pairs),
        *_beside(on, workers, pairs),
        *quality_cases(Table(on, workers.held)),
    ]


def _weights(scale: Scale, model: Path, workers: "Workers", pairs: Mapping[str, str]) -> list[Case]:
    def case(method: str, layers: int | None, bar: Bar, max_runs: int) -> Case:
        def seconds(side: str, own: str) -> Callable[[], float]:
            command = {"do": "weights", "model": str(model), "layers": layers, "method": own}
            return lambda: workers.ask(side, command)["seconds"]

        where = "all layers" if layers is None else f"{layers} layer" + "s" * (layers > 1)
        ours, rival = seconds("ours", method), seconds("rival", pairs[method])
        return Case(f"{method}, {where} in memory | {pairs[method]}", "s", ours, rival, bar, max_runs)

    def random(side: str, method: str) -> Callable[[], float]:
        counts = chain([scale.few_millions], repeat(scale.millions))  # the first run is the one that is not measured
        return lambda: workers.ask(side, {"do": "random", "millions": next(counts), "method": method})["seconds"]

    many = f"{scale.millions:,} million random weights"
    return [
        case("max", None, Bar(ratio_at_least=5), 5),
        case("sweep", scale.swept_layers, Bar(ratio_at_least=50), 1),
        Case(f"max, {many} | {pairs['max']}", "s", random("ours", "max"), random("rival", pairs["max"]), None, 1),
        Case(f"sweep, {many} | our max", "s", random("ours", "sweep"), random("ours", "max"), None, 1),
    ]


def _files(model: Path, workers: "Workers", pairs: Mapping[str, str]) -> list[Case]:
    def seconds(side: str, method: str) -> Callable[[], float]:
        return lambda: workers.files(side, model, method, None)["seconds"]

    places = open_tensors(str(model)).places.values()
    bound_mb = 2 * max(place.num_bytes for place in places) / _MB + 500
    entrances = [("model_free_ptq", f"model_free:{pairs['max']}"), ("oneshot", pairs["max"])]
    return [
        *(
            Case(f"max, file to file | {name}", "s", seconds("ours", "max"), seconds("rival", theirs), None, 3)
            for name, theirs in entrances
        ),
        *(
            Case(
                f"peak memory, {method}, file to file | model_free_ptq",
                "MB",
                partial(workers.peak_mb, "ours", model, method),
                partial(workers.peak_mb, "rival", model, f"model_free:{pairs['max']}"),
                Bar(ours_at_most=bound_mb),
                1,
            )
            for method in ("max", "sweep")
        ),
    ]


def _beside(on: Subject, workers: "Workers", pairs: Mapping[str, str]) -> list[Case]:
    entrances = {"max": f"model_free:{pairs['max']}", "sweep": f"model_free:{pairs['sweep']}", "gptq": pairs["gptq"]}

    @cache
    def made(side: str, method: str) -> tuple[float, Path]:
        calibration = on.calibration if method == "gptq" else None
        own = method if side == "ours" else entrances[method]
        return workers.files(side, on.model, own, calibration)["seconds"], workers.out(side, own)

    @cache
    def measured(side: str, method: str) -> dict[str, float]:
        found = figures(on, made(side, method)[1])
        note(f"{side}, {method}: {found}")
        return {"weight error": found.relative_mse, "KL": found.kl_nats}

    def cost(side: str, method: str, what: str) -> Callable[[], float]:
        return lambda: measured(side, method)[what]

    rows = [
        Case(
            f"{what}, {method} | {pairs[method]}",
            "nats" if what == "KL" else "",
            cost("ours", method, what),
            cost("rival", method, what),
            Bar(ratio_at_least=SAME if method == "max" else 1),
            1,
        )
        for method, what in (("max", "weight error"), ("max", "KL"), ("sweep", "weight error"), ("sweep", "KL"))
    ]
    gptq = [
        Case("KL, gptq | gptq", "nats", cost("ours", "gptq", "KL"), cost("rival", "gptq", "KL"), Bar(None, 1), 1),
        Case(
            "gptq, file to file | gptq",
            "s",
            lambda: made("ours", "gptq")[0],
            lambda: made("rival", "gptq")[0],
            Bar(ratio_at_least=1),
            1,
        ),
    ]
    return rows + gptq


def _environment() -> dict[str, str]:
    """Idle threads soon sleep, on either side, as `mopdctl` has it: else a core that is not free costs both dear."""
    return os.environ | {"GOMP_SPINCOUNT": IDLE_SPINS}


class Workers:
    """The processes of the sides: one each that stays for all that is timed, a fresh one for each look at memory."""

    def __init__(self, commands: Commands, folder: Path, held: ExitStack) -> None:
        """They write into `folder`, and end when `held` is closed."""
        self.held = held
        self._commands, self._folder = commands, folder
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._peaks: dict[tuple[str, str], float] = {}

    def ask(self, side: str, command: Mapping[str, Any]) -> dict[str, float]:
        """The answer of a side to a command. Raises MopdctlError if it ends instead."""
        if side not in self._running:
            process = subprocess.Popen(
                self._commands[side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
            )
            self._running[side] = self.held.enter_context(process)
            self.held.callback(process.terminate)
        process = self._running[side]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise MopdctlError(f"bench quantize: {side} ended with {process.wait()} instead of an answer to {command}")
        found: dict[str, float] = json.loads(answer)
        spent_cpu = found["cpu_seconds"] / found["seconds"]
        note(f"{side}: {command['do']}, {command['method']}: {found['seconds']:.2f} s, {spent_cpu:.2f} cores")
        return found

    def out(self, side: str, method: str) -> Path:
        """Where a side leaves the checkpoint of a method."""
        return self._folder / f"{side}-{method.replace(':', '-')}"

    def files(self, side: str, model: Path, method: str, calibration: Path | None) -> dict[str, float]:
        """Has a side quantize from file to file."""
        return self.ask(side, self._files_command(side, model, method, calibration))

    def peak_mb(self, side: str, model: Path, method: str) -> float:
        """Peak memory of a process that does that and nothing else, mapped files included; looked at once."""
        if (side, method) not in self._peaks:
            command = json.dumps(self._files_command(side, model, method, None))
            found = spent([*self._commands[side], command], cores=CORES)
            self._peaks[side, method] = found.peak_bytes / _MB
        return self._peaks[side, method]

    def _files_command(self, side: str, model: Path, method: str, calibration: Path | None) -> dict[str, Any]:
        out, text = str(self.out(side, method)), str(calibration) if calibration else None
        return {"do": "files", "model": str(model), "method": method, "out": out, "calibration": text}
