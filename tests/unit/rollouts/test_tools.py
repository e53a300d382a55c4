"""Conversations with an environment: what is told, in which tokens, when they end, and what a verifier gets of them."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.engines.base import SampleRequest, Step
from mopdctl.environments.errands import Errands
from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.bridge import Bridge, find_bridge, turn_text
from mopdctl.rollouts.generate import RolloutLog, generate
from mopdctl.rollouts.jobs import Job, make_job
from mopdctl.rollouts.tools import attempt_of, environment_tools
from mopdctl.store import disk
from mopdctl.train.data import prompt_token_ids
from mopdctl.train.template_render import Probed
from mopdctl.verifiers.registry import VERIFIERS, run_check

SETUP = {"people": {"kalo": 3, "bemi": 7}, "lockers": {"3": "tode", "7": None}}
MOVE = {"name": "move_item", "arguments": {"source": 3, "target": 7}}
PROMPT = Prompt(
    "p0",
    ({"role": "user", "content": "Give the item of kalo to bemi"},),
    Errands.tools,
    {"domain": "errands"},
    reference={
        "calls": [
            {"name": "find_person", "arguments": {"name": "kalo"}},
            {"name": "find_person", "arguments": {"name": "bemi"}},
            MOVE,
        ],
        "message": "bemi has tode",
        "basis": ["state", "message", "calls"],
    },
    verifier="state_replay",
    environment={"name": "errands", "setup": SETUP, "max_turns": 4},
    place="prompts.jsonl:1",
)
CONTROL = ["<|im_end|>", "<|im_start|>", "<|pad|>"]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


FIND_BOTH = '<tool_call>{"name": "find_person", "arguments": {"name": "kalo"}}</tool_call>\n'
FIND_BOTH += FIND_BOTH.replace("kalo", "bemi").strip()
MOVED = call("move_item", source=3, target=7)


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "sync_file", lambda path: None)


@pytest.fixture(scope="module")
def chat(make_tokenizer: Callable[..., Any], chatml: str) -> Probed:
    tokenizer = make_tokenizer(chat_template=chatml)
    return Probed(tokenizer, frozenset({tokenizer.eos_token_id}))


class DiedError(Exception):
    """What kills a process in these tests."""


@dataclass
class Writer:
    """A sampler that writes one text after the other, each with an end token, until its process dies."""

    chat: Probed
    turns: Sequence[str]
    steps: int = 10**9
    asked: list[SampleRequest] = field(default_factory=list)

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        (request,) = requests
        self.asked.append(request)
        before = self.chat.tokenizer.decode(request.response_ids)
        _, opening, own = before.rpartition("<|im_start|>assistant\n")
        text = self.turns[before.count(opening) if opening else 0]
        ids = self.ids(text + "<|im_end|>")[len(self.ids(own)) :]
        left = request.max_new_tokens - len(request.response_ids)
        for number, token in enumerate(ids[:left], start=1):
            if self.steps == 0:
                raise DiedError
            self.steps -= 1
            ended = {0: "stop"} if number == len(ids) else {0: "length"} if number == left else {}
            yield Step(np.array([0]), np.array([token], np.int32), np.array([-0.5], np.float32), ended)

    def ids(self, text: str) -> list[int]:
        return list(self.chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def job_of(prompt: Prompt, prompt_ids: tuple[int, ...], budget: int) -> Job:
    return make_job(
        prompt,
        "0",
        seed=0,
        group_id="g",
        generation_index=0,
        domain="errands",
        teacher_id="",
        prompt_ids=prompt_ids,
        max_new_tokens=budget,
    )


def converse(folder: Path, writer: Writer, *, prompt: Prompt = PROMPT, budget: int = 2000) -> Sample:
    tools = environment_tools({prompt.prompt_id: prompt}, writer.chat)
    ids = prompt_token_ids(writer.chat, prompt.messages, list(prompt.tools or ()) or None, {})
    job = job_of(prompt, tuple(ids), budget)
    with RolloutLog(folder, writer="w", level="process") as log:
        (sample,) = generate(
            [job],
            writer,
            log,
            temperature=1.0,
            policy_version=0,
            tokenizer_fingerprint="t",
            sampling_fingerprint="s",
            tools=tools,
        )
    return sample


def judged(sample: Sample, chat: Probed, prompt: Prompt = PROMPT) -> float | None:
    return run_check(VERIFIERS["state_replay"], attempt_of(prompt, sample, chat)).reward


# --------------------------------------------------------------------------------------------------------- whole ones


def test_a_conversation_has_the_tokens_that_the_template_gives_it(tmp_path: Path, chat: Probed) -> None:
    sample = converse(tmp_path, Writer(chat, [FIND_BOTH, MOVED, "bemi has tode"]))
    written = [
        {"role": "assistant", "content": FIND_BOTH},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": MOVED},
        {"role": "tool", "content": "tode"},
        {"role": "assistant", "content": "bemi has tode"},
    ]
    whole = chat.tokenizer.apply_chat_template([*PROMPT.messages, *written], tools=list(Errands.tools), tokenize=False)
    assert chat.tokenizer.decode(sample.tokens) == whole.removesuffix("\n")
    assert sample.tokens.tolist() == chat.tokenizer(whole.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    sampled = chat.tokenizer.decode(sample.response_ids[sample.response_mask])
    assert sampled == f"{FIND_BOTH}<|im_end|>{MOVED}<|im_end|>bemi has tode<|im_end|>"
    assert len(sample.behavior_logprobs) == sample.loss_mask.sum()
    assert (sample.finish_reason, judged(sample, chat)) == ("stop", 1.0)


def test_a_verifier_gets_the_conversation_as_chat_messages(tmp_path: Path, chat: Probed) -> None:
    sample = converse(tmp_path, Writer(chat, [f"<think>who</think>{FIND_BOTH}", MOVED, "bemi has tode"]))
    attempt = attempt_of(PROMPT, sample, chat)
    assert (attempt.response, attempt.messages, attempt.tools) == ("bemi has tode", PROMPT.messages, PROMPT.tools)
    assert (attempt.reference, attempt.environment) == (PROMPT.reference, PROMPT.environment)

    def made(number: int, name: str, **arguments: Any) -> dict[str, Any]:
        return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}

    def told(number: int, name: str, content: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": content}

    calls = [{"id": f"call0000{n}", "type": "function", "function": c} for n, c in enumerate(PROMPT.reference["calls"])]
    assert attempt.turns == (
        {"role": "assistant", "content": "", "reasoning_content": "who", "tool_calls": calls[:2]},
        told(0, "find_person", "3"),
        told(1, "find_person", "7"),
        {"role": "assistant", "content": "", "tool_calls": [made(2, "move_item", source=3, target=7)]},
        told(2, "move_item", "tode"),
        {"role": "assistant", "content": "bemi has tode"},
    )


def test_an_answer_without_a_call_ends_the_conversation(tmp_path: Path, chat: Probed) -> None:
    sample = converse(tmp_path, Writer(chat, ["bemi has tode"]))
    assert (sample.finish_reason, sample.response_mask.all()) == ("stop", True)
    attempt = attempt_of(PROMPT, sample, chat)
    assert attempt.turns == ({"role": "assistant", "content": "bemi has tode"},)
    assert judged(sample, chat) == 0.0


def test_a_prompt_without_an_environment_gets_no_tools(tmp_path: Path, chat: Probed) -> None:
    plain = replace(PROMPT, prompt_id="plain", environment=None)
    assert environment_tools({"plain": plain}, chat) is None
    both = environment_tools({"plain": plain, "p0": PROMPT}, chat)
    assert both is not None
    ids = chat.tokenizer(f"{MOVED}<|im_end|>", add_special_tokens=False)["input_ids"]
    jobs = {
        prompt.prompt_id: make_job(
            prompt,
            "0",
            seed=0,
            group_id="",
            generation_index=0,
            domain="",
            teacher_id="",
            prompt_ids=(1,),
            max_new_tokens=9,
        )
        for prompt in (plain, PROMPT)
    }
    assert (both.request(jobs["plain"], ids), both.max_turns(jobs["plain"])) == (None, None)
    assert (both.request(jobs["p0"], ids), both.max_turns(jobs["p0"])) == (MOVED, 4)
    assert both.request(jobs["p0"], ids[:-1]) is None  # it has not come to its end
    sample = converse(tmp_path, Writer(chat, [MOVED]), prompt=plain)
    attempt = attempt_of(plain, sample, chat)
    assert (attempt.response, attempt.turns, attempt.environment) == (MOVED, (), None)


# PrimeIntellect-ai/verifiers #1763; NVIDIA-NeMo/Gym #1180, #770
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ('<tool_call>{"name": "move_item", "argum', 'error: a call is a JSON object of "name" and "arguments"'),
        ("<tool_call>nonsense</tool_call>", 'error: a call is a JSON object of "name" and "arguments"'),
        ('<tool_call>{"name": "find_person", "arguments": "kalo"}</tool_call>', "error: a call is a JSON object"),
        (call("teleport", to="kalo"), "error: there is no tool 'teleport'; the tools are find_person"),
        (call("open_locker", number="three"), "error: number of open_locker has to be of type integer"),
    ],
)
def test_a_broken_call_is_told_to_the_model_which_may_go_on(
    tmp_path: Path, chat: Probed, broken: str, said: str
) -> None:
    sample = converse(tmp_path, Writer(chat, [f"{FIND_BOTH}\n{broken}", MOVED, "bemi has tode"]))
    attempt = attempt_of(PROMPT, sample, chat)
    results = [turn["content"] for turn in attempt.turns if turn["role"] == "tool"]
    assert results[2].startswith(said)
    assert [*results[:2], *results[3:]] == ["3", "7", "tode"]
    assert f"<|im_start|>tool\n{said}" in chat.tokenizer.decode(sample.tokens)
    by_state = replace(PROMPT, reference=PROMPT.reference | {"basis": ["state", "message"]})
    assert judged(sample, chat, by_state) == 1.0


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_conversation_ends_with_its_last_turn(tmp_path: Path, chat: Probed, most: int) -> None:
    prompt = replace(PROMPT, environment={"name": "errands", "setup": SETUP, "max_turns": most})
    writer = Writer(chat, [FIND_BOTH, MOVED, "bemi has tode"])
    sample = converse(tmp_path, writer, prompt=prompt)
    assert len(writer.asked) == most
    assert (sample.finish_reason, judged(sample, chat, prompt)) == (("stop", 1.0) if most == 3 else ("max_turns", 0.0))
    assert sample.response_mask[-1]


def test_a_prompt_that_says_nothing_has_eight_turns(tmp_path: Path, chat: Probed) -> None:
    prompt = replace(PROMPT, environment={"name": "errands", "setup": SETUP})
    sample = converse(tmp_path, Writer(chat, [FIND_BOTH] * 9), prompt=prompt)
    assert sample.finish_reason == "max_turns"
    assert sum(turn["role"] == "assistant" for turn in attempt_of(prompt, sample, chat).turns) == 8


# PrimeIntellect-ai/verifiers #1625, #1824
@pytest.mark.parametrize("room", [0, 1, 5, 20])
def test_a_result_without_room_ends_the_sample_as_cut_off(tmp_path: Path, chat: Probed, room: int) -> None:
    turn = len(chat.tokenizer(f"{FIND_BOTH}<|im_end|>", add_special_tokens=False)["input_ids"])
    sample = converse(tmp_path, Writer(chat, [FIND_BOTH, MOVED]), budget=turn + room)
    assert (sample.finish_reason, len(sample.response_ids)) == ("length", turn + room)
    assert sample.response_mask.tolist() == [True] * turn + [False] * room
    attempt = attempt_of(PROMPT, sample, chat)
    assert attempt.response == FIND_BOTH
    assert [message["role"] for message in attempt.turns] == (["assistant", "tool", "tool"] if room else ["assistant"])
    assert judged(sample, chat) == 0.0


# NVIDIA-NeMo/Gym #2615
@pytest.mark.parametrize("steps", [31, 60])
def test_a_conversation_that_is_killed_goes_on_where_it_was(tmp_path: Path, chat: Probed, steps: int) -> None:
    turns = [FIND_BOTH, MOVED, "bemi has tode"]
    straight = converse(tmp_path / "straight", Writer(chat, turns))
    resumed = None
    while resumed is None:
        try:
            resumed = converse(tmp_path / "cut", Writer(chat, turns, steps=steps))
        except DiedError:
            continue
    assert resumed.attempt > 1
    assert (resumed.tokens.tolist(), resumed.loss_mask.tolist()) == (
        straight.tokens.tolist(),
        straight.loss_mask.tolist(),
    )
    assert resumed.behavior_logprobs.tobytes() == straight.behavior_logprobs.tobytes()
    assert judged(resumed, chat) == 1.0


# --------------------------------------------------------------------------------------------------------- the prompts


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": "errands"}, "use one of errands"),
        ({"environment": {"name": "shop"}}, "environment 'shop' is unknown; use one of errands"),
        ({"environment": {"name": "errands", "setup": {}}}, "exactly the keys"),
        ({"environment": {"name": "errands", "setup": SETUP, "max_turns": 0}}, "max_turns 0 is not"),
        ({"environment": {"name": "errands", "setup": SETUP, "max_turns": True}}, "max_turns True is not"),
        ({"environment": {"name": "errands", "setup": SETUP, "turns": 3}}, "unknown key 'turns'"),
        ({"tools": ({"type": "function", "function": {"name": "fly"}},)}, "offers the tool 'fly'"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_by_place(chat: Probed, changes: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        environment_tools({"p0": replace(PROMPT, **changes)}, chat)
    assert str(error.value).startswith("prompts.jsonl:1: ")


# ---------------------------------------------------------------------------------------------------------- the bridge


def turns(text: str, *, among: str = "messages") -> str:
    """A template that writes `text` for each message, and an end token."""
    return f"{{% for message in {among} %}}<|im_start|>{text}<|im_end|>{{% endfor %}}"


SAYS = "{{ message.role }}: {{ message.content or '' }}"
REWRITING = turns("{{ messages | length }} " + SAYS)
DROPPING = turns(SAYS, among="messages if message.role != 'tool'")
ENDLESS = turns(SAYS).replace("<|im_end|>", "")
TEXT_ARGUMENTS = turns(
    "{% for call in message.tool_calls or () %}{{ '' + call.function.arguments }}{% endfor %}" + SAYS
)
ONE_CALL = turns("{% if (message.tool_calls or ()) | length > 1 %}{{ raise_exception('one call') }}{% endif %}" + SAYS)
NULL_CONTENT = turns(
    "{% if message.tool_calls and message.content is not none %}{{ raise_exception('x') }}{% endif %}" + SAYS
)
LAST_THINKS = turns(
    "{% if message.role == 'assistant' and (loop.last or message.reasoning_content) %}<think></think>{% endif %}" + SAYS
)


def bridge(make_tokenizer: Callable[..., Any], template: str, **options: Any) -> Bridge:
    tokenizer = make_tokenizer(chat_template=template, **options)
    return find_bridge(Probed(tokenizer, frozenset({tokenizer.eos_token_id})), None, {}, place="here")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (REWRITING, "rewrites the question"),
        (DROPPING, "leaves out the results of tools"),
        (ENDLESS, "writes no end token after a turn that calls tools"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
    ],
)
def test_a_template_that_cannot_tell_results_is_refused(
    make_tokenizer: Callable[..., Any], template: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        bridge(make_tokenizer, template)


@pytest.mark.parametrize("template", [TEXT_ARGUMENTS, ONE_CALL, NULL_CONTENT, LAST_THINKS])
def test_templates_with_habits_of_their_own_tell_results_too(make_tokenizer: Callable[..., Any], template: str) -> None:
    found = bridge(make_tokenizer, template)
    told = found.chat.tokenizer.decode(found.token_ids(["a", "b"], ["one", "two"]))
    assert told == "<|im_start|>tool: one<|im_end|><|im_start|>tool: two<|im_end|>"


@pytest.mark.parametrize("metaspace", [False, True])
def test_the_tokens_are_those_of_the_whole_conversation(
    make_tokenizer: Callable[..., Any], chatml: str, metaspace: bool
) -> None:
    found = bridge(make_tokenizer, chatml, metaspace=metaspace)
    tokenizer = found.chat.tokenizer
    messages = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "the call"},
        {"role": "tool", "content": "the result an so on"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    begun = whole[: whole.index("the call") + len("the call<|im_end|>")]
    first, last = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (begun, whole))
    assert (*first, *found.token_ids(["f"], ["the result an so on"])) == tuple(last)


@given(
    results=st.lists(
        st.lists(st.sampled_from(CONTROL) | st.text("<|>_aimnedsthrp hidden01word\n"), max_size=4).map("".join),
        min_size=1,
        max_size=3,
    )
)
def test_a_result_never_becomes_a_control_token(
    make_tokenizer: Callable[..., Any], chatml: str, results: list[str]
) -> None:
    found = bridge(make_tokenizer, chatml)
    names = ["f"] * len(results)
    ids, plain = found.token_ids(names, results), found.token_ids(names, ["x"] * len(results))
    special = set(found.chat.tokenizer.all_special_ids)
    assert [token for token in ids if token in special] == [token for token in plain if token in special]
    told = "".join(f"<|im_start|>tool\n{result}<|im_end|>\n" for result in results)
    assert found.chat.tokenizer.decode(ids) == f"\n{told}<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "nemotron_3_ultra", "deepseekv3"])
def test_templates_of_known_models_tell_results(make_tokenizer: Callable[..., Any], name: str) -> None:
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    template = re.sub(r"<\|eot_id\|>|<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_end|>", template)
    found = bridge(make_tokenizer, template)
    told = found.chat.tokenizer.decode(found.token_ids(["find_person", "open_locker"], ["27", "tode"]))
    assert 0 < told.index("27") < told.index("tode")
    assert "<|im_end|>" not in told[: told.index("27")]


def test_the_text_of_a_turn_keeps_the_tags_of_calls_and_reasoning(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "<think>", "<|im_start|>"]})
    chat = Probed(tokenizer, frozenset({tokenizer.eos_token_id}))
    ids = tokenizer("<think>a<|im_start|> , b <tool_call>{}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert turn_text(chat, ids) == "<think>a , b <tool_call>{}"
