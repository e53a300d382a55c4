"""A very small world for tests of whole commands: a student of two layers, three perturbed copies of it, 24 prompts."""

import os
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

# The same examples in every run. To look for others: pytest --hypothesis-profile default
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Threads only get into each other's way at this size, and another number of them rounds otherwise: a run that a test
# starts as a process has to equal, to the bit, the one beside it in this process.
os.environ["OMP_NUM_THREADS"] = "1"

DOMAINS = ("arithmetic", "structured", "tools")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    import torch

    from mopdctl.train.runtime import prepare_runtime, settle_libraries
    from mopdctl.world.tokenizer import build_tokenizer

    prepare_runtime()
    settle_libraries()
    torch.set_num_threads(1)
    return build_tokenizer()


@pytest.fixture(scope="session")
def write_tiny_model(tiny_tokenizer: Any) -> Callable[..., Path]:
    """Writes a Llama of width 32 with its tokenizer; `noise` is the deviation of what is added to each weight.

    Weights are wide, so that no two prompts get the same distribution, and the end token's more so, so that answers end
    at different lengths.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def write(folder: Path, *, noise: float = 0.0, noise_seed: int = 0, tokenizer: Any = None, **changes: Any) -> Path:
        tokenizer = tokenizer or tiny_tokenizer
        config = LlamaConfig(
            **{
                "vocab_size": len(tokenizer),
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "initializer_range": 0.2,
                "tie_word_embeddings": True,
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
            }
            | changes
        )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = LlamaForCausalLM(config)
            model.get_output_embeddings().weight[tokenizer.eos_token_id] *= 3
            torch.manual_seed(1 + noise_seed)
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Path]) -> Path:
    """`models/student`, a model per domain, `prompts.jsonl`. Nothing may write here."""
    from mopdctl.files import write_jsonl
    from mopdctl.world.data import generate, prompt_row

    root = tmp_path_factory.mktemp("tiny")
    write_tiny_model(root / "models" / "student")
    rows = []
    for number, domain in enumerate(DOMAINS):
        write_tiny_model(root / "models" / domain, noise=0.04, noise_seed=number)
        examples = islice(generate(domain, "train", seed=0), 8)
        rows += [prompt_row(example, f"{domain}/{i}") for i, example in enumerate(examples)]
    write_jsonl(root / "prompts.jsonl", rows)
    return root


@pytest.fixture(scope="session")
def teachers_document(tiny: Path) -> Callable[..., dict[str, Any]]:
    """A `teachers.yaml` as a mapping: one teacher per domain, two steps of twelve prompts. Keywords go into `train`."""

    def document(name: str = "merged", *, top: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
        return {
            "name": name,
            "student": str(tiny / "models" / "student"),
            "prompts": str(tiny / "prompts.jsonl"),
            "teachers": {d: {"model": str(tiny / "models" / d), "domains": [d]} for d in DOMAINS},
            "train": {"steps": 2, "batch_size": 12, "max_new_tokens": 12, "learning_rate": 1e-3} | train,
        } | (top or {})

    return document


@pytest.fixture(scope="session")
def finished() -> Callable[..., SimpleNamespace]:
    """Reads what a run left: metrics without times, the final weights, the card, and all rollouts."""
    from safetensors.torch import load_file

    from mopdctl.runs import Workspace, read_card, read_metrics
    from mopdctl.store.store import Store

    def rollouts_by_step(store: Path) -> list[list[dict[str, Any]]]:
        steps: dict[int, list[dict[str, Any]]] = {}
        for sample in Store(store).scan():
            assert sample.policy_version_min == sample.policy_version_max
            assert sample.teacher_logprobs is not None
            steps.setdefault(int(sample.group_id.rpartition("/")[2]), []).append(
                {
                    "sample_id": sample.sample_id,
                    "prompt_id": sample.prompt_id,
                    "teacher_id": sample.teacher_id,
                    "policy_version": sample.policy_version_min,
                    "finish_reason": sample.finish_reason,
                    "prompt_ids": sample.prompt_ids.tolist(),
                    "response_ids": sample.response_ids.tolist(),
                    "behavior_logprobs": sample.behavior_logprobs.tolist(),
                    "teacher_logprobs": sample.teacher_logprobs.tolist(),
                }
            )
        return [rows for _, rows in sorted(steps.items())]

    def read(workspace: Path, name: str = "merged") -> SimpleNamespace:
        folder, checkpoint = Workspace(workspace).run(name), Workspace(workspace).checkpoint(name)
        rows = read_metrics(folder)
        return SimpleNamespace(
            folder=folder,
            checkpoint=checkpoint,
            metrics=[{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows],
            times=[{k: v for k, v in row.items() if k.startswith("perf/")} for row in rows],
            weights=load_file(checkpoint / "model.safetensors"),
            card=read_card(checkpoint),
            rollouts=rollouts_by_step(Workspace(workspace).rollouts(name)),
        )

    return read


@pytest.fixture(scope="session")
def distil(
    tmp_path_factory: pytest.TempPathFactory, finished: Callable[..., SimpleNamespace]
) -> Callable[..., SimpleNamespace]:
    """Runs a document in this process, in a workspace of its own, and reads what it left."""
    from mopdctl.config.teachers import TeachersFile
    from mopdctl.distill.run import run_distill
    from mopdctl.runs import Workspace

    def run(document: dict[str, Any], workspace: Path | None = None) -> SimpleNamespace:
        workspace = workspace or tmp_path_factory.mktemp("workspace")
        config = TeachersFile.model_validate(document)
        run_distill(config, Workspace(workspace), base=workspace)
        return finished(workspace, config.name)

    return run


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs a command line in this process, which saves importing torch each time: exit code, stdout and stderr."""
    from mopdctl.cli.app import main

    def run(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["mopdctl", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        stdout, stderr = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, stdout=stdout, stderr=stderr)

    return run
