"""The samples of one step after another: mixed environments, checks beside sampling, groups, further rounds."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

from mopdctl.config.rl import RlConfig
from mopdctl.engines.base import Sampler
from mopdctl.engines.hf import HFModel
from mopdctl.errors import MopdctlError
from mopdctl.records import Sample
from mopdctl.rl.groups import Groups, Rated, checks_that_failed, form_groups, rate
from mopdctl.rl.judge_mix import Judges
from mopdctl.rl.mixture import Mixture, group_jobs, sampled_together
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.jobs import Job
from mopdctl.rollouts.step import StepRollouts
from mopdctl.rollouts.verdicts import judge, verdicts_on
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
        something, or `max_resamples` rounds are over, or there are no others. Every rank comes to the same decision.

        Raises MopdctlError if not one answer could be checked: training would go on without learning anything.
        """
        train = self.config.train
        samples: list[Sample] = []
        rows, round_ = self.mixture.rows(step, train), 0
        used = set(rows)
        formed = sum(not self._is_taught(row) for row in rows)  # a teacher's prompts form no groups
        seconds: dict[str, float] = {}
        while True:
            jobs = group_jobs(self.book, rows, step=step, round_=round_, config=self.config)
            checked = self._sample_and_check(sampler, jobs, policy_version, seconds)
            samples += self.judges.judge(checked, step, self.rollouts.is_kept)
            rated = self._rated(samples)
            self._refuse_unchecked(rated, samples, step)
            groups = form_groups(rated, train)
            wanted = formed - groups.useful
            if train.zero_variance != "resample" or wanted <= 0 or round_ >= train.max_resamples:
                break
            rows = self.mixture.more_rows(step, round_ + 1, wanted, train, used=used)
            if not rows:
                break
            round_ += 1
            used.update(rows)
        self.seconds = seconds
        groups.metrics["rl/resample_rounds"] = round_
        groups.metrics.update(self.judges.take_metrics())
        return samples, groups

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
        checked: list[Sample] = []
        for name in sorted({s.domain for s in samples}):
            own = [s for s in samples if s.domain == name]
            if not self.config.environments[name].asks_verifier:
                checked += own
                continue
            fresh = [s for s in own if not self.rollouts.is_kept(s)]
            began = perf_counter()
            found = {s.sample_id: s for s in judge(fresh, self.judges.prompts, self.student, self.pool)}
            seconds[name] = seconds.get(name, 0.0) + perf_counter() - began
            checked += [found.get(s.sample_id, s) for s in own]
        return checked

    def _rated(self, samples: Sequence[Sample]) -> list[Rated]:
        """What the answers of all ranks earned, those of a teacher's prompts aside."""
        own = [
            rate(s, self.config.train, budget=self.book.budget(self.judges.prompts[s.prompt_id]))
            for s in samples
            if self.config.environments[s.domain].teacher is None
        ]
        return [one for found in distributed.gather_objects(own) for one in found]

    def _refuse_unchecked(self, rated: Sequence[Rated], samples: Sequence[Sample], step: int) -> None:
        """Raises MopdctlError if there are answers and none could be checked. Nothing of the step is committed then."""
        failed = checks_that_failed(rated)
        if not failed:
            return
        words = [f"{name}: {_counted(states)}" for name, states in failed.items()]
        # States are kept without their reasons; a check that fails again tells its own.
        mute = [s for s in samples if not s.verdict_label and s.domain in failed]
        again = [s for s in mute if self.config.environments[s.domain].asks_verifier][:1]
        details = [v.detail for v in verdicts_on(again, self.judges.prompts, self.student, self.pool) if v is not None]
        told = [f"tried again, the first says: {' '.join(detail.split())[:200]}" for detail in details if detail]
        way_on = "once checks work, the same command goes on at this step"
        for name, figures in self.judges.take_metrics().get("rl/judge", {}).items():
            told.append(f"comparisons of {name}: {_counted(figures['judge_error'])}")
            way_on = f"to ask the judge anew, remove {self.judges.folder / f'step-{step:06d}.jsonl'}"
        raise MopdctlError(
            "; ".join([f"step {step}: none of {len(rated)} answers could be checked", *words, *told, way_on])
        )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())
