"""The bytes of single tokens, also of those that hold part of a character.

For log-probabilities, whose readers put the bytes of neighbouring tokens together.
"""

import re

from text_generation_inference.text.tokenizer import Tokenizer

_NO_CHARACTER = "\ufffd"  # what decoders put where bytes are no character
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: the visible ones of Latin-1 for themselves."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token behind other text: some decoders take the space from a token that stands alone."""
    texts = tokenizer.token_texts(skip_special_tokens=False)
    text = None if texts is None else texts[token_id]
    return tokenizer.decode([token_id], skip_special_tokens=False) if text is None else text


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""The text of a token among log-probabilities. What is no character is written as OpenAI does: `\xe2\x80`."""
    text = token_text(tokenizer, token_id)
    return token_bytes(tokenizer, token_id).decode(errors="backslashreplace") if _NO_CHARACTER in text else text


def num_characters(tokenizer: Tokenizer, token_id: int) -> int:
    """How many characters begin in a token."""
    text = token_text(tokenizer, token_id)
    if _NO_CHARACTER not in text:
        return len(text)
    return sum(byte & 0xC0 != 0x80 for byte in token_bytes(tokenizer, token_id))


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes a token adds to the text."""
    text = token_text(tokenizer, token_id)
    token = tokenizer.token_of(token_id)
    if _NO_CHARACTER not in text or token is None:
        return text.encode()
    byte = _BYTE.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return text.encode()
