import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.verifiers.arguments import (
    MAX_DEPTH,
    TextOptions,
    maximum_matching,
    same_arguments,
    same_text,
    same_value,
    unusable,
)
from mopdctl.verifiers.tool_schemas import schema_of

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def schema(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def same(got: Any, expected: Any, properties: dict[str, Any], *required: str, **more: Any) -> bool:
    found, why = same_arguments(got, expected, schema(properties, *required, **more))
    assert found == (why == "")
    assert same_arguments(expected, got, schema(properties, *required, **more))[0] == found
    return found


# ------------------------------------------------------------------------------------------------------------- scalars


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        (10, 10.0, True),  # sierra-research/tau2-bench #397
        (1, True, False),
        (0, False, False),
        (1.0, True, False),
        (10**400, 10**400, True),
        (10**400, 10**400 + 1, False),
        (10**400, 1e308, False),
        (2**53 + 1, float(2**53), False),
        (-0.0, 0, True),
        ("1", 1, False),
        ("Paris", "paris", False),
        ("Paris", "Paris ", False),
        (None, "", False),
        (None, 0, False),
        ([], {}, False),
        ([1, 2], [2, 1], False),
    ],
)
def test_without_options_values_compare_by_type_and_numbers_by_value(one: Any, other: Any, equal: bool) -> None:
    for properties in (dict[str, Any](), {"x": {}}):
        assert same({"x": one}, {"x": other}, properties, "x") is equal
        assert same({"x": {"y": [one]}}, {"x": {"y": [other]}}, properties) is equal
    assert same_arguments({"x": one}, {"x": other}, None)[0] is equal


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "nan is no JSON number"),
        ({"a": [1, float("-inf")]}, "-inf is no JSON number"),
        (json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH), ""),
        (json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)), f"nested deeper than {MAX_DEPTH} levels"),
        ({"a": [1, {"b": [None, "x"]}]}, ""),
        (10**400, ""),
    ],
)
def test_numbers_that_are_not_finite_and_deep_nesting_are_refused(value: Any, why: str) -> None:
    assert unusable(value) == why


