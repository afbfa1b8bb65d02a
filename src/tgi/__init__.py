"""Text Generation Inference: a server and library for large language models.

`LLM` loads torch, so it is imported when it is first used; the front end imports this package without it.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tgi.types import SamplingParams

if TYPE_CHECKING:
    from tgi.llm import LLM

try:
    __version__ = version("text-generation-inference")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tgi.llm import LLM

        return LLM
    raise AttributeError(f"module 'tgi' has no attribute {name!r}")
