"""What holds for every verifier: whose fault a state names, rewards in [0, 1], little time on hostile responses."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers import VERIFIERS, Attempt, Limits, Outcome, Verdict, VerdictState, VerifierPool
from mopdctl.verifiers.base import MOST_DEPTH, InvalidReferenceError, ParseError, Verifier
from mopdctl.verifiers.limits import LimitError
from mopdctl.verifiers.registry import run_check


def found_by(check: Callable[[Attempt], Outcome], attempt: Attempt | None = None) -> Verdict:
    return run_check(Verifier("mine", 3, check), attempt or Attempt("x"))


def raising(error: Exception) -> Callable[[Attempt], Outcome]:
    def check(attempt: Attempt) -> Outcome:
        raise error

    return check


# huggingface/OpenEnv #1199: rewards that are no number in [0, 1] were taken
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf"), -1e-9, 1 + 1e-9, 2])
def test_a_reward_outside_of_0_to_1_is_a_defect_of_the_check(reward: float) -> None:
    detail = f"a reward of {reward}; it has to lie in [0, 1]"
    assert found_by(lambda _: Outcome(reward)) == Verdict(VerdictState.INFRA_ERROR, None, "mine", 3, detail)


@pytest.mark.parametrize("reward", [0, 0.25, 1, True])
def test_a_reward_within_0_to_1_is_a_float(reward: float) -> None:
    found = found_by(lambda _: Outcome(reward, "why", "label"))
    assert found == Verdict(VerdictState.OK, float(reward), "mine", 3, "why", "label")
    assert type(found.reward) is float


@pytest.mark.parametrize(
    ("error", "state", "detail"),
    [
        (ParseError("no"), VerdictState.PARSE_ERROR, "no"),
        (InvalidReferenceError("no"), VerdictState.INVALID_REFERENCE, "no"),
        (LimitError("time: no"), VerdictState.TIMEOUT, "time: no"),
        (MemoryError(), VerdictState.TIMEOUT, "memory: asked for more than the limit in one go"),
        (RecursionError("deep"), VerdictState.TIMEOUT, "memory: ran out of stack"),
        (TypeError("no"), VerdictState.INFRA_ERROR, "TypeError: no"),
        (KeyError("no"), VerdictState.INFRA_ERROR, "KeyError: 'no'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_only_what_is_said_of_the_reference_blames_it(error: Exception, state: VerdictState, detail: str) -> None:
    assert found_by(raising(error)) == Verdict(state, None, "mine", 3, detail)


def test_a_detail_is_cut_however_much_of_the_response_it_quotes() -> None:
    assert len(found_by(lambda _: Outcome(0.0, "x" * 10**6)).detail) == 1000
    assert len(found_by(raising(ParseError("x" * 10**6))).detail) == 1000


def test_a_call_of_a_tool_with_an_endless_name_is_wrong_and_no_timeout() -> None:
    response = json.dumps({"name": "x" * 1_100_000, "arguments": {}})
    attempt = Attempt(f"<tool_call>{response}</tool_call>", {"calls": [{"name": "f", "arguments": {}}]})
    with VerifierPool(1, Limits(seconds=30)) as pool:
        assert pool.check([("tool_call", attempt)])[0].reward == 0.0


# --------------------------------------------------------------------------------------------------------------- blame

CALL = {"name": "f", "arguments": {"a": [1]}}
TREE = {"anyOf": [{"allOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}}]}, {"type": "integer"}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": TREE}},
    },
}
VIEW = {"name": "str_replace_editor", "arguments": {"command": "view", "path": "a.py", "view_range": [1, 5]}}
BASH = {"name": "bash", "arguments": {"command": "cd x && pytest a/b.py"}}
ERRANDS = {"name": "errands", "setup": {"people": {"kalo": 3}, "lockers": {"3": "tode", "7": None}}}
FIND = {"name": "find_person", "arguments": {"name": "kalo"}}
LAYERED = {
    "allOf": [{"anyOf": [{"oneOf": [{"type": "object", "additionalProperties": {"$ref": "#"}}, {"type": "null"}]}]}]
}
USABLE: dict[str, list[Any]] = {
    "exact_match": [{"answer": "x", "normalise": ["nfkc", "casefold", "punctuation", "articles", "strip"]}],
    "integer": [{"answer": 5}],
    "json_equal": [{"value": {"a": [1, "x", None]}}],
    "structured": [
        {"format": "json", "schema": LAYERED, "value": {"a": None}},
        {"format": "csv", "columns": ["a", "b"], "schema": {"items": {"properties": {"a": {"type": "integer"}}}}},
        {"format": "xml", "schema": {"properties": {"a": {"type": "array", "items": {"type": "integer"}}}}},
        {"format": "yaml", "fence": "first"},
    ],
    "constraints": [
        {"constraints": [{"kind": "words", "min": 1}, {"kind": "sentences", "max": 3}], "loose": True},
        {"constraints": [{"kind": "between", "before": "<", "after": ">", "inner": {"kind": "questions", "min": 1}}]},
    ],
    "abstention": [{"answer": "x", "abstain": ["I don't know"]}, {"answerable": False}],
    "tool_call": [
        {"calls": [CALL], "ordered": False, "match": {"arguments": "words", "reward": "f1"}},
        {"calls": [CALL], "compat": "nemo-gym"},
    ],
    "action": [
        {"type": "function_call", "name": "f", "arguments": json.dumps(CALL["arguments"]), "match": {"reward": "f1"}},
        {"type": "message", "content": "x y", "match": {"content": "words"}},
        {"type": "function_call", **VIEW, "match": {"arguments": "target"}},
        {"type": "function_call", **BASH, "match": {"arguments": "target"}},
        {"type": "function_call", **BASH, "compat": "nemo-gym-swe", "match": {"reward_mode": "continuous"}},
    ],
    "state_replay": [{"calls": [FIND], "message": "3", "basis": ["state", "message", "calls"]}],
}


def attempts(response: str) -> list[tuple[str, Attempt]]:
    """The response against each of these references."""
    return [
        (name, Attempt(response, reference, tools=(TOOL,) if CALL in reference.get("calls", ()) else None))
        if name != "state_replay"
        else (name, Attempt(response, reference, environment=ERRANDS))
        for name, references in USABLE.items()
        for reference in references
    ]


def written(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


HOSTILE = {
    "deep list": "[" * 99 + "]" * 99,
    "deeper list": "[" * 900 + "]" * 900,
    "no end": "[" * 100_000,
    "deep object": '{"a":' * 99 + "null" + "}" * 99,
    "deep YAML": "{a: " * 99 + "1" + "}" * 99,
    "deep XML": "<a>" * 99 + "</a>" * 99,
    "deep argument": written("f", '{"a": ' + "[" * 61 + "1" + "]" * 61 + "}"),
    "deeper argument": written("f", '{"a": ' + "[" * 900 + "1" + "]" * 900 + "}"),
    "number beyond a double": written("f", '{"a": 1e999}'),
    "number of 4000 digits": written("str_replace_editor", f'{{"command": "view", "view_range": [1, {"9" * 4000}]}}'),
    "number of 5000 digits": written("f", f'{{"a": {"9" * 5000}}}'),
    "command of lists": written("bash", '{"command": [["a"], {"b": 1}]}'),
    "path of lists": written(
        "str_replace_editor", '{"command": ["view"], "path": {"a": 1}, "view_range": [1.5, true]}'
    ),
    "locker beyond a double": written("open_locker", '{"number": 1e308}'),
    "surrogate": written("f", '{"a": "\\ud800"}') + "\ud800",
    "not a number": "NaN",
}


@pytest.mark.parametrize("response", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_response_makes_a_usable_document_or_the_machinery_look_at_fault(response: str) -> None:
    # Else a model could have its 0 left out of the group.
    for name, attempt in attempts(response):
        verdict = run_check(VERIFIERS[name], attempt)
        assert verdict.state in (VerdictState.OK, VerdictState.PARSE_ERROR, VerdictState.TIMEOUT), (name, verdict)


def test_a_schema_in_layers_runs_out_of_stack_on_a_deep_document_and_is_not_blamed() -> None:
    layered: Any = {"type": "object", "additionalProperties": {"$ref": "#"}}
    for kind in ("anyOf", "allOf", "oneOf") * 4:
        layered = {kind: [layered, False] if kind != "allOf" else [layered]}
    deep = '{"a":' * 98 + "{}" + "}" * 98
    for response, state in (('{"a": {}}', VerdictState.OK), (deep, VerdictState.TIMEOUT)):
        attempt = Attempt(response, {"format": "json", "schema": layered})
        assert run_check(VERIFIERS["structured"], attempt).state == state


NESTED: Any = 1
for _ in range(MOST_DEPTH + 1):
    NESTED = [NESTED]


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_a_document_nested_too_deep_is_at_fault_whatever_the_verifier(name: str) -> None:
    document = {"reference": {"value": NESTED}}, {"reference": {}, "tools": ({"a": NESTED},)}
    for given_by in (*document, {"reference": {}, "environment": {"setup": NESTED}}):
        verdict = run_check(VERIFIERS[name], Attempt("[[1]]", **given_by))
        assert (verdict.state, verdict.detail) == (VerdictState.INVALID_REFERENCE, "nested deeper than 100 levels")


def test_turns_nested_too_deep_are_the_models_and_not_the_documents() -> None:
    call = {"function": {"name": "find_person", "arguments": {"name": NESTED}}}
    turns = ({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "assistant", "content": "3"})
    attempt = Attempt("3", USABLE["state_replay"][0], environment=ERRANDS, turns=turns)
    said = VerdictState.TIMEOUT, "memory: turns nested deeper than 100 levels"
    with VerifierPool(1) as pool:
        for verdict in (run_check(VERIFIERS["state_replay"], attempt), *pool.check([("state_replay", attempt)])):
            assert (verdict.state, verdict.detail) == said


def test_a_document_too_deep_for_json_is_at_fault_in_the_pool_too() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with VerifierPool(1) as pool:
        verdict = pool.check([("json_equal", Attempt("[]", {"value": deep}))])[0]
    assert (verdict.state, verdict.detail) == (VerdictState.INVALID_REFERENCE, "nested deeper than 100 levels")
    while deep:  # Python would take the stack apart with it
        deep = deep.pop()


ODD = st.sampled_from(
    [None, True, 0, -1, 1.5, float("nan"), 10**400, "", "x", "\ud800", [], {}, [[]], ["x"], {"a": 1}, {"$ref": "#"}]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """The value with something odd at one place."""
    if not path:
        return odd
    if isinstance(value, dict):
        return {key: changed(item, path[1:], odd) if key == path[0] else item for key, item in value.items()}
    return [changed(item, path[1:], odd) if at == path[0] else item for at, item in enumerate(value)]


@given(st.data())
def test_a_document_of_any_shape_is_usable_or_at_fault_and_never_breaks_the_check(data: st.DataObject) -> None:
    name, attempt = data.draw(st.sampled_from(attempts(data.draw(st.sampled_from(["", "x", *RESPONSES])))))
    parts = {"reference": attempt.reference, "tools": attempt.tools and [TOOL], "environment": attempt.environment}
    part = data.draw(st.sampled_from([key for key, value in parts.items() if value]))
    parts[part] = changed(parts[part], data.draw(st.sampled_from(places(parts[part]))), data.draw(ODD))
    verdict = run_check(VERIFIERS[name], Attempt(attempt.response, **parts))
    assert verdict.state in (VerdictState.OK, VerdictState.PARSE_ERROR, VerdictState.INVALID_REFERENCE), verdict


RESPONSES = [
    '{"a": [1]}',
    "a,b\n1,2",
    "<r><a>1</a></r>",
    written("f", '{"a": [1]}'),
    written("bash", '{"command": "cd x && pytest a/b.py"}'),
    written("find_person", '{"name": "kalo"}'),
    "I don't know",
]


# ---------------------------------------------------------------------------------------------------------------- time

PIECES = [
    "[", "{", '{"a":', "<think>", "</think>", "```\n", "```python\n", "<tool_call>", "</tool_call>", " ", "\n", ".",
    "a. ", "Dr. ", "1. ", "a.\n\n", "*a", "[a", "<<", "\\", "9", "answer: ", "\ufdfa", "\u0301", "\ud800",
    "<tool_call></tool_call>", written("f", "{}"),
]  # fmt: skip
INSIDE = {
    "digits": '{"a": %s}' % ("9" * 20_000),
    "fraction": '{"a": 0.%s}' % ("9" * 20_000),
    "wide": '{"a": [' + ",".join("1" * 2_000) + "]}",
    "wide and deep": '{"a": ' + "[" * 55 + ",".join("1" * 1_000) + "]" * 55 + "}",
    "command of quotes": '{"command": "%s"}' % ("'" * 20_000),
    "command of paths": '{"command": "%s"}' % ("a/" * 10_000),
    "command of shells": '{"command": "%s"}' % ("bash -c " * 2_500),
}
LONG = {
    **{piece: piece * (20_000 // len(piece)) for piece in PIECES},
    "marks in two orders": "a" + "\u0301" * 10_000 + "\u0327" * 10_000,
    "sentences that do not end": "A. " + " " * 10_000 + "a. " * 3_000,
    **{name: written("bash" if "command" in name else "f", arguments) for name, arguments in INSIDE.items()},
}


@pytest.mark.parametrize("response", LONG.values(), ids=[re.sub(r"\W", "_", name) for name in LONG])
def test_what_does_not_run_in_a_worker_is_done_in_little_time_on_anything(response: str) -> None:
    for name, attempt in attempts(response):
        if not VERIFIERS[name].isolated:
            began = time.process_time()
            run_check(VERIFIERS[name], attempt)
            assert time.process_time() - began < 1.0, name  # what is quadratic takes seconds or minutes
