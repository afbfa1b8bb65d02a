"""The bodies of the native routes, field by field, in the order TGI prints them.

Requests are decoded straight into these structs: types and missing fields are checked there and nowhere else.
Ranges are checked in `validate`, whose texts clients know. Unknown fields are ignored, as TGI does.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from text_generation_inference.api.field_docs import ABOVE_0, BETWEEN_0_AND_1, REPETITION, WITHIN_2, doc
from text_generation_inference.types import MAX_TEMPERATURE

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Meta(ge=0)]  # the upper bound is `check_u64`'s: msgspec's bounds end at 2^63
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


def check_u64(**values: int | None) -> None:
    """Raise ValueError, which decoding reports with its place, for the first value that 64 bits cannot hold."""
    for name, value in values.items():
        if value is not None and value >= 2**64:
            raise ValueError(f"`{name}` must be < 2^64")


class GrammarType(msgspec.Struct):
    """What the output must match: `value` is a JSON schema (object or text), `{"name", "schema"}`, or an expression."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any

    def __post_init__(self) -> None:
        if self.type == "regex" and not isinstance(self.value, str):
            raise ValueError("a regex must be a string")
        if self.type == "json_schema" and not (isinstance(self.value, dict) and "schema" in self.value):
            raise ValueError("missing field `schema`")


