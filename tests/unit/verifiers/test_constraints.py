import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers import VerdictState, verify
from mopdctl.verifiers.constraints import KINDS, kinds


def reward(response: str, *constraints: dict[str, Any], **flags: bool) -> float | None:
    verdict = verify("constraints", response, {"constraints": list(constraints), **flags})
    assert verdict.state == VerdictState.OK, verdict
    return verdict.reward


UPPER, LOWER = {"kind": "case", "case": "upper"}, {"kind": "case", "case": "lower"}
STARTS, ENDS = {"kind": "starts_with", "text": "Dear"}, {"kind": "ends_with", "text": "Bye."}
BETWEEN = {"kind": "between", "before": "<<", "after": ">>", "inner": UPPER}

CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "words": [
        ({"min": 3}, ["a b c", "it's well-known so"], ["a b", "a - b", "..."]),
        ({"max": 2}, ["a", "don't stop"], ["a b c"]),
        ({"min": 2, "max": 2}, ["a, b!", "na\u00efve 7"], ["a", "a b c"]),
    ],
    "sentences": [
        (
            {"min": 2, "max": 2},
            ["A. B.", "Is it? Yes!", "A... B", '"A." B', "\u597d\u3002\u597d\u3002"],
            ["A", "A.", "A. B. C."],
        ),
        (
            {"max": 1},
            ["It is 3.14 m long.", "Use e.g. this one.", "Dr. Who is here.", "1. First item", "a.b.c"],
            ["One. Two.", "A title\n\nA text", "What?! No."],
        ),
    ],
    "paragraphs": [
        ({"min": 2, "max": 2}, ["a\n\nb", "a\n \n\n\nb\nc"], ["a", "a\nb", "a\n\nb\n\nc"]),
        ({"min": 2, "max": 2, "separator": "***"}, ["a\n***\nb", "***a***b***"], ["a\n\nb", "a***b***c", "a******"]),
    ],
    "lines": [({"min": 2, "max": 3}, ["a\nb", "a\n\nb\nc"], ["a", "a\nb\nc\nd"])],
    "characters": [({"max": 5}, ["abcde", " ab \n", "\u00e4\u00e4\u00e4\u00e4\u00e4"], ["abcdef"])],
    "bullets": [
        (
            {"min": 2, "max": 2},
            ["* a\n* b", "So:\n- a\n  - b", "\u2022 a\n+ b"],
            ["* a", "*a*\n**b**", "-a\n-b", "---\n***", "- a\n- b\n- c"],
        )
    ],
    "numbered_items": [({"min": 2}, ["1. a\n2. b", "1) a\n 2) b"], ["1. a", "1.5\n2.5", "one\ntwo", "1.\n2."])],
    "headings": [({"min": 1}, ["# A", "x\n### B"], ["#A", "####### A", "A #"])],
    "sections": [
        (
            {"marker": "Section", "min": 2, "max": 2},
            ["Section 1\na\nSection 2\nb", "## Section 1\n**Section 2**"],
            ["Section 1", "Section\nSection", "In Section 1 and Section 2", "SECTION 1\nSECTION 2"],
        )
    ],
    "highlights": [
        ({"min": 1, "max": 1}, ["a *b* c", "**a b**"], ["a", "* a\n* b", "**", "a * b * c", "*a* and *b*", "****"])
    ],
    "placeholders": [
        ({"min": 2}, ["[name], [address]", "[a][b]"], ["[name]", "[] [ ]", "[a](b) [c](d)", "[[\n]]", "name, address"])
    ],
    "titles": [({"min": 1}, ["<<A title>>\nText", "x <<y>>"], ["<<>>", "<< >>", "<A>", "<<a\nb>>", "<<<>>>"])],
    "capital_words": [
        ({"min": 2, "max": 2}, ["NATO and the EU", "AB7 WELL-KNOWN I"], ["I am A", "NATO", "NATO, EU, UN", "Nato Eu"])
    ],
    "keyword": [
        ({"word": "cat", "min": 2}, ["Cat, cat.", "a cat's cat"], ["cat", "cats category", "concat cat_"]),
        ({"word": "C++", "min": 1, "max": 1}, ["I like C++."], ["C", "C++ and c++", "ABC++"]),
        ({"word": "cat", "max": 0}, ["dog", "cats"], ["CAT"]),
    ],
    "letter": [
        ({"letter": "e", "min": 2, "max": 3}, ["eE", "three"], ["e", "eeee", "a", "\u00e9\u00e9"]),
        ({"letter": "!", "max": 0}, ["So."], ["So!"]),
    ],
    "digits": [({"max": 0}, ["seven"], ["7", "\u0667"])],
    "questions": [({"min": 1, "max": 1}, ["So? Yes.", "What?!"], ["So.", "A? B?", "a?b c"])],
    "occurrences": [
        ({"text": "ab", "min": 1, "max": 1}, ["cabd"], ["AB", "abab"]),
        ({"text": "!", "max": 0}, ["So."], ["So!"]),
    ],
    "keywords": [
        ({"words": ["cat", "big dog"]}, ["A Cat and a BIG DOG."], ["cat", "big dog", "cats, big dogs", "dog big cat"])
    ],
    "forbidden_words": [({"words": ["cat", "dog"]}, ["bird", "cats", "catdog"], ["a cat", "Dog!", "cat dog"])],
    "no_commas": [({}, ["a b", "a; b"], ["a, b", "\u597d\uff0c\u597d", ","])],
    "postscript": [
        (
            {"marker": "P.S."},
            ["Text.\n\nP.S. More", "a\nP.S.: b", "P.S. a\nb"],
            ["Text", "P.S.", "Text\n\nP.P.S. x", "P.S. a\n\nText", "a P.S. b", "p.s. a"],
        )
    ],
    "case": [
        ({"case": "upper"}, ["ABC", "A1, B?", " \u00dcBER\n"], ["ABc", "abc", "123"]),
        ({"case": "lower"}, ["abc", "a1, b?", "stra\u00dfe"], ["aBc", "ABC", "123"]),
    ],
    "starts_with": [({"text": "Dear"}, ["Dear", "Dear all", "  Dear all"], ["dear all", "My Dear", "Dea"])],
    "ends_with": [({"text": "Bye."}, ["Bye.", "So. Bye.", "Bye.\n"], ["Bye", "Bye. Now", "bye."])],
    "first_word": [({"word": "Yes"}, ["Yes, so", "**yes**"], ["Yesterday", "Oh yes", "..."])],
    "last_word": [({"word": "bye"}, ["Good Bye!", "bye"], ["goodbye", "bye now", "..."])],
    "paragraph_starts": [
        (
            {"paragraph": 2, "word": "then"},
            ["a\n\nThen b", "a\n\n\n\nthen"],
            ["then", "then\n\nb", "a\n\nthenceforth", "a\nthen", "a\n\n***"],
        )
    ],
    "between": [
        (
            {"before": "<<", "after": ">>", "inner": UPPER},
            ["<<ABC>>", "<<A>>>>"],
            ["<<abc>>", "ABC", "<<ABC>", "<ABC>>", "<<ABC>> x", "<<", "<<>>", "<<>", "<< >>"],
        ),
        ({"before": "", "after": ".", "inner": {"kind": "no_commas"}}, ["a."], ["a, b.", "a", "."]),
        (
            {"before": "[", "after": "]", "inner": {"kind": "between", "before": "(", "after": ")", "inner": LOWER}},
            ["[(a)]", "[ (a) ]"],
            ["[a]", "(a)", "[(A)]", "([a])"],
        ),
    ],
    "items": [
        ({"separator": ";", "count": 3}, ["a;b;c", " a ; b ;c\n"], ["a;b", "a;b;c;d", "a;;c", "a;b;", "a,b,c", "a; ;c"])
    ],
    "only_word": [
        ({"word": "ja", "separator": ","}, ["ja", "ja,JA, Ja "], ["nein", "ja,nein", "ja,", "jaja", "ja ja"])
    ],
    "one_of": [({"choices": ["Yes.", "No."]}, ["Yes.", "No", " Yes. "], ["yes", "Yes, so", "Maybe", "Yes. No."])],
    "quoted": [({}, ['"a"', "\u201cSo.\u201d", "\u00aba\u00bb"], ['"a', 'a"', "'a'", '"', '""', '"a" b', '" "'])],
    "json_only": [
        ({}, ['{"a": 1}', "```json\n[]\n```", "5"], ["{'a': 1}", '{"a": 1} Done.', "so", '{"a": 1, "a": 2}'])
    ],
    "repeats": [
        (
            {"text": "Say so."},
            ["Say so. So.", "Say so.\n\nSo"],
            ["Say so.", "say so. So.", "So. Say so.", "Say so. ..."],
        )
    ],
    "two_responses": [
        ({"separator": "******"}, ["a\n******\nb"], ["a", "a******a", "a******b******c", "******b", "a****** "])
    ],
    "language": [
        (
            {"language": "de"},
            ["Das ist ein kurzer Text \u00fcber das Wetter."],
            ["This is a short text about the weather.", "12345", "..."],
        ),
        ({"language": "zh"}, ["\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002"], ["Das Wetter ist heute sch\u00f6n."]),
    ],
}


