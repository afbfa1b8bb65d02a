"""Tool calls in the form a model family writes them.

`forms` has a file for each form, `formats` tells which one a model uses, `parser` reads calls out of its text, `forced`
makes the grammar that leaves the model no other choice, or only that between a call and an answer in a format. Used by
the HTTP layer; knows nothing of requests.
"""

from text_generation_inference.text.tools.forced import forced_grammar
from text_generation_inference.text.tools.formats import ToolFormat, detect_tool_format
from text_generation_inference.text.tools.parser import CallArguments, CallStart, Content, Shape, ToolParser

__all__ = [
    "CallArguments",
    "CallStart",
    "Content",
    "Shape",
    "ToolFormat",
    "ToolParser",
    "detect_tool_format",
    "forced_grammar",
]
