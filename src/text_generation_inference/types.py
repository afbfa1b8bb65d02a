"""The structs that cross layers and processes.

They hold plain data only, so that each can travel as msgpack. A struct is made by one layer and read by the
next one along the flow: `GenerationRequest` -> `StepPlan` -> `StepResult` -> `TokenOut`. No behaviour lives here except
checks of a struct's own values.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from text_generation_inference.errors import ValidationError

MAX_SEED = 2**64 - 1
MAX_STOP_CHARACTERS = 1_000
MAX_SALT_CHARACTERS = 256
# Within these no score leaves float32, whatever else is asked for. A temperature below the least one counts as that.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BIAS = 1e30
MIN_TOP_N_SIGMA = 1e-30  # less counts as this, if it is not 0: in float32 it may be 0, which is off


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """How long a model may think, and how its thoughts are known."""

    num_tokens: int  # of thoughts; marks do not count
    opens: list[str]  # texts of which each begins thoughts
    closes: list[str]  # and ends them
    closing: list[int]  # token ids that are forced when the budget is spent: they end the thoughts
    opened: bool = False  # the prompt ends within thoughts
    reopens: bool = False  # thoughts may come anywhere and several times; else they come first, or never


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next tokens are chosen and when generation ends. Defaults are neutral: greedy, no penalty, no filter.

    The order in which the engine applies them is that of the fields from `watermark` to `min_p`.
    """

    watermark: bool = False
    repetition_penalty: float = 1.0  # in [0.01, 100]; ids seen before: score < 0 is multiplied, else divided
    frequency_penalty: float = 0.0  # in [-2, 2]
    frequency_by_length: bool = True  # TGI: count in prompt and output / length; else OpenAI: count in the output
    presence_penalty: float = 0.0  # in [-2, 2]; subtracted once for each id in the output
    logit_bias: dict[int, float] = {}
    temperature: float = 1.0  # in (0, 100]
    top_n_sigma: float = 0.0  # in [0, 100]; 0: off
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # in (0, 1]; 1: off
    typical_p: float = 1.0  # in (0, 1]; 1: off
    min_p: float = 0.0  # in [0, 1]; 0: off
    do_sample: bool = False  # any of temperature and the filters also turns sampling on
    seed: int | None = None  # None: random
    max_new_tokens: int | None = None  # None: up to the model's or the server's limit
    min_tokens: int = 0  # until there are so many, neither EOS nor a stop token may come and stop strings are only text
    thinking: ThinkingBudget | None = None
    stop: list[str] = []
    include_stop: bool = False  # keep the stop string in the text
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    best_of: int = 1
    top_n_tokens: int = 0
    decoder_input_details: bool = False  # log-probabilities of the prompt
    prompt_top_n_tokens: int = 0  # and so many of the best ids in the place of each of its tokens

    @property
    def samples(self) -> bool:
        """Whether the next token is drawn at random rather than the best one."""
        return (
            self.do_sample
            or self.temperature != 1.0
            or self.top_n_sigma > 0.0
            or self.top_k != 0
            or self.top_p < 1.0
            or self.typical_p < 1.0
            or self.min_p > 0.0
        )

    @property
    def penalises(self) -> bool:
        """Whether the scores of tokens depend on those before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def check(self, vocab_size: int | None = None) -> None:
        """Raise `ValidationError` naming the first field that is out of range."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), SamplingParams)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ValidationError(f"sampling parameters: {error}") from None
        for name in _FLOAT_FIELDS:
            _require(
                _is_float32(getattr(self, name)), f"`{name}` must be a finite number. Given: {getattr(self, name)}"
            )
        _require(self.best_of >= 1, "`best_of` must be > 0")
        _require(self.best_of == 1 or self.samples, "you must use sampling when `best_of` is > 1")
        check_temperature(self.temperature)
        check_repetition_penalty(self.repetition_penalty)
        _require(-2 <= self.frequency_penalty <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0")
        _require(-2 <= self.presence_penalty <= 2, "`presence_penalty` must be >= -2.0 and <= 2.0")
        _require(0 <= self.top_n_sigma <= 100, "`top_n_sigma` must be >= 0.0 and <= 100.0")
        _require(0 < self.top_p <= 1, "`top_p` must be > 0.0 and <= 1.0")
        _require(0 < self.typical_p <= 1, "`typical_p` must be > 0.0 and <= 1.0")
        _require(0 <= self.min_p <= 1, "`min_p` must be >= 0.0 and <= 1.0")
        _require(0 <= self.top_k < 2**31, "`top_k` must be >= 0 and < 2^31")
        _require(self.max_new_tokens is None or self.max_new_tokens > 0, "`max_new_tokens` must be strictly positive")
        _require(self.min_tokens >= 0, "`min_tokens` must be >= 0")
        _require(
            self.max_new_tokens is None or self.min_tokens <= self.max_new_tokens,
            f"`min_tokens` must be <= `max_new_tokens`. Given: {self.min_tokens} and {self.max_new_tokens}",
        )
        _require(not any(text == "" for text in self.stop), "`stop` must not contain an empty string")
        _require(
            all(len(text) <= MAX_STOP_CHARACTERS for text in self.stop),
            f"`stop` must not contain a string of more than {MAX_STOP_CHARACTERS} characters",
        )
        _require(self.seed is None or 0 <= self.seed <= MAX_SEED, "`seed` must be >= 0 and < 2^64")
        _require(self.seed is None or self.best_of == 1, "`seed` must not be set when `best_of` > 1")
        _require(self.top_n_tokens >= 0, "`top_n_tokens` must be >= 0")
        _require(0 <= self.prompt_top_n_tokens <= 100, "`prompt_top_n_tokens` must be >= 0 and <= 100")
        for token_id, bias in self.logit_bias.items():
            if not abs(bias) <= MAX_BIAS:
                raise ValidationError(
                    f"`logit_bias` for token {token_id} must be >= {-MAX_BIAS:g} and <= {MAX_BIAS:g}. Given: {bias}"
                )
        if self.thinking is not None:
            marks = [*self.thinking.opens, *self.thinking.closes]
            _require(self.thinking.num_tokens >= 0, "a budget of thoughts must be >= 0")
            _require(
                bool(marks and self.thinking.closing) and "" not in marks, "a budget of thoughts must know their marks"
            )
        if vocab_size is not None:
            _require(self.top_n_tokens <= vocab_size, f"`top_n_tokens` must be <= {vocab_size}, the vocabulary's size")
            closing = [] if self.thinking is None else self.thinking.closing
            named = (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids), ("thinking", closing))
            for name, ids in named:
                for token_id in ids:
                    if not 0 <= token_id < vocab_size:
                        raise ValidationError(
                            f"`{name}` holds token id {token_id}, which is outside the vocabulary of {vocab_size}"
                        )


