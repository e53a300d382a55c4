# ruff: noqa: RUF001 - full-width punctuation and letters of other scripts are meant

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.gensft.filters import RULES, FilterSettings, all_failures

DEFAULT = FilterSettings()
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def first_failure(row: Any, settings: FilterSettings) -> tuple[str, str] | None:
    """The rule under whose name a row is dropped."""
    return next(iter(all_failures(row, settings)), None)


def user(content: str = "What is 1 + 2?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str = "The sum is 3.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(call_id: Any = "c1", name: str = "add", arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return assistant("", tool_calls=list(calls))


def result(call_id: Any = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "3"}


def row(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": None, "finish_reason": "stop", "answer_state": "ok", **more}


def answered(content: str, asked: str = "What is 1 + 2?", **more: Any) -> dict[str, Any]:
    return row(user(asked), assistant(content), **more)


def fails(rule: str, checked: dict[str, Any], settings: FilterSettings = DEFAULT) -> str | None:
    """The reason that one rule gives."""
    return RULES[rule].check(checked, settings)


def test_the_order_of_the_rules_is_part_of_the_contract() -> None:
    assert list(RULES) == [
        "truncated",
        "empty",
        "refusal",
        "think_leak",
        "control_tokens",
        "leakage",
        "role_order",
        "tool_pairing",
        "tool_schema",
        "language",
        "length",
        "repetition",
        "license",
        "identical_reasoning",
    ]
    assert all(rule.name == name and rule.description for name, rule in RULES.items())


def test_the_first_failing_rule_names_the_row_and_all_of_them_are_listed() -> None:
    bad = row(assistant("I can't help with that.</think>"), finish_reason="length")
    assert first_failure(bad, DEFAULT) == ("truncated", "cut at the token limit")
    assert [name for name, _ in all_failures(bad, DEFAULT)] == ["truncated", "refusal", "think_leak", "role_order"]
    assert first_failure(answered("The sum is 3."), DEFAULT) is None
    assert all_failures(answered("The sum is 3."), DEFAULT) == []


def test_a_rule_that_is_off_is_not_applied() -> None:
    bad = answered("<think>hm", finish_reason="length")
    assert first_failure(bad, FilterSettings(off=("truncated",))) == ("think_leak", "'<think' in the answer")
    assert all_failures(bad, FilterSettings(off=("truncated", "think_leak"))) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"off": ("think_leek",)}, "rule 'think_leek' cannot be turned off: no such rule; did you mean 'think_leak'?"),
        ({"refusal_patterns": ("(",)}, r"pattern '\(': not a regular expression"),
        ({"leakage_patterns": ("*",)}, r"pattern '\*': not a regular expression"),
        ({"languages": ("english",)}, "language 'english': not known; use ISO 639-1 codes"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FilterSettings(**more)


# vllm-project/vllm #35296, vllm-project/speculators #835
@pytest.mark.parametrize("more", [{"finish_reason": "length"}, {"answer_state": "truncated"}])
def test_a_cut_answer_fails_however_whole_it_looks(more: dict[str, Any]) -> None:
    assert first_failure(answered("The sum is 3.", **more), DEFAULT) == ("truncated", "cut at the token limit")


# vllm-project/vllm #52640
def test_an_answer_without_text_and_calls_is_empty() -> None:
    assert fails("empty", answered(" \n")) == "neither text nor a tool call"
    assert fails("empty", row(user(), assistant("", reasoning_content="1 + 2"))) == "neither text nor a tool call"
    assert fails("empty", row(user(), {"role": "assistant", "content": None})) == "neither text nor a tool call"
    assert fails("empty", row(user(), calling(call()), result(), assistant(""))) == "neither text nor a tool call"
    assert fails("empty", row(user(), calling(call()))) is None


@pytest.mark.parametrize("state", ["empty", "malformed", "infra_error", "rejected", "pending"])
def test_an_answer_that_did_not_come_fails_with_its_state(state: str) -> None:
    assert first_failure(answered("The sum is 3.", answer_state=state), DEFAULT) == ("empty", f"the answer is {state}")


REFUSALS = [
    "I can't help with that.",
    "I can’t help with that request.",
    "I'm sorry, but I can't assist with that.",
    "I'm sorry, but I cannot write malware for you.",
    "I am sorry, but I am unable to provide that information.",
    "I cannot provide instructions on how to build a weapon.",
    "I can't provide guidance on that topic.",
    "I won't help you with this.",
    "I must decline.",
    "I must respectfully decline this request.",
    "Sorry, I can't do that.",
    "Unfortunately, I cannot comply with this request.",
    "I understand that this is frustrating, but I can't help you break into the account.",
    "As an AI language model, I cannot provide medical advice about your dosage.",
    "I appreciate your interest, but I'm not able to assist with this.",
    "I don't feel comfortable writing that story.",
    "That's not something I can help with.",
    "This request goes against my guidelines.",
    "**I'm sorry**, but I can't share that.",
    "I apologize, but I cannot fulfill your request.",
    "Thank you for your question. I'm unable to discuss this.",
    "I'm really sorry you're feeling this way, but I'm unable to help you with this.",
    "My apologies, but I am not able to generate such content.",
    "I will not create this content.",
    "No, I can't help with hacking a phone.",
    "I cannot answer that question.",
    "Es tut mir leid, aber dabei kann ich nicht helfen.",
    "Ich kann Ihnen bei dieser Anfrage leider nicht weiterhelfen.",
    "Leider kann ich diese Frage nicht beantworten.",
    "Je suis désolé, mais je ne peux pas vous aider avec cette demande.",
    "Désolé, je ne peux pas répondre à cette question.",
    "Lo siento, pero no puedo ayudarte con eso.",
    "Lo siento mucho, no puedo proporcionar esa información.",
    "Mi dispiace, ma non posso aiutarti con questa richiesta.",
    "Desculpe, mas não posso ajudar com isso.",
    "Извините, но я не могу помочь с этим.",
    "很抱歉，我无法帮助您完成这个请求。",
    "对不起，但我不能提供这些信息。",
    "我无法提供此类内容。",
    "申し訳ありませんが、そのご要望にはお応えできません。",
    "죄송하지만 그 요청은 도와드릴 수 없습니다.",
]
NO_REFUSALS = [
    "I cannot find x = 3 in the set, so the assumption is false.",
    "I can't help but notice that the two sums are equal.",
    "We cannot provide a bijection between the two sets, because one is larger.",
    "I can't help laughing when I read this line.",
    "Suppose that I cannot write n as a sum of two squares.",
    "The function cannot help with negative numbers.",
    '"I can\'t help you with that," said the clerk, and closed the window.',
    "She said that she was sorry, but she could not come.",
    "I'm sorry, but I can't make it to the party on Saturday.",
    "Sorry to hear that! Here are three things you can try.",
    "I'm sorry for the confusion. The right answer is 42.",
    "You're right, I apologize for the mistake. The sum is 12.",
    "Unfortunately, the matrix is singular, so it cannot be inverted.",
    "I cannot provide a counterexample, because none exists: the claim is true.",
    "I don't know the exact date, but it was around 1450.",
    "No, 91 is not prime: it is 7 times 13.",
    "To decline an invitation, write: I'm sorry, but I cannot attend.",
    "I must admit that the second proof is shorter.",
    "I can help with that! First, open the settings.",
    "This request takes two parameters: the name and the age.",
    "The request violates the schema because the field is missing.",
    "I won't repeat the first step here, since it is the same as before.",
    "I am unable to see a pattern in the first three terms, so let us compute more.",
    "As an AI researcher, you cannot avoid linear algebra.",
    "It is impossible to trisect this angle with ruler and compass.",
    "Leider ist die Matrix singulär und hat keine Inverse.",
    "Es tut mir leid, das zu hören. Hier sind drei Vorschläge.",
    "Ich kann morgen nicht kommen, weil ich krank bin.",
    "Je ne peux pas venir demain, car je suis malade.",
    "No puedo encontrar un divisor común, así que los números son coprimos.",
    "Mi dispiace per l'attesa. Ecco la risposta.",
    "我不能确定哪一个更大，所以先计算差。",
    "这个函数不能处理负数。",
    "すみません、駅はどこですか。",
    "申し訳ありませんが、少々お待ちください。",
    "죄송합니다. 답은 42입니다.",
    "I can't do this integral by parts alone, so substitute u = x^2.",
    "I am sorry that the first answer was wrong; here is the corrected code.",
    "I cannot give a shorter proof than this one.",
    "I will not assume that n is even.",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_is_found(text: str) -> None:
    assert (fails("refusal", answered(text)) or "").startswith("refuses: ")
    assert fails("refusal", answered(f"{text}\n\nIs there anything else?"))


@pytest.mark.parametrize("text", NO_REFUSALS)
def test_what_only_sounds_like_a_refusal_passes(text: str) -> None:
    assert fails("refusal", answered(text)) is None


def test_refusals_of_the_server_and_of_extra_patterns_fail() -> None:
    assert fails("refusal", answered("Well,", finish_reason="content_filter")) == "refused by the server"
    assert fails("refusal", answered("Well,", answer_state="refused")) == "refused by the server"
    settings = FilterSettings(refusal_patterns=(r"not my job\b",))
    assert fails("refusal", answered("That is NOT my job."), settings) == "refuses: 'NOT my job'"
    assert fails("refusal", row(user("I can't help with that."), assistant())) is None


# vllm-project/vllm #34625
@pytest.mark.parametrize(
    "text", ["<think>1 + 2</think>3", "a</think>b", "</thinking>3", "a /think> b", "[THINK]1", "x\n</Think"]
)
def test_pieces_of_think_tags_in_an_answer_fail(text: str) -> None:
    assert fails("think_leak", answered(text))


def test_thinking_in_its_own_field_and_talk_of_thinking_pass() -> None:
    assert fails("think_leak", row(user(), assistant(reasoning_content="<think>1 + 2</think>"))) is None
    assert fails("think_leak", answered("I think 1 < 2, and you thought so too: rethink > repeat.")) is None
    assert fails("think_leak", answered("Fine.", "/no_think Why is there a </think>?")) is None


@pytest.mark.parametrize(
    "token",
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|reserved_special_token_12|>",
        "<|channel|>",
        "<｜begin▁of▁sentence｜>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|turn>",
        "<tool_call|>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "<<SYS>>",
        "<s>",
        "</s>",
        "<bos>",
        "[gMASK]",
        "<SPECIAL_10>",
    ],
)
def test_control_tokens_fail_wherever_they_stand(token: str) -> None:
    for bad in (
        answered(f"The sum {token} is 3."),
        answered("3", f"Say {token}"),
        row(user(), assistant("3", reasoning_content=token)),
        row(user(), calling(call(arguments=json.dumps({"a": token}, ensure_ascii=False)))),
        row(user(), calling(call()), {**result(), "content": token}),
    ):
        assert repr(token) in (fails("control_tokens", bad) or "")


@pytest.mark.parametrize(
    "text",
    ["a <| b |> c", "if a<b and b>c", "x[INSTALL]", "<b>bold</b>", "List<String> s;", "<|x|>", "[1, 2]", "<strong>"],
)
def test_ordinary_brackets_are_no_control_tokens(text: str) -> None:
    assert fails("control_tokens", answered(text)) is None


@pytest.mark.parametrize("text", ['<tool_call>{"name": "add"}</tool_call>', "<function=add>", "</tool_calls>"])
def test_the_markup_of_calls_fails_only_where_calls_should_have_been_parsed(text: str) -> None:
    assert fails("control_tokens", answered(text, tools=[ADD]))
    assert fails("control_tokens", row(user(), assistant(text, tool_calls=[call()])))
    assert fails("control_tokens", answered(text)) is None


# ConardLi/easy-dataset #14: answers spoke of "the given text".
@pytest.mark.parametrize(
    "text",
    [
        "According to the given text, the sum is 3.",
        "The answer in the provided passage is 3.",
        "According to the document, it is 3.",
        "As stated in the article, it is 3.",
        "Based on the context provided, it is 3.",
        "The above excerpt says 3.",
        "As an AI language model, I add numbers.",
        "As an AI, I have no numbers.",
        "Well, as a large language model, I add.",
        "As an AI assistant, my sum is 3.",
    ],
)
def test_phrases_that_give_the_making_away_fail(text: str) -> None:
    assert first_failure(answered(text), DEFAULT) == ("leakage", fails("leakage", answered(text)))


@pytest.mark.parametrize(
    "text",
    [
        "From the given information, AB = CD.",
        "The text of the law was changed in 1998.",
        "In the context of group theory, 3 is prime.",
        "According to the law of cosines, it is 3.",
        "As an AI researcher, you add numbers.",
        "GPT-2 was trained as a large language model on web pages.",
        "The phone has an AI, I think.",
        "Open the document and press Ctrl+S.",
    ],
)
def test_ordinary_sentences_are_no_leakage(text: str) -> None:
    assert fails("leakage", answered(text)) is None


def test_whoever_is_given_a_text_may_speak_of_it() -> None:
    text = "According to the given text, the cat sat."
    assert fails("leakage", answered(text, "Read this passage: The cat sat. What did the cat do?")) is None
    assert fails("leakage", answered(text, "What did the cat do?"))


def test_extra_patterns_of_leakage_fail() -> None:
    settings = FilterSettings(leakage_patterns=("section [0-9]+ above",))
    assert fails("leakage", answered("See Section 3 above."), settings) == "gives its making away: 'Section 3 above'"


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "messages",
    [
        [user(), assistant()],
        [SYSTEM, user(), assistant()],
        [{"role": "developer", "content": "Be brief."}, user(), assistant(), user(), assistant()],
        [user(), calling(call())],
        [user(), calling(call("a"), call("b")), result("b"), result("a"), assistant()],
        [user(), calling(call()), result(), calling(call()), result(), assistant(), user(), assistant()],
    ],
)
def test_turns_in_order_pass(messages: list[dict[str, Any]]) -> None:
    assert first_failure(row(*messages, tools=[ADD]), DEFAULT) is None


# huggingface/smol-course #260: the second assistant turn was labelled user.
# modelscope/ms-swift #5831, unslothai/unsloth #334: uneven roles were deleted, or broke the template.
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user(), assistant(), user(), user()], "message 3 is user, after user"),
        ([user(), user(), assistant()], "message 1 is user, after user"),
        ([assistant(), user(), assistant()], "message 0 is assistant, after the beginning"),
        ([user(), SYSTEM, assistant()], "message 1 is system, after user"),
        ([SYSTEM, SYSTEM, user(), assistant()], "message 1 is system, after system"),
        ([user(), assistant(), assistant()], "message 2 is assistant, after assistant"),
        ([user(), assistant(), user()], "the last message is user"),
        ([user(), calling(call()), result()], "the last message is tool"),
        ([user(), calling(call()), assistant()], "message 2 is assistant, after assistant with calls"),
        ([user(), result(), assistant()], "message 1 is tool, after user"),
        ([user(), {"role": "bot", "content": "3"}], "message 1 is bot, after user"),
        ([user(), {"content": "3"}], "message 1 is of no role, after user"),
        ([], "no messages"),
    ],
)
def test_turns_out_of_order_fail(messages: list[dict[str, Any]], reason: str) -> None:
    assert fails("role_order", row(*messages)) == reason


