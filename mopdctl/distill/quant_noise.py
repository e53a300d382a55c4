"""How far quantization moves a teacher, beside how far from it the student is: noise and signal of an FP4 teacher.

N loss-active tokens, H width of the model at hand.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.answers import one_at_a_time
from mopdctl.distill.teachers import Teachers, load_reference
from mopdctl.engines.hf import HFModel
from mopdctl.errors import CheckFailedError
from mopdctl.objective.chunks import default_chunk
from mopdctl.objective.divergence import at_least_float32
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.head import Head, head_logits
from mopdctl.records import Sample
from mopdctl.runs import Workspace
from mopdctl.train import distributed

Who = str | None
"""An alias, or None for the reference."""
Measured = tuple[float, float] | tuple[None, None]
"""Noise and signal in nats per token; None without a token to measure on."""


def measure_quant_noise(
    samples: Sequence[Sample],
    teachers: Teachers,
    student: HFModel,
    config: TeachersFile,
    workspace: Workspace,
    *,
    reference: HFModel | None = None,
    base: Path,
) -> dict[str, dict[str, float | None] | float | None]:
    """Measures what quantization does to teachers and reference on the student's answers; empty if none is quantized.

        noise  = mean KL(p_T || p_quantized T)        signal = mean KL(p_T || p_student)        nats per token

    over the loss-active tokens of the answers to `quant_noise_prompts` prompts of each, p_T the teacher as it is
    without `quant`. It is loaded for this alone, one at a time, once the others have left the device. A teacher that
    quantization moves as far as the student is away says more of rounding than of what it knows.

    Args:
        samples: this rank's answers of one step. Every rank must call.
        teachers: by alias, quantized where they are to be.
        student: as it trains.
        config: the run's.
        workspace: where models are looked up.
        reference: the third model, if one takes part.
        base: folder that relative paths start from.

    Returns:
        `teacher/quant_kl_nats` (noise) and `teacher/student_kl_nats` (signal) by alias, and `reference/quant_kl_nats`.
        None where there is no answer to measure on.

    Raises:
        CheckFailedError: a teacher's noise is no smaller than its signal, and `allow_quant_noise` is off. The reference
            is measured alone: at the start its signal is often 0.
        InputError: the logits of one of them cannot be made of its hidden states.
    """
    quantized: list[Who] = [alias for alias in teachers.by_alias if config.teachers[alias].quant != "none"]
    if reference is not None and config.train.reference_quant != "none":
        quantized.append(None)
    if not quantized:
        return {}
    chosen = {who: _answers_to_few(who, samples, config.train.quant_noise_prompts) for who in quantized}

    def loaded(who: Who) -> AbstractContextManager[HFModel]:
        return teachers.resident(who) if who is not None else nullcontext(reference or student)

    moved = {who: _states(loaded(who), found) for who, found in chosen.items()}
    teachers.park()
    exact = _exact_states(chosen, student, config, workspace, base)
    measured: dict[Who, Measured] = {}
    for who, found in chosen.items():
        head = teachers.head(who) if who is not None else (reference or student).head
        measured[who] = _means(exact[who], moved[who], head, _states(nullcontext(student), found), student)
    teachers.take_forwarded()  # what is counted is the scoring of rollouts
    of_teachers = {who: both for who, both in measured.items() if who is not None}
    if not config.train.allow_quant_noise:
        _refuse_noise(of_teachers, config)
    metrics: dict[str, dict[str, float | None] | float | None] = {}
    if of_teachers:
        metrics["teacher/quant_kl_nats"] = {alias: noise for alias, (noise, _) in of_teachers.items()}
        metrics["teacher/student_kl_nats"] = {alias: signal for alias, (_, signal) in of_teachers.items()}
    if None in measured:
        metrics["reference/quant_kl_nats"] = measured[None][0]
    return metrics


def _answers_to_few(who: Who, samples: Sequence[Sample], num_prompts: int) -> list[Sample]:
    """This rank's answers to the first prompts, by id, of a teacher; of all teachers for the reference."""
    own = [s for s in samples if who in (None, s.teacher_id)]
    everywhere = {prompt for found in distributed.gather_objects([s.prompt_id for s in own]) for prompt in found}
    few = set(sorted(everywhere)[:num_prompts])
    return [s for s in own if s.prompt_id in few]


def _exact_states(
    chosen: dict[Who, list[Sample]], student: HFModel, config: TeachersFile, workspace: Workspace, base: Path
) -> dict[Who, Tensor]:
    """The hidden states of what is quantized, before it was. One such model is in memory at a time, and none after."""
    teachers = {alias: teacher.model_copy(update={"quant": "none"}) for alias, teacher in config.teachers.items()}
    train = config.train.model_copy(update={"reference_quant": "none"})
    plain = config.model_copy(update={"teachers": teachers, "train": train})
    load = one_at_a_time(plain, student, workspace, base=base)
    found: dict[Who, Tensor] = {who: _states(load(who), samples) for who, samples in chosen.items() if who is not None}
    del load
    if None in chosen:
        model = load_reference(plain, student, workspace, base=base)
        found[None] = _states(nullcontext(model), chosen[None])
    return found


def _states(opened: AbstractContextManager[HFModel], samples: Sequence[Sample]) -> Tensor:
    """The hidden states [N, H] behind the loss-active tokens, on the CPU."""
    pairs = [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in samples]
    with opened as model:
        found = model.hidden_states(pairs, [s.response_mask.astype(int).tolist() for s in samples])
    return torch.cat(found) if found else torch.empty(0)


@torch.no_grad()
def _means(exact_NH: Tensor, moved_NH: Tensor, head: Head, student_NH: Tensor, student: HFModel) -> Measured:
    """Noise and signal over the tokens of all ranks. Quantization leaves the head, so that `head` serves both."""
    vocab_size, noise, signal = student.vocab_size, 0.0, 0.0

    def logprobs(states_CH: Tensor, head: Head) -> Tensor:
        weight_VH = head.weight_VH
        logits_CV = head_logits(states_CH.to(weight_VH.device, weight_VH.dtype), head, vocab_size=vocab_size)
        return torch.log_softmax(at_least_float32(logits_CV), dim=-1)

    chunk = default_chunk(vocab_size, student.device)
    pieces = zip(exact_NH.split(chunk), moved_NH.split(chunk), student_NH.split(chunk), strict=True)
    for exact_CH, moved_CH, student_CH in pieces if len(exact_NH) else ():
        exact_CV, moved_CV = logprobs(exact_CH, head), logprobs(moved_CH, head)
        with student.computing():
            student_CV = logprobs(student_CH, student.head).to(exact_CV.device)
        noise += float(forward_kl(moved_CV, exact_CV)[0].double().sum())
        signal += float(forward_kl(student_CV, exact_CV)[0].double().sum())
    noise, signal, tokens = distributed.sum_over_ranks(noise, signal, len(exact_NH))
    return (noise / tokens, signal / tokens) if tokens else (None, None)


def _refuse_noise(measured: dict[str, Measured], config: TeachersFile) -> None:
    lost = [
        f"teacher {alias!r}: {config.teachers[alias].quant} moves it by {noise:.3g} nats a token, and the student is "
        f"{signal:.3g} away"
        for alias, (noise, signal) in measured.items()
        if noise and signal is not None and noise >= signal
    ]
    if lost:
        raise CheckFailedError(
            f"{'; '.join(lost)}; leave out its `quant`, or set train.allow_quant_noise: true (the run then goes on)"
        )
