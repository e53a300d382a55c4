"""Reading prompts, and the rule that each has exactly one teacher."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.plan import plan_distill
from mopdctl.distill.prompts import serve, teacher_of
from mopdctl.distill.run import run_distill
from mopdctl.errors import InputError
from mopdctl.files import write_jsonl
from mopdctl.records import Prompt
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.runs import Workspace


def per_teacher(prompts: list[Prompt], config: TeachersFile) -> dict[str, int]:
    return serve(prompts, [None] * len(prompts), config).per_teacher()


def teachers_file(teachers: dict[str, Any], **top: Any) -> TeachersFile:
    document = {"name": "merged", "student": "s", "prompts": "prompts.jsonl", "train": {"steps": 1}} | top
    return TeachersFile.model_validate(
        document | {"teachers": {a: {"model": "m"} | t for a, t in teachers.items()}},
    )


def prompt(row: int, **routing: str) -> Prompt:
    return Prompt(str(row), ({"role": "user", "content": "?"},), None, routing, place=f"prompts.jsonl:{row}")


def message_of(prompts: Sequence[Prompt], config: TeachersFile) -> str:
    with pytest.raises(InputError) as caught:
        per_teacher(list(prompts), config)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ routing

MATH, CODE = {"domains": ["math", "logic"]}, {"domains": ["code"]}


def test_every_prompt_is_counted_for_the_teacher_of_its_domain() -> None:
    config = teachers_file({"m": MATH, "c": CODE})
    domains = ["math", "code", "logic", "math"]
    assert per_teacher([prompt(i, domain=d) for i, d in enumerate(domains)], config) == {"m": 3, "c": 1}
    assert [teacher_of({"domain": d}, config) for d in domains] == ["m", "c", "m", "m"]


def test_an_unknown_domain_is_named_with_its_place_and_the_known_ones() -> None:
    config = teachers_file({"m": MATH, "c": CODE})
    assert message_of([prompt(1, domain="math"), prompt(2, domain="maths")], config) == (
        "prompts.jsonl:2: domain 'maths': no teacher serves it; teachers serve code, logic, math"
    )


def test_a_domain_with_two_teachers_names_both() -> None:
    config = teachers_file({"m": MATH, "other": {"domains": ["logic"]}})
    assert message_of([prompt(1, domain="math"), prompt(2, domain="logic")], config) == (
        "prompts.jsonl:2: domain 'logic': teachers m and other both serve it; "
        "take it out of the `domains` of all but one"
    )


def test_a_teacher_without_a_prompt_is_named() -> None:
    config = teachers_file({"m": MATH, "c": CODE})
    assert message_of([prompt(1, domain="math")], config).startswith("teacher 'c': no prompt routes to it")


def test_another_field_can_route() -> None:
    config = teachers_file({"m": MATH, "c": CODE}, routing="task")
    assert per_teacher([prompt(1, task="code"), prompt(2, task="math")], config) == {"m": 1, "c": 1}
    with pytest.raises(ValidationError, match="name one or two fields"):
        teachers_file({"m": MATH}, routing=["a", "b", "c"])


EFFORTS: dict[str, Any] = {"routing": ["domain", "effort"], "efforts": {"high": {}, "low": {"max_new_tokens": 5}}}


def test_two_keys_give_each_domain_and_effort_its_own_teacher() -> None:
    teachers = {
        "deep": {"domains": ["math"], "efforts": ["high"]},
        "brief": {"domains": ["math"], "efforts": ["low"]},
        "code": {"domains": ["code"]},
    }
    config = teachers_file(teachers, **EFFORTS)
    pairs = [("math", "high"), ("math", "low"), ("code", "high"), ("code", "low")]
    prompts = [prompt(i, domain=d, effort=e) for i, (d, e) in enumerate(pairs)]
    assert [teacher_of(p.routing, config) for p in prompts] == ["deep", "brief", "code", "code"]
    assert per_teacher(prompts, config) == {"deep": 1, "brief": 1, "code": 2}


def test_a_teacher_of_all_efforts_and_one_of_a_single_effort_share_no_prompt() -> None:
    config = teachers_file(
        {"all": {"domains": ["math"]}, "deep": {"domains": ["math"], "efforts": ["high"]}}, **EFFORTS
    )
    assert teacher_of({"domain": "math", "effort": "low"}, config) == "all"
    message = message_of([prompt(3, domain="math", effort="high")], config)
    assert message.startswith("prompts.jsonl:3: domain 'math' effort 'high': teachers all and deep both serve it")


def test_a_domain_without_a_teacher_for_the_effort_is_refused() -> None:
    config = teachers_file({"deep": {"domains": ["math"], "efforts": ["high"]}}, **EFFORTS)
    assert "domain 'math' effort 'low': no teacher" in message_of([prompt(1, domain="math", effort="low")], config)


def test_an_unknown_effort_is_named_with_the_known_ones() -> None:
    config = teachers_file({"m": MATH}, **EFFORTS)
    assert message_of([prompt(1, domain="math", effort="hihg")], config) == (
        "prompts.jsonl:1: unknown effort 'hihg'; efforts: high, low"
    )


def test_efforts_without_a_second_key_are_refused() -> None:
    with pytest.raises(ValidationError, match="efforts need a second routing field"):
        teachers_file({"m": MATH}, efforts={"high": {}})


@pytest.mark.parametrize(
    ("domains", "teachers", "message"),
    [
        (["math", "maths"], {"m": MATH}, "domain 'maths': no teacher serves it"),
        (["math", "code"], {"m": MATH, "c": CODE, "d": CODE}, "domain 'code': teachers c and d both serve it"),
        (["math"], {"m": MATH, "c": CODE}, "teacher 'c': no prompt routes to it"),
    ],
)
def test_routing_is_checked_before_anything_is_loaded(
    tmp_path: Path, domains: list[str], teachers: dict[str, Any], message: str
) -> None:
    (tmp_path / "folder").mkdir()  # no model: loading it would be another error
    write_jsonl(tmp_path / "prompts.jsonl", [{"domain": d, "prompt": "?"} for d in domains])
    config = teachers_file({a: t | {"model": "folder"} for a, t in teachers.items()}, student="folder")
    workspace = Workspace(tmp_path / "workspace")
    for work in (plan_distill, run_distill):
        with pytest.raises(InputError) as caught:
            work(config, workspace, base=tmp_path)
        assert message in str(caught.value)
    assert not workspace.root.exists()


# ------------------------------------------------------------------------------------------------------------ reading

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
}
OTHER_TOOL = {
    "type": "function",
    "function": {"name": "g", "parameters": {"type": "object", "properties": {"y": {"type": "integer"}}}},
}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def test_a_prompt_carries_what_the_row_says(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "id": "first",
            "domain": "math",
            "messages": MESSAGES,
            "tools": [TOOL],
            "verifier": "v",
            "reference": {"a": 1},
        },
        {"domain": "code", "prompt": "plain", "effort": "low"},
    ]
    write_jsonl(tmp_path / "p.jsonl", rows)
    assert read_prompts(tmp_path / "p.jsonl", ("domain",)) == [
        Prompt("first", tuple(MESSAGES), (TOOL,), {"domain": "math"}, {"a": 1}, "v", None, f"{tmp_path}/p.jsonl:1"),
        Prompt("1", ({"role": "user", "content": "plain"},), None, {"domain": "code"}, place=f"{tmp_path}/p.jsonl:2"),
    ]


def test_text_is_kept_whole_whatever_characters_it_holds(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\u0085d", "e\u2029f\u000bg", "\ufeffh", "\U0001f642\u0301"]
    lines = [json.dumps({"domain": "math", "prompt": text}, ensure_ascii=False) for text in texts]
    for end in ("\n", "\r\n"):
        (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + (end.join(lines) + end).encode())
        found = read_prompts(tmp_path / "p.jsonl", ("domain",))
        assert [p.messages[0]["content"] for p in found] == texts
        assert [p.place for p in found] == [f"{tmp_path}/p.jsonl:{n}" for n in range(1, 6)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "u"}, "no text in routing field 'domain'"),
        ({"prompt": "u", "domain": 3}, "no text in routing field 'domain'"),
        ({"domain": "math"}, "has neither 'messages' nor 'prompt'"),
        ({"domain": "math", "messages": []}, "'messages' must be a list with at least one message"),
        ({"domain": "math", "messages": {"role": "user"}}, "'messages' must be a list"),
        ({"domain": "math", "messages": ["u"]}, "message 0 has no 'role'"),
        ({"domain": "math", "messages": [{"role": "user"}]}, "message 0 has no text in 'content'"),
        ({"domain": "math", "prompt": 5}, "message 0 has no text in 'content'"),
        ({"domain": "math", "messages": [*MESSAGES, {"role": "assistant", "content": "a"}]}, "is the assistant's"),
        ({"domain": "math", "prompt": "u", "tools": "f"}, "'tools'"),
        ({"domain": "math", "prompt": "u", "tools": {"f": 1}}, "'tools'"),
        ({"domain": "math", "prompt": "u", "tools": ["f"]}, "'tools'"),
    ],
)
def test_an_unusable_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    write_jsonl(tmp_path / "p.jsonl", [{"domain": "math", "prompt": "u"}, row])
    with pytest.raises(InputError) as caught:
        read_prompts(tmp_path / "p.jsonl", ("domain",))
    assert str(caught.value).startswith(f"{tmp_path}/p.jsonl:2: ")
    assert message in str(caught.value)


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "p.jsonl", [{"id": i, "domain": "math", "prompt": "u"} for i in ("a", "b", "a")])
    with pytest.raises(InputError, match=r"id 'a' stands on 2 rows"):
        read_prompts(tmp_path / "p.jsonl", ("domain",))


def test_parquet_gives_the_prompts_of_jsonl(tmp_path: Path) -> None:
    # Parquet has one type for all rows of a column: each tool gets the parameters of the other as nulls.
    rows: list[dict[str, Any]] = [
        {"id": "a", "domain": "math", "messages": MESSAGES, "tools": [TOOL], "reference": {"a": 1}, "verifier": "v"},
        {"id": "b", "domain": "math", "messages": MESSAGES[1:], "tools": [OTHER_TOOL, TOOL], "reference": {"a": 2}},
        {"id": "c", "domain": "code", "messages": MESSAGES},
    ]
    write_jsonl(tmp_path / "p.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")

    def content(path: Path) -> list[tuple[Any, ...]]:
        found = read_prompts(path, ("domain",))
        return [(p.prompt_id, p.messages, p.tools, p.routing, p.reference, p.verifier) for p in found]

    assert content(tmp_path / "p.parquet") == content(tmp_path / "p.jsonl")
    assert read_prompts(tmp_path / "p.parquet", ("domain",))[1].place == f"{tmp_path}/p.parquet row 1"
