import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopdctl.cli.doctor_template import template as command
from mopdctl.engines.tokenizers import ChatTokenizer
from mopdctl.errors import CheckFailedError, InputError
from mopdctl.train.template import Finding, TemplateReport, probe

BASE = Path(__file__).parents[3] / "mopdctl" / "world" / "base"

TOOLS = (
    "{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{%- for m in messages %}"
)
CALLS = (
    "{%- for call in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ ARGUMENTS }}}'
    "</tool_call>{% endfor %}"
)
AS_JSON = "call.function.arguments | tojson"
STRING_OR_MAPPING = f"call.function.arguments if call.function.arguments is string else {AS_JSON}"
REASONING = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
END = "{% endif %}{% endfor %}"
OTHERS = "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>" + END
ANSWER = "{{ m.content or '' }}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"


def chatml(
    *,
    calls: str = CALLS.replace("ARGUMENTS", STRING_OR_MAPPING),
    reasoning: str = REASONING,
    answer: str = ANSWER,
    before: str = OPEN,
    end: str = "<|end|>" + CLOSE,
    prompt: str = PROMPT,
    top: str = "",
    others: str = OTHERS,
) -> str:
    """A template of the usual form: turns between a role and an end token, every part to be replaced."""
    assistant = "{%- if m.role == 'assistant' %}<|assistant|>" + before + reasoning + answer + calls + end
    return top + TOOLS + assistant + others + prompt


