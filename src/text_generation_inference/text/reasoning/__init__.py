"""What a model thinks before it answers, told apart from its answer.

`formats` tells how a model marks its thinking, `tags` and `harmony` split its text accordingly, while the text comes.
On the way out, between detokenising and stop strings: those end answers, not thoughts.
"""

from text_generation_inference.text.reasoning.formats import ReasoningFormat, Splitter, detect_reasoning_format
from text_generation_inference.text.reasoning.harmony import Inserted

__all__ = ["Inserted", "ReasoningFormat", "Splitter", "detect_reasoning_format"]