# agentforce314/clawcodex #394, diegosouzapw/OmniRoute #2976: results without calls, empty ids.
# NVIDIA/NeMo-Agent-Toolkit #1663: two calls with one id. areal-project/AReaL #1501: arguments that are no object.
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user(), result(), assistant()], "message 1 is the result of no open call ('c1')"),
        ([user(), calling(call()), result("c2"), assistant()], "message 2 is the result of no open call ('c2')"),
        ([user(), calling(call()), result(), result(), assistant()], "message 3 is the result of no open call ('c1')"),
        ([user(), calling(call()), result(None), assistant()], "message 2 is the result of no open call (None)"),
        ([user(), calling(call("a"), call("b")), result("a"), assistant()], "no result for the call 'b'"),
        ([user(), calling(call("a"), call("b")), result("a")], "no result for the call 'b'"),
        ([user(), calling(call()), user(), assistant()], "no result for the call 'c1'"),
        ([user(), calling(call()), calling(call("c2"))], "no result for the call 'c1'"),
        ([user(), calling(call(""))], "message 1 calls 'add' without an id"),
        ([user(), calling(call(None))], "message 1 calls 'add' without an id"),
        ([user(), calling(call("a"), call("a"))], "message 1 has two calls with the id 'a'"),
        ([user(), calling(call(name="sub"))], "message 1 calls 'sub', which is not among the tools"),
        (
            [user(), calling(call(arguments="[1]"))],
            "message 1: the arguments of 'add' are not the text of a JSON object",
        ),
        (
            [user(), calling(call(arguments="null"))],
            "message 1: the arguments of 'add' are not the text of a JSON object",
        ),
        (
            [user(), calling(call(arguments='{"a":'))],
            "message 1: the arguments of 'add' are not the text of a JSON object",
        ),
    ],
)
def test_calls_and_results_that_do_not_pair_fail(messages: list[dict[str, Any]], reason: str) -> None:
    assert fails("tool_pairing", row(*messages, tools=[ADD])) == reason


