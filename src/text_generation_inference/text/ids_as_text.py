"""Token ids in place of text, in prompts and in answers: `SKIP_TOKENIZER_IN_TGI`.

Takes the tokenizer's place in the front end, so every route works as it does with text; a model folder needs
no tokenizer then. A prompt is ids between commas, where `?` is the id that pads; an answer is all ids that were
generated, the one that ended it included.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from text_generation_inference.errors import ModelFormatError, ValidationError
from text_generation_inference.text.model_folder import read_special_tokens
from text_generation_inference.text.stop_tokens import read_ids, read_stop_ids
from text_generation_inference.text.token_texts import TokenTexts
from text_generation_inference.text.tokenizer import Tokenizer

_MAX_DIGITS = 9  # no vocabulary is that large; checked against the model's later
_SHOWN = 20  # characters of a prompt in an error
_PADDING = "?"


class IdsAsText(Tokenizer):
    """Reads and writes the ids themselves. Knows no vocabulary: whether an id exists is checked like any other's."""

    def __init__(self, eos_ids: frozenset[int], pad_id: int) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.bos_token = self.eos_token = None
        self.model_max_length = None
        self.vocab_size = 0
        self.skipped_ids = frozenset[int]()  # every id is told
        self.special_ids = eos_ids | {pad_id}

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Find the ids that end and pad a text. They are those of the tokenizer where there is one, so that an answer
        ends where it would as text; a folder that names none has none, and pads with 0."""
        folder = Path(folder)
        pad_ids = read_ids(folder, "generation_config.json", "pad_token_id")
        pad_ids = pad_ids or read_ids(folder, "config.json", "pad_token_id")
        tokenizer = _load_if_there(folder)
        if tokenizer is not None:
            eos_ids = tokenizer.eos_ids
            named = tokenizer.id_of(read_special_tokens(folder).texts().get("pad_token", ""))
            pad_ids = pad_ids or frozenset(() if named is None else (named,))
        else:
            eos_ids = read_stop_ids(folder, frozenset(), lambda _: None)  # without a vocabulary no token has a name
        return cls(eos_ids, min(pad_ids or eos_ids, default=0))

    def encode(self, text: str, add_special_tokens: bool = True, truncate: int | None = None) -> list[int]:
        """The ids of a prompt, at most the last `truncate`; nothing is put around them."""
        ids = [self._read(item) for item in text.split(",")]
        return ids if truncate is None else ids[-truncate:]

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        items = text.split(",")
        ends = itertools.accumulate(len(item) + 1 for item in items)  # all of it is ASCII, or `encode` raises
        return [
            (token_id, end - 1 - len(item), end - 1)
            for token_id, item, end in zip(self.encode(text), items, ends, strict=True)
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ",".join(map(str, ids))

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        return None

    def token_of(self, token_id: int) -> str | None:
        return str(token_id)

    def id_of(self, token: str) -> int | None:
        return int(token) if _is_id(token) else None

    def to_json(self) -> str:
        raise ValidationError("grammar is not supported: the server was started with SKIP_TOKENIZER_IN_TGI")

    def before_output(self, prompt: str) -> str:
        return prompt + ","

    def _read(self, item: str) -> int:
        item = item.strip()
        if item == _PADDING:
            return self.pad_id
        if not _is_id(item):
            raise ValidationError(
                f"`inputs` must be token ids separated by commas, because the server was started with"
                f" SKIP_TOKENIZER_IN_TGI. Given: {item[:_SHOWN]!r}"
            )
        return int(item)


def _load_if_there(folder: Path) -> Tokenizer | None:
    try:
        return Tokenizer.load(folder)
    except ModelFormatError:
        if (folder / "tokenizer.json").exists():
            raise
        return None  # the ids are there for folders whose tokenizer cannot be read


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


class IdStream:
    """The text of one request's output: ids between commas."""

    def __init__(self) -> None:
        self._began = False

    def push(self, token_id: int) -> str:
        text = f",{token_id}" if self._began else str(token_id)
        self._began = True
        return text

    def flush(self) -> str:
        return ""
