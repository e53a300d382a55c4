"""Sampling and scoring with a transformers model in this process, on CPU or GPU."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from mopdctl.engines.base import Completion, SampleRequest, uniforms
from mopdctl.engines.layout import lay_out, response_logits, token_logprobs
from mopdctl.errors import InputError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HFModel:
    """A causal language model with its tokenizer. Serves as `Sampler` and as `Scorer`, and is what the trainers train.

    Weights are held in float32 where they are trained (`train=True`) and in `dtype` otherwise; computation runs in
    `dtype`. Dropout is off throughout: the policy that is trained must be the policy that sampled.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, dtype: torch.dtype = torch.float32, batch_size: int = 256
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.batch_size = batch_size
        self.device = next(model.parameters()).device
        self.vocab_size = min(len(tokenizer), model.get_output_embeddings().weight.shape[0])
        self.eos_ids = eos_token_ids(model, tokenizer)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.eos_ids)
        self.max_length = int(getattr(model.config, "max_position_embeddings", None) or 1 << 30)

    @classmethod
    def load(cls, path: str, *, dtype: str = "float32", train: bool = False, batch_size: int = 256) -> "HFModel":
        """Loads a checkpoint from a folder or hub id, on the GPU of this process if there is one.

        Raises InputError if the folder does not hold a model and a tokenizer that transformers can read.
        """
        try:
            config = AutoConfig.from_pretrained(path)
            for key in list(vars(config)):
                if key.endswith(("dropout", "_pdrop")) and isinstance(getattr(config, key), float):
                    setattr(config, key, 0.0)
            weights_dtype = torch.float32 if train else _DTYPES[dtype]
            model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=weights_dtype, use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None
        model.to(default_device())
        model.train(train)
        model.requires_grad_(train)
        return cls(model, tokenizer, dtype=_DTYPES[dtype], batch_size=batch_size)

    def computing(self) -> AbstractContextManager[Any]:
        """The autocast context in which this model runs."""
        if self.dtype == torch.float32 or next(self.model.parameters()).dtype == self.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def save(self, folder: Path) -> None:
        """Writes weights, configuration and tokenizer as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    @torch.no_grad()
    def sample(self, requests: Sequence[SampleRequest], *, temperature: float) -> list[Completion]:
        """See `Sampler.sample`. Requests of similar prompt length share a batch; results come back in order."""
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        found: dict[int, Completion] = {}
        for start in range(0, len(order), self.batch_size):
            chunk = order[start : start + self.batch_size]
            with _evaluating(self.model), self.computing():
                completions = self._sample_batch([requests[i] for i in chunk], temperature)
            found.update(zip(chunk, completions, strict=True))
        return [found[i] for i in range(len(requests))]

    def _sample_batch(self, requests: list[SampleRequest], temperature: float) -> list[Completion]:
        num_steps = max(r.max_new_tokens for r in requests)
        layout = lay_out([r.prompt_ids for r in requests], [()] * len(requests), pad_id=self.pad_id, device=self.device)
        num_prompt = layout.input_ids_BT.shape[1]
        randoms_BT = torch.from_numpy(np.stack([uniforms(r.seed, num_steps) for r in requests])).to(self.device)
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        reasons = ["length"] * len(requests)

        # `rows` are the requests still being written; finished ones leave the batch once they are a quarter of it.
        rows = list(range(len(requests)))
        alive = [r.max_new_tokens > 0 for r in requests]
        mask = torch.cat([layout.attention_mask_BT, layout.attention_mask_BT.new_ones(len(rows), num_steps)], dim=1)
        positions = layout.attention_mask_BT.sum(-1, keepdim=True)
        cache = DynamicCache(config=self.model.config)
        out = self.model(
            input_ids=layout.input_ids_BT,
            attention_mask=layout.attention_mask_BT,
            position_ids=layout.position_ids_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for step in range(num_steps):
            logits_BV = out.logits[:, -1, : self.vocab_size].float()
            chosen_B, chosen_logprobs_B = _choose(logits_BV, randoms_BT[rows, step], temperature)
            for row, token, logprob in zip(rows, chosen_B.tolist(), chosen_logprobs_B.tolist(), strict=True):
                if not alive[row]:
                    continue
                tokens[row].append(token)
                logprobs[row].append(logprob)
                if token in self.eos_ids:
                    reasons[row] = "stop"
                alive[row] = token not in self.eos_ids and len(tokens[row]) < requests[row].max_new_tokens
            num_alive = sum(alive)
            if num_alive == 0:
                break
            if num_alive <= 0.75 * len(rows):
                keep = torch.tensor([i for i, row in enumerate(rows) if alive[row]], device=self.device)
                rows = [row for row in rows if alive[row]]
                cache.batch_select_indices(keep)
                mask, positions, chosen_B = mask[keep], positions[keep], chosen_B[keep]
            out = self.model(
                input_ids=chosen_B.unsqueeze(-1),
                attention_mask=mask[:, : num_prompt + step + 1],
                position_ids=positions + step,
                past_key_values=cache,
                use_cache=True,
            )
        return [Completion(tuple(t), tuple(p), reason) for t, p, reason in zip(tokens, logprobs, reasons, strict=True)]

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """See `Scorer.score`. Pairs of similar length share a batch; results come back in order."""
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        found: dict[int, list[float]] = {}
        for start in range(0, len(order), self.batch_size):
            chunk = order[start : start + self.batch_size]
            layout = lay_out(
                [pairs[i][0] for i in chunk], [pairs[i][1] for i in chunk], pad_id=self.pad_id, device=self.device
            )
            with _evaluating(self.model), self.computing():
                logits_BRV = response_logits(self.model, layout, vocab_size=self.vocab_size)
            logprobs_BR = token_logprobs(logits_BRV, layout.response_BR).tolist()
            for i, row in zip(chunk, logprobs_BR, strict=True):
                found[i] = row[: len(pairs[i][1])]
        return [found[i] for i in range(len(pairs))]


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for a block: in training mode gradient checkpointing drops the cache and answers become noise."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _choose(logits_BV: Tensor, randoms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Token ids [B] by inverse cumulative probability, and their log-probabilities [B] in the distribution sampled."""
    if temperature == 0:
        chosen = logits_BV.argmax(-1)
        return chosen, torch.zeros_like(chosen, dtype=torch.float32)
    logprobs_BV = torch.log_softmax(logits_BV / temperature, dim=-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    target_B1 = (randoms_B.double() * cumulative_BV[:, -1]).unsqueeze(-1)
    chosen = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp(max=logits_BV.shape[-1] - 1)
    return chosen.squeeze(-1), logprobs_BV.gather(-1, chosen).squeeze(-1)


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: those of the generation config and the tokenizer's own."""
    configured = model.generation_config.eos_token_id
    found = {configured} if isinstance(configured, int) else set(configured or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise InputError(f"model {model.name_or_path}: neither model nor tokenizer names an end token")
    return frozenset(found)


def default_device() -> torch.device:
    """The GPU of this process's local rank if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    import os

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
