"""Prompts with exactly as many tokens as asked for, each different from its first token on; or prompts from a file.

Made of words that the given tokenizer has as one token each; every prompt is tokenised once more to be sure.
Knows nothing of requests.
"""

import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from text_generation_inference.bench.serve.apis import Message, as_text
from text_generation_inference.bench.serve.profiles import Lengths
from text_generation_inference.errors import StartError, TgiError
from text_generation_inference.text.tokenizer import Tokenizer

_MOST_WORDS = 4096
_FEWEST_WORDS = 64
_TRIES = 24
_SHORTEST_WORD = 3
_ROLES = ("system", "user", "assistant")


class Prompt(msgspec.Struct, frozen=True):
    content: str | list[Message]
    num_tokens: int | None  # None: not counted
    max_new_tokens: int


class Counter:
    """How many tokens the server will see. Chat templates add theirs, which are not counted."""

    def __init__(self, tokenizer: Tokenizer, with_special_tokens: bool) -> None:
        self._tokenizer, self._with_special = tokenizer, with_special_tokens
        self.num_around = len(tokenizer.encode("", with_special_tokens))

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, self._with_special))

    def ends(self, text: str) -> list[int]:
        """Where each token of `text` ends, in characters."""
        data = text.encode()
        spans = self._tokenizer.encode_with_offsets(text, add_special_tokens=False)
        return [len(data[:end].decode(errors="ignore")) for _, _, end in spans]

    def words(self) -> list[str]:
        """Plain words that are one token each, at the start of a text and behind a space."""
        tokenizer = self._tokenizer
        found: list[str] = []
        seen: set[str] = set()
        for token_id in range(tokenizer.vocab_size):
            word = tokenizer.decode([token_id]).strip()
            if (
                len(word) >= _SHORTEST_WORD
                and word.isascii()
                and word.isalpha()
                and word.islower()
                and word not in seen
            ):
                seen.add(word)
                if len(tokenizer.encode(f"{word} {word}", add_special_tokens=False)) == 2:
                    found.append(word)
                    if len(found) == _MOST_WORDS:
                        break
        return found


