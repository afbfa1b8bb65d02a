"""Ollama's API over the chat path, where `--ollama-api` asks for it: `/api/chat`, `/api/generate`, what is served.

A stream is lines of JSON. A call of a tool is told whole, when its arguments are complete. Bodies are read as JSON
whatever they are said to be, as Ollama does: its examples for curl say nothing, and neither do some clients.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import UNSET

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_events import AnswerEvent, AnswerReader, PartBegin, PartDelta, PartEnd
from text_generation_inference.api.chat_prompt import ChatPlan
from text_generation_inference.api.chat_run import Chat, start_chat
from text_generation_inference.api.choices import FINISH_REASONS, body_model, start_choices
from text_generation_inference.api.error_shapes import shape_of
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.http import encode_line, json_response
from text_generation_inference.api.ollama_bodies import (
    OllamaAnswer,
    OllamaCall,
    OllamaChatRequest,
    OllamaFunction,
    OllamaGenerateRequest,
    OllamaLine,
    OllamaShowRequest,
)
from text_generation_inference.api.ollama_request import chat_of_ollama, chat_of_prompt
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.api.openai_sampling import output_grammar, sampling_params
from text_generation_inference.api.service import Permit, Service
from text_generation_inference.api.unknown_fields import BodyForm
from text_generation_inference.errors import TgiError

OLLAMA_VERSION = "0.12.0"  # whose API this is; clients refuse servers that are older than they need
_CHAT, _GENERATE, _SHOW = BodyForm(OllamaChatRequest), BodyForm(OllamaGenerateRequest), BodyForm(OllamaShowRequest)
_NEVER = "9999-12-31T00:00:00Z"


async def chat(call: Call) -> None:
    body = await call.read_body(_CHAT, of_any_type=True)
    if not body.messages:
        await _answer_load(call, body.model, as_message, body.keep_alive)
        return
    service = call.service
    asked = await service.run_beside(lambda: chat_of_ollama(body, *_abilities(service)), call.request.is_long)
    service.metrics.count_request()
    with service.admit() as permit:
        await _answer(call, await start_chat(call, asked, 1, permit), as_message)


async def generate(call: Call) -> None:
    body = await call.read_body(_GENERATE, of_any_type=True)
    if not body.prompt:
        await _answer_load(call, body.model, as_response, body.keep_alive)
        return
    service = call.service
    asked = await service.run_beside(lambda: chat_of_prompt(body, *_abilities(service)), call.request.is_long)
    service.metrics.count_request()
    with service.admit() as permit:
        if body.raw:
            started = await _start_raw(call, asked, body.prompt, permit)
        else:
            started = await start_chat(call, asked, 1, permit, field="prompt")
        await _answer(call, started, as_response)


def _abilities(service: Service) -> tuple[bool, bool]:
    return service.pictures is not None, service.reasoning_format is not None


async def _start_raw(call: Call, body: ChatRequest, prompt: str, permit: Permit) -> Chat:
    """The prompt as it is, without a template."""
    service, model = call.service, body_model(call.service, body.model)
    params, grammar = sampling_params(body, service.config, 0), output_grammar(body, service.config)
    request = await service.prepare(prompt, params, grammar=grammar, permit=permit, field="prompt")
    generations: list[Generation] = []
    start_choices(call, request, permit, 1, generations)
    plan = ChatPlan(prompt, params, grammar, None, {}, "mixed")
    return Chat(body, plan, model, service.tokenizer, generations, "", int(time.time()))


# -- answers -------------------------------------------------------------------------------------------------------

Shape = Callable[[OllamaLine, OllamaAnswer], None]  # puts an answer, or a part of one, into a line


def as_message(line: OllamaLine, answer: OllamaAnswer) -> None:
    line.message = answer


def as_response(line: OllamaLine, answer: OllamaAnswer) -> None:
    line.response, line.thinking = answer.content, answer.thinking or UNSET


class OllamaLines:
    """One answer as lines, or as one."""

    def __init__(self, chat: Chat, shape: Shape) -> None:
        self._chat, self._shape = chat, shape
        self._generation = chat.generations[0]
        self._reader = AnswerReader(chat, self._generation)
        self._call: PartBegin | None = None
        self._arguments: list[str] = []
        self._first_time: float | None = None

    def read(self, piece: Piece) -> list[OllamaAnswer]:
        """What a piece adds to the answer."""
        if self._first_time is None:
            self._first_time = time.perf_counter()
        answers = [self._told(event) for event in self._reader.read(piece)]
        return [answer for answer in answers if answer is not None]

    def _told(self, event: AnswerEvent) -> OllamaAnswer | None:
        match event:
            case PartDelta(kind="text", text=text):
                return _message(text)
            case PartDelta(kind="thoughts", text=text):
                return _message(thinking=text)
            case PartBegin(kind="call"):
                self._call, self._arguments = event, []
            case PartDelta(kind="call", text=text):
                self._arguments.append(text)
            case PartEnd(kind="call"):
                return self._take_call()
            case _:
                pass
        return None

    def _take_call(self) -> OllamaAnswer | None:
        """A call that a limit has cut off is not told: its arguments are an object here, and there is none."""
        assert self._call is not None
        try:
            arguments: Any = msgspec.json.decode("".join(self._arguments) or "{}")
        except (msgspec.DecodeError, RecursionError):
            return None
        function = OllamaFunction(name=self._call.name, arguments=arguments, index=self._call.index)
        return _message(tool_calls=[OllamaCall(function=function, id=self._call.id)])

    def whole(self, parts: list[OllamaAnswer]) -> OllamaAnswer:
        """All parts as one."""
        return _message(
            "".join(part.content for part in parts),
            "".join(part.thinking for part in parts),
            [called for part in parts for called in part.tool_calls],
        )

    def line(self, answer: OllamaAnswer) -> OllamaLine:
        line = OllamaLine(model=self._chat.model, created_at=_now())
        self._shape(line, answer)
        return line

    def last(self, answer: OllamaAnswer) -> OllamaLine:
        line, generation = self.line(answer), self._generation
        timings = generation.timings
        assert timings is not None and self._first_time is not None
        behind = min(time.perf_counter() - self._first_time, timings.inference_s)
        line.done, line.done_reason = True, FINISH_REASONS[generation.finish_reason]
        line.total_duration, line.load_duration = _nanoseconds(timings.total_s), 0
        line.prompt_eval_count = generation.input_length
        line.prompt_eval_duration = _nanoseconds(timings.inference_s - behind)
        line.eval_count, line.eval_duration = generation.num_tokens, _nanoseconds(behind)
        return line


def _message(content: str = "", thinking: str = "", tool_calls: list[OllamaCall] | None = None) -> OllamaAnswer:
    return OllamaAnswer(role="assistant", content=content, thinking=thinking, tool_calls=tool_calls or [])


async def _answer(call: Call, chat: Chat, shape: Shape) -> None:
    lines, generation = OllamaLines(chat, shape), chat.generations[0]
    if chat.body.stream:
        await _stream(call, chat, lines)
        return
    parts: list[OllamaAnswer] = []
    while not generation.finish_reason:
        parts += [part for piece in await generation.take() for part in lines.read(piece)]
    call.succeed(generation)
    await call.connection.respond(json_response(lines.last(lines.whole(parts))))


async def _stream(call: Call, chat: Chat, lines: OllamaLines) -> None:
    connection, generation = call.connection, chat.generations[0]
    await connection.start_events(call.stream_headers(len(chat.plan.prompt)), "application/x-ndjson")
    call.streams += chat.generations
    try:
        while not generation.finish_reason:
            pieces = await generation.take()
            parts = [part for piece in pieces for part in lines.read(piece)]
            if not pieces:
                parts = [_message()]  # a sign of life: comments and empty lines are no JSON
            told = [lines.line(part) for part in parts]
            if generation.finish_reason:
                told.append(lines.last(_message()))
            if told:
                await connection.write(b"".join(map(encode_line, told)))
        call.succeed(generation)
    except TgiError as error:
        call.fail(error)
        await connection.write(shape_of(call.request.path, call.request.id).event(error))
    await connection.end_events()


async def _answer_load(call: Call, model: str, shape: Shape, keep_alive: float | str | None) -> None:
    """Clients load and unload models so; the one here is loaded, and stays."""
    line = OllamaLine(model=model, created_at=_now(), done=True)
    line.done_reason = "unload" if keep_alive in (0, "0", "0s", "0m") else "load"
    shape(line, _message())
    await call.connection.respond(json_response(line))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


# -- the model -----------------------------------------------------------------------------------------------------

_STARTED = _now()


async def version(call: Call) -> None:
    await call.connection.respond(json_response({"version": OLLAMA_VERSION}))


async def tags(call: Call) -> None:
    await call.connection.respond(json_response({"models": [{**_entry(call.service), "modified_at": _STARTED}]}))


async def running(call: Call) -> None:
    """The model is in memory, and stays there."""
    facts = call.service.facts
    loaded = {"size_vram": facts.weight_bytes, "context_length": facts.max_total_tokens, "expires_at": _NEVER}
    await call.connection.respond(json_response({"models": [{**_entry(call.service), **loaded}]}))


async def show(call: Call) -> None:
    """Whatever name it is given: there is one model, which any name means."""
    await call.read_body(_SHOW, of_any_type=True)
    service = call.service
    facts, template, family = service.facts, service.template, service.model_type
    sees, thinks = _abilities(service)
    abilities = {"completion": True, "tools": template.uses_tools, "vision": sees, "thinking": thinks}
    shown = {
        "modelfile": "",
        "parameters": "",
        "template": template.sources.get("default", ""),
        "details": _details(service),
        "model_info": {
            "general.architecture": family,
            "general.basename": service.model_name,
            f"{family}.context_length": facts.max_total_tokens,
        },
        "capabilities": [name for name, has in abilities.items() if has],
        "modified_at": _STARTED,
    }
    await call.connection.respond(json_response(shown))


def _entry(service: Service) -> dict[str, Any]:
    name, facts = service.model_name, service.facts
    digest = sha256(f"{facts.model_id} {facts.sha}".encode()).hexdigest()
    size = facts.weight_bytes
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(service)}


def _details(service: Service) -> dict[str, Any]:
    facts, family = service.facts, service.model_type
    return {
        "parent_model": "",
        "format": "gguf" if facts.model_id.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": facts.quantization or facts.dtype,
    }