UNTAGGED = {"before": "", "end": "<|end|>"}
# Writes reasoning of the last turn only, whether in the field or inline, as Qwen3 and its kin do.
STRIPS = {
    "reasoning": (
        "{% set thought, content = m.reasoning_content or '', m.content or '' %}"
        "{% if '</think>' in content %}"
        "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
        "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
        "{% if thought and loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    ),
    "answer": "{{ content }}",
}

THINK = "<think></think>"
PROMPT_WITH_THINK = PROMPT.replace("|>{%", "|>" + THINK + "{%")

# One part of the good template changed, and the states that differ from the good one's because of it.
OK = {
    "generation_tags": "ok",
    "prefix_preserving": "ok",
    "stop_token": "ok",
    "generation_prompt": "ok",
    "tools": "ok",
    "thinking": "ok",
    "control_tokens": "warn",
    "roles": "ok",
    "determinism": "ok",
}
GOOD = chatml()
TEMPLATES: dict[str, tuple[str, dict[str, str]]] = {
    "good": (GOOD, {}),
    "without tags": (chatml(**UNTAGGED), {}),
    # huggingface/transformers #34172: without tags and without a prefix there is no mask
    "without tags, counts its messages": (
        chatml(top="{{ messages | length }}", **UNTAGGED),
        {
            "generation_tags": "bad",
            "prefix_preserving": "bad",
            "stop_token": "not_applicable",
            "generation_prompt": "bad",
            "tools": "bad",
        },
    ),
    # QwenLM/Qwen3-Coder #444, QwenLM/Qwen3 #1894
    "Qwen-like": (
        chatml(calls=CALLS.replace("ARGUMENTS", AS_JSON), **STRIPS, **UNTAGGED),
        {"prefix_preserving": "warn", "tools": "warn", "thinking": "warn"},
    ),
    "arguments | items": (
        chatml(
            calls=(
                "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
                "{% for key, value in call.function.arguments | items %}\n{{ key }}={{ value | tojson }}{% endfor %}"
                "</tool_call>{% endfor %}"
            )
        ),
        {"tools": "warn"},
    ),
    # oumi-ai/oumi #2603
    "arguments + string": (
        chatml(calls="{%- for call in m.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"),
        {"tools": "bad", "roles": "warn"},
    ),
    "arguments as Python": (chatml(calls=CALLS.replace("ARGUMENTS", "call.function.arguments")), {"tools": "bad"}),
    # huggingface/trl #5517
    "ignores calls": (chatml(calls=""), {"tools": "bad"}),
    "calls without loss": (
        chatml(end=CLOSE + CALLS.replace("ARGUMENTS", STRING_OR_MAPPING) + OPEN + "<|end|>" + CLOSE, calls=""),
        {"tools": "bad"},
    ),
    # huggingface/trl #5988
    "end outside of the tags": (chatml(end=CLOSE + "<|end|>"), {"stop_token": "bad"}),
    "line break after the end": (chatml(end="<|end|>\n" + CLOSE), {"stop_token": "warn"}),
    # NVIDIA-NeMo/Automodel #3739
    "inserts think tags, without tags": (
        chatml(answer=THINK + ANSWER, **UNTAGGED),
        {"generation_prompt": "bad", "thinking": "warn"},
    ),
    "inserts think tags in the loss": (
        chatml(answer=THINK + ANSWER),
        {"generation_prompt": "bad", "thinking": "warn"},
    ),
    "inserts think tags without loss": (
        chatml(before=THINK + OPEN),
        {"generation_prompt": "warn", "thinking": "warn"},
    ),
    "inserts think tags in the prompt too": (
        chatml(before=OPEN + THINK, prompt=PROMPT_WITH_THINK),
        {"thinking": "warn"},
    ),
    "prompt opens a think tag": (
        chatml(prompt=PROMPT.replace("|>{%", "|><think>\n{%")),
        {"generation_prompt": "warn"},
    ),
    "prompt says what no answer says": (
        chatml(prompt=PROMPT.replace("|>{%", "|>Well, {%")),
        {"generation_prompt": "bad"},
    ),
    "no generation prompt": (chatml(prompt=""), {"generation_prompt": "bad"}),
    "header that the model writes": (
        chatml(answer="<|channel|>final:" + ANSWER),
        {"generation_prompt": "warn"},
    ),
    "drops developers": (
        chatml(others="{% elif m.role != 'developer' %}<|{{ m.role }}|>{{ m.content }}<|end|>" + END),
        {"roles": "warn"},
    ),
    "drops all but the last user": (
        chatml(
            others="{% elif loop.last or loop.nextitem.role != m.role %}<|{{ m.role }}|>{{ m.content }}<|end|>" + END
        ),
        {"roles": "bad"},
    ),
    "reads the date": (chatml(top="{{ strftime_now('%d %b %Y') }}"), {"determinism": "warn"}),
    "may read the date": (chatml(top="{% if documents %}{{ strftime_now('%Y') }}{% endif %}"), {"determinism": "warn"}),
    "refuses a system role": (
        chatml(top="{% if messages[0].role == 'system' %}{{ raise_exception('No\x1b[31m system\nrole') }}{% endif %}"),
        {"roles": "warn"},
    ),
    "tags without words": (
        chatml(before=OPEN + CLOSE, end="<|end|>"),
        {"generation_tags": "bad", "stop_token": "bad", "tools": "bad", "thinking": "warn"},
    ),
    # huggingface/smol-course #260: a turn under the wrong label
    "loss on the user": (
        chatml(others="{% else %}<|{{ m.role }}|>{% generation %}{{ m.content }}<|end|>{% endgeneration %}" + END),
        {"generation_tags": "bad", "generation_prompt": "bad"},
    ),
    "strips every thought": (
        chatml(reasoning="", answer="{{ (m.content or '').split('</think>')[-1].lstrip() }}"),
        {"thinking": "bad"},
    ),
    "divides by zero": (
        "{{ 1 / 0 }}",
        dict.fromkeys(OK, "bad") | {"stop_token": "not_applicable", "tools": "not_applicable", "roles": "warn"},
    ),
    "not Jinja": (
        "{% if %}",
        dict.fromkeys(OK, "bad") | {"stop_token": "not_applicable", "tools": "not_applicable", "roles": "warn"},
    ),
}
Details = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def report(tiny_tokenizer: Any) -> Callable[..., TemplateReport]:
    def make(template: str, eos_ids: frozenset[int] | None = None) -> TemplateReport:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = template
        return probe(tokenizer, frozenset({tokenizer.eos_token_id}) if eos_ids is None else eos_ids, "tiny")

    return make


@pytest.fixture(scope="module")
def details(report: Callable[..., TemplateReport]) -> Details:
    return lambda template: {f.name: f.detail for f in report(template).findings}


@pytest.mark.parametrize(("template", "differing"), TEMPLATES.values(), ids=TEMPLATES)
def test_every_probe_ends_in_the_state_that_the_template_earns(
    report: Callable[..., TemplateReport], template: str, differing: dict[str, str]
) -> None:
    found = report(template)
    expected = OK | differing
    assert {f.name: f.state for f in found.findings} == expected
    assert found.bad == tuple(name for name, state in expected.items() if state == "bad")


# marin-community/marin #7237
def test_the_share_of_trained_tokens_is_said(details: Details) -> None:
    assert details(GOOD)["generation_tags"] == "the loss covers 22 of 44 tokens, from generation tags"
    empty = details(TEMPLATES["tags without words"][0])["generation_tags"]
    assert empty.startswith("the loss covers 0 of 44 tokens and leaves out an early answer and a late answer")


# QwenLM/Qwen3-Coder #444, oumi-ai/oumi #2603
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("good", "fine: arguments as a JSON string, content null, two calls in one turn"),
        ("Qwen-like", "arguments as a JSON string: encoded twice; fine: content null"),
        ("arguments | items", "arguments as a JSON string: refused (Can only get item pairs from a mapping.)"),
        ("arguments + string", "takes arguments as a JSON string alone, raises on a mapping"),
        ("arguments as Python", "a mapping is printed as Python, not as JSON"),
    ],
)
def test_the_shape_of_arguments_that_a_template_wants_is_said(details: Details, template: str, said: str) -> None:
    assert said in details(TEMPLATES[template][0])["tools"]


