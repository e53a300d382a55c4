"""The base model that comes with the package: half a million parameters, pretrained on the easy half of every domain.

`python -m mopdctl.world.pretrain --out DIR` trains it from nothing (about five minutes on two cores); the copy in
`mopdctl/world/base` was made by this, is kept in bfloat16 and saves every quickstart those minutes. It has seen no hard
example, no dev or test prompt and no novel value.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mopdctl.config.sft import SftConfig
from mopdctl.files import write_jsonl
from mopdctl.runs import Workspace, building
from mopdctl.train.runtime import prepare_runtime, settle_libraries
from mopdctl.world.data import generate, sft_row
from mopdctl.world.domains import DOMAINS
from mopdctl.world.examples import Example

BASE = Path(__file__).parent / "base"
_STEPS, _BATCH, _RATE = 420, 128, 6e-3
_WEIGHTS = {"arithmetic": 4, "instructions": 1, "structured": 2, "tools": 1, "lookup": 2, "errands": 1}


def pretrain(target: Path) -> None:
    """Trains the base model and writes it to `target` in bfloat16."""
    import torch

    from mopdctl.engines.hf import HFModel
    from mopdctl.train.sft import run_sft
    from mopdctl.world.model import write_initial_model
    from mopdctl.world.tokenizer import build_tokenizer

    unit = [domain for domain in DOMAINS for _ in range(_WEIGHTS[domain])]
    streams = {domain: _easy(domain) for domain in DOMAINS}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        with building(workspace.checkpoint("init")) as temporary:
            write_initial_model(temporary, build_tokenizer(), seed=0)
        rows = (sft_row(next(streams[unit[i % len(unit)]]), str(i)) for i in range(_STEPS * _BATCH))
        write_jsonl(Path(folder) / "base.jsonl", rows)
        config = SftConfig.model_validate(
            {
                "model": "init",
                "data": ["base.jsonl"],
                "name": "base",
                "train": {
                    "steps": _STEPS,
                    "batch_size": _BATCH,
                    "learning_rate": _RATE,
                    "optimizer": "muon",
                    "schedule": "cosine",
                    "final_learning_rate_share": 0.05,
                    "warmup_steps": 20,
                    "gradient_accumulation": 5,
                    "checkpoint_every": _STEPS,
                },
            }
        )
        trained = run_sft(config, workspace, base=Path(folder))
        model = HFModel.load(str(trained))
        model.model.to(torch.bfloat16)
        with building(target) as temporary:
            model.save(temporary)


def _easy(domain: str) -> Iterator[Example]:
    return (example for example in generate(domain, "train", seed="base") if example.basic)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the base model of the quickstart.")
    parser.add_argument("--out", type=Path, default=BASE, help="folder to write (default: the package's own copy)")
    prepare_runtime()
    settle_libraries()
    pretrain(parser.parse_args().out)
