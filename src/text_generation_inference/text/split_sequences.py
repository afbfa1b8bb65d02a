"""Prompts of Galactica: sequences of DNA, proteins and molecules are split into single characters, as TGI does.

Its tokenizer splits at a marker that is put before each character; a tokenizer that does not know the marker takes
prompts as they are.
"""

import re

import tokenizers

MARKER = "SPL1T-TH1S-Pl3A5E"
_SEQUENCE = re.compile(r"(\[START_(DNA|SMILES|I_SMILES|AMINO)])(.*?)(\[END_\2])")


def splits_sequences(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer splits at the marker."""
    return backend.pre_tokenizer is not None and MARKER.encode() in backend.pre_tokenizer.__getstate__()


def mark_sequences(prompt: str) -> str:
    """A prompt with the marker before each character of its sequences, and before their ends."""

    def mark(match: re.Match[str]) -> str:
        start, _, sequence, end = match.groups()
        return start + "".join(MARKER + character for character in sequence) + MARKER + end

    return _SEQUENCE.sub(mark, prompt)
