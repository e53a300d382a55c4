"""Exported rows: prompts that `rl` reads, and rows that keep the rules of NeMo Gym."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mopdctl.errors import InputError
from mopdctl.files import file_digest, read_jsonl, write_json
from mopdctl.pivots.candidates import Candidate, read_candidates, write_candidates
from mopdctl.pivots.export import ExportSpec, export, rl_row
from mopdctl.pivots.folder import selected_row, write_selection
from mopdctl.pivots.nemo_gym import gym_row, validate_row
from mopdctl.pivots.profiled import Profiled
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.runs import Workspace
from mopdctl.verifiers.base import Attempt, VerdictState
from mopdctl.verifiers.registry import VERIFIERS, run_check

TOOLS = tuple(
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {key: {"type": kind}}}},
    }
    for name, key, kind in (("find_person", "name", "string"), ("open_locker", "number", "integer"))
)
FIND = {"type": "function_call", "name": "find_person", "arguments": '{"name": "kalo"}'}
OPEN = {"type": "function_call", "name": "open_locker", "arguments": '{"number":3}'}
BATCH = {
    "type": "function_call_batch",
    "calls": [
        {"name": "find_person", "arguments": '{"name": "kalo"}'},
        {"name": "find_person", "arguments": '{"name": "bemi"}'},
    ],
}
SAY = {"type": "message", "content": "tode"}
ASK: tuple[dict[str, Any], ...] = ({"role": "user", "content": "What does kalo have?"},)
FOUND: tuple[dict[str, Any], ...] = (
    *ASK,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "find_person", "arguments": '{"name": "kalo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
)


def candidate(
    trajectory: str = "t0",
    turn: int = 0,
    *,
    messages: tuple[dict[str, Any], ...] = ASK,
    action: dict[str, Any] = FIND,
    tools: tuple[dict[str, Any], ...] | None = TOOLS,
) -> Candidate:
    return Candidate(f"{trajectory}#{turn}", trajectory, turn, messages, tools, action, domain="errands", source="t:1")


EVERY = [
    candidate(),
    candidate(turn=1, messages=FOUND, action=OPEN),
    candidate(turn=2, messages=FOUND, action=SAY),
    candidate("t1", action=BATCH),
]


def make_set(workspace: Workspace, candidates: list[Candidate], *, name: str = "errands") -> Path:
    folder = workspace.pivots(name)
    write_candidates(folder / "candidates.jsonl", candidates)
    digest = file_digest(folder / "candidates.jsonl")
    write_json(folder / "manifest.json", {"candidates": {"count": len(candidates), "digest": digest}})
    return folder


def keep(folder: Path, candidates: list[Candidate], rewards: tuple[float, ...] = (1, 0, 0, 0)) -> None:
    profiled = [Profiled(c.candidate_id, c.action["type"], "", c.turn, rewards, {"ok": 4}) for c in candidates]
    digest = file_digest(folder / "candidates.jsonl")
    write_selection(folder, [selected_row(p) for p in profiled], {"lambda_diff": 0.6, "candidates_digest": digest})


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "ws")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]


# ---------------------------------------------------------------------------------------------------------- candidates


def test_candidates_come_back_as_they_were_written(tmp_path: Path) -> None:
    told = [*EVERY, candidate("t2", tools=None), candidate("t3", messages=({"role": "user", "content": "é\u2028\n"},))]
    assert write_candidates(tmp_path / "c.jsonl", told) == len(told)
    assert list(read_candidates(tmp_path / "c.jsonl")) == told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate_id": "t9#0"}, "must be trajectory and turn, t0#0"),
        ({"turn": -1}, "'turn' must be a whole number"),
        ({"messages": []}, "'messages' must be a list"),
        ({"messages": [{"content": "x"}]}, "each with a 'role'"),
        ({"tools": "find"}, "'tools' must be a list"),
        ({"action": {"type": "talk"}}, "'action' needs a 'type'"),
        (
            {"action": {**FIND, "arguments": '{"name": '}},
            "arguments of 'find_person' in 'action' must be a JSON object",
        ),
        ({"action": {**FIND, "arguments": "[1]"}}, "must be a JSON object"),
        ({"action": {"type": "message", "content": None}}, "needs text in 'content'"),
        ({"action": {"type": "function_call_batch", "calls": []}}, "needs a list 'calls'"),
        ({"reward": 1}, "no field 'reward'"),
    ],
)
def test_a_candidate_that_cannot_be_used_is_named_with_its_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_candidates(tmp_path / "c.jsonl", [candidate("t8"), candidate()])
    lines = (tmp_path / "c.jsonl").read_text().splitlines()
    (tmp_path / "c.jsonl").write_text(f"{lines[0]}\n{json.dumps(json.loads(lines[1]) | change)}\n")
    with pytest.raises(InputError, match=message) as raised:
        list(read_candidates(tmp_path / "c.jsonl"))
    assert str(raised.value).startswith(f"{tmp_path / 'c.jsonl'}:2: ")


def test_a_candidate_that_stands_twice_is_refused(tmp_path: Path) -> None:
    write_candidates(tmp_path / "c.jsonl", [candidate(), candidate()])
    with pytest.raises(InputError, match=r"c\.jsonl:2: candidate 't0#0' stands at .*c\.jsonl:1 already"):
        list(read_candidates(tmp_path / "c.jsonl"))


# ------------------------------------------------------------------------------------------------------------------ rl


def test_selected_pivots_become_prompts_in_the_order_of_the_selection(workspace: Workspace, tmp_path: Path) -> None:
    folder = make_set(workspace, EVERY)
    keep(folder, [EVERY[3], EVERY[1]])
    out = tmp_path / "pivots.jsonl"
    document = export("errands", workspace, out, ExportSpec("rl"))
    prompts = read_prompts(out, ("domain",))
    assert [p.prompt_id for p in prompts] == ["t1#0", "t0#1"]
    assert [p.reference for p in prompts] == [BATCH, OPEN]
    assert {(p.verifier, p.routing["domain"], p.environment) for p in prompts} == {("action", "errands", None)}
    assert prompts[1].tools == TOOLS
    assert rows_of(out)[1]["messages"] == list(FOUND)
    assert (document["chosen"], document["rows"], document["skipped"]) == (2, 2, {})
    assert json.loads((tmp_path / "pivots.manifest.json").read_text())["digest"] == file_digest(out)


def test_a_state_that_ends_with_the_assistant_is_no_prompt() -> None:
    said = (*ASK, {"role": "assistant", "content": "Let me look."})
    assert rl_row(candidate(messages=said)) == "ends_with_assistant"
    parts = ({"role": "user", "content": [{"type": "image_url"}]},)
    assert str(rl_row(candidate(messages=parts))).startswith("unusable_messages: candidate t0#0: message 0")


def test_an_action_that_the_verifier_cannot_use_is_skipped_by_reason(workspace: Workspace, tmp_path: Path) -> None:
    # An action that breaks the schema of its own tool: `rl` refuses the whole file for such a row.
    wrong = [
        candidate(f"t{n}", action={**OPEN, "arguments": text}) for n, text in enumerate(['{"number": "three"}'] * 2)
    ]
    make_set(workspace, [*wrong, *(candidate(f"u{n}") for n in range(3))])
    document = export("errands", workspace, tmp_path / "all.jsonl", ExportSpec("rl", every=True))
    assert (document["rows"], document["chosen"], document["skipped"]) == (3, 5, {"invalid_reference": 2})
    export("errands", workspace, tmp_path / "random.jsonl", ExportSpec("rl", random=3))
    for name in ("all.jsonl", "random.jsonl"):
        prompts = read_prompts(tmp_path / name, ())
        states = [run_check(VERIFIERS["action"], Attempt("", p.reference, p.messages, p.tools)).state for p in prompts]
        assert states == [VerdictState.PARSE_ERROR] * 3


def test_random_turns_are_a_sample_of_all_candidates_that_the_seed_decides(
    workspace: Workspace, tmp_path: Path
) -> None:
    candidates = [candidate(f"t{i}") for i in range(50)]
    make_set(workspace, candidates)
    make_set(workspace, candidates[::-1], name="reversed")

    def drawn(count: int, seed: int, name: str = "errands") -> list[str]:
        document = export(name, workspace, tmp_path / "r.jsonl", ExportSpec("rl", random=count, seed=seed))
        assert (document["rows"], document["candidates"], document["selected_digest"]) == (count, 50, None)
        return [row["id"] for row in rows_of(tmp_path / "r.jsonl")]

    ten = drawn(10, 0)
    assert len(set(ten)) == 10
    assert drawn(10, 0, "reversed") == ten == drawn(20, 0)[:10]
    assert drawn(10, 1) != ten
    assert sorted(drawn(50, 0)) == sorted(c.candidate_id for c in candidates)
    assert len({candidate_id for seed in range(20) for candidate_id in drawn(20, seed)}) == 50


def test_more_random_turns_than_there_are_is_an_error(workspace: Workspace, tmp_path: Path) -> None:
    make_set(workspace, EVERY)
    spec = ExportSpec("nemo-gym", random=4)
    with pytest.raises(InputError, match=r"--random 4: only 3 of 4 candidates can be exported \(batch 1\)"):
        export("errands", workspace, tmp_path / "r.jsonl", spec)
    assert not (tmp_path / "r.jsonl").exists()


def test_an_export_needs_a_selection_of_these_candidates(workspace: Workspace, tmp_path: Path) -> None:
    out, spec = tmp_path / "p.jsonl", ExportSpec("rl")
    with pytest.raises(InputError, match="no candidates there"):
        export("errands", workspace, out, spec)
    folder = make_set(workspace, EVERY)
    with pytest.raises(InputError, match="nothing is selected yet"):
        export("errands", workspace, out, spec)
    keep(folder, EVERY[:1])
    (folder / "selected.jsonl").write_text("")
    with pytest.raises(InputError, match="is not what was selected"):
        export("errands", workspace, out, spec)
    keep(folder, EVERY[:1])
    make_set(workspace, EVERY[:2])
    with pytest.raises(InputError, match="selection of other candidates"):
        export("errands", workspace, out, spec)
    with pytest.raises(InputError, match=r"ending \.jsonl"):
        export("errands", workspace, tmp_path / "p.parquet", spec)


# ------------------------------------------------------------------------------------------------------------ nemo-gym


def test_gym_rows_keep_the_contract(workspace: Workspace, tmp_path: Path) -> None:
    keep(make_set(workspace, EVERY), EVERY)
    document = export("errands", workspace, tmp_path / "gym.jsonl", ExportSpec("nemo-gym", agent="my_agent"))
    rows = rows_of(tmp_path / "gym.jsonl")
    assert (document["rows"], document["skipped"]) == (3, {"batch": 1})
    assert [validate_row(row) for row in rows] == [[], [], []]
    assert [row["expected_action"] for row in rows] == [FIND, OPEN, SAY]
    assert {(row["pass_rate"], row["pass_rate_total"], row["pass_rate_passed"]) for row in rows} == {(0.25, 4, 1)}
    params = rows[1]["responses_create_params"]
    assert [item["type"] for item in params["input"]] == ["message", "function_call", "function_call_output"]
    call, output = params["input"][1:]
    assert (call["call_id"], call["arguments"], call["status"]) == ("c1", '{"name": "kalo"}', "completed")
    assert (output["call_id"], output["output"]) == ("c1", "3")
    assert [tool["name"] for tool in params["tools"]] == ["find_person", "open_locker"]
    assert params["tools"][1]["parameters"] == TOOLS[1]["function"]["parameters"]
    assert (params["tool_choice"], params["parallel_tool_calls"]) == ("auto", True)
    assert rows[0]["agent_ref"] == {"type": "responses_api_agents", "name": "my_agent"}
    assert "metadata" not in params


def test_batches_are_exported_where_they_are_asked_for(workspace: Workspace, tmp_path: Path) -> None:
    # NVIDIA-NeMo/Gym #2463: the server takes batches, older validators do not
    make_set(workspace, EVERY)
    spec = ExportSpec("nemo-gym", every=True, batches=True)
    assert export("errands", workspace, tmp_path / "gym.jsonl", spec)["rows"] == 4
    row = rows_of(tmp_path / "gym.jsonl")[3]
    assert row["expected_action"]["calls"] == [{"type": "function_call", **call} for call in BATCH["calls"]]
    assert "pass_rate" not in row


def test_a_batch_of_one_call_becomes_the_call() -> None:
    lone = candidate(action={"type": "function_call_batch", "calls": BATCH["calls"][:1]})
    assert gym_row(lone, agent="a")["expected_action"] == FIND


def test_a_row_that_would_break_the_contract_is_skipped_and_told(workspace: Workspace, tmp_path: Path) -> None:
    make_set(workspace, [EVERY[0], candidate("t5", tools=None)])
    document = export("errands", workspace, tmp_path / "gym.jsonl", ExportSpec("nemo-gym", every=True))
    assert (document["rows"], document["skipped"]) == (1, {"invalid_row": 1})
    assert document["examples"] == ["t5#0: expected_action: calls 'find_person', which is not among the tools"]


def broken(path: str, value: Any) -> dict[str, Any]:
    """A good row with the field at a dotted path changed; `...` removes it."""
    row = deepcopy(json.loads(json.dumps(gym_row(EVERY[1], agent="a"))))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    where: Any = row
    for key in parents:
        where = where[key]
    if value is ...:
        del where[last]
    else:
        where[last] = value
    return row


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("agent_ref", ..., "no 'agent_ref'"),
        ("agent_ref.type", "agents", "agent_ref: needs"),
        ("agent_ref.name", "", "agent_ref: needs"),
        ("responses_create_params.metadata", None, "metadata: is null; leave it out"),
        ("responses_create_params.tool_choice", "required", "tool_choice: 'required' in place of \"auto\""),
        ("responses_create_params.tool_choice", ..., "tool_choice: None"),
        ("responses_create_params.parallel_tool_calls", 1, "parallel_tool_calls: not a boolean"),
        ("responses_create_params.tools", None, "tools: is null"),
        ("responses_create_params.tools.0.name", "", "tools: each needs"),
        ("responses_create_params.input", [], "input: not a list of at least one item"),
        ("responses_create_params.input.1.status", "in_progress", "input item 1: a call before the action is not"),
        ("responses_create_params.input.1.arguments", {}, "input item 1: a call needs"),
        ("responses_create_params.input.1.call_id", "c2", "input item 2: an output for call_id 'c1'"),
        ("responses_create_params.input.2", ..., "call 'c1' has no output"),
        ("expected_action", {"type": "function_call_batch", "calls": [OPEN]}, "expected_action: a batch of one call"),
        ("expected_action", BATCH, "expected_action: a call of a batch without its type"),
        ("expected_action.type", "talk", "expected_action: 'action' needs a 'type'"),
        ("expected_action.arguments", '{"number":', "must be a JSON object as text"),
        ("expected_action.name", "move_item", "calls 'move_item', which is not among the tools"),
    ],
)
def test_each_rule_of_the_contract_is_checked(path: str, value: Any, problem: str) -> None:
    assert validate_row(json.loads(json.dumps(gym_row(EVERY[1], agent="a")))) == []
    assert any(problem in found for found in validate_row(broken(path, value)))


def test_a_call_id_that_comes_twice_is_a_problem() -> None:
    row = gym_row(EVERY[1], agent="a")
    items = row["responses_create_params"]["input"]
    row["responses_create_params"]["input"] = [*items, *items[1:]]
    assert validate_row(row) == ["input item 3: call_id 'c1' a second time"]
