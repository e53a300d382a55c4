"""Every error that mopdctl raises on purpose, with the exit code that it ends a command with.

```
MopdctlError            1   the work failed
├── InputError          2   the user's input or usage is wrong: what, where, what to do
└── CheckFailedError    3   the check ran and the answer is no
```

A domain error is shown as one line on stderr; anything else keeps its traceback.
"""


class MopdctlError(Exception):
    """The work failed for a reason that we can name. Ends a command with exit code 1."""

    exit_code = 1


class InputError(MopdctlError, ValueError):
    """Input or usage is wrong. The message says what, where and what to do. Exit code 2."""

    exit_code = 2


class CheckFailedError(MopdctlError):
    """A check ran to its end and its answer is no. Exit code 3."""

    exit_code = 3
