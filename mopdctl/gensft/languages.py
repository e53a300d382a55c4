"""What depends on the language of an answer: which one it is, how it says no, and how it gives its making away."""

# ruff: noqa: RUF001 - full-width punctuation and letters of other scripts are meant

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from mopdctl.errors import InputError

# An unclosed one takes the rest with it, which keeps the search linear.
_NO_PROSE = re.compile(
    r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|<tool_call>.*?(?:</tool_call>|\Z)"  # code, calls written as text
    r"|\$\$.*?(?:\$\$|\Z)|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\Z)|\\begin\{.*?(?:\\end\{[^}\n]*\}|\Z)"  # LaTeX
    r"|\$[^$\n]*\$|`[^`\n]*`|https?://\S+",
    re.DOTALL,
)

_FEWEST_BYTES = 24  # of letters: about five words of English, eight characters of Chinese
_MOST_CHARACTERS = 4000  # more prose changes no verdict and costs time
_SURE = 0.8  # of the best three together: near relatives (da and no, zh and yue) share what is one answer's
_RULED_OUT = 0.1  # what all wanted languages may reach together


def prose(text: str) -> str:
    """`text` without code, LaTeX, URLs and tool calls written as text."""
    return _NO_PROSE.sub(" ", text)


def check_languages(languages: Iterable[str]) -> None:
    """Raises InputError for a code that the identifier does not know. The first call loads it (about a second)."""
    known = frozenset(_identifier().labels)
    for language in languages:
        if language not in known:
            raise InputError(f"language {language!r}: not known; use ISO 639-1 codes such as 'en', 'de' or 'zh'")


def foreign_language(text: str, languages: Iterable[str]) -> str | None:
    """The language of `text` if it is surely none of `languages`, else None.

    None too where nothing can be told: a short answer, numbers, code only, two languages that are alike.
    """
    words = prose(text)[:_MOST_CHARACTERS]
    if len("".join(filter(str.isalpha, words)).encode(errors="replace")) < _FEWEST_BYTES:
        return None
    ranked = _identifier().rank(words)
    wanted = set(languages)
    if sum(p for _, p in ranked[:3]) < _SURE or sum(p for language, p in ranked if language in wanted) > _RULED_OUT:
        return None
    return str(ranked[0][0])


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


