"""Public reports of what other tools got wrong, asked of `gen-sft` as a whole: over a real socket, from seeds to files.

A test that is expected to fail states what should hold, and its reason says what holds today.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mopdctl.config.base import load_config
from mopdctl.config.gensft import GenConfig
from mopdctl.engines.fake_server import Faults, run_in_thread
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import write_text
from mopdctl.gensft.estimate import dry_run
from mopdctl.gensft.run import run
from mopdctl.gensft.spec import Spec, prepare
from mopdctl.runs import Workspace

ROOT = Path(__file__).parents[2]
Body = dict[str, Any]
Respond = Callable[[Body], Any]
"""Request body to a response: a JSON value for a 200, or (status, JSON value)."""

PRICE = {"input_per_million": 1.0, "output_per_million": 1.0}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}, "at": {"type": "null"}},
            "required": ["q", "at"],
        },
    },
}
JUDGES = [{"members": ["judge"], "kind": "rubric"}]


@pytest.fixture(autouse=True)
def _short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that only fails is down after half a second."""
    monkeypatch.setattr("mopdctl.gensft.ask._DOWN_AFTER_S", 0.5)


@contextmanager
def serving(respond: Respond) -> Iterator[str]:
    """A server that says what it is told to say, however absurd; gives its base URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            found = respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, document = found if isinstance(found, tuple) else (200, found)
            text = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def said(text: str | None, finish: str | None = "stop", usage: Any = (5, 7), **message: Any) -> dict[str, Any]:
    """A chat completion."""
    counted = dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=True)) if usage else None
    choice = {"index": 0, "message": {"role": "assistant", "content": text} | message, "finish_reason": finish}
    return {"choices": [choice], "usage": counted}


def own_words(body: Body) -> dict[str, Any]:
    """An answer that no other request gets."""
    return said(f"The answer to this one has the number {body.get('seed')}.")


def member(url: str, model: str = "fake-chat:words=20", **more: Any) -> dict[str, Any]:
    return {"engine": "openai", "base_url": url, "model": model, "timeout_s": 20, "max_attempts": 2} | more


def project(folder: Path, members: dict[str, Any], rows: int | list[Any] = 6, **gen: Any) -> Path:
    """Writes committee.yaml, seeds.jsonl and gen.yaml; returns the last. Member `a` answers without `routes`."""
    if isinstance(rows, int):
        rows = [{"prompt": f"Say something about number {i}."} for i in range(rows)]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "seeds.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    routes = gen.pop("routes", {"default": {"members": {"a": 1}}})
    write_text(folder / "committee.yaml", json.dumps({"members": members, "routes": routes}))
    source = {"path": "seeds.jsonl", "domain": "chat", "license": "cc0-1.0"}
    document = {"name": "made", "committee": "committee.yaml", "seeds": [source]} | gen
    write_text(folder / "gen.yaml", json.dumps(document))
    return folder / "gen.yaml"


def spec_of(path: Path) -> Spec:
    return prepare(load_config(GenConfig, path), Workspace(path.parent / "w"), base=path.parent)


def make(path: Path, **more: Any) -> dict[str, Any]:
    return run(spec_of(path), **more)


def stage(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in document["stages"] if found["stage"] == name)


def made_rows(path: Path, name: str = "made") -> list[dict[str, Any]]:
    files = sorted((path.parent / "w" / "datasets" / name / "data").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def run_folder(path: Path) -> Path:
    return path.parent / "w" / "runs" / "made.gen-sft"


def unpublish(path: Path) -> None:
    shutil.rmtree(path.parent / "w" / "datasets")


# Files and resume


# deepseek-ai/DeepSpec #29; NVIDIA-NeMo/DataDesigner #710; NVIDIA-NeMo/Skills #661, #441; UKGovernmentBEIS/inspect_ai
# #2580: a resumed run repeated some prompts, skipped others, or began its seeds anew
def test_a_run_in_pieces_has_the_rows_of_a_run_in_one_piece(tmp_path: Path) -> None:
    source = {"path": "seeds.jsonl", "domain": "chat"}
    gen = {"seeds": [source, source | {"source": "again"}, source], "samples": 2}
    with run_in_thread(Faults(latency_s=0.002)) as server:
        members = {"a": member(server.url, sampling={"max_tokens": 60}, max_concurrency=8)}
        whole = project(tmp_path / "whole", members, 5, **gen)
        make(whole)
        asked = server.stats()["requests"]
        pieces = 0
        while True:
            path = project(tmp_path / "pieces", members, 5, max_tokens=300 + 150 * pieces, **gen)
            document = make(path)
            pieces += 1
            if document["complete"]:
                break
        assert server.stats()["requests"] - asked == asked == 30
    assert pieces > 3
    assert made_rows(path) == made_rows(whole)
    assert len({row["id"] for row in made_rows(path)}) == 30


# NVIDIA-NeMo/Skills generate.py: a position that came twice left a row of nulls at another
def test_an_answer_that_stands_twice_in_the_journal_is_one_row(tmp_path: Path) -> None:
    with run_in_thread() as server:
        path = project(tmp_path, {"a": member(server.url)})
        make(path)
        before = made_rows(path)
        unpublish(path)
        journal = run_folder(path) / "journal.jsonl"
        journal.write_bytes(journal.read_bytes() * 2)
        assert make(path)["requests"] == 0
    assert made_rows(path) == before


# NVIDIA-NeMo/Skills generate.py: the output was never compared with the input
def test_a_plan_that_lost_lines_is_made_anew(tmp_path: Path) -> None:
    with run_in_thread() as server:
        path = project(tmp_path, {"a": member(server.url)})
        make(path)
        before = made_rows(path)
        unpublish(path)
        plan = run_folder(path) / "seeds.jsonl"
        plan.write_bytes(b"".join(plan.read_bytes().splitlines(keepends=True)[:3]))
        document = make(path)
        assert document["requests"] == 0
        assert document["complete"]
        assert len(made_rows(path)) == len(before)


# PrimeIntellect-ai/verifiers #1564: a malformed line anywhere broke resume
def test_a_damaged_plan_is_made_anew(tmp_path: Path) -> None:
    with run_in_thread() as server:
        path = project(tmp_path, {"a": member(server.url)})
        make(path)
        unpublish(path)
        plan = run_folder(path) / "seeds.jsonl"
        write_text(plan, "no seed\n")
        assert make(path)["requests"] == 0
        unpublish(path)
        plan.unlink()
        assert make(path)["requests"] == 0


# PrimeIntellect-ai/verifiers #1564; NVIDIA-NeMo/Skills generate.py: a malformed line anywhere broke resume
@pytest.mark.parametrize("at", [0, 53])
def test_a_flipped_byte_before_the_check_sum_costs_at_most_one_answer(tmp_path: Path, at: int) -> None:
    with run_in_thread() as server:
        path = project(tmp_path, {"a": member(server.url)}, 2)
        make(path)
        before = made_rows(path)
        unpublish(path)
        journal = run_folder(path) / "journal.jsonl"
        text = bytearray(journal.read_bytes())
        text[text.rindex(b'{"k":', 0, text.rindex(b'"s":"ok"')) + at] ^= 1
        journal.write_bytes(text)
        assert make(path)["requests"] <= 1
    assert made_rows(path) == before


# argilla-io/distilabel #1065: a resumed run waited for ever
@pytest.mark.timeout(20)
def test_a_run_whose_answers_are_all_there_ends_at_once(tmp_path: Path) -> None:
    with run_in_thread() as server:
        path = project(tmp_path, {"a": member(server.url), "judge": member(server.url)}, judges=JUDGES)
        make(path)
        unpublish(path)
    began = time.monotonic()  # the server is gone
    assert make(path)["requests"] == 0
    assert time.monotonic() - began < 5


# NVIDIA-NeMo/Gym rollout notes, #2750, #3302: rows that had failed counted as done on resume
def test_a_verdict_that_failed_for_want_of_a_server_is_asked_for_by_the_next_run(tmp_path: Path) -> None:
    down = True

    def judge(body: Body) -> Any:
        return (503, {}) if down else said("Good. <score>7</score>")

    with run_in_thread() as server, serving(judge) as judging:
        members = {"a": member(server.url), "judge": member(judging, max_attempts=1)}
        path = project(tmp_path, members, 3, judges=JUDGES, select=[{"require_score": True}])
        first = make(path)
        assert stage(first, "select")["dropped"] == {"no_score": 3}
        down = False
        again = make(path)
    assert not first["complete"]
    assert again["complete"]
    assert stage(again, "select")["dropped"] == {}


# NVIDIA-NeMo/Gym #2750; argilla-io/distilabel #462: a stop by budget is no end
def test_a_budget_that_ends_the_judging_is_gone_on_from_with_a_larger_one(tmp_path: Path) -> None:
    with run_in_thread() as server:
        members = {name: member(server.url, sampling={"max_tokens": 60}) for name in ("a", "judge")}
        gen: dict[str, Any] = {"judges": JUDGES, "select": [{"require_score": True}]}
        first = make(project(tmp_path, members, 12, max_tokens=1500, **gen))
        assert first["stopped"] == "the budget is used up"
        assert stage(first, "generate")["out"] == 12
        assert stage(first, "select")["dropped"]["pending"] > 0
        again = make(project(tmp_path, members, 12, **gen))
    assert not first["complete"]
    assert stage(again, "select")["dropped"] == {}


# NVIDIA-NeMo/Gym #2750, #3302: a gateway's error inside a 200 is no answer
def test_an_error_document_with_status_200_is_tried_again(tmp_path: Path) -> None:
    came: set[str] = set()

    def hiccup(body: Body) -> Any:
        first = str(body["messages"]) not in came
        came.add(str(body["messages"]))
        return {"error": {"message": "overloaded", "code": 502}} if first else own_words(body)

    with serving(hiccup) as url:
        document = make(project(tmp_path, {"a": member(url)}, 3))
    assert stage(document, "generate")["dropped"] == {}


# bespokelabsai/curator #135: what the answers depend on was not part of their key
def test_a_data_set_folder_whose_files_changed_is_read_anew(tmp_path: Path) -> None:
    with run_in_thread() as server:
        path = project(tmp_path, {"a": member(server.url)}, seeds=[{"dataset": "rows", "domain": "chat"}])
        for prompts in (["Name one river."], ["Name two lakes.", "Name three hills."]):
            lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
            write_text(tmp_path / "rows" / "a.jsonl", lines)
            document = make(path, replace=True)
    assert stage(document, "seeds")["out"] == 2


# Arrow and reports


# NVIDIA-NeMo/DataDesigner #131, #171: figures of an odd type crashed the report
@pytest.mark.parametrize("count", [10**30, 10**400], ids=["beyond-int64", "beyond-a-float"])
def test_an_absurd_token_count_is_no_count(tmp_path: Path, count: int) -> None:
    with serving(lambda body: said("Fine, thank you.", usage=(count, 1))) as url:
        document = make(project(tmp_path, {"a": member(url, price=PRICE)}, 1))
    assert document["members"]["a"]["uncounted"] == 1


# NVIDIA-NeMo/DataDesigner #131, #171: statistics must never kill a run
def test_a_reward_near_the_end_of_a_float_is_none(tmp_path: Path) -> None:
    def respond(body: Body) -> Any:
        return own_words(body) if "seed" in body else {"data": [{"data": [1.7e308]}]}

    with serving(respond) as url:
        panel = {"members": ["judge"], "kind": "reward"}
        document = make(project(tmp_path, {"a": member(url), "judge": member(url)}, 2, judges=[panel]))
    assert document["judges"][0]["judges"]["judge"]["states"]["parse_error"] == 2


# RUC-NLPIR/FlashRAG #132; NVIDIA-NeMo/DataDesigner #757: one bad row killed the whole run
@pytest.mark.parametrize("field", [{"name": 5}, {"reasoning_content": {"why": 1}}])
def test_a_field_of_a_message_with_a_wrong_type_costs_its_row_alone(tmp_path: Path, field: dict[str, Any]) -> None:
    turns = [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Yes."} | field,
        {"role": "user", "content": "Why?"},
    ]
    with serving(own_words) as url:
        document = make(project(tmp_path, {"a": member(url)}, [{"messages": turns}, {"prompt": "How are you?"}]))
    assert sum(document["rows"].values()) == 1
    assert stage(document, "seeds")["in"] == 2


# Messages and reasoning


# vllm-project/vllm #34625, #35296, #52640; huggingface/datatrove #496; huggingface/trl #6363
def test_reasoning_ends_in_its_column_wherever_it_came_and_is_counted(tmp_path: Path) -> None:
    replies = {
        "own": said("Four.", reasoning_content="Two and two."),
        "new": said("Four.", reasoning="Two and two."),
        "inline": said("<think>\nTwo and two.\n</think>\n\nFour."),
        "closing": said("Two and two.</think>Four."),
        "cut": said(None, "length", reasoning_content="Two and"),
        "open": said("<think>Two and"),
    }
    with serving(lambda body: replies[body["messages"][0]["content"]]) as url:
        path = project(tmp_path, {"a": member(url)}, [{"prompt": prompt} for prompt in replies], dedup={"on": "prompt"})
        document = make(path)
    kept = {row["messages"][0]["content"]: row["messages"][-1] for row in made_rows(path)}
    assert {prompt: (m["content"], m["reasoning_content"]) for prompt, m in kept.items()} == dict.fromkeys(
        ("own", "new", "inline", "closing"), ("Four.", "Two and two.")
    )
    assert stage(document, "filter")["dropped"] == {"truncated": 2}
    assert document["notes"]["reasoning_moved"] == 4
    assert document["notes"]["think_close_only"] == 1
    assert document["notes"]["content_was_null"] == 1


# NVIDIA-NeMo/Automodel #2348; meta-llama/synthetic-data-kit #76: one stage did not take what the one before had made
def test_what_gen_sft_writes_is_what_sft_reads(tmp_path: Path) -> None:
    from mopdctl.train.data import row_conversation, row_tools
    from mopdctl.train.rows import data_files, iterate_rows

    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": "tide", "at": null}'}}
    seeds = [
        {"prompt": "Look it up.", "tools": [TOOL]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Look it up."},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "High at noon."},
            ],
            "tools": [TOOL],
        },
    ]

    def respond(body: Body) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return said("At noon.", reasoning_content="The result says so.")
        return said(None, "tool_calls", tool_calls=[call], reasoning_content="I do not know it.")

    with serving(respond) as url:
        path = project(tmp_path, {"a": member(url)}, seeds, write={"validation_share": 0})
        make(path)
    (file,) = data_files(Path("made"), base=tmp_path, workspace=tmp_path / "w")
    read = [(row_conversation(row, place), row_tools(row, place)) for place, row in iterate_rows(file)]
    assert [tools for _, tools in read] == [[TOOL], [TOOL]]
    parsed = call | {"function": {"name": "look", "arguments": {"q": "tide", "at": None}}}
    first, second = (messages for messages, _ in read)
    assert first[-1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I do not know it.",
        "tool_calls": [parsed],
    }
    assert second[2] == {"role": "assistant", "content": "", "tool_calls": [parsed]}
    assert second[3] == {"role": "tool", "tool_call_id": "c1", "content": "High at noon."}
    assert second[4] == {"role": "assistant", "content": "At noon.", "reasoning_content": "The result says so."}


# Generation


# bespokelabsai/curator #135, 0.1.31: the key left out the address of the server
def test_another_server_is_another_request(tmp_path: Path) -> None:
    with run_in_thread() as one, run_in_thread() as other:
        make(project(tmp_path, {"a": member(one.url)}, 3))
        again = project(tmp_path, {"a": member(other.url)}, 3, name="more", reuse=["made"])
        assert make(again)["requests"] == 3


# vllm-project/vllm #11953: equal prompts in two shards had equal "random" answers
def test_equal_prompts_are_asked_under_seeds_of_their_own(tmp_path: Path) -> None:
    bodies: list[Body] = []
    with run_in_thread(Faults(strict_seed=True), on_request=bodies.append) as server:
        document = make(project(tmp_path, {"a": member(server.url)}, [{"prompt": "Tell a story."}] * 8))
    assert len({body["seed"] for body in bodies}) == 8
    assert stage(document, "dedup") == {"stage": "dedup", "in": 8, "out": 8, "dropped": {}}


# BerriAI/litellm #822, QwenLM/Qwen-Agent #921, guidance-ai/guidance #1504, agno-agi/agno #8009
def test_a_temperature_of_0_is_in_the_body_that_the_server_gets(tmp_path: Path) -> None:
    bodies: list[Body] = []
    with run_in_thread(on_request=bodies.append) as server:
        sampling = {"temperature": 0, "extra": {"presence_penalty": 0, "logprobs": False}}
        make(project(tmp_path, {"a": member(server.url, sampling=sampling)}, 1))
    sent = {k: v for k, v in bodies[0].items() if k not in ("model", "messages", "seed")}
    assert sent == {"temperature": 0, "presence_penalty": 0, "logprobs": False}


# NVIDIA-NeMo/DataDesigner #672: with n above 1, all choices but the first were lost
def test_several_choices_can_neither_be_asked_for_nor_come_unasked(tmp_path: Path) -> None:
    with serving(lambda body: {"choices": said("One.")["choices"] * 2}) as url:
        with pytest.raises(InputError, match="'n' has a field of its own or is set by mopdctl"):
            make(project(tmp_path, {"a": member(url, sampling={"extra": {"n": 2}})}, 1))
        path = project(tmp_path, {"a": member(url)}, 1)
        with pytest.raises(MopdctlError, match="1 of 1 answers are malformed, the first: 2 choices where 1 were asked"):
            make(path)


# meta-llama/synthetic-data-kit #54: braces in a prompt were taken for a format
def test_a_prompt_full_of_braces_reaches_members_and_judges_as_it_is(tmp_path: Path) -> None:
    prompt = 'Fill {this} in: {"question": {0}, {{x}}: "%s", {{ y }}} {% raw %}'
    bodies: list[Body] = []
    with run_in_thread(on_request=bodies.append) as server:
        members = {"a": member(server.url), "judge": member(server.url)}
        make(project(tmp_path, members, [{"prompt": prompt}], judges=JUDGES))
    asked, judged = bodies
    assert asked["messages"] == [{"role": "user", "content": prompt}]
    assert prompt in judged["messages"][0]["content"]


# bespokelabsai/curator's parse path: what could not be parsed was paid for anew by each run
def test_what_cannot_be_read_is_kept_and_not_paid_for_again(tmp_path: Path) -> None:
    calls = 0

    def respond(body: Body) -> Any:
        nonlocal calls
        calls += 1
        return said("No verdict.") if "<score>" in str(body["messages"]) else said("Fine.", finish="odd")

    with serving(respond) as url:
        path = project(tmp_path, {"a": member(url), "judge": member(url)}, 3, judges=JUDGES)
        for _ in range(2):
            with pytest.raises(MopdctlError, match="3 of 3 answers are malformed"):
                make(path)
            assert calls == 3


# allenai/open-instruct #1686; patrickfleith/datafast #1, argilla-io/distilabel #462: wrong cost, or none
def test_a_cost_is_its_fractions_of_a_dollar_and_unknown_where_a_price_is(tmp_path: Path) -> None:
    price = {"input_per_million": 0.05, "output_per_million": 0.4}
    with serving(own_words) as url:
        priced = make(project(tmp_path, {"a": member(url, price=price)}, 4))
        assert priced["cost_usd"] == pytest.approx(4 * (5 * 0.05 + 7 * 0.4) / 1e6, abs=1e-6)
        members = {"a": member(url, price=price), "b": member(url)}
        routes = {"default": {"members": {"a": 1, "b": 1}}}
        both = make(project(tmp_path, members, 8, name="both", routes=routes))
    assert both["cost_usd"] is None
    assert both["members"]["b"]["cost_usd"] is None
    assert both["members"]["a"]["cost_usd"] > 0


# argilla-io/distilabel #462, patrickfleith/datafast #1: unknown is not free
@pytest.mark.parametrize("budget", [{"max_tokens": 2000}, {"max_cost": 0.002}])
def test_a_budget_holds_where_the_server_counts_no_tokens(tmp_path: Path, budget: dict[str, Any]) -> None:
    with serving(lambda body: own_words(body) | {"usage": None}) as url:
        members = {"a": member(url, price=PRICE, sampling={"max_tokens": 100})}
        document = make(project(tmp_path, members, 20, **budget))
    assert document["stopped"] == "the budget is used up"


# argilla-io/distilabel #1174: what another run paid for is not paid for again
def test_answers_of_another_run_take_nothing_from_the_budget(tmp_path: Path) -> None:
    with run_in_thread() as server:
        members = {"a": member(server.url, sampling={"max_tokens": 60})}
        make(project(tmp_path, members, 20))
        more: dict[str, Any] = {"name": "more", "reuse": ["made"]}
        first = make(project(tmp_path, members, 40, max_tokens=300, **more))
        again = make(project(tmp_path, members, 40, max_tokens=500, **more))
    assert first["requests"] > 0
    assert again["requests"] > 0


# argilla-io/distilabel #462: the cost before running
@pytest.mark.parametrize("kind", ["rubric", "pairwise"])
def test_a_run_costs_at_most_what_its_dry_run_said(tmp_path: Path, kind: str) -> None:
    with run_in_thread() as server:
        members = {name: member(server.url, price=PRICE, sampling={"max_tokens": 60}) for name in ("a", "judge")}
        path = project(tmp_path, members, 3, samples=4, judges=[{"members": ["judge"], "kind": kind}])
        expected = dry_run(spec_of(path))
        document = make(path)
    assert document["requests"] <= expected["requests"]
    assert document["cost_usd"] <= expected["most_cost_usd"]


# NVIDIA-NeMo/DataDesigner #703, #730; oumi-ai/oumi #2516: a 429 gave up what only had to wait
def test_the_first_429_of_a_judge_that_waited_long_for_its_turn_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mopdctl.gensft.ask._PATIENCE_S", 0.3)
    verdicts = 0

    def judge(body: Body) -> Any:
        nonlocal verdicts
        verdicts += 1
        return (429, {}) if verdicts == 1 else said("Good. <score>7</score>")

    def slow(body: Body) -> Any:
        time.sleep(0.2)
        return own_words(body)

    with serving(slow) as url, serving(judge) as judging:
        members = {"a": member(url, max_concurrency=1), "judge": member(judging)}
        document = make(project(tmp_path, members, 2, judges=JUDGES))
    assert document["judges"][0]["judges"]["judge"]["states"]["ok"] == 2


# NVIDIA-NeMo/DataDesigner #757: one bad row killed the whole run
def test_a_403_for_one_prompt_costs_that_prompt_alone(tmp_path: Path) -> None:
    def moderated(body: Body) -> Any:
        flagged = "number 3." in str(body["messages"])
        return (403, {"error": {"message": "flagged by moderation"}}) if flagged else own_words(body)

    with serving(moderated) as url:
        document = make(project(tmp_path, {"a": member(url, max_concurrency=1)}))
    assert stage(document, "generate")["out"] == 5


# NVIDIA-NeMo/DataDesigner #757, #201: an error path of its own broke the run
def test_half_a_character_in_what_a_server_says_breaks_nothing(tmp_path: Path) -> None:
    refused = (400, {"error": {"message": "bad \ud83d prompt"}})
    with serving(lambda body: refused) as url, pytest.raises(MopdctlError, match="6 of 6 answers are rejected"):
        make(project(tmp_path, {"a": member(url)}))


# NVIDIA-NeMo/DataDesigner #383: a model of which every answer failed was not named
def test_a_server_of_which_no_answer_can_be_read_fails_the_run_with_the_reason(tmp_path: Path) -> None:
    odd = said("Fine.", finish="eos_token")
    with serving(lambda body: odd) as url, pytest.raises(MopdctlError, match="eos_token"):
        make(project(tmp_path, {"a": member(url)}))
    assert not (tmp_path / "w" / "datasets" / "made").exists()


# A key need not be secret: the documentation of vLLM itself says EMPTY
def test_an_answer_may_hold_the_word_that_serves_as_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", "EMPTY")
    with serving(lambda body: said("The set is EMPTY.")) as url:
        path = project(tmp_path, {"a": member(url, api_key_env="TEST_API_KEY")}, 1)
        make(path)
    assert [row["messages"][-1]["content"] for row in made_rows(path)] == ["The set is EMPTY."]


# BerriAI/litellm #24518: releases that stole credentials
def test_litellm_is_no_dependency() -> None:
    assert "litellm" not in (ROOT / "pyproject.toml").read_text("utf-8")
    sources = [*(ROOT / "mopdctl" / "gensft").rglob("*.py"), *(ROOT / "mopdctl" / "engines").rglob("*.py")]
    assert sources
    assert not any("litellm" in path.read_text("utf-8") for path in sources)


# Duplicates


# data-juicer/data-juicer #906: duplicates were only partly matched
def test_rows_in_the_validation_split_of_an_earlier_data_set_count_too(tmp_path: Path) -> None:
    with run_in_thread() as server:
        members = {"a": member(server.url)}
        first = make(project(tmp_path, members, 12, write={"validation_share": 0.5}))
        assert first["rows"]["validation"] > 0
        more: dict[str, Any] = {"name": "more", "dedup": {"against": ["made"]}}
        document = make(project(tmp_path, members, 12, reuse=["made"], **more))
    assert stage(document, "dedup")["dropped"] == {"against": 12}


# data-juicer/data-juicer #906
@pytest.mark.parametrize("near", [False, True])
def test_calls_of_an_earlier_data_set_are_found_again(tmp_path: Path, near: bool) -> None:
    seeds = [{"prompt": f"Look up {word}.", "tools": [TOOL]} for word in ("tide", "moon", "wind")]
    with run_in_thread() as server:
        members = {"a": member(server.url)}
        first = make(project(tmp_path, members, seeds, write={"validation_share": 0}))
        assert first["rows"]["train"] == 3
        more: dict[str, Any] = {"name": "more", "dedup": {"against": ["made"], "near": near}}
        document = make(project(tmp_path, members, seeds, reuse=["made"], **more))
    assert stage(document, "dedup")["dropped"] == {"against": 3}


# Configuration


# JSON is YAML, and most JSON writers escape what is not ASCII
def test_an_emoji_that_a_json_writer_escaped_is_one_character(tmp_path: Path) -> None:
    bodies: list[Body] = []
    with run_in_thread(on_request=bodies.append) as server:
        routes = {"default": {"members": {"a": 1}, "system_prompt": "Be kind \U0001f600"}}
        make(project(tmp_path, {"a": member(server.url)}, 1, routes=routes))
    assert bodies[0]["messages"][0]["content"] == "Be kind \U0001f600"


# NVIDIA-NeMo/DataDesigner #383: a misleading error in place of the one bad setting
@pytest.mark.parametrize("value", ["2024-01-01", ".nan"])
def test_a_parameter_that_json_cannot_hold_is_bad_input(tmp_path: Path, value: str) -> None:
    path = project(tmp_path, {})
    write_text(
        tmp_path / "committee.yaml",
        f"members: {{a: {{engine: fake, model: m, sampling: {{extra: {{x: {value}}}}}}}}}\n"
        "routes: {default: {members: {a: 1}}}\n",
    )
    with pytest.raises(InputError, match="extra"):
        make(path)
