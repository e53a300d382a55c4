"""A quantized checkpoint beside the one that it was made of: how far its distributions are, and its own answers.

Both are loaded one after the other from what is on disk: what is measured are the exported bytes. Of the first, hidden
states and head are kept; of no model are the logits of more than a few hundred tokens in memory.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopdctl.engines.base import Completion, SampleRequest, stream_seed
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import TokenizerIdentity, differences, identify
from mopdctl.errors import InputError
from mopdctl.objective.head import Head, head_logits
from mopdctl.quant.material import Material, Passage, read_material
from mopdctl.runs import Workspace

_CHUNK_BYTES = 1 << 25
"""Of one matrix of logits; some five are held at a time."""


@dataclass(frozen=True, slots=True)
class Comparing:
    """How to compare."""

    sources: tuple[str, ...]
    """See `read_material`."""
    rows: int = 64
    """Of each source."""
    max_length: int = 1024
    """Tokens at which rows are cut."""
    max_new_tokens: int = 256
    """Budget of the greedy answers."""
    dtype: str = "float32"
    batch_size: int = 16


@dataclass(frozen=True, slots=True)
class _Side:
    """What is kept of a model."""

    tokenizer: TokenizerIdentity
    vocab_size: int
    head: Head
    greedy: list[Completion]
    answers: list[Tensor]
    """Hidden states [N, H] per passage."""
    text: list[Tensor]


def compare(
    full: str,
    quantized: str,
    how: Comparing,
    workspace: Workspace,
    *,
    base: Path,
    on_note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Figures of two checkpoints on the same tokens, as JSON.

    KL is KL(full || quantized) per token in nats, over all tokens of a vocabulary at temperature 1; its mean is over
    tokens, its standard error over rows. What could not be measured is in `not_measured`, with the reason.

    Args:
        full: the checkpoint before quantization: a folder or hub id.
        quantized: the one made of it.
        how: rows, lengths and precision.
        workspace: where rollout stores are.
        base: folder that paths of sources begin at.
        on_note: gets one line per step of the work.

    Raises:
        InputError: for bad input, checkpoints that do not read the same tokens, and a head that is more than a product.
    """
    on_note(f"reads {full}")
    one = HFModel.load(full, dtype=how.dtype, batch_size=how.batch_size)
    material = read_material(one, how.sources, workspace, rows=how.rows, max_length=how.max_length, base=base)
    if not (material.prompts or material.text):
        raise InputError(f"{', '.join(how.sources)}: nothing to compare on; {material.dropped} rows dropped")
    greedy = _greedy(one, material, how)
    own = [_own(material.prompts[i], greedy[i]) for i in sorted(material.unanswered) if greedy[i].token_ids]
    answers = [*material.answers, *own]
    left = _side(one, answers, material.text, greedy)
    del one
    on_note(f"reads {quantized}")
    two = HFModel.load(quantized, dtype=how.dtype, batch_size=how.batch_size)
    if found := differences(left.tokenizer, identify(two)):
        raise InputError(f"{quantized}: differs from {full} in {'; '.join(found)}; compare it with its own source")
    right = _side(two, answers, material.text, _greedy(two, material, how))
    del two
    document: dict[str, Any] = {
        "sources": list(how.sources),
        "settings": {"rows": how.rows, "max_length": how.max_length, "max_new_tokens": how.max_new_tokens}
        | {"dtype": how.dtype},
        "dropped_rows": material.dropped,
        "answers": None,
        "text": None,
        "greedy": None,
    }
    missing: dict[str, str] = {}
    if answers:
        weighed = _weigh(left, right, answers, "answers")
        document["answers"] = _distance(weighed) | {"given": len(material.answers), "own": len(own)}
    else:
        missing["answers"] = "no source holds prompts or answers"
    if material.text:
        weighed = _weigh(left, right, material.text, "text")
        nll = torch.stack([row.sum(0) for row in weighed]).sum(0)[2:] / sum(len(row) for row in weighed)
        full_nll, quantized_nll = nll.tolist()
        document["text"] = _distance(weighed) | {
            "perplexity_full": math.exp(full_nll),
            "perplexity_quantized": math.exp(quantized_nll),
        }
    else:
        missing["text"] = "no source holds held-out text (rows of `text`, or a .txt file)"
    if material.prompts:
        document["greedy"] = _lengths(left.greedy, right.greedy)
    else:
        missing["greedy"] = "no source holds prompts"
    return document | {"not_measured": missing}


