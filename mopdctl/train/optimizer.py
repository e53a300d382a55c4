"""AdamW and the learning-rate schedule."""

import math

import torch

from mopdctl.config.train import TrainConfig


def build_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters in name order; weight decay on matrices only."""
    named = sorted((n, p) for n, p in model.named_parameters() if p.requires_grad)
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True
    )


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


def apply_step(optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float) -> float:
    """Clips, steps and clears the gradients; returns the gradient norm before clipping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
