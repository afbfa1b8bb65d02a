"""What the output must match: checked, compiled, remembered.

The HTTP layer makes a `Grammar` here and compiles it before a request is let in; the runner takes the compiled
one and copies a matcher from it for each request. Owns the limits that keep a hostile grammar from doing harm:
`json_schema` bounds the schema, `_LIMITS` what llguidance may do in a step, `grammar_trial` what it may do to compile.
Who compiles when is for others to say: here everything happens in the caller's thread. Knows nothing of slots, batches
or torch.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from text_generation_inference.errors import ModelFormatError, OverloadedError, ValidationError
from text_generation_inference.text.grammar_trial import MAX_BYTES, MAX_CPU_SECONDS, Trial
from text_generation_inference.text.json_schema import check_limits, prepare_schema
from text_generation_inference.text.panics import reraise_unless_failure
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Grammar

MAX_JSON, MAX_REGEX = 200_000, 10_000  # characters
# About 0.15 MB each, 7 MB for the largest. In use each grows by the lexer's states, which all requests share: 0.4 kB or
# more for each of at most `max_lexer_states` (17 to 19 MB with the expressions tried; llguidance reckons with 1 to
# 2 kB). One that is full is replaced, see `GrammarCompiler.renew`.
# Hard ones and failures have memories of their own: whoever sends many of them makes nobody else's be forgotten.
_NUM_REMEMBERED, _NUM_HARD, _NUM_FAILED = 128, 32, 128
_MAX_DETAIL = 300  # characters of llguidance's own words in an error

# A schema within these compiles in a few milliseconds; any other is tried out elsewhere first. Expressions never
# take long, because they are expanded only as far as the text goes.
_PLAIN_SIZE, _PLAIN_PATTERNS = 4000, 6

# Steps are bounded more tightly than llguidance does by itself: the whole batch waits for the slowest mask.
_STEP_LIMITS: dict[str, Any] = {"step_lexer_fuel": 50_000, "max_lexer_states": 50_000}
_LIMITS = LLParserLimits(**_STEP_LIMITS, verbose_errors=False)

_MEANINGFUL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")  # in an expression

# One optional space between the tokens of JSON. All are given, so that a schema cannot choose its own.
_JSON_STYLE: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": " ",
    "whitespace_flexible": True,
    "coerce_one_of": True,
    "lenient": False,
}


def json_grammar(schema: object) -> Grammar:
    """JSON that matches a schema. Raises `ValidationError` for one that is not valid or too large."""
    check_limits(schema)
    prepare_schema(schema)
    return Grammar("json", _encode(schema))


def check_native_schema(value: object) -> Grammar:
    """The `value` of a native JSON grammar: an object, or the text of one, with `properties`."""
    if not isinstance(value, str | dict):
        raise ValidationError("grammar is not supported")
    schema: object = _decode(value) if isinstance(value, str) else cast(object, value)
    grammar = json_grammar(schema)
    if not isinstance(schema, dict) or "properties" not in schema:
        raise ValidationError("grammar is not valid: Grammar must have a 'properties' field")
    return grammar


def regex_grammar(expression: str) -> Grammar:
    """Text that an expression matches from its start to its end."""
    _check_size(expression, MAX_REGEX)
    return Grammar("regex", expression)


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """One of some texts, and nothing else."""
    if not choices or "" in choices:
        raise ValidationError("grammar is not valid: choices must be texts that are not empty")
    return regex_grammar("|".join(_MEANINGFUL.sub(r"\\\g<0>", choice) for choice in choices))


def any_json() -> Grammar:
    """Any JSON object."""
    return Grammar("json", '{"type":"object"}')


def lark_json(schema: object) -> str:
    """The schema of a tool's arguments as a term of a Lark grammar. Formats nobody knows are left out of it."""
    check_limits(schema)
    style = {**_JSON_STYLE, "lenient": True}
    return f"%json {_encode({**prepare_schema(schema), 'x-guidance': style})}"


