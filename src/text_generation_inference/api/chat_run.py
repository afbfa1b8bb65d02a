"""A chat request that is running, whichever API it came by: from a body of `/v1/chat/completions` to its generations.

Other APIs are translated into that body on the way in, and told in their own shape on the way out (`chat_events`).
"""

import secrets
import string
import time
from dataclasses import dataclass

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_prompt import ChatPlan, plan_chat
from text_generation_inference.api.choices import body_model, start_choices
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.api.openai_sampling import prompt_limit
from text_generation_inference.api.service import Permit
from text_generation_inference.api.thoughts import tells_thoughts
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


async def start_chat(
    call: Call, body: ChatRequest, count: int, permit: Permit, prefix: str = "chatcmpl-", field: str = "messages"
) -> Chat:
    """Everything up to the engine. What is wrong with the request is raised here, before any answer begins.

    `prefix` is that of the answer's id, `field` where the caller's API has the conversation.
    """
    service = call.service
    model, created = body_model(service, body.model), int(time.time())
    plan = await plan_chat(service, body, call.request.is_long)
    request = await service.prepare(
        plan.given,
        plan.params,
        add_special_tokens=bool(body.add_special_tokens),  # templates have those that are needed
        truncate=prompt_limit(body, service.facts.max_input_tokens),
        grammar=plan.grammar,
        cache_salt=body.cache_salt,
        permit=permit,
        field=field,
    )
    if plan.pictures is not None and plan.pictures.sources:
        plan.pictures = None  # what they came from may have megabytes
        call.request.free_body()
    generations: list[Generation] = []
    start_choices(call, request, permit, count, generations, plan.open_text)
    separates, includes = tells_thoughts(body, service.config), body.include_reasoning is not False
    number = prefix + secrets.token_hex(12)
    return Chat(body, plan, model, service.tokenizer, generations, number, created, separates, includes)
