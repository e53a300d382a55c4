"""One optimizer step of three teachers on seven sequences, shared among however many ranks there are.

python two_ranks.py OUT.json                                                     one process
python -m torch.distributed.run --nproc-per-node 2 two_ranks.py OUT.json         two
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import token_logprobs
from mopdctl.train import distributed
from mopdctl.train.batch import MicroBatch, TrainSequence, cut, cut_packs
from mopdctl.train.step import Policy, TokenLoss, accumulate, token_loss

# (teacher, lambda, prompt length, loss mask). Of two ranks one holds 0, 2, 4, 6 and the other 1, 3, 5: `a` and `b` lie
# on both, `c` on the first alone.
ROWS = [
    ("a", 1.0, 2, [1, 1, 1]),
    ("a", 1.0, 5, [0, 1, 1, 1, 1]),
    ("b", 2.0, 1, [1]),
    ("b", 2.0, 3, [1, 0, 0, 1]),
    ("b", 2.0, 7, [1, 1]),
    ("a", 1.0, 1, [1] * 9),
    ("c", 0.5, 4, [1, 1, 0, 1]),
]


def tiny_model() -> HFModel:
    from tokenizers import Tokenizer, models

    pieces = {f"t{i}": i for i in range(40)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(pieces)), pad_token="t0", eos_token="t1"
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return HFModel(LlamaForCausalLM(config).double().eval(), tokenizer, dtype=torch.float64)


def sequences() -> list[TrainSequence]:
    return [
        TrainSequence(
            f"s{i}",
            [2 + (5 * i + 3 * j) % 38 for j in range(prompt)],
            [2 + (7 * i + 11 * j) % 38 for j in range(len(mask))],
            mask,
            teacher,
            weight,
            {"gain": [0.5 + (i + j) % 3 for j in range(len(mask))]},
        )
        for i, (teacher, weight, prompt, mask) in enumerate(ROWS)
    ]


def gained(policy: Policy, micro_batch: MicroBatch) -> TokenLoss:
    gain_N = micro_batch.streams["gain"].double()
    return token_loss(-gain_N * token_logprobs(policy.logits_NV, micro_batch.tokens_N), micro_batch, {"gain": gain_N})


def results() -> list[dict[str, Any]]:
    """Loss, counts, means, norms and gradients for both reductions, with and without norms: padded, one row, packed."""
    model, rows, found = tiny_model(), sequences(), []
    packs = [rows[:2], rows[2:5], rows[6:]]  # of two ranks one holds two packs, the other one
    for reduction in ("token", "sequence"):
        for per_teacher_norms in (False, True):
            for kind in ("padded", "one row", "packed"):
                own = slice(distributed.rank(), None, distributed.world_size())
                if kind == "packed":
                    micro_batches = cut_packs(packs[own], reduction=reduction, device=model.device)  # type: ignore[arg-type]
                else:
                    micro_batches = cut(
                        rows[own] if kind == "padded" else rows[:1][own],
                        reduction=reduction,  # type: ignore[arg-type]
                        num_micro_batches=2,
                        pad_id=model.pad_id,
                        device=model.device,
                    )
                model.model.zero_grad(set_to_none=True)
                result = accumulate(model, micro_batches, gained, per_teacher_norms=per_teacher_norms)
                gradients = {n: p.grad for n, p in model.model.named_parameters() if p.grad is not None}
                found.append(
                    {
                        "loss": result.loss,
                        "tokens": result.tokens,
                        "means": result.means,
                        "grad_norms": result.grad_norms,
                        "gradient": {n: g.flatten().tolist() for n, g in gradients.items()},
                    }
                )
    return found


if __name__ == "__main__":
    distributed.start()
    outcome = distributed.gather_objects(results())
    if distributed.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(outcome), "utf-8")
    distributed.barrier()
