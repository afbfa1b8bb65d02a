"""From the body of a chat request to what the engine needs: prompt, settings, grammar, and which tools may be called.

`plan_chat` is plain work without waiting, so that long conversations can be planned in a worker thread.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from text_generation_inference.api.errors import ToolError
from text_generation_inference.api.openai_bodies import ChatRequest, Message, NamedToolChoice, Tool
from text_generation_inference.api.openai_sampling import check_served, output_grammar, sampling_params, top_logprobs
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.messages import append_tool_prompt, normalise_messages
from text_generation_inference.text.tools import Shape, ToolFormat, forced_grammar
from text_generation_inference.types import Grammar, SamplingParams

_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "template_name")


@dataclass(slots=True)
class ChatPlan:
    prompt: str
    params: SamplingParams
    grammar: Grammar | None
    tool_format: ToolFormat | None  # set when the text may hold tool calls
    tool_names: list[str]
    shape: Shape  # what the text may be when it may hold calls


def plan_chat(body: ChatRequest, config: ServerConfig, template: ChatTemplate, tool_format: ToolFormat) -> ChatPlan:
    """Raises what is wrong with the request."""
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
        grammar = forced_grammar(tool_format, [tool_as_json(tool) for tool in tools], named, parallel, instead)
    names = [tool.function.name for tool in tools]
    return ChatPlan(render_chat(body, template, tools), params, grammar, tool_format if tools else None, names, shape)


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


def render_chat(body: ChatRequest, template: ChatTemplate, tools: list[Tool]) -> str:
    """The prompt. A conversation that ends with the assistant's words is continued, unless that is turned off."""
    _check_messages(body.messages)
    described = [tool_as_json(tool) for tool in tools]
    messages = normalise_messages([_as_plain(message) for message in body.messages], template)
    if described:
        messages = append_tool_prompt(messages, described, body.tool_prompt, template.uses_tools)
    continues = body.continue_final_message
    if continues is None:
        # A last message whose calls the template shows is complete.
        calls = "tool_calls" in messages[-1] and template.shows_tool_calls
        continues = messages[-1]["role"] == "assistant" and not calls and not body.add_generation_prompt
    if continues and body.add_generation_prompt:
        raise ValidationError("`continue_final_message` and `add_generation_prompt` exclude each other")
    prompt = template.render(
        messages,
        tools=described if described and template.uses_tools else None,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        **_variables(body),
    )
    # As TGI, spaces at the end are not continued, where the caller does not ask in transformers' way.
    return prompt.rstrip() if continues and body.continue_final_message is None else prompt


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
    return variables


def _as_plain(message: msgspec.Struct) -> dict[str, Any]:
    """A message without the fields that were not given."""
    return {key: value for key, value in msgspec.to_builtins(message).items() if value is not None or key == "content"}
