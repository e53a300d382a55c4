"""An engine without weights: every token hangs on the sample's random stream alone. For tests and for trying things.

Answer lengths are log-normal, as those of real models are. The law is given as a hazard, the chance that the answer
ends at a position given that it has come so far, so that an answer that is continued has the same law as one that was
never interrupted, even if the continuation draws other random numbers.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopdctl.engines.base import SampleRequest, Step, uniforms
from mopdctl.errors import InputError

END, CALL, FIRST = 0, 1, 2
"""The end token, the token that calls a tool, and the first of the ordinary ones."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Serves as `Sampler`. Written `fake` or `fake:mean_length=50,step_s=0.001` on the command line."""

    mean_length: float = 40.0
    """Mean of the answer lengths before the budget cuts them, in tokens."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the answer length."""
    calls: float = 0.0
    """Chance that a position holds a tool call."""
    vocab_size: int = 1000
    batch_size: int = 64
    """Requests that run at the same time."""
    step_s: float = 0.0
    """Seconds that a step takes."""

    @classmethod
    def parse(cls, text: str, *, batch_size: int = 64) -> "FakeModel":
        """Reads `fake` or `fake:name=value,...`. Raises InputError naming what it does not know."""
        name, _, options = text.partition(":")
        if name != "fake":
            raise InputError(f"model {text!r}: the fake engine has one model, 'fake'")
        types = {f.name: (int if f.type in (int, "int") else float) for f in fields(cls) if f.name != "batch_size"}
        found: dict[str, Any] = {}
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            try:
                found[key] = types[key](value)
            except (KeyError, ValueError):
                raise InputError(
                    f"model {text!r}: {option!r} is no option of the fake engine; it has {', '.join(types)}"
                ) from None
        model = cls(**found, batch_size=batch_size)
        if not (
            0 < model.mean_length < math.inf
            and 0 < model.sigma <= 10
            and 0 <= model.calls < 1
            and FIRST < model.vocab_size < 1 << 31
            and 0 <= model.step_s < math.inf
        ):
            raise InputError(
                f"model {text!r}: the fake engine takes a finite mean_length above 0, sigma up to 10, calls from 0 to "
                f"below 1, vocab_size above {FIRST}, and a finite step_s from 0"
            )
        return model

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        """A prompt as token ids: one for each byte of its text."""
        return tuple(FIRST + byte % (self.vocab_size - FIRST) for byte in text.encode())

    def hazard(self, count: int) -> NDArray[np.float64]:
        """[count], the chance that token t (from 0) is the end token, given that none before it was."""
        mu = math.log(self.mean_length) - self.sigma**2 / 2
        edges = np.log(np.maximum(np.arange(count + 1), 1e-300))
        survival = np.array([0.5 * math.erfc((e - mu) / (self.sigma * math.sqrt(2))) for e in edges])
        chance: NDArray[np.float64] = 1 - survival[1:] / np.maximum(survival[:-1], 1e-300)
        return chance.clip(0, 1)

    def stream(self, requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
        """See `Sampler.stream`. The temperature changes nothing."""
        hazard = self.hazard(max((r.max_new_tokens for r in requests), default=0))
        waiting = iter(range(len(requests)))
        running: dict[int, tuple[NDArray[np.int32], NDArray[np.float32], str]] = {}
        place: dict[int, int] = {}
        while True:
            while len(running) < self.batch_size and (i := next(waiting, None)) is not None:
                running[i], place[i] = self._answer(requests[i], hazard), 0
            if not running:
                return
            ids, tokens, logprobs, finished = [], [], [], {}
            for i, (answer, weights, reason) in running.items():
                if place[i] < len(answer):
                    ids.append(i)
                    tokens.append(answer[place[i]])
                    logprobs.append(weights[place[i]])
                place[i] += 1
                if place[i] >= len(answer):
                    finished[i] = reason
            for i in finished:
                del running[i]
            if self.step_s:
                time.sleep(self.step_s)
            yield Step(np.array(ids, np.int64), np.array(tokens, np.int32), np.array(logprobs, np.float32), finished)

    def _answer(
        self, request: SampleRequest, hazard: NDArray[np.float64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], str]:
        """What is left of an answer: its tokens, their log-probabilities, why it ends. One uniform decides a token."""
        done = len(request.response_ids) + len(request.forced_ids)
        uniform = uniforms(request.seed, request.max_new_tokens)[done:]
        end = hazard[done : request.max_new_tokens]
        call = (1 - end) * self.calls
        word = (1 - end - call) / (self.vocab_size - FIRST)
        ordinary = FIRST + ((uniform - end - call) / np.maximum(word, 1e-300)).astype(np.int64)
        tokens = np.select(
            [uniform < end, uniform < end + call], [END, CALL], ordinary.clip(FIRST, self.vocab_size - 1)
        )
        chance = np.select([tokens == END, tokens == CALL], [end, call], word)
        stops = np.flatnonzero(tokens <= (CALL if self.calls else END))
        count = int(stops[0]) + 1 if len(stops) else len(tokens)
        reason = "stop" if len(stops) else "length"
        return tokens[:count].astype(np.int32), np.log(chance[:count]).astype(np.float32), reason