def lark_term(grammar: Grammar) -> str:
    """A grammar of JSON or of an expression as a term of a Lark grammar."""
    if grammar.kind == "json":
        return f"%json {_encode({**prepare_schema(_decode(grammar.value)), 'x-guidance': _JSON_STYLE})}"
    if grammar.kind == "regex":
        source = msgspec.json.decode(LLMatcher.grammar_from_regex(grammar.value))
        return source["grammars"][0]["lark_grammar"].removeprefix("start: ")
    raise ValidationError("grammar is not supported")


class CompiledGrammar:
    """A grammar for one vocabulary."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype
        self._lock = threading.Lock()

    def matcher(self) -> LLMatcher:
        """A fresh state of it, for one request. Copies share the lexer, which keeps every state it has ever met."""
        with self._lock:
            return self._prototype.deep_copy()


T = TypeVar("T")
_Key = tuple[str, str]  # kind and text


class _Memory(OrderedDict[_Key, T], Generic[T]):
    """The last ones that were used."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def find(self, key: _Key) -> T | None:
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def keep(self, key: _Key, value: T) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, any thread at a time, and remembers the last ones, the failed too.

    Everything waits for the first use: building the token tree takes a third of a second and holds the interpreter.
    """

    def __init__(self, tokenizer: Tokenizer | Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load: Callable[[], Tokenizer] = (lambda: tokenizer) if isinstance(tokenizer, Tokenizer) else tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | str | None = None  # a text says why there is none
        self._building = threading.Lock()
        self._lock = threading.Lock()
        self._plain: _Memory[CompiledGrammar] = _Memory(_NUM_REMEMBERED)
        self._hard: _Memory[CompiledGrammar] = _Memory(_NUM_HARD)
        self._failed: _Memory[str] = _Memory(_NUM_FAILED)
        # Whatever somebody still holds is found, however many came since.
        self._alive: WeakValueDictionary[_Key, CompiledGrammar] = WeakValueDictionary()
        self._compiling: dict[_Key, threading.Lock] = {}

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """What is known of it, without any work. Raises `ValidationError` if it is known to be wrong."""
        _check_size(grammar.value, MAX_JSON)
        key = (grammar.kind, grammar.value)
        with self._lock:
            reason = self._failed.find(key)
            if reason is not None:
                raise ValidationError(reason)
            return self._plain.find(key) or self._hard.find(key) or self._alive.get(key)

    def compile(self, grammar: Grammar, *, tried: bool = False, trial: Trial | None = None) -> CompiledGrammar:
        """Raises `ValidationError` with the reason. Waits for other threads that compile the same one.

        One that was `tried` is known to compile within the bounds; any other that may be costly is tried now, by
        `trial` if it is given: who has it can end it. Raises `OverloadedError` for a trial without a result.
        """
        found = self.find(grammar)
        if found is not None:
            return found
        key = (grammar.kind, grammar.value)
        with self._lock:
            own = self._compiling.setdefault(key, threading.Lock())
        with own:
            try:
                return self.find(grammar) or self._compile_now(key, grammar, None if tried else trial or Trial())
            finally:
                with self._lock:
                    self._compiling.pop(key, None)

    def renew(self, grammar: Grammar, worn: CompiledGrammar) -> CompiledGrammar:
        """A fresh one in place of `worn`, whose lexer is full; for all who come with the same one."""
        key = (grammar.kind, grammar.value)
        with self._lock:
            for memory in (self._plain, self._hard, self._alive):
                if memory.get(key) is worn:
                    del memory[key]
        return self.compile(grammar, tried=True)

    def _fail(self, grammar: Grammar, reason: str) -> ValidationError:
        with self._lock:
            self._failed.keep((grammar.kind, grammar.value), reason)
        return ValidationError(reason)

    def _source(self, grammar: Grammar) -> str:
        try:
            return _to_llguidance(grammar)
        except ValidationError as error:
            raise self._fail(grammar, str(error)) from None
        except BaseException as error:
            reraise_unless_failure(error)
            raise self._fail(grammar, f"{_failure(grammar)}: {error}") from None

    def _compile_now(self, key: _Key, grammar: Grammar, trial: Trial | None) -> CompiledGrammar:
        source = self._source(grammar)
        plain = is_plain(grammar.kind, source)
        if trial is not None and not plain:
            match trial.run(source, _STEP_LIMITS):
                case "failed":
                    bounds = f"{MAX_CPU_SECONDS} s or {MAX_BYTES >> 20} MiB"
                    raise self._fail(grammar, f"{_failure(grammar)}: it takes more than {bounds} to compile")
                case "unfinished":
                    raise OverloadedError("the machine is too busy to compile a grammar")
                case "survived":
                    pass
        try:
            prototype = LLMatcher(self.prepare(), source, log_level=0, limits=_LIMITS)
            # The first mask tells whether anything matches at all, and what it builds is there for every copy.
            if not prototype.is_error():
                prototype.compute_bitmask()
            reason = f"{_failure(grammar)}: {describe_error(prototype)}" if prototype.is_error() else None
        except ValidationError as error:
            raise self._fail(grammar, str(error)) from None
        except BaseException as error:
            reraise_unless_failure(error)
            raise self._fail(grammar, f"{_failure(grammar)}: {error}") from None
        if reason is not None:
            raise self._fail(grammar, reason)
        compiled = CompiledGrammar(prototype)
        with self._lock:
            self._alive[key] = compiled
            (self._plain if plain else self._hard).keep(key, compiled)
        return compiled

    def prepare(self) -> LLTokenizer:
        """Build the token tree now, once. Raises `ValidationError` for a tokenizer that cannot be constrained."""
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer()
            if isinstance(self._tokenizer, str):
                raise ValidationError(f"grammar is not supported: {self._tokenizer}")
            return self._tokenizer

    def _build_tokenizer(self) -> LLTokenizer | str:
        try:
            tokenizer = self._load()
            eos_ids = sorted(token_id for token_id in tokenizer.eos_ids if token_id < self._vocab_size)
            if not eos_ids:
                return "this model has no token that ends a text"
            num_tokens = max(self._vocab_size, tokenizer.vocab_size)
            return LLTokenizer(tokenizer.to_json(), n_vocab=num_tokens, eos_token=eos_ids)
        except (ModelFormatError, ValueError) as error:
            return str(error)


def is_worn(matcher: LLMatcher) -> bool:
    """Whether the lexer has no room for further states, which it shares with all matchers of the same prototype."""
    return matcher.is_error() and "too many states" in matcher.get_error()


def describe_error(matcher: LLMatcher) -> str:
    """The reason in a failed matcher's own words, shortened."""
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        return "there is no token that it allows"
    return text if len(text) <= _MAX_DETAIL else text[:_MAX_DETAIL] + "..."


