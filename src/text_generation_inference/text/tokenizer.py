"""Text to token ids and back, for one model folder.

Used by the front end before a request enters the engine (`encode`) and, through `TextStream`, on its way out
(`decode`). Equal to the fast tokenizer of transformers for the same folder where it has a `tokenizer.json`; else the
files decide that `tokenizer_files` reads in its place. The special tokens declared beside either are added. It holds no
state per request, so threads may share it; the library remembers the tokens of up to 10,000 words, which takes 2 to
4 MB once so many have come.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from text_generation_inference.errors import ValidationError
from text_generation_inference.text.model_folder import (
    SpecialTokens,
    add_special_tokens,
    read_json,
    read_special_tokens,
)
from text_generation_inference.text.panics import reraise_unless_failure
from text_generation_inference.text.split_sequences import mark_sequences, splits_sequences
from text_generation_inference.text.stop_tokens import read_stop_ids
from text_generation_inference.text.token_texts import TokenTexts, decodes_tokens_apart
from text_generation_inference.text.tokenizer_files import read_backend

# Folders write "no limit" as a huge number; no model reads this many tokens.
_NO_LIMIT = 10**15


class Tokenizer:
    """A model's tokenizer with its special tokens."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: SpecialTokens,
        eos_ids: frozenset[int] | None = None,
        model_max_length: int | None = None,
    ) -> None:
        """Take over `backend`. Without `eos_ids` the named EOS token, if there is one, is the only one."""
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        add_special_tokens(backend, special_tokens)

        texts = special_tokens.texts()
        self.bos_token = texts.get("bos_token")
        self.eos_token = texts.get("eos_token")
        self.model_max_length = model_max_length
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        # What `decode` leaves out, which is narrower than `special_ids`: a role alone does not hide a token.
        self.skipped_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        roles = [*texts.values(), *(token.content for token in special_tokens.unnamed)]
        self.special_ids = self.skipped_ids | {
            token_id for text in roles if (token_id := backend.token_to_id(text)) is not None
        }
        if eos_ids is None:
            eos_id = None if self.eos_token is None else backend.token_to_id(self.eos_token)
            eos_ids = frozenset() if eos_id is None else frozenset({eos_id})
        self.eos_ids = eos_ids
        self._splits_sequences = splits_sequences(backend)
        self._token_texts: dict[bool, TokenTexts] | None = None
        if decodes_tokens_apart(backend):
            skipped = {False: frozenset[int](), True: self.skipped_ids}
            self._token_texts = {skip: TokenTexts(backend, ids) for skip, ids in skipped.items()}

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read the tokenizer of a model folder. Raises `ModelFormatError` when it is missing or corrupt."""
        folder = Path(folder)
        config = read_json(folder, "tokenizer_config.json")
        backend, special_tokens = read_backend(folder, read_special_tokens(folder))
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        tokenizer = cls(backend, special_tokens, model_max_length=_max_length(config))
        tokenizer.eos_ids = read_stop_ids(folder, tokenizer.eos_ids, tokenizer.id_of)
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True, truncate: int | None = None) -> list[int]:
        """The token ids of `text`, at most the last `truncate` of them.

        Special tokens that the model puts around every text count, and are kept in their place: truncation takes
        tokens from the start of the text behind them.
        """
        encoding = self._encode(mark_sequences(text) if self._splits_sequences else text, add_special_tokens)
        ids = encoding.ids
        if truncate is None or len(ids) <= truncate:
            return ids
        if truncate <= 0:
            raise ValueError(f"truncate must be > 0, given {truncate}")
        around = encoding.special_tokens_mask
        head = around.index(0) if 0 in around else 0
        tail = around[::-1].index(0) if 0 in around else 0
        kept = truncate - head - tail
        if kept <= 0:
            return ids[-truncate:]
        end = len(ids) - tail
        return ids[:head] + ids[end - kept : end] + ids[end:]

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """Each token of `text` as (id, start, end), counted in bytes of its UTF-8 form.

        A token that the model puts around every text has (0, 0); one that is part of a character has the whole of it.
        """
        encoding = self._encode(text, add_special_tokens)
        spans = encoding.offsets  # in characters
        if not text.isascii():
            borders = [0, *itertools.accumulate(len(char.encode()) for char in text)]
            spans = [(borders[start], borders[end]) for start, end in spans]
        return [(token_id, start, end) for token_id, (start, end) in zip(encoding.ids, spans, strict=True)]

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            # A batch of one: unlike `encode` it lets other threads run meanwhile.
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeError) as error:  # a lone surrogate, which no UTF-8 text holds
            raise ValidationError(f"tokenizer error {error}") from error
        except BaseException as error:  # plain ones of the library: a text that has neither tokens nor an unknown token
            reraise_unless_failure(error)  # a panic: its expressions have limits of their own
            raise ValidationError(
                f"tokenizer error `inputs` holds text that this model's tokenizer cannot encode: {error}"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids outside the vocabulary have none."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        """The text of each token behind other text, or None when this vocabulary has no such texts."""
        return None if self._token_texts is None else self._token_texts[skip_special_tokens]

    def token_of(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, as stored (not decoded), or None for an id outside the vocabulary."""
        return self._backend.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """The whole tokenizer as the text of a tokenizer.json, with the special tokens declared beside it."""
        return self._backend.to_str()

    def before_output(self, prompt: str) -> str:
        """A prompt as it stands before the answer in a text of both."""
        return prompt


def _max_length(config: dict[str, Any]) -> int | None:
    value: object = config.get("model_max_length") or config.get("max_len")
    if not isinstance(value, int | float) or not 0 < value < _NO_LIMIT:
        return None
    return int(value)
