"""Everything that touches lm-eval: its tasks, its transformers model, one run, and the files that a run leaves.

The files are the contract. lm-eval only warns where it cannot write them, so `run_round` reads them back.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import lm_eval.api.task
import lm_eval.evaluator
import torch
import transformers
from lm_eval.loggers import EvaluationTracker
from lm_eval.loggers.utils import add_env_info
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from mopdctl.engines.fp4 import is_read_here, load_quantized
from mopdctl.errors import InputError, MopdctlError
from mopdctl.evals.normalise import Sample, check_complete
from mopdctl.files import fingerprint, read_jsonl

OnProgress = Callable[[int, int], None]

# Standard errors of means are closed forms; this many resamples are for the others (f1, perplexity, bleu).
_BOOTSTRAP_ITERS = 100

# lm-eval says these whatever one does: how to pass options to a task with its own loader, and that our task names win.
_NOISE = ("Custom kwargs can be passed", "overrides existing task")

_PROMPT_KEYS = (
    "output_type",
    "process_docs",
    "use_prompt",
    "description",
    "doc_to_text",
    "doc_to_target",
    "doc_to_choice",
    "target_delimiter",
    "fewshot_delimiter",
    "fewshot_config",
    "num_fewshot",
    "gen_prefix",
)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedTask:
    """One name that was asked for, with the tasks and groups that it stands for."""

    name: str
    objects: tuple[Any, ...]
    """What lm-eval evaluates: a task, a group, or the tasks of a tag."""
    tasks: dict[str, Any]
    groups: tuple[str, ...]


def load_tasks(names: Sequence[str], folders: Sequence[Path]) -> list[LoadedTask]:
    """Loads tasks, groups and tags by name from `folders`, and from lm-eval's own where a name is not among them.

    Raises InputError for an unknown name, a name that two folders define, and a task asked for twice; MopdctlError for
    a data set that cannot be had.
    """
    _check_folders(names, folders)
    paths = [str(folder) for folder in folders]
    manager = TaskManager(include_path=paths, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # indexing lm-eval's thousands of tasks takes long, so only on demand
        manager = TaskManager(include_path=paths, include_defaults=True)
    loaded: list[LoadedTask] = []
    owner: dict[str, str] = {}
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=0)
            raise InputError(f"task {name!r}: not known; did you mean {near[0]!r}? (--include adds a folder of tasks)")
        try:
            found = manager.load([name])
        except OSError as error:  # its data set is neither here nor to be had
            raise MopdctlError(f"task {name!r}: {str(error).splitlines()[0]}") from error
        groups = found.get("groups") or {}
        objects = (groups[name],) if name in groups else tuple(found["tasks"].values())
        for task in found["tasks"]:
            if task in owner:
                twice = "given twice" if owner[task] == name else f"part of {owner[task]!r} and of {name!r}"
                raise InputError(f"task {task!r}: {twice}; ask for it once")
            owner[task] = name
        loaded.append(LoadedTask(name, objects, dict(found["tasks"]), tuple(groups)))
    return loaded


def _check_folders(names: Sequence[str], folders: Sequence[Path]) -> None:
    owner: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder of tasks; check --include")
        for name in TaskManager(include_path=str(folder), include_defaults=False).all_tasks:
            if name in names and name in owner:
                raise InputError(f"task {name!r}: defined in {owner[name]} and in {folder}; rename one")
            owner[name] = folder


def prompt_fingerprint(task: Any, *, chat_template: bool) -> str:
    """What makes a task's prompts, functions by their source text: equal on every machine, whatever the paths."""
    config = {key: _plain(getattr(task.config, key, None)) for key in _PROMPT_KEYS}
    made_by = None if type(task) is lm_eval.api.task.ConfigurableTask else _plain(type(task))
    return fingerprint({"config": config, "class": made_by, "chat_template": chat_template, "system": None})


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (TypeError, OSError):
        return getattr(value, "__qualname__", type(value).__qualname__)


