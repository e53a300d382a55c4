"""The samples of one step after another: mixed environments, checks beside sampling, groups, further rounds."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

from mopdctl.config.rl import RlConfig
from mopdctl.engines.base import Sampler
from mopdctl.engines.hf import HFModel
from mopdctl.records import Sample
from mopdctl.rl.groups import Groups, Rated, form_groups, rate
from mopdctl.rl.judge_mix import Judges
from mopdctl.rl.mixture import Mixture, group_jobs, sampled_together
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.jobs import Job
from mopdctl.rollouts.step import StepRollouts
from mopdctl.rollouts.verdicts import judge
from mopdctl.train import distributed
from mopdctl.verifiers.pool import VerifierPool


@dataclass(slots=True)
class Collector:
    """Samples and checks the groups of one step after another."""

    config: RlConfig
    mixture: Mixture
    book: PromptBook
    student: HFModel
    pool: VerifierPool
    rollouts: StepRollouts
    judges: Judges
    lengths: Mapping[str, float] = field(default_factory=dict)
    """Environment to the mean response length of the step before, in tokens."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Environment to the seconds that checking its answers took in the step before."""

    def collect(self, sampler: Sampler, *, step: int, policy_version: int) -> tuple[list[Sample], Groups]:
        """This rank's samples of a step with their rewards, and the groups of all ranks.

        With `zero_variance: resample`, further prompts are drawn until there are `batch_size` groups that teach
        something, or `max_resamples` rounds are over. Every rank comes to the same decision.
        """
        train = self.config.train
        samples: list[Sample] = []
        rows, round_ = self.mixture.rows(step, train), 0
        seconds: dict[str, float] = {}
        while True:
            jobs = group_jobs(self.book, rows, step=step, round_=round_, config=self.config)
            checked = self._sample_and_check(sampler, jobs, policy_version, seconds)
            samples += self.judges.judge(checked, step, self.rollouts.is_kept)
            groups = form_groups(self._rated(samples), train)
            wanted = train.batch_size - self._taught(step) - groups.useful
            if train.zero_variance != "resample" or wanted <= 0 or round_ >= train.max_resamples:
                break
            round_ += 1
            rows = [row for row in self.mixture.more_rows(step, round_, wanted, train) if not self._is_taught(row)]
        self.seconds = seconds
        groups.metrics["rl/resample_rounds"] = round_
        groups.metrics.update(self.judges.take_metrics())
        return samples, groups

    def _taught(self, step: int) -> int:
        """Prompts of the step that a teacher judges: they form no groups, and none is drawn in their place."""
        return sum(map(self._is_taught, self.mixture.rows(step, self.config.train)))

    def _is_taught(self, row: int) -> bool:
        name = self.mixture.prompts[row].routing["environment"]
        return self.config.environments[name].teacher is not None

    def _sample_and_check(
        self, sampler: Sampler, jobs: Sequence[Job], policy_version: int, seconds: dict[str, float]
    ) -> list[Sample]:
        """Checks of one batch run while the next one is sampled."""
        with ThreadPoolExecutor(max_workers=1) as checker:
            waiting = []
            for batch in sampled_together(jobs, self.lengths, self.seconds):
                found = self.rollouts.sample(sampler, batch, policy_version=policy_version)
                waiting.append(checker.submit(self._check, found, seconds))
            return [sample for future in waiting for sample in future.result()]

    def _check(self, samples: Sequence[Sample], seconds: dict[str, float]) -> list[Sample]:
        """The samples with their verdicts; what was committed with one keeps it."""
        prompts = {p.prompt_id: p for p in self.mixture.prompts}
        checked: list[Sample] = []
        for name in sorted({s.domain for s in samples}):
            own = [s for s in samples if s.domain == name]
            if not self.config.environments[name].asks_verifier:
                checked += own
                continue
            fresh = [s for s in own if not self.rollouts.is_kept(s)]
            began = perf_counter()
            found = {s.sample_id: s for s in judge(fresh, prompts, self.student, self.pool)}
            seconds[name] = seconds.get(name, 0.0) + perf_counter() - began
            checked += [found.get(s.sample_id, s) for s in own]
        return checked

    def _rated(self, samples: Sequence[Sample]) -> list[Rated]:
        """What the answers of all ranks earned, those of a teacher's prompts aside."""
        budgets = {p.prompt_id: self.book.budget(p) for p in self.mixture.prompts}
        own = [
            rate(s, self.config.train, budget=budgets[s.prompt_id])
            for s in samples
            if self.config.environments[s.domain].teacher is None
        ]
        return [one for found in distributed.gather_objects(own) for one in found]