# confident-ai/deepeval #3063, thinking-machines-lab/tinker-cookbook #899: rules that nobody had tried passed anything
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_on_responses_that_meet_and_break_it(kind: str) -> None:
    assert CASES[kind]
    for parameters, meets, breaks in CASES[kind]:
        constraint = {"kind": kind, **parameters}
        assert meets
        assert breaks
        assert [response for response in meets if reward(response, constraint) != 1.0] == [], parameters
        assert [response for response in [*breaks, "", " \n"] if reward(response, constraint) != 0.0] == [], parameters


def test_there_are_cases_for_just_the_kinds_that_there_are() -> None:
    assert CASES.keys() == KINDS.keys()
    assert len(KINDS) >= 30


def test_marks_that_overlap_do_not_count_twice() -> None:
    quotes = {"kind": "between", "before": '"', "after": '"', "inner": LOWER}
    assert reward('"a"', quotes) == 1.0
    assert reward('"', quotes) == 0.0


def test_every_constraint_has_to_be_met_and_those_that_are_broken_are_named() -> None:
    assert reward("Dear all. Bye.", STARTS, ENDS) == 1.0
    verdict = verify("constraints", "Dear all.", {"constraints": [STARTS, ENDS, UPPER]})
    assert (verdict.reward, verdict.detail) == (0.0, "breaks ends_with, case")


