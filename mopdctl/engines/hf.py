"""Sampling and scoring with a transformers model in this process, on CPU or GPU."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from mopdctl.engines.base import Completion, SampleRequest, Step, sample, uniforms
from mopdctl.engines.fp4 import is_read_here, load_quantized
from mopdctl.engines.head import output_head
from mopdctl.engines.layout import Layout, active_hidden, active_logits, lay_out, token_logprobs
from mopdctl.errors import InputError
from mopdctl.objective.chunks import default_chunk
from mopdctl.objective.head import Head, head_logits

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
            if is_read_here(config):
                model = load_quantized(path, config, dtype=weights_dtype)
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    path, config=config, dtype=weights_dtype, use_safetensors=True
                )
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

    @cached_property
    def head(self) -> Head:
        """What makes logits of hidden states. Raises InputError where that is more than `Head` can say."""
        return output_head(self.model)

    def save(self, folder: Path) -> None:
        """Writes weights, configuration and tokenizer as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def sample(self, requests: Sequence[SampleRequest], *, temperature: float) -> list[Completion]:
        """One completion per request, in order."""
        return sample(self, requests, temperature=temperature)

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        """See `Sampler.stream`. `batch_size` requests of similar length run together."""
        spent = [i for i, r in enumerate(requests) if len(r.response_ids) >= r.max_new_tokens]
        if spent:
            none = np.empty(0, np.int32)
            yield Step(none.astype(np.int64), none, none.astype(np.float32), dict.fromkeys(spent, "length"))
        order = sorted(set(range(len(requests))) - set(spent), key=lambda i: (len(_context(requests[i])), i))
        for start in range(0, len(order), self.batch_size):
            chunk = np.array(order[start : start + self.batch_size])
            with _evaluating(self.model):
                for step in self._stream_batch([requests[i] for i in chunk], temperature):
                    finished = {int(chunk[i]): reason for i, reason in step.finished.items()}
                    yield Step(chunk[step.requests], step.token_ids, step.logprobs, finished)

    def _stream_batch(self, requests: list[SampleRequest], temperature: float) -> Iterator[Step]:
        layout = lay_out([_context(r) for r in requests], [()] * len(requests), pad_id=self.pad_id, device=self.device)
        num_context = layout.input_ids_BT.shape[1]
        done = [len(r.response_ids) for r in requests]
        left = [r.max_new_tokens - len(r.response_ids) for r in requests]
        num_steps = max(left)
        randoms = np.zeros((len(requests), num_steps))
        for row, request in enumerate(requests):
            randoms[row, : left[row]] = uniforms(request.seed, request.max_new_tokens)[done[row] :]
        randoms_BT = torch.from_numpy(randoms).to(self.device)

        # `rows` are the requests still being written; finished ones leave the batch once they are a quarter of it.
        rows = list(range(len(requests)))
        alive = [True] * len(requests)
        mask = torch.cat([layout.attention_mask_BT, layout.attention_mask_BT.new_ones(len(rows), num_steps)], dim=1)
        positions = layout.attention_mask_BT.sum(-1, keepdim=True)
        cache = DynamicCache(config=self.model.config)
        out = self._forward(
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
            running = [i for i, row in enumerate(rows) if alive[row]]
            free = [i for i in running if step >= len(requests[rows[i]].forced_ids)]
            for i in set(running).difference(free):
                chosen_B[i] = requests[rows[i]].forced_ids[step]
            tokens = chosen_B.cpu().numpy().astype(np.int32)
            finished = {}
            for i in running:
                if (ended := tokens[i] in self.eos_ids) or step + 1 == left[rows[i]]:
                    finished[rows[i]] = "stop" if ended else "length"
                    alive[rows[i]] = False
            who = np.array([rows[i] for i in free], np.int64)
            yield Step(who, tokens[free], chosen_logprobs_B.cpu().numpy()[free], finished)
            num_alive = sum(alive)
            if num_alive == 0:
                break
            if num_alive <= 0.75 * len(rows):
                keep = torch.tensor([i for i, row in enumerate(rows) if alive[row]], device=self.device)
                rows = [row for row in rows if alive[row]]
                cache.batch_select_indices(keep)
                mask, positions, chosen_B = mask[keep], positions[keep], chosen_B[keep]
            out = self._forward(
                input_ids=chosen_B.unsqueeze(-1),
                attention_mask=mask[:, : num_context + step + 1],
                position_ids=positions + step,
                past_key_values=cache,
                use_cache=True,
            )

    @torch.no_grad()
    def _forward(self, **inputs: Any) -> Any:
        # Not around the whole stream: what a generator enters, its caller is in as well.
        with self.computing():
            return self.model(**inputs)

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """See `Scorer.score`. Pairs of similar length share a batch; results come back in order.

        Logits are made of response tokens alone and exist for one chunk of them at a time, unless the model bends them
        in a way that `Head` cannot say.
        """
        found: dict[int, list[float]] = {}
        for chunk, layout in self._batches(pairs):
            with _evaluating(self.model), self.computing():
                logprobs_N = self._response_logprobs(layout)
            for i, row in zip(chunk, logprobs_N.split(layout.present_BR.sum(-1).tolist()), strict=True):
                found[i] = row.tolist()
        return [found[i] for i in range(len(pairs))]

    def _response_logprobs(self, layout: Layout) -> Tensor:
        """Log p of each real response token [N], row after row."""
        tokens_N = layout.response_BR[layout.present_BR]
        if self.head_or_none is None:
            logits_NV = active_logits(self.model, layout, layout.present_BR, vocab_size=self.vocab_size)
            return token_logprobs(logits_NV, tokens_N)
        hidden_NH = active_hidden(self.model, layout, layout.present_BR)
        chunk = default_chunk(self.vocab_size, self.device)
        pieces = [
            token_logprobs(head_logits(hidden_CH, self.head_or_none, vocab_size=self.vocab_size), tokens_C)
            for hidden_CH, tokens_C in zip(hidden_NH.split(chunk), tokens_N.split(chunk), strict=True)
        ]
        return torch.cat(pieces)

    @cached_property
    def head_or_none(self) -> Head | None:
        """`head`, or None where the model's logits are more than `Head` can say."""
        try:
            return self.head
        except InputError:
            return None

    @torch.no_grad()
    def hidden_states(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], masks: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """For each (prompt ids, response ids), the last hidden states [N, H] that predict its N tokens with mask 1.

        On the CPU, in the precision that the model computes in; `head` makes logits of them. Pairs of similar length
        share a batch.
        """
        found: dict[int, Tensor] = {}
        for chunk, layout in self._batches(pairs):
            rows = [[*masks[i], *[0] * (layout.response_BR.shape[1] - len(masks[i]))] for i in chunk]
            active_BR = torch.tensor(rows, device=self.device).bool() & layout.present_BR
            with _evaluating(self.model), self.computing():
                hidden_NH = active_hidden(self.model, layout, active_BR)
            hidden_NH = hidden_NH.to(self.dtype).cpu()
            for i, piece in zip(chunk, hidden_NH.split(active_BR.sum(-1).tolist()), strict=True):
                found[i] = piece.clone()
        return [found[i] for i in range(len(pairs))]

    def _batches(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[list[int], Layout]]:
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        for start in range(0, len(order), self.batch_size):
            chunk = order[start : start + self.batch_size]
            layout = lay_out(
                [pairs[i][0] for i in chunk], [pairs[i][1] for i in chunk], pad_id=self.pad_id, device=self.device
            )
            yield chunk, layout


def _context(request: SampleRequest) -> tuple[int, ...]:
    return request.prompt_ids + request.response_ids


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
