"""A model to quantize: ten million parameters, trained on every token of the tiny world and never rounded before.

`python -m mopdctl.world.text_model --out DIR` trains it from nothing, in float32 and from one seed, in some ten minutes
on two cores. Released models of this size have been in four bits before, or know no text that is at hand: neither can
tell one method of quantization from another. This one knows its text: where an answer follows from what stands before
it is nearly sure, and where a word is drawn at random it knows the odds.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from mopdctl.config.sft import SftConfig
from mopdctl.files import write_jsonl
from mopdctl.runs import Workspace, building
from mopdctl.train.runtime import prepare_runtime, settle_libraries
from mopdctl.world.data import generate, sft_row
from mopdctl.world.domains import DOMAINS
from mopdctl.world.pretrain import BASE

OnStep = Callable[[int, dict[str, Any]], None]


class Size(NamedTuple):
    """Of the model and of its training. Widths are multiples of 32, so that each row falls into whole blocks."""

    hidden: int = 384
    layers: int = 6
    intermediate: int = 1152
    heads: int = 6
    kv_heads: int = 2
    steps: int = 200
    batch: int = 48
    learning_rate: float = 3e-3


def train_text_model(target: Path, size: Size, *, seed: int = 0, on_step: OnStep = lambda step, row: None) -> None:
    """Trains a Llama of the size and writes it to `target`, in float32, with the tokenizer of the tiny world."""
    from mopdctl.engines.hf import HFModel
    from mopdctl.train.sft import run_sft

    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        with building(workspace.checkpoint("init")) as temporary:
            _write_initial_model(temporary, size, seed)
        rows = (sft_row(example, str(i)) for i, example in enumerate(_examples("train", f"text-model/{seed}")))
        write_jsonl(Path(folder) / "text.jsonl", islice(rows, size.steps * size.batch))
        train = {
            "steps": size.steps,
            "batch_size": size.batch,
            "learning_rate": size.learning_rate,
            "optimizer": "muon",
            "schedule": "linear",
            "final_learning_rate_share": 0.02,
            "warmup_steps": max(1, size.steps // 20),
            "gradient_accumulation": 4,
            "checkpoint_every": size.steps,
            "seed": seed,
        }
        document = {"model": "init", "data": ["text.jsonl"], "name": "text-model", "loss_on": "all", "train": train}
        config = SftConfig.model_validate(document)
        trained = run_sft(config, workspace, base=Path(folder), on_step=on_step)
        with building(target) as temporary:
            HFModel.load(str(trained)).save(temporary)


def write_text(path: Path, split: str, rows: int, *, seed: int = 0) -> None:
    """Writes rows of `text`: conversations in the chat template, all domains in turn.

    No prompt of `test` is one of `train`, and of `train` these rows are others than the model saw, but for chance. The
    same split and seed give the same rows.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    found = (sft_row(example, "") for example in islice(_examples(split, f"text/{seed}"), rows))
    texts = (tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False) for row in found)
    write_jsonl(path, ({"text": text} for text in texts))


def _examples(split: str, seed: str) -> Iterator[Any]:
    streams = [generate(domain, split, seed=seed) for domain in DOMAINS]
    return (next(stream) for stream in cycle(streams))


def _write_initial_model(folder: Path, size: Size, seed: int) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Trains the model and shows how it goes."""
    parser = argparse.ArgumentParser(
        prog="python -m mopdctl.world.text_model", description="Train the model that benches quantize."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=Size().steps, help="optimizer steps")
    options = parser.parse_args(arguments)
    prepare_runtime()
    settle_libraries()

    def on_step(done: int, metrics: dict[str, Any]) -> None:
        loss = metrics["train/loss"]
        print(f"step {done} of {options.steps}  loss {loss:.4f}", file=sys.stderr, flush=True)  # noqa: T201

    train_text_model(options.out, Size(steps=options.steps), on_step=on_step)


if __name__ == "__main__":
    main()