def test_calls_without_any_tools_fail_and_ids_may_begin_anew_in_each_step() -> None:
    assert fails("tool_pairing", row(user(), calling(call()))) == "message 1 calls 'add', which is not among the tools"
    again = row(user(), calling(call()), result(), calling(call()), result(), assistant(), tools=[ADD])
    assert fails("tool_pairing", again) is None


# deepfabric #474: a property that is null crashed the import. NVIDIA-NeMo/Gym #1925: an empty list of tools.
@pytest.mark.parametrize(
    "tools",
    [
        None,
        [],
        [ADD],
        [{"function": {"name": "now"}}],
        [{"type": "function", "function": {"name": "now", "parameters": None}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": None}}}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": None}}}],
    ],
)
def test_lists_of_functions_pass(tools: Any) -> None:
    assert first_failure(answered("3", tools=tools), DEFAULT) is None


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("[]", "'tools' is a str where a list is needed"),
        ({"add": ADD}, "'tools' is a dict where a list is needed"),
        ([ADD, {"name": "now"}], "tool 1 is no function with a name"),
        (["add"], "tool 0 is no function with a name"),
        ([{"type": "custom", "function": {"name": "f"}}], "tool 0 is no function with a name"),
        ([{"function": {"name": ""}}], "tool 0 is no function with a name"),
        ([ADD, ADD], "two tools are called 'add'"),
        ([{"function": {"name": "f", "parameters": "x"}}], "the parameters of tool 'f' are no object schema"),
        (
            [{"function": {"name": "f", "parameters": {"properties": ["x"]}}}],
            "the parameters of tool 'f' are no object schema",
        ),
    ],
)
def test_what_is_no_list_of_functions_fails(tools: Any, reason: str) -> None:
    assert fails("tool_schema", answered("3", tools=tools)) == reason


