import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.config.gensft import Attributes
from mopdctl.errors import InputError
from mopdctl.gensft.attributes import check_attributes, expected, make_prompts

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10), min_size=1, max_size=5)


def attributes(**fields: Any) -> Attributes:
    axes = {"topic": {"tea": 2, "rice": 1}, "tone": {"kind": 1, "curt": 1}}
    return Attributes.model_validate({"count": 7, "axes": axes, "prompt": "{{ topic }}, {{ tone }}"} | fields)


def made(**fields: Any) -> list[str]:
    return [found.prompt for found in make_prompts(attributes(**fields))]


@given(st.integers(1, 60), WEIGHTS, WEIGHTS, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_axis_meets_its_shares_to_one_row(
    count: int, first: dict[str, float], second: dict[str, float], seed: int
) -> None:
    config = attributes(count=count, axes={"x": first, "y": second}, prompt="{{ x }}{{ y }}", seed=seed)
    found = list(make_prompts(config))
    assert len(found) == count
    for axis, weights in config.axes.items():
        counts = Counter(prompt.values[axis] for prompt in found)
        assert counts == Counter(expected(config)[axis])
        assert sum(expected(config)[axis].values()) == count
        for value, weight in weights.items():
            assert abs(counts[value] - count * weight / math.fsum(weights.values())) < 1 + 1e-9


def test_quotas_go_by_largest_remainder_and_ties_to_the_first() -> None:
    assert expected(attributes(count=10, axes={"x": {"a": 1, "b": 1, "c": 1}}, prompt="x")) == {
        "x": {"a": 4, "b": 3, "c": 3}
    }
    weights = {"a": 0.3, "b": 0.1, "c": 0.2}  # 1.5, 0.5 and 1 of 3: in binary the halves would not be equal
    assert expected(attributes(count=3, axes={"x": weights}, prompt="x"))["x"] == {"a": 2, "b": 0, "c": 1}
    assert expected(attributes(count=3, axes={"x": {"a": 0, "b": 2}}, prompt="x"))["x"] == {"a": 0, "b": 3}


def test_the_combination_is_random_and_the_same_every_time() -> None:
    axes = {name: dict.fromkeys("abcd", 1) for name in ("x", "y")}
    options: dict[str, Any] = {"count": 1600, "axes": axes, "prompt": "{{ x }}{{ y }}"}
    pairs = Counter(made(**options))
    assert len(pairs) == 16
    assert all(50 < number < 150 for number in pairs.values()), "each expected 100 times"
    assert made(**options) == made(**options)
    assert made(**options) != made(**options, seed=1)


def test_the_order_of_an_axis_does_not_depend_on_the_other_axes() -> None:
    alone = [p.values["x"] for p in make_prompts(attributes(count=20, axes={"x": {"a": 1, "b": 1}}, prompt="p"))]
    axes = {"w": {"c": 1}, "x": {"a": 1, "b": 1}}
    assert [p.values["x"] for p in make_prompts(attributes(count=20, axes=axes, prompt="p"))] == alone


def test_a_template_sees_the_table_entry_the_bare_word_and_the_row_number() -> None:
    fields = {
        "count": 2,
        "axes": {"schema": {"order": 1}},
        "tables": {"schema": {"order": {"type": "object", "title": "<Größe & 'co'>", "b": 1, "a": None}}},
        "prompt": "{{ n }} {{ schema_name }} {{ schema.type }} {{ schema | tojson }}",
    }
    text = """order object {"type": "object", "title": "<Größe & 'co'>", "b": 1, "a": null}"""
    assert made(**fields) == [f"0 {text}", f"1 {text}"]
    assert made(**fields | {"prompt": "{{ schema | tojson(indent=2) }}"})[0].startswith('{\n  "type": "object"')


def test_values_without_a_table_entry_stay_bare_words() -> None:
    assert set(made(tables={"topic": {"tea": "green tea"}})) <= {
        f"{topic}, {tone}" for topic in ("green tea", "rice") for tone in ("kind", "curt")
    }


def test_difficulty_is_the_number_of_its_axis() -> None:
    axes = {"difficulty": {"easy": 1, "hard": 1}}
    found = list(make_prompts(attributes(axes=axes, prompt="p", difficulty={"easy": 0.1, "hard": 0.9})))
    assert {(p.values["difficulty"], p.difficulty) for p in found} == {("easy", 0.1), ("hard", 0.9)}
    assert {p.difficulty for p in make_prompts(attributes(axes=axes, prompt="p"))} == {None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a\n{{ topik }}"}, "prompt line 2: 'topik' is no axis; the template sees topic, topic_name, tone"),
        ({"prompt": "a\n{% if %}"}, "prompt line 2: not a Jinja template"),
        ({"prompt": "a\n{{ topic"}, "prompt line 2: not a Jinja template"),
        ({"prompt": "{{ topic | shout }}"}, "not a Jinja template .*shout"),
        ({"tables": {"topik": {}}}, "tables.topik: there is no such axis"),
        ({"tables": {"topic": {"coffee": 1}}}, "tables.topic.coffee: no value of that axis; it has tea, rice"),
        ({"difficulty": {"easy": 0.1}}, "difficulty: there is no such axis"),
        ({"axes": {"difficulty": {"easy": 1}}, "prompt": "p", "difficulty": {"hard": 1}}, "difficulty.hard: no value"),
        (
            {"axes": {"difficulty": {"easy": 1, "hard": 1}}, "prompt": "p", "difficulty": {"easy": 0}},
            "difficulty.hard: needs a number from 0 to 1",
        ),
        ({"axes": {"difficulty": {"easy": 1}}, "prompt": "p", "difficulty": {"easy": 2}}, "difficulty.easy: needs"),
        ({"axes": {"n": {"a": 1}}, "prompt": "p"}, "two things as 'n'"),
        ({"axes": {"a": {"a": 1}, "a_name": {"b": 1}}, "prompt": "p"}, "two things as 'a_name'"),
        ({"axes": {"a": {"a": 0}}, "prompt": "p"}, "axes.a: weights"),
        ({"axes": {"a": {"a": -1, "b": 3}}, "prompt": "p"}, "axes.a: weights"),
        ({"axes": {"a": {}}, "prompt": "p"}, "axes.a: weights"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"attributes: .*{message}"):
        make_prompts(attributes(**fields))
    with pytest.raises(InputError):
        check_attributes(attributes(**fields))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a\n{{ topic.missing }}", "prompt line 2: fails in row 0 .*missing"),
        ("{{ 1 / 0 }}", "prompt line 1: fails in row 0"),
        ("a\n\n{{ topic.__class__.__mro__ }}", "prompt line 3: fails in row 0 .*unsafe"),
        ("{% if n == 3 %}{{ topic + 1 }}{% endif %}x", "fails in row 3"),
        ("{{ '' }} ", "the prompt of row 0 is empty"),
    ],
)
def test_a_template_that_fails_names_line_and_row(prompt: str, message: str) -> None:
    with pytest.raises(InputError, match=f"attributes: .*{message}"):
        made(prompt=prompt)


# meta-llama/synthetic-data-kit #54
def test_braces_in_a_prompt_are_only_text() -> None:
    assert made(prompt='{"question": "{topic}"} %s {}')[0] == '{"question": "{topic}"} %s {}'
