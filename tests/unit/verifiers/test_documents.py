"""The verifier `structured`: formats, schemas, contents. It runs in this process, no worker between."""

import csv
import io
import json
import time
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState
from mopdctl.verifiers.base import ParseError
from mopdctl.verifiers.documents import LANGUAGES, MOST_CHARACTERS, MOST_DEPTH, read
from mopdctl.verifiers.registry import run_check


def verdict(response: str, reference: Any) -> Verdict:
    return run_check(VERIFIERS["structured"], Attempt(response, reference))


def reward(response: str, form: str, **reference: Any) -> float | None:
    found = verdict(response, {"format": form, **reference})
    assert found.state == VerdictState.OK, found
    return found.reward


WELL_FORMED = {
    "json": '{"a": [1, 1.5, true, null, "x"]}',
    "yaml": "a: [1, 1.5, true, null, x]",
    "toml": 'a = [1, 1.5, true, "x"]',
    "xml": "<a><b>1</b></a>",
    "csv": "a,b\n1,x\n",
}


def test_each_format_is_read_into_json_values() -> None:
    values = {form: read(text, form) for form, text in WELL_FORMED.items()}
    assert values.keys() == LANGUAGES.keys()
    assert values == {
        "json": {"a": [1, 1.5, True, None, "x"]},
        "yaml": {"a": [1, 1.5, True, None, "x"]},
        "toml": {"a": [1, 1.5, True, "x"]},
        "xml": {"a": {"b": "1"}},
        "csv": [{"a": "1", "b": "x"}],
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: yes", {"a": "yes"}),  # YAML 1.2: no is no boolean, and Norway has a code
        ("a: 2020-01-01", {"a": "2020-01-01"}),
        ("a: 2020-01-01T10:00:00Z", {"a": "2020-01-01T10:00:00Z"}),
        ("a: 12:30", {"a": "12:30"}),
        ("a: '1'", {"a": "1"}),
        ("a:\n  - b: 1\n  - c", {"a": [{"b": 1}, "c"]}),
        ("a: |\n  x\n  y\n", {"a": "x\ny\n"}),
        ("'<<': 1", {"<<": 1}),
    ],
)
def test_yaml_is_read_by_its_version_1_2_and_dates_stay_text(text: str, value: Any) -> None:
    assert read(text, "yaml") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<a/>", {"a": ""}),
        ("<a> x </a>", {"a": "x"}),
        ("<a b='1'/>", {"a": {"@b": "1"}}),
        ("<a b='1'>x</a>", {"a": {"@b": "1", "#text": "x"}}),
        ("<a><b>1</b><c/><b>2</b><b>3</b></a>", {"a": {"b": ["1", "2", "3"], "c": ""}}),
        ("<a>x<b/>y</a>", {"a": {"b": "", "#text": "xy"}}),
        ("<a>1 &lt; 2 &#65;<!-- no --></a>", {"a": "1 < 2 A"}),
        ("<?xml version='1.0' encoding='latin-1'?><a>\u00e9</a>", {"a": "\u00e9"}),
        ("<a><![CDATA[<b>]]></a>", {"a": "<b>"}),
        ("<a><b><c>1</c></b><b><c>2</c></b></a>", {"a": {"b": [{"c": "1"}, {"c": "2"}]}}),
    ],
)
def test_xml_is_mapped_as_documented(text: str, value: Any) -> None:
    assert read(text, "xml") == value


def test_dates_in_toml_are_text_in_iso_form() -> None:
    text = "a = 2020-01-01\nb = 2020-01-01T10:00:00Z\nc = 10:00:00"
    assert tomllib.loads(text) != read(text, "toml")
    assert read(text, "toml") == {"a": "2020-01-01", "b": "2020-01-01T10:00:00+00:00", "c": "10:00:00"}


