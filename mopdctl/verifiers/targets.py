"""Calls of coding tools: which kind of tool it is, and what it acts on."""

import json
import math
import re
import shlex
from typing import Any

from mopdctl.verifiers import shell
from mopdctl.verifiers.base import InvalidReferenceError

# The tools of OpenHands, OpenCode, Codex, SWE-agent and their renamings, as NeMo Gym's `swe_pivot` sorts them.
_CATEGORIES = {
    "edit": """str_replace_editor text_editor file_editor code_editor edit_file modify_file update_file file_edit edit
        modify apply_patch patch_file apply_diff apply_changes write write_file save_file create_file""",
    "bash": """execute_bash run_bash bash_exec shell_run shell bash terminal shell_command shell_cmd run_shell_cmd
        exec_command exec_cmd""",
    "search": """grep search_text find_pattern text_search glob find_files file_glob match_files grep_files search_files
        find_in_files code_search list_dir ls show_dir ls_dir list_directory""",
    "read": "read read_file view_file cat_file view file_view inspect show_file read_file_content",
    "finish": "finish submit",
    "think": "think",
    "planning": """task_tracker todo_tracker plan_tracker todo_read todo_write update_plan list_tasks update_tasks
        read_todos write_todos edit_plan modify_plan""",
}
_CATEGORY_OF = {
    spelling: category
    for category, names in _CATEGORIES.items()
    for name in names.split()
    for spelling in (name, name.replace("_", ""))
}

PATH_KEYS = ("path", "file", "file_path", "filename", "file_name")
COMMAND_KEYS = ("command", "cmd")

_PATCH_KEYS = ("patch", "diff", "input", "patch_text", "patchText")
# The file that a part of a patch is for: Codex's own form, and that of `diff -u`.
_PATCHED = re.compile(
    r"^\*\*\* (?:Add|Update|Delete) File: ([^\n]+)$|^--- (?:a/)?([^\t\n]++)[^\n]*+\n\+\+\+ (?:b/)?([^\t\n]+)",
    re.MULTILINE,
)

_WHOLE_FILE = (1, math.inf)


def tool_category(name: str) -> str | None:
    """`edit`, `bash`, `search`, `read`, `finish`, `think` or `planning`, in snake or camel case; else None."""
    return _CATEGORY_OF.get(name.lower())


def same_target(got: dict[str, Any], expected: dict[str, Any]) -> tuple[bool, str]:
    """Whether two calls of coding tools do the same kind of thing to the same thing, and if not, why.

    - Tools: the same name or the same category.
    - Files (edit, search, read): the last two parts of the path are the same, or the shorter path ends the longer. A
      path that is left out is another one; in a search it is the current folder. A patch names its files in its text.
    - Editors: the same sub-command, which another tool may leave out unless it is `view`; a `view` covers at least 80 %
      of the lines of the expected one. Line ranges are inclusive and -1 is the end of the file; without a range it is
      the whole file. Of a range up to the end of the file nobody knows the length, so it is covered only by a range
      that starts no later and runs to the end too.
    - Commands (bash): the same program does the work (see `shell.main_command`), and where both name paths, they have
      one in common. Paths that the expected program is given have to be named.

    What is written into a file, or searched for, is not compared. Raises InvalidReferenceError where the line range of
    the expected call is none.
    """
    why = _difference(got, expected)
    return not why, why


def _difference(got: dict[str, Any], expected: dict[str, Any]) -> str:
    category = tool_category(expected["name"])
    if got["name"].lower() != expected["name"].lower() and (category is None or tool_category(got["name"]) != category):
        return f"calls {got['name']!r} instead of {expected['name']!r}"
    mine, theirs = got["arguments"], expected["arguments"]
    if category == "bash":
        return _command_difference(command_text(mine), command_text(theirs))
    if category not in ("edit", "search", "read"):
        return ""
    if category == "edit":
        editor, expected_editor = (_text_of(arguments, ("command",)) for arguments in (mine, theirs))
        named = expected_editor and (editor or got["name"].lower() == expected["name"].lower())
        if editor != expected_editor and (named or "view" in (editor, expected_editor)):
            return f"does {editor or 'nothing'!r} instead of {expected_editor or 'nothing'!r}"
    missing = "." if category == "search" else ""
    files, expected_files = _files(mine) or [missing], _files(theirs)
    if expected_files and not _same_files(files, expected_files):
        return f"acts on {', '.join(files) or 'nothing'!r} instead of {', '.join(expected_files)!r}"
    if category == "edit" and _text_of(theirs, ("command",)) == "view":
        return _range_difference(mine.get("view_range"), theirs.get("view_range"))
    return ""


