"""The rules of the native routes: TGI's checks, in TGI's order, with TGI's texts.

From a decoded body to `SamplingParams`; what needs the tokenizer comes after, in `text/prepare.py`.
"""

from text_generation_inference.api.bodies import GenerateParameters, GrammarType
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.grammar import check_native_schema, regex_grammar
from text_generation_inference.types import (
    Grammar,
    ModelFacts,
    SamplingParams,
    check_repetition_penalty,
    check_temperature,
)

CHUNK_TOKENS = 1024  # only so many of `max_new_tokens` must fit when a request comes


def check_best_of(parameters: GenerateParameters, config: ServerConfig) -> int:
    """How many generations to run on a route that does not stream."""
    best_of = parameters.best_of or 1
    if best_of > 1 and config.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if best_of > config.max_best_of:
        raise ValidationError(f"`best_of` must be > 0 and <= {config.max_best_of}. Given: {best_of}")
    return best_of


def check_streamable(parameters: GenerateParameters) -> None:
    if parameters.best_of is not None and parameters.best_of != 1:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise ValidationError("`decoder_input_details` == true is not supported when streaming tokens")


def check_parameters(
    parameters: GenerateParameters, inputs: str, config: ServerConfig, facts: ModelFacts
) -> SamplingParams:
    """Everything that can be said without tokenising."""
    p = parameters
    best_of = p.best_of or 1
    samples = p.do_sample or any(value is not None for value in (p.temperature, p.top_k, p.top_p, p.typical_p))
    samples = samples or bool(p.top_n_sigma)
    if best_of > 1 and not samples:
        raise ValidationError("you must use sampling when `best_of` is > 1")
    if p.temperature is not None:
        check_temperature(p.temperature)
    if p.repetition_penalty is not None:
        check_repetition_penalty(p.repetition_penalty)
    if p.frequency_penalty is not None and not -2 <= p.frequency_penalty <= 2:
        raise ValidationError("`frequency_penalty` must be >= -2.0 and <= 2.0")
    if p.top_n_sigma is not None and not 0 <= p.top_n_sigma <= 100:
        raise ValidationError("`top_n_sigma` must be >= 0.0 and <= 100.0")
    if p.top_p is not None and not 0 < p.top_p < 1:
        raise ValidationError("`top_p` must be > 0.0 and < 1.0")
    if p.typical_p is not None and not 0 < p.typical_p < 1:
        raise ValidationError("`typical_p` must be > 0.0 and < 1.0")
    if p.top_k is not None and p.top_k <= 0:
        raise ValidationError("`top_k` must be strictly positive")
    if p.max_new_tokens == 0:
        raise ValidationError("`max_new_tokens` must be strictly positive")
    if len(p.stop) > config.max_stop_sequences:
        raise ValidationError(f"`stop` supports up to {config.max_stop_sequences} stop sequences. Given: {len(p.stop)}")
    if p.seed is not None and best_of > 1:
        raise ValidationError("`seed` must not be set when `best_of` > 1")
    top_n_tokens = p.top_n_tokens or 0
    if top_n_tokens > config.max_top_n_tokens:
        raise ValidationError(f"`top_n_tokens` must be >= 0 and <= {config.max_top_n_tokens}. Given: {top_n_tokens}")
    if not inputs:
        raise ValidationError("`inputs` cannot be empty")
    if p.truncate is not None and not 0 < p.truncate <= facts.max_input_tokens:
        raise ValidationError(
            f"`truncate` must be strictly positive and less than {facts.max_input_tokens}. Given: {p.truncate}"
        )
    return SamplingParams(
        watermark=p.watermark,
        repetition_penalty=_or(p.repetition_penalty, 1.0),
        frequency_penalty=_or(p.frequency_penalty, 0.0),
        temperature=_or(p.temperature, 1.0),
        top_n_sigma=p.top_n_sigma or 0.0,
        top_k=p.top_k or 0,
        top_p=_or(p.top_p, 1.0),
        typical_p=_or(p.typical_p, 1.0),
        do_sample=p.do_sample,
        seed=p.seed,
        max_new_tokens=p.max_new_tokens,
        stop=p.stop,
        include_stop=True,
        top_n_tokens=top_n_tokens,
        decoder_input_details=p.decoder_input_details and config.enable_prefill_logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def native_grammar(grammar: GrammarType | None, config: ServerConfig) -> Grammar | None:
    """The grammar of a native request, which must be a schema with `properties`, or an expression."""
    if grammar is None:
        return None
    if config.disable_grammar_support:
        raise ValidationError("grammar is not supported")
    value = grammar.value
    if grammar.type == "regex":
        return regex_grammar(value)
    if grammar.type == "json_schema":
        value = value["schema"]
    return check_native_schema(value)
