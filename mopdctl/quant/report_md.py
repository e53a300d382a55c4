"""The report of a quantized checkpoint for people: plain text for a terminal, or Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Cells = Sequence[str]

_WORST = 5
_HEADER = ("", "weights", "relative MSE", "cosine", "blocks at 4", "clipped", "underflowed")


def to_text(report: Mapping[str, Any]) -> str:
    """Lines and aligned tables, without the rows of single layers."""
    return "\n".join(_lines(report, _aligned, layers=False, title=lambda text: [text], item=str)).rstrip()


def to_markdown(report: Mapping[str, Any]) -> str:
    """A document of its own."""
    lines = _lines(
        report, _piped, layers=True, title=lambda text: [f"## {text}", ""], item=lambda text: f"- {_escaped(text)}"
    )
    return "\n".join(lines).rstrip() + "\n"


def _lines(report: Mapping[str, Any], table: Any, *, layers: bool, title: Any, item: Any) -> Iterable[str]:
    name = _plain(report["name"])
    yield from title(f"{name}: {_plain(report['parent'] or 'unknown source')}, quantized")
    for line in _summary(report):
        yield item(line)
    yield ""
    if report["errors"]:
        yield from title("Weights")
        yield from table(_HEADER, list(_errors(report["errors"], layers)))
        yield ""
        yield item("relative MSE: sum (quantized - weight)^2 / sum weight^2, of the exported bytes")
        yield item("blocks at 4: largest code is 4; clipped: a value above 7 steps; underflowed: zero only since then")
        yield ""
    comparison = report["comparison"]
    if comparison:
        yield from title("Beside its source")
        yield from table(("", "source", "quantized", "difference"), list(_comparison(comparison)))
        yield ""
        for line in _comparison_notes(comparison):
            yield item(line)
    for what, why in {**report["not_measured"], **(comparison or {}).get("not_measured", {})}.items():
        yield item(f"not measured: {what}, because {_plain(why)}")


def _summary(report: Mapping[str, Any]) -> Iterable[str]:
    size, settings = report["size"], report["settings"]
    said = ", ".join(f"{key} {settings[key]}" for key in ("format", "method", "act", "layout") if key in settings)
    yield said
    before = size["source_bytes"]
    shrunk = f"{before / 1e6:,.1f} MB to " if before else ""
    share = f" ({size['bytes'] / before:.1%})" if before else ""
    yield f"size: {shrunk}{size['bytes'] / 1e6:,.1f} MB{share}"
    yield (
        f"bits per element: {size['bits_per_quantized_element']:.2f} over the {size['quantized_elements']:,} of "
        f"{size['quantized_weights']} quantized weights, {size['bits_per_element']:.2f} over all {size['elements']:,}"
    )
    yield "weights: " + ", ".join(f"{count} {precision}" for precision, count in report["quantized"].items())
    if report["kept"]:
        yield "kept as they are: " + ", ".join(f"{count} {_plain(why)}" for why, count in report["kept"].items())
    yield from report["kernels"]
    yield from (f"warning: {_plain(line)}" for line in report["warnings"])
    if move := report["move"]:
        yield (
            f"moved exactly: {move['exact_weights']} of {move['weights']} weights; rounded blocks: "
            f"{move['rounded_blocks']:,} of {move['blocks']:,}; changed values: {move['changed_elements']:,}"
        )
        for name, one in sorted(move["rounded"].items(), key=lambda pair: -pair[1]["changed_elements"])[:_WORST]:
            yield (
                f"rounded: {_plain(name)}, {one['rounded_blocks']:,} of {one['blocks']:,} blocks, "
                f"{one['changed_elements']:,} values changed"
            )


def _errors(errors: Mapping[str, Any], layers: bool) -> Iterable[Cells]:
    yield _error("all", errors["all"])
    if len(errors["by_precision"]) > 1:
        for name, one in errors["by_precision"].items():
            yield _error(name, one)
    for kind in ("by_kind", "by_layer") if layers else ("by_kind",):
        for name, one in errors[kind].items():
            yield _error(name, one)
    worst = sorted(errors["weights"].items(), key=lambda pair: -pair[1]["relative_mse"])[:_WORST]
    for name, one in worst:
        yield _error(f"worst: {name}", one)


def _error(name: str, one: Mapping[str, Any]) -> Cells:
    return (
        _plain(name),
        f"{one['weights']:,}",
        f"{one['relative_mse']:.3e}",
        "-" if one["cosine"] is None else f"{one['cosine']:.6f}",
        "-" if one["four_share"] is None else f"{one['four_share']:.1%}",
        "-" if one["clipped_blocks"] is None else f"{one['clipped_blocks']:,}",
        "-" if one["underflowed_blocks"] is None else f"{one['underflowed_blocks']:,}",
    )


def _comparison(found: Mapping[str, Any]) -> Iterable[Cells]:
    for what in ("answers", "text"):
        if one := found[what]:
            yield (f"KL(source || quantized) on {what}, nats per token", "", "", _estimate(one["kl_nats"], 1, 5))
            yield (f"same likeliest token on {what}, %", "", "", _estimate(one["top1_agreement"], 100, 2))
    if text := found["text"]:
        before, after = text["perplexity_full"], text["perplexity_quantized"]
        yield ("perplexity on text", f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}")
    if greedy := found["greedy"]:
        before, after = greedy["tokens_full"], greedy["tokens_quantized"]
        yield ("tokens of a greedy answer", f"{before:.1f}", f"{after:.1f}", f"{greedy['ratio']:.3f}x")
        before, after = greedy["truncated_share_full"], greedy["truncated_share_quantized"]
        yield ("answers cut off, %", f"{100 * before:.1f}", f"{100 * after:.1f}", f"{100 * (after - before):+.1f}")


def _comparison_notes(found: Mapping[str, Any]) -> Iterable[str]:
    if answers := found["answers"]:
        yield (
            f"answers: {answers['tokens']:,} tokens of {answers['given']} given answers and {answers['own']} greedy "
            "ones of the source"
        )
    if text := found["text"]:
        yield f"text: {text['tokens']:,} tokens of {text['rows']} rows"
    if greedy := found["greedy"]:
        yield f"greedy: {greedy['prompts']} prompts, {greedy['same_answer_share']:.0%} answered with the same tokens"
    if found["dropped_rows"]:
        yield f"dropped: {found['dropped_rows']} rows with nothing left in {found['settings']['max_length']} tokens"
    yield "+-: standard error over rows; from the exported bytes, weights dequantized"


def _estimate(one: Mapping[str, Any], scale: float, places: int) -> str:
    error = "" if one["stderr"] is None else f" +- {scale * one['stderr']:.{places}f}"
    return f"{scale * one['mean']:.{places}f}{error}"


def _aligned(header: Cells, rows: list[Cells]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = []
    for row in (header, rule, *rows):
        first, *rest = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def _piped(header: Cells, rows: list[Cells]) -> list[str]:
    rule = [":---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(map(_escaped, row)) + " |" for row in (header, rule, *rows)]


def _plain(text: str) -> str:
    """Text from files without what could move a cursor or break a row."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
