"""The prompt of every request: filler text, cut to an exact number of tokens.

Never torch.
"""

from text_generation_inference.errors import StartError
from text_generation_inference.text.tokenizer import Tokenizer

_FILLER = (
    "The harbour wakes before the town does. Two boats come in with the tide, and a woman in a yellow coat counts the"
    " crates as they are set down on the wet stone: herring, crab, a little cod. Behind her the baker lights the second"
    " oven. By seven the square smells of bread and salt, the first bus stops at the corner, and nobody remembers how"
    " quiet it was an hour ago. "
)
_MOST_REPEATS = 1 << 24


def make_prompt(tokenizer: Tokenizer, length: int, vocab_size: int, model: str) -> list[int]:
    """Exactly `length` token ids, with those that the model puts around every text.

    Raises `StartError` if the tokenizer makes too few tokens however long the text is, or ones that the model lacks.
    """
    found, repeats = 0, 1
    while repeats <= _MOST_REPEATS:
        try:
            ids = tokenizer.encode(_FILLER * repeats)
        except Exception as error:  # the library raises plain Exception for whatever a vocabulary lacks
            raise StartError(f"the tokenizer of {model} cannot read plain text: {error}") from None
        if len(ids) >= length:
            return _checked(tokenizer.encode(_FILLER * repeats, truncate=length), vocab_size, model)
        if repeats > 1 and len(ids) <= found:
            break  # twice the text made no more tokens
        found = len(ids)
        repeats = max(2 * repeats, repeats * length // max(1, found) + 1)
    raise StartError(
        f"the tokenizer of {model} cannot make a prompt of {length} tokens: of filler text it makes {found}, and no"
        " more of a longer one. Lower --sequence-length, or check the model's tokenizer.json"
    )


def _checked(ids: list[int], vocab_size: int, model: str) -> list[int]:
    unknown = max(ids)
    if unknown >= vocab_size:
        raise StartError(
            f"the tokenizer of {model} makes token {unknown}, which is outside the model's vocabulary of {vocab_size}:"
            " the tokenizer belongs to another model"
        )
    return ids
