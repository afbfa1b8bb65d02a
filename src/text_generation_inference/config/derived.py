"""What follows from the settings, a model's size and a device's limits: every number the engine runs with, and why.

Third of `config`. Pure functions.
"""

from bisect import bisect_right

import msgspec

from text_generation_inference.config.settings import LINEAR_SIZES, ServerConfig
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.types import Limits
from text_generation_inference.units import gigabytes


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """What `resolve` must know of a model."""

    max_positions: int  # longest sequence it was made for
    may_be_longer: bool = False  # where that is asked for: no table ends there
    kv_bytes_per_token: int  # on one rank: all layers, and its id
    window: int | None = None  # tokens that are read at most, if all layers read a window only
    # Where only some do: the tokens that these read at most, and the bytes of a token in them, on one rank.
    partial_window: int | None = None
    window_bytes_per_token: int = 0
    # Where layers of cross-attention read pictures: rows that each has in their caches, and bytes of one on one rank.
    rows_per_picture: int = 0
    bytes_per_row: int = 0


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Every derived number, and for each the reason in words."""

    block_size: int
    num_blocks: int  # the padding block included
    num_picture_blocks: int = 1  # for layers of cross-attention, the padding block included
    max_cached_pictures: int = 0  # that these blocks have room for
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_size: int
    window: int | None = None  # requests keep the blocks of so many tokens only; None: of all
    partial_window: int | None = None  # likewise in layers that read no more, where others keep all
    num_window_blocks: int = 0  # of these layers, the padding block included; 0: they have the others' blocks
    reasons: dict[str, str]

    @property
    def max_features(self) -> int:
        """Of pictures, that are kept: those of the longest prompt have room, and of the largest step."""
        return max(self.max_input_tokens, self.max_batch_prefill_tokens)

    def explain(self) -> list[tuple[str, str]]:
        """Each derived number (or what has no effect) with its reason, for people."""
        values = {**msgspec.structs.asdict(self), "max_batch_total_tokens": (self.num_blocks - 1) * self.block_size}
        return [(f"{name} {values[name]}" if name in values else name, why) for name, why in self.reasons.items()]


_PAYLOAD_BYTES, _SEEING_PAYLOAD_BYTES = 2_000_000, 32_000_000  # TGI's; room for pictures of 20 MB in base64


def payload_limit(config: ServerConfig, sees: bool = False) -> int:
    """Bytes of a request body. Pictures go no further than the front end, so what the engine gets is never larger."""
    return config.payload_limit or (_SEEING_PAYLOAD_BYTES if sees else _PAYLOAD_BYTES)


LONGEST_PADDED = 4096  # tokens of a request where nobody says otherwise: each further length is a shape to warm up


def uses_buckets(config: ServerConfig, limits: Limits) -> bool:
    """Whether every step is padded to a shape of a plan."""
    return limits.buckets if config.bucketing is None else config.bucketing


def reads_in_place(config: ServerConfig, limits: Limits) -> bool:
    """Whether decode steps read the first blocks of the cache as they lie, where those of their requests are among few.
    By default as vllm-gaudi has it: blocks that several requests share, or that wait to be found again, stand against
    it, and it takes shapes of its own."""
    if not limits.reads_in_place or not uses_buckets(config, limits):
        return False
    return not config.prefix_caching if config.vllm_contiguous_pa is None else config.vllm_contiguous_pa


def keeps_window(config: ServerConfig, window: int | None, limits: Limits, longest: int) -> int | None:
    """The window that requests of so many tokens keep of their cache, if there is one. Padded steps keep all: a request
    holds its blocks from the start."""
    return None if window is None or window >= longest or uses_buckets(config, limits) else window


def least_blocks(window: int, block_size: int) -> int:
    """That a request with a window needs to get on, however long it is: the window before the next token and the block
    that this goes to, which steps in flight may already be past."""
    return -(-(window - 1) // block_size) + 2


# Where memory is short a request of so many tokens finds as much left of both pools; of as many windows, at least and
# at most: shorter ones are not to find much less than if all layers kept all.
_TYPICAL_TOKENS, _TYPICAL_WINDOWS = 4096, (2, 4)


class WindowShare(msgspec.Struct, frozen=True):
    """How memory is divided where some layers read a window of tokens and others keep all. All but bytes in blocks.

    Both have enough for the largest batch where there is memory for that. Else both run out together for requests of
    some windows' length: shorter ones find less than if all layers kept all, longer ones more.
    """

    window: int  # in tokens
    kept_bytes: int  # of a block in layers that keep all
    window_bytes: int  # and in the others
    each: int  # that a request which decodes holds of the latter
    useful: int  # that all requests together hold of the latter, at most
    least: int  # of the latter: for one request whose prompt is computed in chunks of any permitted size
    typical: int  # of the former, of a request for which both run out together

    def beside(self, num_blocks: int, given: bool = False) -> int:
        """Blocks of layers that read a window, for so many of the others. Where that number was asked for, all of it
        can be used whatever the lengths of requests are."""
        share = num_blocks if given else max(self.least, -(-num_blocks * self.each // self.typical))
        return min(num_blocks, self.useful, share)

    def num_bytes(self, num_blocks: int, given: bool = False) -> int:
        return num_blocks * self.kept_bytes + self.beside(num_blocks, given) * self.window_bytes

    def affordable(self, num_bytes: int, given: bool = False) -> int:
        """The most blocks whose bytes, with those beside them, are no more."""
        return bisect_right(
            range(1, num_bytes // self.kept_bytes + 1), num_bytes, key=lambda n: self.num_bytes(n, given)
        )

    def left(self, num_blocks: int, num_bytes: int) -> int:
        """Blocks of layers that read a window, if so many of the others have been taken."""
        return min(num_blocks, self.useful, (num_bytes - num_blocks * self.kept_bytes) // self.window_bytes)


def share_windows(
    config: ServerConfig, size: ModelSize, limits: Limits, longest: int, batch_size: int
) -> WindowShare | None:
    """For requests of so many tokens, so many at a time. None: all layers keep the same."""
    window, block_size = keeps_window(config, size.partial_window, limits, longest), limits.block_size
    if window is None:
        return None
    each, blocks = least_blocks(window, block_size) + 1, -(-longest // block_size)
    if each >= blocks:
        return None
    fewest, most = _TYPICAL_WINDOWS
    chunk = -(-(config.max_batch_prefill_tokens or limits.max_batch_prefill_tokens) // block_size) + 1
    window_bytes = size.window_bytes_per_token * block_size
    return WindowShare(
        window,
        size.kv_bytes_per_token * block_size - window_bytes,
        window_bytes,
        each,
        batch_size * each + chunk,
        each + chunk,
        min(blocks, max(fewest * each, min(most * each, _TYPICAL_TOKENS // block_size))),
    )


def choose_strategy(config: ServerConfig) -> str:
    """As asked, else linear if one of its sizes was given."""
    if config.bucket_strategy is not None:
        return config.bucket_strategy
    if config.vllm_exponential_bucketing is not None:
        return "exponential" if config.vllm_exponential_bucketing else "linear"
    return "linear" if any(getattr(config, name) is not None for name in LINEAR_SIZES) else "exponential"


def resolve(config: ServerConfig, size: ModelSize, limits: Limits, free_bytes: int) -> Resolved:
    """Derive the engine's numbers. `free_bytes` is the memory free on the device once the weights are loaded."""
    config.check()
    reasons: dict[str, str] = {}
    padded = uses_buckets(config, limits)
    batch_size = config.max_batch_size or limits.max_batch_size
    reasons["max_batch_size"] = "as given" if config.max_batch_size else "the device's default"
    longest = size.max_positions
    reasons["max_total_tokens"] = "positions of the model"
    if padded and longest > LONGEST_PADDED:
        longest = LONGEST_PADDED
        reasons["max_total_tokens"] = "the default where batches are padded"
    if config.max_total_tokens:
        longest = config.max_total_tokens
        reasons["max_total_tokens"] = "as given"
        if longest > size.max_positions and not size.may_be_longer:
            raise StartError(
                f"`max_total_tokens` must be <= {size.max_positions}, the positions of the model. Given: {longest}"
            )
    if longest < 2:
        raise StartError(f"`max_total_tokens` must be >= 2. Given: {longest}")
    if padded and not config.max_batch_size and config.max_batch_total_tokens:
        batch_size = max(1, config.max_batch_total_tokens // longest)
        reasons["max_batch_size"] = "max_batch_total_tokens / max_total_tokens"
    num_pictures = blocks_per_picture = 0
    if size.rows_per_picture:
        blocks_per_picture = -(-size.rows_per_picture // limits.block_size)
        picture_bytes = blocks_per_picture * limits.block_size * size.bytes_per_row
        num_pictures = _cached_pictures(config, size, batch_size, picture_bytes, free_bytes, reasons)
        free_bytes = max(0, free_bytes - num_pictures * picture_bytes)
    useful = batch_size * (-(-longest // limits.block_size) + 1) * limits.block_size  # each request has one to spare
    shared = share_windows(config, size, limits, longest, batch_size)
    num_tokens = _pool_tokens(config, size, limits, free_bytes, useful, reasons, shared)
    num_blocks = max(1, num_tokens // limits.block_size)
    pool_tokens = num_blocks * limits.block_size
    num_window_blocks = _window_blocks(config, limits, shared, num_blocks, free_bytes, reasons)
    window = keeps_window(config, size.window, limits, longest)
    if window is not None:
        reasons["window"] = "tokens that a request keeps in the KV cache: what is behind is given back"
    if pool_tokens < longest and (window is None or num_blocks < least_blocks(window, limits.block_size)):
        if config.max_total_tokens and config.max_batch_total_tokens:
            raise StartError(
                "`max_total_tokens` must be <= `max_batch_total_tokens`."
                f" Given: {config.max_total_tokens} and {config.max_batch_total_tokens}"
            )
        if config.max_total_tokens:
            raise ResourceError(
                f"Not enough memory to handle `max_total_tokens={longest}`: the KV cache has room for {pool_tokens}"
                f" tokens ({gigabytes(free_bytes)} free). Lower `max_total_tokens` or free memory."
            )
        longest, window = pool_tokens, None
        reasons["max_total_tokens"] = "tokens in the KV cache"
        reasons.pop("window", None)
    max_input = config.max_input_tokens or longest - 1
    reasons["max_input_tokens"] = "as given" if config.max_input_tokens else "max_total_tokens - 1"
    if max_input >= longest:
        raise StartError(f"`max_input_tokens`({max_input}) must be < `max_total_tokens`({longest})")
    prefill = config.max_batch_prefill_tokens or min(limits.max_batch_prefill_tokens, pool_tokens)
    reasons["max_batch_prefill_tokens"] = "as given" if config.max_batch_prefill_tokens else "the device's default"
    if padded and not config.max_batch_prefill_tokens and prefill < max_input:
        prefill = max_input
        reasons["max_batch_prefill_tokens"] = "max_input_tokens"
    reasons["waiting_served_ratio, max_waiting_tokens"] = "no effect: prefill and decode share a step here"
    return Resolved(
        block_size=limits.block_size,
        num_blocks=num_blocks + 1,
        num_picture_blocks=num_pictures * blocks_per_picture + 1,
        max_cached_pictures=num_pictures,
        max_input_tokens=max_input,
        max_total_tokens=longest,
        max_batch_prefill_tokens=prefill,
        max_batch_size=batch_size,
        window=window,
        partial_window=None if shared is None else shared.window,
        num_window_blocks=num_window_blocks,
        reasons=reasons,
    )


def _window_blocks(
    config: ServerConfig,
    limits: Limits,
    shared: WindowShare | None,
    num_blocks: int,
    free_bytes: int,
    reasons: dict[str, str],
) -> int:
    """Of layers that read a window, for so many blocks of the others; the padding block included, 0 for none."""
    if shared is None:
        return 0
    most = shared.beside(num_blocks, given=True)
    left = shared.left(num_blocks, int(free_bytes * limits.memory_share))
    found = most if config.max_batch_total_tokens else max(1, left)
    reasons["partial_window"] = "tokens that a request keeps in layers that read no more; others keep all"
    reasons["num_window_blocks"] = (
        "as many as all requests can hold"
        if found >= most
        else f"requests of {shared.typical * limits.block_size} tokens find as much left as in the others"
    )
    return found + 1


_SHARE_OF_PICTURES = 3  # one in so many bytes of what is left for caches, unless the KV cache's size is given


def _cached_pictures(
    config: ServerConfig, size: ModelSize, batch_size: int, picture_bytes: int, free_bytes: int, reasons: dict[str, str]
) -> int:
    """Pictures whose keys and values have room, for layers of cross-attention: one for each request, or all that one
    may have, within a share of the memory."""
    if config.max_batch_total_tokens:
        room = free_bytes - config.max_batch_total_tokens * size.kv_bytes_per_token
    else:
        room = free_bytes // _SHARE_OF_PICTURES
    useful, affordable = max(batch_size, config.max_images_per_request), max(0, room) // picture_bytes
    reasons["max_cached_pictures"] = f"with {gigabytes(picture_bytes)} each for layers of cross-attention, " + (
        "one for each request" if useful <= affordable else "as many as memory allows"
    )
    if not affordable:
        raise ResourceError(
            f"Not enough memory for the keys and values of one picture: they take {gigabytes(picture_bytes)}, and"
            f" {gigabytes(free_bytes)} are free for all caches. Free memory or lower `max_batch_total_tokens`."
        )
    return min(useful, affordable)


def _pool_tokens(
    config: ServerConfig,
    size: ModelSize,
    limits: Limits,
    free_bytes: int,
    useful: int,
    reasons: dict[str, str],
    shared: WindowShare | None,
) -> int:
    """Tokens the KV cache holds: as given, else what memory allows, at most what a full batch can use."""
    room, each = int(free_bytes * limits.memory_share), size.kv_bytes_per_token
    affordable = room // each if shared is None else shared.affordable(room) * limits.block_size
    if config.max_batch_total_tokens:
        given = -(-config.max_batch_total_tokens // limits.block_size)
        needed = config.max_batch_total_tokens * each if shared is None else shared.num_bytes(given, given=True)
        if needed > free_bytes:
            most = free_bytes // each if shared is None else shared.affordable(free_bytes, True) * limits.block_size
            raise ResourceError(
                f"Not enough memory for a KV cache of `max_batch_total_tokens={config.max_batch_total_tokens}`: it"
                f" needs {gigabytes(needed)}, {gigabytes(free_bytes)} are free. At most {most} tokens fit."
            )
        reasons["max_batch_total_tokens"] = "as given"
        return -(-config.max_batch_total_tokens // limits.block_size) * limits.block_size
    if affordable < limits.block_size:
        raise ResourceError(
            f"Not enough memory for a KV cache: {gigabytes(free_bytes)} are free once the weights are loaded, and one"
            f" token takes {size.kv_bytes_per_token:,} bytes. Free memory or use a smaller model."
        )
    if useful <= affordable:
        reasons["max_batch_total_tokens"] = "max_batch_size x max_total_tokens, in blocks"
        return -(-useful // limits.block_size) * limits.block_size
    reasons["max_batch_total_tokens"] = f"{limits.memory_share:.0%} of the {gigabytes(free_bytes)} of memory free"
    return affordable
