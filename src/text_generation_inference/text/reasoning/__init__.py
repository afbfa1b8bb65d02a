"""What a model thinks before it answers, told apart from its answer.

`formats` tells how a model marks its thinking, `tags` and `harmony` split its text accordingly, while the text comes:
on the way out, between detokenising and stop strings, which end answers and not thoughts. On the way in, `budget` says
how the engine ends thoughts, and `grammars` makes room for them before an answer that a grammar decides.
"""

from text_generation_inference.text.reasoning.budget import thinking_budget
from text_generation_inference.text.reasoning.formats import ReasoningFormat, Splitter, detect_reasoning_format
from text_generation_inference.text.reasoning.grammars import before_answer, with_thoughts
from text_generation_inference.text.reasoning.harmony import Inserted

__all__ = [
    "Inserted",
    "ReasoningFormat",
    "Splitter",
    "before_answer",
    "detect_reasoning_format",
    "thinking_budget",
    "with_thoughts",
]
