"""Fetches a model from the Hugging Face hub into the library's own cache, so that other tools share the files.

`source` calls `download_model` for a name that is neither `embedded` nor a path. Only what serving needs is fetched,
and pickled weights never are. Endpoint, token and cache come from the library's settings unless given. Every failure
becomes one line with the way out.
"""

import errno
import threading
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from text_generation_inference.errors import ModelFormatError, ModelNotFoundError, ResourceError, StartError
from text_generation_inference.weights.headers import Headers
from text_generation_inference.weights.hub_access import HubAccess
from text_generation_inference.weights.model_files import (
    CONFIG,
    FETCH_GGUF,
    QUANTIZATION_BESIDE,
    explain_pickles,
)
from text_generation_inference.weights.progress import Progress, silent

_WEIGHTS = ["*.safetensors"]
_OTHERS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "*.tiktoken", "tiktoken.model"]
# Small, and enough to judge a model.
_CODE = ["*.py"]  # for those who trust it
_DESCRIPTION = ["config.json", "tokenizer_config.json", "chat_template.jinja", *QUANTIZATION_BESIDE]
_IGNORED = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"]
_LOG_IN = "To use your own access rights, set HF_TOKEN or run `hf auth login`"


class HubFile(msgspec.Struct, frozen=True):
    """A file that serving the model needs."""

    name: str
    num_bytes: int
    is_cached: bool


def download_model(
    model_id: str,
    revision: str | None = None,
    access: HubAccess = HubAccess(),  # noqa: B008 (frozen)
    *,
    weights: bool = True,
    progress: Progress = silent,
) -> Path:
    """The folder of the model's files, fetching those that are not in the cache; its name is the commit."""
    wanted = _name(model_id, revision)
    progress("downloading", 0, 0)
    path = _snapshot(model_id, revision, access, (_WEIGHTS if weights else []) + _others(access), progress)
    _require_config(path, wanted)
    if weights and not any(path.glob("*.safetensors")):
        raise ModelFormatError(f"Model {wanted} on the hub has no safetensors weights. {explain_pickles(model_id)}")
    return path


def download_description(model_id: str, revision: str | None, access: HubAccess) -> Path:
    """The folder with the few small files that describe the model."""
    path = _snapshot(model_id, revision, access, _DESCRIPTION + (_CODE if access.code else []), silent)
    _require_config(path, _name(model_id, revision))
    return path


def list_files(model_id: str, revision: str | None, access: HubAccess) -> list[HubFile]:
    """The files `download_model` would leave in the cache. Asks the hub, so offline mode must be off."""
    try:
        found = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=access.cache_dir,
            endpoint=access.endpoint,
            token=access.token,
            allow_patterns=_WEIGHTS + _others(access),
            ignore_patterns=_IGNORED,
            tqdm_class=_reporting_bar(silent),
            dry_run=True,
        )
    except Exception as error:
        raise _explain(_name(model_id, revision), model_id, access.offline, error) from error
    return [HubFile(file.filename, file.file_size or 0, file.is_cached) for file in found]


def read_headers(model_id: str, revision: str | None, access: HubAccess) -> Headers:
    """Of the model's weight files, from the first bytes of each."""
    try:
        found = HfApi(endpoint=access.endpoint, token=access.token).get_safetensors_metadata(
            model_id, revision=revision
        )
    except NotASafetensorsRepoError as error:
        raise ModelFormatError(
            f"Model {_name(model_id, revision)} on the hub has no safetensors weights. {explain_pickles(model_id)}"
        ) from error
    except Exception as error:
        raise _explain(_name(model_id, revision), model_id, access.offline, error) from error
    tensors = {name: info for file in found.files_metadata.values() for name, info in file.tensors.items()}
    return Headers(
        {name: tuple(info.shape) for name, info in tensors.items()},
        {name: info.dtype for name, info in tensors.items()},
    )


def _others(access: HubAccess) -> list[str]:
    return _OTHERS + (_CODE if access.code else [])


def _snapshot(model_id: str, revision: str | None, access: HubAccess, patterns: list[str], progress: Progress) -> Path:
    try:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                cache_dir=access.cache_dir,
                endpoint=access.endpoint,
                token=access.token,
                local_files_only=access.offline,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
                tqdm_class=_reporting_bar(progress),
            )
        )
    except Exception as error:  # the library passes on whatever its transport raises
        raise _explain(_name(model_id, revision), model_id, access.offline, error) from error


def _require_config(path: Path, wanted: str) -> None:
    if not (path / CONFIG).is_file():
        raise ModelFormatError(
            f"Model {wanted} on the hub has no {CONFIG}, so it cannot be served as it is. {FETCH_GGUF}"
        )


def _name(model_id: str, revision: str | None) -> str:
    return repr(model_id) if revision is None else f"{model_id!r} at revision {revision!r}"


def _explain(wanted: str, model_id: str, offline: bool, error: Exception) -> StartError:
    match error:
        case HFValidationError():
            return ModelNotFoundError(f"{wanted} is no possible name of a model on the hub.")
        case GatedRepoError():
            return StartError(
                f"Model {wanted} is gated. Ask for access at https://huggingface.co/{model_id}. {_LOG_IN}."
            )
        case RevisionNotFoundError():
            return ModelNotFoundError(f"The hub has no {wanted}. Check --revision.")
        case RepositoryNotFoundError():
            return ModelNotFoundError(f"Model {wanted} is not on the hub, or is private. Check the name. {_LOG_IN}.")
        case DisabledRepoError():
            return StartError(f"Model {wanted} was disabled on the hub. Choose another model.")
        case LocalEntryNotFoundError() if offline or isinstance(error.__cause__, OfflineModeIsEnabled):
            return ModelNotFoundError(
                f"Model {wanted} is not complete in the local cache, and offline mode is on. Start once without "
                "HF_HUB_OFFLINE, or give the path of a folder."
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return ResourceError(
                f"Not enough disk space to download {wanted}. Free some in {error.filename or 'the hub cache'}, or set "
                "HF_HUB_CACHE to another folder."
            )
        case _:
            pass
    for reason in (error, error.__cause__):
        if isinstance(reason, HfHubHTTPError):
            return _explain_status(wanted, reason.response.status_code)
    return StartError(
        f"Cannot download {wanted} from the hub: {_first_line(error.__cause__ or error)}. Check the network, or give "
        "the path of a folder."
    )


def _explain_status(wanted: str, status: int) -> StartError:
    if status == 404:
        return ModelNotFoundError(f"Model {wanted} is not on the hub. Check the name.")
    if status in (401, 403):
        return StartError(f"The hub refuses access to {wanted} (status {status}). {_LOG_IN}.")
    return StartError(f"The hub answered with status {status} when asked for {wanted}. Try again later.")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


def _reporting_bar(progress: Progress) -> type[tqdm]:
    """A progress bar that draws nothing and reports bytes: the library offers no other way to follow a download."""
    lock = threading.Lock()
    reported = 0

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))
            self.in_bytes = kwargs.get("unit") == "B"
            self.total = kwargs.get("total")
            self.done = kwargs.get("initial", 0)

        def update(self, n: float | None = 1) -> None:
            nonlocal reported
            with lock:  # files are fetched in several threads
                self.done += n or 0
                # Bytes received and bytes written have a bar each; the one ahead is reported.
                if self.in_bytes and self.done > reported:
                    reported = int(self.done)
                    progress("downloading", reported, max(reported, int(self.total or 0)))

    return ReportingBar
