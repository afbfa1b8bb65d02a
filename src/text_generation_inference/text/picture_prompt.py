"""Prompts with pictures in places: from what a caller wrote to token ids and `PictureSpan`s.

On the way in, around the loading of pictures, which is others' work: `PicturePrompt` is texts and where pictures come
from, `SeenPrompt` texts and pictures that are loaded, and `encode_seen` makes tokens of it. Knows how a family writes
pictures (`PictureWords`), nothing of pixels, fetching or HTTP.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from text_generation_inference.errors import ModelFormatError, TemplateError, ValidationError, too_many_pictures
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import PictureSpan

_OPEN, _CLOSE = "![](", ")"
Expansion = Sequence[str | int]


class RuleInWords(Protocol):
    """Of `pictures.rule.PictureRule`, what is said in words."""

    @property
    def image_token(self) -> str: ...
    @property
    def marker(self) -> str: ...
    @property
    def reserved(self) -> frozenset[str]: ...
    @property
    def places_bos(self) -> bool: ...
    def finish(self, text: str, bos: str) -> str: ...


class LayoutInWords(Protocol):
    """Of `pictures.rule.PictureLayout`, what is told to the engine and what stands in the prompt."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def grid(self) -> tuple[int, ...]: ...
    @property
    def expansion(self) -> tuple[str | int, ...]: ...


class FoundPicture(Protocol):
    """A picture that is loaded."""

    @property
    def digest(self) -> str: ...
    @property
    def layout(self) -> LayoutInWords: ...


