"""A text file as windows of tokens: what a model is measured or calibrated with."""

from pathlib import Path

from text_generation_inference.errors import StartError
from text_generation_inference.text.tokenizer import Tokenizer


def read_text(path: Path, flag: str) -> str:
    """`flag` named the file. Raises `StartError` where there is no text in it."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise StartError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartError(f"{flag} {path} is not UTF-8 text") from None
    if not text.strip():
        raise StartError(f"{flag} {path} is empty")
    return text


def cut(tokenizer: Tokenizer, text: str, length: int) -> list[list[int]]:
    """The text in windows of so many tokens, the last perhaps of fewer; each begins as prompts do."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    start = tokenizer.encode("", add_special_tokens=True)[: length - 1]
    size = length - len(start)
    return [start + ids[first : first + size] for first in range(0, len(ids), size)]
