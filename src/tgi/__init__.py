"""Text Generation Inference: a server and library for large language models.

`LLM` loads torch, so it is imported when it is first used; the front end imports this package without it.
"""

from typing import TYPE_CHECKING, Any

from tgi.types import SamplingParams
from tgi.version import __version__

if TYPE_CHECKING:
    from tgi.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tgi.llm import LLM

        return LLM
    raise AttributeError(f"module 'tgi' has no attribute {name!r}")
