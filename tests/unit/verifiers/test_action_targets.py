import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers.base import InvalidReferenceError
from mopdctl.verifiers.shell import Command, commands, main_command, paths
from mopdctl.verifiers.targets import same_path, same_target, tool_category, view_range

# --------------------------------------------------------------------------------------------------------------- shell


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("pytest", "pytest"),
        ("/usr/bin/python3 a.py", "python3"),
        ("FOO=1 pytest", "pytest"),
        ("FOO=1 BAR='a b' pytest -x", "pytest"),
        ("PATH+=:/x pytest", "pytest"),
        ("cd x && pytest", "pytest"),
        ("cd /a/b; FOO=1 pytest tests/", "pytest"),
        ("cd x\nexport A=1\npytest", "pytest"),
        ("source venv/bin/activate && (cd y && make test)", "make"),
        ("grep -rn 'a && b' . | head -5", "grep"),
        ("timeout -k 5 60 pytest", "pytest"),
        ("sudo -u me env -u X FOO=1 nice -n 5 make", "make"),
        ("time nohup ./run.sh > out.txt 2>&1 &", "run.sh"),
        ("bash -lc 'cd x && pytest -q'", "pytest"),
        ("bash -c \"bash -c 'FOO=1 make all'\"", "make"),
        ("bash run.sh", "bash"),
        ("echo 'never closed", "echo"),
        ("cd x", "cd"),
        ("cat <<EOF > a.py\nprint('x')\nEOF", "cat"),
        ("# first\npytest", "#"),
    ],
)
def test_the_program_that_does_the_work_is_found(text: str, verb: str) -> None:
    found = main_command(text)
    assert found is not None
    assert found.verb == verb


@pytest.mark.parametrize("text", ["", " \n", "FOO=1", "&&", ";;", "env -u", "timeout 5", "sudo"])
def test_a_line_without_a_program_has_none(text: str) -> None:
    assert main_command(text) is None


def test_a_chain_is_taken_apart_into_its_commands() -> None:
    assert commands("cd a && FOO='x y' grep -n \"b c\" d.py | wc -l; ls") == [
        Command("cd", ("a",)),
        Command("grep", ("-n", "b c", "d.py")),
        Command("wc", ("-l",)),
        Command("ls", ()),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("grep -rn foo src/utils/ tests", {"src/utils/"}),
        ("cd /repo && pytest tests/test_a.py::test_b", set()),
        ("cd /repo && pytest tests/test_a.py", {"tests/test_a.py"}),
        ("cd /repo && ls", {"/repo"}),
        ("python a.py --config=b.yaml", {"a.py"}),
        ("ls . .. / -la", set()),
    ],
)
def test_words_that_look_like_paths_are_paths(text: str, found: set[str]) -> None:
    if "::" in text:
        found = {"/repo"}  # a test's name is no path, so the folder is what is left
    assert paths(text) == found


@pytest.mark.parametrize("text", ["'" * 300_001, "a" * 500_000, "FOO=1 " * 100_000, "( " * 100_000, "a/" * 200_000])
def test_long_commands_are_read_quickly(text: str) -> None:
    started = time.process_time()
    paths(text)
    assert time.process_time() - started < 1


@given(st.text("abcd'\"\\ \n&|;()<>=#$-/.", max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    found = main_command(text)
    assert found is None or found in commands(text)
    assert all(command.verb for command in commands(text))


# ----------------------------------------------------------------------------------------------------- tools and paths


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("str_replace_editor", "edit"),
        ("StrReplaceEditor", "edit"),
        ("execute_bash", "bash"),
        ("list_dir", "search"),
        ("cat_file", "read"),
        ("submit", "finish"),
        ("think", "think"),
        ("todoWrite", "planning"),
        ("book_flight", None),
        ("unknown", None),
    ],
)
def test_coding_tools_have_categories_in_snake_and_camel_case(name: str, category: str | None) -> None:
    assert tool_category(name) == category


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/workspace/src/a.py", "/repo/src/a.py", True),
        ("/workspace/src/a.py", "/workspace/test/a.py", False),
        ("a.py", "/workspace/src/a.py", True),
        ("./src//a.py", "src/a.py", True),
        ("src/a.py", "src/b.py", False),
        ("/", "/", True),
        ("/", "a", False),
    ],
)
def test_paths_are_the_same_by_their_last_two_parts(one: str, other: str, same: bool) -> None:
    assert same_path(one, other) is same
    assert same_path(other, one) is same


