"""The answers of a training run, step by step: each sampled once, kept in the run's rollout store."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from mopdctl.engines.base import Sampler
from mopdctl.files import fingerprint
from mopdctl.records import Sample
from mopdctl.rollouts.generate import RolloutLog, Tools, generate
from mopdctl.rollouts.jobs import Job
from mopdctl.store.compact import compact
from mopdctl.store.store import Store, StoreWriter
from mopdctl.train import distributed

OnNote = Callable[[str], None]


class StepRollouts:
    """The rollouts of a run: each sampled once, logged while it is written, committed with its scores.

    Every rank logs the answers that it samples; rank 0 commits those of all. What a killed run has logged or committed
    is not sampled again: a committed answer is read back, an interrupted one goes on from its last token.
    """

    def __init__(
        self,
        folder: Path,
        *,
        identity: dict[str, Any],
        sampling: dict[str, Any],
        temperature: float,
        durability: str,
        tools: Tools | None = None,
        on_note: OnNote = lambda line: None,
    ) -> None:
        """Opens or creates the store in `folder`.

        `identity` is what made the store (`tokenizer`, `command`, `run`); `sampling` what every sample was drawn with.
        Raises InputError if another process or another run has the store.
        """
        self._temperature, self._tools = temperature, tools
        self._tokenizer = identity["tokenizer"]
        self._sampling = fingerprint(sampling)
        self._writer = StoreWriter(folder, identity) if distributed.rank() == 0 else None
        distributed.barrier()
        self._store = self._writer.store if self._writer else Store(folder)
        self._committed = {
            sample_id: number
            for number, sample_id in enumerate(self._store.meta_table(["sample_id"])["sample_id"].to_pylist())
        }
        self._log = RolloutLog(folder / "wal", writer=f"rank-{distributed.rank()}", level=durability)
        self._log.committed(list(self._committed))
        for line in self._log.notes:
            on_note(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of log and store, whatever happened; what they hold stays for the process that goes on."""
        self._log.__exit__()
        if self._writer:
            self._writer.close()

    def sample(self, sampler: Sampler, jobs: Sequence[Job], *, policy_version: int) -> list[Sample]:
        """The answers to the jobs; of them, those of this rank, in order."""
        own = jobs[distributed.rank() :: distributed.world_size()]
        there = [job.sample_id for job in own if job.sample_id in self._committed]
        found = {s.sample_id: s for s in self._store.read([self._committed[i] for i in there])} if there else {}
        for sample in generate(
            [job for job in own if job.sample_id not in found],
            sampler,
            self._log,
            temperature=self._temperature,
            policy_version=policy_version,
            tokenizer_fingerprint=self._tokenizer,
            sampling_fingerprint=self._sampling,
            tools=self._tools,
            redecode=True,
        ):
            found[sample.sample_id] = sample
        return [found[job.sample_id] for job in own]

    def is_kept(self, sample: Sample) -> bool:
        """Whether the sample is committed already, with all that was said about it."""
        return sample.sample_id in self._committed

    def keep(self, samples: Sequence[Sample]) -> None:
        """Commits a step's samples, those of all ranks in one commit; what is committed already stays as it is."""
        fresh = [sample for sample in samples if not self.is_kept(sample)]
        gathered = [sample for found in distributed.gather_objects(fresh) for sample in found]
        if self._writer:
            self._writer.commit(sorted(gathered, key=lambda sample: sample.sample_id))
        distributed.barrier()
        self._log.committed([sample.sample_id for sample in samples])

    def finish(self) -> None:
        """After the last step: nothing is left in the log, and the commits become few files."""
        self._log.finish()
        if self._writer:
            compact(self._writer)
            self._writer.drop_history()
