"""What is to be sampled: one job per answer. Everything about a job follows from prompt, sample number and seed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mopdctl.engines.base import SampleRequest, stream_seed
from mopdctl.errors import InputError
from mopdctl.records import Prompt


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to sample, and whose it is."""

    sample_id: str
    prompt_id: str
    group_id: str
    generation_index: int
    domain: str
    teacher_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    """Budget of the response in tokens, tool results included."""
    seed: int
    """Key of the sample's own random stream."""

    def request(self, response_ids: tuple[int, ...] = ()) -> SampleRequest:
        """The job for an engine, after what is there already."""
        return SampleRequest(self.sample_id, self.prompt_ids, self.max_new_tokens, self.seed, response_ids)

    def forced(self, read_ids: tuple[int, ...], decoded_ids: tuple[int, ...], *, whole: bool) -> SampleRequest:
        """The job for an engine that is to read `read_ids` and to decode `decoded_ids` again.

        Nothing follows if they are all that belongs there (`whole`).
        """
        budget = len(read_ids) + len(decoded_ids) if whole else self.max_new_tokens
        return SampleRequest(self.sample_id, self.prompt_ids, budget, self.seed, read_ids, decoded_ids)


def make_job(
    prompt: Prompt,
    index: str,
    *,
    seed: int,
    group_id: str,
    generation_index: int,
    domain: str,
    teacher_id: str,
    prompt_ids: tuple[int, ...],
    max_new_tokens: int,
) -> Job:
    """The job of sample `index` of a prompt. Its id and its random stream hang on prompt id, index and seed alone.

    A store may therefore be merged with that of another seed, and a run may be renamed.
    """
    return Job(
        sample_id=f"{prompt.prompt_id}/{index}@{seed}",
        prompt_id=prompt.prompt_id,
        group_id=group_id,
        generation_index=generation_index,
        domain=domain,
        teacher_id=teacher_id,
        prompt_ids=prompt_ids,
        max_new_tokens=max_new_tokens,
        seed=stream_seed(seed, "rollout", f"{prompt.prompt_id}/{index}"),
    )


def plain_jobs(
    prompts: Sequence[Prompt],
    token_ids: Callable[[Prompt], tuple[int, ...]],
    *,
    samples: int,
    max_new_tokens: int,
    max_length: int,
    seed: int,
) -> Iterator[Job]:
    """`samples` jobs for each prompt, in order. Raises InputError for a prompt that leaves no room for its answer."""
    for prompt in prompts:
        ids = token_ids(prompt)
        if not ids:
            raise InputError(f"{prompt.place}: the prompt has no tokens")
        if len(ids) + max_new_tokens > max_length:
            raise InputError(
                f"{prompt.place}: prompt of {len(ids)} tokens and an answer of up to {max_new_tokens} do not fit into "
                f"the model's context of {max_length}; shorten the prompt or lower --max-new-tokens"
            )
        for number in range(samples):
            yield make_job(
                prompt,
                str(number),
                seed=seed,
                group_id=prompt.prompt_id,
                generation_index=number,
                domain=prompt.routing.get("domain", ""),
                teacher_id="",
                prompt_ids=ids,
                max_new_tokens=max_new_tokens,
            )