# oumi-ai/oumi #2603, PrimeIntellect-ai/verifiers #1259
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("{{ m.content }}", "content null: printed as None"),
        ("{{ m.content | default('none', true) if m.content is none else m.content }}", "not rendered like empty"),
        ("{{ '' + m.content }}", "content null: refused ("),
    ],
)
def test_null_content_beside_tool_calls_is_compared_with_empty_content(
    report: Callable[..., TemplateReport], details: Details, answer: str, said: str
) -> None:
    template = chatml(answer=answer)
    assert said in details(template)["tools"]
    assert {f.name: f.state for f in report(template).findings} == OK | {"tools": "warn"}


# huggingface/trl #5517
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("call.function.name | tojson", "'x' | tojson", "lost: tool name; "),
        ("m.tool_calls or []", "(m.tool_calls or [])[:1]", "two calls in one turn: the second is lost"),
        (AS_JSON, "{'text_key': 'string value'} | tojson", "lost: argument names, number, nested value, unicode value"),
        (
            "{{ m.content }}<|end|>{% endif",
            "{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endif",
            "lost: tool result",
        ),
        ("{{ tool | tojson }}", "{{ tool.function.name }}", "lost: tool definition, tool description"),
        (AS_JSON, "call.function.arguments | tojson(ensure_ascii=true)", "unicode is escaped"),
    ],
)
def test_what_is_lost_of_a_tool_turn_is_named(details: Details, before: str, after: str, said: str) -> None:
    assert before in GOOD
    assert said in details(GOOD.replace(before, after))["tools"]


def test_a_refused_tool_turn_does_not_apply_and_a_single_call_is_enough(details: Details) -> None:
    refuses = chatml(calls="{% if m.tool_calls %}{{ raise_exception('no tools here') }}{% endif %}")
    assert details(refuses)["tools"] == "refuses tool turns (no tools here)"
    assert "with a tool turn: refused (no tools here)" in details(refuses)["prefix_preserving"]
    single = chatml(
        top="{% for m in messages if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endfor %}"
    )
    assert details(single)["tools"].startswith("two calls in one turn: refused (one); fine: ")


# huggingface/trl #6363
def test_a_closing_think_tag_alone_is_kept_split_or_corrupted(details: Details) -> None:
    assert details(GOOD)["thinking"].endswith("</think> alone: kept")
    assert details(TEMPLATES["Qwen-like"][0])["thinking"].endswith("</think> alone: rewritten")
    assert details(TEMPLATES["strips every thought"][0])["thinking"].endswith("</think> alone: stripped")
    assert details(chatml(before=THINK + OPEN))["thinking"].endswith("</think> alone: corrupted (closed twice)")
    loses = chatml(
        answer="{% if '</think>' in m.content and '<think>' not in m.content %}{% else %}" + ANSWER + "{% endif %}"
    )
    assert details(loses)["thinking"].startswith("an answer is lost; ")


# NVIDIA-NeMo/Automodel #2348
def test_reasoning_that_is_not_rendered_or_not_trained_is_said(details: Details) -> None:
    assert details(chatml(reasoning=""))["thinking"].startswith(
        "reasoning_content: stripped in the last turn, stripped in an earlier one; inline <think>: kept"
    )
    renamed = chatml(reasoning=REASONING.replace("reasoning_content", "thinking"))
    assert details(renamed)["thinking"].endswith("reads thinking instead of reasoning_content")
    outside = chatml(before=REASONING + OPEN, reasoning="")
    assert details(outside)["thinking"].startswith("no loss on reasoning; ")


# modelscope/ms-swift #5831, unslothai/unsloth #334
@pytest.mark.parametrize(
    ("others", "said"),
    [
        ("<|{{ m.role }}|>{{ m.content }}<|end|>", "two users in a row: accepted; assistant first: accepted"),
        (
            "<|{{ 'system' if m.role == 'developer' else m.role }}|>{{ m.content }}<|end|>",
            "developer: rewritten as system",
        ),
        ("<|user|>{{ m.content }}<|end|>", "system: rewritten as user; late system: rewritten as user; developer: rew"),
        (
            "{% if not loop.previtem or loop.previtem.role == 'assistant' %}<|user|>{% endif %}\n{{ m.content }}",
            "two users in a row: merged with the turn beside it",
        ),
        (
            "{% if m.role == 'developer' %}{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}",
            "developer: dropped",
        ),
        (
            "{% if m.role == 'system' and loop.index > 1 %}{{ raise_exception('no') }}{% endif %}{{ m.content }};",
            "late system: refused (no)",
        ),
    ],
)
def test_roles_are_accepted_rewritten_merged_dropped_or_refused(details: Details, others: str, said: str) -> None:
    assert said in details(chatml(others="{% else %}" + others + END))["roles"]


