"""Fetches a model from the Hugging Face hub into the library's own cache, so that other tools share the files.

`source` calls `download_model` for a name that is neither `embedded` nor a path. Only what serving needs is fetched,
and pickled weights never are. Endpoint, token and cache come from the library's settings unless given. Every failure
becomes one line with the way out.
"""

import errno
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from tgi.errors import ModelFormatError, ModelNotFoundError, ResourceError, StartError
from tgi.weights.model_files import CONFIG, explain_pickles
from tgi.weights.progress import Progress, silent

_ALLOWED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "*.tiktoken"]
_IGNORED = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"]
_LOG_IN = "To use your own access rights, set HF_TOKEN or run `hf auth login`"


def download_model(
    model_id: str,
    revision: str | None = None,
    *,
    offline: bool = False,
    progress: Progress = silent,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The folder of the model's files, fetching those that are not in the cache; its name is the commit."""
    wanted = repr(model_id) if revision is None else f"{model_id!r} at revision {revision!r}"
    progress("downloading", 0, 0)
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=cache_dir,
            endpoint=endpoint,
            local_files_only=offline,
            allow_patterns=_ALLOWED,
            ignore_patterns=_IGNORED,
            tqdm_class=_reporting_bar(progress),
        )
    except Exception as error:  # the library passes on whatever its transport raises
        raise _explain(wanted, model_id, offline, error) from error
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise ModelFormatError(
            f"Model {wanted} on the hub has no {CONFIG}, so it cannot be served as it is. If it is a repository of "
            "GGUF files, download one of them and give its path."
        )
    if not any(path.glob("*.safetensors")):
        raise ModelFormatError(f"Model {wanted} on the hub has no safetensors weights. {explain_pickles(model_id)}")
    return path


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
