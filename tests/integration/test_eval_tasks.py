"""The tasks of the tiny world and `mopdctl eval`, with the real lm-eval and a tiny random model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mopdctl.errors import InputError, MopdctlError
from mopdctl.evals.run import run_eval
from mopdctl.evals.scores import read_scores
from mopdctl.runs import Workspace, read_card, shipped
from mopdctl.world.domains import DOMAINS

ROOT = Path(__file__).resolve().parents[2]

every_domain = pytest.mark.parametrize("domain", DOMAINS)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Holds a random model `init`, and `bos`: the same with a tokenizer that would put a token before every text."""
    from tokenizers.processors import TemplateProcessing

    from mopdctl.world.model import write_initial_model
    from mopdctl.world.tokenizer import build_tokenizer

    space = Workspace(tmp_path_factory.mktemp("workspace"))
    tokenizer = build_tokenizer()
    write_initial_model(space.checkpoint("init"), tokenizer, seed=0)
    shutil.copytree(space.checkpoint("init"), space.checkpoint("bos"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.convert_tokens_to_ids("<|system|>"))]
    )
    tokenizer.save_pretrained(space.checkpoint("bos"))
    shutil.copytree(space.checkpoint("init"), space.checkpoint("plain"))
    (space.checkpoint("plain") / "chat_template.jinja").unlink()
    return space


@pytest.fixture(scope="module")
def tasks() -> dict[str, Any]:
    from mopdctl.evals.harness import load_tasks

    return {name: task for entry in load_tasks(list(DOMAINS), [shipped("tasks")]) for name, task in entry.tasks.items()}


def harness_model(workspace: Workspace, name: str) -> Any:
    from mopdctl.evals.harness import HarnessModel

    path = str(workspace.checkpoint(name))
    return HarnessModel(path, batch_size=8, chat_template=True, on_progress=lambda done, total: None)


def prompts(task: Any, model: Any, limit: int) -> list[str]:
    task.set_fewshot_seed(0)
    task.build_all_requests(
        limit=limit, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=model.apply_chat_template
    )
    return [instance.args[0] for instance in task.instances]


# ------------------------------------------------------------------------------------------------------------ the tasks


@every_domain
def test_gold_answers_score_one_and_wrong_ones_zero(tasks: dict[str, Any], domain: str) -> None:
    task, documents = tasks[domain], list(tasks[domain].eval_docs)
    for document, other in zip(documents, documents[1:] + documents[:1], strict=True):
        assert set(task.process_results(document, [document["target"]]).values()) == {1.0}
        wrong = [document["target"] + "x", "", *({other["target"]} - {document["target"]})]
        assert {task.process_results(document, [response])["exact_match"] for response in wrong} == {0.0}


def test_a_model_that_always_abstains_is_never_wrong_and_seldom_right(tasks: dict[str, Any]) -> None:
    lookup = tasks["lookup"]
    found = [lookup.process_results(document, ["unknown"]) for document in lookup.eval_docs]
    unanswerable = [document["target"] == "unknown" for document in lookup.eval_docs]
    assert {row["non_hallucination"] for row in found} == {1.0}
    assert [row["exact_match"] for row in found] == [float(each) for each in unanswerable]
    assert 0.2 < sum(unanswerable) / len(found) < 0.3


def test_an_answer_where_there_is_none_is_a_hallucination(tasks: dict[str, Any]) -> None:
    lookup = tasks["lookup"]
    for document in list(lookup.eval_docs)[:100]:
        for response in document["wrong"]:
            assert lookup.process_results(document, [response]) == {"exact_match": 0.0, "non_hallucination": 0.0}


@every_domain
def test_unusable_reference_is_no_score(tasks: dict[str, Any], domain: str) -> None:
    document = tasks[domain].eval_docs[0] | {"reference": "null"}
    with pytest.raises(InputError, match="reference"):
        tasks[domain].process_results(document, [document["target"]])


