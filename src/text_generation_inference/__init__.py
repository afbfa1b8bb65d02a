"""Text Generation Inference: a server and library for large language models.

`LLM` loads torch, so it is imported when it is first used; the front end imports this package without it.
"""

from typing import TYPE_CHECKING, Any

from text_generation_inference.types import SamplingParams
from text_generation_inference.version import __version__

if TYPE_CHECKING:
    from text_generation_inference.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from text_generation_inference.llm import LLM

        return LLM
    raise AttributeError(f"module 'text_generation_inference' has no attribute {name!r}")
