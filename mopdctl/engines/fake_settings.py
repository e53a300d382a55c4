"""The settings of the chat model without weights, as its name gives them."""

from dataclasses import dataclass, fields
from functools import lru_cache

from mopdctl.errors import InputError


@dataclass(frozen=True, slots=True)
class FakeChat:
    """What the model does. Written `fake-chat` or `fake-chat:words=40,refuse=0.05`; all but `words` are shares."""

    words: float = 60.0
    """Mean length of prose and of reasoning; one answer's own is drawn from half to one and a half of it."""
    think: float = 0.0
    """Answers with a separate `reasoning_content`."""
    inline_think: float = 0.0
    """Answers whose content begins with `<think>...</think>`. Tool calls have no content and so none of it."""
    leak_think: float = 0.0
    """Answers with a bare `</think>` or `<|im_end|>` inside their text. Tool calls go on without."""
    refuse: float = 0.0
    """Answers that refuse."""
    repeat: float = 0.0
    """Answers that loop one sentence."""
    empty: float = 0.0
    """Answers without text."""
    copy: float = 0.0
    """Prompts whose answer is the same for every seed and every choice."""
    foreign: float = 0.0
    """Answers in German."""
    wrong: float = 0.2
    """Sums that are wrong by 1 to 9."""
    bad_judge: float = 0.0
    """Judge replies without a verdict. No other quirk but the thinking touches a judge reply."""

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, model: str) -> "FakeChat":
        """Reads the settings from a model's name; a name that is not `fake-chat` has the defaults.

        Raises InputError naming a setting that is unknown or out of range.
        """
        name, colon, options = model.partition(":")
        if name != "fake-chat" or not colon:
            return cls()
        known = [field.name for field in fields(cls)]
        found: dict[str, float] = {}
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            try:
                found[known[known.index(key)]] = float(value)
            except ValueError:
                raise InputError(
                    f"model {model!r}: {option!r} is no setting of fake-chat; it has {', '.join(known)}, each a number"
                ) from None
        settings = cls(**found)
        shares = [getattr(settings, name) for name in known if name != "words"]
        if not (
            1 <= settings.words <= 100_000
            and all(0 <= share <= 1 for share in shares)
            and settings.think + settings.inline_think <= 1
            and sum(share for _, share in settings.quirks()) <= 1 + 1e-9
        ):
            raise InputError(
                f"model {model!r}: fake-chat takes words from 1 to 100000 and shares from 0 to 1; think and "
                f"inline_think are at most 1 together, and so are {', '.join(name for name, _ in settings.quirks())}"
            )
        return settings

    def quirks(self) -> tuple[tuple[str, float], ...]:
        """The quirks of which an answer has at most one, with their shares."""
        names = ("refuse", "repeat", "empty", "foreign", "leak_think")
        return tuple((name, getattr(self, name)) for name in names)