@every_domain
def test_answers_have_room(tasks: dict[str, Any], workspace: Workspace, domain: str) -> None:
    task, model = tasks[domain], harness_model(workspace, "init")
    room = task.config.generation_kwargs["max_gen_toks"]
    assert room >= max(len(document["target"].encode()) for document in task.eval_docs) + 8
    longest = max(len(model.tok_encode(prompt)) for prompt in prompts(task, model, 500))
    assert longest + room <= model.max_length  # else lm-eval would cut off the beginning of a prompt


@pytest.mark.parametrize("name", ["init", "bos"])
@every_domain
def test_prompts_are_those_of_training(tasks: dict[str, Any], workspace: Workspace, domain: str, name: str) -> None:
    from mopdctl.engines.hf import HFModel
    from mopdctl.train.data import prompt_token_ids

    trained, evaluated = HFModel.load(str(workspace.checkpoint(name))), harness_model(workspace, name)
    texts = prompts(tasks[domain], evaluated, 100)
    for text, document in zip(texts, tasks[domain].eval_docs, strict=False):
        messages = json.loads(document.get("messages") or "null") or [{"role": "user", "content": document["prompt"]}]
        tools = json.loads(document["tools"]) if document["tools"] else None
        expected = prompt_token_ids(trained, messages, tools, {})
        assert evaluated.tok_batch_encode([text])[0][0].tolist() == expected == evaluated.tok_encode(text)
        assert (evaluated.tokenizer(text)["input_ids"] == expected) == (name == "init")


def test_prompts_of_a_batch_are_padded_on_the_left(tasks: dict[str, Any], workspace: Workspace) -> None:
    model = harness_model(workspace, "init")
    texts = prompts(tasks["structured"], model, 8)
    ids, mask = model.tok_batch_encode(texts)
    assert [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)] == [*map(model.tok_encode, texts)]


def test_answers_are_those_of_our_own_sampler(tasks: dict[str, Any], workspace: Workspace) -> None:
    from mopdctl.engines.base import SampleRequest
    from mopdctl.engines.hf import HFModel

    model, task = harness_model(workspace, "init"), tasks["lookup"]
    requests = [
        SampleRequest(text, tuple(model.tok_encode(text)), task.config.generation_kwargs["max_gen_toks"], 0)
        for text in prompts(task, model, 12)
    ]
    own = HFModel(model.model, model.tokenizer).sample(requests, temperature=0.0)
    assert model.generate_until(task.instances) == [model.tok_decode(list(c.token_ids)) for c in own]


def test_tools_stand_in_the_prompt(tasks: dict[str, Any], workspace: Workspace) -> None:
    for text, document in zip(
        prompts(tasks["tools"], harness_model(workspace, "init"), 20), tasks["tools"].eval_docs, strict=False
    ):
        names = [tool["function"]["name"] for tool in json.loads(document["tools"])]
        assert names
        assert all(name in text for name in names)


def test_results_of_tools_stand_in_the_prompt(tasks: dict[str, Any], workspace: Workspace) -> None:
    texts = prompts(tasks["errands"], harness_model(workspace, "init"), 50)
    for text, document in zip(texts, tasks["errands"].eval_docs, strict=False):
        messages = json.loads(document["messages"])
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert text.count("<|tool|>") == len(results) == text.count("<tool_call>")
        assert text.endswith((f"<|tool|>{results[-1]}" if results else document["prompt"]) + "<|end|><|assistant|>")


def test_prompt_fingerprint_knows_sources_but_no_paths(tasks: dict[str, Any], tmp_path: Path) -> None:
    from mopdctl.evals.harness import load_tasks, prompt_fingerprint

    def copied(to: str, old: str = "", new: str = "") -> str:
        shutil.copytree(shipped("tasks"), tmp_path / to / "tasks")
        shutil.copytree(shipped("sample_data"), tmp_path / to / "sample_data")
        code = tmp_path / to / "tasks" / "utils.py"
        code.write_text(code.read_text("utf-8").replace(old, new) if old else code.read_text("utf-8"), "utf-8")
        (entry,) = load_tasks(["tools"], [tmp_path / to / "tasks"])
        return prompt_fingerprint(entry.tasks["tools"], chat_template=True)

    here = prompt_fingerprint(tasks["tools"], chat_template=True)
    assert copied("there") == here
    assert copied("changed", '"role": "user"', '"role": "tool"') != here
    assert prompt_fingerprint(tasks["tools"], chat_template=False) != here
    assert len({prompt_fingerprint(tasks[domain], chat_template=True) for domain in DOMAINS}) == 2


