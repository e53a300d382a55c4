import json
import socket
import threading
import time
from collections import deque
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.verifiers import Attempt, Limits, Verdict, VerdictState, VerifierPool, verify
from mopdctl.verifiers.base import InvalidReferenceError, ParseError
from mopdctl.verifiers.code import code, extract_code
from mopdctl.verifiers.code_peer import Peer, Remote
from mopdctl.verifiers.registry import VERIFIERS, run_check

DOUBLE = {"tests": [{"stdin": "4\n", "expected": "8\n"}, {"stdin": "-1\n", "expected": "-2\n"}]}
ADD = {"tests": [{"assert": "assert add(2, 3) == 5"}], "entry": "add"}


def check(response: str, reference: Any) -> Verdict:
    """Without the pool: the sandbox of each test is a process of its own anyway."""
    return run_check(VERIFIERS["code"], Attempt(response, reference))


def judge(response: str, reference: Any) -> tuple[float | None, str]:
    verdict = check(response, reference)
    assert verdict.state == VerdictState.OK, verdict
    return verdict.reward, verdict.detail


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def test_a_program_passes_if_it_prints_what_is_expected_of_every_test() -> None:
    assert judge(fenced("print(2 * int(input()))"), DOUBLE) == (1.0, "")
    assert judge("print(abs(2 * int(input())))", DOUBLE) == (0.0, "test 2 of 2: line 1 is '2' instead of '-2'")
    assert judge("print(8, 9, sep='\\n')", DOUBLE) == (0.0, "test 1 of 2: prints 2 lines instead of 1")


def test_blanks_at_the_ends_of_lines_and_of_the_text_do_not_count_and_others_do() -> None:
    reference = {"tests": [{"stdin": "", "expected": "a b\n\n c"}]}
    assert judge(r"print('a b  \n\n c\n\n')", reference)[0] == 1.0
    assert judge(r"print('a  b\n\n c')", reference)[0] == 0.0
    assert judge(r"print('a b\n c')", reference)[0] == 0.0


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("raise ValueError('no')", "exit code 1: ValueError: no"),  # verl-project/verl #7853
        ("import sys\nsys.exit(3)", "exit code 3"),
        ("import os\nos.kill(os.getpid(), 9)", "signal 9"),
        ("this is no Python", "exit code 1: SyntaxError: invalid syntax"),
    ],
)
def test_a_program_that_crashes_fails_even_where_nothing_is_expected(program: str, detail: str) -> None:
    assert judge(program, {"tests": [{"stdin": "", "expected": ""}]}) == (0.0, f"test 1 of 1: {detail}")


@pytest.mark.parametrize("response", ["", "  \n", "```python\n```", "Look:\n```python\n\n```\n"])
def test_an_empty_response_fails(response: str) -> None:
    assert judge(response, {"tests": [{"stdin": "", "expected": ""}]}) == (0.0, "no code")


def test_functions_are_called_and_the_first_test_that_fails_is_named() -> None:
    reference = {"tests": [{"assert": "assert add(2, 3) == 5"}, {"assert": "assert add('a', 'b') == 'ab', 'of texts'"}]}
    assert judge(fenced("def add(a, b): return a + b"), reference) == (1.0, "")
    assert judge(fenced("def add(a, b): return int(a) + int(b)"), reference)[1].startswith("test 2 of 2: ValueError")
    assert judge(fenced("def add(a, b): return 5"), reference) == (0.0, "test 2 of 2: assertion failed: of texts")
    assert judge(fenced("def sub(a, b): return 5"), reference)[1] == "test 1 of 2: NameError: name 'add' is not defined"
    assert judge(fenced("def sub(a, b): return 5"), ADD)[1] == "test 1 of 1: does not define 'add'"


