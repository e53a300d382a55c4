"""World size N with `torch.distributed`, N = 1 without it. Every rank holds the whole model; gradients are summed."""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def start() -> None:
    """Joins the process group that `torchrun` announced, if any."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Waits until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def sum_over_ranks(*values: float) -> list[float]:
    """Each value summed over all ranks, in float64."""
    if world_size() == 1:
        return [float(v) for v in values]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(v) for v in tensor.tolist()]


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sums gradients over ranks in place. A parameter without a gradient counts as zero."""
    if world_size() == 1:
        return
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in rank order."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found
