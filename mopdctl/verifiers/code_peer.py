"""The two programs of a test by assertion, each in a sandbox of its own, with a socket between them.

`serve` runs the solution and answers calls. `test` runs the test against stand-ins for the solution's functions. Only
values cross, so the comparison happens where the solution is not: an object that claims to be equal to everything, a
patched builtin, a printed verdict or an early exit are seen as what they are, another answer or none.

Numbers, text, bytes, lists, tuples, dicts, sets, deques, fractions and decimals are copied. Anything else stays where
it is and is called from afar. A list, dict or set that was passed is updated with what the call made of it; identity
(`is`) does not survive. Runs as a script, with nothing but the standard library.
"""

import builtins
import importlib
import json
import operator
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

_COPIED_AS_TEXT = {("fractions", "Fraction"), ("decimal", "Decimal")}
_HANDED_ON = tuple(
    f"__{name}__"
    for name in (
        *("len", "iter", "next", "getitem", "setitem", "delitem", "str", "repr", "bool", "int", "float", "index"),
        *("hash", "enter", "exit", "instancecheck"),
    )
)
_AMONG_KIN = tuple(f"__{name}__" for name in ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv"))
"""What a stand-in hands on only if the other operand is one too. Held against something that the test wrote down, the
answer would be the solution's own word for it. For the same reason `in` looks at the items, one by one."""


class LostError(BaseException):
    """Raised where the other side is gone. No Exception, so that a test that expects one does not take it for that."""


class Peer:
    """One side of the conversation: calls the other side, and answers its calls while it waits."""

    def __init__(self, connection: socket.socket, *, only_calls: bool) -> None:
        """With `only_calls` the other side may call what it was given and look into nothing."""
        self.lines = connection.makefile("rwb")
        self.only_calls = only_calls
        self.mine: list[Any] = []
        self.lost = ""
        """Why the other side can give no answer any more, even if somebody catches the error."""

    def ask(self, target: int | None, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Calls what the other side knows as `target`, or its method; raises what that raised."""
        self._say({"ask": [target, name], "arguments": self.to_json([list(arguments), named])})
        while True:
            message = self._hear()
            if "ask" in message:
                self._say(self._answer(message))
            elif "raised" in message:
                raise self._as_exception(*message["raised"])
            else:
                value, after = self.from_json(message["value"])
                for argument, changed in zip(arguments, after, strict=False):
                    _update(argument, changed)
                return value

    def serve(self) -> None:
        """Answers until the other side is gone."""
        while True:
            self._say(self._answer(self._hear()))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            (target, name), (arguments, named) = message["ask"], self.from_json(message["arguments"])
            value = self._look_up(target, name)(*arguments, **named)
            return {"value": self.to_json([value, arguments])}
        except LostError:
            raise
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            return {"raised": [kinds, type(error).__name__, str(error)[:500]]}

    def _look_up(self, target: int | None, name: str) -> Callable[..., Any]:
        thing = self.mine[target or 0]
        if name == "__call__":
            return thing  # type: ignore[no-any-return]
        if name == "__bool__":
            return lambda: bool(thing)
        if self.only_calls:
            raise TypeError("this may be called and nothing else")
        if name == "__instancecheck__":
            return lambda instance: isinstance(instance, thing)
        if name == "__getattr__":
            return lambda attribute: getattr(thing, attribute)
        if name == "__setattr__":
            return lambda attribute, value: setattr(thing, attribute, value)
        if name == "__operator__":
            return lambda operation, other: getattr(operator, operation)(thing, other)
        if not hasattr(thing, name):  # as Python says it of special methods; some callers expect just that
            raise TypeError(f"a {type(thing).__name__} has no {name}")
        return getattr(thing, name)  # type: ignore[no-any-return]

    def to_json(self, value: Any) -> Any:
        """A value as JSON: plain ones as they are, others as `[kind, ...]`."""
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            value = value.item()
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, bytes | bytearray):
            return ["bytearray" if isinstance(value, bytearray) else "bytes", value.hex()]
        if isinstance(value, dict):
            return ["dict", *([self.to_json(key), self.to_json(item)] for key, item in value.items())]
        for kind in (list, tuple, frozenset, set):
            if isinstance(value, kind):
                return [kind.__name__, *map(self.to_json, value)]
        if type(value).__module__ == "collections" and type(value).__name__ == "deque":
            return ["deque", *map(self.to_json, value)]
        if (type(value).__module__, type(value).__name__) in _COPIED_AS_TEXT:
            return ["text", type(value).__module__, type(value).__name__, str(value)]
        if isinstance(value, Remote):
            return ["yours", object.__getattribute__(value, "_number")]
        if self.only_calls and not callable(value):
            raise TypeError(f"a {type(value).__name__} cannot be passed to the solution")
        self.mine.append(value)
        return ["mine", len(self.mine) - 1]

    def from_json(self, value: Any) -> Any:
        """The inverse of `to_json`, on the other side."""
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)(map(self.from_json, rest))
        if kind == "dict":
            return {self.from_json(key): self.from_json(item) for key, item in rest}
        if kind == "deque":
            return importlib.import_module("collections").deque(map(self.from_json, rest))
        if kind == "complex":
            return complex(*rest)
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(rest[0])
        if kind == "text" and tuple(rest[:2]) in _COPIED_AS_TEXT:
            return getattr(importlib.import_module(rest[0]), rest[1])(rest[2])
        if kind == "yours":
            return self.mine[rest[0]]
        if kind == "mine" and isinstance(rest[0], int):
            return Remote(self, rest[0])
        raise self._is_lost("the solution wrote into the connection")

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self.lines.write(json.dumps(message).encode() + b"\n")
            self.lines.flush()
        except OSError:
            raise self._is_lost("the solution ended") from None

    def _hear(self) -> dict[str, Any]:
        try:
            message = json.loads(self.lines.readline())
        except (OSError, ValueError):
            raise self._is_lost("the solution ended") from None
        if not isinstance(message, dict):
            raise self._is_lost("the solution wrote into the connection")
        return message

    def _is_lost(self, why: str) -> LostError:
        self.lost = why
        return LostError(why)

    def _as_exception(self, kinds: list[str], name: str, text: str) -> BaseException:
        """An exception as the test may expect it: of the nearest builtin class, with the name that it had there."""
        classes = (getattr(builtins, kind, None) for kind in kinds)
        nearest = next((kind for kind in classes if isinstance(kind, type)), None)
        if nearest is None or not issubclass(nearest, Exception):
            return self._is_lost(f"the solution raised {name}")
        try:
            return nearest(text) if name == nearest.__name__ else type(name, (nearest,), {})(text)
        except TypeError:  # UnicodeDecodeError and its like want more than a text
            return Exception(f"{name}: {text}")


class Remote:
    """Stands for something on the other side."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        """Calls it there."""
        return _ask(self, "__call__", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "__getattr__", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "__setattr__", name, value)

    def __contains__(self, wanted: object) -> bool:
        return any(item == wanted for item in self)  # type: ignore[attr-defined]


def _ask(remote: Remote, name: str, /, *arguments: Any, **named: Any) -> Any:
    peer = object.__getattribute__(remote, "_peer")
    return peer.ask(object.__getattribute__(remote, "_number"), name, *arguments, **named)


def _handed_on(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _ask(self, name, *arguments)


def _among_kin(name: str) -> Callable[..., Any]:
    return lambda self, other: _ask(self, "__operator__", name, other) if isinstance(other, Remote) else NotImplemented


for _name in _HANDED_ON:
    setattr(Remote, _name, _handed_on(_name))
for _name in _AMONG_KIN:
    setattr(Remote, _name, _among_kin(_name))


def _update(mine: Any, changed: Any) -> None:
    """What a call did to a list, dict or set that it was given."""
    if isinstance(mine, list) and isinstance(changed, list):
        mine[:] = changed
    elif isinstance(mine, dict | set) and type(mine) is type(changed):
        mine.clear()
        mine.update(changed)


def serve_solution(peer: Peer, path: str) -> None:
    """Runs the solution, tells its public names, then answers calls. Ends with the other side."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        exec(compile(file.read(), path, "exec"), module.__dict__)
    names = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    peer.mine.append(lambda: names)
    try:
        peer.serve()
    finally:
        os._exit(0)


def run_test(peer: Peer, code: str, entry: str | None) -> str:
    """Runs the test; what failed, or an empty text."""
    try:
        names = peer.ask(0, "__call__")
        if entry is not None and entry not in names:
            return f"does not define {entry!r}"
        # A solution that defines `abs` or `all` shall not be asked by a test that means the builtin.
        names = {name: value for name, value in names.items() if name == entry or not hasattr(builtins, name)}
        sys.modules["solution"] = types.ModuleType("solution")
        vars(sys.modules["solution"]).update(names)
        scope = {"__name__": "test", **names}
        if entry is not None:
            scope["candidate"] = names[entry]
        exec(compile(code, "test", "exec"), scope)
    except LostError:
        pass
    except AssertionError as error:
        return f"assertion failed: {error}" if str(error) else "assertion failed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return peer.lost


def main() -> None:
    """`serve PATH` or `test`; the socket is file descriptor 3."""
    sys.set_int_max_str_digits(0)
    connection = socket.socket(fileno=3)
    if sys.argv[1] == "serve":
        serve_solution(Peer(connection, only_calls=False), sys.argv[2])
    order = json.load(sys.stdin)
    failed = run_test(Peer(connection, only_calls=True), order["code"], order["entry"])
    # Last and with a word that the order alone knows, so that nothing that was printed before is taken for it.
    print(json.dumps({"nonce": order["nonce"], "failed": failed[:1000]}), flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    main()
