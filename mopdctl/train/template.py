"""Whether a chat template renders what a model should be trained on.

A template rarely fails aloud: it drops tool calls, prints a mapping as Python, rewrites earlier turns or leaves the end
token out of the loss, and the run looks fine. Each probe renders a small conversation of known words and looks for
them; no weights are needed.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import digest, fingerprint
from mopdctl.train.template_content import roles, thinking, tools
from mopdctl.train.template_render import (
    ANSWERS,
    CALL,
    PLAIN,
    REASONED,
    TOOLS,
    Message,
    Probed,
    RefusedError,
    State,
    Verdict,
    guarded,
    render,
    rendered,
    template_text,
    tool_chat,
    trained_ids,
    trained_text,
    user,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found."""

    name: str
    state: State
    """`bad` harms training; `warn` asks for care with some rows; `not_applicable` is without a question to answer."""
    detail: str


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What every probe found in one chat template."""

    name: str
    template_digest: str
    """Digest of the template's text, as in `TokenizerIdentity`: what a cache of token ids has to key on."""
    findings: tuple[Finding, ...]

    @property
    def bad(self) -> tuple[str, ...]:
        """Names of the probes whose state is bad."""
        return tuple(finding.name for finding in self.findings if finding.state == "bad")


def probe(tokenizer: Any, eos_ids: frozenset[int], name: str) -> TemplateReport:
    """Runs every probe on the chat template of `tokenizer`; `name` is the model's, for messages.

    Raises InputError if the tokenizer has no chat template. What the template itself raises is a finding.
    """
    template = tokenizer.chat_template
    if not template:
        raise InputError(f"{name}: the tokenizer has no chat template; put a chat_template.jinja beside it")
    model = Probed(tokenizer, eos_ids)
    return TemplateReport(
        name=name,
        template_digest=digest(template if isinstance(template, str) else fingerprint(template)),
        findings=tuple(_find(title, check, model) for title, check in _PROBES.items()),
    )


def _find(title: str, check: Callable[[Probed], Verdict], model: Probed) -> Finding:
    try:
        state, detail = check(model)
    except RefusedError as refused:
        state, detail = "bad", f"the template raises: {refused}"
    return Finding(title, state, detail)


def _generation_tags(model: Probed) -> Verdict:
    tagged = re.search(r"{%[-+]?\s*generation\b", template_text(model)) is not None
    try:
        trained, total = trained_ids(model, PLAIN)
    except RefusedError as refused:
        return "bad", f"no loss mask, {'with' if tagged else 'without'} generation tags: {refused}"
    text = model.tokenizer.decode(trained)
    if lost := [answer for answer in ANSWERS if answer not in text]:
        return "bad", f"the loss covers {len(trained)} of {total} tokens and leaves out {' and '.join(lost)}"
    if "question" in text:
        return "bad", f"the loss covers what the user says: {text!r}"
    source = "from generation tags" if tagged else "proven turn by turn, as there are no generation tags"
    return "ok", f"the loss covers {len(trained)} of {total} tokens, {source}"


def _prefix_preserving(model: Probed) -> Verdict:
    plain = _first_rewrite(model, PLAIN)
    tool_turn = _first_rewrite(model, tool_chat(CALL), tools=TOOLS)
    reasoning = _first_rewrite(model, REASONED)
    detail = f"plain: {plain}; with a tool turn: {tool_turn}; with reasoning: {reasoning}"
    if plain != "kept" or tool_turn.startswith("rewritten"):
        return "bad", detail
    return ("warn" if reasoning.startswith("rewritten") else "ok"), detail


def _first_rewrite(model: Probed, messages: Sequence[Message], **variables: Any) -> str:
    before = ""
    for end, message in enumerate(messages, start=1):
        try:
            after = render(model, messages[:end], **variables)
        except RefusedError as refused:
            return f"refused ({refused})"
        if not after.startswith(before):
            return f"rewritten when message {end} ({message['role']}) is added"
        before = after
    return "kept"