BILLION_LAUGHS = (
    '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;&x;&x;&x;&x;&x;&x;&x;&x;">'
    '<!ENTITY z "&y;&y;&y;&y;&y;&y;&y;&y;&y;&y;">]><a>&z;</a>'
)
ALIAS_BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", '{"a": 1, "a": 2}'),
        ("json", "[NaN]"),
        ("json", "[1e999]"),
        ("json", "{'a': 1}"),
        ("json", "{} {}"),
        ("yaml", "a: 1\na: 2"),
        ("yaml", "a: .nan"),
        ("yaml", "a: -.inf"),
        ("yaml", "a: !!python/object:os.system x"),
        ("yaml", "a: !!str 1"),
        ("yaml", "a: ! x"),
        ("yaml", ALIAS_BOMB),
        ("yaml", "a: &x 1"),
        ("yaml", "<<: {a: 1}"),
        ("yaml", "%YAML 1.1\n---\na: yes"),
        ("yaml", "%TAG ! tag:x,2000:\n---\na: 1"),
        ("yaml", "a: 1\n---\nb: 2"),
        ("yaml", "1: a"),
        ("yaml", "? [a]\n: 1"),
        ("yaml", "a: [1"),
        ("yaml", "a: b: c"),
        ("yaml", "\tx: 1"),
        ("toml", "a = 1\na = 2"),
        ("toml", "a = nan"),
        ("toml", "a = inf"),
        ("toml", "a = x"),
        ("toml", "a: 1"),
        ("xml", BILLION_LAUGHS),
        ("xml", '<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>'),
        ("xml", '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>'),
        ("xml", "<!DOCTYPE a><a/>"),
        ("xml", "<a>&x;</a>"),
        ("xml", "<a><b></a></b>"),
        ("xml", "<a/><b/>"),
        ("xml", "<a b='1' b='2'/>"),
        ("xml", "<a>1 < 2</a>"),
        ("xml", "So: <a/>"),
        ("xml", "a"),
        ("csv", "a,b\n1"),
        ("csv", "a,b\n1,2,3"),
        ("csv", "a,b\n\n1,2"),
        ("csv", "a,a\n1,2"),
        ("csv", "a,\n1,2"),
        ("csv", 'a,b\n"1,2'),
        ("csv", 'a,b\n"1"x,2'),
        *((form, text) for form in LANGUAGES for text in ("", " \n", "```", "\ud800", "x" * (MOST_CHARACTERS + 1))),
    ],
    ids=repr,
)
def test_what_is_malformed_or_a_trap_is_a_parse_error_and_never_a_score(form: str, text: str) -> None:
    if (form, text) == ("csv", "\ud800"):
        return  # a header, if an odd one
    found = verdict(text, {"format": form})
    assert (found.state, found.reward) == (VerdictState.PARSE_ERROR, None)
    assert 0 < len(found.detail) < 300
    assert "\n" not in found.detail


def nested(form: str, depth: int) -> str:
    if form == "xml":
        return "<a>" * depth + "</a>" * depth
    return ("a = " if form == "toml" else "") + "[" * depth + "]" * depth


@pytest.mark.parametrize("form", ["json", "yaml", "toml", "xml"])
def test_depth_is_bounded_and_no_crash(form: str) -> None:
    assert read(nested(form, MOST_DEPTH - 1), form) is not None
    for depth in (MOST_DEPTH + 2, 1_000):
        with pytest.raises(ParseError):
            read(nested(form, depth), form)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(-1e9, 1e9)
    | st.text("ab:- '\"\n#1", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=3), inner, max_size=3)
    ),
)


@given(JSON)
def test_json_is_read_back_and_equals_itself(document: Any) -> None:
    text = json.dumps(document)
    assert read(text, "json") == document
    assert reward(f"<think>?</think>\n```json\n{text}\n```", "json", value=document) == 1.0


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=2, max_size=4, unique=True),
    st.lists(st.lists(st.text('ab,"\n ', max_size=5), min_size=4, max_size=4), max_size=3),
)
def test_a_csv_that_a_writer_wrote_is_read_back(header: list[str], rows: list[list[str]]) -> None:
    cut = [row[: len(header)] for row in rows]
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([header, *cut])
    assert read(file.getvalue(), "csv") == [dict(zip(header, row, strict=True)) for row in cut]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "good", "bad", "detail"),
    [
        ("json", '{"name": "Bo", "age": 7}', '{"name": "Bo", "age": "7"}', "$.age: '7' is not of type 'integer'"),
        ("json", '{"age": 7, "name": ""}', '{"name": "Bo"}', "$: 'age' is a required property"),
        ("yaml", "name: Bo\nage: 7", "name: Bo\nage: -1", "$.age: -1 is less than the minimum of 0"),
        ("toml", 'name = "Bo"\nage = 7', "name = 1\nage = 7", "$.name: 1 is not of type 'string'"),
        ("json", '{"name": "Bo", "age": 7}', '{"name": "Bo", "age": true}', "$.age: True is not of type 'integer'"),
    ],
)
def test_a_document_that_breaks_the_schema_earns_0_and_the_place_is_named(
    form: str, good: str, bad: str, detail: str
) -> None:
    assert reward(good, form, schema=PERSON) == 1.0
    found = verdict(bad, {"format": form, "schema": PERSON})
    assert (found.reward, found.detail) == (0.0, detail)