_FLOAT_FIELDS = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "temperature",
    "top_n_sigma",
    "top_p",
    "typical_p",
    "min_p",
)


_LARGEST = 3.4e38  # what float32 tells from infinity


def check_temperature(value: float) -> None:
    _require(value > 0, "`temperature` must be strictly positive")
    _require(value <= MAX_TEMPERATURE, f"`temperature` must be <= {MAX_TEMPERATURE:g}. Given: {value:g}")


def check_repetition_penalty(value: float) -> None:
    _require(value > 0, "`repetition_penalty` must be strictly positive")
    _require(
        MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
        f"`repetition_penalty` must be >= {MIN_REPETITION_PENALTY:g} and <= {MAX_REPETITION_PENALTY:g}."
        f" Given: {value:g}",
    )


def _is_float32(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= _LARGEST


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValidationError(message)


class Grammar(msgspec.Struct, frozen=True):
    """What the output must match."""

    # "json": a JSON schema as text; "{}" is any JSON. "regex": an expression that matches the whole output.
    # "lark": llguidance's Lark, made only by our own code, for tool calls.
    kind: str
    value: str


class VideoSource(msgspec.Struct, frozen=True):
    """A video that is yet to be loaded. It becomes one picture of many frames."""

    frames: list[Any]  # whatever is taken for a picture
    is_animation: bool = False  # there is one, a file with all of them
    fps: float | None = None  # frames per second; None: what the file says, or a default


class PictureSpan(msgspec.Struct, frozen=True, array_like=True):
    """A picture in a prompt. Its pixels are a file of the engine's picture folder, named by the digest."""

    digest: str  # hexadecimal, of the pixels, of all that decides features (size, grid, settings), and of a salt
    runs: list[tuple[int, int]]  # (first token, number) in whose places its features stand, in order
    grid: list[int]  # what the tower must know beside the pixels
    shape: list[int]  # of the pixels, uint8

    @property
    def num_features(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def num_pixels(self) -> int:
        return math.prod(self.shape) // 3

    @property
    def start(self) -> int:
        return self.runs[0][0]

    @property
    def end(self) -> int:
        first, count = self.runs[-1]
        return first + count


def group_neighbours(spans: list[PictureSpan]) -> list[list[PictureSpan]]:
    """The pictures of a prompt, those together whose tokens stand side by side."""
    groups: list[list[PictureSpan]] = []
    for span in spans:
        if groups and groups[-1][-1].end == span.start:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def name_group(spans: Sequence[PictureSpan]) -> str:
    """What pictures that are kept together are known by."""
    return "+".join(span.digest for span in spans)


class PicturePolicy(msgspec.Struct, frozen=True, array_like=True):
    """How a model's pictures are computed."""

    max_features: int = 0  # that the device keeps; 0: the model sees no pictures
    whole_runs: bool = False  # tokens of a run see each other both ways
    whole_prompts: bool = False  # tokens of a prompt do
    # Where layers of cross-attention read pictures: features of each, in whole blocks. They stand in the place of no
    # token, and are there from a request's first step to its last.
    cross_rows: int = 0
    num_more_ids: int = 0  # behind the vocabulary, which stand for pictures: they have an embedding and no score
    num_parts: int = 1  # that computing pictures can be left after, for other work in between
    batch_pixels: int = 0  # of pictures that are computed together; a larger one is computed alone
    has_times: bool = False  # what follows (moments, rows, columns) in the grid of a video are positions of its moments
    max_each: int = 0  # features of one picture, for lack of memory to compute a larger one; 0: any number


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, validated: everything the engine needs and nothing it has to check again."""

    id: int
    token_ids: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: list[int]  # generation ends after one of these; empty when EOS is ignored
    seed: int
    cache_salt: str = ""  # requests share cached prefixes only when this is equal; in digests of pictures
    caller: str = ""  # callers take turns
    adapter: str | None = None
    grammar: Grammar | None = None
    pictures: list[PictureSpan] = []  # in the order of the prompt


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request that takes a slot in this step: new, or back after preemption."""

    slot: int
    request: GenerationRequest
    output_ids: list[int]  # tokens generated before a preemption
    block_ids: list[int]  # shared prefix blocks and new ones
    beside_ids: list[int] = []  # the same of layers that read a window, where others keep all; 0 behind the window


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A run of known tokens of one request computed in this step, outside the decode set."""

    slot: int
    start: int
    end: int
    samples: bool  # the run reaches the last known token, so a new token comes out


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What one step does, as changes to what the runner already knows.

    The decode set is the ordered list of slots that compute their one uncomputed token in every decode step, and
    guesses of those after it where rows may yield several: they have blocks for as many, up to their length. The plan
    carries who leaves and who joins; order is kept, joiners go to the end. Rows of the step: the decode set first
    (when `decode` is true), then the chunks.
    """

    step: int
    release: list[int]  # slots given back before anything else in this step
    admit: list[Admission]
    leave: list[int]  # slots that leave the decode set
    join: list[int]  # slots that enter it
    grow: list[tuple[int, int, list[int]]]  # (slot, place in its block table, block ids)
    decode: bool
    chunks: list[Chunk]
    drop_features: list[str] = []  # of pictures with these digests, before anything is computed
    encode: list[PictureSpan] = []  # whose features begin to be computed, together; none are under way then
    encode_parts: int = 0  # of what begins or is under way, before all else; features are there when all parts are done
    grow_beside: list[tuple[int, int, list[int]]] = []  # as `grow`, in the tables of layers that read a window


class TopTokens(msgspec.Struct, frozen=True, array_like=True):
    """The best alternatives at one row, best first."""

    row: int
    token_ids: list[int]
    logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens `start`, `start + 1`, ... of one row."""

    row: int
    start: int
    logprobs: list[float]
    top_ids: list[list[int]] = []  # the best in each place, best first; none where nobody asked
    top_logprobs: list[list[float]] = []


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced: the tokens of the rows that sample, in plan order."""

    step: int
    token_ids: list[int]
    logprobs: list[float]
    top_tokens: list[TopTokens] = []  # `row` indexes the tokens
    prompt_logprobs: list[PromptLogprobs] = []  # `row` counts all rows of the plan
    errors: list[tuple[int, str]] = []  # (row among those that sample, text)
    # Tokens of each row that samples; None: one each. A row of the decode set has 0 to `BatchPolicy.tokens_per_row`,
    # never more than its request may still have; its keys and values stay for as many. A chunk has one.
    counts: list[int] | None = None
    encode_s: float = 0.0  # of the step's time, for features of pictures


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request."""

    request_id: int
    # "length", "eos_token" (any stop token), "aborted", "error" or "refused": what was asked for can never run
    reason: str
    error: str | None
    num_cached_tokens: int  # prompt tokens found in the prefix cache when it was first admitted
    queue_ns: int  # from arrival to first admission
    inference_ns: int  # from first admission to the end


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """A request that runs for the first time."""

    request_id: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    queue_ns: int  # since its arrival


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """What one step was like, for the metrics."""

    prefill: bool  # prompt tokens were computed
    num_admitted: int  # requests that entered the batch
    joined: bool  # they joined a running batch
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # prompt tokens of those
    max_tokens: int  # tokens the running ones may reach together
    inference_ns: int  # from planning to the tokens being there
    forward_ns: int  # on the device
    decode_ns: int  # taking the result
    filter_ns: int  # sending the tokens
    failed: bool = False  # it was taken back for lack of memory; then times say nothing
    num_prompt_tokens: int = 0  # computed in it
    num_decoded: int = 0  # tokens that came out of it, but for the first ones of prompts


class TokenOut(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """All tokens of one step for all requests, as parallel arrays."""

    request_ids: list[int] = []  # the tokens of one request stand together, in their order
    token_ids: list[int] = []
    logprobs: list[float] = []
    top_tokens: list[TopTokens] = []  # `row` indexes the arrays above
    prompt_logprobs: list[PromptLogprobs] = []  # `row` is a request id
    finished: list[Finish] = []
    admitted: list[Admitted] = []  # not later than their first token
    stats: StepStats | None = None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end must know of the model the engine serves."""

    model_id: str
    dtype: str
    vocab_size: int
    max_input_tokens: int
    max_total_tokens: int
    num_blocks: int
    block_size: int
    device: str
    folder: str = ""  # of the model's files, which the front end reads the tokenizer from
    sha: str | None = None  # commit on the hub, or digest of the file
    notes: list[str] = []  # how it came up and why its limits are what they are
    quantization: str | None = None  # method and bits; None: matrices are plain
    weight_bytes: int = 0  # on the device
    pictures: PicturePolicy | None = None  # None: the model sees none


class BucketStats(msgspec.Struct, frozen=True, array_like=True):
    """Of an engine whose steps have the shapes of a bucket plan."""

    num_planned: int  # shapes of the plan
    num_warmed: int  # graph keys that warming up has met
    num_captured: int  # graphs there are
    num_bypassed: int  # passes that ran without a graph, since the start
    num_unplanned: int  # keys met since the start that warming up has not met
    prefill_computed: int  # tokens, padding included
    prefill_needed: int  # tokens, without it
    decode_computed: int
    decode_needed: int


class PictureWork(msgspec.Struct, frozen=True, array_like=True):
    """Of an engine whose model sees, since the start."""

    num_encoded: int  # pictures whose features were computed
    num_features: int  # of these
    num_found: int  # pictures whose features were there, of another request
    num_pixels: int = 0  # that the tower has seen
    num_batches: int = 0  # of pictures that were computed together
    encode_seconds: float = 0.0  # that computing them took


class DeviceMemory(msgspec.Struct, frozen=True, array_like=True):
    """Of the device of an engine's first rank."""

    used_bytes: int
    total_bytes: int


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """How busy the engine is."""

    num_waiting: int
    num_running: int
    num_free_blocks: int  # cached ones count as free
    num_preemptions: int  # since the start
    num_prompt_tokens: int  # since the start
    num_cached_prompt_tokens: int  # since the start
    buckets: BucketStats | None = None
    num_malformed: int = 0  # messages dropped, since the start
    pictures: PictureWork | None = None
    memory: DeviceMemory | None = None  # looked at every few seconds


# -- messages between an api process and the engine process --------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a client. The engine ends its requests when that process is gone."""

    pid: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    request: GenerationRequest  # its id is the client's own


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    request_id: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Answer to `Hello`."""

    facts: ModelFacts


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Last message of an engine that cannot go on."""

    error: str
    prefill: bool = False  # the step that failed computed prompt tokens


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """Start or stop a profile of the steps. Answered with `Profiled`."""

    number: int  # the client's own
    start: bool
    num_steps: int | None = None  # None: until it is stopped
    record_shapes: bool | None = None  # None: as configured


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag="profiled"):
    number: int
    path: str = ""  # of the trace, or of the folder that it will be in
    error: str | None = None


ToEngine = Hello | Submit | Abort | Profile
FromEngine = Ready | TokenOut | EngineLoad | EngineFailed | Profiled


class Place(msgspec.Struct, frozen=True):
    """Which rank a process is, of how many that share one model."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # among those of this machine
    local_world: int = 1


ALONE = Place()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a device can do, as data for `resolve` and the scheduler."""

    block_size: int
    dtypes: list[str]  # first is the default
    max_batch_size: int  # requests running at a time, unless the user says otherwise
    max_batch_prefill_tokens: int  # likewise
    memory_share: float  # of the memory free after loading, how much the KV cache may take
    runs_ahead: bool = False  # work is queued and done later; slots then live on the device
    # Slots live on the host, but what a padded step samples stays on the device: the next one, which reads it there, is
    # queued before the host knows it.
    keeps_tokens: bool = False
    graphs: bool = False  # padded passes have a graph for each shape
    captures_steps: bool = False  # steps over block tables are padded to sizes that are captured
    max_captured_tokens: int = 0  # of a captured step with prompt tokens; 0: none of these is captured
    prompt_graphs: bool = True  # those of prompts too, unless the user says otherwise
    compiles_prompts: bool = False  # whatever the user says: passes are compiled rather than captured
    measures_steps: bool = False  # all free memory goes to the KV cache: what steps take is measured before
    meters_memory: bool = False  # it can be told how much memory work takes
    buckets: bool = False  # every step has a shape of the bucket plan, unless the user says otherwise
    reads_in_place: bool = False  # padded decode steps may read the first blocks of the cache where they are
    step_timeout_s: float = 60.0  # a step that takes longer never ends, unless the user says otherwise
