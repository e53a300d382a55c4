import unicodedata
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers import Verdict, VerdictState, verify
from mopdctl.verifiers.exact import NORMALISATIONS, nfkc, normalised


def outcome(verdict: Verdict) -> tuple[str, float | None]:
    return str(verdict.state), verdict.reward


RIGHT, WRONG = ("ok", 1.0), ("ok", 0.0)
UNREADABLE, UNUSABLE = ("parse_error", None), ("invalid_reference", None)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("New York", "New York", RIGHT),
        ("  New \n\t York\n", "New York", RIGHT),
        ("New York", "  New   York ", RIGHT),
        ("new york", "New York", WRONG),
        ("NewYork", "New York", WRONG),
        ("New York.", "New York", WRONG),
        ("", "New York", WRONG),
        ("42", 42, RIGHT),
        ("42.0", 42, WRONG),
    ],
)
def test_exact_match_ignores_whitespace_and_nothing_else(
    response: str, answer: object, expected: tuple[str, float]
) -> None:
    assert outcome(verify("exact_match", response, {"answer": answer})) == expected


def test_exact_match_names_what_was_expected() -> None:
    assert verify("exact_match", "a", {"answer": "b"}).detail == "expected 'b'"
    assert verify("exact_match", "b", {"answer": "b"}).detail == ""


@pytest.mark.parametrize("reference", [{}, {"value": 1}, None, "b", ["answer"], {"answer": None}, {"answer": {"a": 1}}])
def test_exact_match_without_a_usable_answer_blames_the_reference(reference: object) -> None:
    assert outcome(verify("exact_match", "None", reference)) == UNUSABLE


@given(st.integers(-(10**29), 10**29), st.sampled_from(["", " ", "\n", "\t "]))
def test_integer_accepts_the_very_number_in_any_spelling(number: int, space: str) -> None:
    for text in (f"{number}", f"{space}{number}{space}", f"+{number}" if number >= 0 else f"{number}"):
        assert outcome(verify("integer", text, {"answer": number})) == RIGHT
    assert outcome(verify("integer", str(number), {"answer": str(number)})) == RIGHT
    assert outcome(verify("integer", str(number), {"answer": number + 1})) == WRONG


@pytest.mark.parametrize("response", ["007", "7", "+7", " 7\n"])
def test_integer_compares_values(response: str) -> None:
    assert outcome(verify("integer", response, {"answer": 7})) == RIGHT
    assert outcome(verify("integer", response, {"answer": -7})) == WRONG


@pytest.mark.parametrize(
    "response",
    [
        "",
        " ",
        "-",
        "7.",
        "7.0",
        "7e0",
        "0x7",
        "7 7",
        "1_000",
        "1,000",
        "the answer is 7",
        "7 apples",
        "**7**",
        "- 7",
        "\u0667",  # Arabic-Indic seven
        "\uff17",  # fullwidth seven
        "\u00b2",  # superscript two
        "\u22127",  # minus sign that is not a hyphen
        "\u00a07",  # no-break space
        "7" * 31,
        "1" * 10_000,
    ],
)
def test_integer_reads_nothing_but_one_ascii_integer(response: str) -> None:
    assert outcome(verify("integer", response, {"answer": 7})) == UNREADABLE


@pytest.mark.parametrize("answer", ["seven", "", None, [7], 7.5, float("inf"), float("nan"), True, "\u0667", "7.0"])
def test_integer_with_an_answer_that_is_no_integer_blames_the_reference(answer: object) -> None:
    for response in ("7", "1"):
        assert outcome(verify("integer", response, {"answer": answer})) == UNUSABLE


def test_a_bad_reference_is_blamed_before_an_unreadable_response() -> None:
    assert outcome(verify("integer", "seven", {})) == UNUSABLE


def test_an_unknown_verifier_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no_such"):
        verify("no_such", "a", {"answer": "a"})


def test_a_verdict_says_who_gave_it() -> None:
    verdict = verify("exact_match", "a", {"answer": "a"})
    assert verdict == Verdict(VerdictState.OK, 1.0, "exact_match", 2)


@pytest.mark.parametrize("name", ["exact_match", "integer"])
def test_reasoning_before_the_answer_does_not_count(name: str) -> None:
    assert outcome(verify(name, "<think>8?</think>\n7", {"answer": 7})) == RIGHT
    assert outcome(verify(name, "<think>7</think>8", {"answer": 7})) == WRONG
    assert outcome(verify(name, "<think>7", {"answer": 7})) == UNREADABLE


