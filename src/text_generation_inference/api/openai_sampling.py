"""The settings of `/v1` requests: OpenAI's ranges and meanings.

From a decoded body to `SamplingParams`, raising `ValidationError` that names the field.
"""

from typing import Any

import msgspec
from msgspec import UNSET

from text_generation_inference.api.errors import UnsupportedError
from text_generation_inference.api.openai_bodies import (
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    StructuredOutputs,
)
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.grammar import any_json, choice_grammar, json_grammar, regex_grammar
from text_generation_inference.types import Grammar, SamplingParams

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BEST_OF = 20
MAX_STOP_TOKENS = 128
MAX_TEMPERATURE = 2
Body = ChatRequest | CompletionRequest
# OpenAI's and vLLM's; each would change the answer.
_NOT_SERVED = (
    "audio",
    "web_search_options",
    "suffix",
    "guided_grammar",
    "use_beam_search",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
)


def sampling_params(
    body: Body, config: ServerConfig, top_n_tokens: int, prompt_logprobs: bool = False
) -> SamplingParams:
    temperature = body.temperature
    if temperature is None:
        temperature = 0.0 if body.do_sample is False else 1.0
    _require(0 <= temperature <= MAX_TEMPERATURE, f"`temperature` must be >= 0 and <= {MAX_TEMPERATURE}")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _require(
        len(stop) <= config.max_stop_sequences,
        f"`stop` supports up to {config.max_stop_sequences} stop sequences. Given: {len(stop)}",
    )
    _require(body.top_n_sigma is None or 0 <= body.top_n_sigma <= 100, "`top_n_sigma` must be >= 0.0 and <= 100.0")
    _require(body.min_p is None or 0 <= body.min_p <= 1, "`min_p` must be >= 0.0 and <= 1.0")
    _require(body.top_p is None or 0 < body.top_p <= 1, "`top_p` must be > 0.0 and <= 1.0")
    _require(body.typical_p is None or 0 < body.typical_p <= 1, "`typical_p` must be > 0.0 and <= 1.0")
    _require(body.top_k is None or body.top_k >= -1, "`top_k` must be strictly positive, or 0 or -1 for none")
    stop_ids = body.stop_token_ids or []
    _require(
        len(stop_ids) <= MAX_STOP_TOKENS,
        f"`stop_token_ids` may hold at most {MAX_STOP_TOKENS} ids. Given: {len(stop_ids)}",
    )
    max_new_tokens, min_tokens = _max_new_tokens(body), body.min_tokens or 0
    _require(
        max_new_tokens is None or min_tokens <= max_new_tokens,
        f"`min_tokens` must be <= `max_tokens`. Given: {min_tokens} and {max_new_tokens}",
    )
    greedy = temperature == 0
    return SamplingParams(
        watermark=bool(body.watermark),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        frequency_by_length=False,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias),
        temperature=1.0 if greedy else temperature,
        top_n_sigma=0.0 if greedy else body.top_n_sigma or 0.0,
        top_k=0 if greedy else max(0, body.top_k or 0),
        top_p=1.0 if greedy or body.top_p is None else body.top_p,
        typical_p=1.0 if greedy or body.typical_p is None else body.typical_p,
        min_p=0.0 if greedy else body.min_p or 0.0,
        do_sample=not greedy,
        seed=None if body.seed is None else body.seed % 2**64,
        max_new_tokens=max_new_tokens,
        min_tokens=min_tokens,
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        top_n_tokens=top_n_tokens,
        decoder_input_details=prompt_logprobs,
        prompt_top_n_tokens=top_n_tokens if prompt_logprobs else 0,
    )


def _max_new_tokens(body: Body) -> int | None:
    """The limit, under any of its names."""
    given = {
        name: limit
        for name in ("max_tokens", "max_completion_tokens", "max_new_tokens")
        if (limit := getattr(body, name, None)) is not None
    }
    if not given:
        return None
    if len(set(given.values())) > 1:
        raise ValidationError(" and ".join(f"`{n}`" for n in given) + " are names of one setting: give one of them")
    ((name, limit), *_) = given.items()
    if scores_only(body):
        return 1  # is computed and not told: the engine has no pass without a token
    _require(limit != 0, f"`{name}` must be strictly positive")
    return limit


def scores_only(body: Body) -> bool:
    """Whether the caller wants the prompt back and nothing behind it."""
    return isinstance(body, CompletionRequest) and bool(body.echo) and 0 in (body.max_tokens, body.max_new_tokens)


def _logit_bias(given: dict[str, float] | list[float] | None) -> dict[int, float]:
    """By token id; a list holds the bias of each id in turn."""
    if not given:
        return {}
    pairs = [(key, value) for key, value in (enumerate(given) if isinstance(given, list) else given.items()) if value]
    _require(len(pairs) <= MAX_BIASES, f"`logit_bias` may hold at most {MAX_BIASES} biases. Given: {len(pairs)}")
    biases: dict[int, float] = {}
    for key, value in pairs:
        try:
            token_id = int(key)
        except ValueError:
            raise ValidationError(f"`logit_bias` must be keyed by token id. Given: {key!r}") from None
        _require(-100 <= value <= 100, f"`logit_bias` must be >= -100 and <= 100. Given: {value} for {key}")
        biases[token_id] = value
    return biases


