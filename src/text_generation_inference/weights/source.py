"""Turns the name of a model into a folder that `checkpoint` and the tokenizer can read.

First step of starting: `resolve_model` finds, converts or downloads. It is the one place that knows the forms a model's
name may take.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from text_generation_inference.config import ServerConfig, cache_folder, expand_home, hub_token
from text_generation_inference.errors import ModelFormatError, ModelNotFoundError
from text_generation_inference.files import shorten
from text_generation_inference.weights import embedded
from text_generation_inference.weights.cache import is_complete
from text_generation_inference.weights.convert import cache_folder as converted_folder
from text_generation_inference.weights.convert import convert_gguf, probe_digest
from text_generation_inference.weights.gguf import find_parts
from text_generation_inference.weights.hub_access import HubAccess
from text_generation_inference.weights.model_files import CONFIG, FETCH_GGUF
from text_generation_inference.weights.progress import Progress, silent

_FORMS = (
    f"Give `{embedded.NAME}` for the small model of the lock file, the path of a model folder or .gguf file, "
    "or the id of a model on the Hugging Face hub, such as `HuggingFaceTB/SmolLM2-135M-Instruct`."
)


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model's files are."""

    model_id: str  # as it was asked for
    path: Path
    note: str  # how the files came to be there, for the log
    sha: str | None = None  # commit on the hub, or SHA-256 of the embedded file
    weights: Path | None = None  # folder of the weights where that is not `path`

    @property
    def weights_path(self) -> Path:
        return self.weights or self.path


def find_model(
    config: ServerConfig, progress: Progress = silent, judge: Callable[[Path], object] | None = None
) -> ModelFolder:
    """`resolve_model` with everything that the configuration says about files."""
    access = hub_access(config)
    return resolve_model(
        config.model_id,
        cache_folder(config),
        config.revision,
        config.offline,
        progress,
        hub_cache=access.cache_dir,
        token=access.token,
        code=access.code,
        weights_override=config.weights_cache_override,
        judge=judge,
    )


def hub_access(config: ServerConfig) -> HubAccess:
    cache = config.huggingface_hub_cache
    return HubAccess(
        offline=config.offline,
        cache_dir=expand_home(cache, "huggingface_hub_cache") if cache else None,
        token=hub_token(),
        code=config.trust_remote_code,
    )


def resolve_model(
    model: str,
    cache_dir: Path,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
    *,
    hub_cache: Path | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    code: bool = False,
    weights_override: str | None = None,
    judge: Callable[[Path], object] | None = None,
) -> ModelFolder:
    """Find `model`; converted weights go to `cache_dir`, downloads to `hub_cache` or the hub library's own cache.

    `judge` sees the folder of a config.json before its weights are fetched or looked for, and may refuse the model.
    """
    path = expand_home(model, "model_id") if model else None
    if model == embedded.NAME:
        found = _resolve_embedded(cache_dir, progress)
    elif path and path.is_dir():
        found = _resolve_folder(model, path, cache_dir, progress)
    elif path and path.is_file():
        found = _resolve_file(model, path, cache_dir, progress)
    elif may_be_hub_id(model):
        access = HubAccess(offline=offline, cache_dir=hub_cache, endpoint=endpoint, token=token, code=code)
        found = _resolve_hub(model, revision, access, weights_override is None, progress, judge)
    else:
        raise not_found(model)
    if weights_override is None:
        return found
    if judge is not None:
        judge(found.path)
    return msgspec.structs.replace(found, weights=_weights_folder(weights_override))


def not_found(model: str) -> ModelNotFoundError:
    fetch = f" {FETCH_GGUF}" if "gguf" in model.lower() else ""
    return ModelNotFoundError(f"Model {shorten(model)} not found: there is no such file or folder. {_FORMS}{fetch}")


def _weights_folder(override: str) -> Path:
    folder = expand_home(override, "weights_cache_override")
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"`weights_cache_override` {override!r} is no folder with .safetensors files. Leave it out to use the"
            " model's own weights."
        )
    return folder


def _resolve_hub(
    model: str,
    revision: str | None,
    access: HubAccess,
    weights: bool,
    progress: Progress,
    judge: Callable[[Path], object] | None,
) -> ModelFolder:
    from text_generation_inference.weights.download import download_description, download_model

    try:
        if judge is not None:
            judge(download_description(model, revision, access))
        folder = download_model(model, revision, access, weights=weights, progress=progress)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error} There is no file or folder of that name either. {_FORMS}") from error
    return ModelFolder(model_id=model, path=folder, note=f"hub files in {folder}", sha=folder.name)


def _resolve_embedded(cache_dir: Path, progress: Progress) -> ModelFolder:
    folder = converted_folder(cache_dir, Path(embedded.FILE_NAME).stem, embedded.SHA256)
    note = _reused(folder)
    # What is in the cache was made from a verified file, so a start that reuses it need not hash again.
    if not is_complete(folder):
        path = embedded.find_embedded()
        progress("verifying model file", 0, 0)
        embedded.check_embedded(path)
        note = _convert(path, folder, progress)
    return ModelFolder(model_id=embedded.NAME, path=folder, note=note, sha=embedded.SHA256)


def _resolve_folder(model: str, path: Path, cache_dir: Path, progress: Progress) -> ModelFolder:
    if (file := find_gguf(path)) is None:
        return ModelFolder(model_id=model, path=path, note=f"files in {path}")
    return _resolve_file(model, file, cache_dir, progress)


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder, or the first part of the only model there. None for a folder of safetensors.

    Repositories of GGUF files may have a config.json, with a word or two in it, and the tower of a model that sees.
    """
    files = sorted(folder.glob("*.gguf"))
    if (folder / CONFIG).exists() and (not files or any(folder.glob("*.safetensors"))):
        return None
    found = [file for file in files if "mmproj" not in file.name.lower()] or files
    if found and (len(found) == 1 or find_parts(found[0]) == found):
        return found[0]
    if found:
        names = ", ".join(file.name for file in found[:4]) + (", ..." if len(found) > 4 else "")
        raise ModelFormatError(f"{folder}: holds {len(found)} GGUF files ({names}). Give the path of one of them.")
    raise ModelFormatError(f"{folder}: is no model folder: it has neither a config.json nor a .gguf file. {_FORMS}")


def _resolve_file(model: str, path: Path, cache_dir: Path, progress: Progress) -> ModelFolder:
    try:
        digest = probe_digest(path)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}. Check the path and its rights.") from error
    folder = converted_folder(cache_dir, path.stem, digest)
    return ModelFolder(model_id=model, path=folder, note=_convert(path, folder, progress))


def _convert(path: Path, folder: Path, progress: Progress) -> str:
    started = time.monotonic()
    if not convert_gguf(path, folder, progress):
        return _reused(folder)
    return f"converted weights to {folder} in {time.monotonic() - started:.1f} s"


def _reused(folder: Path) -> str:
    return f"reused converted weights in {folder}"


def may_be_hub_id(model: str) -> bool:
    """Whether it is `name` or `organisation/name`; anything else can only have been meant as a path, or as a file."""
    begins, ends = model[:1] not in ("", ".", "/", "~"), model.endswith((".gguf", "/"))
    return model.count("/") <= 1 and begins and not ends and ":" not in model
