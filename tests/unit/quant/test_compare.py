"""Comparisons of two small models, held against logits in float64."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import write_jsonl
from mopdctl.quant.compare import Comparing, compare
from mopdctl.quant.material import read_material
from mopdctl.runs import Workspace

ROWS = [
    {"prompt": "2+3="},
    {"messages": [{"role": "user", "content": "4+1="}, {"role": "assistant", "content": "5"}]},
    {"messages": [{"role": "user", "content": "JSON: a=b"}, {"role": "assistant", "content": '{"a": "b"}'}]},
    {"text": "the quick brown fox"},
    {"text": "what does dota have?"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "full")
    write_tiny_model(root / "other", noise=0.03)
    write_jsonl(root / "rows.jsonl", ROWS)
    return root


def compared(models: Path, other: str, *sources: str, **how: Any) -> dict[str, Any]:
    settings = {"max_new_tokens": 8, "max_length": 64} | how
    return compare(
        str(models / "full"), str(models / other), Comparing(sources, **settings), Workspace(models), base=models
    )


def test_a_model_beside_itself_differs_in_nothing(models: Path) -> None:
    found = compared(models, "full", "rows.jsonl")
    assert found["answers"]["kl_nats"] == {"mean": 0.0, "stderr": 0.0}
    assert found["answers"]["top1_agreement"] == {"mean": 1.0, "stderr": 0.0}
    assert (found["answers"]["given"], found["answers"]["own"], found["answers"]["rows"]) == (2, 1, 3)
    assert found["text"]["kl_nats"]["mean"] == 0.0
    assert found["text"]["perplexity_full"] == found["text"]["perplexity_quantized"]
    assert (found["greedy"]["ratio"], found["greedy"]["same_answer_share"], found["greedy"]["prompts"]) == (1.0, 1.0, 3)
    assert (found["not_measured"], found["dropped_rows"]) == ({}, 0)


def test_every_figure_is_that_of_whole_logits_in_float64(models: Path) -> None:
    write_jsonl(models / "given.jsonl", ROWS[1:])  # without the row that is answered by a model
    found = compared(models, "other", "given.jsonl")
    one, two = (HFModel.load(str(models / name)) for name in ("full", "other"))
    material = read_material(one, ["given.jsonl"], Workspace(models), rows=64, max_length=64, base=models)
    with torch.no_grad():
        one.model.double()
        two.model.double()
        for kind, passages in (("answers", material.answers), ("text", material.text)):
            kl, agree, nll, other_nll = [], [], [], []
            for passage in passages:
                ids = torch.tensor([passage.token_ids])
                p, q = (m.model(ids).logits[0, :-1, : m.vocab_size].log_softmax(-1) for m in (one, two))
                on = torch.tensor(passage.mask[1:]).bool()
                kl.append((p.exp() * (p - q)).sum(-1)[on])
                agree.append((p.argmax(-1) == q.argmax(-1))[on].double())
                tokens = ids[0, 1:].unsqueeze(-1)
                nll.append(-p.gather(-1, tokens)[:, 0][on])
                other_nll.append(-q.gather(-1, tokens)[:, 0][on])
            shown = found[kind]
            if kind == "text":
                assert shown["perplexity_full"] == pytest.approx(math.exp(torch.cat(nll).mean()), rel=1e-4)
                assert shown["perplexity_quantized"] == pytest.approx(math.exp(torch.cat(other_nll).mean()), rel=1e-4)
            assert shown["tokens"] == sum(map(len, kl))
            assert shown["kl_nats"]["mean"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
            assert shown["kl_nats"]["mean"] > 0.001
            assert shown["top1_agreement"]["mean"] == pytest.approx(float(torch.cat(agree).mean()))
            # Two rows: the standard error of a ratio of sums, rows as clusters.
            mean = float(torch.cat(kl).mean())
            spread = sum(float(row.sum() - mean * len(row)) ** 2 for row in kl)
            assert shown["kl_nats"]["stderr"] == pytest.approx(math.sqrt(2 * spread) / shown["tokens"], rel=1e-3)


def test_chunks_of_tokens_change_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compared(models, "other", "rows.jsonl")
    monkeypatch.setattr("mopdctl.quant.compare._CHUNK_BYTES", 4 * 600)
    for kind in ("answers", "text"):
        for name, figure in compared(models, "other", "rows.jsonl")[kind].items():
            assert figure == pytest.approx(whole[kind][name], rel=1e-5)


def test_lengths_are_those_of_each_models_own_greedy_answers(models: Path) -> None:
    found = compared(models, "other", "rows.jsonl")["greedy"]
    lengths = []
    for name in ("full", "other"):
        model = HFModel.load(str(models / name))
        material = read_material(model, ["rows.jsonl"], Workspace(models), rows=64, max_length=64, base=models)
        counts = []
        for prompt in material.prompts:
            ids = torch.tensor([prompt])
            for _ in range(8):
                ids = torch.cat([ids, model.model(ids).logits[:, -1:, : model.vocab_size].argmax(-1)], 1)
                if int(ids[0, -1]) in model.eos_ids:
                    break
            counts.append(ids.shape[1] - len(prompt))
        lengths.append(sum(counts) / len(counts))
    assert (found["tokens_full"], found["tokens_quantized"]) == tuple(lengths)
    assert found["ratio"] == lengths[1] / lengths[0]
    assert found["same_answer_share"] < 1


def test_what_no_source_holds_is_null_with_a_reason(models: Path) -> None:
    (models / "held-out.txt").write_text("a text of its own. " * 20)
    text = compared(models, "other", "held-out.txt")
    assert (text["answers"], text["greedy"]) == (None, None)
    assert set(text["not_measured"]) == {"answers", "greedy"}
    assert text["text"]["rows"] > 1  # windows of 64 tokens
    write_jsonl(models / "prompts.jsonl", ROWS[:1])
    prompts = compared(models, "other", "prompts.jsonl")
    assert prompts["text"] is None
    assert prompts["not_measured"] == {"text": "no source holds held-out text (rows of `text`, or a .txt file)"}
    assert prompts["answers"]["kl_nats"]["stderr"] is None  # one row
    json.dumps([text, prompts], allow_nan=False)


def test_rows_are_cut_and_what_has_nothing_left_is_counted(models: Path) -> None:
    long = {"role": "user", "content": "x" * 80}
    rows = [
        {"messages": [long, {"role": "assistant", "content": "y"}]},
        {"prompt": "x" * 80},
        {"text": "a"},
        {"text": "fox " * 40},
    ]
    write_jsonl(models / "long.jsonl", rows)
    found = compared(models, "full", "long.jsonl", max_length=16)
    assert (found["dropped_rows"], found["text"]["tokens"]) == (3, 15)
    assert compared(models, "full", "rows.jsonl", rows=1)["answers"]["rows"] == 1


def test_rows_are_spread_over_a_file_that_holds_more(models: Path) -> None:
    # The first rows of a file of several domains are often all of one.
    write_jsonl(models / "many.jsonl", [{"prompt": word} for word in ("a", "b", "c", "d", "e", "f", "g", "h")])
    write_jsonl(models / "few.jsonl", [{"prompt": word} for word in ("a", "e")])
    model = HFModel.load(str(models / "full"))
    many, few = (
        read_material(model, [name], Workspace(models), rows=2, max_length=64, base=models).prompts
        for name in ("many.jsonl", "few.jsonl")
    )
    assert many == few


def test_a_rollout_store_gives_its_prompts_and_answers_as_they_are_stored(
    models: Path, distil: Callable[..., Any], teachers_document: Callable[..., dict[str, Any]], tiny: Path
) -> None:
    from mopdctl.store.store import Store
    from mopdctl.train.rows import spread

    workspace = models / "workspace"
    run = distil(teachers_document(steps=1), workspace)
    model = HFModel.load(str(tiny / "models" / "student"))
    space = Workspace(workspace)
    material = read_material(model, ["merged"], space, rows=5, max_length=128, base=models)
    stored = list(Store(space.rollouts("merged")).scan())
    samples = [stored[number] for number in spread(len(stored), 5)]
    assert [passage.token_ids for passage in material.answers] == [tuple(s.tokens.tolist()) for s in samples]
    assert [passage.pair[1] for passage in material.answers] == [tuple(s.response_ids.tolist()) for s in samples]
    assert material.prompts == tuple(dict.fromkeys(tuple(s.prompt_ids.tolist()) for s in samples))
    assert not material.unanswered
    assert run.rollouts


def test_bad_sources_and_foreign_tokenizers_are_refused(
    models: Path, make_tokenizer: Any, write_tiny_model: Any
) -> None:
    with pytest.raises(InputError, match="'absent': neither a file nor a rollout store"):
        compared(models, "other", "absent")
    write_jsonl(models / "odd.jsonl", [{"answer": 3}])
    with pytest.raises(InputError, match=r"odd.jsonl:1: has neither 'messages' nor 'prompt'"):
        compared(models, "other", "odd.jsonl")
    write_tiny_model(models / "foreign", tokenizer=make_tokenizer(chat_template="x"))
    with pytest.raises(InputError, match=r"differs from .* in vocabulary"):
        compared(models, "foreign", "rows.jsonl")


def test_a_quantized_checkpoint_is_compared_by_its_exported_bytes(models: Path) -> None:
    from safetensors.torch import load_file, save_file

    from mopdctl.config.quant import QuantConfig
    from mopdctl.engines.fp4 import dequantized, stored_modules
    from mopdctl.engines.weights import open_tensors
    from mopdctl.quant.run import quantize_model

    config = QuantConfig(model=str(models / "full"), name="nvfp4", method="max")
    folder = quantize_model(config, Workspace(models / "workspace"), base=models)
    found = compared(models, str(folder), "rows.jsonl")
    # Its twin holds the dequantized values as plain weights.
    twin = models / "twin"
    shutil.copytree(models / "full", twin)
    tensors = load_file(twin / "model.safetensors")
    stored = open_tensors(str(folder))
    for name, module in stored_modules(stored).items():
        tensors[f"{name}.weight"] = dequantized(stored, module, torch.float32)
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    assert compared(models, "twin", "rows.jsonl") == found
    assert 0 < found["text"]["kl_nats"]["mean"] < 1