def target(name: str, got: dict[str, Any], expected: dict[str, Any], got_name: str | None = None) -> tuple[bool, str]:
    return same_target({"name": got_name or name, "arguments": got}, {"name": name, "arguments": expected})


# ------------------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ([5, 5], [5, 5], True),
        ([10, -1], [10, -1], True),
        ([1, -1], [10, -1], True),
        ([11, -1], [10, -1], False),
        ([10, 500], [10, -1], False),
        ([10, -1], [10, 20], True),
        (None, [10, -1], True),
        (None, [10, 20], True),
        ([1, -1], None, True),
        ([1, 500], None, False),
        ([1, 8], [1, 10], True),
        ([1, 7], [1, 10], False),
        ([3, 10], [1, 10], True),
        ([6, 6], [5, 5], False),
        ("[5, 5]", [5, 5], True),
        ([1, 10**400], [1, 10], True),
        ([10**400, 10**400], [1, 10], False),
        ([5], [5, 5], False),
        ([9, 3], [5, 5], False),
        ([0, 5], [5, 5], False),
        ([1.5, 5], [5, 5], False),
        ("5-5", [5, 5], False),
        ("[" * 100_000, [5, 5], False),
    ],
)
def test_a_view_covers_four_fifths_of_the_inclusive_range_of_lines(got: Any, expected: Any, same: bool) -> None:
    arguments = [
        {"command": "view", "path": "a.py"} | ({} if r is None else {"view_range": r}) for r in (got, expected)
    ]
    assert target("str_replace_editor", *arguments)[0] is same


@pytest.mark.parametrize("lines", [[9, 3], [0, 5], [1, -2], "all", [1, True]])
def test_an_expected_range_that_is_none_is_the_documents_fault(lines: Any) -> None:
    view = {"command": "view", "path": "a.py", "view_range": lines}
    assert view_range(lines) is None
    with pytest.raises(InvalidReferenceError, match="is no range of lines"):
        target("edit", view, view)


@pytest.mark.parametrize(
    ("name", "got", "expected", "why"),
    [
        (
            "edit",
            {"command": "create", "path": "a.py"},
            {"command": "view", "path": "a.py"},
            "does 'create' instead of 'view'",
        ),
        ("edit", {"path": "src/b.py"}, {"path": "src/a.py"}, "acts on 'src/b.py' instead of 'src/a.py'"),
        ("edit", {"path": "src/a.py", "new_str": "x"}, {"file_path": "/w/src/a.py", "new_str": "y"}, ""),
        ("read", {"path": "src/b.py"}, {"path": "src/a.py"}, "acts on 'src/b.py' instead of 'src/a.py'"),
        ("grep", {"pattern": "x"}, {"pattern": "y", "path": "src"}, "acts on '.' instead of 'src'"),
        ("grep", {"pattern": "x"}, {"pattern": "y", "path": "."}, ""),
        ("grep", {"pattern": "x", "path": "src"}, {"pattern": "y"}, ""),
        ("think", {"thought": "a"}, {"thought": "b"}, ""),
        ("bash", {"command": "FOO=1 pytest a.py"}, {"command": "pytest a.py"}, ""),
        ("bash", {"command": "cd x && pytest"}, {"command": "pytest"}, ""),
        ("bash", {"cmd": ["bash", "-lc", "cd x && pytest"]}, {"command": "pytest"}, ""),
        ("bash", {"command": "pytest"}, {"command": "cd x && ls"}, "runs 'pytest' instead of 'ls'"),
        (
            "bash",
            {"command": "cd x && pytest b.py"},
            {"command": "cd x && pytest a.py"},
            "runs 'pytest' on other paths",
        ),
        ("bash", {"command": "cd /a/b && ls"}, {"command": "cd /a/c && ls"}, "runs 'ls' on other paths"),
        ("bash", {"command": "FOO=1"}, {"command": "pytest"}, "runs 'nothing' instead of 'pytest'"),
        ("bash", {}, {}, ""),
    ],
)
def test_calls_have_the_same_target_or_a_reason_why_not(name: str, got: Any, expected: Any, why: str) -> None:
    assert target(name, got, expected) == (not why, why)


