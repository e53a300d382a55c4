"""Conversations with the tool environments of prompts: what answers ask for, what they are told, what they did."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from mopdctl.environments.base import Environment, SetupError
from mopdctl.environments.registry import begin, result_of
from mopdctl.errors import InputError
from mopdctl.records import Message, Prompt, Sample
from mopdctl.rollouts.bridge import Bridge, find_bridge, turn_text
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.jobs import Job
from mopdctl.train.spans import ChatModel
from mopdctl.verifiers.base import Attempt
from mopdctl.verifiers.turns import WrittenCall, call_id, parse_turn

MAX_TURNS = 8
"""Assistant turns of a conversation whose prompt says nothing else."""


def environment_tools(
    prompts_by_id: Mapping[str, Prompt],
    chat: ChatModel,
    *,
    variables: Callable[[Prompt], Mapping[str, Any]] = lambda prompt: {},
) -> Tools | None:
    """The tools of all prompts that have an environment; None if none has.

    `variables` are those of the chat template that a prompt is rendered with. Raises InputError naming the prompt for
    an environment that is unknown or badly set up, and for a chat template that cannot tell results.
    """
    acting = {prompt_id: prompt for prompt_id, prompt in prompts_by_id.items() if prompt.environment is not None}
    bridges: dict[str, Bridge] = {}
    shapes: dict[str, Bridge] = {}
    for prompt_id, prompt in acting.items():
        _check(prompt)
        shape = json.dumps([prompt.tools, dict(variables(prompt))], sort_keys=True, default=str)
        if shape not in shapes:
            shapes[shape] = find_bridge(chat, prompt.tools, variables(prompt), place=prompt.place)
        bridges[prompt_id] = shapes[shape]
    return EnvironmentTools(acting, bridges) if acting else None


class EnvironmentTools:
    """See `generate.Tools`. Environments are pure: earlier commands are run again where their state is needed."""

    repeatable = True

    def __init__(self, prompts: Mapping[str, Prompt], bridges: Mapping[str, Bridge]) -> None:
        """Both by prompt id."""
        self._prompts, self._bridges = prompts, bridges

    def max_turns(self, job: Job) -> int | None:
        """See `Tools.max_turns`."""
        prompt = self._prompts.get(job.prompt_id)
        return None if prompt is None or prompt.environment is None else _max_turns(prompt.environment)

    def request(self, job: Job, turn_ids: Sequence[int]) -> str | None:
        """The text of a turn that has come to its end and calls a tool, soundly or not."""
        bridge = self._bridges.get(job.prompt_id)
        if bridge is None or turn_ids[-1] not in bridge.chat.eos_ids:
            return None
        text = turn_text(bridge.chat, turn_ids)
        return text if parse_turn(text).calls else None

    def run(self, job: Job, commands: Sequence[str]) -> tuple[str, tuple[int, ...]]:
        """The results of a turn's calls as a JSON list, and the tokens from its end to the next turn."""
        environment, state = _begin(self._prompts[job.prompt_id])
        for command in commands[:-1]:
            _results(environment, state, parse_turn(command).calls)
        calls = parse_turn(commands[-1]).calls
        results = _results(environment, state, calls)
        names = [_name(environment, call) for call in calls]
        return json.dumps(results, ensure_ascii=False), self._bridges[job.prompt_id].token_ids(names, results)


def turns_of(prompt: Prompt, sample: Sample, chat: ChatModel) -> tuple[Message, ...]:
    """The conversation after a prompt with an environment, as chat messages.

    Turns of the assistant are read off the tokens that were sampled; where others follow them, the results of their
    calls are what the environment says to these calls. A turn that ended the conversation has no results.
    """
    environment, state = _begin(prompt)
    messages: list[Message] = []
    calls: tuple[WrittenCall, ...] = ()
    number = 0
    for sampled, token_ids in _parts(sample):
        if sampled:
            turn = parse_turn(turn_text(chat, token_ids))
            messages.append(turn.message(number))
            calls = turn.calls
            continue
        for call, result in zip(calls, _results(environment, state, calls), strict=True):
            name = _name(environment, call)
            messages.append({"role": "tool", "tool_call_id": call_id(number), "name": name, "content": result})
            number += 1
    return tuple(messages)


def attempt_of(prompt: Prompt, sample: Sample, chat: ChatModel) -> Attempt:
    """What a verifier gets of a sample: with an environment the last turn's text and all turns, else all its text.

    Raises InputError naming the prompt for an environment that cannot be begun.
    """
    answers = [token_ids for sampled, token_ids in _parts(sample) if sampled]
    acts = prompt.environment is not None
    return Attempt(
        response=turn_text(chat, (answers or [[]])[-1] if acts else [token for ids in answers for token in ids]),
        reference=prompt.reference,
        messages=prompt.messages,
        tools=prompt.tools,
        environment=prompt.environment,
        turns=turns_of(prompt, sample, chat) if acts else (),
    )


def _parts(sample: Sample) -> list[tuple[bool, list[int]]]:
    """The response cut where tokens that were sampled and tokens that were told meet; whether sampled, and which."""
    pairs = zip(sample.response_ids.tolist(), sample.response_mask.tolist(), strict=True)
    return [(sampled, [token for token, _ in part]) for sampled, part in groupby(pairs, key=lambda pair: pair[1])]


def _results(environment: Environment, state: Any, calls: Sequence[WrittenCall]) -> list[str]:
    """What each call of a turn gives, in order; they act on `state` one after another."""
    return [result_of(environment, state, call.name, call.arguments) for call in calls]


def _name(environment: Environment, call: WrittenCall) -> str:
    """The name to tell a result under. What the model made up is not written into its context a second time."""
    return call.name if any(call.name == tool["function"]["name"] for tool in environment.tools) else "unknown"


def _begin(prompt: Prompt) -> tuple[Environment, Any]:
    try:
        return begin(prompt.environment)
    except SetupError as error:
        raise InputError(f"{prompt.place}: {error}") from None


def _check(prompt: Prompt) -> None:
    environment, _ = _begin(prompt)
    document = prompt.environment or {}
    if unknown := sorted(document.keys() - {"name", "setup", "max_turns"}):
        raise InputError(
            f"{prompt.place}: 'environment' has an unknown key {unknown[0]!r}; it has name, setup, max_turns"
        )
    turns = _max_turns(document)
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise InputError(f"{prompt.place}: max_turns {turns!r} is not a number of turns from 1")
    known = {tool["function"]["name"] for tool in environment.tools}
    offered = {tool["function"]["name"] for tool in prompt.tools or ()}
    if unknown := sorted(offered - known):
        raise InputError(
            f"{prompt.place}: offers the tool {unknown[0]!r}, but environment {environment.name!r} has "
            f"{', '.join(sorted(known))}"
        )


def _max_turns(document: Mapping[str, Any]) -> Any:
    turns = document.get("max_turns")
    return MAX_TURNS if turns is None else turns
