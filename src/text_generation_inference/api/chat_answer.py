"""A chat answer in OpenAI's shape, from the pieces of its text.

What whole and streamed answers share, and the whole one.
"""

import secrets
import string
from dataclasses import dataclass

from text_generation_inference.api.chat_prompt import ChatPlan
from text_generation_inference.api.choices import FINISH_REASONS, finite
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.older_calls import older_message, wants_older
from text_generation_inference.api.openai_bodies import (
    ChatCompletionComplete,
    ChatCompletionLogprob,
    ChatCompletionLogprobs,
    ChatCompletionTopLogprob,
    ChatRequest,
    OutputFunction,
    OutputMessage,
    OutputToolCall,
)
from text_generation_inference.text.token_bytes import token_bytes, token_name
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools import CallArguments, CallStart, Content, ToolParser


@dataclass(slots=True)
class Chat:
    """One chat request that is running: its choices share the prompt."""

    body: ChatRequest
    plan: ChatPlan
    model: str
    tokenizer: Tokenizer
    generations: list[Generation]
    id: str
    created: int
    separates_thoughts: bool = True
    includes_thoughts: bool = True

    def parser(self) -> ToolParser | None:
        plan = self.plan
        return None if plan.tool_format is None else ToolParser(plan.tool_format, plan.tools, plan.shape)

    def keeps(self, part: Content | CallStart | CallArguments) -> bool:
        """Whether a part of the text is told. Without leave for parallel calls only the first call is."""
        return self.body.parallel_tool_calls is not False or isinstance(part, Content) or part.index == 0

    def told(self, piece: Piece) -> tuple[str, str]:
        """The thoughts and the text of a piece, as far as the caller wants them and apart if the caller does."""
        if self.includes_thoughts and not self.separates_thoughts:
            return "", piece.thoughts + piece.text
        return piece.thoughts if self.includes_thoughts else "", piece.text

    def new_call_id(self, name: str, index: int) -> str:
        """Unlike any other. Some templates want a form of their own, everybody else takes OpenAI's."""
        form = self.plan.tool_format.form if self.plan.tool_format is not None else None
        if form is not None and form.named_ids:
            before = sum(len(message.tool_calls or ()) for message in self.body.messages)
            return f"functions.{name}:{before + index}"
        if form is not None and form.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return "call_" + secrets.token_hex(12)


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
    parser = chat.parser()
    texts: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    told = [chat.told(piece) for piece in pieces]
    parts = [Content(text) for _, text in told]
    if parser is not None:
        parts = [part for _, text in told for part in parser.push(text)]
        parts += parser.finish(cut=generation.finish_reason == "length")
    thoughts = "".join(thoughts for thoughts, _ in told)
    if thoughts:
        message.reasoning_content = message.reasoning = thoughts
    for part in filter(chat.keeps, parts):
        match part:
            case Content(text=text):
                texts.append(text)
            case CallStart(name=name):
                calls.append((name, []))
            case CallArguments(index=number, text=text):
                calls[number][1].append(text)
    text = "".join(texts)
    message.content = text if text or not calls else None
    if calls:
        message.tool_calls = [
            OutputToolCall(
                chat.new_call_id(name, number), "function", OutputFunction(name=name, arguments="".join(arguments))
            )
            for number, (name, arguments) in enumerate(calls)
        ]
    logprobs = None
    if chat.body.logprobs:
        tokens = ToldTokens(chat)
        logprobs = ChatCompletionLogprobs([logprob_of(chat, piece) for piece in pieces if tokens.tells(piece)])
    if wants_older(chat.body):
        older_message(message)
    return ChatCompletionComplete(index, message, logprobs, finish_of(chat, generation, bool(calls)))


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
