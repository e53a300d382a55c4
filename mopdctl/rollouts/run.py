"""`mopdctl rollout`: prompts through one model into a store, in batches that are committed as they are done."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from mopdctl.engines.base import Sampler
from mopdctl.engines.fake import FakeModel
from mopdctl.errors import InputError
from mopdctl.files import file_digest, fingerprint
from mopdctl.records import Prompt
from mopdctl.rollouts.generate import RolloutLog, generate
from mopdctl.rollouts.jobs import Job, plain_jobs
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.runs import Workspace, model_identity
from mopdctl.store.store import StoreWriter


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What `mopdctl rollout` is asked for."""

    name: str
    model: str
    prompts: Path
    engine: Literal["hf", "fake"] = "hf"
    samples: int = 1
    """Answers per prompt."""
    max_new_tokens: int = 512
    temperature: float = 1.0
    seed: int = 0
    durability: Literal["off", "process", "host"] = "process"
    batch_size: int = 64
    """Answers sampled at the same time."""
    commit_every: int = 1024
    """Answers per commit."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A sampler with what the store has to know about it."""

    sampler: Sampler
    identity: str
    tokenizer_fingerprint: str
    max_length: int
    token_ids: Callable[[Prompt], tuple[int, ...]]


def plan_rollout(spec: RolloutSpec, workspace: Workspace) -> dict[str, Any]:
    """Checks everything that can be checked without loading a model. Writes nothing."""
    prompts = _prompts(spec)
    model = spec.model if spec.engine == "fake" else workspace.resolve_model(spec.model)
    if spec.engine == "fake":
        FakeModel.parse(spec.model)
    return {
        "store": str(workspace.rollouts(spec.name)),
        "model": model,
        "prompts": len(prompts),
        "samples": len(prompts) * spec.samples,
    }


def run_rollout(
    spec: RolloutSpec,
    workspace: Workspace,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Samples what is still missing in the store `spec.name` and returns counts.

    A killed run goes on where it was: committed samples stay, logged ones go on from their last token.
    """
    prompts = _prompts(spec)
    engine = load_engine(spec, workspace)
    identity = {
        "tokenizer": engine.tokenizer_fingerprint,
        "command": "rollout",
        "model": engine.identity,
        "prompts": file_digest(spec.prompts),
        "samples": spec.samples,
        "max_new_tokens": spec.max_new_tokens,
        "temperature": spec.temperature,
        "seed": spec.seed,
    }
    sampling = fingerprint({k: identity[k] for k in ("model", "max_new_tokens", "temperature")})

    def jobs() -> Iterator[Job]:
        return plain_jobs(
            prompts,
            engine.token_ids,
            samples=spec.samples,
            max_new_tokens=spec.max_new_tokens,
            max_length=engine.max_length,
            seed=spec.seed,
        )

    total = sum(1 for _ in jobs())  # every prompt is looked at before anything is written; none is kept in memory
    folder = workspace.rollouts(spec.name)
    with (
        StoreWriter(folder, identity) as writer,
        RolloutLog(folder / "wal", writer="rank-0", level=spec.durability) as log,
    ):
        for line in log.notes:
            on_note(line)
        there = set(writer.committed)
        log.committed(list(there))
        for batch in _batches((job for job in jobs() if job.sample_id not in there), spec.commit_every):
            samples = []
            for sample in generate(
                batch,
                engine.sampler,
                log,
                temperature=spec.temperature,
                policy_version=0,
                tokenizer_fingerprint=engine.tokenizer_fingerprint,
                sampling_fingerprint=sampling,
            ):
                samples.append(sample)
                on_progress(len(writer.committed) + len(samples), total)
            writer.commit(sorted(samples, key=lambda sample: sample.sample_id))
            log.committed([sample.sample_id for sample in samples])
        log.finish()
        return {
            "store": str(folder),
            "samples": len(writer.committed),
            "new": len(writer.committed) - len(there),
            "tokens": writer.store.manifest.tokens,
        }


def load_engine(spec: RolloutSpec, workspace: Workspace) -> Engine:
    """The engine that `spec` names, its model loaded."""
    if spec.engine == "fake":
        fake = FakeModel.parse(spec.model, batch_size=spec.batch_size)
        return Engine(
            fake,
            identity=spec.model,
            tokenizer_fingerprint=fingerprint({"fake": fake.vocab_size}),
            max_length=1 << 62,
            token_ids=lambda prompt: fake.prompt_ids(str(prompt.messages[-1].get("content") or "")),
        )
    from mopdctl.engines.hf import HFModel
    from mopdctl.engines.tokenizers import tokenizer_fingerprint
    from mopdctl.train.data import prompt_token_ids

    path = workspace.resolve_model(spec.model)
    model = HFModel.load(path, batch_size=spec.batch_size)

    def token_ids(prompt: Prompt) -> tuple[int, ...]:
        tools = list(prompt.tools) if prompt.tools else None
        return tuple(prompt_token_ids(model, prompt.messages, tools, {}, place=prompt.place))

    return Engine(model, model_identity(path), tokenizer_fingerprint(model), model.max_length, token_ids)


def _prompts(spec: RolloutSpec) -> list[Prompt]:
    if not 0 <= spec.temperature < math.inf:
        raise InputError(f"--temperature {spec.temperature}: must be a number from 0")
    return read_prompts(spec.prompts, ("domain",), required=False)


def _batches(jobs: Iterator[Job], size: int) -> Iterator[list[Job]]:
    while batch := list(islice(jobs, size)):
        yield batch