# A refusal stands at the beginning of an answer, after some words of regret. What the speaker "cannot" do decides:
# helping, or anything with "your request"; "I cannot find a root" and "I can't help but smile" refuse nothing.
_REGRET = (
    r"(?:(?:i(?:'m| am)|we(?:'re| are)) (?:\w+ ){0,2}?(?:sorry|afraid)|(?:my (?:\w+ )?)?apologies|i apologi[sz]e"
    r"|sorry|unfortunately|regrettably|no|hello|hi|thank you|thanks)"
)
_LEAD = (
    rf"(?:{_REGRET}(?: (?:that|for|about|to|you)[^.!?\n\"]{{0,60}})?[,.;:!]* (?:but |however,? |that )?)*"
    r"(?:(?:i (?:understand|appreciate|see|know|realize|hear)|while|although|as an? (?:\w+ )?(?:ai|language model))"
    r"\b[^.!?\n\"]{0,120}?(?:, but|, however,| but|;|,) )?"
    r"(?:but |unfortunately,? )?"
)
_CANNOT = (
    r"(?:i(?:'m| am)(?: really| just| afraid| sorry)? (?:unable|not able|not willing|not allowed|not permitted) to"
    r"|i (?:simply |really |just |also )?(?:can't|can ?not|won't|will not|could not|couldn't|am unable to|refuse to"
    r"|must (?:respectfully )?(?:decline|refuse) to|(?:have|need) to decline to|(?:do not|don't) feel comfortable))"
    r"(?: (?:ever|in good conscience|ethically|legally|directly|really|,))*"
)
_DOING = (
    r" (?:help(?:(?: out)?(?=[.,;!]|$| (?:with|in|to)\b)| you\b(?! (?:if|until|unless|yet|decide)\b))"
    r"|(?:assist|comply|fulfil+|engage in|participate in|facilitate|condone)\b"
    r"|(?:do|answer|discuss|continue|write|create|generate|produce|share|give|provide|complete|process|say|offer)"
    r" (?:(?:you|anyone) )?(?:with )?"
    r"(?:(?:that|this|it)(?: (?:for you|one|request|question|prompt|task|kind|type|sort|content|information))?"
    r"(?=[.,;!]|$| (?:because|as|since|of|or|here)\b)"
    r"|(?:your|such|these|those)\b|(?:any )?(?:specific |detailed |personal |medical |legal |step-by-step )*"
    r"(?:information|instructions?|guidance|advice|details|content|assistance|help|support|material)"
    r" (?:on|about|for|regarding|that|related|to|with|in|of)\b)"
    r"|\w+ing\b)"  # what one does not feel comfortable doing
)
_REFUSALS = {
    "en": rf"{_LEAD}{_CANNOT}{_DOING}",
    # With an apology and "but" any verb will do, except those of a letter that says no to an invitation.
    "en, sorry but": r"(?:i'm|i am|i'm so|i am so|i'm very|)\s?sorry,? but i (?:can't|can ?not|won't|am unable to"
    r"|am not able to|'m unable to|'m not able to)(?! (?:make it|attend|come|join|be there|meet|stay|wait|stop|go)\b)",
    "en, decline": rf"{_LEAD}i (?:must|have to|need to|will have to|'ll have to) (?:respectfully |politely )?"
    r"(?:decline|refuse)(?=[.,;!]|$| (?:to|this|that|your)\b)",
    "en, not something": rf"{_LEAD}(?:that|this)(?:'s| is)(?: not|n't) something (?:that )?"
    r"i(?:'m| am| can|'ll| will)\b",
    "en, rules": rf"{_LEAD}(?:(?:your|this|that|the) (?:request|question|prompt)|it|this|that)"
    r" (?:(?:violates|goes against|conflicts with)|is against|would be against|would violate)"
    r" (?:my|our|openai's|the) (?:\w+ )?(?:guidelines|policy|policies|programming|principles|rules|ethic\w*)",
    "de": r"(?:(?:es )?tut mir (?:\w+ )?leid|leider|entschuldigung|verzeihung|sorry|,|\.|!|:|aber|doch| )*"
    r"(?:(?:ich|wir) (?:kann|können|darf|dürfen|werde|möchte)|(?:(?:dabei|damit|hierbei|das) )?(?:kann|darf|werde) ich)"
    r" (?:[\w-]+ ){0,8}?(?:nicht|keine?)\b(?: [\w-]+){0,5}? (?:weiter)?"
    r"(?:helfen|unterstützen|behilflich|beantworten|erfüllen|nachkommen|bereitstellen|entsprechen)",
    "fr": r"(?:je suis (?:\w+ )?désolée?|désolée?|malheureusement|navrée?|je regrette|,|\.|!|:|mais| )*"
    r"je ne (?:peux|puis|suis) (?:\w+ )?pas (?:en mesure (?:de |d'))?(?:vous |t'|te |y )?"
    r"(?:aider|assister|répondre à (?:cette|votre|ta)|fournir (?:ce|d|cette)|accéder à (?:cette|votre)|accepter)",
    "es": r"(?:lo siento(?: mucho)?|lamentablemente|disculpa|perdón|lo lamento|,|\.|!|:|pero| )*"
    r"no (?:puedo|me es posible|soy capaz de) (?:ayudar|asistir|proporcionar(?:te|le)? (?:es|inf|ins|ay)|cumplir con"
    r"|responder a (?:es[ao]|tu|su)|hacer eso)",
    "it": r"(?:mi dispiace(?: \w+)?|purtroppo|scusa|spiacente|,|\.|!|:|ma| )*"
    r"non (?:posso|sono in grado di) (?:aiutar|assister|fornir\w* (?:qu|inf|is)|rispondere a (?:quest|tu)|soddisfare)",
    "pt": r"(?:desculpe?|sinto muito|lamento|infelizmente|,|\.|!|:|mas| )*"
    r"(?:eu )?não (?:posso|consigo) (?:te |lhe |o )?"
    r"(?:ajudar|auxiliar|fornecer (?:es|in|aj)|atender|responder a (?:es|su))",
    "ru": r"(?:извините|простите|к сожалению|мне (?:очень )?жаль|,|\.|!|:|но| )*"
    r"я не (?:могу|буду) (?:вам |тебе |с этим |в этом )*(?:помочь|помогать|выполнить|ответить на этот|предоставить)",
    "zh": r"(?:很|非常|十分|真的)?(?:抱歉|对不起|不好意思|遗憾)[^。！？\n]{0,12}?(?:无法|不能|没法|不便)"
    r"|(?:作为.{0,12}[，,])?我(?:无法|不能|没法)(?:为|给|向)?(?:您|你)?"
    r"(?:帮助|帮忙|协助|提供(?:这|此|该|相关|任何)|回答(?:这|此|该|您|你)|满足(?:这|此|该|您|你))",
    "ja": r"(?:申し訳|すみません|恐れ入り|恐縮|ごめんなさい|残念ながら)[^。\n]{0,30}[、。]?[^。\n]{0,60}?"
    r"(?:できません|できかねます|いたしかねます|致しかねます|お答えできない|お手伝いできない)"
    r"|(?:その|この|ご)[^。\n]{0,30}(?:お手伝い|お答え|お応え|対応)[^。\n]{0,8}(?:できません|できかねます|いたしかねます)",
    "ko": r"(?:죄송|미안)[^.\n]{0,60}?(?:수 없습니다|수 없어요|드리기 어렵습니다)",
}
_REFUSAL = re.compile("|".join(f"(?:{pattern})" for pattern in _REFUSALS.values()))
_PLAIN = str.maketrans({"’": "'", "ʼ": "'", "“": '"', "”": '"', "*": None, "_": None, "\u00a0": " "})
_OPENING_CHARACTERS = 400


