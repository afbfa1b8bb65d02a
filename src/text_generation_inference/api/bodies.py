"""The bodies of the native routes, field by field, in the order TGI prints them.

Requests are decoded straight into these structs: types and missing fields are checked there and nowhere else.
Ranges are checked in `validate`, whose texts clients know. Unknown fields are ignored, as TGI does.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

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
    best_of: U64 | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: I32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: U32 | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: U64 | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: U64 | None = None
    top_n_tokens: U32 | None = None
    grammar: GrammarType | None = None
    adapter_id: str | None = None
    cache_salt: str | None = None  # ours

    def __post_init__(self) -> None:
        check_u64(best_of=self.best_of, truncate=self.truncate, seed=self.seed)


class GenerateRequest(msgspec.Struct):
    """Without `parameters` at all the model samples; with it, even empty, it does not unless asked to."""

    inputs: str
    parameters: GenerateParameters = msgspec.field(default_factory=lambda: GenerateParameters(do_sample=True))


class CompatGenerateRequest(msgspec.Struct):
    inputs: str
    parameters: GenerateParameters = msgspec.field(default_factory=lambda: GenerateParameters(do_sample=True))
    stream: bool = False


class ErrorResponse(msgspec.Struct):
    error: str
    error_type: str


class Token(msgspec.Struct):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(msgspec.Struct):
    id: int
    text: str
    logprob: float | None


FinishReason = Literal["length", "eos_token", "stop_sequence"]


class BestOfSequence(msgspec.Struct):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(msgspec.Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(msgspec.Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(msgspec.Struct):
    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


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
    router: str
    version: str  # of TGI, whose API this is: clients look at it to know what they may ask for
    sha: str | None
    docker_label: str | None
    server_version: str  # ours
    model_device_type: str | UnsetType = UNSET  # only where a device is played by another, which clients should know


class SimpleToken(msgspec.Struct):
    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(msgspec.Struct):
    tokenize_response: list[SimpleToken]
    templated_text: str


# -- Vertex AI and KServe ------------------------------------------------------------------------------------------


class VertexParameters(msgspec.Struct):
    """Other parameters are not read on this route."""

    max_new_tokens: U32 | None = None
    seed: U64 | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        check_u64(seed=self.seed)


class VertexInstance(msgspec.Struct):
    inputs: str
    parameters: VertexParameters | None = None


class VertexRequest(msgspec.Struct):
    instances: list[Any]  # a `VertexInstance` or a `ChatRequest`


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
    inputs: list[KserveInput]
    outputs: list[KserveOutputName]
    parameters: VertexParameters | None = None


class KserveOutput(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[int]


class KserveResponse(msgspec.Struct):
    id: str
    outputs: list[KserveOutput]
