"""SentencePiece models: reading their file, and a tokenizer made of pieces and scores.

The file is a protobuf message, of which the few fields that decide about tokens are read. GGUF files store the same
pieces in a form of their own and come to `build_sentencepiece` too.
"""

import itertools
import re
import struct
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import MAX_JSON_BYTES, check_plain_file, shorten

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of pieces
_SPACE = "\u2581"  # how SentencePiece spells a space
_BPE = 2  # among the types of models
_MAX_PIECES = 1 << 20
_MAX_LENGTH = 512  # characters of a piece that is joined from others
_MAX_MERGES = 1 << 22  # a vocabulary of 256,000 has some 600,000
_OTHER_FILE = "Put a tokenizer.json of this model into its folder"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # how protobuf stores a field


@dataclass(frozen=True)
class Spaces:
    """What happens to a text before it is cut into pieces."""

    adds_prefix: bool = True  # a space before it
    only_first: bool = False  # not before what follows a special token
    squeezes: bool = False  # several spaces are one, none at the ends
    characters: bytes = b""  # a table of characters that are written otherwise


@dataclass(frozen=True)
class SentencePieceFile:
    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    spaces: Spaces

    @property
    def unknown(self) -> str:
        return self.pieces[self.kinds.index(UNKNOWN)]


def build_sentencepiece(
    tokens: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    unknown: str,
    spaces: Spaces,
    apart: Collection[str] = (),
) -> Tokenizer:
    """A tokenizer without special tokens. Raises `ValueError` for pieces that would take too long.

    `apart`: pieces that are found first, wherever they are, and joined with nothing.
    """
    joined = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind == NORMAL or token in apart
    }
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges_by_score(joined),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    if any([found.value for found in model.tokenize(piece)] != [piece] for piece in apart):
        model.ignore_merges = True  # what is a piece as a whole is that piece, whether or not others make it
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if spaces.characters:
        steps.append(normalizers.Precompiled(spaces.characters))
    if spaces.squeezes:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        steps.append(normalizers.Replace(Regex(rf"[ {_SPACE}]+\z"), ""))
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if spaces.only_first:
        scheme = "first" if spaces.adds_prefix else "never"
        cuts.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False))
    else:
        steps += [normalizers.Prepend(_SPACE)] if spaces.adds_prefix else []
        steps.append(normalizers.Replace(" ", _SPACE))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    if apart:
        cuts.append(pre_tokenizers.Split(Regex(_longest_of(sorted(apart))), behavior="isolated"))
    if cuts:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    back: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaces.adds_prefix:
        back.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def defined_apart(stored: SentencePieceFile) -> set[str]:
    """Pieces that somebody has defined, but those that are found before characters are written otherwise."""
    table = stored.spaces.characters
    written = normalizers.Precompiled(table) if table else None
    return {
        piece
        for piece, kind in zip(stored.pieces, stored.kinds, strict=True)
        if kind == USER_DEFINED and piece and " " not in piece
        if written is None or written.normalize_str(piece) == piece
    }


def _longest_of(texts: Sequence[str]) -> str:
    """An expression that finds the longest of these, which are sorted."""
    branches: list[str] = []
    for _, same in itertools.groupby((text for text in texts if text), key=lambda text: text[0]):
        group = list(same)
        pairs = enumerate(zip(group[0], group[-1], strict=False))  # sorted: others have in common what these have
        shared = next((at for at, (one, other) in pairs if one != other), len(group[0]))
        branches.append(_quote(group[0][:shared]) + _longest_of([text[shared:] for text in group]))
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}" if branches else ""