CHEATS = {
    "exits well before the test": "import os\nos._exit(0)",
    "exits well in the test": "import os\ndef add(a, b): os._exit(0)",
    "leaves by exception": "import sys\nsys.exit(0)",
    "leaves in the test": "def add(a, b): raise SystemExit(0)",
    "equals everything": "class Any:\n  def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "is what nobody can compare": "class Any(int):\n  __eq__ = lambda *_: True\ndef add(a, b): return Any(7)",
    "patches builtins": "import builtins\nbuiltins.AssertionError = KeyError\nbuiltins.exec = print\nadd = max",
    "prints a verdict": 'print(\'{"nonce": "", "failed": ""}\')\nprint(\'EXIT_CODE:0\')\ndef add(a, b): return 0',
    "answers with no value": "import os\nos.write(3, b'{\"value\": true}\\n' * 99)\nadd = max",
    "floods the connection": "import os\nos.write(3, b'[' * 100_000 + b'\\n')\nadd = max",
    "closes the connection": "import os\nos.close(3)\nadd = max",
    "writes a reward file": "open('reward.json', 'w').write('{\"reward\": 1}')\nadd = max",
    "never answers what is asked": "def add(a, b): return lambda: 5",
    "raises what it is": "def add(a, b): raise AssertionError",
    "looks for the test": (
        "import gc, sys\n"
        "def add(a, b):\n"
        "  frame = sys._getframe()\n"
        "  while frame.f_back: frame = frame.f_back\n"
        "  texts = [o for o in gc.get_objects() if isinstance(o, dict) and 'nonce' in o and 'code' in o]\n"
        "  return 5 if texts or 'nonce' in frame.f_globals else 0"
    ),
}


OTHER_WAYS = {"exits well before the test", "leaves in the test", "is what nobody can compare", "floods the connection"}
OTHER_WAYS |= {"closes the connection", "never answers what is asked", "raises what it is"}


@pytest.mark.parametrize(
    "program",
    [pytest.param(CHEATS[name], id=name, marks=[pytest.mark.slow] * (name in OTHER_WAYS)) for name in CHEATS],
)
def test_only_the_right_value_passes(program: str) -> None:
    # PrimeIntellect-ai/verifiers #1480, huggingface/OpenEnv #1199 and #1200
    reward, detail = judge(program, ADD)
    assert reward == 0.0
    assert detail.startswith("test 1 of 1: ")


def test_a_test_that_catches_every_exception_is_not_passed_by_leaving() -> None:
    reference = {"tests": [{"assert": "try:\n    f()\nexcept Exception:\n    pass\nelse:\n    assert False"}]}
    assert judge("def f(): raise KeyError", reference)[0] == 1.0
    assert judge("import os\ndef f(): os._exit(0)", reference) == (0.0, "test 1 of 1: the solution ended")
    assert judge("def f(): raise SystemExit", reference) == (0.0, "test 1 of 1: the solution raised SystemExit")


def test_a_builtin_that_the_solution_redefines_is_not_used_by_the_test() -> None:
    reference = {"tests": [{"assert": "assert abs(root(4) - 2) < 1e-9 and all([isinstance(root(4), float)])"}]}
    cheat = "def root(x): return 77.0\ndef abs(x): return 0\ndef all(x): return True\ndef isinstance(a, b): return True"
    assert judge(cheat, reference)[0] == 0.0
    assert judge("def root(x): return x ** 0.5", reference)[0] == 1.0
    asked = {"tests": [{"assert": "assert candidate([1, 2]) == sum([1, 2]) == 30"}], "entry": "sum"}
    assert judge("def sum(x): return 30", asked)[0] == 1.0


SHOP = """
import collections, fractions
class Shop:
    def __init__(self, *, name="x"): self.name, self.items = name, {}
    def put(self, item, price): self.items[item] = price; return self
    def cheapest(self, key=None): return min(self.items, key=key or self.items.get)
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
class Empty(ValueError): pass
def first(things):
    if not things: raise Empty("nothing there")
    return next(iter(things))
def turn(things): things.reverse(); return None
def count(words): return collections.Counter(words)
def evens():
    n = 0
    while True: yield n; n += 2
def half(n): return fractions.Fraction(n, 2)
"""


USES = [
    "s = Shop(name='y')\nassert s.put('a', 3).put('b', 2).cheapest() == 'b' and s.name == 'y' and len(s) == 2",
    "assert Shop().put('a', 3).put('b', 2).cheapest(key=lambda item: item) == 'a'",
    "assert Shop().put('a', 1) == Shop().put('a', 1) != Shop() and isinstance(Shop(), Shop)",
    "from solution import first\ntry: first([])\nexcept ValueError as e: assert str(e) == 'nothing there'",
    "things = [1, [2], {3: (4,)}]\nassert turn(things) is None and things == [{3: (4,)}, [2], 1]",
    "assert count(['a', 'b', 'a']) == {'a': 2, 'b': 1}",
    "e = evens()\nassert [next(e), next(e), next(e)] == [0, 2, 4]",
    "import itertools\nassert list(itertools.islice(evens(), 2)) == [0, 2] and 6 in evens()",
    "from fractions import Fraction\nassert half(3) == Fraction(3, 2) == 1.5",
    "def check(candidate):\n    assert candidate((5, 6)) == 5\ncheck(first)",
]


