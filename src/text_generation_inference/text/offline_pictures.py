"""Pictures for prompts of a program that runs the model itself: where they stand in a text, and in a conversation.

Used by `LLM`, whose callers hand over pictures and not only where they are. The server's ways in are in `api`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from text_generation_inference.errors import ValidationError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.messages import normalise_messages
from text_generation_inference.text.picture_prompt import PicturePrompt, PictureWords, ShownPictures


def place_pictures(prompt: str, pictures: Sequence[Any], words: PictureWords) -> PicturePrompt:
    """Each picture in the place of a marker, as the model's own chat template writes it; before a text without any."""
    texts = prompt.split(words.marker)
    if len(texts) == 1:
        texts = [""] * len(pictures) + texts
    if len(texts) != len(pictures) + 1:
        raise ValidationError(f"`images` has {len(pictures)} pictures, and the prompt has places for {len(texts) - 1}")
    placed = PicturePrompt(texts, list(pictures))
    placed.check(words, "prompts")
    return placed


def render_pictures(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], words: PictureWords, **options: Any
) -> PicturePrompt:
    """A conversation around its pictures."""
    for as_parts in (True, False) if template.writes_pictures(words.marker) else (False,):
        shown = ShownPictures(words, as_parts)
        placed = shown.split(template.render(normalise_messages(messages, template, shown.show), **options))
        if placed is not None:
            placed.check(words, "messages")
            return placed
    raise AssertionError("texts that stand for pictures are always found, or an error is raised")