def _quote(text: str) -> str:
    """As a regular expression."""
    return re.sub(r"[^\w\s]|[ #]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def _cuts(token: str, known: Container[str]) -> Iterator[tuple[str, str]]:
    """In two known ones."""
    for at in range(1, len(token)):
        if token[:at] in known and token[at:] in known:
            yield token[:at], token[at:]


def _merges_by_score(scores: dict[str, float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: each way to cut a token in two, best token first."""
    if longest := next((token for token in scores if len(token) > _MAX_LENGTH), None):
        raise ValueError(f"the piece {shorten(longest)} has {len(longest)} characters, and {_MAX_LENGTH} are allowed")
    found = ((-score, -len(pair[0]), *pair) for token, score in scores.items() for pair in _cuts(token, scores))
    merges = list(itertools.islice(found, _MAX_MERGES + 1))
    if len(merges) > _MAX_MERGES:
        raise ValueError(f"its pieces join in more than {_MAX_MERGES} ways")
    return [(left, right) for _, _, left, right in sorted(merges, key=lambda merge: merge[:2])]


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Raises `ModelFormatError` for what is no such file, or one whose tokens cannot be computed here."""
    check_plain_file(path, MAX_JSON_BYTES)
    return _PieceReader(path).read()


class _PieceReader:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, cause: str, advice: str = "Download the model again") -> NoReturn:
        raise ModelFormatError(f"{self.path}: {cause}. {advice}.")

    def read(self) -> SentencePieceFile:
        pieces: list[str] = []
        scores: list[float] = []
        kinds: list[int] = []
        trainer: dict[int, int | bytes] = {}
        normalizer: dict[int, int | bytes] = {}
        for number, value in self.fields(self.path.read_bytes()):
            if number == 1:
                if len(pieces) == _MAX_PIECES:
                    self.fail(f"has more than {_MAX_PIECES} pieces")
                found = dict(self.fields(self.message(value)))
                pieces.append(self.text(found.get(1, b"")))
                scores.append(self.number(found.get(2, b"\0\0\0\0")))
                kinds.append(self.whole(found.get(3, NORMAL)))
            elif number == 2:
                trainer = dict(self.fields(self.message(value)))
            elif number == 3:
                normalizer = dict(self.fields(self.message(value)))
        if len(set(pieces)) != len(pieces) or not pieces:
            self.fail(f"has {len(pieces)} pieces, of which {len(set(pieces))} differ")
        if UNKNOWN not in kinds:
            self.fail("has no piece for what is unknown")
        if self.whole(trainer.get(3, 1)) != _BPE:
            self.fail("is a SentencePiece model that is not made by merging pairs", _OTHER_FILE)
        if trainer.get(24) or normalizer.get(5, 1) == 0:
            self.fail("treats spaces in a way that is not known here", _OTHER_FILE)
        spaces = Spaces(
            adds_prefix=normalizer.get(3, 1) != 0,
            squeezes=normalizer.get(4, 1) != 0,
            characters=self.message(normalizer.get(2, b"")),
        )
        return SentencePieceFile(pieces, scores, kinds, spaces)

    def fields(self, data: bytes) -> Iterator[tuple[int, int | bytes]]:
        """Number and value of each field of a message."""
        at = 0
        while at < len(data):
            tag, at = self.varint(data, at)
            number, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                value, at = self.varint(data, at)
                yield number, value
                continue
            if kind == _BYTES:
                size, at = self.varint(data, at)
            elif kind in (_FIXED32, _FIXED64):
                size = 4 if kind == _FIXED32 else 8
            else:
                self.fail("is no SentencePiece model")
            if number == 0 or at + size > len(data):
                self.fail("is no SentencePiece model, or a part of one")
            yield number, data[at : at + size]
            at += size

    def varint(self, data: bytes, at: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(data):
                break
            value |= (data[at] & 127) << shift
            at += 1
            if data[at - 1] < 128:
                return value, at
        self.fail("is no SentencePiece model, or a part of one")

    def message(self, value: int | bytes) -> bytes:
        if not isinstance(value, bytes):
            self.fail("is no SentencePiece model: a number stands where a message should")
        return value

    def text(self, value: int | bytes) -> str:
        try:
            return self.message(value).decode()
        except UnicodeDecodeError:
            self.fail("holds a piece that is no text")

    def number(self, value: int | bytes) -> float:
        found = self.message(value)
        if len(found) != 4:
            self.fail("holds a score that is no number")
        return struct.unpack("<f", found)[0]

    def whole(self, value: int | bytes) -> int:
        if not isinstance(value, int):
            self.fail("holds a kind of piece that is no number")
        return value
