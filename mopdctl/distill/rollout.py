"""The student's answers to each step's prompts, kept in the run's rollout store with the teachers' scores."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mopdctl.config.teachers import Effort, TeachersFile
from mopdctl.distill.prompts import teacher_of
from mopdctl.engines.base import Sampler
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import tokenizer_fingerprint
from mopdctl.errors import InputError
from mopdctl.files import fingerprint
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.generate import RolloutLog, generate
from mopdctl.rollouts.jobs import Job, make_job
from mopdctl.store.compact import compact
from mopdctl.store.store import Store, StoreWriter
from mopdctl.train import distributed
from mopdctl.train.data import prompt_token_ids

OnNote = Callable[[str], None]


class PromptBook:
    """Prompts as token ids, each tokenized once and remembered."""

    def __init__(
        self, student: HFModel, prompts: Sequence[Prompt], config: TeachersFile, *, max_length: int | None = None
    ) -> None:
        """`max_length` is the shortest context of all who read the prompts; None takes the student's."""
        self._student, self._config = student, config
        self._max_length = min(max_length or student.max_length, student.max_length)
        self.prompts = prompts
        self._ids: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.prompts)

    def budget(self, prompt: Prompt) -> int:
        """The token budget of a prompt's answer: that of its effort, else the run's."""
        effort = self._effort(prompt)
        return (effort.max_new_tokens if effort else None) or self._config.train.max_new_tokens

    def token_ids(self, row: int) -> tuple[int, ...]:
        """The prompt's ids. Raises InputError if prompt and budget do not fit into the student's context."""
        if row not in self._ids:
            prompt = self.prompts[row]
            effort = self._effort(prompt)
            tools = list(prompt.tools) if prompt.tools else None
            ids = prompt_token_ids(
                self._student,
                prompt.messages,
                tools,
                dict(effort.chat_template_kwargs) if effort else {},
                place=prompt.place,
            )
            budget = self.budget(prompt)
            if len(ids) + budget > self._max_length:
                raise InputError(
                    f"{prompt.place}: prompt of {len(ids)} tokens and an answer of up to {budget} do not fit into the "
                    f"model's context of {self._max_length}; shorten the prompt or lower max_new_tokens"
                )
            self._ids[row] = tuple(ids)
        return self._ids[row]

    def _effort(self, prompt: Prompt) -> Effort | None:
        keys = self._config.routing_keys
        return self._config.efforts.get(prompt.routing[keys[1]]) if len(keys) > 1 else None


def step_jobs(book: PromptBook, rows: Sequence[int], *, step: int, config: TeachersFile) -> list[Job]:
    """One job for each of `samples_per_prompt` answers to each prompt of one step.

    A sample's random stream hangs on seed, step, prompt and sample number alone, so that batching and world size change
    nothing.
    """
    jobs = []
    seen: Counter[int] = Counter()
    for row in rows:  # a batch that reaches into the next epoch may hold a prompt twice
        prompt = book.prompts[row]
        for number in range(seen[row], seen[row] + config.train.samples_per_prompt):
            jobs.append(
                make_job(
                    prompt,
                    f"{step}/{number}",
                    seed=config.train.seed,
                    group_id=f"{prompt.prompt_id}/{step}",
                    generation_index=number,
                    domain=prompt.routing[config.routing_keys[0]],
                    teacher_id=teacher_of(prompt.routing, config),
                    prompt_ids=book.token_ids(row),
                    max_new_tokens=book.budget(prompt),
                )
            )
        seen[row] += config.train.samples_per_prompt
    return jobs


class StepRollouts:
    """The rollouts of a run: each sampled once, logged while it is written, committed with its scores.

    Every rank logs the answers that it samples; rank 0 commits those of all. What a killed run has logged or committed
    is not sampled again: a committed answer is read back, an interrupted one goes on from its last token.
    """

    def __init__(
        self,
        folder: Path,
        book: PromptBook,
        student: HFModel,
        config: TeachersFile,
        record: dict[str, Any],
        on_note: OnNote = lambda line: None,
    ) -> None:
        """Opens or creates the store in `folder`; `record` is the run's, and the store's identity.

        Raises InputError if another process or another run has the store.
        """
        self._book, self._config = book, config
        self._tokenizer = tokenizer_fingerprint(student)
        sampling = {
            "model": record["student"],
            "temperature": config.train.temperature,
            "max_new_tokens": config.train.max_new_tokens,
        }
        self._sampling = fingerprint(sampling)
        identity = {"tokenizer": self._tokenizer, "command": "distill", "run": record}
        self._writer = StoreWriter(folder, identity) if distributed.rank() == 0 else None
        distributed.barrier()
        self._store = self._writer.store if self._writer else Store(folder)
        self._committed = {
            sample_id: number
            for number, sample_id in enumerate(self._store.meta_table(["sample_id"])["sample_id"].to_pylist())
        }
        self._log = RolloutLog(folder / "wal", writer=f"rank-{distributed.rank()}", level=config.train.durability)
        self._log.committed(list(self._committed))
        for line in self._log.notes:
            on_note(line)

    def sample(self, sampler: Sampler, rows: Sequence[int], *, step: int, policy_version: int) -> list[Sample]:
        """The answers of one step; of them, those of this rank, in the order of their jobs."""
        jobs = step_jobs(self._book, rows, step=step, config=self._config)
        jobs = jobs[distributed.rank() :: distributed.world_size()]
        there = [job.sample_id for job in jobs if job.sample_id in self._committed]
        found = {s.sample_id: s for s in self._store.read([self._committed[i] for i in there])} if there else {}
        for sample in generate(
            [job for job in jobs if job.sample_id not in found],
            sampler,
            self._log,
            temperature=self._config.train.temperature,
            policy_version=policy_version,
            tokenizer_fingerprint=self._tokenizer,
            sampling_fingerprint=self._sampling,
            redecode=True,
        ):
            found[sample.sample_id] = sample
        return [found[job.sample_id] for job in jobs]

    def keep(self, samples: Sequence[Sample], teacher_logprobs: Mapping[str, Sequence[float]]) -> None:
        """Commits the step's samples with the teachers' scores, one per loss-active token, by sample id."""
        fresh = [
            replace(sample, teacher_logprobs=np.array(teacher_logprobs[sample.sample_id], np.float32))
            for sample in samples
            if sample.sample_id not in self._committed
        ]
        gathered = [sample for found in distributed.gather_objects(fresh) for sample in found]
        if self._writer:
            self._writer.commit(sorted(gathered, key=lambda sample: sample.sample_id))
        distributed.barrier()
        self._log.committed([sample.sample_id for sample in samples])

    def close(self) -> None:
        """Closes log and store, after the last step: nothing is left in the log, and the commits become few files."""
        self._log.finish()
        if self._writer:
            compact(self._writer)
            self._writer.drop_history()
            self._writer.close()