GERMAN = "Der Ausschuss hat beschlossen, die Sitzung auf die nächste Woche zu verschieben."
ENGLISH = "The committee decided to postpone the meeting until next week."


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (GERMAN, "de"),
        ("El comité decidió aplazar la reunión hasta la próxima semana.", "es"),
        ("Комитет решил отложить заседание до следующей недели.", "ru"),
        ("委员会决定将会议推迟到下周举行，因为天气不好。", "zh"),
    ],
)
def test_an_answer_surely_in_another_language_fails(text: str, language: str) -> None:
    english = FilterSettings(languages=("en",))
    assert fails("language", answered(text), english) == f"written in {language!r}, not in en"
    assert fails("language", answered(f"{text}\n```python\nprint('the sum of all the words is here')\n```"), english)
    assert fails("language", answered(text), FilterSettings(languages=("en", language))) is None
    assert fails("language", answered(text)) is None


@pytest.mark.parametrize(
    "text",
    [
        ENGLISH,
        "Ja.",
        "42",
        "Paris",
        "$$ \\int_0^1 x^2 dx = \\frac{1}{3} $$",
        "```\nfür jede Zeile in der Datei, drucke die Zeile und gehe weiter\n```",
        "`Straße` \\(\\text{wobei die Summe größer ist als die Differenz}\\)",
        f"<tool_call>{GERMAN}</tool_call>",
        "Juan Carlos, Maria Gonzalez, Pedro Martinez, Lucia Fernandez",
        "SELECT name FROM users WHERE id = 3 ORDER BY name",
        "C major, G major, D minor, A minor",
        "https://de.wikipedia.org/wiki/Die_Verschiebung_der_Sitzung_auf_die_naechste_Woche",
    ],
)
def test_what_cannot_be_decided_passes(text: str) -> None:
    assert fails("language", answered(text), FilterSettings(languages=("en",))) is None


