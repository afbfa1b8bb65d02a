"""Token ids to text, one token at a time.

On the way out: ids come from the engine one by one, text goes on to stop strings and to the client. `TextStream` owns
the few ids that are needed to tell what a new token adds. It knows nothing of stop strings or of how a request ends.

A token has no text of its own: it may hold part of a character, and its leading space depends on what stands before it.
So the new text is the difference between two decodings that start a little before it. Most tokens are whole characters
behind whole characters, though: their text comes from a table, and only the last few ids are kept for a later decoding.
"""

from collections import deque
from collections.abc import Sequence

from text_generation_inference.text.ids_as_text import IdsAsText, IdStream
from text_generation_inference.text.token_texts import TokenTexts
from text_generation_inference.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 5
# A UTF-8 character has at most 4 bytes and every token that counts has at least one.
_CHARACTER_TOKENS = 4
# Far more than a character needs: reached only by bytes that never become text.
_MAX_PENDING_TOKENS = 16
_UNFINISHED = "\ufffd"  # what decoders put where bytes are no character (yet)


def open_stream(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
) -> "TextStream | IdStream":
    """What turns the tokens of one request into text."""
    if isinstance(tokenizer, IdsAsText):
        return IdStream()
    return TextStream(tokenizer, prompt_ids, skip_special_tokens)


class TextStream:
    """The text of one request's output, in pieces that end between characters."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        # ids[:read] have been given out (or are the end of the prompt) and only give context; ids[read:] are pending.
        self._ids = self._find_context(prompt_ids)
        self._read = len(self._ids)
        self._read_text = self._decode(self._ids)
        # The last ids whose text came from the table. While there are any, they are the context and `_ids` is stale.
        self._recent: deque[int] = deque(maxlen=_CONTEXT_TOKENS)
        self._texts = tokenizer.token_texts(skip_special_tokens)
        self._usable_texts = self._find_usable_texts()

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: empty while a character is unfinished."""
        texts = self._usable_texts
        if texts is not None:
            text = texts[token_id]
            if text is not None:
                if text:
                    self._recent.append(token_id)
                return text
        return self._push_and_decode(token_id)

    def flush(self) -> str:
        """What is still pending, unfinished characters included."""
        if self._recent or len(self._ids) == self._read:
            return ""
        text = self._advance(len(self._ids), self._decode(self._ids))
        self._usable_texts = self._find_usable_texts()
        return text

    def _push_and_decode(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        if self._recent:
            self._ids = list(self._recent)
            self._recent.clear()
            self._read = len(self._ids)
            self._read_text = self._decode(self._ids)
        text = self._take(token_id)
        self._usable_texts = self._find_usable_texts()
        return text

    def _take(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) > len(self._read_text) and not text.endswith(_UNFINISHED):
            return self._advance(len(self._ids), text)
        if len(self._ids) - self._read > _MAX_PENDING_TOKENS:
            return self._advance(*self._cut(text))
        return ""

    def _find_usable_texts(self) -> TokenTexts | None:
        """The table, if its texts hold for the next token: behind some text, and not inside a character."""
        pending = len(self._ids) > self._read
        if pending or self._read_text == "" or self._read_text.endswith(_UNFINISHED):
            return None
        return self._texts

    def _advance(self, end: int, text: str) -> str:
        """Move `read` to `end`, where `text` is the text of ids[:end], and return what that adds."""
        if text.startswith(self._read_text):
            new_text = text[len(self._read_text) :]
        else:
            # Byte-fallback decoders spoil a whole run of bytes for a bad one at its end; what was given out stays.
            new_text = self._decode(self._ids[self._read : end])
        self._ids = self._ids[self._read :]
        self._read = end - self._read
        self._read_text = self._decode(self._ids[: self._read])
        return new_text

    def _cut(self, text: str) -> tuple[int, str]:
        """Where to split ids that stay unfinished, and the text before it.

        A character that began before the split would end within the tokens kept behind it, so a split that is clean
        now stays clean.
        """
        for end in range(len(self._ids) - _CHARACTER_TOKENS, self._read, -1):
            head = self._decode(self._ids[:end])
            if head + self._decode(self._ids[end:]) == text:
                return end, head
        return len(self._ids), text

    def _find_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last ids of the prompt that have text, from a character border on."""
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(context) == _CONTEXT_TOKENS + _CHARACTER_TOKENS - 1:
                break
            if self._has_text(token_id):
                context.append(token_id)
        context.reverse()
        for start in range(max(0, len(context) - _CONTEXT_TOKENS), -1, -1):
            if not self._decode(context[start:]).startswith(_UNFINISHED):
                return context[start:]
        return context[-_CONTEXT_TOKENS:]

    def _has_text(self, token_id: int) -> bool:
        if self._skips and token_id in self._tokenizer.skipped_ids:
            return False
        return self._tokenizer.token_of(token_id) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skips)
