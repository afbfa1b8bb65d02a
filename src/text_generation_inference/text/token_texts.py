"""The text of single tokens, for vocabularies where a token has one.

Used by `TextStream` for the usual token. Behind other text, most decoders give a token the same text whatever that text
is; the tables here hold it. They say nothing of tokens that hold part of a character, nor of decoders that look at
neighbours: those need the tokens around them.
"""

import json
from collections.abc import Sequence
from typing import Any, cast

import tokenizers

_NO_CHARACTER = "\ufffd"  # what decoders put where bytes are no character


class TokenTexts(dict[int, str | None]):
    """By token id: its text; "" for a token that is skipped; None when its neighbours must be known.

    Filled when an id is first asked for: one entry for each id of the vocabulary at most, about 0.1 kB. Threads may
    share it: two that ask at once write the same value.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped_ids: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(skipped_ids, ""))
        self._backend = backend

    def __missing__(self, token_id: int) -> str | None:
        if self._backend.id_to_token(token_id) is None:
            return None
        # Twice the same token: what the second adds is its text behind other text. A part of a character cannot become
        # whole by this: either its beginning or its end still lacks bytes.
        once, twice = (self._decode([token_id] * count) for count in (1, 2))
        self[token_id] = text = None if _NO_CHARACTER in twice else twice[len(once) :] or None
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def decodes_tokens_apart(backend: tokenizers.Tokenizer) -> bool:
    """Whether a token of whole characters has the same text behind any text that is not empty."""
    if backend.decoder is None:
        return False
    state = cast(dict[str, Any], json.loads(backend.decoder.__getstate__()))
    fused = False  # from here on a step sees all text as one
    for step in cast(list[dict[str, Any]], state.get("decoders", [state])):
        match step["type"]:
            case "ByteLevel":
                apart, fused = not fused, True
            case "ByteFallback" | "Metaspace":
                apart = not fused
            case "Replace":
                apart = len(step["pattern"].get("String", "")) == 1
            case "Strip":
                apart = fused and step["start"] <= 1 and step["stop"] == 0
            case "Fuse":
                apart = fused = True
            case _:
                apart = False
        if not apart:
            return False
    return True