# thinking-machines-lab/tinker-cookbook #894: keyed by kind, the second one replaced the first
def test_the_same_kind_counts_as_often_as_it_stands_there() -> None:
    cat, dog = {"kind": "keyword", "word": "cat", "min": 1}, {"kind": "keyword", "word": "dog", "min": 1}
    responses = ("cat dog", "cat", "dog", "bird")
    assert [reward(response, cat, dog) for response in responses] == [1.0, 0.0, 0.0, 0.0]
    assert [reward(response, cat, dog, partial=True) for response in responses] == [1.0, 0.5, 0.5, 0.0]


def test_with_partial_the_reward_is_the_share_that_is_met() -> None:
    assert reward("Dear all.", STARTS, ENDS, {"kind": "no_commas"}, partial=True) == pytest.approx(2 / 3)
    assert reward("Dear all.", STARTS, ENDS, partial=False) == 0.0
    assert reward("", {"kind": "no_commas"}, partial=True) == 0.0


def test_with_loose_a_first_or_last_line_and_asterisks_are_forgiven() -> None:
    for response in ("Sure:\nDear all", "**Dear** all", "Sure:\n*Dear* all\nHope it helps."):
        assert reward(response, STARTS) == 0.0
        assert reward(response, STARTS, loose=True) == 1.0
    assert reward("My Dear", STARTS, loose=True) == 0.0
    assert reward("Sure:", {"kind": "words", "max": 0}, loose=True) == 0.0


def test_reasoning_before_the_answer_does_not_count() -> None:
    assert reward("<think>a, b</think>C", UPPER, {"kind": "no_commas"}) == 1.0
    assert reward("<think>C</think>c", UPPER) == 0.0
    assert reward("<think>C</think> ", {"kind": "no_commas"}) == 0.0
    assert verify("constraints", "<think>C", {"constraints": [UPPER]}).state == VerdictState.PARSE_ERROR


# allenai/olmo-eval #314: converted rows hold every parameter of every kind, most of them null
def test_nulls_among_the_parameters_count_as_not_given() -> None:
    constraint = {"kind": "words", "min": 2, "max": None, "separator": None, "letter": None}
    assert [reward(response, constraint) for response in ("a", "a b")] == [0.0, 1.0]


def test_a_language_identifier_that_fails_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        labels = ("de",)

        def rank(self, text: str) -> None:
            raise LookupError(f"no model for {text}")

    monkeypatch.setattr(kinds, "_identifier", Broken)
    verdict = verify("constraints", "Hallo", {"constraints": [{"kind": "language", "language": "de"}]})
    assert (verdict.state, verdict.reward) == (VerdictState.INFRA_ERROR, None)