def _stop_token(model: Probed) -> Verdict:
    if not model.eos_ids:
        return "bad", "neither the model nor the tokenizer names an end token"
    without, behind, masked = [], [], False
    for turn, messages, listed in (
        ("an answer", PLAIN[:2], None),
        ("an earlier answer", PLAIN, None),
        ("a tool call", tool_chat(CALL)[:2], TOOLS),
    ):
        try:
            trained, _ = trained_ids(model, messages, listed)
        except RefusedError:  # told by generation_tags or tools
            continue
        masked = True
        if sum(token in model.eos_ids for token in trained) < len(messages) // 2:
            without.append(turn)
        elif trained[-1] not in model.eos_ids:
            behind.append(turn)
    if not masked:
        return "not_applicable", "no loss mask"
    ends = ", ".join(f"{model.tokenizer.convert_ids_to_tokens(i)} ({i})" for i in sorted(model.eos_ids))
    if without:
        return "bad", f"no loss on an end token after {', '.join(without)}; end tokens: {ends}"
    if behind:
        return "warn", f"the loss goes on behind the end token of {', '.join(behind)}; end tokens: {ends}"
    return "ok", f"every assistant turn trains an end token last; end tokens: {ends}"


def _generation_prompt(model: Probed) -> Verdict:
    question, answer = PLAIN[:1], ANSWERS[0]
    prompt, whole = render(model, question, prompt=True), render(model, PLAIN[:2])
    if answer not in whole:
        return "bad", "the answer is not rendered"
    lead, found, _ = (trained_text(model, PLAIN[:2]) or "").partition(answer)
    asks = prompt != render(model, question)
    if found and lead.strip():
        if not asks or lead.strip() in prompt or "</think>" in lead:
            return "bad", f"the loss covers {lead!r}, which the template puts before the answer"
        return "warn", f"the loss covers {lead!r} before the answer: right only if the model writes that itself"
    if whole.startswith(prompt + answer):
        return "ok", "prompt and answer together are the whole text"
    if whole.startswith(prompt):
        gap = whole[len(prompt) :].partition(answer)[0]
        return (
            "warn" if asks or not gap.strip() else "bad"
        ), f"the prompt lacks {gap!r}, which stands before the answer"
    shared = next((i for i, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), len(whole))
    added = prompt[shared:]
    if (rendered(model, REASONED[:2]) or "").startswith(prompt):
        return "warn", f"the prompt ends in {added!r}, as only answers with reasoning begin"
    return "bad", f"the prompt ends in {added!r}, which the whole text lacks"


def _control_tokens(model: Probed) -> Verdict:
    tokenizer = model.tokenizer
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    control = special | set(tokenizer.all_special_ids)
    # What ends a user's turn and opens the assistant's, or else every control token, written by a user.
    injected = render(model, [user("x")], prompt=True).rpartition("x")[2]
    if not any(token in injected for token in tokenizer.convert_ids_to_tokens(sorted(control))):
        injected = "".join(tokenizer.all_special_tokens)

    def count(text: str, **options: Any) -> int:
        apply = tokenizer.apply_chat_template
        ids = guarded(lambda: apply([user(f"a{text}b")], tokenize=True, return_dict=True, **options)["input_ids"])
        return sum(token in control for token in ids)

    smuggled = count(injected) - count("")
    detail = f"{injected!r} in a user's text becomes {smuggled} control tokens"
    if "sanitize_control_tokens" in inspect.signature(tokenizer.apply_chat_template).parameters:
        left = count(injected, sanitize_control_tokens=True) - count("", sanitize_control_tokens=True)
        detail += f", with sanitize_control_tokens {left}"
    return ("warn" if smuggled else "ok"), detail


def _determinism(model: Probed) -> Verdict:
    # A variable of the call hides the global of the same name, so that the clock need not be replaced.
    one, other = (render(model, PLAIN, strftime_now=lambda _, day=day: day) for day in ("monday", "tuesday"))
    if one != other:
        return "warn", "the text holds the date (strftime_now): token ids differ from day to day"
    if "strftime_now" in template_text(model):
        return "warn", "the template can read the date (strftime_now), though a plain conversation does not hold it"
    return "ok", "the text does not depend on the date"


_PROBES: dict[str, Callable[[Probed], Verdict]] = {
    "generation_tags": _generation_tags,
    "prefix_preserving": _prefix_preserving,
    "stop_token": _stop_token,
    "generation_prompt": _generation_prompt,
    "tools": tools,
    "thinking": thinking,
    "control_tokens": _control_tokens,
    "roles": roles,
    "determinism": _determinism,
}
