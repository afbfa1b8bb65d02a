"""A chat answer in OpenAI's shape, from the pieces of its text.

What whole and streamed answers share, and the whole one.
"""

from text_generation_inference.api.chat_events import AnswerPart, parts_of
from text_generation_inference.api.chat_run import Chat
from text_generation_inference.api.choices import FINISH_REASONS, finite
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.older_calls import older_message, wants_older
from text_generation_inference.api.openai_bodies import (
    ChatCompletionComplete,
    ChatCompletionLogprob,
    ChatCompletionLogprobs,
    ChatCompletionTopLogprob,
    OutputFunction,
    OutputMessage,
    OutputToolCall,
)
from text_generation_inference.text.token_bytes import token_bytes, token_name
from text_generation_inference.text.tokenizer import Tokenizer


class ToldTokens:
    """Whether the tokens of one choice are told: where thoughts are left out, those of the answer alone."""

    def __init__(self, chat: Chat) -> None:
        self._all = chat.includes_thoughts or chat.plan.reasoning is None
        self._answers = False

    def tells(self, piece: Piece) -> bool:
        """Of each piece in turn: one without any text goes with the piece before it."""
        if piece.text or piece.thoughts:
            self._answers = bool(piece.text)
        return self._all or self._answers


def whole_choice(index: int, chat: Chat, generation: Generation, pieces: list[Piece]) -> ChatCompletionComplete:
    message = OutputMessage()
    parts = parts_of(chat, generation, pieces)
    calls = [part for part in parts if part.kind == "call"]
    if thoughts := _joined(parts, "thoughts"):
        message.reasoning_content = message.reasoning = thoughts
    text = _joined(parts, "text")
    message.content = text if text or not calls else None
    if calls:
        message.tool_calls = [
            OutputToolCall(part.id, "function", OutputFunction(name=part.name, arguments=part.text)) for part in calls
        ]
    logprobs = None
    if chat.body.logprobs:
        tokens = ToldTokens(chat)
        logprobs = ChatCompletionLogprobs([logprob_of(chat, piece) for piece in pieces if tokens.tells(piece)])
    if wants_older(chat.body):
        older_message(message)
    return ChatCompletionComplete(index, message, logprobs, finish_of(chat, generation, bool(calls)))


def _joined(parts: list[AnswerPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def finish_of(chat: Chat, generation: Generation, calls: bool) -> str:
    reason = FINISH_REASONS[generation.finish_reason]
    if calls and reason == "stop":
        return "function_call" if wants_older(chat.body) else "tool_calls"
    return reason


def logprob_of(chat: Chat, piece: Piece) -> ChatCompletionLogprob:
    count = chat.body.top_logprobs or 0
    tops = [
        ChatCompletionTopLogprob(*_token(chat.tokenizer, token_id, logprob))
        for token_id, logprob in piece.top_tokens[:count]
    ]
    return ChatCompletionLogprob(*_token(chat.tokenizer, piece.token_id, piece.logprob), tops)


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    return token_name(tokenizer, token_id), finite(logprob), list(token_bytes(tokenizer, token_id))
