"""NeMo Gym's comparators beside ours: the cases in which they are known to differ, and the rest of what theirs do."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState
from mopdctl.verifiers.nemo_gym import (
    ComparatorConfig,
    SwePivotConfig,
    command_verb,
    compare_action,
    same_value,
    swe_pivot,
    swe_similarity,
    swe_target,
)
from mopdctl.verifiers.registry import run_check

LOOSE = {"word_count_similarity_threshold": 0.1}


def written(*calls: dict[str, Any]) -> str:
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


def tool(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def scored(
    expected: Any, got: Any, tools: Sequence[dict[str, Any]] | None = None, name: str = "f", **reference: Any
) -> float | None:
    """The reward of a call with the arguments `got`, by both verifiers that compare calls."""
    call = {"type": "function_call", "name": name, "arguments": json.dumps(expected), **reference}
    calls = {"calls": [{"name": name, "arguments": expected}], **reference}
    response = written({"name": name, "arguments": got})
    verdicts = [
        run_check(VERIFIERS[verifier], Attempt(response, of, tools=tuple(tools) if tools else None))
        for verifier, of in (("action", call), ("tool_call", calls))
    ]
    assert [verdict.state for verdict in verdicts] == [VerdictState.OK] * 2, verdicts
    assert verdicts[0].reward == verdicts[1].reward
    return verdicts[0].reward


# ------------------------------------------------------------------- NVIDIA-NeMo/Gym: where it is wrong, and we are not

LONG, OTHER = "open the file and fix the bug", "run all of my tests now please"
NIGHTS = [tool({"city": {"type": "string"}, "nights": {"type": "integer", "default": 1}, "note": {"type": "string"}})]
TAGS = [tool({"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}})]


@pytest.mark.parametrize(
    ("expected", "got", "match", "ours", "gym_options", "theirs"),
    [
        # A number as an integer and as a float.
        (1, 1.0, {}, 1, LOOSE, 0),
        (1.0, 1, {}, 1, LOOSE, 0),
        # An integer and a boolean.
        (1, True, {}, 0, LOOSE, 1),
        # Equal texts at a threshold of 0.6: their score is at most 0.5.
        (LONG, LONG, {"arguments": "words", "threshold": 0.6}, 1, {"word_count_similarity_threshold": 0.6}, 0),
        # Other texts at a threshold of 0, which says "any text" there; here one says `name_only`.
        (LONG, OTHER, {}, 0, {"word_count_similarity_threshold": 0.0}, 1),
        (LONG, OTHER, {"arguments": "name_only"}, 1, {"word_count_similarity_threshold": 0.0}, 1),
        # The opposite in nearly the same words.
        ("delete file", "do not delete file", {}, 0, LOOSE, 1),
        ("delete file", "do not delete file", {"arguments": "words", "threshold": 0.1}, 0, LOOSE, 1),
        # Case and white space of a single word: there never, here if asked for.
        ("Paris", "paris", {}, 0, LOOSE, 0),
        ("Paris", "paris", {"casefold": True}, 1, LOOSE, 0),
        ("Paris", "Paris ", {}, 0, LOOSE, 0),
        ("Paris", "Paris ", {"strip": True}, 1, LOOSE, 0),
    ],
)
def test_scalars_compare_by_value_here_and_by_type_and_overlap_there(
    expected: Any, got: Any, match: dict[str, Any], ours: float, gym_options: dict[str, Any], theirs: float
) -> None:
    assert scored({"x": expected}, {"x": got}, match=match) == ours
    assert scored({"x": expected}, {"x": got}, compat="nemo-gym", match=gym_options) == theirs


@pytest.mark.parametrize(
    ("expected", "got", "tools"),
    [
        # An optional argument as null, and a default spelled out.
        ({"city": "Ulm"}, {"city": "Ulm", "note": None}, NIGHTS),
        ({"city": "Ulm", "note": None}, {"city": "Ulm"}, NIGHTS),
        ({"city": "Ulm"}, {"city": "Ulm", "nights": 1}, NIGHTS),
        ({"city": "Ulm", "nights": 1}, {"city": "Ulm", "nights": None}, NIGHTS),
        # A list that is a set.
        ({"tags": ["a", "b"]}, {"tags": ["b", "a"]}, TAGS),
    ],
)
def test_what_the_schema_says_is_the_same_is_the_same_here_and_not_there(expected: Any, got: Any, tools: Any) -> None:
    assert scored(expected, got, tools) == 1
    assert scored(expected, got, tools, compat="nemo-gym") == 0


SEARCH = {"name": "search", "arguments": {"q": "red shoes"}}
LOOK: dict[str, Any] = {"name": "look", "arguments": {}}
EXPECTED = {"type": "function_call", "name": "search", "arguments": '{"q": "red shoes"}'}


def test_a_call_too_many_costs_everything_here_and_is_reported_and_nothing_there() -> None:
    response = written(SEARCH, LOOK)
    ours = run_check(VERIFIERS["action"], Attempt(response, EXPECTED))
    theirs = run_check(VERIFIERS["action"], Attempt(response, {**EXPECTED, "compat": "nemo-gym"}))
    assert (ours.reward, ours.detail) == (0, "2 calls instead of 1")
    assert (theirs.reward, theirs.detail) == (1, "")


def test_any_message_will_do_in_both_and_here_its_content_can_be_asked_for() -> None:
    expected = {"type": "message", "content": "Done."}
    for reference, reward in (
        (expected, 1),
        ({**expected, "match": {"content": "exact"}}, 0),
        ({**expected, "compat": "nemo-gym"}, 1),
    ):
        assert run_check(VERIFIERS["action"], Attempt("Something else.", reference)).reward == reward


@pytest.mark.parametrize("lines", [[5, 5], [10, -1]])
def test_equal_line_ranges_are_the_same_here_and_not_there(lines: list[int]) -> None:
    view = {"command": "view", "path": "a.py", "view_range": lines}
    assert scored(view, view, name="str_replace_editor", match={"arguments": "target"}) == 1
    assert scored(view, view, name="str_replace_editor", compat="nemo-gym-swe") == 0


@pytest.mark.parametrize(("command", "their_verb"), [("FOO=1 pytest tests", "FOO=1"), ("cd x && pytest tests", "cd")])
def test_the_program_is_found_behind_assignments_and_cd_here_and_not_there(command: str, their_verb: str) -> None:
    assert command_verb(command) == their_verb
    expected, got = {"command": "pytest tests"}, {"command": command}
    assert scored(expected, got, name="bash", match={"arguments": "target"}) == 1
    assert scored(expected, got, name="bash", compat="nemo-gym-swe") == 0


@pytest.mark.parametrize("compat", [{}, {"compat": "nemo-gym"}, {"compat": "nemo-gym-swe"}])
def test_expected_arguments_that_are_no_json_are_a_state_here_and_an_exception_there(compat: dict[str, str]) -> None:
    expected = {"type": "function_call", "name": "search", "arguments": '{"q": '}
    verdict = run_check(VERIFIERS["action"], Attempt(written(SEARCH), {**expected, **compat}))
    assert (verdict.state, verdict.reward) == (VerdictState.INVALID_REFERENCE, None)
    assert verdict.detail.startswith("the arguments of the expected 'search' are not JSON: ")
    with pytest.raises(json.JSONDecodeError):
        compare_action([expected], [SEARCH], ComparatorConfig())


# ------------------------------------------------------------------------------------------- the argument comparator


def called(**arguments: Any) -> dict[str, Any]:
    return {"name": "f", "arguments": json.dumps(arguments)}


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (1.0, 1.0 + 9e-7, True),
        (1.0, 1.0 + 2e-6, False),
        (float("nan"), float("nan"), False),
        (True, True, True),
        (True, 1, False),
        (0, False, True),
        (None, None, True),
        (None, 0, False),
        ("a b", "b a", True),
        ("a b c", "A x y", True),  # 1 / 6
        ("a b c", "a v w x y z u v", False),  # 1 / 11
        ("a b", "x y", False),
        ("a", "a b", False),
        ("", "", True),
        ("", " ", False),
        ("a a", "a b", True),
        ([1, 2], [1, 2, 3], False),
        ([1, 2], [2, 1], False),
        ([1, ["a b"]], [1, ["b a"]], True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ({"a": {"b": 1}}, {"a": {"b": True}}, True),
    ],
)
def test_values_compare_there_by_type_tolerance_and_overlap_of_words(expected: Any, got: Any, same: bool) -> None:
    assert same_value(expected, got, ComparatorConfig()) is same


def test_arguments_that_are_no_json_give_0_there() -> None:
    assert compare_action([called(a=1)], [{"name": "f", "arguments": "{"}], ComparatorConfig()).reward == 0
    assert compare_action([called(a=1)], [called(a=1)], ComparatorConfig()).reward == 1


TWO = [called(a=1), called(a=2)]
COUNTED = {"parallel_tool_call_rewarding": True}
FRACTION, F1 = {"parallel_tool_call_reward_mode": "fractional"}, {"parallel_tool_call_reward_mode": "f1"}
SUBSET, SUPERSET = {"allow_subset": True}, {"allow_superset": True}
JUNK = [*TWO, *[called(a=3)] * 20]


@pytest.mark.parametrize(
    ("got", "options", "reward"),
    [
        ([], {}, 0),
        (TWO[::-1], {}, 1),
        (TWO[:1], {}, 0),
        ([*TWO, called(a=3)], {}, 1),
        ([*TWO, called(a=3)], COUNTED, 0),
        ([*TWO, called(a=3)], {**COUNTED, **SUPERSET}, 1),
        (TWO[:1], {**COUNTED, **SUPERSET}, 0),
        (TWO[:1], {**COUNTED, **SUBSET}, 1),
        ([called(a=3)], {**COUNTED, **SUBSET}, 0),
        ([TWO[0], called(a=3)], COUNTED, 0),
        ([TWO[0], called(a=3)], {**COUNTED, **F1}, 0.5),
        ([TWO[0], called(a=3)], {**COUNTED, **FRACTION}, 0.5),
        ([TWO[0], called(a=3)], F1, 0),
        (JUNK, {**COUNTED, **SUPERSET, **F1}, 4 / 24),
        (JUNK, {**COUNTED, **SUPERSET, **FRACTION}, 1),
    ],
)
def test_several_calls_are_gated_and_rewarded_there_as_configured(
    got: list[dict[str, Any]], options: dict[str, Any], reward: float
) -> None:
    assert compare_action(TWO, got, ComparatorConfig(**options)).reward == pytest.approx(reward)


# ----------------------------------------------------------------------------------------------------------- swe_pivot


@pytest.mark.parametrize(
    ("kind", "got", "expected", "same"),
    [
        # The cases of its own tests.
        ("edit", {"path": "/workspace_v2/src/foo.py"}, {"path": "/workspace/src/foo.py"}, True),
        ("edit", {"path": "/workspace/views.py"}, {"path": "/workspace/models.py"}, False),
        ("edit", {"path": "/w/foo.py", "command": "view"}, {"path": "/w/foo.py", "command": "str_replace"}, False),
        ("bash", {"command": "grep -r 'pattern' src/utils/"}, {"command": "grep -n 'pattern' src/utils/"}, True),
        ("bash", {"command": "grep -r 'pattern' src/views/"}, {"command": "grep -r 'pattern' src/models/"}, False),
        ("bash", {"command": "grep -r 'pattern'"}, {"command": "grep -n 'pattern'"}, True),
        ("bash", {"command": "cd /w/project && ls"}, {"command": "cd /w/project && git status"}, True),
        ("bash", {"command": "cd /w/frontend && ls"}, {"command": "cd /w/backend && ls"}, False),
        ("bash", {"command": "grep -r 'foo' ."}, {"command": "pytest tests/"}, False),
        ("search", {"path": "/w/src"}, {"path": "/w/src"}, True),
        # By the code alone.
        ("read", {"path": "/v/s/a.py"}, {"path": "/w/s/a.py"}, False),
        ("read", {"file": "x/w/s/a.py"}, {"path": "/w/s/a.py"}, True),
        ("bash", {"command": "ls"}, {}, True),
        ("bash", {"command": "cat a"}, {"command": "cat 1234567890123456789012345"}, False),  # alike by less than 0.3
        (None, {"x": 1}, {"x": 2}, True),
    ],
)
def test_targets_compare_there_by_parts_of_paths_and_first_words(
    kind: str | None, got: dict[str, Any], expected: dict[str, Any], same: bool
) -> None:
    assert swe_target(kind, got, expected) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ([190, 260], [200, 250], True),
        ([210, 260], [200, 250], True),
        ([240, 290], [200, 250], False),
        ([1, 50], [200, 250], False),
        (None, [200, 250], True),
        ([200, 250], None, True),
        ("[200, 250]", [200, 250], True),
        ("[200", [200, 250], True),
        ([200], [200, 250], True),
        ([5, 5], [5, 5], False),
        ([10, -1], [10, -1], False),
    ],
)
def test_line_ranges_are_half_open_there(got: Any, expected: Any, same: bool) -> None:
    view = {"command": "view", "path": "/foo.py"}
    assert swe_target("edit", {**view, "view_range": got}, {**view, "view_range": expected}) is same


def test_similarity_is_there_the_worse_of_what_is_replaced_and_what_it_becomes() -> None:
    expected = {"old_str": "abcd", "new_str": "abcdefgh"}
    assert swe_similarity("edit", {"old_str": "abcd", "new_str": "abcd"}, expected) == pytest.approx(2 / 3)
    assert swe_similarity("edit", {"old_str": "", "new_str": "abcdefgh"}, expected) == 0
    assert swe_similarity("edit", {"content": "abcd"}, {"file_text": "abxx"}) == 0.5
    assert swe_similarity("edit", {"patch": "a"}, {}) == 0
    assert swe_similarity("edit", {"command": "view"}, {"command": "view"}) == 1
    assert swe_similarity("bash", {"command": "ls -l"}, {"cmd": "ls -a"}) == 0.8
    assert swe_similarity("search", {"pattern": "x"}, {"pattern": "y"}) == 1


WHOLE, PART = "abcde" * 20, "abcde" * 12 + "x" * 40


def edit(text: str, name: str = "str_replace_editor") -> dict[str, Any]:
    return {"name": name, "arguments": {"command": "create", "path": "a.py", "file_text": text}}


@pytest.mark.parametrize(
    ("got", "options", "reward"),
    [
        ([], {}, 0),
        ([edit(WHOLE)], {}, 1),
        ([edit(WHOLE, "code_editor")], {}, 1),
        ([edit(WHOLE, "bash")], {}, 0),
        ([edit("x" * 100)], {}, 0),
        ([edit("x" * 100)], {"enable_argument_similarity": False}, 1),
        ([edit(WHOLE), edit("x")], {}, 1),
        ([edit("x"), edit(WHOLE)], {}, 0),
        # 60 of 100 characters are alike: 0.5 + 0.5 * (0.6 - 0.4) / (0.8 - 0.4), less a share of 0.1 * 100 / 500.
        ([edit(PART)], {}, 0),
        ([edit(PART)], {"reward_mode": "continuous"}, 0.75 * 0.98),
        ([edit(PART)], {"reward_mode": "continuous", "enable_diff_size_shaping": False}, 0.75),
        ([edit(PART)], {"similarity_full_credit": 0.6}, 1),
        ([edit(WHOLE)], {"reward_mode": "continuous"}, 0.98),
        ([edit(WHOLE)], {"reward_mode": "continuous", "diff_size_alpha": 0.5}, 0.9),
        ([edit("abcde" * 7 + "x" * 65)], {"reward_mode": "continuous"}, 0),
    ],
)
def test_the_levels_of_swe_pivot_add_up(got: list[dict[str, Any]], options: dict[str, Any], reward: float) -> None:
    assert swe_pivot(edit(WHOLE), got, SwePivotConfig(**options)).reward == pytest.approx(reward)


KEYS = st.sampled_from(["path", "command", "view_range", "old_str", "new_str", "patch", "cmd", "content"])


@given(
    st.dictionaries(KEYS, st.text(max_size=9)),
    st.dictionaries(KEYS, st.text(max_size=9)),
    st.sampled_from(["edit", "bash", "read", "other"]),
    st.sampled_from(["binary", "continuous"]),
)
def test_swe_pivot_always_gives_a_reward(one: dict[str, Any], other: dict[str, Any], name: str, mode: str) -> None:
    found = swe_pivot({"name": name, "arguments": one}, [{"name": name, "arguments": other}], SwePivotConfig(mode))
    assert 0 <= found.reward <= 1


@pytest.mark.parametrize("lines", ["[1e999, 5]", "[5, -1e999]", "[" * 100_000])
def test_a_line_range_that_raises_there_gives_0_and_is_the_documents_fault_where_it_is_expected(lines: str) -> None:
    usual = {"command": "view", "path": "/foo.py", "view_range": [1, 5]}
    odd = {**usual, "view_range": lines}

    def score(got: dict[str, Any], expected: dict[str, Any]) -> Verdict:
        reference = {"type": "function_call", "name": "edit", "arguments": expected, "compat": "nemo-gym-swe"}
        response = f"<tool_call>{json.dumps({'name': 'edit', 'arguments': got})}</tool_call>"
        return run_check(VERIFIERS["action"], Attempt(response, reference))

    assert score(usual, usual).reward == 1.0
    assert (score(odd, usual).state, score(odd, usual).reward) == (VerdictState.OK, 0.0)
    for got in (odd, usual):
        assert score(got, odd).state == VerdictState.INVALID_REFERENCE
