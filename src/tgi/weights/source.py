"""Turns the name of a model into a folder that `checkpoint` and the tokenizer can read.

First step of starting: `resolve_model` finds, converts or downloads. It is the one place that knows the forms a model's
name may take.
"""

import time
from pathlib import Path

import msgspec

from tgi.errors import ModelFormatError, ModelNotFoundError
from tgi.weights import embedded
from tgi.weights.cache import is_complete
from tgi.weights.convert import cache_folder, convert_gguf, probe_digest
from tgi.weights.download import download_model
from tgi.weights.model_files import CONFIG
from tgi.weights.progress import Progress, silent

_FORMS = (
    f"Give `{embedded.NAME}` for the model that comes with the project, the path of a model folder or .gguf file, "
    "or the id of a model on the Hugging Face hub, such as `HuggingFaceTB/SmolLM2-135M-Instruct`."
)


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model's files are."""

    model_id: str  # as it was asked for
    path: Path
    note: str  # how the files came to be there, for the log
    sha: str | None = None  # commit on the hub, or SHA-256 of the embedded file


def resolve_model(
    model: str,
    cache_dir: Path,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
    *,
    hub_cache: Path | None = None,
    endpoint: str | None = None,
) -> ModelFolder:
    """Find `model`; converted weights go to `cache_dir`, downloads to `hub_cache` or the hub library's own cache."""
    if model == embedded.NAME:
        return _resolve_embedded(cache_dir, progress)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _resolve_folder(model, path, cache_dir, progress)
    if model and path.is_file():
        return _resolve_file(model, path, cache_dir, progress)
    if not _may_be_hub_id(model):
        raise ModelNotFoundError(f"Model {model!r} not found: there is no such file or folder. {_FORMS}")
    try:
        folder = download_model(
            model, revision, offline=offline, progress=progress, cache_dir=hub_cache, endpoint=endpoint
        )
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error} There is no file or folder of that name either. {_FORMS}") from error
    return ModelFolder(model_id=model, path=folder, note=f"hub files in {folder}", sha=folder.name)


def _resolve_embedded(cache_dir: Path, progress: Progress) -> ModelFolder:
    folder = cache_folder(cache_dir, Path(embedded.FILE_NAME).stem, embedded.SHA256)
    note = _reused(folder)
    # What is in the cache was made from a verified file, so a start that reuses it need not hash again.
    if not is_complete(folder):
        path = embedded.find_embedded()
        progress("verifying model file", 0, 0)
        embedded.check_embedded(path)
        note = _convert(path, folder, progress)
    return ModelFolder(model_id=embedded.NAME, path=folder, note=note, sha=embedded.SHA256)


def _resolve_folder(model: str, path: Path, cache_dir: Path, progress: Progress) -> ModelFolder:
    if (path / CONFIG).is_file():
        return ModelFolder(model_id=model, path=path, note=f"files in {path}")
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _resolve_file(model, found[0], cache_dir, progress)
    if found:
        names = ", ".join(file.name for file in found[:4]) + (", ..." if len(found) > 4 else "")
        raise ModelFormatError(f"{path}: holds {len(found)} GGUF files ({names}). Give the path of one of them.")
    raise ModelFormatError(f"{path}: is no model folder: it has neither a config.json nor a .gguf file. {_FORMS}")


def _resolve_file(model: str, path: Path, cache_dir: Path, progress: Progress) -> ModelFolder:
    try:
        digest = probe_digest(path)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}. Check the path and its rights.") from error
    folder = cache_folder(cache_dir, path.stem, digest)
    return ModelFolder(model_id=model, path=folder, note=_convert(path, folder, progress))


def _convert(path: Path, folder: Path, progress: Progress) -> str:
    started = time.monotonic()
    if not convert_gguf(path, folder, progress):
        return _reused(folder)
    return f"converted weights to {folder} in {time.monotonic() - started:.1f} s"


def _reused(folder: Path) -> str:
    return f"reused converted weights in {folder}"


def _may_be_hub_id(model: str) -> bool:
    """`name` or `organisation/name`; anything else can only have been meant as a path."""
    return model.count("/") <= 1 and model[:1] not in ("", ".", "/", "~") and not model.endswith((".gguf", "/"))