def refusal(text: str) -> str | None:
    """The words with which an answer refuses at its beginning, or None; in en, de, fr, es, it, pt, ru, zh, ja, ko."""
    found = _REFUSAL.match(text[:_OPENING_CHARACTERS].lower().translate(_PLAIN).lstrip("# >\n\t"))
    return found[0] if found else None


_SOURCE = r"(?:text|passage|context|document|article|excerpt|paragraph|snippet|transcript)s?\b"
_NAMED = re.compile(rf"\b{_SOURCE}", re.IGNORECASE)
_MENTION = re.compile(
    rf"the (?P<which>(?:given|provided|supplied|above|aforementioned|source) )?{_SOURCE}"
    r"(?P<after> (?:provided|given|supplied|above)\b)?"
)
_BEFORE = tuple(f"{words} " for words in ("according to", "based on", "stated in", "mentioned in", "described in"))
_SELF = re.compile(
    r"\bas an? (?:ai language model\b|(?:ai|artificial intelligence|(?:large )?language model)"
    r"(?: (?:assistant|model|chatbot|system))?,? (?:i|my)\b)"
)


def mentions_source(text: str) -> str | None:
    """The words with which an answer speaks of a text that it was made from ("the given passage"), or None. English."""
    lowered = text.lower()
    for found in _MENTION.finditer(lowered):
        if found["which"] or found["after"] or lowered[: found.start()].endswith(_BEFORE):
            return found[0]
    return None


def names_source(text: str) -> bool:
    """Whether a prompt names a text, so that its answer may speak of it."""
    return bool(_NAMED.search(text))


def mentions_self(text: str) -> str | None:
    """The words with which an answer speaks as a language model of itself, or None. English."""
    lowered = text.lower()
    return found[0] if "as a" in lowered and (found := _SELF.search(lowered)) else None
