"""`python -m mopdctl.bench NAME [--json]`: runs one bench and exits 3 if a bar does not hold.

A bench may have options of its own: its module then has a function `parse` that takes them.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from mopdctl.bench import frame
from mopdctl.cli.output import note, result, result_json
from mopdctl.errors import CheckFailedError, InputError, MopdctlError


def _bench(name: str) -> Callable[..., frame.Bench]:
    def prepare(*options: str) -> frame.Bench:
        module = import_module(f"mopdctl.bench.{name}")
        if options and not hasattr(module, "parse"):
            raise InputError(f"bench {name} has no options, and was given {' '.join(options)}")
        prepared: frame.Bench = module.parse(options) if options else module.bench()
        return prepared

    return prepare


BENCHES = {name: _bench(name) for name in ("cli", "gensft", "objective", "quantize", "store")}
"""Bench name to the function that prepares it, imported when it is run: a bench needs what it measures and no more.
A new bench gets its name here."""


def main(
    arguments: list[str] | None = None,
    *,
    benches: Mapping[str, Callable[..., frame.Bench]] = BENCHES,
    runs: int = frame.RUNS,
) -> int:
    """Runs one bench, prints its report, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mopdctl.bench", description="Run mopdctl against a rival.")
    parser.add_argument("name", help=f"one of: {', '.join(sorted(benches))}")
    parser.add_argument("--json", action="store_true", help="print exactly one JSON document on stdout")
    options, own = parser.parse_known_args(arguments)
    try:
        if options.name not in benches:
            raise InputError(f"no bench {options.name!r}; there are: {', '.join(sorted(benches))}")
        document = frame.report(benches[options.name](*own), runs=runs)
        if options.json:
            result_json(document)
        else:
            result(frame.table(document))
        missed = [f"{row['case']} ({row['bar']})" for row in document["rows"] if not row["holds"]]
        if missed:
            raise CheckFailedError(f"bench {options.name}: bar missed by {'; '.join(missed)}")
    except MopdctlError as error:
        note(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
