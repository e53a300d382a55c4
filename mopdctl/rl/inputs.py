"""All that a run reads, checked before any weights are loaded."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.rl import RlConfig
from mopdctl.engines.tokenizers import ChatTokenizer, differences, identify
from mopdctl.errors import InputError
from mopdctl.records import Prompt
from mopdctl.rl.held_out import HeldOut, prepare_held_out
from mopdctl.rl.judge_mix import check_judges
from mopdctl.rl.mixture import Mixture, answer_settings, read_mixture
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.held_out import read_held_out
from mopdctl.rollouts.tools import environment_tools
from mopdctl.runs import Workspace

REFERENCE = "@reference"
"""Stands beside the environments' names, and cannot be one of them."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run is made of, beside the weights."""

    start: str
    """The model to train, as `from_pretrained` takes it."""
    scorers: dict[str, str]
    """Environment to its teacher, and `REFERENCE` to the reference of the KL where there is one."""
    mixture: Mixture
    prompts: dict[str, Prompt]
    """The mixture's, by id."""
    book: PromptBook
    tools: Tools | None
    held_out: HeldOut | None


def read_inputs(config: RlConfig, workspace: Workspace, *, base: Path) -> Inputs:
    """Reads and checks prompts, references, environments, tokenizers and lengths. Loads no weights, writes nothing.

    `base` is the folder that relative paths start from. Raises InputError for what cannot be used.
    """
    train = config.train
    mixture = read_mixture(config, base=base)
    check_judges(config)
    held = read_held_out(train, ("domain",), base=base) if train.eval_prompts else []
    start = workspace.resolve_model(config.model, relative_to=base)
    scorers = {name: workspace.resolve_model(model, relative_to=base) for name, model in scoring_models(config).items()}
    chat = ChatTokenizer.load(start)
    shortest = min(chat.max_length, _shortest_context(config, chat, scorers))
    book = PromptBook(chat, mixture.prompts, lambda p: answer_settings(config, p), max_length=shortest)
    prompts = {prompt.prompt_id: prompt for prompt in mixture.prompts}
    tools = environment_tools(prompts, chat)
    for row in _rows_in_reach(config, mixture):
        book.token_ids(row)
    measure = prepare_held_out(chat, held, train, max_length=shortest) if held else None
    return Inputs(start, scorers, mixture, prompts, book, tools, measure)


def describe(config: RlConfig, inputs: Inputs) -> dict[str, Any]:
    """What a run is going to do, as a document."""
    train, mixture = config.train, inputs.mixture
    rows = [row for step in range(train.steps) for row in mixture.rows(step, train)]
    counts = Counter(mixture.prompts[row].routing["environment"] for row in rows)
    answers = {
        name: counts[name] * (1 if environment.teacher else train.group_size)
        for name, environment in config.environments.items()
    }
    return {
        "name": config.name,
        "model": inputs.start,
        "environments": {
            name: {"prompts": size, "share": weight / sum(mixture.weights), "answers": answers[name]}
            for name, size, weight in zip(config.environments, mixture.sizes, mixture.weights, strict=True)
        },
        "steps": train.steps,
        "samples": sum(answers.values()),
    }


def scoring_models(config: RlConfig) -> dict[str, str]:
    """Environment to its teacher, and the reference of the KL where there is one, as the configuration names them."""
    found = {name: e.teacher for name, e in config.environments.items() if e.teacher is not None}
    if config.train.kl_weight > 0:
        found[REFERENCE] = config.train.reference or config.model
    return found


def _shortest_context(config: RlConfig, chat: ChatTokenizer, scorers: dict[str, str]) -> int:
    """That of all scorers. Raises InputError for one that does not read the student's tokens as it wrote them."""
    known = {path: ChatTokenizer.load(path) for path in set(scorers.values())}
    identities = {path: identify(found) for path, found in known.items()}
    own = identify(chat)
    for name, path in scorers.items():
        if differing := differences(own, identities[path]):
            who = "the reference" if name == REFERENCE else f"the teacher of environment {name!r}"
            raise InputError(
                f"{who} ({scoring_models(config)[name]}): differs from {config.model} in {'; '.join(differing)}; it "
                "must read the student's tokens as the student wrote them"
            )
    return min((found.max_length for found in known.values()), default=chat.max_length)


def _rows_in_reach(config: RlConfig, mixture: Mixture) -> set[int]:
    """The rows that the run may sample."""
    if config.train.zero_variance == "resample":
        return set(range(len(mixture.prompts)))
    return {row for step in range(config.train.steps) for row in mixture.rows(step, config.train)}