def test_tools_of_one_category_stand_for_each_other_and_unknown_ones_only_for_themselves() -> None:
    assert target("execute_bash", {"command": "ls"}, {"command": "ls"}, "shell_run") == (True, "")
    assert target("Execute_Bash", {"command": "ls"}, {"command": "ls"}, "execute_bash") == (True, "")
    assert target("edit", {}, {}, "bash") == (False, "calls 'bash' instead of 'edit'")
    assert target("tool_a", {}, {}, "tool_b") == (False, "calls 'tool_b' instead of 'tool_a'")
    assert target("tool_a", {"x": 1}, {"x": 2}) == (True, "")


@pytest.mark.parametrize(
    ("name", "got", "expected", "why"),
    [
        ("read_file", {}, {"path": "src/a.py"}, "acts on 'nothing' instead of 'src/a.py'"),
        ("read_file", {"path": None}, {"path": "src/a.py"}, "acts on 'nothing' instead of 'src/a.py'"),
        ("read_file", {"path": " "}, {"path": "/"}, "acts on 'nothing' instead of '/'"),
        ("edit_file", {}, {"path": "a.py", "new_str": "x"}, "acts on 'nothing' instead of 'a.py'"),
        ("edit", {"path": "a.py"}, {"path": "a.py", "command": "create"}, "does 'nothing' instead of 'create'"),
        (
            "edit",
            {"path": "a.py", "command": None},
            {"path": "a.py", "command": "view"},
            "does 'nothing' instead of 'view'",
        ),
        ("bash", {"command": "cat"}, {"command": "cat src/a.py"}, "runs 'cat' on no path"),
        ("bash", {"command": "ls"}, {"command": "cd /repo && ls"}, ""),
        ("bash", {"command": None, "cmd": "ls"}, {"command": "ls"}, ""),
    ],
)
def test_a_call_that_does_not_name_the_expected_target_has_another(
    name: str, got: Any, expected: Any, why: str
) -> None:
    assert target(name, got, expected) == (not why, why)
    assert target(name, expected, expected) == (True, "")


@pytest.mark.parametrize("arguments", [{"path": None, "file_path": "src/a.py"}, {"path": "", "file": "src/a.py"}])
def test_a_null_or_empty_argument_does_not_hide_the_path_under_another_name(arguments: dict[str, Any]) -> None:
    assert target("read_file", arguments, {"path": "src/a.py"}) == (True, "")
    assert target("read_file", {"path": "src/b.py"}, arguments)[0] is False


def test_only_another_tool_may_leave_the_sub_command_out_and_none_views_without_one() -> None:
    create, view = ({"command": command, "path": "a.py"} for command in ("create", "view"))
    assert target("str_replace_editor", {"path": "a.py"}, create, "write_file") == (True, "")
    assert target("str_replace_editor", {"path": "a.py"}, view, "write_file") == (
        False,
        "does 'nothing' instead of 'view'",
    )
    assert target("write_file", view, {"path": "a.py"}, "str_replace_editor") == (
        False,
        "does 'view' instead of 'nothing'",
    )


CODEX = "*** Begin Patch\n*** Update File: {}\n@@\n-a\n+b\n*** End Patch"
UNIFIED = "--- a/{0}\t2026\n+++ b/{0}\t2026\n@@ -1 +1 @@\n--- a\n+b\n"


@pytest.mark.parametrize("patch", [CODEX, UNIFIED])
def test_a_patch_acts_on_the_files_that_its_text_names(patch: str) -> None:
    expected = {"patch": patch.format("src/a.py")}
    assert target("apply_patch", {"input": CODEX.format("src/a.py")}, expected) == (True, "")
    assert target("apply_patch", {"path": "src/a.py"}, expected, "edit_file") == (True, "")
    assert target("apply_patch", {}, expected) == (False, "acts on 'nothing' instead of 'src/a.py'")
    two = {"patch": patch.format("src/a.py") + "\n" + patch.format("src/b.py")}
    assert target("apply_patch", two, expected) == (False, "acts on 'src/a.py, src/b.py' instead of 'src/a.py'")
    assert target("apply_patch", expected, two)[0] is False
    removed = {"patch": "--- a/src/a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"}
    assert target("apply_patch", removed, expected) == (True, "")


@pytest.mark.parametrize("patch", ["--- " + "a" * 100_000, "--- a\n" * 50_000, "*** Add File: x\n" * 50_000])
def test_long_patches_are_read_quickly(patch: str) -> None:
    started = time.process_time()
    target("apply_patch", {"patch": patch}, {"path": "a.py"})
    assert time.process_time() - started < 1
