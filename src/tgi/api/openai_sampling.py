"""The settings of `/v1` requests: OpenAI's ranges and meanings.

Level 8. From a decoded body to `SamplingParams`, raising `ValidationError` that names the field.
"""

from typing import Any

import msgspec
from msgspec import UNSET

from tgi.api.errors import ToolError, UnsupportedError
from tgi.api.openai_bodies import ChatRequest, CompletionRequest, ResponseFormat
from tgi.config import ServerConfig
from tgi.errors import ValidationError
from tgi.text.grammar import any_json, json_grammar, regex_grammar
from tgi.types import Grammar, SamplingParams

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
_NOT_SERVED = ("functions", "function_call", "audio", "web_search_options")


def sampling_params(
    body: ChatRequest | CompletionRequest, config: ServerConfig, top_n_tokens: int, prompt_logprobs: bool = False
) -> SamplingParams:
    temperature = 1.0 if body.temperature is None else body.temperature
    _require(temperature >= 0, "`temperature` must be >= 0")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _require(
        len(stop) <= config.max_stop_sequences,
        f"`stop` supports up to {config.max_stop_sequences} stop sequences. Given: {len(stop)}",
    )
    _require(body.top_p is None or 0 < body.top_p <= 1, "`top_p` must be > 0.0 and <= 1.0")
    _require(body.typical_p is None or 0 < body.typical_p <= 1, "`typical_p` must be > 0.0 and <= 1.0")
    _require(body.top_k is None or body.top_k >= -1, "`top_k` must be strictly positive, or 0 or -1 for none")
    _require(body.max_tokens != 0, "`max_tokens` must be strictly positive")
    greedy = temperature == 0
    return SamplingParams(
        watermark=bool(body.watermark),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        frequency_by_length=False,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias),
        temperature=1.0 if greedy else temperature,
        top_k=0 if greedy else max(0, body.top_k or 0),
        top_p=1.0 if greedy or body.top_p is None else body.top_p,
        typical_p=1.0 if greedy or body.typical_p is None else body.typical_p,
        min_p=0.0 if greedy else body.min_p or 0.0,
        do_sample=not greedy,
        seed=None if body.seed is None else body.seed % 2**64,
        max_new_tokens=_max_new_tokens(body),
        stop=stop,
        ignore_eos=bool(body.ignore_eos),
        top_n_tokens=top_n_tokens,
        decoder_input_details=prompt_logprobs,
    )


def _max_new_tokens(body: ChatRequest | CompletionRequest) -> int | None:
    if not isinstance(body, ChatRequest) or body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
        raise ValidationError("`max_tokens` and `max_completion_tokens` are two names of one setting: give one of them")
    _require(body.max_completion_tokens != 0, "`max_completion_tokens` must be strictly positive")
    return body.max_completion_tokens


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


def num_choices(body: ChatRequest | CompletionRequest, config: ServerConfig) -> int:
    count = 1 if body.n is None else body.n
    limit = min(MAX_CHOICES, config.max_concurrent_requests)
    _require(1 <= count <= limit, f"`n` must be >= 1 and <= {limit}. Given: {count}")
    return count


def check_served(body: ChatRequest) -> None:
    """Refuse, by name, what OpenAI has and this server does not."""
    for name in _NOT_SERVED:
        if getattr(body, name) is not None:
            raise UnsupportedError(name, f"`{name}` is not supported")
    if body.modalities not in (None, ["text"]):
        raise UnsupportedError("modalities", '`modalities` other than ["text"] are not supported')


def top_logprobs(body: ChatRequest) -> int:
    count = body.top_logprobs or 0
    _require(count <= MAX_TOP_LOGPROBS, f"`top_logprobs` must be >= 0 and <= {MAX_TOP_LOGPROBS}. Given: {count}")
    return count


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
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value.encode())
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
            raise ValidationError(f"grammar is not valid: {error}") from None
    return json_grammar(value)


def check_tools(body: ChatRequest) -> None:
    if body.tools is not None and body.response_format is not None and body.response_format.type != "text":
        raise ToolError("Grammar and tools are mutually exclusive")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValidationError(message)
