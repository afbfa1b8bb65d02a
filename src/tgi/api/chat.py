"""`/v1/chat/completions`: from messages to a prompt, and from pieces of text to OpenAI's choices.

Level 8. Whole answers here; `chat_stream` streams them. Tool calls are read from the model's own format; a grammar
forces them only where the caller demands a call.
"""

import secrets
import string
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from tgi.api.call import Call
from tgi.api.errors import ToolError, decode_body
from tgi.api.generation import Generation, Piece, openai_text
from tgi.api.http import json_response
from tgi.api.openai_bodies import (
    ChatCompletion,
    ChatCompletionComplete,
    ChatCompletionLogprob,
    ChatCompletionLogprobs,
    ChatCompletionTopLogprob,
    ChatRequest,
    NamedToolChoice,
    OutputFunction,
    OutputMessage,
    OutputToolCall,
    PromptTokensDetails,
    Tool,
    Usage,
)
from tgi.api.openai_sampling import (
    check_served,
    check_tools,
    num_choices,
    response_grammar,
    sampling_params,
    top_logprobs,
)
from tgi.api.service import Permit, Service
from tgi.errors import ValidationError
from tgi.text.messages import append_tool_prompt, normalise_messages
from tgi.text.token_bytes import token_bytes, token_text
from tgi.text.tokenizer import Tokenizer
from tgi.text.tools import CallArguments, CallStart, Content, ToolFormat, ToolParser, forced_grammar
from tgi.types import GenerationRequest

FINISH_REASONS = {"eos_token": "stop", "stop_sequence": "stop", "length": "length"}
_decode = msgspec.json.Decoder(ChatRequest).decode
_LONG_CHAT = 2_000  # characters; longer conversations are rendered beside the event loop


async def read_chat(call: Call) -> ChatRequest:
    return decode_body(_decode, await call.request.read_json())


async def chat_completions(call: Call) -> None:
    await answer_chat(call, await read_chat(call))


async def answer_chat(call: Call, body: ChatRequest) -> None:
    from tgi.api.chat_stream import stream_chat

    service = call.service
    service.metrics.count_request()
    chat = await start_chat(call, body)
    with chat.permit:
        if body.stream:
            await stream_chat(call, chat)
            return
        choices: list[ChatCompletionComplete] = []
        for index, generation in enumerate(chat.generations):
            pieces = await generation.take_all()
            choices.append(_choice(index, chat, generation, pieces))
            call.succeed(generation)
        first = chat.generations[0]
        assert first.timings is not None
        answer = ChatCompletion(
            chat.id, chat.created, chat.model, service.fingerprint, choices, usage_of(chat.generations)
        )
        headers = call.timing_headers(len(chat.prompt), first.input_length, first.timings)
        await call.connection.respond(json_response(answer, headers=headers))


@dataclass(slots=True)
class Chat:
    """One chat request that is running: its choices share the prompt."""

    body: ChatRequest
    prompt: str
    model: str
    permit: Permit
    tool_format: ToolFormat | None  # set when the text may hold tool calls
    tool_names: list[str]
    tokenizer: Tokenizer
    generations: list[Generation] = field(default_factory=list)
    id: str = ""
    created: int = 0

    def parser(self) -> ToolParser | None:
        return None if self.tool_format is None else ToolParser(self.tool_format, self.tool_names)

    def new_call_id(self) -> str:
        """Unlike any other. Mistral's templates take nine letters and digits, everybody else takes OpenAI's form."""
        if self.tool_format is not None and self.tool_format.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return "call_" + secrets.token_hex(12)


async def start_chat(call: Call, body: ChatRequest) -> Chat:
    """Everything up to the engine. What is wrong with the request is raised here, before any answer begins."""
    service = call.service
    try:
        check_served(body)
        check_tools(body)
        count = num_choices(body, service.config)
        params = sampling_params(body, service.config, top_logprobs(body))
        tools = choose_tools(body)
        grammar = response_grammar(body.response_format, service.config)
        tool_format = service.tool_format if tools else None
        if tools and body.tool_choice not in (None, "auto") and tool_format is not None:
            if service.config.disable_grammar_support:
                raise ValidationError("grammar is not supported")
            named = tools[0].function.name if body.tool_choice != "required" else None
            parallel = body.parallel_tool_calls is not False
            grammar = forced_grammar(tool_format, [tool_as_json(tool) for tool in tools], named, parallel)
        permit = service.admit(count)
    except ValidationError:
        service.metrics.fail_request("validation")
        raise
    try:
        prompt = await render_chat(service, body, tools)
        try:
            request = await service.prepare(
                prompt, params, add_special_tokens=False, truncate=body.truncate, grammar=grammar
            )
        except ValidationError:
            service.metrics.fail_request("validation")
            raise
        names = [tool.function.name for tool in tools]
        chat = Chat(body, prompt, body_model(service, body.model), permit, tool_format, names, service.tokenizer)
        chat.id, chat.created = "chatcmpl-" + secrets.token_hex(12), int(time.time())
        keeps_special = tool_format is not None and tool_format.keeps_special_tokens
        start_choices(call, request, permit, count, chat.generations, keeps_special)
        return chat
    except BaseException:
        permit.__exit__()
        raise