def test_texts_of_xml_and_csv_take_the_types_that_the_schema_asks_for() -> None:
    people = {"type": "array", "items": PERSON}
    assert reward("name,age\nBo,7\n12,0", "csv", schema=people) == 1.0
    assert reward(
        "name,age\nBo,7\n12,0", "csv", schema=people, value=[{"name": "Bo", "age": 7}, {"name": "12", "age": 0}]
    )
    assert reward("name,age\nBo,seven", "csv", schema=people) == 0.0
    assert reward("name,age\nBo,7.0", "csv", schema=people) == 0.0
    team = {"type": "object", "properties": {"team": {"type": "object", "properties": {"person": people}}}}
    one, two = "<person><name>Bo</name><age>7</age></person>", "<person><name>Al</name><age>8</age></person>"
    bo, al = {"name": "Bo", "age": 7}, {"name": "Al", "age": 8}
    assert reward(f"<team>{one}</team>", "xml", schema=team, value={"team": {"person": [bo]}}) == 1.0
    assert reward(f"<team>{one}{two}</team>", "xml", schema=team, value={"team": {"person": [bo, al]}}) == 1.0
    assert reward("<team><person><name>Bo</name></person></team>", "xml", schema=team) == 0.0
    kinds = {"type": "object", "properties": {"a": {"type": ["number", "boolean", "null"]}}}
    texts = {"<a>1</a>": 1, "<a>1.5</a>": 1.5, "<a>true</a>": True, "<a/>": None, "<a>x</a>": "x"}
    for text, value in texts.items():
        assert reward(text, "xml", schema=kinds, value={"a": value}) == float(value != "x")


def test_the_content_is_compared_with_types_where_a_value_is_given() -> None:
    assert reward("b: 2\na: 1", "yaml", value={"a": 1, "b": 2}) == 1.0
    assert [reward(text, "yaml", value={"a": 1}) for text in ("a: 1.0", "a: '1'", "a: true", "a: 2", "b: 1")] == [
        0.0
    ] * 5
    assert reward("a,b\n1,2", "csv", value=[{"a": "1", "b": "2"}]) == 1.0
    assert reward("a,b\n1,2", "csv", value=[{"a": 1, "b": 2}]) == 0.0
    assert reward('{"a": 1}', "json", schema={"type": "object"}, value={"a": 2}) == 0.0


def test_the_columns_of_a_csv_stand_in_order() -> None:
    assert reward("a,b\n1,2", "csv", columns=["a", "b"]) == 1.0
    found = verdict("b,a\n1,2", {"format": "csv", "columns": ["a", "b"]})
    assert (found.reward, found.detail) == (0.0, "columns ['b', 'a'], expected ['a', 'b']")


@pytest.mark.parametrize("form", sorted(LANGUAGES))
def test_the_rule_for_fences_is_that_of_the_reference(form: str) -> None:
    text = WELL_FORMED[form]
    fenced = f"```{LANGUAGES[form][0]}\n{text}\n```"
    states = {
        (rule, name): verdict(response, {"format": form, "fence": rule}).state == VerdictState.OK
        for rule in ("none", "optional", "whole", "first")
        for name, response in {"bare": text, "fenced": fenced, "among": f"So:\n{fenced}\nDone."}.items()
    }
    passes = {key for key, passed in states.items() if passed}
    wanted = {("none", "bare"), ("optional", "bare"), ("optional", "fenced"), ("whole", "fenced")}
    assert passes == wanted | {("first", "fenced"), ("first", "among")}