def _greedy(model: HFModel, material: Material, how: Comparing) -> list[Completion]:
    requests = [
        SampleRequest(
            sample_id=str(i),
            prompt_ids=prompt,
            max_new_tokens=min(how.max_new_tokens, model.max_length - len(prompt)),
            seed=stream_seed("greedy", i),  # asked for, and of no consequence at temperature 0
        )
        for i, prompt in enumerate(material.prompts)
    ]
    return model.sample(requests, temperature=0.0)


def _own(prompt: tuple[int, ...], answer: Completion) -> Passage:
    return Passage(prompt + answer.token_ids, (0,) * len(prompt) + (1,) * len(answer.token_ids))


def _side(model: HFModel, answers: Sequence[Passage], text: Sequence[Passage], greedy: list[Completion]) -> _Side:
    hidden = [
        model.hidden_states([one.pair for one in passages], [one.rest_mask for one in passages])
        for passages in (answers, text)
    ]
    return _Side(identify(model), model.vocab_size, model.head, greedy, *hidden)


def _weigh(left: _Side, right: _Side, passages: Sequence[Passage], which: str) -> list[Tensor]:
    """Per passage [N, 4] in float64: KL, agreement of the likeliest token, -log p of the token, before and after."""
    found = []
    for one, hidden_NH, other_NH in zip(passages, getattr(left, which), getattr(right, which), strict=True):
        tokens_N = torch.tensor([token for token, on in zip(one.token_ids, one.mask, strict=True) if on])
        size = max(1, _CHUNK_BYTES // (4 * left.vocab_size))
        pieces = [slice(start, start + size) for start in range(0, len(tokens_N), size)]
        found.append(torch.cat([_weigh_piece(left, right, hidden_NH[n], other_NH[n], tokens_N[n]) for n in pieces]))
    return found


@torch.no_grad()
def _weigh_piece(left: _Side, right: _Side, hidden_NH: Tensor, other_NH: Tensor, tokens_N: Tensor) -> Tensor:
    full_NV, quantized_NV = (
        head_logits(h.to(side.head.weight_VH), side.head, vocab_size=side.vocab_size).float().log_softmax(-1)
        for side, h in ((left, hidden_NH), (right, other_NH))
    )
    tokens_N1 = tokens_N.to(full_NV.device).unsqueeze(-1)
    columns = [
        (full_NV.exp() * (full_NV - quantized_NV)).sum(-1),
        (full_NV.argmax(-1) == quantized_NV.argmax(-1)),
        -full_NV.gather(-1, tokens_N1).squeeze(-1),
        -quantized_NV.gather(-1, tokens_N1).squeeze(-1),
    ]
    return torch.stack([column.double() for column in columns], -1).cpu()


def _distance(weighed: list[Tensor]) -> dict[str, Any]:
    counts = torch.tensor([len(row) for row in weighed], dtype=torch.float64)
    kl, agreement = (torch.stack([row[:, i].sum() for row in weighed]) for i in (0, 1))
    return {
        "rows": len(weighed),
        "tokens": int(counts.sum()),
        "kl_nats": _estimate(kl, counts),
        "top1_agreement": _estimate(agreement, counts),
    }


def _estimate(sums: Tensor, counts: Tensor) -> dict[str, float | None]:
    """The mean over tokens, and its standard error over rows as clusters; None from one row."""
    mean = sums.sum() / counts.sum()
    rows = len(sums)
    spread = (sums - mean * counts).square().sum() * rows / max(1, rows - 1)
    return {"mean": float(mean), "stderr": float(spread.sqrt() / counts.sum()) if rows > 1 else None}


def _lengths(full: list[Completion], quantized: list[Completion]) -> dict[str, Any]:
    """Lengths of greedy answers in tokens, end token included."""
    before, after = (sum(len(one.token_ids) for one in side) for side in (full, quantized))
    cut = [sum(one.finish_reason == "length" for one in side) / len(side) for side in (full, quantized)]
    return {
        "prompts": len(full),
        "tokens_full": before / len(full),
        "tokens_quantized": after / len(quantized),
        "ratio": after / before,
        "truncated_share_full": cut[0],
        "truncated_share_quantized": cut[1],
        "same_answer_share": sum(a.token_ids == b.token_ids for a, b in zip(full, quantized, strict=True)) / len(full),
    }