@dataclass(frozen=True, slots=True)
class PictureWords:
    """How a model's prompts say that there is a picture."""

    image_token: str
    image_id: int
    marker: str
    reserved: tuple[str, ...]
    reserved_ids: frozenset[int]
    places_bos: bool
    finish: Callable[[str, str], str]

    @classmethod
    def of(cls, rule: RuleInWords, tokenizer: Tokenizer) -> Self:
        """Raises `ModelFormatError` where the tokenizer does not have the token that stands for pictures."""
        image_id = tokenizer.id_of(rule.image_token)
        if image_id is None or tokenizer.encode(rule.image_token * 2, add_special_tokens=False) != [image_id] * 2:
            raise ModelFormatError(
                f"the model sees pictures in the place of {rule.image_token!r}, which its tokenizer.json does not have"
                " as a token of its own. Download the model again."
            )
        reserved = sorted({*rule.reserved, rule.image_token})
        ids = {tokenizer.id_of(text) for text in reserved} - {None}
        return cls(
            rule.image_token,
            image_id,
            rule.marker,
            tuple(reserved),
            frozenset(token_id for token_id in ids if token_id is not None),
            rule.places_bos,
            rule.finish,
        )

    def check_text(self, text: str, field: str) -> None:
        """Users place pictures, not the tokens that stand for them."""
        for reserved in self.reserved:
            if reserved in text:
                raise ValidationError(
                    f"`{field}` holds {reserved!r}, which only a picture may bring into a prompt of this model"
                )


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A text with pictures in places that are yet to be loaded: one text more than sources."""

    texts: list[str]
    sources: list[Any]  # whatever the loader takes: a URL, a data URI

    def check(self, words: PictureWords, field: str) -> None:
        for text in self.texts:
            words.check_text(text, field)


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """The same with the pictures."""

    texts: list[str]
    pictures: Sequence[FoundPicture]

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.texts))


# -- places ----------------------------------------------------------------------------------------------------------


def split_markdown(text: str, most: int | None = None) -> PicturePrompt:
    """`![](url)` in a text is a picture, as in TGI: nothing between the brackets, and the address ends at the first
    closing parenthesis. Raises `ValidationError` for more than `most`: a text may have millions."""
    texts: list[str] = []
    sources: list[str] = []
    end = 0  # of the last picture
    while (start := text.find(_OPEN, end)) >= 0 and (close := text.find(_CLOSE, start + len(_OPEN))) >= 0:
        if most is not None and len(sources) == most:
            raise too_many_pictures(most)
        texts.append(text[end:start])
        sources.append(text[start + len(_OPEN) : close])
        end = close + len(_CLOSE)
    return PicturePrompt([*texts, text[end:]], sources)


def split_at_markers(rendered: str, marker: str, sources: list[Any]) -> PicturePrompt | None:
    """A prompt of a template that writes `marker` for each picture; None if it did not for all of them."""
    texts = rendered.split(marker)
    return PicturePrompt(texts, sources) if len(texts) == len(sources) + 1 else None


def split_at_stand_ins(rendered: str, stand_ins: Sequence[str], sources: Sequence[Any]) -> PicturePrompt:
    """A prompt of a template that was given a text for each picture, in the order in which it shows them."""
    places: list[tuple[int, str, Any]] = []
    for stand_in, source in zip(stand_ins, sources, strict=True):
        start = rendered.find(stand_in)
        if start < 0 or rendered.find(stand_in, start + 1) >= 0:
            raise TemplateError("the chat template does not show every picture of the messages once")
        places.append((start, stand_in, source))
    texts: list[str] = []
    end = 0
    places.sort(key=lambda place: place[0])
    for start, stand_in, _ in places:
        texts.append(rendered[end:start])
        end = start + len(stand_in)
    return PicturePrompt([*texts, rendered[end:]], [source for _, _, source in places])


class ShownPictures:
    """The pictures of a conversation, shown to its template as parts or as short texts that nobody can guess: what
    a data URI holds never goes through a template."""

    def __init__(self, words: PictureWords, as_parts: bool, most: int | None = None) -> None:
        """`most`: of pictures. Each is looked for in the whole prompt."""
        self.words, self.as_parts, self._most = words, as_parts, most
        self.sources: list[Any] = []
        self._stand_ins: list[str] = []

    def show(self, source: Any) -> str | None:
        """For `normalise_messages`. Raises `ValidationError` for one too many."""
        if self._most is not None and len(self.sources) == self._most:
            raise too_many_pictures(self._most)
        self.sources.append(source)
        if self.as_parts:
            return None
        self._stand_ins.append("picture" + secrets.token_hex(12))
        return self._stand_ins[-1]

    def split(self, prompt: str) -> PicturePrompt | None:
        """The rendered prompt around its pictures; None if the template did not write its marker for each of them."""
        if self.as_parts:
            return split_at_markers(prompt, self.words.marker, self.sources)
        return split_at_stand_ins(prompt, self._stand_ins, self.sources)


# -- tokens ----------------------------------------------------------------------------------------------------------


def write_seen(
    prompt: SeenPrompt, words: PictureWords, add_special_tokens: bool, bos_token: str | None
) -> tuple[str, bool]:
    """The prompt in full, as a tokenizer would get it, and whether that adds special tokens."""
    expansions = [picture.layout.expansion for picture in prompt.pictures]
    return _write(prompt.texts, expansions, words, add_special_tokens, bos_token)


def encode_seen(
    prompt: SeenPrompt,
    words: PictureWords,
    tokenizer: Tokenizer,
    add_special_tokens: bool = True,
    truncate: int | None = None,
) -> tuple[list[int], list[PictureSpan]]:
    """The ids of the whole prompt as the tokenizer has them for the text in full, and where the pictures are.

    The tokenizer gets one token for each run of them, which are repeated afterwards: a token of its own parts a text,
    however often it stands there, and a text of megabytes is spared.
    """
    expansions, runs = _condense(prompt.pictures)
    text, adds = _write(prompt.texts, expansions, words, add_special_tokens, tokenizer.bos_token)
    ids = tokenizer.encode(text, adds)
    if ids.count(words.image_id) != len(runs):
        raise ValidationError("`inputs` holds texts that cannot be told from the tokens of pictures")
    surplus = 0 if truncate is None else len(ids) + sum(n - 1 for _, n in runs) - truncate
    if surplus > 0:
        ids = _cut(ids, surplus, words, lambda kept: tokenizer.encode(text, adds, kept))
    return _repeat(ids, runs, prompt.pictures, words.image_id)


def _write(
    texts: Sequence[str],
    expansions: Sequence[Expansion],
    words: PictureWords,
    add_special_tokens: bool,
    bos_token: str | None,
) -> tuple[str, bool]:
    parts: list[str] = [texts[0]]
    for expansion, text in zip(expansions, texts[1:], strict=True):
        parts += [words.image_token * part if isinstance(part, int) else part for part in expansion]
        parts.append(text)
    if not expansions:
        return texts[0], add_special_tokens
    bos = (bos_token or "") if add_special_tokens else ""
    return words.finish("".join(parts), bos), add_special_tokens and not words.places_bos


def _condense(pictures: Sequence[FoundPicture]) -> tuple[list[Expansion], list[tuple[int, int]]]:
    """What stands for each picture with one token for each run, and every run as (number of its picture, tokens)."""
    expansions: list[Expansion] = []
    runs: list[tuple[int, int]] = []
    for number, picture in enumerate(pictures):
        parts: list[str | int] = []
        for part in picture.layout.expansion:
            if isinstance(part, str):
                parts.append(part)
            elif parts and isinstance(parts[-1], int):
                runs[-1] = (number, runs[-1][1] + part)
            else:
                parts.append(1)
                runs.append((number, part))
        expansions.append(parts)
    return expansions, runs


def _cut(ids: list[int], surplus: int, words: PictureWords, encode: Callable[[int], list[int]]) -> list[int]:
    """The last tokens of a text, as long as what is left out is no part of a picture."""
    kept = encode(len(ids) - surplus) if surplus < len(ids) else []
    if sum(i in words.reserved_ids for i in kept) != sum(i in words.reserved_ids for i in ids) or not kept:
        raise ValidationError("`truncate` would cut a picture: give it room for all pictures and the text behind them")
    return kept


def _repeat(
    ids: list[int], runs: list[tuple[int, int]], pictures: Sequence[FoundPicture], image_id: int
) -> tuple[list[int], list[PictureSpan]]:
    if not runs:
        return ids, []
    result: list[int] = []
    places: list[list[tuple[int, int]]] = [[] for _ in pictures]
    end = 0  # of what was taken over
    for number, length in runs:
        at = ids.index(image_id, end)
        result += ids[end:at]
        places[number].append((len(result), length))
        result += [image_id] * length
        end = at + 1
    result += ids[end:]
    return result, [
        PictureSpan(picture.digest, place, list(picture.layout.grid), list(picture.layout.shape))
        for picture, place in zip(pictures, places, strict=True)
    ]
