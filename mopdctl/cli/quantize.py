"""`mopdctl quantize`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, WorkspaceOption
from mopdctl.cli.output import Progress, note, result, show, stdout_reserved
from mopdctl.train.runtime import prepare_runtime, settle_libraries


def quantize(
    model: Annotated[
        str | None, typer.Argument(help="A name in the workspace, a folder or a hub id.  [default: that of --config]")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the checkpoint to make.")] = None,
    format: Annotated[
        Literal["nvfp4", "mxfp4", "fp8"] | None, typer.Option("--format", help="Of linear layers.  [default: nvfp4]")
    ] = None,
    act: Annotated[
        Literal["none", "dynamic"] | None,
        typer.Option("--act", help="Whether their inputs are quantized at run time.  [default: none]"),
    ] = None,
    method: Annotated[
        Literal["max", "46", "sweep", "gptq"] | None,
        typer.Option("--method", help="How block scales are chosen.  [default: sweep]"),
    ] = None,
    rule: Annotated[
        Literal["even", "floor", "rceil", "ceil"] | None,
        typer.Option("--rule", help="MXFP4: how magnitudes become exponents.  [default: even]"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="Modules that stay as they are: name, glob, or re:REGEX; may be repeated."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Precision by module: a YAML file, or one that ships with mopdctl.")
    ] = None,
    kv_cache: Annotated[
        Literal["none", "fp8"] | None, typer.Option("--kv-cache", help="How engines keep keys and values.")
    ] = None,
    layout: Annotated[
        Literal["compressed-tensors", "modelopt"] | None,
        typer.Option("--layout", help="Names of the tensors.  [default: compressed-tensors]"),
    ] = None,
    bits: Annotated[
        float | None, typer.Option("--bits", help="Bits per element; each layer's precision is chosen to meet it.")
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option("--tp", help="Tensor-parallel size to check shapes for; may be repeated.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="JSONL of messages or text to run through the model.")
    ] = None,
    calibration_store: Annotated[
        str | None, typer.Option("--calibration-store", help="A rollout store to take such text from.")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Rows of it.  [default: 128]")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Tokens of a row.  [default: 2048]")] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            help="Compare with the source on 64 rows of a JSONL, .txt or store, evenly spread; may be repeated.",
        ),
    ] = None,
    md: Annotated[Path | None, typer.Option("--md", help="Markdown file to write the report into.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A quant.yaml; options come before it.")] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Quantize a checkpoint to FP4 so that vLLM and transformers load it.

    \b
    NVFP4 weights with the scales of least error, everything else as it is:
      mopdctl quantize mopd2 --format nvfp4 --name mopd2-nvfp4
    What would be done, and whether the shapes suit eight ranks, in seconds:
      mopdctl quantize mopd2 --format mxfp4 --tp 8 --name mopd2-mxfp4 --dry-run
    GPTQ on the answers of a run, with quantized activations:
      mopdctl quantize mopd2 --method gptq --act dynamic --calibration-store mopd2 --name mopd2-w4a4
    As NVIDIA published Nemotron 3 Ultra:
      mopdctl quantize ultra --recipe nemotron-3-ultra --name ultra-nvfp4

    \b
    From MXFP4 to NVFP4 without rounding, where the numbers fit:
      mopdctl quantize gpt-mxfp4 --format nvfp4 --name gpt-nvfp4

    Embeddings, the output head, norms, routers and convolutions stay as they are. Weights are read and written one at
    a time; killed, the same command goes on where it was. What was written is checked before it gets its name. The
    result is a report: sizes, errors of weights, and with --compare the KL to the source, agreement and answers; for a
    checkpoint that is there, the same command makes it anew.
    """
    from mopdctl.config.quant import load_quant
    from mopdctl.files import write_text
    from mopdctl.runs import Workspace

    sources = {
        "data": str(calibration.resolve()) if calibration else None,
        "store": calibration_store,
        "samples": samples,
        "max_length": max_length,
    }
    options = {
        "model": model,
        "name": name,
        "format": format,
        "act": act,
        "method": method,
        "rule": rule,
        "kv_cache": kv_cache,
        "layout": layout,
        "bits": bits,
        "tp": tp or None,
        "calibration": {key: value for key, value in sources.items() if value is not None} or None,
    }
    settings = load_quant(config, options, recipe=recipe, ignore=ignore or [])
    base = config.parent if config and model is None else Path()
    place = Workspace(workspace)
    place.checkpoint(settings.name)
    prepare_runtime()
    with stdout_reserved():
        from mopdctl.quant.compare import Comparing
        from mopdctl.quant.material import check_sources
        from mopdctl.quant.moves import is_move, move_checkpoint, plan_move
        from mopdctl.quant.report import report_on
        from mopdctl.quant.report_md import to_markdown, to_text
        from mopdctl.quant.run import plan_quantization, quantize_model

        settle_libraries()
        reading: Progress | None = None
        writing: Progress | None = None

        def on_read(done: int, total: int) -> None:
            nonlocal reading
            reading = reading or Progress("MB read", total // 1_000_000 + 1)
            reading.update((done + 1_000_000) // 1_000_000 if done == total else done // 1_000_000)

        def on_tensor(done: int, total: int, last: str) -> None:
            nonlocal writing
            writing = writing or Progress(settings.name, total, done=done - 1)
            writing.update(done, last)

        check_sources(compare or [], place, base=Path())
        moves = is_move(settings, place, base=base)
        document: dict[str, Any]
        if dry_run:
            document = (
                plan_move(settings, place, base=base)
                if moves
                else plan_quantization(settings, place, base=base, on_read=on_read)
            )
        else:
            how = Comparing(tuple(compare)) if compare else None
            if moves:
                target = move_checkpoint(settings, place, base=base, on_tensor=on_tensor)
            else:
                target = quantize_model(settings, place, base=base, on_read=on_read, on_tensor=on_tensor)
            source = place.resolve_model(settings.model, relative_to=base)
            document = report_on(target, source, how, place, base=Path(), on_note=note)
        for warning in document.get("warnings", []):
            note(f"warning: {warning}")
    if md and not dry_run:
        write_text(md, to_markdown(document))
    if dry_run or as_json:
        show(document, as_json=as_json)
    else:
        result(to_text(document))