# ------------------------------------------------------------------------------------------------------------- run_eval


def leftovers(workspace: Workspace) -> list[str]:
    return sorted(path.name for path in (workspace.root / "evals").glob("*"))


@pytest.fixture
def own(workspace: Workspace, tmp_path: Path) -> Workspace:
    """A workspace without evaluations."""
    (tmp_path / "checkpoints").symlink_to(workspace.root / "checkpoints")
    return Workspace(tmp_path)


def test_limits_by_task_make_one_evaluation(own: Workspace) -> None:
    seen: list[tuple[int, int]] = []
    folder = run_eval(
        "one",
        "init",
        ["arithmetic", "lookup", "tools"],
        own,
        limit={"arithmetic": 3, "lookup": 2, "tools": 3},
        batch_size=2,
        seed=7,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    found, card = read_scores(folder), read_card(folder)
    assert {s.benchmark: (s.n, s.identity["limit"]) for s in found.scores} == {
        "arithmetic": (3, 3),
        "lookup": (2, 2),
        "tools": (3, 3),
    }
    assert [(score.benchmark, score.metric) for score in found.scores] == [
        ("arithmetic", "exact_match"),
        ("tools", "exact_match"),
        ("lookup", "exact_match"),  # the first of a task is the one that recovery takes
        ("lookup", "non_hallucination"),
    ]
    for score in found.scores:
        values = found.samples[score.benchmark, score.metric, "none"].values()
        assert score.score == pytest.approx(sum(v or 0 for v in values) / len(values))
        assert (score.filter, score.higher_is_better) == ("none", True)
        assert score.identity["generation"]["until"] == ["<|end|>"]
    assert [(done, total) for done, total in seen if done in (0, total)] == [(0, 6), (6, 6), (0, 2), (2, 2)]
    assert len(list((folder / "lm_eval").glob("results_*.json"))) == 2
    assert len(list((folder / "lm_eval").glob("samples_*.jsonl"))) == 3
    assert (card["model"], card["device"], card["dtype"], card["batch_size"]) == ("init", "cpu", "float32", 2)
    assert (card["seeds"]["torch"], card["warnings"], card["documents"]["tools"]["effective"]) == (7, [], 3)
    assert leftovers(own) == ["one"]


def test_share_of_right_answers_is_the_score(own: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    from mopdctl.evals.harness import HarnessModel

    def three_of_four(self: Any, requests: Any, disable_tqdm: bool = True) -> list[str]:
        return [request.doc["target"] if request.doc_id % 4 else "?" for request in requests]

    monkeypatch.setattr(HarnessModel, "generate_until", three_of_four)
    scores = read_scores(run_eval("init", "init", list(DOMAINS), own, limit=8)).scores
    scores = [score for score in scores if score.metric == "exact_match"]
    assert {score.benchmark: score.score for score in scores} == dict.fromkeys(DOMAINS, 75)
    assert {round(score.stderr or 0, 3) for score in scores} == {round(100 * (0.75 * 0.25 / 7) ** 0.5, 3)}


def test_same_evaluation_is_left_and_another_replaced_only_by_force(own: Workspace) -> None:
    notes: list[str] = []
    folder = run_eval("init", "init", ["arithmetic"], own, limit=2, on_note=notes.append)
    before = (folder / "scores.json").stat().st_mtime_ns
    assert notes == []
    run_eval("init", "init", ["arithmetic"], own, limit=2, on_note=notes.append)
    assert "left as it is" in notes[0]
    assert (folder / "scores.json").stat().st_mtime_ns == before
    with pytest.raises(InputError, match=r"limits.* was .*--force"):
        run_eval("init", "init", ["arithmetic"], own, limit=3)
    with pytest.raises(InputError, match="did you mean 'arithmetic'"):
        run_eval("init", "init", ["arithmetc"], own, limit=3)
    with pytest.raises(InputError, match=r"model was "):
        run_eval("init", "bos", ["arithmetic"], own, limit=2)
    run_eval("init", "init", ["arithmetic"], own, limit=3, force=True)
    assert read_scores(folder).scores[0].n == 3


@pytest.mark.parametrize("method", ["save_results_aggregated", "save_results_samples"])
def test_results_that_were_not_written_are_a_failure(
    own: Workspace, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    import logging

    from lm_eval.loggers import EvaluationTracker

    def warn(self: Any, *_: Any, **__: Any) -> None:
        self.date_id = "never"
        logging.getLogger("lm_eval").warning("Could not save")

    monkeypatch.setattr(EvaluationTracker, method, warn)
    notes: list[str] = []
    with pytest.raises(MopdctlError, match=r"wrote 0 results files|did not write its samples") as failure:
        run_eval("init", "init", ["arithmetic"], own, limit=2, on_note=notes.append)
    assert failure.value.exit_code == 1
    assert notes == ["lm-eval: Could not save"]
    assert leftovers(own) == []


def test_interrupted_evaluation_leaves_nothing(own: Workspace) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_eval("init", "init", ["arithmetic"], own, limit=2, on_progress=interrupt)
    assert leftovers(own) == []


def test_tools_need_a_chat_template_and_other_tasks_do_not(own: Workspace) -> None:
    with pytest.raises(InputError, match="chat template"):
        run_eval("plain", "plain", ["tools"], own, limit=2)
    assert leftovers(own) == []
    (score,) = read_scores(run_eval("plain", "plain", ["arithmetic"], own, limit=2)).scores
    assert score.identity["chat_template"] is None
    (other,) = read_scores(run_eval("init", "init", ["arithmetic"], own, limit=2)).scores
    assert other.identity["chat_template"]
    assert other.identity["prompt"] != score.identity["prompt"]


@pytest.mark.parametrize(
    ("tasks", "limit", "said"),
    [
        ([], None, "none given"),
        (["arithmetic"], 0, "from 1"),
        (["arithmetic"], {"lookup": 2}, "lookup"),
    ],
)
def test_unusable_requests(own: Workspace, tasks: list[str], limit: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        run_eval("init", "init", tasks, own, limit=limit)


def test_unknown_task_names_the_nearest(own: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.tasks

    from mopdctl.evals import harness

    def without_defaults(**options: Any) -> Any:  # indexing the thousands of tasks of lm-eval takes half a minute
        return lm_eval.tasks.TaskManager(**options | {"include_defaults": False})

    monkeypatch.setattr(harness, "TaskManager", without_defaults)
    with pytest.raises(InputError, match="did you mean 'structured'"):
        run_eval("init", "init", ["strucured"], own)


# ------------------------------------------------------------------------------------- tasks of a user, of other kinds

USER_TASKS = {
    "utils.py": """
from datasets import Dataset
from mopdctl.errors import InputError

def documents(**_):
    return {"test": Dataset.from_list([{"q": f"{i} or more?", "gold": i % 2, "a": f"{i}"} for i in range(6)])}

def odd(doc, results):
    return {"nan_acc": float("nan"), "loss": 0.5}
""",
    "choice.yaml": """
task: choice
custom_dataset: !function utils.documents
test_split: test
output_type: multiple_choice
doc_to_text: q
doc_to_target: gold
doc_to_choice: ["no", "yes"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1}
""",
    "filtered.yaml": """
task: filtered
custom_dataset: !function utils.documents
test_split: test
output_type: generate_until
doc_to_text: q
doc_to_target: a
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 4}
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - {name: number, filter: [{function: regex, regex_pattern: "([0-9]+)"}, {function: take_first}]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1}
""",
    "odd.yaml": """
task: odd
custom_dataset: !function utils.documents
test_split: test
output_type: generate_until
doc_to_text: q
doc_to_target: a
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 250}
process_results: !function utils.odd
metric_list:
  - {metric: nan_acc, aggregation: mean, higher_is_better: true}
  - {metric: loss, aggregation: mean, higher_is_better: false}
metadata: {version: 1}
""",
    "group.yaml": """
group: pair
task: [choice, filtered]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
metadata: {version: 3}
""",
}


@pytest.fixture(scope="module")
def user_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    for name, text in USER_TASKS.items():
        (folder / name).write_text(text, "utf-8")
    return folder


def test_groups_filters_and_numbers_that_are_none(own: Workspace, user_tasks: Path) -> None:
    folder = run_eval("init", "init", ["pair", "odd"], own, include=[user_tasks], limit=2)
    found = read_scores(folder)
    scores = {(s.benchmark, s.metric, s.filter): s for s in found.scores}
    assert set(scores) == {
        ("choice", "acc", "none"),
        ("filtered", "exact_match", "whole"),
        ("filtered", "exact_match", "number"),
        ("odd", "nan_acc", "none"),
        ("odd", "loss", "none"),
        ("pair", "acc", "none"),
    }
    assert scores["pair", "acc", "none"].score == scores["choice", "acc", "none"].score
    assert (scores["odd", "nan_acc", "none"].score, scores["odd", "nan_acc", "none"].reason) == (
        None,
        "not finite (nan)",
    )
    assert (scores["odd", "loss", "none"].score, scores["odd", "loss", "none"].higher_is_better) == (0.5, False)
    assert {len(values) for values in found.samples.values()} == {2}
    assert any("truncat" in warning.lower() for warning in read_card(folder)["warnings"])


def test_task_asked_for_twice_or_defined_twice(own: Workspace, user_tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="part of 'pair' and of 'choice'"):
        run_eval("init", "init", ["pair", "choice"], own, include=[user_tasks], limit=2)
    (tmp_path / "more").mkdir()
    shutil.copy(user_tasks / "choice.yaml", tmp_path / "more" / "arithmetic.yaml")
    text = (tmp_path / "more" / "arithmetic.yaml").read_text("utf-8")
    (tmp_path / "more" / "arithmetic.yaml").write_text(text.replace("task: choice", "task: arithmetic"), "utf-8")
    with pytest.raises(InputError, match="rename one"):
        run_eval("init", "init", ["arithmetic"], own, include=[tmp_path / "more"], limit=2)
    with pytest.raises(InputError, match="no such folder"):
        run_eval("init", "init", ["arithmetic"], own, include=[tmp_path / "absent"], limit=2)


# ---------------------------------------------------------------------------------------------------------- the command


def command(workspace: Workspace, *arguments: str) -> Any:
    import typer
    from typer.testing import CliRunner

    from mopdctl.cli.evaluate import evaluate

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(evaluate)
    return CliRunner().invoke(app, [*arguments, "--workspace", str(workspace.root)])


def test_dry_run_shows_the_plan_and_writes_nothing(own: Workspace) -> None:
    done = command(own, "init", "--tasks", "tools, lookup", "--limit", "3", "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tasks"] == {"tools": 3, "lookup": 3}
    assert not (own.root / "evals").exists()


def test_scores_are_the_result(own: Workspace) -> None:
    done = command(own, "trial", "--model", "init", "--tasks", "lookup", "--limit", "2")
    assert done.exit_code == 0, done.output
    assert [line.split()[:4] for line in done.stdout.splitlines()] == [
        ["task", "metric", "n", "score"],
        ["lookup", "exact_match", "2", "0.00"],
        ["lookup", "non_hallucination", "2", "0.00"],
    ]
    again = command(own, "trial", "--model", "init", "--tasks", "lookup", "--limit", "2", "--json")
    document = json.loads(again.stdout)
    assert (document["evaluation"], document["reused"], document["scores"][0]["n"]) == ("trial", True, 2)
    assert "left as it is" in again.stderr


@pytest.mark.slow
def test_command_works_from_another_folder(own: Workspace, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    options = ["--tasks", "arithmetic,tools", "--limit", "2", "--json", "--workspace", str(own.root)]
    done = subprocess.run(
        [sys.executable, "-m", "mopdctl", "eval", "init", *options],
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(s["benchmark"], s["n"]) for s in document["scores"]] == [("arithmetic", 2), ("tools", 2)]
    assert Path(document["folder"]) == own.evaluation("init")
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert "\r" not in done.stderr