def _failure(grammar: Grammar) -> str:
    return "cannot compile regex from schema" if grammar.kind == "json" else "grammar is not valid"


def is_plain(kind: str, source: str) -> bool:
    """Whether it cannot be costly: an expression, or short and without an intersection of many patterns."""
    if kind == "regex":
        return True
    return len(source) <= _PLAIN_SIZE and '"allOf' not in source and source.count('"pattern') <= _PLAIN_PATTERNS


def _to_llguidance(grammar: Grammar) -> str:
    """Raises `ValidationError` or `ValueError` for what can be told without a tokenizer."""
    match grammar.kind:
        case "json":
            schema = _decode(grammar.value)
            check_limits(schema)
            text = _encode(prepare_schema(schema))
            return LLMatcher.grammar_from_json_schema(text, overrides=cast(Any, _JSON_STYLE))
        case "regex":
            _check_size(grammar.value, MAX_REGEX)
            return LLMatcher.grammar_from_regex(grammar.value)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.value)
        case _:
            raise ValidationError("grammar is not supported")


def _check_size(text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValidationError(f"grammar is not valid: it has {len(text)} characters, and {limit} are allowed")


def _decode(text: str) -> object:
    _check_size(text, MAX_JSON)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise ValidationError(f"grammar is not valid: {error}") from None


def _encode(schema: object) -> str:
    try:
        text = msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValidationError(f"grammar is not valid: {error}") from None
    _check_size(text, MAX_JSON)
    return text
