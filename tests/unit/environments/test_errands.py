"""The errands environment: results as fixed, errors that a model can read, states in one spelling."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.environments.base import SetupError, ToolError
from mopdctl.environments.errands import Errands
from mopdctl.environments.registry import ENVIRONMENTS, begin, result_of

SETUP = {"people": {"kalo": 3, "bemi": 7}, "lockers": {"3": "tode", "7": None}}
ERRANDS = Errands()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["find_person", "open_locker", "move_item", "fly", ""])
ARGUMENTS = st.dictionaries(
    st.sampled_from(["name", "number", "source", "target", "x\ud800"]), st.sampled_from([3, 7, 7.0, "kalo"]) | JSON
)


def call(tool: str, /, **arguments: Any) -> str:
    return ERRANDS.call(ERRANDS.start(SETUP), tool, arguments)


def test_results_are_numbers_items_unknown_and_empty() -> None:
    assert call("find_person", name="kalo") == "3"
    assert call("find_person", name="nobody") == "unknown"
    assert call("open_locker", number=3) == "tode"
    assert call("open_locker", number=7) == "empty"
    assert call("move_item", source=3, target=7) == "tode"


def test_a_moved_item_is_in_the_other_locker_and_nowhere_else() -> None:
    state = ERRANDS.start(SETUP)
    ERRANDS.call(state, "move_item", {"source": 3, "target": 7})
    assert ERRANDS.snapshot(state) == {"people": {"bemi": 7, "kalo": 3}, "lockers": {"3": None, "7": "tode"}}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fly", {}, "there is no tool 'fly'; the tools are find_person, open_locker, move_item"),
        ("find_person", {}, "find_person needs name"),
        ("move_item", {}, "move_item needs source and target"),
        ("find_person", {"name": "kalo", "age": 3}, "find_person takes no 'age'"),
        ("find_person", {"name": 3}, "name of find_person has to be of type string"),
        ("open_locker", {"number": "3"}, "number of open_locker has to be of type integer"),
        ("open_locker", {"number": True}, "number of open_locker has to be of type integer"),
        ("open_locker", {"number": 3.5}, "number of open_locker has to be of type integer"),
        ("open_locker", {"number": float("nan")}, "number of open_locker has to be of type integer"),
        ("open_locker", {"number": 10**5000}, "number is no locker that is there"),
        ("move_item", {"source": 7, "target": 3}, "locker 7 is empty"),
        ("move_item", {"source": 3, "target": 3}, "locker 3 is full"),
        ("move_item", {"source": 3, "target": 8}, "target is no locker that is there"),
    ],
)
def test_a_call_that_fails_says_why(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolError) as error:
        ERRANDS.call(ERRANDS.start(SETUP), name, arguments)
    assert str(error.value) == said


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    assert call("open_locker", number=3.0) == "tode"
    spelled = {"people": {"bemi": 7.0, "kalo": 3.0}, "lockers": {"7": None, "3": "tode"}}
    # sierra-research/tau2-bench #397
    assert json.dumps(ERRANDS.snapshot(ERRANDS.start(spelled))) == json.dumps(ERRANDS.snapshot(ERRANDS.start(SETUP)))


@given(calls=st.lists(st.tuples(NAMES, ARGUMENTS | JSON), max_size=6))
def test_whatever_a_model_calls_it_gets_text_and_a_failed_call_changes_nothing(calls: list[tuple[str, Any]]) -> None:
    state = ERRANDS.start(SETUP)
    for name, arguments in calls:
        before = json.dumps(ERRANDS.snapshot(state))
        result = result_of(ERRANDS, state, name, arguments)
        assert result.encode().strip()
        assert len(result) < 200
        if result.startswith("error: ") or name != "move_item":
            assert json.dumps(ERRANDS.snapshot(state)) == before
    assert sorted(map(str, state.lockers.values())) == ["None", "tode"]


@given(calls=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=6))
def test_the_same_calls_give_the_same_results_and_state(calls: list[tuple[str, Any]]) -> None:
    def run() -> tuple[list[str], Any]:
        state = ERRANDS.start(SETUP)
        return [result_of(ERRANDS, state, name, arguments) for name, arguments in calls], ERRANDS.snapshot(state)

    assert run() == run()


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (None, "exactly the keys"),
        ({"people": {}}, "exactly the keys"),
        (SETUP | {"more": 1}, "exactly the keys"),
        (SETUP | {"people": []}, "are mappings"),
        (SETUP | {"lockers": {"03": None}}, "locker '03' is not a plain number"),
        (SETUP | {"lockers": {"-3": None}}, "locker '-3' is not a plain number"),
        (SETUP | {"lockers": {"9" * 5000: None}}, "is not a plain number"),
        (SETUP | {"lockers": {"3": 5, "7": None}}, "locker 3 holds 5"),
        (SETUP | {"lockers": {"3": "empty", "7": None}}, "locker 3 holds 'empty'"),
        (SETUP | {"lockers": {"3": "to\nde", "7": None}}, "locker 3 holds"),
        (SETUP | {"people": {"kalo": 4}}, "'kalo' has locker 4, which is not there"),
        (SETUP | {"people": {"kalo": True}}, "'kalo' has locker True"),
        (SETUP | {"people": {"kalo": None}}, "'kalo' has locker None"),
        (SETUP | {"people": {"\ud800": 3}}, "has no proper name"),
    ],
)
def test_a_setup_that_cannot_be_used_is_refused(setup: Any, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        ERRANDS.start(setup)


@given(setup=JSON | st.fixed_dictionaries({"people": JSON, "lockers": JSON}))
def test_a_setup_of_any_shape_is_taken_or_refused_by_name(setup: Any) -> None:
    with suppress(SetupError):  # anything else fails
        state = ERRANDS.start(setup)
        assert all(number in state.lockers for number in state.people.values())


@pytest.mark.parametrize("document", [None, "errands", {}, {"name": "errant"}, {"name": ["errands"]}])
def test_an_environment_that_nobody_knows_is_refused_with_the_known_ones(document: Any) -> None:
    with pytest.raises(SetupError, match="use one of errands"):
        begin(document)


def test_every_environment_describes_its_tools_as_function_schemas() -> None:
    for name, environment in ENVIRONMENTS.items():
        assert environment.name == name
        for tool in environment.tools:
            assert tool["type"] == "function"
            parameters = tool["function"]["parameters"]
            assert parameters["required"] == list(parameters["properties"])