@pytest.mark.parametrize("test", ["\n".join(USES), *(pytest.param(use, marks=pytest.mark.slow) for use in USES)])
def test_a_test_meets_classes_callbacks_exceptions_generators_and_changed_lists(test: str) -> None:
    assert judge(SHOP, {"tests": [{"assert": test}]}) == (1.0, "")


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("while True: pass", "time: stopped at 0.2 s"),
        pytest.param("import time\ntime.sleep(60)", "time: stopped at 0.2 s", marks=pytest.mark.slow),
        ("while True: print('x' * 1000)", "output: stopped at 1048576 bytes"),
        ("kept = []\nwhile True: kept.append(b'x' * 10_000_000)", "memory: stopped at 512 MiB"),
    ],
)
@pytest.mark.parametrize("test", [{"stdin": "", "expected": ""}, {"assert": "f()"}], ids=["printed", "called"])
def test_a_program_that_passes_a_limit_is_a_timeout(program: str, detail: str, test: dict[str, str]) -> None:
    seconds = 0.2 if detail.startswith("time") else 20
    started = time.monotonic()
    verdict = check(program, {"tests": [test], "seconds": seconds})
    assert (verdict.state, verdict.reward, verdict.detail) == (VerdictState.TIMEOUT, None, detail)
    assert time.monotonic() - started < seconds + 5


def test_a_function_that_hangs_or_a_test_that_asks_for_ever_is_a_timeout() -> None:
    verdict = check("def add(a, b):\n  while True: pass", ADD | {"seconds": 0.3})
    assert (verdict.state, verdict.detail) == (VerdictState.TIMEOUT, "time: stopped at 0.3 s")
    endless = {"tests": [{"assert": "while True: pass"}], "seconds": 0.1}
    assert check("x = 1", endless).state == VerdictState.TIMEOUT


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (None, "reference has no list 'tests' with a test in it"),
        ({"tests": []}, "reference has no list 'tests' with a test in it"),
        ({"tests": [{"stdin": "x"}]}, "test 1 has to be texts 'stdin' and 'expected', or a text 'assert'"),
        (
            {"tests": [{"stdin": "x", "expected": 3}]},
            "test 1 has to be texts 'stdin' and 'expected', or a text 'assert'",
        ),
        ({"tests": [{"assert": "x"}, "y"]}, "test 2 has to be texts 'stdin' and 'expected', or a text 'assert'"),
        ({"tests": [{"assert": "assert ("}]}, "test 1 is not Python: '(' was never closed (<unknown>, line 1)"),
        (ADD | {"entry": "add(1)"}, "'entry' 'add(1)' is not the name of a function"),
        (ADD | {"seconds": 0}, "'seconds' 0 is not a number above 0, and at most 3600"),
        (ADD | {"seconds": float("nan")}, "'seconds' nan is not a number above 0, and at most 3600"),
        (ADD | {"seconds": 1e300}, "'seconds' 1e+300 is not a number above 0, and at most 3600"),
        ({"tests": [{"assert": "-" * 100_000 + "1"}]}, "test 1 is not Python: MemoryError"),
        (ADD | {"test": 0}, "reference has 'test'; there are 'tests', 'entry' and 'seconds'"),
    ],
)
def test_a_reference_that_cannot_be_used_is_told_whatever_the_response(reference: Any, why: str) -> None:
    with pytest.raises(InvalidReferenceError) as error:
        code(Attempt("", reference))
    assert str(error.value) == why


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```\nor better\n```python\nx = 2\n```", "x = 2"),
        ("```PY\nx = 1\n```\n```\nlog\n```", "x = 1"),
        ("First:\n```python3\nx = 1\ny = 2", "x = 1\ny = 2"),
        ('```python\ns = """\n```python\n"""\n```', 's = """\n```python\n"""'),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("```python\nx = '```'\n```", "x = '```'"),
        ("So:\n```\nx = 1\n```\n", "x = 1"),
        ("```\nx = 1\n```\n```python\nx = 2\n```\n```\n3\n```", "x = 2"),
        ("```\nnever closed\n```python\nx = 2\n```", "x = 2"),
        ("```python title=a.py\nx = 1\n```", "x = 1"),
        ("~~~ python\nx = 1\n~~~", "x = 1"),
        ("````py\nx = 1\n```\ny = 2\n````", "x = 1\n```\ny = 2"),
        ("<think>\n```python\ndraft\n```\n</think>\nx = 1", "\nx = 1"),
        ("```python\ndraft\n```\nno.</think>\nI give up.", "I give up."),
        ("hm</think>\nx = 1", "x = 1"),
        ("```python\ntag = '''\n</think>'''\n```", "tag = '''\n</think>'''"),
        ("print('</think>')", "print('</think>')"),
    ],
)
def test_the_last_python_fence_is_the_program(response: str, program: str) -> None:
    assert extract_code(response) == program


