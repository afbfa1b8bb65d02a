"""A chat answer in the shape of OpenAI's Responses API: the object, its items, and the whole answer."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from text_generation_inference.api.chat_answer import ToldTokens, logprob_of
from text_generation_inference.api.chat_events import AnswerPart, PartKind, parts_of
from text_generation_inference.api.chat_run import Chat
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.openai_bodies import ChatCompletionLogprob
from text_generation_inference.api.responses_bodies import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputTextPart,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningSettings,
    ReasoningTextPart,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    SummaryTextPart,
    TextSettings,
)
from text_generation_inference.api.responses_request import ENCRYPTED, hidden_thoughts

_PREFIXES: dict[PartKind, str] = {"thoughts": "rs_", "text": "msg_", "call": "fc_"}


def new_item_id(kind: PartKind) -> str:
    return _PREFIXES[kind] + secrets.token_hex(12)


@dataclass(slots=True)
class RunningResponse:
    """A response whose answer is being made."""

    chat: Chat
    body: ResponsesRequest
    hides_cached: bool
    stores: bool
    keep: Callable[[ResponsesAnswer], None]  # told of one that is complete, before its client is

    @property
    def generation(self) -> Generation:
        return self.chat.generations[0]

    @property
    def tells_summaries(self) -> bool:
        """Clients that show no more than summaries ask for them; thoughts are told as such then."""
        return self.body.reasoning is not None and self.body.reasoning.summary is not None

    def begun(self) -> ResponsesAnswer:
        """The response as it is before the first token."""
        body, chat = self.body, self.chat
        return ResponsesAnswer(
            id=chat.id,
            created_at=chat.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=chat.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning or ReasoningSettings(),
            store=self.stores,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=body.text if body.text and body.text.format else TextSettings(format={"type": "text"}),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            user=body.user,
            metadata=body.metadata or {},
        )

    def complete(self, output: list[OutputItem]) -> ResponsesAnswer:
        """The response with its answer."""
        answer = self.begun()
        answer.output, answer.completed_at = output, int(time.time())
        answer.status, answer.usage = "completed", self._usage()
        if self.generation.finish_reason == "length":
            answer.status, answer.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
            answer.completed_at = None
        return answer

    def item(
        self, part: AnswerPart, number: str, status: ItemStatus, logprobs: Sequence[ChatCompletionLogprob] = ()
    ) -> OutputItem:
        match part.kind:
            case "text":
                return MessageItem(
                    id=number, status=status, content=[OutputTextPart(part.text, logprobs=list(logprobs))]
                )
            case "call":
                return FunctionCallItem(id=number, call_id=part.id, name=part.name, arguments=part.text, status=status)
            case "thoughts":
                item = ReasoningItem(id=number, status=status)
                if self.tells_summaries:
                    item.summary = [SummaryTextPart(part.text)]
                else:
                    item.content = [ReasoningTextPart(part.text)]
                if ENCRYPTED in (self.body.include or ()):
                    item.encrypted_content = hidden_thoughts(part.text)
                return item

    def _usage(self) -> ResponsesUsage:
        generation = self.generation
        cached = 0 if self.hides_cached else generation.num_cached_tokens or 0
        sent, made = generation.input_length, generation.num_tokens
        thought = OutputTokensDetails(generation.num_thought_tokens)
        return ResponsesUsage(sent, InputTokensDetails(cached), made, thought, sent + made)


def whole_response(running: RunningResponse, pieces: Sequence[Piece]) -> ResponsesAnswer:
    chat, generation = running.chat, running.generation
    parts = parts_of(chat, generation, pieces) or [AnswerPart("text", "")]
    logprobs: list[ChatCompletionLogprob] = []
    if chat.body.logprobs:
        tokens = ToldTokens(chat)
        logprobs = [logprob_of(chat, piece) for piece in pieces if tokens.tells(piece)]
    output: list[OutputItem] = []
    for place, part in enumerate(parts):
        is_cut = generation.finish_reason == "length" and place + 1 == len(parts)
        told = logprobs if part.kind == "text" else []
        logprobs = [] if part.kind == "text" else logprobs  # they are the answer's, and go with its first text
        output.append(running.item(part, new_item_id(part.kind), "incomplete" if is_cut else "completed", told))
    return running.complete(output)
