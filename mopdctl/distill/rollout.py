"""The student's answers to one step's prompts, and the Parquet file that keeps them with their scores."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mopdctl.config.teachers import Effort, TeachersFile
from mopdctl.distill.prompts import teacher_of
from mopdctl.engines.base import Sampler, SampleRequest, stream_seed
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.records import Prompt, Rollout
from mopdctl.train import distributed
from mopdctl.train.data import prompt_token_ids

_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("prompt_id", pa.string()),
        ("teacher_id", pa.string()),
        ("policy_version", pa.int32()),
        ("finish_reason", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),
    ]
)


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


def roll_out(
    sampler: Sampler, book: PromptBook, rows: Sequence[int], *, step: int, policy_version: int, config: TeachersFile
) -> list[Rollout]:
    """Samples `samples_per_prompt` answers to each prompt of one step; of them, those of this rank.

    A sample's random stream hangs on seed, step, prompt and sample number alone, so that batching and world size change
    nothing.
    """
    jobs: list[tuple[int, int]] = []
    seen: Counter[int] = Counter()
    for row in rows:  # a batch that reaches into the next epoch may hold a prompt twice
        jobs += [(row, seen[row] + n) for n in range(config.train.samples_per_prompt)]
        seen[row] += config.train.samples_per_prompt
    jobs = jobs[distributed.rank() :: distributed.world_size()]
    requests = []
    for row, number in jobs:
        prompt = book.prompts[row]
        sample_id = f"{prompt.prompt_id}/{step}/{number}"
        requests.append(
            SampleRequest(
                sample_id=sample_id,
                prompt_ids=book.token_ids(row),
                max_new_tokens=book.budget(prompt),
                seed=stream_seed(config.train.seed, "rollout", sample_id),
            )
        )
    completions = sampler.sample(requests, temperature=config.train.temperature)
    return [
        Rollout(
            sample_id=request.sample_id,
            prompt_id=book.prompts[row].prompt_id,
            teacher_id=teacher_of(book.prompts[row].routing, config),
            prompt_ids=request.prompt_ids,
            response_ids=completion.token_ids,
            behavior_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            policy_version=policy_version,
        )
        for (row, _), request, completion in zip(jobs, requests, completions, strict=True)
    ]


def write_rollouts(path: Path, rollouts: Sequence[Rollout], teacher_logprobs: dict[str, list[float]]) -> None:
    """Writes one step's rollouts with the teacher's scores, the file whole."""
    columns = {name: [getattr(r, name) for r in rollouts] for name in _SCHEMA.names if name != "teacher_logprobs"}
    columns["teacher_logprobs"] = [teacher_logprobs[r.sample_id] for r in rollouts]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns, schema=_SCHEMA), temporary, compression="zstd")
    temporary.replace(path)
