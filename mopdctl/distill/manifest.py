"""Who the teachers of a run are: written into its checkpoint and every resumable state, held against on resume."""

from pathlib import Path
from typing import Any

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.fake_quant import FROZEN
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import identify, tokenizer_fingerprint
from mopdctl.errors import InputError
from mopdctl.files import file_digest, fingerprint, read_json

MANIFEST = "teacher_manifest.json"


def teacher_manifest(config: TeachersFile, teachers: Teachers) -> dict[str, Any]:
    """What can change a teacher's scores, by alias: a JSON document.

    Per teacher: `model` as the configuration names it; `weights`, the digest of its safetensors and `config.json`
    (under an adapter: those of its base), or `id@commit` of a hub model; `adapter`, the digest of the adapter or null;
    `tokenizer`, the digest of vocabulary, special tokens, end tokens and template; `chat_template`, that of the
    template alone, or null without one; `end_tokens`; `dtype`, in which it scores; `quantization`, as its
    configuration has it, or null; and `quant`, format and method, where its weights were quantized when they were
    loaded.
    """
    digests: dict[str, str] = {}
    found = {}
    for alias, model in sorted(teachers.by_alias.items()):
        source = teachers.sources[alias]
        if source.model not in digests:
            digests[source.model] = _weights(source.model, model)
        identity = identify(model)
        found[alias] = {
            "model": config.teachers[alias].model,
            "weights": digests[source.model],
            "adapter": _folder_digest(source.adapter) if source.adapter else None,
            "tokenizer": tokenizer_fingerprint(model),
            "chat_template": identity.chat_template or None,
            "end_tokens": list(identity.eos_ids),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": _quantization(source.model, model),
        }
        if (quant := config.teachers[alias].quant) != "none":
            found[alias]["quant"] = {"format": quant, "method": FROZEN[quant]}
    return {"schema": "mopdctl.teacher_manifest/1", "teachers": found}


def check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Holds the teachers against those of a file that `teacher_manifest` made. A file that is not there says nothing.

    Raises InputError naming alias and field of the first difference.
    """
    if not path.exists():
        return
    before, now = read_json(path)["teachers"], manifest["teachers"]
    for alias in sorted(before.keys() | now.keys()):
        if alias not in before or alias not in now:
            change = "is new" if alias in now else "is gone"
            raise InputError(f"{path}: teacher {alias!r} {change} since the run began; use another name for this one")
        for field in sorted(before[alias].keys() | now[alias].keys()):
            one, other = before[alias].get(field), now[alias].get(field)
            if one != other:
                raise InputError(
                    f"{path}: teacher {alias!r} is another one than when the run began, {field} was {one} and is "
                    f"{other}; bring it back, or use another name for this run"
                )


def check_states(states: Path, manifest: dict[str, Any]) -> None:
    """`check_manifest` for the resumable states of a run in the folder `states`, the newest first."""
    for path in sorted(states.glob(f"step-*/{MANIFEST}"), reverse=True):
        check_manifest(path, manifest)


def _weights(path: str, model: HFModel) -> str:
    folder = Path(path)
    return _folder_digest(folder) if folder.is_dir() else f"{path}@{getattr(model.model.config, '_commit_hash', None)}"


def _folder_digest(folder: Path) -> str:
    configs = [path for name in ("config.json", "adapter_config.json") if (path := folder / name).exists()]
    return fingerprint({path.name: file_digest(path) for path in [*sorted(folder.glob("*.safetensors")), *configs]})


def _quantization(path: str, model: HFModel) -> dict[str, Any] | None:
    found = getattr(model.model.config, "quantization_config", None)
    if found is None and Path(path).is_dir():  # a model with dequantized weights no longer says that they were not
        found = read_json(Path(path) / "config.json").get("quantization_config")
    return found if found is None or isinstance(found, dict) else dict(found.to_dict())
