"""Prompts of Galactica: sequences of DNA, proteins and molecules are split into single characters, as TGI does.

Its tokenizer splits at a marker that is put before each character; a tokenizer that does not know the marker takes
prompts as they are.
"""

import re

import tokenizers

MARKER = "SPL1T-TH1S-Pl3A5E"
_START = re.compile(r"\[START_(DNA|SMILES|I_SMILES|AMINO)]")


def splits_sequences(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer splits at the marker."""
    return backend.pre_tokenizer is not None and MARKER.encode() in backend.pre_tokenizer.__getstate__()


def mark_sequences(prompt: str) -> str:
    """A prompt with the marker before each character of its sequences, and before their ends.

    A sequence ends on its line, with the next end of its kind. Time is linear: what is looked through without an end
    of one kind is not looked through for it again.
    """
    parts: list[str] = []
    done = line_end = 0
    without_end: dict[str, int] = {}  # up to where there is no end, by kind
    for start in _START.finditer(prompt):
        kind, first = start[1], start.end()
        if start.start() < done or first <= without_end.get(kind, 0):
            continue
        if first > line_end:
            line_end = prompt.find("\n", first)
            line_end = len(prompt) if line_end < 0 else line_end
        end = prompt.find(f"[END_{kind}]", first, line_end)
        if end < 0:
            without_end[kind] = line_end
            continue
        parts += (prompt[done:first], *(MARKER + character for character in prompt[first:end]), MARKER)
        done = end
    return "".join([*parts, prompt[done:]])
