"""`/tokenize` and `/chat_tokenize`: texts to tokens with their places, in bounded memory.

A long text is tokenised beside the event loop into one array, and its answer is sent in pieces: what a client
has not read yet is 12 bytes a token, not a document.
"""

import asyncio

import msgspec
import numpy as np

from text_generation_inference.api.bodies import SimpleToken
from text_generation_inference.api.call import Call
from text_generation_inference.api.http import Response
from text_generation_inference.api.memory import release_memory
from text_generation_inference.api.service import LONG_TEXT, Permit, Service
from text_generation_inference.api.tenants import make_salt
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.picture_prompt import PicturePrompt, SeenPrompt, write_seen
from text_generation_inference.text.tokenizer import Tokenizer

MAX_CHARACTERS = 2**18  # the tokenizer's library takes some 500 bytes for each while it works
_TOKENS_PER_PIECE = 1_000
_encode = msgspec.json.Encoder().encode


async def write_prompt(
    service: Service,
    prompt: str | PicturePrompt,
    field: str,
    add_special_tokens: bool,
    permit: Permit,
    cache_salt: str | None = None,
) -> tuple[str, bool]:
    """A prompt in full, with what stands for its pictures, and whether the tokenizer adds special tokens to it."""
    seen = await service.see(prompt, field, permit, make_salt(cache_salt, service.config.cache_salt_by_key))
    if isinstance(seen, SeenPrompt):
        assert service.words is not None
        return write_seen(seen, service.words, add_special_tokens, service.tokenizer.bos_token)
    assert isinstance(seen, str)
    return seen, add_special_tokens


async def count_tokens(service: Service, prompt: str | PicturePrompt, field: str, permit: Permit) -> int:
    """How many tokens a chat's prompt has, pictures included, however many the model takes."""
    text, special = await write_prompt(service, prompt, field, False, permit)

    def work() -> int:
        try:
            return len(service.tokenizer.encode(text, special))
        finally:
            release_memory(len(text))

    return await service.run_beside(work, len(text) > LONG_TEXT)


async def answer_tokens(
    call: Call, text: str, field: str, add_special_tokens: bool, before: bytes = b"", after: bytes = b""
) -> None:
    """The tokens of `text` as a JSON list between `before` and `after`. `field` is where the text came from."""
    if len(text) > MAX_CHARACTERS:
        raise ValidationError(
            f"`{field}` must have at most {MAX_CHARACTERS} characters to be tokenized. Given: {len(text)}"
        )
    tokenizer, connection = call.service.tokenizer, call.connection
    if len(text) <= LONG_TEXT:
        table = _tokenize(tokenizer, text, add_special_tokens)
        body = before + b"[" + _encode_rows(text.encode(), table) + b"]" + after
        await connection.respond(Response(200, body, "application/json"))
        return

    def work() -> np.ndarray:
        try:
            return _tokenize(tokenizer, text, add_special_tokens)
        finally:
            release_memory(len(text))

    table, data = await call.service.run_beside(work, True), text.encode()
    await connection.start_json()
    await connection.write(before + b"[")
    for start in range(0, len(table), _TOKENS_PER_PIECE):
        piece = _encode_rows(data, table[start : start + _TOKENS_PER_PIECE])
        await connection.write(b"," + piece if start else piece)
        await asyncio.sleep(0)  # writing to a client that reads does not wait
    await connection.end_events(b"]" + after)


def _tokenize(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> np.ndarray:
    """`[tokens, 3]`: id, and where its bytes start and stop; one that stands for no text of the input has none."""
    return np.array(tokenizer.encode_with_offsets(text, add_special_tokens), dtype=np.uint32).reshape(-1, 3)


def _encode_rows(data: bytes, table: np.ndarray) -> bytes:
    rows: list[list[int]] = table.tolist()
    tokens = [
        SimpleToken(token_id, data[start:stop].decode(errors="replace"), start, stop) for token_id, start, stop in rows
    ]
    return _encode(tokens)[1:-1]