class HarnessModel(HFLM):
    """lm-eval's transformers model with our progress instead of its bars, encoding prompts as the trainers do.

    With a chat template the text of a prompt is complete: the template alone decides on a first token such as `<s>`.
    Quantized checkpoints are dequantized by our own reader, so that what is scored are the bytes of the file.
    """

    _config: Any

    def __init__(self, path: str, *, batch_size: int, chat_template: bool, on_progress: OnProgress) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            super().__init__(
                pretrained=path,
                device=device,
                dtype="auto" if device == "cuda" else "float32",
                batch_size=batch_size,
                use_safetensors=True,
            )
        except (OSError, ValueError) as error:
            raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None
        self.uses_chat_template = chat_template and bool(self.tokenizer.chat_template)
        if self.uses_chat_template:
            self.add_bos_token = False
        self._on_progress, self._done, self._total = on_progress, 0, 0
        self.set_cache_hook(self)  # nothing is cached: the hook hears of every answer, which is what progress needs

    def _get_config(self, pretrained: str, **options: Any) -> None:
        super()._get_config(pretrained, **options)
        self._stored_config = self._config
        if is_read_here(self._config):  # else lm-eval asks for the package that wrote the checkpoint
            self._config = deepcopy(self._config)
            del self._config.quantization_config

    def _create_model(self, pretrained: str, **options: Any) -> None:
        if self._stored_config is self._config:
            super()._create_model(pretrained, **options)
            return
        dtype = torch.float32 if self.device.type == "cpu" else self._stored_config.dtype or torch.bfloat16
        self._model = load_quantized(pretrained, self._stored_config, dtype=dtype).to(self.device)

    def add_partial(self, attr: str, request: Any, answer: Any) -> None:
        """Counts an answer."""
        self._done += 1
        self._on_progress(self._done, self._total)

    def _begin(self, requests: Sequence[Any]) -> None:
        self._done, self._total = 0, len(requests)
        self._on_progress(0, self._total)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """See HFLM."""
        self._begin(requests)
        return super().generate_until(requests, disable_tqdm=True)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """See HFLM."""
        self._begin(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """See HFLM."""
        self._begin(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=True)


def run_round(
    model: HarnessModel,
    loaded: Sequence[LoadedTask],
    *,
    limit: int | None,
    seed: int,
    folder: Path,
    model_name: str,
) -> tuple[dict[str, Any], dict[str, list[Sample]]]:
    """Evaluates `loaded` on the first `limit` documents each; returns what lm-eval wrote: results, samples per task.

    lm-eval's own files stay in `folder`. Raises MopdctlError if they are absent, unreadable or incomplete.
    """
    before = set(folder.glob("results_*.json"))
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    chat = model.uses_chat_template
    output = lm_eval.evaluator.simple_evaluate(
        model=model,
        model_args={"pretrained": model_name},
        tasks=[task for entry in loaded for task in entry.objects],
        task_manager=TaskManager(include_defaults=False),  # they are loaded; left out, lm-eval would index all its own
        limit=limit,
        batch_size=model.batch_size,
        device=str(model.device),
        use_cache=None,  # its key does not name the model: one model would get the answers of another
        cache_requests=False,  # its key does not name the task's definition
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        log_samples=True,
        bootstrap_iters=_BOOTSTRAP_ITERS,
        evaluation_tracker=tracker,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    if output is None:
        raise MopdctlError("lm-eval: gave no results, as it does in all but the first of several processes; use one")
    logged = output.pop("samples")
    tracker.save_results_aggregated(results=output, samples=logged)
    for task, rows in logged.items():
        tracker.save_results_samples(task_name=task, samples=rows)
    results, stamp = _read_results(folder, before)
    tasks = {name: task for entry in loaded for name, task in entry.tasks.items()}
    samples = {name: _read_samples(folder / f"samples_{name}_{stamp}.jsonl") for name in tasks}
    check_complete(
        results,
        samples,
        tasks={name: len(task._filters) for name, task in tasks.items()},
        groups=[group for entry in loaded for group in entry.groups],
        limit=limit,
    )
    return results, samples


def _read_results(folder: Path, before: set[Path]) -> tuple[dict[str, Any], str]:
    new = sorted(set(folder.glob("results_*.json")) - before)
    if len(new) != 1:
        raise MopdctlError(f"lm-eval: wrote {len(new)} results files instead of one; is the disk full or read-only?")
    try:
        results = json.loads(new[0].read_text("utf-8"))  # Python reads the bare NaN that lm-eval may write
    except ValueError as error:
        raise MopdctlError(f"lm-eval: wrote a results file that is not JSON ({error}); evaluate again") from None
    return results, new[0].stem.removeprefix("results_")


def _read_samples(path: Path) -> list[Sample]:
    try:
        return [row for _, row in read_jsonl(path)]
    except InputError as error:
        raise MopdctlError(f"lm-eval: did not write its samples ({error.args[0]})") from None


class _Warnings(logging.Handler):
    """Collects warnings, one for each place in the code that gives them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: dict[tuple[str, int], int] = {}
        self.texts: dict[tuple[str, int], str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if not any(noise in text for noise in _NOISE):
            place = (record.pathname, record.lineno)
            self.texts.setdefault(place, text[:300])
            self.counts[place] = self.counts.get(place, 0) + 1

    def lines(self) -> list[str]:
        counted = [(text, self.counts[place]) for place, text in self.texts.items()]
        return [f"lm-eval: {text}" + (f" ({count} times)" if count > 1 else "") for text, count in counted]


@functools.cache
def _environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    add_env_info(found)
    return found


# What lm-eval offers no switch for: a bar over documents, `git describe` in the user's folder, and a second spent on
# describing the machine, which one process needs but once.
_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (lm_eval.api.task, "tqdm", lambda documents, **_: documents),
    (lm_eval.evaluator, "get_git_commit_hash", lambda: None),
    (lm_eval.evaluator, "add_env_info", lambda storage: storage.update(_environment())),
)


@contextlib.contextmanager
def listening(on_warning: Callable[[str], None]) -> Iterator[list[str]]:
    """Quiets lm-eval; the list that it yields holds, afterwards, one line for each place in lm-eval that warned.

    Each line also goes to `on_warning`. What libraries print goes to stderr.
    """
    logger, handler = logging.getLogger("lm_eval"), _Warnings()
    lines: list[str] = []
    with contextlib.ExitStack() as undo:
        undo.callback(logger.setLevel, logger.level)
        undo.callback(setattr, logger, "propagate", logger.propagate)
        undo.callback(logger.removeHandler, handler)
        for module, name, replacement in _REPLACED:
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        if "DISABLE_MULTIPROC" not in os.environ:  # the bootstrap forks a pool, which can hang beside a loaded model
            undo.callback(os.environ.pop, "DISABLE_MULTIPROC")
            os.environ["DISABLE_MULTIPROC"] = "1"
        if not sys.stderr.isatty() and transformers.utils.logging.is_progress_bar_enabled():
            undo.callback(transformers.utils.logging.enable_progress_bar)
            transformers.utils.logging.disable_progress_bar()
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        logger.setLevel(logging.WARNING)
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield lines
        finally:
            lines += handler.lines()
            for line in lines:
                on_warning(line)
