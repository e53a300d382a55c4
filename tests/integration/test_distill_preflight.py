"""What is checked before the first step: that every teacher reads the student's tokens as the student wrote them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.plan import plan_distill
from mopdctl.distill.run import run_distill
from mopdctl.distill.teachers import load_teachers
from mopdctl.engines.base import SampleRequest
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.runs import Workspace

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]
Write = Callable[..., Path]


def refusal(document: dict[str, Any], workspace: Path) -> str:
    """The message with which a run is refused; nothing may have been written."""
    with pytest.raises(InputError) as caught:
        run_distill(TeachersFile.model_validate(document), Workspace(workspace), base=workspace.parent)
    assert not workspace.exists()
    return str(caught.value)


def refusal_of_tokens(document: dict[str, Any], workspace: Path) -> str:
    """The same, said by a dry run too."""
    config, message = TeachersFile.model_validate(document), refusal(document, workspace)
    with pytest.raises(InputError) as caught:
        plan_distill(config, Workspace(workspace), base=workspace.parent, dry_run=True)
    assert str(caught.value) == message
    return message


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text("utf-8"))
    change(document)
    path.write_text(json.dumps(document), "utf-8")


@pytest.fixture
def other_tools(tiny: Path, tmp_path: Path, teachers_document: Document) -> tuple[Path, dict[str, Any]]:
    """A copy of the teacher for tools that a test may change, and a document that names it."""
    folder = shutil.copytree(tiny / "models" / "tools", tmp_path / "other")
    document = teachers_document()
    document["teachers"]["tools"]["model"] = str(folder)
    return folder, document


# --------------------------------------------------------------------------------------------------- padded embeddings


@pytest.fixture(scope="module")
def padded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher for tools with 24 more rows in its embedding, whose logits would win wherever they are let in."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(tiny / "models" / "tools", tmp_path_factory.mktemp("padded") / "tools")
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 24, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[size:] = 100 * torch.randn(24, 32, generator=torch.Generator())
    model.save_pretrained(folder)
    return Path(folder)


def test_a_padded_embedding_changes_nothing(distil: Distil, teachers_document: Document, padded: Path) -> None:
    document = teachers_document(objective="exact")
    plain = distil(document)
    document["teachers"]["tools"]["model"] = str(padded)
    other = distil(document)
    assert other.metrics == plain.metrics
    assert other.rollouts == plain.rollouts
    assert all(other.weights[name].equal(weight) for name, weight in plain.weights.items())


def test_padded_rows_are_never_sampled_nor_given_probability(tiny: Path, padded: Path) -> None:
    plain, other = HFModel.load(str(tiny / "models" / "tools")), HFModel.load(str(padded))
    assert other.model.config.vocab_size == other.vocab_size + 24 == plain.model.config.vocab_size + 24
    requests = [SampleRequest(str(i), (3, 4 + i), 16, i) for i in range(8)]
    assert other.sample(requests, temperature=1.0) == plain.sample(requests, temperature=1.0)
    pairs = [((3, 4 + i), tuple(range(10 + i, 20 + i))) for i in range(8)]
    assert other.score(pairs) == plain.score(pairs)


def test_an_embedding_with_fewer_rows_than_tokens_is_refused(
    write_tiny_model: Write, tmp_path: Path, teachers_document: Document
) -> None:
    document = teachers_document()
    document["teachers"]["tools"]["model"] = str(write_tiny_model(tmp_path / "short", vocab_size=500))
    message = refusal(document, tmp_path / "workspace")
    assert "teacher 'tools'" in message
    assert "500" in message


# ---------------------------------------------------------------------------------------------------------- tokenizers


def test_a_permuted_vocabulary_of_the_same_size_is_refused(
    other_tools: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, document = other_tools

    def swap(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["b"], vocabulary["d"] = vocabulary["d"], vocabulary["b"]

    edit_json(folder / "tokenizer.json", swap)
    assert refusal_of_tokens(document, tmp_path / "workspace") == (
        f"teacher 'tools' ({folder}): differs from student {document['student']} in vocabulary (512 and 512 tokens, of "
        "the same size but in another order); a teacher must read the student's tokens as the student wrote them"
    )


def test_another_size_of_vocabulary_is_refused(other_tools: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, document = other_tools
    added = {"id": 512, "content": "<x>", "special": False, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    edit_json(folder / "tokenizer.json", lambda t: t["added_tokens"].append(added))
    assert "in vocabulary (512 and 513 tokens); a" in refusal_of_tokens(document, tmp_path / "workspace")


def test_other_end_tokens_are_refused_with_their_ids(other_tools: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, document = other_tools
    edit_json(folder / "generation_config.json", lambda c: c.update(eos_token_id=[1, 7]))
    assert "in end tokens ([1] and [1, 7]); a" in refusal_of_tokens(document, tmp_path / "workspace")


def test_another_chat_template_is_refused(other_tools: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, document = other_tools
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text("utf-8").replace("<|assistant|>", "<|assistant|> "), "utf-8")
    assert "in chat template; a" in refusal_of_tokens(document, tmp_path / "workspace")


def test_all_differences_are_named_at_once(other_tools: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, document = other_tools
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(pad_token="<|system|>"))
    edit_json(folder / "generation_config.json", lambda c: c.update(eos_token_id=[1, 7]))
    (folder / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    message = refusal_of_tokens(document, tmp_path / "workspace")
    assert "in special tokens (pad_token); end tokens ([1] and [1, 7]); chat template; a" in message


# -------------------------------------------------------------------------------------------- checkpoints and contexts


def test_a_teacher_that_is_not_there_is_named_with_what_is(teachers_document: Document, tmp_path: Path) -> None:
    document = teachers_document()
    document["teachers"]["tools"]["model"] = "toolz"
    message = refusal(document, tmp_path / "workspace")
    place = tmp_path / "workspace"
    assert message == (
        f"teacher 'tools': model 'toolz': neither a folder, a hub id, nor a checkpoint in {place} (has: none)"
    )


def test_a_folder_without_a_model_is_refused(teachers_document: Document, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    document = teachers_document()
    document["teachers"]["tools"]["model"] = "empty"
    assert refusal(document, tmp_path / "workspace").startswith(f"model {tmp_path / 'empty'}: ")


def test_a_checkpoint_that_was_cut_short_is_refused(other_tools: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, document = other_tools
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    message = refusal(document, tmp_path / "workspace")
    assert message.startswith(f"model {folder}: ")
    assert "\n" not in message


def test_a_prompt_must_fit_into_every_teacher(
    write_tiny_model: Write, tmp_path: Path, teachers_document: Document
) -> None:
    document = teachers_document()
    document["teachers"]["tools"]["model"] = str(write_tiny_model(tmp_path / "short", max_position_embeddings=40))
    message = refusal(document, tmp_path / "workspace")
    assert "prompt of " in message
    assert "context of 40" in message


def test_aliases_of_one_checkpoint_share_one_copy(tiny: Path, tmp_path: Path, teachers_document: Document) -> None:
    document = teachers_document()
    shared = document["teachers"]["arithmetic"]
    (tmp_path / "link").symlink_to(shared["model"])
    for alias, model in [("structured", shared["model"] + "/../arithmetic/"), ("tools", "link")]:
        document["teachers"][alias]["model"] = model
    document["teachers"]["half"] = shared | {"dtype": "bfloat16", "domains": ["other"]}
    student = HFModel.load(document["student"])
    config = TeachersFile.model_validate(document)
    teachers = load_teachers(config, student, Workspace(tmp_path / "workspace"), base=tmp_path)
    assert teachers["arithmetic"] is teachers["structured"] is teachers["tools"]
    assert teachers["half"] is not teachers["arithmetic"]
    assert {str(m.model.dtype) for m in teachers.by_alias.values()} == {"torch.float32", "torch.bfloat16"}


def test_a_teacher_may_be_of_another_architecture(
    write_tiny_model: Write, tmp_path: Path, teachers_document: Document, distil: Distil
) -> None:
    document = teachers_document(objective="exact")
    larger = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "tie_word_embeddings": False}
    document["teachers"]["tools"]["model"] = str(write_tiny_model(tmp_path / "larger", **larger))
    assert distil(document).metrics[0]["distill/kl_exact_nats"]["tools"] > 0.1


@pytest.mark.parametrize("ended", [True, False])
def test_a_dry_run_says_that_the_name_is_taken(teachers_document: Document, tmp_path: Path, ended: bool) -> None:
    config = TeachersFile.model_validate(teachers_document(steps=1))
    run_distill(config, Workspace(tmp_path), base=tmp_path)
    if not ended:
        shutil.rmtree(tmp_path / "checkpoints")
    plan_distill(config, Workspace(tmp_path), base=tmp_path, dry_run=True)
    other = TeachersFile.model_validate(teachers_document(steps=1, learning_rate=0.5))
    with pytest.raises(InputError, match=r"train\.learning_rate was "):
        plan_distill(other, Workspace(tmp_path), base=tmp_path, dry_run=True)