class GenerateParameters(msgspec.Struct, kw_only=True):
    best_of: Annotated[
        U64 | None, doc("Generate this many times and return the one with the best mean log-probability.")
    ] = None
    temperature: Annotated[
        float | None,
        doc(
            "Below 1: closer to the most likely tokens. Above 1: more varied.",
            example=0.5,
            **ABOVE_0,
            maximum=MAX_TEMPERATURE,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        doc(
            "Above 1: tokens already in the prompt or the output become less likely. 1: no effect.",
            example=1.03,
            **REPETITION,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        doc("Makes a token less likely the more often it has appeared; negative: more likely.", **WITHIN_2),
    ] = None
    top_n_sigma: Annotated[
        float | None,
        doc(
            "Choose among the tokens whose score is within so many standard deviations of the best one.",
            example=1.0,
            minimum=0,
            maximum=100,
        ),
    ] = None  # ours
    top_k: Annotated[I32 | None, doc("Choose among this many of the most likely tokens.", example=10, minimum=1)] = None
    top_p: Annotated[
        float | None,
        doc(
            "Choose among the most likely tokens that together reach this probability.", example=0.95, **BETWEEN_0_AND_1
        ),
    ] = None
    typical_p: Annotated[
        float | None,
        doc(
            "Choose among the tokens of typical information that together reach this probability.",
            example=0.95,
            **BETWEEN_0_AND_1,
        ),
    ] = None
    do_sample: Annotated[
        bool, doc("Draw tokens at random by their probability instead of always taking the most likely one.")
    ] = False
    max_new_tokens: Annotated[
        U32 | None,
        doc("At most this many tokens. Without it, as many as the server's limits allow.", example=20, minimum=1),
    ] = None
    return_full_text: Annotated[bool | None, doc("Put the prompt before the generated text.")] = None
    stop: Annotated[
        list[str],
        doc(
            "Texts that end the generation. They stay in the output. "
            "The server limits how many (`--max-stop-sequences`).",
            example=["photographer"],
        ),
    ] = []
    truncate: Annotated[U64 | None, doc("Use only this many of the last tokens of the prompt.", minimum=1)] = None
    watermark: Annotated[bool, doc("Mark the text statistically, so that it can be recognised as generated.")] = False
    details: Annotated[bool, doc("Return tokens, log-probabilities, and why the generation ended.")] = False
    decoder_input_details: Annotated[bool, doc("Return the log-probabilities of the prompt too. Not for streams.")] = (
        False
    )
    seed: Annotated[U64 | None, doc("Makes random choices repeatable.")] = None
    top_n_tokens: Annotated[U32 | None, doc("Return this many of the most likely tokens at each place.")] = None
    grammar: Annotated[GrammarType | None, doc("What the output must match.")] = None
    adapter_id: Annotated[str | None, doc("No adapters are served: the model itself answers, whatever is named.")] = (
        None
    )
    cache_salt: Annotated[
        str | None, doc("Cached prefixes and pictures are shared only between requests with the same one.")
    ] = None  # ours

    def __post_init__(self) -> None:
        check_u64(best_of=self.best_of, truncate=self.truncate, seed=self.seed)


class GenerateRequest(msgspec.Struct):
    """Without `parameters` at all the model samples; with it, even empty, it does not unless asked to."""

    inputs: Annotated[str, doc("The prompt.", example="My name is Olivier and I", minLength=1)]
    parameters: Annotated[
        GenerateParameters,
        doc("How to generate. Left out, the model samples; given, even empty, it does not unless asked."),
    ] = msgspec.field(default_factory=lambda: GenerateParameters(do_sample=True))


class CompatGenerateRequest(msgspec.Struct):
    inputs: Annotated[str, doc("The prompt.", example="My name is Olivier and I", minLength=1)]
    parameters: Annotated[
        GenerateParameters,
        doc("How to generate. Left out, the model samples; given, even empty, it does not unless asked."),
    ] = msgspec.field(default_factory=lambda: GenerateParameters(do_sample=True))
    stream: Annotated[bool, doc("Send tokens as they come.")] = False


class ErrorResponse(msgspec.Struct):
    error: str
    error_type: Annotated[str, doc(example="validation")]


class Token(msgspec.Struct):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(msgspec.Struct):
    id: int
    text: str
    logprob: float | None


FinishReason = Annotated[
    Literal["length", "eos_token", "stop_sequence"],
    doc(
        "`length`: the limit was reached. `eos_token`: the model ended the text. "
        "`stop_sequence`: one of the stop texts came."
    ),
]


class BestOfSequence(msgspec.Struct):
    generated_text: Annotated[str, doc("The text.")]
    finish_reason: Annotated[FinishReason, doc("Why the generation ended.")]
    generated_tokens: Annotated[int, doc("How many tokens were generated.")]
    seed: Annotated[int | None, doc("Makes random choices repeatable.")]
    prefill: Annotated[list[PrefillToken], doc("The tokens of the prompt.")]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(msgspec.Struct):
    finish_reason: Annotated[FinishReason, doc("Why the generation ended.")]
    generated_tokens: Annotated[int, doc("How many tokens were generated.")]
    seed: Annotated[int | None, doc("Makes random choices repeatable.")]
    prefill: Annotated[list[PrefillToken], doc("The tokens of the prompt.")]
    tokens: list[Token]
    best_of_sequences: Annotated[list[BestOfSequence] | UnsetType, doc("The generations that were not chosen.")] = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct):
    generated_text: Annotated[str, doc("The text.")]
    details: Details | UnsetType = UNSET


class StreamDetails(msgspec.Struct):
    finish_reason: Annotated[FinishReason, doc("Why the generation ended.")]
    generated_tokens: Annotated[int, doc("How many tokens were generated.")]
    seed: Annotated[int | None, doc("Makes random choices repeatable.")]
    input_length: int


class StreamResponse(msgspec.Struct):
    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: Annotated[str | None, doc("The text.")] = None
    details: StreamDetails | None = None


class ReplicaInfo(msgspec.Struct):
    """One of several engines."""

    state: str  # starting, up, not responding or down
    requests: int  # under way there
    queued_tokens: int  # prompt tokens that wait there


class PictureInfo(msgspec.Struct):
    """Of a model that sees pictures."""

    tokens: dict[str, int]  # of a prompt, for pictures of some sizes ("width x height")
    max_images_per_request: int
    max_image_pixels: int
    max_image_fetch_size: int  # bytes
    urls: bool  # are fetched; else pictures come as data alone
    payload_limit: int  # bytes of a request
    # That there is memory for at a time, where the model reads them by cross-attention: requests wait for it.
    max_cached_pictures: int | UnsetType = UNSET


class Info(msgspec.Struct):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: Annotated[str, doc(example="text-generation-router")]
    version: str  # of TGI, whose API this is: clients look at it to know what they may ask for
    sha: str | None
    docker_label: str | None
    server_version: str  # ours
    quantization: str | UnsetType = UNSET  # of a quantised model: method and bits
    weight_bytes: int | UnsetType = UNSET  # that its weights take on a device: the one that has most of them
    num_shard: int | UnsetType = UNSET  # of a model that is split: ranks
    model_device_type: str | UnsetType = UNSET  # only where a device is played by another, which clients should know
    pictures: PictureInfo | UnsetType = UNSET  # where the model sees
    replicas: list[ReplicaInfo] | UnsetType = UNSET  # where there are several


class SimpleToken(msgspec.Struct):
    id: int
    text: str
    start: int
    stop: Annotated[int, doc("Texts that end the generation.")]


class ChatTokenizeResponse(msgspec.Struct):
    tokenize_response: list[SimpleToken]
    templated_text: str


# -- Vertex AI and KServe ------------------------------------------------------------------------------------------


class VertexParameters(msgspec.Struct):
    """Other parameters are not read on this route."""

    max_new_tokens: Annotated[
        U32 | None, doc("At most this many tokens. Without it, as many as the server's limits allow.", example=20)
    ] = None
    seed: Annotated[U64 | None, doc("Makes random choices repeatable.")] = None
    cache_salt: Annotated[
        str | None, doc("Cached prefixes and pictures are shared only between requests with the same one.")
    ] = None

    def __post_init__(self) -> None:
        check_u64(seed=self.seed)


class VertexInstance(msgspec.Struct):
    inputs: Annotated[str, doc("The prompt.", example="My name is Olivier and I")]
    parameters: Annotated[
        VertexParameters | None,
        doc("How to generate. Left out, the model samples; given, even empty, it does not unless asked."),
    ] = None


class VertexRequest(msgspec.Struct):
    instances: Annotated[
        list[Any], doc("Each is an object with `inputs` and `parameters`, or a chat request.")
    ]  # a `VertexInstance` or a `ChatRequest`


class VertexResponse(msgspec.Struct):
    predictions: list[str]


class KserveInput(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[Annotated[int, Meta(ge=0, le=255)]]


class KserveOutputName(msgspec.Struct):
    name: str


class KserveRequest(msgspec.Struct):
    id: str
    inputs: Annotated[list[KserveInput], doc("The prompt.", example="My name is Olivier and I")]
    outputs: list[KserveOutputName]
    parameters: Annotated[
        VertexParameters | None,
        doc("How to generate. Left out, the model samples; given, even empty, it does not unless asked."),
    ] = None


class KserveOutput(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[int]


class KserveResponse(msgspec.Struct):
    id: str
    outputs: list[KserveOutput]