class PromptMaker:
    """Every call gives the next prompt; the same seed gives the same ones."""

    def __init__(
        self, counter: Counter, prompt: Lengths, output: Lengths, seed: int, shared_prefix: int = 0, name: str = ""
    ) -> None:
        self._counter, self._prompt, self._output, self._name = counter, prompt, output, name
        self._rng = random.Random(seed)
        words = counter.words()
        self._separator = " "
        if len(words) < _FEWEST_WORDS:  # such as a tokenizer of single letters
            words, self._separator = list(string.ascii_lowercase), ""
        self._rng.shuffle(words)
        self._words = words
        self._number = 0
        if shared_prefix >= prompt.lowest - counter.num_around:
            raise StartError(
                f"--shared-prefix {shared_prefix} leaves nothing of a prompt of {prompt.lowest} tokens: make it shorter"
            )
        self._prefix = self._rng.choices(words, k=shared_prefix)

    def make(self) -> Prompt:
        """Raises `StartError` if this tokenizer has no text of the drawn length."""
        wanted = self._prompt.draw(self._rng)
        output = self._output.draw(self._rng)
        words = [*self._prefix, *self._first_words()]
        room = wanted - self._counter.num_around - len(words)
        words = words[:room] if room < 0 else words
        words += self._rng.choices(self._words, k=max(0, room))
        return Prompt(self._fit(words, wanted), wanted, output)

    def _first_words(self) -> list[str]:
        """Two that no other prompt begins with, as long as there are such; the first alone differs for a while."""
        number, count = self._number, len(self._words)
        self._number += 1
        return [self._words[number % count], self._words[(number // count + 31 * number) % count]]

    def _fit(self, words: list[str], wanted: int) -> str:
        """Add or take words at the end until the count is right."""
        nearest = 0
        for _ in range(_TRIES):
            text = self._separator.join(words)
            count = self._counter.count(text)
            if count == wanted:
                return text
            nearest = count if abs(count - wanted) < abs(nearest - wanted) else nearest
            if count < wanted:
                words = words + self._rng.choices(self._words, k=wanted - count)
            else:
                words = words[: max(0, len(words) - (count - wanted))]
        raise StartError(
            f"tokenizer {self._name} cannot make a prompt of {wanted} tokens (nearest: {nearest}):"
            " ask for another length with --prompt-tokens, or give texts with --prompts"
        )


# -- from a file ---------------------------------------------------------------------------------------------------


class FilePrompts:
    """The prompts of a JSON file, again and again, in an order that the seed decides."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = list(prompts)
        random.Random(seed).shuffle(self._prompts)
        self._number = 0

    def make(self) -> Prompt:
        prompt = self._prompts[self._number % len(self._prompts)]
        self._number += 1
        return prompt


def read_prompts(
    path: str, counter: Counter | None, prompt: Lengths | None, output: Lengths, seed: int
) -> list[Prompt]:
    """A list of texts, of `{"prompt": ..., "max_new_tokens": ...}`, or of `{"conversations": [{"role", "content"}]}`.

    With `prompt` each text is cut to a length drawn from it, and what is too short is left out.
    """
    try:
        entries = msgspec.json.decode(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise StartError(f"--prompts {path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartError(f"--prompts {path}: is not valid JSON: {error}") from None
    if not isinstance(entries, list):
        raise StartError(f"--prompts {path}: must hold a list of prompts")
    rng = random.Random(seed)
    found: list[Prompt] = []
    for place, entry in enumerate(entries):
        asked, contents = _contents(entry, lambda what, place=place: f"--prompts {path}: entry {place} {what}")
        for content in contents:
            made = _cut(content, counter, prompt, rng)
            if made is not None:
                found.append(Prompt(made[0], made[1], asked or output.draw(rng)))
    if not found:
        least = "" if prompt is None else f" of at least {prompt.lowest} tokens"
        raise StartError(f"--prompts {path}: holds no prompt{least}")
    return found


def _contents(entry: Any, say: Callable[[str], str]) -> tuple[int | None, list[str | list[Message]]]:
    """The prompts of one entry: a conversation has one for each turn of its user, with what was said before."""
    match entry:
        case str() if entry:
            return None, [entry]
        case {"prompt": str(text), **others} if text:
            asked = others.get("max_new_tokens")
            if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
                raise StartError(say("has a `max_new_tokens` that is no number above 0"))
            return asked, [text]
        case {"conversations": list(turns)}:
            said: list[Message] = []
            prompts: list[str | list[Message]] = []
            for turn in turns:
                match turn:
                    case {"role": str(role), "content": str(content)} if role in _ROLES:
                        said.append({"role": role, "content": content})
                    case _:
                        raise StartError(say("has a turn without `role` (system, user or assistant) and `content`"))
                if role == "user":
                    prompts.append(said[0]["content"] if len(said) == 1 else list(said))
            return None, prompts
        case _:
            raise StartError(say("is no text, has no `prompt` and no `conversations`"))


def _cut(
    content: str | list[Message], counter: Counter | None, lengths: Lengths | None, rng: random.Random
) -> tuple[str | list[Message], int | None] | None:
    """With its number of tokens; None if it is too short."""
    text = as_text(content)
    if counter is None:
        return content, None
    try:
        if lengths is None:
            return content, counter.count(text)
        wanted = lengths.draw(rng)
        ends = counter.ends(text)
    except TgiError as error:
        raise StartError(f"--prompts: {error}") from None
    for num_tokens in (wanted - counter.num_around + shift for shift in (0, -1, 1, -2, 2, -3, 3)):
        if 0 < num_tokens <= len(ends):
            shorter = text[: ends[num_tokens - 1]]
            if counter.count(shorter) == wanted:
                return shorter, wanted
    return None
