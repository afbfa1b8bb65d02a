"""From the number of tokens that a model may think for to what the engine watches for and forces.

`runner.thinking` counts; here is what it looks for, for each way in which thoughts are marked.
"""

from text_generation_inference.text.reasoning.formats import ReasoningFormat
from text_generation_inference.text.reasoning.harmony import ANALYSIS, BODY_ENDS, answer_header
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import ThinkingBudget


def thinking_budget(
    form: ReasoningFormat, num_tokens: int, opened: bool, calls: bool, tokenizer: Tokenizer
) -> ThinkingBudget:
    """`opened`: the prompt ends within thoughts. `calls`: the answer may call tools."""
    if form.tags is not None:
        closing = _ids([form.tags.closes[0]], tokenizer)
        return ThinkingBudget(num_tokens, list(form.tags.opens), list(form.tags.closes), closing, opened)
    closing = _ids(answer_header(calls), tokenizer)
    return ThinkingBudget(num_tokens, [ANALYSIS], list(BODY_ENDS), closing, reopens=True)


def _ids(texts: list[str], tokenizer: Tokenizer) -> list[int]:
    """A mark that is one token is that token, however the tokenizer would cut it."""
    found = [(text, tokenizer.id_of(text)) for text in texts]
    return [i for text, known in found for i in (tokenizer.encode(text, False) if known is None else [known])]
