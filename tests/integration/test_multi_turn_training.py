"""Conversations with a tool environment in `distill` and `rl`: what the tools say is context, and trains nothing."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from mopdctl.config.rl import RlConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.run import run_distill
from mopdctl.engines.hf import HFModel
from mopdctl.files import write_jsonl
from mopdctl.records import Sample
from mopdctl.rl.groups import form_groups, rate
from mopdctl.rl.run import run_rl
from mopdctl.runs import Workspace, read_metrics
from mopdctl.store.store import Store
from mopdctl.train import batch, loop
from mopdctl.train.batch import MicroBatch

Made = list[MicroBatch]


@pytest.fixture
def micro_batches(monkeypatch: pytest.MonkeyPatch) -> Made:
    """All micro-batches that are trained on."""
    made: Made = []

    def cut(*arguments: Any, **options: Any) -> Made:
        found = batch.cut(*arguments, **options)
        made.extend(found)
        return found

    monkeypatch.setattr(loop, "cut", cut)
    return made


@pytest.fixture
def folder(errands: Path, tmp_path: Path, write_tiny_model: Callable[..., Path]) -> Path:
    """`errands.jsonl` (conversations), `sums.jsonl` (single answers), `prompts.jsonl` (both), and a model `teacher`."""
    talks = [json.loads(line) for line in (errands / "errands.jsonl").read_text("utf-8").splitlines()][:6]
    sums = [
        {
            "id": f"s{i}",
            "prompt": f"{i}+{i}",
            "domain": "sums",
            "verifier": "exact_match",
            "reference": {"answer": str(2 * i)},
        }
        for i in range(6)
    ]
    for name, rows in {"errands": talks, "sums": sums, "prompts": talks + sums}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    write_tiny_model(tmp_path / "teacher", noise=0.04, max_position_embeddings=256)
    return tmp_path


def samples_of(place: Workspace, name: str) -> dict[str, Sample]:
    """The rollouts of a run. Most conversations in them heard of a tool, and only what it said is masked."""
    found = {s.sample_id: s for s in Store(place.rollouts(name)).scan()}
    talks = [s for s in found.values() if s.domain == "errands"]
    assert sum(not s.response_mask.all() for s in talks) > len(talks) / 2
    assert all(s.response_mask.all() for s in found.values() if s.domain != "errands")
    assert all(len(s.behavior_logprobs) == s.loss_mask.sum() for s in found.values())
    return found


def assert_tools_are_context(model: HFModel, samples: dict[str, Sample]) -> None:
    for sample in samples.values():
        told = "".join(
            model.tokenizer.decode([token]) if not on else "\n"
            for token, on in zip(sample.response_ids.tolist(), sample.response_mask.tolist(), strict=True)
        )
        for piece in filter(None, told.split("\n")):
            assert piece.startswith("<|tool|>")
            assert piece.endswith("<|assistant|>") or sample.finish_reason == "length"


def assert_assistant_tokens_alone_are_trained(made: Made, samples: dict[str, Sample], reduction: str) -> None:
    """Tokens, masks and coefficients of one optimizer step, with denominators of each component of its own."""
    sequences = list(chain.from_iterable(m.sequences for m in made))
    counts = {s.sample_id: int(samples[s.sample_id].response_mask.sum()) for s in sequences}
    assert len(counts) == len(sequences)
    for micro_batch in made:
        own = [s.sample_id for s in sequences if s.component == micro_batch.component]
        tokens, coefficients = [], []
        for sequence in micro_batch.sequences:
            sample = samples[sequence.sample_id]
            assert list(sequence.loss_mask) == sample.response_mask.astype(int).tolist()
            tokens += sample.response_ids[sample.response_mask].tolist()
            n = counts[sequence.sample_id]
            each = 1 / sum(counts[i] for i in own) if reduction == "token" else 1 / (n * len(own))
            coefficients += [each] * n
        assert micro_batch.tokens_N.tolist() == tokens
        assert micro_batch.coefficients_N.tolist() == pytest.approx(coefficients)
        assert {len(values_N) for values_N in micro_batch.streams.values()} == {len(tokens)}


def assert_teacher_scored(teacher: HFModel, samples: list[Sample]) -> None:
    """Every token that the assistant wrote, with all before it as context."""
    scores = teacher.score([(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in samples])
    for sample, row in zip(samples, scores, strict=True):
        expected = [value for value, on in zip(row, sample.response_mask.tolist(), strict=True) if on]
        assert sample.teacher_logprobs is not None
        assert sample.teacher_logprobs.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("objective", "reduction"), [("sampled", "sequence"), ("exact", "token")])
def test_distill_trains_and_scores_what_the_assistant_wrote_alone(
    errands: Path, folder: Path, micro_batches: Made, objective: str, reduction: str
) -> None:
    document = {
        "name": "merged",
        "student": str(errands / "model"),
        "prompts": "prompts.jsonl",
        "teachers": {n: {"model": str(folder / "teacher"), "domains": [n]} for n in ("errands", "sums")},
        "train": {
            "steps": 1,
            "batch_size": 12,
            "max_new_tokens": 90,
            "objective": objective,
            "loss_reduction": reduction,
            "gradient_accumulation": 3,
        },
    }
    place = Workspace(folder / "w")
    run_distill(TeachersFile.model_validate(document), place, base=folder)
    samples = samples_of(place, "merged")
    assert len(samples) == 12
    assert_tools_are_context(HFModel.load(str(errands / "model")), samples)
    assert_assistant_tokens_alone_are_trained(micro_batches, samples, reduction)
    assert_teacher_scored(HFModel.load(str(folder / "teacher")), list(samples.values()))
    (row,) = read_metrics(place.run("merged"))
    assert row["rollout/tokens"] == sum(s.loss_mask.sum() for s in samples.values())


def test_rl_trains_what_the_assistant_wrote_alone(errands: Path, folder: Path, micro_batches: Made) -> None:
    taught = {"prompts": "sums.jsonl", "teacher": str(folder / "teacher")}
    document = {
        "name": "grpo",
        "model": str(errands / "model"),
        "environments": {
            "errands": {"prompts": "errands.jsonl", "weight": 2},
            "taught_talks": {"prompts": "errands.jsonl", "teacher": str(folder / "teacher")},
            "taught": taught,
        },
        "train": {
            "steps": 1,
            "batch_size": 12,
            "group_size": 4,
            "max_new_tokens": 90,
            "kl_weight": 0.1,
            "gradient_accumulation": 3,
            "verifier_workers": 1,
        },
    }
    config = RlConfig.model_validate(document)
    place = Workspace(folder / "w")
    run_rl(config, place, base=folder)
    found = {s.sample_id: s for s in Store(place.rollouts("grpo")).scan()}
    assert_tools_are_context(HFModel.load(str(errands / "model")), found)
    assert_assistant_tokens_alone_are_trained(micro_batches, found, "token")
    assert {m.component for m in micro_batches} == {"reward", "distillation"}
    talks = [s for s in found.values() if s.domain == "taught_talks"]
    assert len(talks) == 3
    assert not all(s.response_mask.all() for s in talks)
    assert_teacher_scored(HFModel.load(str(folder / "teacher")), talks)
    # The advantage of a conversation stands at each of its assistant's tokens.
    rated = [rate(s, config.train, budget=90) for s in found.values() if s.domain == "errands"]
    advantages = form_groups(rated, config.train).advantages
    assert len(advantages) >= 8
    for micro_batch in micro_batches:
        assert bool(torch.isfinite(micro_batch.streams["reference_logprobs"]).all())
        if micro_batch.component == "reward":
            expected = [advantages[s.sample_id] for s in micro_batch.sequences for on in s.loss_mask if on]
            assert micro_batch.streams["advantages"].tolist() == pytest.approx(expected, rel=1e-6)
