"""Two processes that share a step against one process that has all of it."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mopdctl
from mopdctl.train import distributed

SCRIPT = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("two_ranks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.results())


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each of two ranks found."""
    out = tmp_path_factory.mktemp("ranks") / "out.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    done = subprocess.run(
        [*launch, "--master-port", str(port), str(SCRIPT), str(out)],
        env=os.environ | {"PYTHONPATH": str(Path(mopdctl.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[dict[str, Any]]] = json.loads(out.read_text("utf-8"))
    assert len(found) == 2
    return found


@pytest.mark.slow
def test_two_ranks_have_the_loss_and_figures_of_one_process(
    alone: list[dict[str, Any]], together: list[list[dict[str, Any]]]
) -> None:
    for rank in together:
        for got, want in zip(rank, alone, strict=True):
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-12)
            assert got["tokens"] == want["tokens"]
            for teacher, mean in want["means"]["gain"].items():
                assert got["means"]["gain"][teacher] == pytest.approx(mean, rel=1e-12)
            assert got["grad_norms"] == pytest.approx(want["grad_norms"], rel=1e-10)
    assert alone[0]["tokens"] == {"a": 16, "b": 5, "c": 3}


@pytest.mark.slow
def test_two_ranks_both_end_with_the_gradient_of_one_process(
    alone: list[dict[str, Any]], together: list[list[dict[str, Any]]]
) -> None:
    for rank in together:
        for got, want in zip(rank, alone, strict=True):
            assert got["gradient"].keys() == want["gradient"].keys()
            for name, values in want["gradient"].items():
                # float64 sums in another order
                assert got["gradient"][name] == pytest.approx(values, rel=1e-9, abs=1e-12), name
    assert max(abs(x) for values in alone[0]["gradient"].values() for x in values) > 0.01


def test_one_process_needs_no_process_group() -> None:
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.sum_over_ranks(1, 2.5) == [1.0, 2.5]
    assert distributed.gather_objects({"a": 1}) == [{"a": 1}]
    distributed.barrier()