def test_near_relatives_pass_for_each_other() -> None:
    danish = answered("Jeg kan ikke hjælpe med det i dag desværre.")
    assert fails("language", danish, FilterSettings(languages=("no",))) is None
    assert fails("language", danish, FilterSettings(languages=("en",)))


def test_the_length_is_counted_in_words() -> None:
    settings = FilterSettings(min_words=3, max_words=5)
    assert fails("length", answered("one two"), settings) == "2 words, fewer than 3"
    assert fails("length", answered("one two three"), settings) is None
    assert fails("length", answered("a b c d e f"), settings) == "6 words, more than 5"
    assert fails("length", answered("今天天气很好"), settings) == "6 words, more than 5"
    assert fails("length", answered("今天很"), settings) is None
    assert fails("length", row(user(), calling(call())), settings) is None
    assert fails("length", answered("👍")) is None


NAMES = ("Anna", "Ben", "Clara", "David", "Eve")


@pytest.mark.parametrize(
    "text",
    [
        "the cat sat " * 50,
        "I am not sure what the answer to that is, so let me think again. " * 5,
        "Fine.\n" + "Wait, let me check that\n" * 5,
        "First we add the numbers.\nThen we take the root.\n" * 5,
        " ".join(f"{name} adds {at} and {at * at}." for at, name in enumerate(NAMES * 20)) + " no no no" * 300,
        "等一下，让我再想一想。" * 6,
        "0" * 1000,
    ],
)
def test_a_loop_fails(text: str) -> None:
    assert fails("repetition", answered(text))
    assert fails("repetition", row(user(), assistant(reasoning_content=text)))


