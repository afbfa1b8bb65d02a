"""Turns of other APIs in a form that chat templates take: words of the system in their place, roles by turns.

Agents add words of the system as a conversation goes on. Moved to the beginning they would change the prompt's first
tokens with every turn, and nothing behind them would be found in the prefix cache; so they stay where they are, within
a neighbour if the template knows the system at the beginning alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from text_generation_inference.api.openai_bodies import (
    ImagePart,
    Message,
    PlainImagePart,
    PlainVideoPart,
    RefusalPart,
    TextPart,
    VideoPart,
)
from text_generation_inference.text.picture_prompt import PictureWords

TurnContent = str | list[TextPart | ImagePart | PlainImagePart | VideoPart | PlainVideoPart | RefusalPart] | None
_SYSTEM = ("system", "developer")
_BETWEEN = "\n\n"


def place_system(messages: Sequence[Message], takes_later: bool) -> list[Message]:
    """All words of the system before the first turn as one message; later ones as they are if the template
    `takes_later`, else at the end of the turn before, if it is not the assistant's, or at the start of the next one."""
    num_first = next((n for n, message in enumerate(messages) if message.role not in _SYSTEM), len(messages))
    first, rest = messages[:num_first], messages[num_first:]
    placed = [Message(role=first[0].role, content=_joined(first))] if first else []
    return placed + (list(rest) if takes_later else _within(rest))


def _within(messages: Iterable[Message]) -> list[Message]:
    placed: list[Message] = []
    pending: list[Message] = []  # for the next turn
    for message in messages:
        if message.role in _SYSTEM:
            if placed and placed[-1].role != "assistant":
                placed[-1].content = _glued(placed[-1].content, message.content)
            else:
                pending.append(message)
            continue
        if pending:
            if message.role == "user":
                message.content = _glued(_joined(pending), message.content)
            else:
                placed.append(Message(role="user", content=_joined(pending)))
            pending = []
        placed.append(message)
    return [*placed, Message(role="user", content=_joined(pending))] if pending else placed


def join_neighbours(messages: Iterable[Message]) -> list[Message]:
    """Turns of users, or of the assistant, that follow each other as one: many templates refuse two."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or message.role != last.role or message.role not in ("user", "assistant"):
            joined.append(message)
            continue
        if message.content:
            last.content = _glued(last.content, message.content) if last.content else message.content
        thoughts = [text for text in (last.reasoning_content, message.reasoning_content) if text]
        last.reasoning_content = "\n".join(thoughts) or None
        calls = [*(last.tool_calls or []), *(message.tool_calls or [])]
        last.tool_calls = calls or None
    return joined


def _joined(messages: Sequence[Message]) -> str:
    return _BETWEEN.join(text_of(message.content) for message in messages)


def checked(text: str, place: str, words: PictureWords | None) -> str:
    """A text of a body, named by its place there if it holds what only pictures may bring. `words`: of a model that
    sees."""
    if words is not None:
        words.check_text(text, place)
    return text


def as_content(parts: Sequence[TextPart | ImagePart]) -> Any:
    """What a message holds: plain text where there are no pictures."""
    if any(isinstance(part, ImagePart) for part in parts):
        return list(parts)
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def text_of(content: TurnContent) -> str:
    """The words alone."""
    if isinstance(content, list):
        return "".join(part.text for part in content if isinstance(part, TextPart))
    return content or ""


def _glued(first: TurnContent, second: TurnContent) -> Any:
    if isinstance(first, str | None) and isinstance(second, str | None):
        return (first or "") + _BETWEEN + (second or "")
    return [*_parts(first), TextPart(_BETWEEN), *_parts(second)]


def _parts(content: TurnContent) -> list[Any]:
    return list(content) if isinstance(content, list) else [TextPart(content or "")]