def test_the_kind_of_conversation_that_is_rewritten_is_named(details: Details) -> None:
    assert details(TEMPLATES["Qwen-like"][0])["prefix_preserving"] == (
        "plain: kept; with a tool turn: kept; with reasoning: rewritten when message 3 (user) is added"
    )
    tools = chatml(top="{% if messages[-1].role == 'tool' %}<|system|>{% endif %}")
    assert details(tools)["prefix_preserving"].startswith(
        "plain: kept; with a tool turn: rewritten when message 3 (tool) is added"
    )


def test_what_a_template_raises_is_one_printable_line(details: Details) -> None:
    assert "system: refused (No?[31m system); late" in details(TEMPLATES["refuses a system role"][0])["roles"]


def test_a_model_without_end_tokens_is_bad(report: Callable[..., TemplateReport]) -> None:
    finding = report(GOOD, frozenset()).findings[2]
    assert finding == Finding("stop_token", "bad", "neither the model nor the tokenizer names an end token")


def test_control_tokens_in_a_users_text_are_counted(report: Callable[..., TemplateReport], tiny_tokenizer: Any) -> None:
    assert report(GOOD).findings[6].detail == "'<|end|><|assistant|>' in a user's text becomes 2 control tokens"
    words = chatml(others="{% else %}{{ m.content }};" + END, prompt="{% if add_generation_prompt %}say:{% endif %}")
    assert "<|tool|>' in a user's text becomes 6 control tokens" in report(words).findings[6].detail

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = GOOD
    plain = tokenizer.apply_chat_template

    def newer(conversation: Any, *, sanitize_control_tokens: bool = False, **options: Any) -> Any:
        if sanitize_control_tokens:
            conversation = [m | {"content": m["content"].replace("<|", "< |")} for m in conversation]
        return plain(conversation, **options)

    tokenizer.apply_chat_template = newer
    finding = probe(tokenizer, frozenset({tokenizer.eos_token_id}), "tiny").findings[6]
    assert finding.detail.endswith("becomes 2 control tokens, with sanitize_control_tokens 0")


# allenai/open-instruct #1497
def test_one_character_of_the_template_changes_its_digest(report: Callable[..., TemplateReport]) -> None:
    assert report(GOOD).template_digest == report(GOOD).template_digest
    assert report(GOOD).template_digest != report(GOOD + " ").template_digest


def test_of_several_templates_the_one_for_tools_is_probed_with_tools(report: Callable[..., Any]) -> None:
    several = {"default": chatml(calls=""), "tool_use": GOOD}
    assert {f.name: f.state for f in report(several).findings} == OK


def test_a_tokenizer_without_template_is_refused(report: Callable[..., TemplateReport]) -> None:
    with pytest.raises(InputError, match="tiny: the tokenizer has no chat template"):
        report("")


def test_end_tokens_come_from_generation_config_else_config_and_from_the_tokenizer(tmp_path: Path) -> None:
    folder = shutil.copytree(BASE, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert ChatTokenizer.load(str(folder)).eos_ids == {1}
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ChatTokenizer.load(str(folder)).eos_ids == {1, 3, 4}
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    assert ChatTokenizer.load(str(folder)).eos_ids == {1, 2}
    with pytest.raises(InputError, match="Unrecognized model"):
        ChatTokenizer.load(str(tmp_path))


def test_the_base_model_that_ships_trains_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command(str(BASE), workspace=tmp_path, as_json=True)
    document = json.loads(capfd.readouterr().out)
    assert document["name"] == str(BASE)
    assert {f["name"]: f["state"] for f in document["findings"]} == OK | {"tools": "warn", "thinking": "warn"}


def test_the_command_prints_a_table_and_fails_its_check_on_a_bad_template(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints" / "student"
    shutil.copytree(BASE, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(TEMPLATES["end outside of the tags"][0])
    with pytest.raises(CheckFailedError, match=r"^student: the chat template does not train well \(stop_token\)$"):
        command("student", workspace=tmp_path)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["probe", "state", "detail"]
    assert lines[3].split()[:2] == ["stop_token", "bad"]
    assert max(map(len, lines)) <= 120
    assert lines[-1].startswith("template digest: ")