@pytest.mark.parametrize(
    ("steps", "response", "answer", "same"),
    [
        (["casefold"], "STRASSE", "stra\u00dfe", True),
        (["casefold"], "a ", "a", False),
        (["strip"], " a  b\n", "a  b", True),
        (["strip"], "a  b", "a b", False),
        (["whitespace"], "a\t\nb", "a b", True),
        (["whitespace"], " a", "a", False),
        (["nfkc"], "\uff11\u00b2", "12", True),
        (["nfkc"], "\ufb01ne", "fine", True),
        ([], "a ", "a", False),
        (["punctuation"], "(Yes!)", "Yes", True),
        (["punctuation"], "U.S.A.", "USA", True),
        (["punctuation"], "-5", "5", False),
        (["punctuation"], "3.5", "35", False),
        (["punctuation"], ".5", "5", False),
        (["punctuation"], "-.5", ".5", False),
        (["punctuation"], "(-.5)", "-.5", True),
        (["punctuation"], "1,000", "1000", False),
        (["punctuation"], "3.5.", "3.5", True),
        (["punctuation"], "well-known", "wellknown", True),
        (["articles"], "the cat", "cat", True),
        (["articles"], "An apple a day", "apple day", True),
        (["articles"], "theory", "ory", False),
        (["strip", "articles", "punctuation", "casefold", "whitespace"], 'The  "New York".', "new york", True),
    ],
)
def test_each_normalisation_does_what_it_says_and_no_more(
    steps: list[str], response: str, answer: str, same: bool
) -> None:
    for one, other in ((response, answer), (answer, response)):
        verdict = verify("exact_match", one, {"answer": other, "normalise": steps})
        assert outcome(verdict) == (RIGHT if same else WRONG)


@given(st.text(max_size=30), st.lists(st.sampled_from(NORMALISATIONS)), st.randoms(use_true_random=False))
def test_an_answer_equals_itself_however_it_is_normalised_and_the_order_of_steps_is_free(
    text: str, steps: list[str], random: Random
) -> None:
    if not normalised(text, steps).strip():
        return
    shuffled = steps * 2
    random.shuffle(shuffled)
    assert normalised(text, shuffled) == normalised(text, steps)
    assert "think>" in text or outcome(verify("exact_match", text, {"answer": text, "normalise": steps})) == RIGHT


def test_marks_beyond_the_thirtieth_still_count() -> None:
    marks = "a" + "\u0301" * 40
    for response, right in ((marks, True), (marks + "\u0301", False), ("a" + "\u0301" * 30, False)):
        verdict = verify("exact_match", response, {"answer": marks, "normalise": ["nfkc"]})
        assert outcome(verdict) == (RIGHT if right else WRONG)


@given(st.text(max_size=30))
def test_nfkc_is_that_of_unicode_up_to_thirty_marks_in_a_row(text: str) -> None:
    assert nfkc(text) == unicodedata.normalize("NFKC", text)


def test_one_of_several_answers_is_enough() -> None:
    reference = {"answers": ["NYC", "New York", 7]}
    assert [verify("exact_match", text, reference).reward for text in ("NYC", "New  York", "7", "nyc")] == [1, 1, 1, 0]
    assert verify("exact_match", "x", reference).detail == "expected one of ['NYC', 'New York', '7']"


@pytest.mark.parametrize(
    "reference",
    [
        {"answers": []},
        {"answers": "NYC"},
        {"answers": [None]},
        {"answers": [True]},
        {"answer": True},
        {"answer": "a", "answers": ["a"]},
        {"answer": "a", "normalise": ["lower"]},
        {"answer": "a", "normalise": "casefold"},
        {"answer": "a", "normalise": [["casefold"]]},
        {"answer": "?!", "normalise": ["punctuation"]},
        {"answer": "the", "normalise": ["articles", "strip"]},
    ],
    ids=str,
)
def test_answers_and_normalisations_that_cannot_be_used_are_blamed(reference: object) -> None:
    for response in ("a", "", "True", "?!"):
        assert outcome(verify("exact_match", response, reference)) == UNUSABLE


def test_an_unknown_normalisation_is_named_with_those_that_there_are() -> None:
    detail = verify("exact_match", "a", {"answer": "a", "normalise": ["lower"]}).detail
    assert detail == f"'normalise' has 'lower'; it lists any of {', '.join(NORMALISATIONS)}"
