"""A quantized checkpoint from its evaluation to its line under the recovery table."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mopdctl.config.quant import QuantConfig
from mopdctl.engines.fp4 import load_quantized
from mopdctl.quant.run import quantize_model
from mopdctl.runs import Workspace


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Path]) -> Workspace:
    space = Workspace(tmp_path_factory.mktemp("workspace"))
    write_tiny_model(space.checkpoint("mopd2"), max_position_embeddings=256)
    quantize_model(QuantConfig(model="mopd2", name="mopd2-nvfp4", method="max"), space, base=space.root)
    return space


def test_the_harness_runs_the_bytes_of_the_checkpoint(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    from mopdctl.evals.harness import HarnessModel

    monkeypatch.setitem(sys.modules, "compressed_tensors", None)  # importing it fails, as where it is not installed
    folder = space.checkpoint("mopd2-nvfp4")
    harness = HarnessModel(str(folder), batch_size=4, chat_template=True, on_progress=lambda done, total: None)
    model = load_quantized(str(folder), AutoConfig.from_pretrained(folder), dtype=torch.float32)
    ids = torch.arange(3, 20).unsqueeze(0)
    assert torch.equal(harness.model(ids).logits, model(ids).logits)
    assert not harness.model.training


@pytest.mark.slow
def test_evaluated_and_joined_to_the_recovery_table(space: Workspace, cli: Callable[..., SimpleNamespace]) -> None:
    from mopdctl.evals.run import run_eval
    from mopdctl.files import write_json

    for name in ("mopd2", "mopd2-nvfp4"):
        run_eval(name, name, ["arithmetic"], space, limit=8)
    teacher: dict[str, Any] = {"model": "mopd2", "domains": ["arithmetic"], "benchmarks": ["arithmetic"]}
    write_json(space.checkpoint("mopd2") / "card.json", {"teachers": {"math": teacher}})
    arguments = ["--before", "mopd2", "--after", "mopd2", "--quantized", "mopd2-nvfp4", "--workspace", space.root]
    done = cli("recovery", *arguments, "--json")
    row = json.loads(done.stdout)["retention"]["rows"][0]
    assert (row["checkpoint"], row["benchmark"], row["n"], row["test"]) == ("mopd2-nvfp4", "arithmetic", 8, "mcnemar")
    assert row["length_ratio"] is not None
    assert row["status"] in ("ok", "no_ratio")  # an untrained model may well be right nowhere