def start_choices(
    call: Call,
    request: GenerationRequest,
    permit: Permit,
    count: int,
    generations: list[Generation],
    keeps_special: bool = False,
) -> None:
    """`count` generations of one prompt; with a seed, each its own one from there."""
    seed = request.seed
    for number in range(count):
        one = msgspec.structs.replace(request, seed=(seed + number) % 2**64)
        generations.append(
            call.service.start(
                one,
                lambda tokenizer, request: openai_text(tokenizer, request, keeps_special),
                call.request.arrived,
                permit,
            )
        )


def body_model(service: Service, given: str | None) -> str:
    """As TGI: `tgi` and nothing are the served model, any other name is taken for it and told back."""
    return service.facts.model_id if given in (None, "", "tgi") else given


def choose_tools(body: ChatRequest) -> list[Tool]:
    """The tools the model may call in this answer."""
    tools, choice = body.tools or [], body.tool_choice
    if choice == "none":
        return []
    if choice in (None, "auto", "required"):
        if choice == "required" and not tools:
            raise ToolError("`tool_choice` is required, and `tools` is empty")
        return tools
    name = choice.function.name if isinstance(choice, NamedToolChoice) else choice
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise ToolError(f"Tool with name {name} not found")
    return named


def tool_as_json(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    function = tool.function
    parameters = function.parameters if function.parameters is not UNSET else function.arguments
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    # Without parameters the function has none, and templates need not look for them.
    described["parameters"] = {"type": "object", "properties": {}} if parameters in (UNSET, None) else parameters
    return {"type": tool.type, "function": described}


async def render_chat(service: Service, body: ChatRequest, tools: list[Tool]) -> str:
    """The prompt. A conversation that ends with the assistant's words is continued, unless that is turned off."""
    if not body.messages:
        raise ValidationError("`messages` cannot be empty")
    template = service.template
    described = [tool_as_json(tool) for tool in tools]
    messages = normalise_messages([_as_plain(message) for message in body.messages], template)
    if described:
        messages = append_tool_prompt(messages, described, body.tool_prompt, template.uses_tools)
    continues = body.continue_final_message
    if continues is None:
        continues = body.messages[-1].role == "assistant" and not body.add_generation_prompt
    if continues and body.add_generation_prompt:
        raise ValidationError("`continue_final_message` and `add_generation_prompt` exclude each other")
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "template_name"):
        if name in variables:
            raise ValidationError(f"`chat_template_kwargs` cannot hold {name!r}: it has a field of its own")
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    generates = not continues and body.add_generation_prompt is not False

    def work() -> str:
        return template.render(
            messages,
            tools=described if described and template.uses_tools else None,
            add_generation_prompt=generates,
            continue_final_message=continues,
            **variables,
        )

    size = sum(len(message.content) for message in body.messages if isinstance(message.content, str))
    return await service.run_beside(work, size > _LONG_CHAT or bool(variables) or len(body.messages) > 16)


def _as_plain(message: msgspec.Struct) -> dict[str, Any]:
    """A message without the fields that were not given."""
    return {key: value for key, value in msgspec.to_builtins(message).items() if value is not None or key == "content"}


# -- answers -------------------------------------------------------------------------------------------------------


def _choice(index: int, chat: Chat, generation: Generation, pieces: list[Piece]) -> ChatCompletionComplete:
    message = OutputMessage()
    parser = chat.parser()
    texts: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    parts = [Content(piece.text) for piece in pieces]
    if parser is not None:
        parts = [part for piece in pieces for part in parser.push(piece.text)] + parser.finish()
    for part in parts:
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
            OutputToolCall(chat.new_call_id(), "function", OutputFunction(name=name, arguments="".join(arguments)))
            for name, arguments in calls
        ]
    logprobs = None
    if chat.body.logprobs:
        logprobs = ChatCompletionLogprobs([logprob_of(chat, piece) for piece in pieces])
    return ChatCompletionComplete(index, message, logprobs, finish_of(generation, bool(calls)))


def finish_of(generation: Generation, calls: bool) -> str:
    reason = FINISH_REASONS[generation.finish_reason]
    return "tool_calls" if calls and reason == "stop" else reason


def logprob_of(chat: Chat, piece: Piece) -> ChatCompletionLogprob:
    count = chat.body.top_logprobs or 0
    tops = [
        ChatCompletionTopLogprob(*_token(chat.tokenizer, token_id, logprob))
        for token_id, logprob in piece.top_tokens[:count]
    ]
    return ChatCompletionLogprob(*_token(chat.tokenizer, piece.token_id, piece.logprob), tops)


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    return token_text(tokenizer, token_id), _finite(logprob), list(token_bytes(tokenizer, token_id))


def _finite(value: float) -> float:
    """OpenAI's log-probabilities are numbers, always."""
    return value if value - value == 0 else -9999.0


def usage_of(generations: list[Generation], num_prompts: int = 1) -> Usage:
    """Prompts count once, however many choices they have."""
    per_prompt = len(generations) // num_prompts
    prompts = generations[::per_prompt]
    prompt_tokens = sum(generation.input_length for generation in prompts)
    completion = sum(generation.num_tokens for generation in generations)
    cached = sum(generation.num_cached_tokens or 0 for generation in prompts)
    return Usage(prompt_tokens, completion, prompt_tokens + completion, PromptTokensDetails(cached))
