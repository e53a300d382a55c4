import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers.base import ParseError
from mopdctl.verifiers.fences import FENCE_RULES, answer, unfenced

NO_TAGS = st.text(max_size=40).filter(lambda text: "think>" not in text)


@given(NO_TAGS, NO_TAGS)
def test_the_answer_is_what_stands_behind_the_reasoning(reasoning: str, said: str) -> None:
    assert answer(said) == said
    assert answer(f"<think>{reasoning}</think>{said}") == said
    assert answer(f"{reasoning}</think>{said}") == said  # huggingface/trl #6363: the prompt holds the opening tag
    assert answer(f"<think>a</think>b<think>{reasoning}</think>{said}") == said


@pytest.mark.parametrize("response", ["<think>", "<think>so 7", "7 <think>", "<think>a</think>7<think>or 8"])
def test_reasoning_that_never_ends_is_no_answer(response: str) -> None:
    with pytest.raises(ParseError, match="not closed"):
        answer(response)


FENCED = "```json\n{}\n```"


@pytest.mark.parametrize(
    ("text", "none", "optional", "whole", "first"),
    [
        ("{}", "{}", "{}", None, None),
        (FENCED, FENCED, "{}", "{}", "{}"),
        ("\n ```json \n{}\n  ```\n", "\n ```json \n{}\n  ```\n", "{}", "{}", "{}"),
        ("```\n{}\n```", "```\n{}\n```", "{}", "{}", "{}"),
        ("```json\r\n{}\r\n```", "```json\r\n{}\r\n```", "{}\r", "{}\r", "{}\r"),
        (f"So: {{}}\n{FENCED}", f"So: {{}}\n{FENCED}", f"So: {{}}\n{FENCED}", None, "{}"),
        (f"{FENCED}\nDone.", f"{FENCED}\nDone.", None, None, "{}"),
        (f"{FENCED}\n```json\n[]\n```", f"{FENCED}\n```json\n[]\n```", None, None, "{}"),
        ("```json\n{}", "```json\n{}", None, None, None),
        ("```python\n{}\n```", "```python\n{}\n```", None, None, None),
        ("```python\n1\n```\n" + FENCED, "```python\n1\n```\n" + FENCED, None, None, None),
        ("```\n```", "```\n```", "", "", ""),
        ("", "", "", None, None),
    ],
)
def test_each_rule_takes_the_document_that_it_says_or_none(
    text: str, none: str | None, optional: str | None, whole: str | None, first: str | None
) -> None:
    expected = (none, optional, whole, first)
    for rule, document in zip(FENCE_RULES, expected, strict=True):
        if document is None:
            with pytest.raises(ParseError):
                unfenced(text, rule, ("json",))
        else:
            assert unfenced(text, rule, ("json",)) == document, rule


@given(st.text("ab{}`\n ", max_size=40), st.sampled_from(["optional", "whole", "first"]))
def test_what_was_put_into_a_fence_comes_out_again(body: str, rule: str) -> None:
    if any(line.strip() == "```" for line in body.split("\n")):
        return
    assert unfenced(f"```json\n{body}\n```", rule, ("json",)) == body


def test_a_rule_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="no fence rule 'last'"):
        unfenced("{}", "last", ("json",))