def test_a_value_as_deep_as_allowed_compares_without_running_out_of_stack() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH // 2 - 1):
        deep = {"a": [deep]}
    tree = {"$defs": {"t": {"properties": {"a": {"items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}, {}]}}}}}}
    assert same_arguments(deep, deep, {"$ref": "#/$defs/t", **tree}) == (True, "")


# --------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("one", "other", "options", "equal"),
    [
        ("Paris", "paris", {}, False),
        ("Paris", "paris", {"casefold": True}, True),
        ("Straße", "STRASSE", {"casefold": True}, True),
        ("Paris ", "Paris", {}, False),
        ("Paris ", "Paris", {"strip": True}, True),
        ("Paris ", "Paris", {"whitespace": True}, False),
        ("Paris \n", "Paris ", {"whitespace": True}, True),
        ("a  b", "a\nb", {}, False),
        ("a  b", "a\nb", {"strip": True}, False),
        ("a  b", "a\nb", {"whitespace": True}, True),
        (" Paris", "PARIS  ", {"casefold": True, "strip": True}, True),
        ("Paris", "paris", {"text": "words", "casefold": True}, True),
        ("Paris", "paris", {"text": "words"}, False),
        ("Paris ", "Paris", {"text": "words"}, True),
        ("", "  ", {"text": "words"}, True),
        ("", "a", {"text": "words", "threshold": 0.01}, False),
    ],
)
def test_case_and_white_space_count_unless_the_options_say_otherwise(
    one: str, other: str, options: dict[str, Any], equal: bool
) -> None:
    assert same_text(one, other, TextOptions(**options)) is equal
    assert same_text(other, one, TextOptions(**options)) is equal


@pytest.mark.parametrize(
    ("similarity", "threshold", "equal"),
    [("dice", 0.75, True), ("dice", 0.76, False), ("jaccard", 0.6, True), ("jaccard", 0.61, False)],
)
def test_word_similarity_is_dice_or_jaccard_of_word_counts(similarity: str, threshold: float, equal: bool) -> None:
    options = TextOptions(text="words", similarity=similarity, threshold=threshold)
    assert same_text("a b c d", "d c b x", options) is equal  # 3 shared: dice 6/8, jaccard 3/5
    assert same_text("a a a b", "a a a c", options) is equal  # counted words, not kinds of words


def test_a_text_that_negates_is_not_the_same_however_many_words_agree() -> None:
    loose = TextOptions(text="words", threshold=0.1)
    assert not same_text("delete file", "do not delete file", loose)
    assert not same_text("please don't delete it", "please do delete it", loose)
    assert not same_text("please don\u2019t delete it", "please do delete it", loose)
    assert same_text("never delete the file", "do not delete the file", loose)


@pytest.mark.parametrize("threshold", [0, 0.0, -0.1, 1.01, float("nan"), True, "0.5", None])
def test_a_threshold_outside_of_0_to_1_is_refused(threshold: Any) -> None:
    with pytest.raises(ValueError, match=r"^threshold is .*; it has to lie in \(0, 1\]$"):
        TextOptions(threshold=threshold)


# ------------------------------------------------------------------------------------------------- defaults and nulls


def test_a_default_spelled_out_and_an_optional_null_are_the_same_as_nothing() -> None:
    properties = {"city": TEXT, "days": {**INTEGER, "default": 3}, "note": TEXT}
    forms = [{}, {"days": 3}, {"days": 3.0}, {"note": None}, {"days": None, "note": None}, {"days": 3, "note": None}]
    for one in forms:
        for other in forms:
            assert same({"city": "Ulm", **one}, {"city": "Ulm", **other}, properties, "city")
    assert not same({"city": "Ulm"}, {"city": "Ulm", "days": 4}, properties, "city")


def test_null_counts_where_the_parameter_is_required_or_null_is_not_its_default() -> None:
    assert not same({"x": None}, {}, {"x": {"type": ["string", "null"]}}, "x")
    limit = {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 10}
    assert not same({"x": None}, {}, {"x": limit})
    assert same({"x": 10}, {}, {"x": limit})
    assert same({"x": None}, {}, {"x": {**limit, "default": None}})


def test_without_a_schema_or_for_an_unknown_key_null_and_nothing_differ() -> None:
    assert same_arguments({"x": None}, {}, None) == (False, "x is not expected")
    assert same_arguments({}, {"x": None}, None) == (False, "x is missing")
    assert not same({"x": None}, {}, {"y": TEXT})


def test_a_default_of_a_required_parameter_is_no_excuse_for_leaving_it_out() -> None:
    assert not same({}, {"x": 3}, {"x": {**INTEGER, "default": 3}}, "x")


def test_defaults_and_nulls_hold_in_nested_objects_lists_references_and_choices() -> None:
    inner = schema({"unit": {**TEXT, "default": "km"}, "far": INTEGER}, "far")
    short, long = {"far": 1}, {"far": 1.0, "unit": "km"}
    assert same({"x": short}, {"x": long}, {"x": inner})
    assert same({"x": [short, long]}, {"x": [long, short]}, {"x": {"type": "array", "items": inner}})
    assert same({"x": [0, short]}, {"x": [0, long]}, {"x": {"prefixItems": [INTEGER, inner]}})
    assert same({"x": short}, {"x": long}, {"x": {"$ref": "#/$defs/leg"}}, **{"$defs": {"leg": inner}})
    assert same({"x": short}, {"x": long}, {"x": {"anyOf": [{"type": "null"}, TEXT, inner]}})
    assert same({"x": {"far": 1, "unit": None}}, {"x": short}, {"x": {"oneOf": [TEXT, inner]}})
    assert same({"x": short}, {"x": long}, {"x": {"allOf": [inner]}})
    assert same({"any": short}, {"any": long}, {}, additionalProperties=inner)
    assert same({}, {"x": long}, {"x": {**inner, "default": short}})
    assert not same({"x": {"far": 1, "unit": "mi"}}, {"x": short}, {"x": inner})


# --------------------------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize("free", [{"uniqueItems": True}, {"x-order": "any"}])
def test_the_order_of_a_list_is_free_only_where_its_schema_says_so(free: dict[str, Any]) -> None:
    for items in ([1, 2, 3], ["a", "b", None], [{"a": 1}, {"a": 2}], [[1, 2], 3.0]):
        turned = items[::-1]
        assert same({"x": items}, {"x": turned}, {"x": {"type": "array", **free}})
        assert not same({"x": items}, {"x": turned}, {"x": {"type": "array"}})
        assert not same({"x": items[1:]}, {"x": items}, {"x": {"type": "array", **free}})
    assert not same({"x": [1, 1, 2]}, {"x": [1, 2, 2]}, {"x": free})
    assert not same({"x": [1, 0]}, {"x": [True, 0]}, {"x": free})
    assert not same({"x": [[1, 2], 3]}, {"x": [3, [2, 1]]}, {"x": free})


def test_in_a_free_order_similar_texts_are_paired_as_well_as_can_be() -> None:
    words = TextOptions(text="words", threshold=0.6)
    free = schema({"x": {"x-order": "any"}})
    # "a b c" is like both, "a b" only like the first: taking what fits first would leave one over.
    got, expected = {"x": ["a b c", "a b"]}, {"x": ["a b", "b c"]}
    assert same_arguments(got, expected, free, words) == (True, "")
    assert same_arguments(got, expected, schema({"x": {}}), words) == (False, 'x[1] is "a b", not "b c"')
    assert same_arguments(got, {"x": ["b c", "c b"]}, free, words) == (False, "x has other items")


@pytest.mark.parametrize(
    ("fits", "size"),
    [([], 0), ([[]], 0), ([[0, 1], [0]], 2), ([[0], [0]], 1), ([[0, 1], [0, 2], [0]], 3), ([[0, 1]] * 3, 2)],
)
def test_a_matching_is_as_large_as_can_be(fits: list[list[int]], size: int) -> None:
    pairs = maximum_matching(fits)
    assert len(pairs) == len(set(pairs.values())) == size
    assert all(right in fits[left] for left, right in pairs.items())


def test_a_long_list_in_another_order_is_compared_quickly() -> None:
    items = [{"n": i} for i in range(150)]
    assert same({"x": items}, {"x": items[::-1]}, {"x": {"x-order": "any"}})
    numbers = list(range(20_000))
    assert same({"x": numbers}, {"x": numbers[::-1]}, {"x": {"x-order": "any"}})


def test_a_schema_that_is_a_choice_of_itself_is_checked_quickly() -> None:
    both = {"anyOf": [{"$ref": "#/$defs/and"}, {"$ref": "#/$defs/or"}]}
    parts = {name: schema({"of": both, "op": {"const": name}}, "op") for name in ("and", "or")}
    found = schema_of({"properties": {"query": both}, "$defs": parts})
    deep: Any = {"op": "xor"}
    for _ in range(30):
        deep = {"of": deep, "op": "and"}
    assert found.violation({"query": deep}) == "query: fits none of the choices"
    assert same_arguments({"query": deep}, {"query": deep}, found.schema) == (True, "")


@pytest.mark.parametrize(("value", "why"), [(1, ""), ("a", ""), (2, "x: fits 2 of the choices, not one"), (1.5, None)])
def test_of_one_of_several_schemas_just_one_has_to_fit(value: Any, why: str | None) -> None:
    found = schema_of(schema({"x": {"oneOf": [INTEGER, TEXT, {"const": 2}]}}))
    assert found.violation({"x": value}) == ("x: fits none of the choices, not one" if why is None else why)


# ----------------------------------------------------------------------------------------------------------- the place


@pytest.mark.parametrize(
    ("got", "expected", "why"),
    [
        ({}, {"a": 1}, "a is missing"),
        ({"a": 1}, {}, "a is not expected"),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": "2"}]}}, 'a.b[1].c is 2, not "2"'),
        ({"a": {"b": 1}}, {"a": {}}, "a.b is not expected"),
        ({"a": [1]}, {"a": [1, 2]}, "a has 1 items, not 2"),
        ({"a": "x" * 100}, {"a": None}, 'a is "' + "x" * 56 + "..., not null"),
    ],
)
def test_the_first_difference_is_named_with_its_place(got: Any, expected: Any, why: str) -> None:
    assert same_arguments(got, expected, None) == (False, why)


# ---------------------------------------------------------------------------------------------------------- properties

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)
OPTIONS = st.builds(
    TextOptions,
    text=st.sampled_from(["exact", "words"]),
    similarity=st.sampled_from(["dice", "jaccard"]),
    threshold=st.floats(0.01, 1),
    casefold=st.booleans(),
    strip=st.booleans(),
    whitespace=st.booleans(),
)
DEFAULTS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a b", "c"])


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name in draw(st.sets(st.sampled_from("abcd"), max_size=4)):
        kind = draw(st.sampled_from(["any", "default", "list", "object"]))
        if kind == "object" and depth:
            properties[name] = draw(schemas(depth=depth - 1))
        elif kind == "list":
            properties[name] = {
                "items": draw(schemas(depth=depth - 1)) if depth else {},
                "uniqueItems": draw(st.booleans()),
            }
        else:
            properties[name] = {"default": draw(DEFAULTS)} if kind == "default" else {}
    return {
        "properties": properties,
        "required": sorted(draw(st.sets(st.sampled_from(sorted(properties))))) if properties else [],
    }


def turned(value: Any) -> Any:
    """The same value with every object's keys in the opposite order, and whole numbers as floats."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [turned(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return value


def spelled_out(value: Any, node: dict[str, Any]) -> Any:
    """The value with every optional parameter that is missing given its default or, without one, null."""
    if isinstance(value, list):
        return [spelled_out(item, node.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties = node.get("properties", {})
    full = {key: spelled_out(item, properties.get(key, {})) for key, item in value.items()}
    for name, inner in properties.items():
        if name not in full and name not in node["required"]:
            full[name] = inner.get("default")
    return full


@settings(max_examples=40)
@given(OBJECTS, st.none() | schemas(), OPTIONS)
def test_arguments_are_the_same_as_themselves_in_any_order_of_keys(
    value: dict[str, Any], node: dict[str, Any] | None, options: TextOptions
) -> None:
    assert same_arguments(value, value, node, options) == (True, "")
    assert same_arguments(value, turned(value), node, options) == (True, "")
    assert same_arguments(turned(value), value, node, options) == (True, "")


@settings(max_examples=40)
@given(OBJECTS, schemas(), OPTIONS)
def test_spelling_out_defaults_and_dropping_nulls_changes_nothing(
    value: dict[str, Any], node: dict[str, Any], options: TextOptions
) -> None:
    full = spelled_out(value, node)
    assert same_arguments(full, value, node, options) == (True, "")
    assert same_arguments(value, full, node, options) == (True, "")


@settings(max_examples=40)
@given(OBJECTS, OBJECTS, schemas(), OPTIONS)
def test_the_comparison_is_the_same_before_and_after_spelling_out(
    one: dict[str, Any], other: dict[str, Any], node: dict[str, Any], options: TextOptions
) -> None:
    same_before = same_arguments(one, other, node, options)[0]
    assert same_arguments(spelled_out(one, node), other, node, options)[0] == same_before
    assert same_arguments(one, spelled_out(other, node), node, options)[0] == same_before


@given(VALUES, VALUES)
def test_equality_of_values_is_symmetric_and_that_of_json_texts_where_numbers_are_spelt_alike(a: Any, b: Any) -> None:
    assert same_value(a, b) == same_value(b, a)
    if json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True):
        assert same_value(a, b)
