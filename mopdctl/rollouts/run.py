"""`mopdctl rollout`: prompts through one model into a store, in batches that are checked and committed as they come."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from mopdctl.engines.base import Sampler
from mopdctl.engines.fake import CALL, END, FakeModel
from mopdctl.environments.registry import ENVIRONMENTS
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest, fingerprint
from mopdctl.records import Prompt
from mopdctl.rollouts.generate import RolloutLog, generate
from mopdctl.rollouts.jobs import Job, plain_jobs
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.rollouts.tools import environment_tools
from mopdctl.rollouts.verdicts import Trouble, check_verifiable, verdicts_on, with_verdict
from mopdctl.runs import Workspace, model_identity
from mopdctl.store.store import Store, StoreWriter
from mopdctl.store.summary import verdict_counts
from mopdctl.train.spans import ChatModel
from mopdctl.verifiers.pool import VerifierPool


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What `mopdctl rollout` is asked for."""

    name: str
    model: str
    prompts: Path | tuple[Prompt, ...]
    """A JSONL or Parquet file, or prompts with unique ids."""
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
    verify: bool = True
    """Whether answers to prompts that name a verifier are checked before they are committed."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A sampler with what the store has to know about it."""

    sampler: Sampler
    identity: str
    tokenizer_fingerprint: str
    max_length: int
    token_ids: Callable[[Prompt], tuple[int, ...]]
    chat: ChatModel
    """What turns its tokens back into text."""


def plan_rollout(spec: RolloutSpec, workspace: Workspace) -> dict[str, Any]:
    """Checks everything that can be checked without loading a model. Writes nothing."""
    prompts = _checked_prompts(spec)
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
    """Samples what is still missing in the store `spec.name`; returns counts, mean reward and states of the store.

    A killed run goes on where it was: committed samples stay, logged ones go on from their last token. Raises
    MopdctlError if fewer answers came out than were asked for.
    """
    prompts = _checked_prompts(spec)
    engine = load_engine(spec, workspace)
    identity = {
        "tokenizer": engine.tokenizer_fingerprint,
        "command": "rollout",
        "model": engine.identity,
        "prompts": _prompts_identity(spec.prompts),
        "samples": spec.samples,
        "max_new_tokens": spec.max_new_tokens,
        "temperature": spec.temperature,
        "seed": spec.seed,
    }
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    assert len(by_id) == len(prompts), "prompts with unique ids"
    tools = None if spec.engine == "fake" else environment_tools(by_id, engine.chat)
    if tools:
        names = {str(prompt.environment["name"]) for prompt in prompts if prompt.environment}
        identity["environments"] = {name: ENVIRONMENTS[name].version for name in sorted(names)}
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
        VerifierPool() as pool,
    ):
        trouble = Trouble()
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
                tools=tools,
            ):
                samples.append(sample)
                on_progress(len(writer.committed) + len(samples), total)
            if spec.verify:
                verdicts = verdicts_on(samples, by_id, engine.chat, pool)
                trouble.see(samples, verdicts)
                samples = [with_verdict(s, v) for s, v in zip(samples, verdicts, strict=True)]
            writer.commit(sorted(samples, key=lambda sample: sample.sample_id))
            log.committed([sample.sample_id for sample in samples])
        log.finish()
        if len(writer.committed) != total:
            raise MopdctlError(f"{folder}: {len(writer.committed)} answers where {total} were asked for")
        for line in trouble.lines():
            on_note(line)
        if spec.verify and (late := _unjudged(writer.store, by_id)):
            on_note(f"{late} answers of an earlier run are not checked; `mopdctl rollout --reverify` does that")
        return {
            "store": str(folder),
            "samples": len(writer.committed),
            "new": len(writer.committed) - len(there),
            "tokens": writer.store.manifest.tokens,
            **scores(writer.store.meta_table(["reward", "verdict"]).to_pydict()),
        }


def scores(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Mean reward of the samples that have one, None if none has, and how often each state occurs."""
    rewards = [reward for reward in columns["reward"] if reward is not None]
    mean = round(math.fsum(rewards) / len(rewards), 6) if rewards else None
    return {"reward": mean, "verdicts": verdict_counts(columns["verdict"])}


def _unjudged(store: Store, prompts: Mapping[str, Prompt]) -> int:
    """Answers without a verdict whose prompt names a verifier."""
    meta = store.meta_table(["prompt_id", "verdict"]).to_pydict()
    pairs = zip(meta["prompt_id"], meta["verdict"], strict=True)
    return sum(verdict is None and prompts[name].verifier is not None for name, verdict in pairs)


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
            chat=FakeText(),
        )
    from mopdctl.engines.hf import HFModel
    from mopdctl.engines.tokenizers import tokenizer_fingerprint

    path = workspace.resolve_model(spec.model)
    model = HFModel.load(path, batch_size=spec.batch_size)
    return Engine(
        model,
        identity=model_identity(path),
        tokenizer_fingerprint=tokenizer_fingerprint(model),
        max_length=model.max_length,
        token_ids=lambda prompt: plain_token_ids(model, prompt),
        chat=model,
    )


def plain_token_ids(chat: ChatModel, prompt: Prompt) -> tuple[int, ...]:
    """A prompt as the chat template writes it without further arguments."""
    from mopdctl.train.data import prompt_token_ids

    tools = list(prompt.tools) if prompt.tools else None
    return tuple(prompt_token_ids(chat, prompt.messages, tools, {}, place=prompt.place))


@dataclass(frozen=True, slots=True)
class FakeText:
    """Stands for a tokenizer of the fake engine, as far as reading goes: its tokens are written as their numbers."""

    eos_ids: frozenset[int] = frozenset({END})
    all_special_ids: tuple[int, ...] = (END, CALL)
    all_special_tokens: tuple[str, ...] = ("<end>", "<call>")
    added_tokens_decoder: Mapping[int, Any] = field(default_factory=dict, hash=False)

    @property
    def tokenizer(self) -> "FakeText":
        """Itself."""
        return self

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The numbers, with spaces between them."""
        return " ".join(map(str, token_ids))


def _checked_prompts(spec: RolloutSpec) -> list[Prompt]:
    if not 0 <= spec.temperature < math.inf:
        raise InputError(f"--temperature {spec.temperature}: must be a number from 0")
    given = spec.prompts
    prompts = read_prompts(given, ("domain",), required=False) if isinstance(given, Path) else list(given)
    if spec.verify:
        with VerifierPool() as pool:
            check_verifiable(prompts, pool)
    return prompts


def _prompts_identity(prompts: Path | tuple[Prompt, ...]) -> str:
    """The digest of the file, or of what the prompts say; where they were read says nothing."""
    if isinstance(prompts, Path):
        return file_digest(prompts)
    return fingerprint([asdict(prompt) | {"place": ""} for prompt in prompts])


def _batches(jobs: Iterator[Job], size: int) -> Iterator[list[Job]]:
    while batch := list(islice(jobs, size)):
        yield batch
