"""Calibration, one decoder layer after another: what the modules get as inputs on some rows of tokens."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.quant.layerwise import LayerwiseModel, run_layer
from mopdctl.quant.moments import Moments, collecting, with_unreached

BATCH_TOKENS = 4096
"""Tokens that run at a time, or one row."""

Visit = Callable[[dict[str, Moments]], Mapping[str, Tensor]]
"""Takes the moments of some modules, and gives the weights to go on with, both by name in the checkpoint."""


@torch.no_grad()
def calibrate(
    model: LayerwiseModel,
    rows: Sequence[Sequence[int]],
    targets: Collection[str],
    visit: Visit,
    *,
    hessian: bool = False,
    replacing: bool = False,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Runs rows through a model layer by layer, and hands out the moments of each layer's modules once they are whole.

    In memory are one layer, its moments, and the hidden states of all rows.

    Args:
        model: Whose weights come from disk.
        rows: Token ids, at least one each. Those of one length run together, so that nothing is ever padding.
        targets: Names of the modules in the checkpoint.
        visit: Called for each layer with targets, and for the head if it is one. An expert to which no token was routed
            has moments of no rows.
        hessian: Collect X^T X / N, not its diagonal alone.
        replacing: A layer runs a second time with the weights that `visit` gives, and the next one sees what leaves
            it then: it can make up for errors before it. Otherwise those weights are not looked at.
        on_layer: Told how many layers of how many are done.

    Raises:
        InputError: A target is in no layer, the model cannot run so, or activations are NaN or infinite.

    Source: GPTQ (2210.17323), section 4, "Setup": block after block, each fed by those that are quantized.
    """
    of_layer = [_stems(model.tensors(number), targets) for number in range(len(model.layers))]
    head = set(model.head) & set(targets)
    if lost := sorted(set(targets).difference(head, *of_layer)):
        raise InputError(f"{lost[0]}: is in no decoder layer, so that its inputs cannot be collected; ignore it")
    ids = list(batches(rows, model.device))
    hidden, calls = map(list, zip(*(model.embed(ids_BT) for ids_BT in ids), strict=True))
    for number, stems in enumerate(of_layer):
        layer = model.load(number)
        with collecting(layer, model.tensors(number), stems, hessian=hessian) as found:
            for i, entering_BTH in enumerate(hidden):
                leaving_BTH = run_layer(layer, entering_BTH, calls[i][number])
                hidden[i] = entering_BTH if replacing else leaving_BTH
        replaced = visit(with_unreached(found, stems)) if stems else {}
        if replacing:
            layer = model.load(number, replaced)
            for i, entering_BTH in enumerate(hidden):
                hidden[i] = run_layer(layer, entering_BTH, calls[i][number])
        model.drop(number)
        on_layer(number + 1, len(of_layer))
    if head:
        moments = Moments(hessian=hessian)
        for ids_BT, leaving_BTH in zip(ids, hidden, strict=True):
            moments.add(model.finish(ids_BT, leaving_BTH))
        visit(with_unreached(dict.fromkeys(head, moments), head))


def batches(rows: Sequence[Sequence[int]], device: torch.device) -> Iterator[Tensor]:
    """Token ids [B, T], the longest first: rows of one length in their order, up to `BATCH_TOKENS` at a time."""
    by_length: dict[int, list[Sequence[int]]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    for length in sorted(by_length, reverse=True):
        size = max(1, BATCH_TOKENS // length)
        for start in range(0, len(by_length[length]), size):
            yield torch.tensor(by_length[length][start : start + size], device=device)


def _stems(tensors: Mapping[str, Iterable[str]], targets: Collection[str]) -> set[str]:
    return {name.removesuffix(".weight") for names in tensors.values() for name in names}.intersection(targets)