@pytest.mark.parametrize(
    "constraints",
    [
        [{"kind": "no_such"}],
        [{}],
        [{"kind": None}],
        [{"kind": ["case"]}],
        [{"kind": "case"}],
        [{"kind": "case", "case": "upper", "strict": True}],
        [{"kind": "case", "case": "title"}],
        [{"kind": "case", "case": "UPPER"}],
        [{"kind": "case", "case": ["upper"]}],
        [{"kind": "case", "case": None}],
        [{"kind": "items", "separator": "", "count": 1}],
        [{"kind": "items", "separator": ";", "count": "3"}],
        [{"kind": "items", "separator": ";", "count": 0}],
        [{"kind": "items", "separator": ";", "count": True}],
        [{"kind": "only_word", "word": "ja", "separator": ""}],
        [{"kind": "starts_with", "text": 5}],
        [{"kind": "starts_with", "text": ""}],
        [{"kind": "words"}],
        [{"kind": "words", "min": None, "max": None}],
        [{"kind": "words", "min": 0}],
        [{"kind": "words", "max": -1}],
        [{"kind": "words", "min": 1.5}],
        [{"kind": "words", "min": 3, "max": 2}],
        [{"kind": "words", "minimum": 3}],
        [{"kind": "keyword", "min": 1}],
        [{"kind": "keyword", "word": "", "min": 1}],
        [{"kind": "letter", "letter": "ab", "min": 1}],
        [{"kind": "keywords", "words": []}],
        [{"kind": "keywords", "words": "cat"}],
        [{"kind": "keywords", "words": [None]}],
        [{"kind": "keywords", "words": [" "]}],
        [{"kind": "no_commas", "text": ","}],
        [{"kind": "language", "language": "klingon"}],
        [{"kind": "between", "before": "<<", "after": ">>", "inner": {"kind": "no_such"}}],
        [{"kind": "between", "before": "<<", "after": ">>", "inner": {"kind": "words"}}],
        [{"kind": "between", "before": "<<", "after": ">>", "inner": "upper"}],
        [],
        "case",
        ["case"],
        [None],
        {"kind": "case", "case": "upper"},
        None,
    ],
    ids=str,
)
def test_a_constraint_that_nobody_can_check_is_blamed_whatever_the_response(constraints: Any) -> None:
    for response in ("<<ABC>>", "abc", ""):
        verdict = verify("constraints", response, {"constraints": constraints})
        assert (verdict.state, verdict.reward) == (VerdictState.INVALID_REFERENCE, None)
        assert verdict.detail


def test_what_a_kind_needs_is_said() -> None:
    detail = verify("constraints", "a", {"constraints": [{"kind": "keyword", "words": "a", "min": 1}]}).detail
    assert detail == "constraint 'keyword' needs word, min (optional), max (optional)"


@pytest.mark.parametrize("order", [(LOWER, {"kind": "no_such"}), ({"kind": "no_such"}, LOWER)])
def test_an_unknown_constraint_beside_a_broken_one_is_blamed_in_any_order(order: tuple[dict[str, Any], ...]) -> None:
    verdict = verify("constraints", "ABC", {"constraints": list(order)})
    assert verdict.state == VerdictState.INVALID_REFERENCE


@pytest.mark.parametrize(
    "reference",
    [
        None,
        {},
        [],
        "case",
        {"answer": 1},
        *({"constraints": [UPPER], **extra} for extra in ({"partial": 1}, {"lose": True})),
    ],
)
def test_a_reference_without_usable_constraints_is_blamed(reference: Any) -> None:
    assert verify("constraints", "ABC", reference).state == VerdictState.INVALID_REFERENCE


def test_checking_leaves_the_reference_as_it_was() -> None:
    nested = {**BETWEEN, "inner": {**UPPER, "other": None}}
    reference = {"constraints": [nested, dict(UPPER)]}
    verify("constraints", "<<ABC>>", reference)
    assert reference == {"constraints": [{**BETWEEN, "inner": {**UPPER, "other": None}}, UPPER]}


@given(st.text(max_size=60) | st.text('.!? \n*-[]<>"aA1,#', max_size=60))
def test_any_text_is_judged_by_every_kind(text: str) -> None:
    for kind, cases in CASES.items():
        if kind != "language":
            assert reward(text, {"kind": kind, **cases[0][0]}) in (0.0, 1.0)


@pytest.mark.parametrize(
    "piece", [".", "?!", "\n", "\n ", "*", "**a", "[", "[a", "<<", "<<a", "a-", "1.", "# ", "cat", '"', "\u3002"]
)
def test_what_a_degenerate_model_writes_is_judged_in_linear_time(piece: str) -> None:
    text = "a" + piece * (30_000 // len(piece)) + "a"
    for kind, cases in CASES.items():
        if kind != "language":
            began = time.process_time()
            reward(text, {"kind": kind, **cases[0][0]})
            assert time.process_time() - began < 0.5, kind  # a quadratic search takes seconds
