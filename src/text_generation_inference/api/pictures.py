"""Pictures on their way into a request: whether the model sees, what is loaded, and who holds it until when.

Between the routes, which know where pictures are, and `pictures.loader`, which fetches and decodes them. A model that
does not see has no loader: whatever looks like a picture is text then, and nothing is fetched.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from text_generation_inference.api.callers import current_caller
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.api.turns import Turns
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.files import read_json_object
from text_generation_inference.pictures.fetch import MAX_AT_ONCE, Turn
from text_generation_inference.pictures.loader import PictureLoader, num_decoders
from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules import find_rule
from text_generation_inference.text.ids_as_text import IdsAsText
from text_generation_inference.text.picture_prompt import (
    PicturePrompt,
    PictureWords,
    SeenPrompt,
    encode_seen,
    split_markdown,
)
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import ModelFacts

_MAX_WAIT_S = 30.0  # for a turn to fetch, and for a worker
_MOST_FETCHES = MAX_AT_ONCE * 3 // 4  # of one caller: servers that do not answer hold them all for a while
_SIZES = ((336, 336), (640, 480), (1024, 1024), (1920, 1080))  # that costs are told for


class Holder(Protocol):
    """Who gives pictures back when what they are for has ended."""

    def hold(self, digests: Sequence[str]) -> None: ...


class Pictures:
    """What the service knows of pictures."""

    def __init__(self, rule: PictureRule, tokenizer: Tokenizer, loader: PictureLoader, max_pictures: int) -> None:
        """`max_pictures`: of a prompt."""
        self.rule, self.max_pictures = rule, max_pictures
        self.words = PictureWords.of(rule, tokenizer)
        self.loader = loader
        self.costs = picture_costs(rule, self.words, tokenizer)

    @classmethod
    def find(
        cls, config: ServerConfig, facts: ModelFacts, tokenizer: Tokenizer, metrics: Metrics | None = None
    ) -> "Pictures | None":
        """Of the model that the engine serves; None for one that does not see.

        With `metrics`, callers take turns and share the room there is.
        """
        if facts.pictures is None or config.picture_folder is None or isinstance(tokenizer, IdsAsText):
            return None
        folder = Path(facts.folder)
        rule = find_rule(folder, read_json_object(folder / "config.json"))
        if rule is None:
            return None
        pixels = Path(config.picture_folder)
        if metrics is None:
            return cls(rule, tokenizer, PictureLoader(config, folder, pixels), config.max_images_per_request)
        loader = PictureLoader(config, folder, pixels, *_turns(config, metrics), current_caller.get)
        return cls(rule, tokenizer, loader, config.max_images_per_request)

    async def see(self, prompt: str | PicturePrompt, field: str, holder: Holder, salt: str) -> SeenPrompt:
        """Load what a prompt shows. In a text, pictures are Markdown. Raises what is wrong with it, before fetching.

        What is kept of pictures is shared between requests of the same salt.
        """
        if isinstance(prompt, str):
            prompt = split_markdown(prompt, self.max_pictures)
        prompt.check(self.words, field)
        if not prompt.sources:
            return SeenPrompt(prompt.texts, [])
        found = await self.loader.load(prompt.sources, salt)
        holder.hold([picture.digest for picture in found])
        return SeenPrompt(prompt.texts, found)


def _turns(config: ServerConfig, metrics: Metrics) -> tuple[Turn, Turn]:
    """To fetch, and for a worker."""
    fetching = Turns(MAX_AT_ONCE, _MAX_WAIT_S, partial(metrics.waiting, "fetch"), most_each=_MOST_FETCHES)
    decoding = Turns(num_decoders(config), _MAX_WAIT_S, partial(metrics.waiting, "picture"))
    return fetching.turn, decoding.turn


@dataclass(frozen=True, slots=True)
class _Sized:
    layout: PictureLayout
    digest: str = ""


def picture_costs(rule: PictureRule, words: PictureWords, tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens of a prompt that is nothing but a picture, by width and height."""
    costs: dict[str, int] = {}
    for width, height in _SIZES:
        with suppress(ValidationError):  # a family may have no pictures of that shape
            prompt = SeenPrompt(["", ""], [_Sized(rule.layout(width, height))])
            costs[f"{width}x{height}"] = len(encode_seen(prompt, words, tokenizer, add_special_tokens=False)[0])
    return costs
