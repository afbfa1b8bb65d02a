"""What of a request's body decides which replica has computed its beginning before.

The body is not checked here, and most of it is not decoded: what is not understood goes to whoever has least to do, and
is refused there. Bytes stand for tokens, four for one. A conversation's next turn begins with the bytes of the last.
"""

from collections.abc import Mapping

import msgspec

from text_generation_inference.router import PromptKey, key_of_text

_ABSENT = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    inputs: msgspec.Raw = _ABSENT  # /, /generate, /generate_stream, /tokenize
    prompt: msgspec.Raw = _ABSENT  # /v1/completions
    messages: msgspec.Raw = _ABSENT  # /v1/chat/completions, /v1/messages
    input: msgspec.Raw = _ABSENT  # /v1/responses
    instances: msgspec.Raw = _ABSENT  # /vertex
    # What is written in front of a prompt, or keeps it apart from others:
    tools: msgspec.Raw = _ABSENT
    model: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Body).decode
NO_PROMPT = key_of_text(b"")


def key_of_body(body: bytes, headers: Mapping[bytes, bytes], by_key: bool) -> PromptKey:
    """`by_key`: prefixes are shared only between requests with the same API key."""
    if body.lstrip()[:1] != b"{":
        return NO_PROMPT
    try:
        found = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NO_PROMPT
    candidates = (found.messages, found.inputs, found.input, found.prompt, found.instances)
    prompt = next((raw for raw in candidates if bytes(raw)), _ABSENT)
    who = (headers.get(b"authorization") or headers.get(b"x-api-key", b"")) if by_key else b""
    # The closing bracket or quote would end a block that the next turn continues.
    return key_of_text(bytes(prompt)[:-1], (bytes(found.model), bytes(found.tools), bytes(found.cache_salt), who))