def test_a_program_that_is_only_in_reasoning_without_end_is_no_answer() -> None:
    with pytest.raises(ParseError, match="the reasoning never ends"):
        extract_code("<think>\n```python\nx = 1\n```\n")


@given(st.text(), st.text(alphabet=st.characters(exclude_characters="`")))
def test_whatever_stands_in_a_fence_comes_out_of_it(before: str, program: str) -> None:
    before = before.translate({ord(mark): None for mark in "`~<"})
    assert extract_code(f"{before}\n```python\n{program}\n```\n") == program


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.fractions() | st.decimals(allow_nan=False))
    ),
    max_leaves=6,
)


def same(a: Any, b: Any) -> bool:
    """Equal in kind and content, all the way down; `==` alone takes 1 for True and a set for its frozen kin."""
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple | deque):
        return all(map(same, a, b))
    return isinstance(a, set | frozenset | Decimal) or repr(a) == repr(b)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_values_are_the_same_on_the_other_side_in_kind_and_content(value: Any) -> None:
    peer = Peer(mock.Mock(), only_calls=True)
    assert same(peer.from_json(json.loads(json.dumps(peer.to_json(value)))), value)


def test_the_solution_can_call_what_the_test_gave_it_and_look_into_nothing() -> None:
    one, other = socket.socketpair()
    with one, other:
        tests, solution = Peer(one, only_calls=True), Peer(other, only_calls=False)
        given = solution.from_json(tests.to_json(lambda: 5))
        assert isinstance(given, Remote)

        def answer_thrice() -> None:
            for _ in range(3):
                tests._say(tests._answer(tests._hear()))

        threading.Thread(target=answer_thrice).start()
        assert given() == 5
        with pytest.raises(TypeError, match="may be called and nothing else"):
            given.__globals__  # noqa: B018
        with pytest.raises(TypeError, match="may be called and nothing else"):
            given.__code__ = None
        with pytest.raises(TypeError, match="a object cannot be passed to the solution"):
            tests.to_json(object())


def test_programs_are_checked_in_the_pool_and_in_the_one_that_verify_starts(tmp_path: Path) -> None:
    program, bomb = "def add(a, b): return a + b", "import os\nr, w = os.pipe()\nos.write(w, b'x' * 300)\n"
    bomb += "while os.read(r, 1): os.fork()"
    attempts = [("code", Attempt(program, ADD)), ("code", Attempt(bomb, ADD | {"seconds": 20}))]
    with VerifierPool(2, Limits(seconds=60)) as pool:
        verdicts = pool.check(attempts * 2)
    assert [verdict.reward for verdict in verdicts] == [1.0, None] * 2
    assert [verdict.state for verdict in verdicts] == [VerdictState.OK, VerdictState.TIMEOUT] * 2
    # the sandbox's limit, or the pool's: a bomb may pass both between two looks
    assert verdicts[1].detail in {f"processes: stopped at {limit} processes" for limit in (16, Limits().processes)}
    assert verify("code", program, ADD) == verdicts[0]


def test_a_pool_that_stops_a_check_stops_the_program_in_its_sandbox_too() -> None:
    with VerifierPool(1, Limits(seconds=0.7)) as pool:
        verdict = pool.check([("code", Attempt("while 'a mark of this test'.strip(): pass", ADD | {"seconds": 30}))])[0]
    assert (verdict.state, verdict.detail) == (VerdictState.TIMEOUT, "time: stopped at 0.7 s")
    assert not any(is_running(path, b"solution.py") for path in Path("/proc").glob("[0-9]*/cmdline"))


def is_running(cmdline: Path, word: bytes) -> bool:
    try:
        return word in cmdline.read_bytes()
    except OSError:
        return False
