"""The discriminators of a run, one for each teacher that has one: rewards, their training, their state."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mopdctl.config.blackbox import DiscriminatorConfig
from mopdctl.config.train import OnPolicyConfig
from mopdctl.distill.blackbox.book import AnswerBook
from mopdctl.distill.blackbox.discriminator import Discriminator, discriminator_optimizer, learn, score
from mopdctl.engines.hf import HFModel
from mopdctl.objective.gad import adversarial_rewards
from mopdctl.objective.group import group_advantages
from mopdctl.records import Sample
from mopdctl.train import distributed


class Discriminators:
    """The discriminators of a run by alias. Every rank holds them all and has to make the same calls.

    Made of the student as the run begins, after a warm start. In each step the student is paid by `advantages` first,
    then `train` goes on with the same samples. Whatever is a mapping by alias is empty where there are none.
    """

    def __init__(
        self,
        student: HFModel,
        settings: Mapping[str, DiscriminatorConfig],
        books: Mapping[str, AnswerBook],
        train: OnPolicyConfig,
    ) -> None:
        self._settings, self._books, self._train = dict(sorted(settings.items())), books, train
        self._models = {alias: Discriminator(student) for alias in self._settings}
        self._optimizers = {
            alias: discriminator_optimizer(model, self._settings[alias].learning_rate, train)
            for alias, model in self._models.items()
        }

    @property
    def aliases(self) -> tuple[str, ...]:
        """The teachers that have one, sorted."""
        return tuple(self._settings)

    def is_warming_up(self, alias: str, step: int) -> bool:
        """Whether, in step `step` (from 0), the student trains on the teacher's answers and is not paid yet."""
        return step < self._settings[alias].warm_up_steps

    def rewards(self, samples: Sequence[Sample], *, turn: int) -> dict[str, float]:
        """What each of this rank's samples earns, by id; see `adversarial_rewards`.

        `turn` says which of several answers of the teacher a prompt's samples are paired with.
        """
        found: dict[str, float] = {}
        for alias, pairs in self._pairs(samples, turn).items():
            both = [answer for answer, _ in pairs] + [sample for _, sample in pairs]
            scores = score(self._models[alias], both, batch_size=self._train.sampling_batch_size)
            earned = adversarial_rewards(
                scores[len(pairs) :], scores[: len(pairs)], clip=self._settings[alias].reward_clip
            )
            found |= zip([sample.sample_id for _, sample in pairs], earned, strict=True)
        return found

    def advantages(self, samples: Sequence[Sample], *, turn: int) -> dict[str, float]:
        """The group-relative advantage of each of this rank's samples, by id; groups are those of all ranks."""
        earned = self.rewards(samples, turn=turn)
        own = [(s.teacher_id, s.group_id, s.sample_id, earned[s.sample_id]) for s in samples if s.sample_id in earned]
        groups: dict[tuple[str, str], dict[str, float]] = {}
        for alias, group, sample, reward in sorted(one for found in distributed.gather_objects(own) for one in found):
            groups.setdefault((alias, group), {})[sample] = reward
        advantages: dict[str, float] = {}
        for (alias, _), rewards in groups.items():
            settings = self._settings[alias]
            found = group_advantages(list(rewards.values()), baseline=settings.baseline, scale=settings.scale)
            advantages |= zip(rewards, found, strict=True)
        return {sample_id: advantages[sample_id] for _, _, sample_id, _ in own}

    def train(self, samples: Sequence[Sample], *, turn: int) -> dict[str, Any]:
        """One step of each discriminator on the student's samples and the answers they are paired with.

        Returns the metrics `blackbox/{reward,margin,accuracy,loss}` by alias, measured before the step; an alias
        without samples is left out.
        """
        metrics: dict[str, dict[str, float | None]] = {}
        pairs = self._pairs(samples, turn)
        for alias, model in self._models.items():
            told = learn(
                model,
                self._optimizers[alias],
                pairs[alias],
                learning_rate=self._settings[alias].learning_rate,
                max_grad_norm=self._train.max_grad_norm,
                micro_batches=self._train.gradient_accumulation,
                name=alias,
            )
            for figure in ("reward", "margin", "accuracy", "loss") if told.pairs else ():
                metrics.setdefault(f"blackbox/{figure}", {})[alias] = getattr(told, figure)
        return metrics

    def state(self) -> dict[str, Tensor]:
        """Weights and moments under names that begin with `blackbox/`, for the resumable state of the run."""
        found: dict[str, Tensor] = {}
        for alias, model in self._models.items():
            found |= {f"{_weights(alias)}{name}": tensor for name, tensor in model.learnt().items()}
            (adamw,) = self._optimizers[alias].parts
            for name, parameter in model.named_parameters():
                for key, value in adamw.state.get(parameter, {}).items():
                    found[f"{_moments(alias)}{name}/{key}"] = value
        return found

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave; other tensors are passed over. Raises ValueError for that of other models."""
        for alias, model in self._models.items():
            model.load_learnt(_under(_weights(alias), tensors))
            (adamw,) = self._optimizers[alias].parts
            parameters = dict(model.named_parameters())
            for key, value in _under(_moments(alias), tensors).items():
                name, _, moment = key.rpartition("/")
                adamw.state[parameters[name]][moment] = value.to(parameters[name].device)

    def _pairs(self, samples: Sequence[Sample], turn: int) -> dict[str, list[tuple[Sample, Sample]]]:
        """(teacher's answer, sample) of each sample that a discriminator judges, by alias."""
        found: dict[str, list[tuple[Sample, Sample]]] = {alias: [] for alias in self._settings}
        for sample in samples:
            if sample.teacher_id in found:
                book = self._books[sample.teacher_id]
                found[sample.teacher_id].append((book.answer(sample.prompt_id, turn), sample))
        return found


def _weights(alias: str) -> str:
    return f"blackbox/{alias}/weights/"


def _moments(alias: str) -> str:
    return f"blackbox/{alias}/moments/"


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
