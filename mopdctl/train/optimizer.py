"""The optimizers and the learning-rate schedule."""

import math
from dataclasses import dataclass

import torch

from mopdctl.config.train import TrainConfig
from mopdctl.engines.hf import HFModel
from mopdctl.train.muon import Muon


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The optimizers that together update a model: AdamW, with Muon beside it where asked for."""

    parts: list[torch.optim.Optimizer]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter that is trained."""
        return [p for part in self.parts for group in part.param_groups for p in group["params"]]

    def step(self, rate: float, max_grad_norm: float) -> float:
        """Clips, steps and clears the gradients; returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_grad_norm)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)
        return float(norm)


def build_optimizers(model: HFModel, config: TrainConfig) -> Optimizers:
    """AdamW, or Muon for hidden matrices and AdamW for the rest. Weight decay falls on matrices only."""
    named = sorted((n, p) for n, p in model.model.named_parameters() if p.requires_grad)
    outer = {id(m.weight) for m in (model.model.get_input_embeddings(), model.model.get_output_embeddings())}
    hidden = [p for _, p in named if p.ndim == 2 and id(p) not in outer] if config.optimizer == "muon" else []
    taken = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    parts: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            fused=True,
        )
    ]
    if hidden:
        parts.append(Muon(hidden, lr=config.learning_rate, weight_decay=config.weight_decay))
    return Optimizers(parts)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of `step` (from 0)."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    share = config.final_learning_rate_share
    return config.learning_rate * (share + (1 - share) * left)
