"""A quiet, unhurried, exact runtime: what must be set before torch is imported, and what must be done right after."""

import os

IDLE_SPINS = "3000"
"""How often an idle OpenMP thread looks for work before it sleeps: for about as long as it takes to wake it.

On two cores that something else uses too, threads that spin longer keep each other from the work (4.5 instead of 0.3 s
a step, where libgomp's own 300,000 stand); those that sleep at once make short operations wait for them (sampling and
`quantize` take twice as long).
"""


def prepare_runtime() -> None:
    """Sets what must stand before torch is imported, unless the user has."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = IDLE_SPINS
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def settle_libraries() -> None:
    """Turns off the progress bars that transformers draws for each checkpoint, and makes torch's vector math exact."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    settle_vector_math()


VECTOR_FUNCTIONS = (
    *(
        "acos",
        "asin",
        "atan",
        "cos",
        "cosh",
        "erf",
        "erfc",
        "erfinv",
        "exp",
        "expm1",
        "lgamma",
        "log",
        "log10",
        "log1p",
    ),
    *("log2", "sin", "sinh", "sqrt", "tan", "tanh"),
)
"""Functions of torch that its CPU build may hand to MKL's vector math."""


def settle_vector_math() -> None:
    """Calls each vector function once from one thread, before many threads call one at the same time.

    MKL chooses the kernel of a function at its first call. Where several threads make that call together, one of them
    may compute its share with a kernel of low accuracy: 1.5e-4 instead of 6e-8 in `exp`, in one process of four to ten
    on two cores, that once and never again (https://github.com/pytorch/pytorch/issues/188792).
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one_half = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one_half)