def num_choices(body: Body, config: ServerConfig) -> int:
    count = 1 if body.n is None else body.n
    limit = min(MAX_CHOICES, config.max_concurrent_requests)
    _require(1 <= count <= limit, f"`n` must be >= 1 and <= {limit}. Given: {count}")
    return count


def num_candidates(body: Body, count: int) -> int:
    """How many generations of a prompt run, of which the `count` best are told."""
    best_of = body.best_of or count
    _require(best_of >= count, f"`best_of` must be >= `n`. Given: {best_of} and {count}")
    _require(best_of <= max(count, MAX_BEST_OF), f"`best_of` must be <= {MAX_BEST_OF}. Given: {best_of}")
    _require(not body.stream or best_of == count, "`best_of` > `n` is not supported when streaming tokens")
    return best_of


def prompt_limit(body: Body, max_input_tokens: int) -> int | None:
    """To how many tokens the prompt is cut, under either of its names."""
    given = body.truncate_prompt_tokens
    if given is None:
        return body.truncate
    _require(given != 0, f"`truncate_prompt_tokens` must be > 0 and <= {max_input_tokens}, or -1 for that")
    _require(given <= max_input_tokens, f"`truncate_prompt_tokens` must be <= {max_input_tokens}. Given: {given}")
    return max_input_tokens if given == -1 else given


def check_served(body: Body) -> None:
    """Refuse, by name, what other servers have and this one does not."""
    for name in _NOT_SERVED:
        if getattr(body, name, None) not in (None, False, [], ""):
            raise UnsupportedError(name, f"`{name}` is not supported")
    if body.structured_outputs is not None and body.structured_outputs.grammar is not None:
        raise UnsupportedError("structured_outputs", "`structured_outputs` with a `grammar` is not supported")
    if isinstance(body, ChatRequest) and body.modalities not in (None, ["text"]):
        raise UnsupportedError("modalities", '`modalities` other than ["text"] are not supported')


def top_logprobs(body: ChatRequest) -> int:
    count = body.top_logprobs or 0
    _require(count <= MAX_TOP_LOGPROBS, f"`top_logprobs` must be >= 0 and <= {MAX_TOP_LOGPROBS}. Given: {count}")
    return count


def output_grammar(body: Body, config: ServerConfig) -> Grammar | None:
    """What the text must match, by `response_format` or by vLLM's fields; at most one of them."""
    found = {
        name: grammar
        for name, grammar in (
            ("response_format", response_grammar(body.response_format, config)),
            ("structured_outputs", _structured(body.structured_outputs)),
            ("guided_json", None if body.guided_json is None else json_grammar(_parsed(body.guided_json))),
            ("guided_regex", None if body.guided_regex is None else regex_grammar(body.guided_regex)),
            ("guided_choice", None if body.guided_choice is None else choice_grammar(body.guided_choice)),
        )
        if grammar is not None
    }
    if found and config.disable_grammar_support:
        raise ValidationError("grammar is not supported")
    _require(len(found) <= 1, " and ".join(f"`{name}`" for name in found) + " exclude each other")
    return next(iter(found.values()), None)


def _structured(given: StructuredOutputs | None) -> Grammar | None:
    if given is None:
        return None
    found = [
        grammar
        for grammar in (
            None if given.json is None else json_grammar(_parsed(given.json)),
            None if given.regex is None else regex_grammar(given.regex),
            None if given.choice is None else choice_grammar(given.choice),
            any_json() if given.json_object else None,
        )
        if grammar is not None
    ]
    _require(len(found) == 1, "`structured_outputs` needs one of `json`, `regex`, `choice` and `json_object`")
    return found[0]


def _parsed(schema: Any) -> Any:
    """A schema, which may come as text."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise ValidationError(f"grammar is not valid: {error}") from None


def response_grammar(form: ResponseFormat | None, config: ServerConfig) -> Grammar | None:
    """What `response_format` demands of the text: OpenAI's forms, and TGI's with a `value`."""
    if form is None or form.type == "text":
        return None
    if config.disable_grammar_support:
        raise ValidationError("grammar is not supported")
    value: Any = form.value
    if form.type == "regex":
        _require(isinstance(value, str), "`response_format` of type regex needs a `value` that is a string")
        return regex_grammar(value)
    if form.type == "json_schema":
        config_given = form.json_schema is not None
        schema = form.json_schema.schema if form.json_schema is not None else UNSET
        if not config_given and isinstance(value, dict):
            schema = value.get("schema", UNSET)
        if config_given and schema is UNSET:
            return any_json()
        _require(schema is not UNSET, "`response_format` of type json_schema needs `json_schema` with a `schema`")
        return json_grammar(schema)
    if value is UNSET:
        _require(form.type == "json_object", "`response_format` of type json needs a `value`")
        return any_json()
    return json_grammar(_parsed(value))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValidationError(message)
