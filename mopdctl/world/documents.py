"""The test documents in `sample_data/`.

python -m mopdctl.world.documents           writes them
python -m mopdctl.world.documents --check   exits with 3 if a file there is not what the world would write now
"""

import argparse
import json
import sys
from pathlib import Path

from mopdctl.errors import CheckFailedError, MopdctlError
from mopdctl.files import write_text
from mopdctl.runs import shipped
from mopdctl.world.data import document_rows
from mopdctl.world.domains import DOMAINS


def document_files() -> dict[str, str]:
    """File name to contents, for every domain."""
    return {
        f"{domain}_test.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in document_rows(domain))
        for domain in DOMAINS
    }


def check(folder: Path) -> None:
    """Raises CheckFailedError naming the files in `folder` that are absent, stale or left over."""
    files = document_files()
    found = {path.name for path in folder.glob("*_test.jsonl")}
    wrong = sorted(
        name
        for name in files.keys() | found
        if name not in files or name not in found or (folder / name).read_text("utf-8") != files[name]
    )
    if wrong:
        raise CheckFailedError(
            f"{folder}: not what the world writes now: {', '.join(wrong)}; run python -m mopdctl.world.documents"
        )


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the files; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mopdctl.world.documents", description="Write the test documents of the tiny world."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 3 if a file is stale")
    parser.add_argument("--folder", type=Path, default=None, help="where the files lie (default: sample_data)")
    options = parser.parse_args(arguments)
    folder = options.folder or shipped("sample_data")
    try:
        if options.check:
            check(folder)
        else:
            for name, text in document_files().items():
                write_text(folder / name, text)
    except MopdctlError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
