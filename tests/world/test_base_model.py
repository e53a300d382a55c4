"""The packaged base model belongs to the world of today and knows its easy half."""

import json
from typing import Any

import pytest

from mopdctl.engines.base import SampleRequest
from mopdctl.world.data import distinct, generate
from mopdctl.world.domains import DOMAINS
from mopdctl.world.pretrain import BASE
from mopdctl.world.trajectories import action_text, decision_points

EXAMPLES = 40


@pytest.fixture(scope="module")
def base() -> Any:
    from mopdctl.engines.hf import HFModel

    return HFModel.load(str(BASE))


def wrong_share(base: Any, domain: str, *, basic: bool) -> float:
    """The share of dev examples with a turn that differs from the expert's, each turn after the expert's own."""
    stream = (example for example in generate(domain, "dev", seed="base") if example.basic == basic)
    points = [(example, *point) for example in distinct(stream, EXAMPLES) for point in decision_points(example)]
    requests = []
    for number, (example, conversation, _) in enumerate(points):
        tools = list(example.tools) if example.tools else None
        text = base.tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False, add_generation_prompt=True)
        requests.append(SampleRequest(str(number), tuple(base.tokenizer(text)["input_ids"]), 96, 0))
    answers = [base.tokenizer.decode(list(found.token_ids)) for found in base.sample(requests, temperature=0.0)]
    wrong = {
        example.user
        for (example, _, turn), answer in zip(points, answers, strict=True)
        if answer.removesuffix("<|end|>") != action_text(turn)
    }
    return len(wrong) / EXAMPLES


def test_its_tokenizer_is_the_one_that_the_world_builds(tiny_tokenizer: Any, base: Any) -> None:
    def described(tokenizer: Any) -> Any:
        return json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}

    assert described(base.tokenizer) == described(tiny_tokenizer)
    assert base.tokenizer.chat_template == tiny_tokenizer.chat_template
    assert base.tokenizer.convert_tokens_to_ids("<|tool|>") in base.tokenizer.all_special_ids


def test_it_is_about_a_megabyte_in_bfloat16() -> None:
    assert json.loads((BASE / "config.json").read_text("utf-8"))["dtype"] == "bfloat16"
    assert sum(path.stat().st_size for path in BASE.iterdir()) < 1.1e6


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
def test_it_knows_most_of_the_easy_half_and_nothing_of_the_hard(base: Any, domain: str) -> None:
    assert wrong_share(base, domain, basic=True) <= 0.2
    assert wrong_share(base, domain, basic=False) >= 0.9
