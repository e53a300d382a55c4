"""What judges add to the rewards of a step: groups of all ranks together, asked once, mixed with the verifier's."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from mopdctl.config.judge import JudgeReward
from mopdctl.config.rl import RlConfig
from mopdctl.engines.chat import ChatEngine
from mopdctl.engines.openai import OpenAIServer
from mopdctl.records import Prompt, Sample
from mopdctl.rl.judge import (
    PROMPT_VERSION,
    Answer,
    GroupPlan,
    Reading,
    Request,
    Tally,
    answer_of,
    group_rewards,
    plan_group,
    read_reply,
)
from mopdctl.rl.judge_ask import Asking
from mopdctl.rl.judge_journal import OK, ReplyJournal
from mopdctl.rollouts.generate import TOOL_LOST
from mopdctl.rollouts.step import OnNote
from mopdctl.rollouts.tools import attempt_of
from mopdctl.rollouts.verdicts import with_verdict
from mopdctl.train import distributed
from mopdctl.train.spans import ChatModel
from mopdctl.verifiers import Verdict, VerdictState

JUDGE_ERROR = "judge_error"
"""Label of an answer that no comparison came to a result for."""
NOT_RECORDED = "not_recorded"
"""Why a committed answer has no comparison: its journal is gone, and it is not asked about again."""


def open_judge(judge: JudgeReward) -> ChatEngine:
    """The judge's server. Raises InputError if its key is not in the environment."""
    return OpenAIServer(judge.base_url, api_key_env=judge.api_key_env, timeout_s=judge.timeout_s)


