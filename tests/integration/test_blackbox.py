"""Black-box teachers in the loop: a student moves to their answers, and a run that stops goes on as it would have."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mopdctl
from mopdctl.config.blackbox import BlackBox, DiscriminatorConfig
from mopdctl.config.distill import DistillTrainConfig
from mopdctl.distill.blackbox.book import AnswerBook, open_book
from mopdctl.distill.blackbox.discriminators import Discriminators
from mopdctl.distill.blackbox.loss import black_box_loss
from mopdctl.distill.blackbox.sequences import sequences_for
from mopdctl.engines.hf import HFModel
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import AnswerSettings, PromptBook
from mopdctl.rollouts.jobs import make_job
from mopdctl.train import distributed
from mopdctl.train.loop import update
from mopdctl.train.optimizer import Optimizers, build_optimizers
from mopdctl.train.state import load_state, save_state
from mopdctl.verifiers.pool import VerifierPool

PROMPTS = [
    Prompt(name, ({"role": "user", "content": text},), None, {"domain": "arithmetic"}, place=f"prompts:{name}")
    for name, text in (("a", "7 + 5"), ("b", "9 - 2"))
]
TAUGHT = {"a": "12", "b": "7"}
KNOWN = ("12", "7", "3", "45")
"""What the student answers to either prompt at first, all alike."""
BUDGET = 6


class World:
    """A student that knows four answers, and what the teacher answered."""

    def __init__(self, path: Path, folder: Path, train: DistillTrainConfig) -> None:
        self.train = train
        self.student = HFModel.load(str(path), train=True, batch_size=64)
        self.optimizers: Optimizers = build_optimizers(self.student, train)
        self.prompts = PromptBook(self.student, PROMPTS, lambda p: AnswerSettings(BUDGET))
        self.taught = self.book(folder / "taught.jsonl", list(TAUGHT.items()))
        self.known = self.book(folder / "known.jsonl", [(name, text) for name in TAUGHT for text in KNOWN])

    def book(self, path: Path, answers: list[tuple[str, str]]) -> AnswerBook:
        path.write_text("".join(json.dumps({"prompt_id": name, "answer": text}) + "\n" for name, text in answers))
        with VerifierPool() as pool:
            return open_book(
                "api",
                BlackBox(gives="answers", answers=path),
                PROMPTS,
                self.student,
                lambda p: AnswerSettings(BUDGET),
                files=[path],
                domains=dict.fromkeys(TAUGHT, "arithmetic"),
                max_length=128,
                pool=pool,
            )

    def discriminators(self, **settings: Any) -> Discriminators:
        config = DiscriminatorConfig(**{"learning_rate": 1e-3} | settings)
        return Discriminators(self.student, {"api": config}, {"api": self.taught}, self.train)

    def step(self, step: int, found: Discriminators, *, turn: int = 0) -> dict[str, Any]:
        """One step as the loop makes it; the metrics of student and discriminator."""
        samples = self.sample(step)
        drawn = [("api", prompt.prompt_id) for prompt in PROMPTS]
        sequences = sequences_for(
            drawn, samples, {"api": self.taught}, found, step=step, turn=turn, weights={"api": 1.0}
        )
        result, norm = update(self.student, self.optimizers, sequences, black_box_loss(self.train), step, self.train)
        return {"loss": result.loss, "norm": norm, **result.means, **found.train(samples, turn=turn)}

    def answers(self, steps: int) -> list[float]:
        """Trains on all known answers in turn; the mean negative log-likelihood of each step."""
        none = Discriminators(self.student, {}, {}, self.train)
        found = []
        for step in range(steps):
            drawn = [("api", prompt.prompt_id) for prompt in PROMPTS for _ in KNOWN]
            sequences = sequences_for(drawn, [], {"api": self.known}, none, step=step, turn=0, weights={"api": 1.0})
            loss = black_box_loss(self.train)
            result, _ = update(self.student, self.optimizers, sequences, loss, step, self.train)
            found.append(result.means["blackbox/nll_nats"]["api"])
        return found

    def sample(self, step: int) -> list[Sample]:
        jobs = [
            make_job(
                prompt,
                f"{step}/{number}",
                seed=0,
                group_id=f"{prompt.prompt_id}/{step}",
                generation_index=number,
                domain="arithmetic",
                teacher_id="api",
                prompt_ids=self.prompts.token_ids(row),
                max_new_tokens=BUDGET,
            )
            for row, prompt in enumerate(PROMPTS)
            for number in range(self.train.samples_per_prompt)
        ]
        jobs = jobs[distributed.rank() :: distributed.world_size()]
        completions = self.student.sample([job.request() for job in jobs], temperature=1.0)
        return [
            Sample(
                sample_id=job.sample_id,
                prompt_id=job.prompt_id,
                group_id=job.group_id,
                generation_index=job.generation_index,
                domain=job.domain,
                teacher_id=job.teacher_id,
                policy_version_min=step,
                policy_version_max=step,
                tokens=np.array([*job.prompt_ids, *completion.token_ids], np.int32),
                prompt_length=len(job.prompt_ids),
                loss_mask=np.array([False] * len(job.prompt_ids) + [True] * len(completion.token_ids)),
                behavior_logprobs=np.array(completion.logprobs, np.float32),
                finish_reason=completion.finish_reason,
            )
            for job, completion in zip(jobs, completions, strict=True)
        ]

    def chances(self) -> dict[str, dict[str, float]]:
        """The probability of each known answer, by prompt."""
        found: dict[str, dict[str, float]] = {}
        for prompt_id, answers in self.known.by_prompt.items():
            rows = self.student.score([(a.prompt_ids.tolist(), a.response_ids.tolist()) for a in answers])
            found[prompt_id] = {text: float(np.exp(sum(row))) for text, row in zip(KNOWN, rows, strict=True)}
        return found


def settings(**changes: Any) -> DistillTrainConfig:
    return DistillTrainConfig(**{"steps": 100, "samples_per_prompt": 8, "learning_rate": 1e-3} | changes)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Path]) -> Path:
    """A student whose weights are random. Nothing may write here."""
    return write_tiny_model(tmp_path_factory.mktemp("untaught"))


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory, untaught: Path) -> Path:
    """A student that gives one of the known answers nine times in ten, to either prompt. Nothing may write here."""
    folder = tmp_path_factory.mktemp("undecided")
    world = World(untaught, folder, settings(learning_rate=1e-2))
    likelihood = world.answers(40)
    chances = world.chances()
    assert likelihood[-1] < likelihood[0] / 3
    assert all(sum(by_answer.values()) > 0.9 for by_answer in chances.values())
    assert all(0.1 < chance < 0.4 for by_answer in chances.values() for chance in by_answer.values())
    world.student.save(folder / "model")
    return folder / "model"


@pytest.mark.slow
def test_a_student_that_is_told_apart_moves_to_the_teachers_answers(undecided: Path, tmp_path: Path) -> None:
    world = World(undecided, tmp_path, settings())
    found = world.discriminators(warm_up_steps=5)
    metrics, chances = [], []
    for step in range(60):
        metrics.append(world.step(step, found))
        chances.append([world.chances()[name][text] for name, text in TAUGHT.items()])
    assert np.mean(chances[4]) < 0.5  # what warm-up gave, which trained on the answers themselves
    assert np.mean(chances[-10:]) > 0.8
    # At first nothing is told apart, then much, and in the end little: most pairs are equal.
    accuracy, margin = ([row[f"blackbox/{name}"]["api"] for row in metrics] for name in ("accuracy", "margin"))
    assert (accuracy[0], margin[0]) == (0.5, 0.0)
    assert max(accuracy) > 0.65
    assert np.mean(margin[-10:]) < 0.75 * max(margin)


def test_without_a_difference_nothing_moves(untaught: Path, tmp_path: Path) -> None:
    world = World(untaught, tmp_path, settings(learning_rate=1e-2))
    before = {name: p.detach().clone() for name, p in world.student.model.named_parameters()}
    row = world.step(0, world.discriminators())  # an untrained discriminator pays all alike
    assert row["norm"] == 0.0
    assert all(torch.equal(before[name], p) for name, p in world.student.model.named_parameters())


def test_a_run_that_stops_goes_on_to_the_bit(untaught: Path, tmp_path: Path) -> None:
    def begin(**changes: Any) -> tuple[World, Discriminators]:
        world = World(untaught, tmp_path, settings(samples_per_prompt=4, learning_rate=3e-3))
        return world, world.discriminators(warm_up_steps=2, **changes)

    world, found = begin()
    straight = [world.step(step, found, turn=step) for step in range(5)]
    weights = {name: tensor.clone() for name, tensor in found.state().items()}

    for stop in (1, 3):  # within the discriminator's warm-up, and after it
        world, found = begin()
        rows = [world.step(step, found, turn=step) for step in range(stop)]
        save_state(
            tmp_path / f"state-{stop}", stop, world.student.model, world.optimizers, extra=found.state(), keep_last=1
        )
        world, found = begin()
        first, extra = load_state(tmp_path / f"state-{stop}", world.student.model, world.optimizers)
        found.load_state(extra)
        rows += [world.step(step, found, turn=step) for step in range(first, 5)]
        assert rows == straight
        assert all(row["norm"] > 0 for row in rows)
        assert all(torch.equal(tensor, found.state()[name]) for name, tensor in weights.items())
    assert [sorted(row.keys() & {"blackbox/nll_nats", "policy/kept_fraction"}) for row in straight] == [
        ["blackbox/nll_nats"],
        ["blackbox/nll_nats"],
        *[["policy/kept_fraction"]] * 3,
    ]


def four_steps(model: Path, folder: Path) -> dict[str, Any]:
    """Two steps of warm-up and two after it: metrics, and the sums of all weights of student and discriminator."""
    folder.mkdir(parents=True)
    world = World(model, folder, settings(samples_per_prompt=3))
    found = world.discriminators(warm_up_steps=2)
    rows = [world.step(step, found) for step in range(4)]
    weights = dict(world.student.model.named_parameters()) | found.state()
    return {"rows": rows, "weights": {name: float(t.detach().double().abs().sum()) for name, t in weights.items()}}


@pytest.mark.slow
def test_two_ranks_are_taught_as_one_process_is(undecided: Path, tmp_path: Path) -> None:
    # Three answers to a prompt: every group lies on both ranks.
    alone = four_steps(undecided, tmp_path / "alone")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    done = subprocess.run(
        [*launch, "--master-port", str(port), __file__, str(undecided), str(tmp_path / "together")],
        env=os.environ | {"PYTHONPATH": str(Path(mopdctl.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"together/rank-{rank}/out.json").read_text("utf-8"))
        assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4)
        for got, want in zip(found["rows"], alone["rows"], strict=True):
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert got[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name


if __name__ == "__main__":  # one of the two ranks
    distributed.start()
    own = Path(sys.argv[2]) / f"rank-{distributed.rank()}"
    text = json.dumps(four_steps(Path(sys.argv[1]), own))
    (own / "out.json").write_text(text, "utf-8")