def honest_texts() -> Iterator[str]:
    yield ENGLISH
    yield "ha " * 20
    yield "No. No. No. No. No. No. No."
    yield "\n".join(f"| {at} | {at * at} | {'yes' if at % 2 else 'no'} |" for at in range(200))
    yield "\n".join(f"| {at:<30} | {'pending':<30} | {at % 7:<30} |" for at in range(200))
    yield json.dumps([{"id": at, "name": NAMES[at % 5], "active": True} for at in range(300)], indent=4)
    yield json.dumps([{"id": at, "kind": "the customer", "active": True} for at in range(300)], indent=2)
    yield "\n".join(f"INSERT INTO users (id, name) VALUES ({at}, '{NAMES[at % 5]}');" for at in range(200))
    yield "\n".join("[" + ", ".join("1" if i == j else "0" for j in range(25)) + "]" for i in range(25))
    yield "```python\n" + "print('one more time')\n" * 6 + "```"
    yield "Let it be, let it be\n" * 4 + "Whisper words of wisdom"
    yield "+---+---+---+\n|   |   |   |\n" * 8
    yield " ".join(str(at) for at in range(500))
    yield "".join(f"Step {at}: add {at}, which gives {at * (at + 1) // 2}.\n" for at in range(200))


@pytest.mark.parametrize("text", list(honest_texts()))
def test_prose_code_json_and_long_tables_are_no_loop(text: str) -> None:
    assert fails("repetition", answered(text)) is None