def _files(arguments: dict[str, Any]) -> list[str]:
    """The file that a call names, or the files that its patch is for; empty if it names none."""
    if path := _text_of(arguments, PATH_KEYS):
        return [path]
    patched = _PATCHED.findall(_text_of(arguments, _PATCH_KEYS))
    found = (
        (marked or (before if after.strip() == "/dev/null" else after)).strip() for marked, before, after in patched
    )
    return list(dict.fromkeys(filter(None, found)))


def _same_files(some: list[str], others: list[str]) -> bool:
    return all(any(a and same_path(a, b) for b in others) for a in some) and all(
        any(a and same_path(a, b) for a in some) for b in others
    )


def _text_of(arguments: dict[str, Any], keys: tuple[str, ...]) -> str:
    """The first of these arguments that says something, stripped; else an empty text. A null says nothing."""
    texts = (str(arguments[key]).strip() for key in keys if arguments.get(key) is not None)
    return next(filter(None, texts), "")


def command_text(arguments: dict[str, Any]) -> str:
    """The shell command of a call; a list of words (`["bash", "-lc", "ls"]`) is written as one line."""
    words = next((arguments[key] for key in COMMAND_KEYS if arguments.get(key) is not None), "")
    return shlex.join(str(word) for word in words) if isinstance(words, list) else str(words).strip()


def same_path(one: str, other: str) -> bool:
    """Whether the last two parts of two paths agree, or all parts of the shorter one: checkouts lie anywhere."""
    a, b = ([part for part in path.split("/") if part not in ("", ".")] for path in (one, other))
    count = min(2, len(a), len(b))
    return a[len(a) - count :] == b[len(b) - count :] if count else a == b


def _command_difference(got: str, expected: str) -> str:
    mine, theirs = shell.main_command(got), shell.main_command(expected)
    if theirs is None:
        return ""
    if mine is None or mine.verb != theirs.verb:
        return f"runs {mine.verb if mine else 'nothing'!r} instead of {theirs.verb!r}"
    paths, expected_paths = shell.paths(got), shell.paths(expected)
    if paths and expected_paths and not any(same_path(a, b) for a in paths for b in expected_paths):
        return f"runs {mine.verb!r} on other paths"
    if not paths and shell.working_paths(expected):
        return f"runs {mine.verb!r} on no path"
    return ""


def _range_difference(got: Any, expected: Any) -> str:
    theirs = view_range(expected)
    if theirs is None:
        raise InvalidReferenceError(f"the expected view_range {expected!r} is no range of lines")
    mine = view_range(got)
    if mine is None:
        return f"view_range {got!r} is no range of lines"
    if theirs[1] == math.inf:
        covered = mine[1] == math.inf and mine[0] <= theirs[0]
    else:
        shared = min(mine[1], theirs[1]) - max(mine[0], theirs[0]) + 1
        covered = 5 * shared >= 4 * (theirs[1] - theirs[0] + 1)  # in whole numbers, which may be huge
    return "" if covered else f"views lines {got!r} instead of {expected!r}"


def view_range(raw: Any) -> tuple[int, float] | None:
    """The first and the last line that an editor's `view_range` shows, -1 as infinity; no range is the whole file.

    A text that holds the list as JSON is read too. None for anything else.
    """
    if raw is None:
        return _WHOLE_FILE
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            return None
    if not (isinstance(raw, list) and len(raw) == 2 and all(type(line) is int for line in raw)):
        return None
    first, last = raw
    if first < 1 or (last != -1 and last < first):
        return None
    return first, math.inf if last == -1 else last
