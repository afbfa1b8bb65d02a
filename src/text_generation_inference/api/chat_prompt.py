"""From the body of a chat request to what the engine needs: prompt, settings, grammar, and which tools may be called.

Everything but the rendering is plain work without waiting, done in a worker thread for long conversations.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import UNSET

from text_generation_inference.api.errors import ToolError
from text_generation_inference.api.generation import OutputText, openai_text
from text_generation_inference.api.openai_bodies import (
    ChatRequest,
    ImagePart,
    Message,
    NamedToolChoice,
    PlainVideoPart,
    Tool,
    VideoPart,
)
from text_generation_inference.api.openai_sampling import check_served, output_grammar, sampling_params, top_logprobs
from text_generation_inference.api.service import Service
from text_generation_inference.api.thoughts import EFFORT_VARIABLES, asked_budget, plan_thoughts
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.messages import append_tool_prompt, normalise_messages, text_of
from text_generation_inference.text.picture_prompt import PicturePrompt, PictureWords, ShownPictures
from text_generation_inference.text.reasoning import ReasoningFormat, before_answer
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools import Shape, ToolFormat, forced_grammar
from text_generation_inference.types import GenerationRequest, Grammar, SamplingParams

_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "template_name")


@dataclass(slots=True)
class ChatPlan:
    prompt: str
    params: SamplingParams
    grammar: Grammar | None
    tool_format: ToolFormat | None  # set when the text may hold tool calls
    tools: dict[str, Any]  # the schemas of their parameters by name
    shape: Shape  # what the text may be when it may hold calls
    reasoning: ReasoningFormat | None = None  # set when thoughts are told from the answer
    thinks_first: bool = False  # the prompt ends where thoughts begin
    pictures: PicturePrompt | None = None  # the prompt with its pictures, of a model that sees

    @property
    def given(self) -> str | PicturePrompt:
        """What is tokenised."""
        return self.prompt if self.pictures is None else self.pictures

    def open_text(self, tokenizer: Tokenizer, request: GenerationRequest) -> OutputText:
        """From tokens to text, for one answer."""
        shown_ids = frozenset[int]() if self.tool_format is None else self.tool_format.shown_ids
        if self.reasoning is None:
            return openai_text(tokenizer, request, shown_ids)
        splitter = self.reasoning.split(self.thinks_first, self.tool_format is not None)
        return openai_text(tokenizer, request, shown_ids | self.reasoning.shown_ids, splitter)


@dataclass(slots=True)
class ChatJob:
    """What is left to render."""

    frame: bytes  # `ChatTemplate.job`
    trims_end: bool
    continued: str = ""  # the words of the assistant that the prompt ends with
    shown: ShownPictures | None = None  # set where the model sees

    async def render(self, service: Service, long: bool) -> str:
        prompt = await service.chat_renderer.render(self.frame, long)
        return prompt.rstrip() if self.trims_end else prompt


@dataclass(slots=True)
class ChatPrompt:
    text: str
    continued: str
    pictures: PicturePrompt | None  # of a model that sees


async def plan_chat(service: Service, body: ChatRequest, long: bool) -> ChatPlan:
    """Raises what is wrong with the request. `long`: work on it may take so long that others would notice."""
    config, tool_format = service.config, service.tool_format
    header = before_answer(service.reasoning_format, service.tokenizer)
    plan, tools = await service.run_beside(lambda: _plan(body, config, tool_format, header), long)
    prompt = await render_chat(service, body, long, tools)
    plan.prompt, plan.pictures = prompt.text, prompt.pictures
    known, words, calls = service.reasoning_format, (prompt.text, prompt.continued), plan.tool_format is not None
    thoughts = plan_thoughts(body, config, known, service.tokenizer, words, plan.grammar, calls)
    plan.reasoning, plan.thinks_first, plan.grammar = thoughts.reasoning, thoughts.first, thoughts.grammar
    if thoughts.budget is not None:
        plan.params = msgspec.structs.replace(plan.params, thinking=thoughts.budget)
    return plan


async def render_chat(service: Service, body: ChatRequest, long: bool, tools: list[Tool] | None = None) -> ChatPrompt:
    """The prompt alone. Afterwards the body has no pictures any more.

    A template that writes a marker for each picture of a user's may not for others': then all are texts in their place.
    """
    tools, words, template = choose_tools(body) if tools is None else tools, service.words, service.template
    as_parts = words is not None and template.writes_pictures(words.marker)
    most = service.config.max_images_per_request
    job = await service.run_beside(lambda: chat_job(body, template, tools, words, as_parts, most), long)
    text = await job.render(service, long)
    if words is None or job.shown is None:
        return ChatPrompt(text, job.continued, None)
    found = job.shown.split(text)
    if found is None:
        job = await service.run_beside(lambda: chat_job(body, template, tools, words, False, most), long)
        assert job.shown is not None
        found = job.shown.split(await job.render(service, long))
        assert found is not None
    found.check(words, "messages")
    _drop_pictures(body)
    return ChatPrompt(words.marker.join(found.texts), job.continued, found)


def _drop_pictures(body: ChatRequest) -> None:
    for message in body.messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, ImagePart):
                part.image_url = ""
            elif isinstance(part, VideoPart):
                part.video_url = ""
            elif isinstance(part, PlainVideoPart):
                part.video = ""


def _plan(
    body: ChatRequest, config: ServerConfig, tool_format: ToolFormat, header: list[str]
) -> tuple[ChatPlan, list[Tool]]:
    """A plan whose prompt is yet to be rendered. `header`: `before_answer` of the model."""
    check_served(body)
    params = sampling_params(body, config, top_logprobs(body))
    tools = choose_tools(body)
    grammar = output_grammar(body, config)
    forced = body.tool_choice not in (None, "auto")
    shape: Shape = "mixed"
    if tools and (forced or grammar is not None):
        if config.disable_grammar_support:
            raise ValidationError("grammar is not supported")
        named = tools[0].function.name if forced and body.tool_choice != "required" else None
        parallel = body.parallel_tool_calls is not False
        # A call that is demanded leaves no room for the format; otherwise the model has the choice between the two.
        shape, instead = ("calls", None) if forced else ("either", grammar)
        grammar = forced_grammar(tool_format, [tool_as_json(tool) for tool in tools], named, parallel, instead, header)
    schemas = {tool.function.name: tool_as_json(tool)["function"]["parameters"] for tool in tools}
    return ChatPlan("", params, grammar, tool_format if tools else None, schemas, shape), tools


def choose_tools(body: ChatRequest) -> list[Tool]:
    """The tools the model may call in this answer."""
    tools, choice = body.tools or [], body.tool_choice
    if choice == "none":
        return []
    if choice in (None, "auto", "required"):
        if choice == "required" and not tools:
            raise ToolError("`tool_choice` is required, and `tools` is empty")
        return tools
    name = choice.function.name if isinstance(choice, NamedToolChoice) and choice.function is not None else choice
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise ToolError(f"Tool with name {str(name)[:256]} not found")
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


def chat_job(
    body: ChatRequest,
    template: ChatTemplate,
    tools: list[Tool],
    words: PictureWords | None = None,
    as_parts: bool = False,
    most_pictures: int | None = None,
) -> ChatJob:
    """A conversation that ends with the assistant's words is continued, unless that is turned off.

    `words`: those of a model that sees, whose pictures the template gets as parts, or as texts in their place.
    """
    _check_messages(body.messages)
    described = [tool_as_json(tool) for tool in tools]
    plain = [_as_plain(message) for message in body.messages]
    shown = None if words is None else ShownPictures(words, as_parts, most_pictures)
    if words is None or shown is None:
        messages = normalise_messages(plain, template)
    else:
        messages = normalise_messages(plain, template, shown.show, partial(_check_content, words))
    if described:
        messages = append_tool_prompt(messages, described, body.tool_prompt, template.uses_tools)
    continues = body.continue_final_message
    if continues is None:
        # A last message whose calls the template shows is complete.
        calls = "tool_calls" in messages[-1] and template.shows_tool_calls
        continues = messages[-1]["role"] == "assistant" and not calls and not body.add_generation_prompt
    if continues and body.add_generation_prompt:
        raise ValidationError("`continue_final_message` and `add_generation_prompt` exclude each other")
    frame = template.job(
        messages,
        tools=described if described and template.uses_tools else None,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        **_variables(body),
    )
    # As TGI, spaces at the end are not continued, where the caller does not ask in transformers' way.
    continued = text_of(messages[-1].get("content")) if continues else ""
    return ChatJob(frame, continues and body.continue_final_message is None, continued, shown)


def _check_content(words: PictureWords, place: int, content: object) -> None:
    parts = cast(list[dict[str, str]], content) if isinstance(content, list) else [{"text": str(content or "")}]
    for part in parts:
        words.check_text(part.get("text", ""), f"messages[{place}].content")


def _check_messages(messages: list[Message]) -> None:
    if not messages:
        raise ValidationError("`messages` cannot be empty")
    for index, message in enumerate(messages):
        if message.content is None and message.tool_calls is None and message.reasoning_content is None:
            raise ValidationError(
                f"`messages[{index}].content` is missing; only a message with `tool_calls` needs none"
            )


def _variables(body: ChatRequest) -> dict[str, Any]:
    """Further names that templates may read."""
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in _OWN_FIELDS:
        if name in variables:
            raise ValidationError(f"`chat_template_kwargs` cannot hold {name!r}: it has a field of its own")
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        for name in EFFORT_VARIABLES:
            variables.setdefault(name, body.reasoning_effort != "none")
    budget = asked_budget(body)
    if budget is not None:  # Seed-OSS is told of it
        variables.setdefault("thinking_budget", budget)
    return variables


def _as_plain(message: msgspec.Struct) -> dict[str, Any]:
    """A message without the fields that were not given."""
    return {key: value for key, value in msgspec.to_builtins(message).items() if value is not None or key == "content"}
