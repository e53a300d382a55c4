"""What every training run does around its loop: one writer, resumable state, a line of metrics a step, a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from mopdctl.config.train import TrainConfig
from mopdctl.engines.hf import HFModel
from mopdctl.files import fingerprint, write_json
from mopdctl.runs import MetricsLog, building, checkpoint_digest, finished, locked, open_run, write_card
from mopdctl.train import distributed
from mopdctl.train.optimizer import build_optimizers
from mopdctl.train.state import load_state, save_state, saved_steps, told_if_unwritable

OnStep = Callable[[int, dict[str, Any]], None]


@dataclass(slots=True)
class Clock:
    """Seconds per stage of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to the stage `name`."""
        began = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """`perf/<stage>_s` for every stage."""
        return {f"perf/{stage}_s": round(seconds, 4) for stage, seconds in self.seconds.items()}


@contextmanager
def sole_writer(folder: Path, target: Path, record: dict[str, Any]) -> Iterator[bool]:
    """Holds the run for this process. False if another one finished it while this one was loading.

    Raises InputError if another process has the run, or if it was begun with another configuration.
    """
    with ExitStack() as held:
        with told_if_unwritable(folder):
            held.enter_context(locked(folder / f"rank-{distributed.rank()}"))
        if finished(target, folder, record):
            yield False
        else:
            open_run(folder, record)
            yield True


def is_fresh(folder: Path) -> bool:
    """Whether the run has no state to go on from."""
    return not saved_steps(folder / "state")


class Session:
    """A training run between its first step and its checkpoint.

    Made once the model has the weights to start from; a saved state then takes their place.
    """

    def __init__(
        self,
        folder: Path,
        model: HFModel,
        config: TrainConfig,
        on_step: OnStep,
        *,
        documents: Mapping[str, Any] | None = None,
    ) -> None:
        """`on_step` is told of each finished step: how many there are, and the metrics of the last.

        `documents` are JSON documents by file name that every state and the checkpoint get beside the weights.
        """
        self._folder, self._model, self._config, self._on_step = folder, model, config, on_step
        self._documents = dict(documents or {})
        if config.gradient_checkpointing:
            model.model.gradient_checkpointing_enable()
        self.optimizers = build_optimizers(model, config)
        self.first, self.extra = load_state(folder / "state", model.model, self.optimizers)
        """The step to go on with, and the tensors that were saved beside the weights."""
        is_main = distributed.rank() == 0
        self._log = MetricsLog(folder / "metrics.jsonl", next_step=self.first) if is_main else None

    def end_step(self, step: int, metrics: dict[str, Any], *, extra: dict[str, Tensor] | None = None) -> None:
        """Writes the metrics of step `step` (from 0), and every `checkpoint_every` steps all that resuming needs."""
        if self._log:
            with told_if_unwritable(self._folder / "metrics.jsonl"):
                self._log.write(metrics)
        self._on_step(step + 1, metrics)
        if (step + 1) % self._config.checkpoint_every == 0 and step + 1 < self._config.steps:
            save_state(
                self._folder / "state",
                step + 1,
                self._model.model,
                self.optimizers,
                extra=extra,
                keep_last=self._config.keep_last,
                documents=self._documents,
            )

    def publish(self, target: Path, card: dict[str, Any], record: dict[str, Any]) -> None:
        """Writes the checkpoint with its card; every rank waits until it is there."""
        if self._log:
            self._log.close()
            with told_if_unwritable(target), building(target) as temporary:
                self._model.save(temporary)
                for name, document in self._documents.items():
                    write_json(temporary / name, document)
                made_by = {"config": record, "fingerprint": fingerprint(record)}
                write_card(temporary, {**card, **made_by, "digest": checkpoint_digest(temporary)})
        distributed.barrier()