@pytest.mark.parametrize(
    "reference",
    [
        None,
        {},
        {"schema": {}},
        {"format": "ini"},
        {"format": ["json"]},
        {"format": "json", "shema": {"type": "object"}},
        {"format": "json", "fence": "last"},
        {"format": "json", "fence": ["none"]},
        {"format": "json", "columns": ["a"]},
        {"format": "csv", "columns": []},
        {"format": "csv", "columns": [1]},
        {"format": "csv", "columns": "a"},
        {"format": "json", "schema": None},
        {"format": "json", "schema": "object"},
        {"format": "json", "schema": {"type": "objekt"}},
        {"format": "json", "schema": {"minimum": "1"}},
        {"format": "json", "schema": {"$schema": "https://example.com/mine"}},
        {"format": "json", "schema": {"$ref": "https://example.com/schema"}},
        {"format": "json", "schema": {"$ref": "file:///etc/passwd"}},
        {"format": "json", "schema": {"$ref": "other.json#/a"}},
        {"format": "json", "schema": {"anyOf": [True, {"$dynamicRef": "http://example.com/x"}]}},
        {"format": "json", "schema": {"$id": "https://example.com/a/", "$ref": "b"}},
        {"format": "json", "schema": {"properties": {"a": {"$ref": "#/$defs/gone"}}}},
        {"format": "json", "schema": {"$ref": "#nowhere"}},
        {"format": "json", "schema": {"$schema": 1}},
        {"format": "json", "schema": {"$schema": ["http://json-schema.org/draft-07/schema#"]}},
        {"format": "json", "schema": {"$schema": "http://json-schema.org/draft-03/schema#"}},
        # Of these, some fail on no value, and others on values that only a response brings along.
        {"format": "json", "schema": {"$ref": "#"}},
        {"format": "json", "schema": {"allOf": [{"$ref": "#"}]}},
        {"format": "json", "schema": {"anyOf": [{"type": "object"}, {"not": {"$ref": "#"}}]}},
        {"format": "json", "schema": {"properties": {"a": {"if": True, "then": {"$ref": "#/properties/a"}}}}},
        {"format": "json", "schema": {"pattern": "("}},
        {"format": "json", "schema": {"patternProperties": {"[": {}}}},
        {"format": "json", "schema": {"properties": {"a": {"pattern": r"\p{L}"}}}},
        {"format": "json", "schema": {"properties": {"default": {"$ref": "#/$defs/gone"}}}},
        {"format": "json", "schema": {"properties": {"a": {"$ref": "#/x"}}, "x": {"type": "objekt"}}},
        {"format": "json", "schema": {"$ref": "#/default", "default": {"type": "object"}}},
        {"format": "json", "schema": {"$ref": "#/required", "required": ["a"]}},
    ],
    ids=str,
)
def test_a_reference_that_cannot_be_used_is_blamed_whatever_the_response(reference: Any) -> None:
    for response in ("{}", "a,b\n1,2", "", "```"):
        found = verdict(response, reference)
        assert (found.state, found.reward) == (VerdictState.INVALID_REFERENCE, None)
        assert found.detail


def test_references_inside_the_schema_are_followed_and_data_is_no_reference() -> None:
    tree = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    assert reward("[[], [[]]]", "json", schema=tree) == 1.0
    assert reward("[[], [1]]", "json", schema=tree) == 0.0
    named = {"$id": "https://example.com/s", "$ref": "#item", "$defs": {"x": {"$anchor": "item", "type": "string"}}}
    assert [reward(text, "json", schema=named) for text in ('"x"', "1")] == [1.0, 0.0]
    data = {"properties": {"$ref": {"type": "string"}}, "examples": [{"$ref": "https://example.com"}]}
    assert reward('{"$ref": "https://example.com"}', "json", schema=data) == 1.0
    old = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"a": {"const": 1}},
        "items": {"$ref": "#/definitions/a"},
    }
    assert [reward(text, "json", schema=old) for text in ("[1, 1]", "[2]")] == [1.0, 0.0]
    assert reward("1", "json", schema=True) == 1.0
    assert reward("1", "json", schema=False) == 0.0


@pytest.mark.parametrize("form", sorted(LANGUAGES))
def test_degenerate_responses_are_read_in_little_time(form: str) -> None:
    pieces = ["{", "<a>", "? ", '"', "a: ", ",", "```\n", "<!--", "|\n"]
    for piece in pieces:
        began = time.process_time()
        verdict(piece * (8_000 // len(piece)), {"format": form})
        assert time.process_time() - began < 3, piece
