"""Answers to callers who gave `functions` instead of `tools`: one `function_call` in place of `tool_calls`.

The request is turned into the newer form where it is decoded; this is the way back.
"""

from msgspec import UNSET

from text_generation_inference.api.openai_bodies import ChatCompletionDelta, ChatRequest, OutputMessage


def wants_older(body: ChatRequest) -> bool:
    return body.functions is not None


def older_message(message: OutputMessage) -> None:
    if message.tool_calls is not UNSET:
        message.function_call, message.tool_calls = message.tool_calls[0].function, UNSET


def older_delta(delta: ChatCompletionDelta) -> None:
    if delta.tool_calls is not UNSET:
        delta.function_call, delta.tool_calls = delta.tool_calls[0].function, UNSET