def test_a_licence_is_checked_only_where_a_list_is_given() -> None:
    settings = FilterSettings(licenses_allowed=("MIT", "Apache-2.0"))
    assert fails("license", answered("3", license="mit"), settings) is None
    assert (
        fails("license", answered("3", license="CC-BY-NC-4.0"), settings) == "the licence of the seed is CC-BY-NC-4.0"
    )
    assert fails("license", answered("3"), settings) == "the licence of the seed is unknown"
    assert fails("license", answered("3", license=None)) is None
    assert fails("license", answered("3", license="CC-BY-NC-4.0")) is None
    assert fails("license", answered("3", license="MIT"), FilterSettings(licenses_allowed=()))


def test_the_licence_and_the_terms_of_the_member_count_too() -> None:
    settings = FilterSettings(licenses_allowed=("MIT",), require_training_terms=True)
    good = {"license": "MIT", "member_license": "MIT", "outputs_may_train": True}
    assert fails("license", answered("3", **good), settings) is None
    for more, reason in (
        ({"member_license": "llama3"}, "the licence of the member is llama3"),
        ({"member_license": None}, "the licence of the member is unknown"),
        ({"outputs_may_train": False}, "the member's terms forbid training"),
        ({"outputs_may_train": None}, "the member's terms on training are unknown"),
    ):
        assert fails("license", answered("3", **{**good, **more}), settings) == reason
        assert fails("license", answered("3", **{**good, **more})) is None


def test_reasoning_that_is_the_answer_fails() -> None:
    assert fails("identical_reasoning", row(user(), assistant("The sum\nis 3.", reasoning_content=" The sum is 3.")))
    assert fails("identical_reasoning", row(user(), assistant("3", reasoning_content="1 + 2 = 3"))) is None
    assert fails("identical_reasoning", row(user(), assistant("", tool_calls=[call()]))) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["role", "content", "reasoning_content", "tool_calls", "tool_call_id"])
roles = st.sampled_from(["user", "assistant", "tool"])
messages = st.dictionaries(keys, json_values, max_size=5) | st.fixed_dictionaries(
    {"role": roles, "content": json_values}, optional={"tool_calls": st.lists(json_values), "tool_call_id": json_values}
)
rows = st.fixed_dictionaries({}, optional={"messages": st.lists(messages | json_values, max_size=4) | json_values})


@hypothesis_settings(deadline=None)
@given(rows, st.dictionaries(st.sampled_from(["tools", "license", "answer_state", "finish_reason"]), json_values))
def test_no_row_makes_a_rule_raise_and_the_first_failure_is_the_first_of_all(
    made: dict[str, Any], more: dict[str, Any]
) -> None:
    failures = all_failures(made | more, DEFAULT)
    assert first_failure(made | more, DEFAULT) == (failures[0] if failures else None)
    assert all("\n" not in reason for _, reason in failures)
