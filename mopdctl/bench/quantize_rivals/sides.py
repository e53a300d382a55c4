"""One side of the quantize bench: `python -P sides.py SIDE CORES [COMMAND]`.

Obeys the command, or those on stdin, one JSON document a line, and answers each in a line of JSON with the seconds of
the work alone, on the clock and of all cores together. Sides are `ours` and `llm-compressor`, whose environment holds
no mopdctl: hence no import of it at the top.

- `{"do": "weights", "model", "method", "layers"}`: the matrices of the first so many decoder layers (all: null), read
  before, from memory to packed bytes in memory, tensor scales shared by q/k/v and gate/up.
- `{"do": "random", "millions", "method"}`: the same of so many million random weights in bfloat16, some at a time.
- `{"do": "files", "model", "method", "out", "calibration"}`: from a checkpoint to a checkpoint, all that either side
  does on the way included. `calibration` names a file of `text` rows, for GPTQ.
"""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS, LENGTH = 128, 512
"""Of the calibration: rows that are taken, and tokens at which they are cut."""
IGNORE = ["lm_head", "re:.*embed_tokens"]

Weights = dict[str, Tensor]


def matrices(folder: str, layers: int | None) -> Weights:
    """The linear weights of decoder layers by name, copied into memory."""
    open_file = import_module("safetensors").safe_open
    found: Weights = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open_file(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                number = re.match(r"model\.layers\.(\d+)\..*_proj\.weight$", name)
                if number and (layers is None or int(number[1]) < layers):
                    found[name] = file.get_tensor(name).clone()
    return found


def fused(names: Iterable[str]) -> list[list[str]]:
    """The names in groups that share a tensor scale."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\b([qkv]|gate|up)_proj", lambda m: _FUSED[m[1]], name), []).append(name)
    return list(groups.values())


_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


# ----------------------------------------------------------------------------------------------------------------- ours


def our_weights(weights: Weights, method: str) -> None:
    """`nvfp4.quantize` on each matrix, with the divisor of its group."""
    nvfp4 = import_module("mopdctl.fp4.nvfp4")
    largest_magnitude = import_module("mopdctl.fp4.blocks").largest_magnitude
    for group in fused(weights):
        divisor = nvfp4.divisor(max(largest_magnitude(weights[name]) for name in group), method)
        for name in group:
            nvfp4.quantize(weights[name], divisor, method=method)


def our_files(model: str, method: str, out: Path, calibration: str | None) -> None:
    """What `mopdctl quantize` runs: preflight, codes, errors of every weight, and the check of what was written."""
    quantize_model = import_module("mopdctl.quant.run").quantize_model
    config = import_module("mopdctl.config.quant").QuantConfig
    workspace = import_module("mopdctl.runs").Workspace(out.parent / f"{out.name}-workspace")
    document: dict[str, Any] = {"model": model, "name": "made", "method": method}
    if calibration:
        document["calibration"] = {"data": calibration, "samples": ROWS, "max_length": LENGTH}
    quantize_model(config.model_validate(document), workspace, base=Path()).rename(out)
    shutil.rmtree(workspace.root)


# ------------------------------------------------------------------------------------------------------- llm-compressor


def their_config(observer: str) -> Any:
    """NVFP4 weights with one of their observers, as `model_free_ptq` takes it."""
    quantization = import_module("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    scheme.weights = scheme.weights.model_copy(update={"observer": observer})
    validate = import_module("llmcompressor.entrypoints.model_free.validate").validate_config
    return validate(None, scheme, IGNORE)


def their_weights(weights: Weights, observer: str) -> None:
    """What `model_free_ptq` does between reading a file and writing one."""
    converter = import_module("llmcompressor.entrypoints.model_free.converter").ModelFreePtqConverter
    converter(their_config(observer)).process(dict(weights))


def their_files(model: str, method: str, out: Path, calibration: str | None) -> None:
    """`model_free:OBSERVER` from file to file; `OBSERVER` or `gptq` by `oneshot`, their main entrance, and a save."""
    if method.startswith("model_free:"):
        config = their_config(method.removeprefix("model_free:"))
        import_module("llmcompressor").model_free_ptq(model, str(out), config=config, device="cpu")
        return
    transformers = import_module("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    settings = {"targets": "Linear", "scheme": "NVFP4A16", "ignore": ["lm_head"]}
    oneshot = import_module("llmcompressor").oneshot
    if method == "gptq":
        assert calibration is not None
        with Path(calibration).open(encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file][:ROWS]
        rows = [dict(tokenizer(text, max_length=LENGTH, truncation=True)) for text in texts]
        modifier = import_module("llmcompressor.modifiers.gptq").GPTQModifier(**settings)
        oneshot(
            model=loaded,
            tokenizer=tokenizer,
            recipe=modifier,
            dataset=import_module("datasets").Dataset.from_list(rows),
            num_calibration_samples=len(rows),
            max_seq_length=LENGTH,
        )
    else:
        quantization = import_module("llmcompressor.modifiers.quantization")
        oneshot(model=loaded, recipe=quantization.QuantizationModifier(weight_observer=method, **settings))
    loaded.save_pretrained(str(out), save_compressed=True)
    tokenizer.save_pretrained(str(out))


# ------------------------------------------------------------------------------------------------------------- commands

_WIDTH, _HEIGHT = 4096, 4096


@dataclass(frozen=True)
class Side:
    """How one side does its work."""

    on_weights: Callable[[Weights, str], None]
    on_files: Callable[[str, str, Path, str | None], None]
    modules: Sequence[str]
    """Imported before the clock runs."""


SIDES = {
    "ours": Side(our_weights, our_files, ["mopdctl.quant.run"]),
    "llm-compressor": Side(
        their_weights,
        their_files,
        ["llmcompressor.entrypoints.model_free.converter", "llmcompressor.modifiers.gptq", "transformers", "datasets"],
    ),
}


def obey(side: Side, command: Mapping[str, Any]) -> dict[str, float]:
    """Does one command."""
    method = command["method"]
    if command["do"] == "files":
        out = Path(command["out"])
        shutil.rmtree(out, ignore_errors=True)
        return clocked(lambda: side.on_files(command["model"], method, out, command["calibration"]))
    if command["do"] == "weights":
        weights = matrices(command["model"], command["layers"])
        return clocked(lambda: side.on_weights(weights, method))
    draw, total = torch.Generator().manual_seed(0), {"seconds": 0.0, "cpu_seconds": 0.0}
    for start in range(0, command["millions"] * 1_000_000, _WIDTH * _HEIGHT):
        rows = min(_HEIGHT, -(-(command["millions"] * 1_000_000 - start) // _WIDTH))
        weight = torch.randn(rows, _WIDTH, generator=draw).mul_(0.02).bfloat16()
        found = clocked(partial(side.on_weights, {"model.layers.0.mlp.down_proj.weight": weight}, method))
        total = {key: total[key] + found[key] for key in total}
    return total


def clocked(work: Callable[[], None]) -> dict[str, float]:
    """Seconds of some work."""
    start, cpu_start = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}


def main(name: str, cores: str, *commands: str) -> None:
    """Obeys until stdin ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    own = sorted(os.sched_getaffinity(0))[: int(cores)]
    os.sched_setaffinity(0, own)
    torch.set_num_threads(len(own))
    side = SIDES[name]
    for module in side.modules:
        import_module(module)
    if name != "ours":
        import_module("loguru").logger.remove()
    for line in commands or sys.stdin:
        answers.write(json.dumps(obey(side, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