def check_judges(config: RlConfig) -> None:
    """Raises InputError for a judge whose key is not in the environment. Connects to none."""
    for environment in config.environments.values():
        if environment.judge is not None:
            open_judge(environment.judge)


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer on its way to the judge."""

    sample_id: str
    group_id: str
    environment: str
    prompt_id: str
    answer: Answer
    """What the judge sees of it."""
    counts: bool
    """Whether what the judge says of it counts for it, and not only for those that it meets."""
    committed: bool


@dataclass(slots=True)
class Judges:
    """The judges of a run's environments. All ranks call `judge` together; rank 0 asks."""

    config: RlConfig
    folder: Path
    """Where the journals lie, one for each step."""
    prompts: Mapping[str, Prompt]
    """By id."""
    chat: ChatModel
    on_note: OnNote = lambda line: None
    open_engine: Callable[[JudgeReward], ChatEngine] = open_judge
    tallies: dict[str, Tally] = field(default_factory=dict)
    """What became of the comparisons since `take_metrics`, by environment; on rank 0."""
    seconds: float = 0.0

    def judge(self, samples: Sequence[Sample], step: int, is_kept: Callable[[Sample], bool]) -> list[Sample]:
        """The samples of whole groups with what judge and verifier give them together; others as they are.

        Those that `is_kept` finds committed keep their reward: their replies are only counted again. Raises
        MopdctlError if a judge is down.
        """
        if all(environment.judge is None for environment in self.config.environments.values()):
            return list(samples)
        began = perf_counter()
        judged = self._judged(samples, is_kept)
        everyone = [one for found in distributed.gather_objects(judged) for one in found]
        rewards = distributed.gather_objects(self._rewards(everyone, step) if distributed.rank() == 0 else {})[0]
        self.seconds += perf_counter() - began
        return [s if is_kept(s) else self._mixed(s, rewards.get(s.sample_id)) for s in samples]

    def _mixed(self, sample: Sample, reward: float | None) -> Sample:
        judge = self.config.environments[sample.domain].judge
        return sample if judge is None else mixed(sample, judge, reward)

    def take_metrics(self) -> dict[str, Any]:
        """`rl/judge` by environment, and what it took; nothing without a judge. Begins to count anew."""
        if not self.tallies:
            return {}
        metrics = {
            "rl/judge": {name: tally.metrics() for name, tally in sorted(self.tallies.items())},
            "perf/judge_s": round(self.seconds, 4),
        }
        self.tallies, self.seconds = {}, 0.0
        return metrics

    def _judged(self, samples: Sequence[Sample], is_kept: Callable[[Sample], bool]) -> list[Judged]:
        """A conversation whose tool result was lost is left out: what would have come of it, nobody knows."""
        found = []
        for sample in samples:
            judge = self.config.environments[sample.domain].judge
            if judge is None or sample.finish_reason == TOOL_LOST:
                continue
            answer = answer_of(attempt_of(self.prompts[sample.prompt_id], sample, self.chat))
            # A committed answer that was judged in vain has that label, and no reward any more.
            counts = not judge.verifier_weight or sample.reward is not None or sample.verdict_label == JUDGE_ERROR
            found.append(
                Judged(
                    sample.sample_id,
                    sample.group_id,
                    sample.domain,
                    sample.prompt_id,
                    answer,
                    counts=counts,
                    committed=is_kept(sample),
                )
            )
        return found

    def _rewards(self, everyone: Iterable[Judged], step: int) -> dict[str, float | None]:
        """Sample id to the judge's reward. A group in which it would count for nobody is not asked about."""
        groups: dict[str, list[Judged]] = {}
        for one in sorted(everyone, key=lambda one: one.sample_id):
            groups.setdefault(one.group_id, []).append(one)
        groups = {group_id: members for group_id, members in groups.items() if any(one.counts for one in members)}
        plans = {group_id: self._plan(members) for group_id, members in groups.items()}
        fresh: dict[str, list[Request]] = {}
        for group_id, plan in plans.items():
            if not groups[group_id][0].committed:
                requests = fresh.setdefault(groups[group_id][0].environment, [])
                requests += [request for pair in plan.pairs for request in pair.asked]
        rewards: dict[str, float | None] = {}
        if not plans:
            return rewards
        with ReplyJournal(self.folder / f"step-{step:06d}.jsonl") as journal:
            for line in journal.notes:
                self.on_note(line)
            if fresh:
                asyncio.run(self._ask(fresh, journal))
            for group_id, plan in plans.items():
                members = groups[group_id]
                judge = self._judge(members[0])
                tally = self.tallies.setdefault(members[0].environment, Tally())
                found = group_rewards(plan, partial(_read, journal, judge.scale), judge.scale, tally)
                rewards |= zip([one.sample_id for one in members], found, strict=True)
        return rewards

    def _judge(self, one: Judged) -> JudgeReward:
        judge = self.config.environments[one.environment].judge
        assert judge is not None
        return judge

    def _plan(self, members: Sequence[Judged]) -> GroupPlan:
        prompt = self.prompts[members[0].prompt_id]
        seed = self.config.train.seed
        return plan_group(prompt, [one.answer for one in members], self._judge(members[0]), seed=seed)

    async def _ask(self, requests: Mapping[str, Sequence[Request]], journal: ReplyJournal) -> None:
        """The judges of all environments side by side; what is on its way when one turns out to be down is kept."""

        async def ask(name: str) -> None:
            judge = self.config.environments[name].judge
            assert judge is not None
            engine = self.open_engine(judge)
            try:
                await Asking(name, judge, engine, journal, self.on_note).ask(requests[name])
            finally:
                await engine.close()

        await asyncio.gather(*map(ask, requests))


def _read(journal: ReplyJournal, scale: tuple[int, int], key: str) -> Reading:
    entry = journal.get(key)
    if entry is None:
        return NOT_RECORDED
    return read_reply(entry.raw, scale) if entry.state == OK else entry.state


def mixed(sample: Sample, judge: JudgeReward, reward: float | None) -> Sample:
    """The sample with (verifier_weight * verifier + weight * judge) / (verifier_weight + weight) as its reward.

    An answer that the verifier gave no reward keeps the verifier's state, whatever the judge says. One without a reward
    of the judge is an `infra_error`: the machinery failed, not the answer.
    """
    verified = judge.verifier_weight > 0
    if verified and sample.reward is None:
        return sample
    name = f"mix:{sample.verifier}+judge" if verified else "judge"
    if reward is None:
        label = TOOL_LOST if sample.finish_reason == TOOL_LOST else JUDGE_ERROR
        return with_verdict(sample, Verdict(VerdictState.INFRA_ERROR, None, name, PROMPT_VERSION, label=label))
    total = judge.weight * reward + (judge.verifier_weight * sample.reward if sample.reward is not None else 0.0)
    reward = min(total / (judge.weight + judge.verifier_weight), 1.0)
    return with_verdict(
        sample, Verdict(VerdictState.OK, reward, name, PROMPT_VERSION, label=sample.verdict_label or "")
    )
