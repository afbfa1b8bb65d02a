"""The shapes of steps on a device that prepares one graph for each: one plan, computed the same way for every device.

Pure Python, whole numbers only: a plan is the same on every machine. Sizes round up, and the largest permitted
shape is always in the plan, so everything within the limits finds a bucket.

Two strategies. *Linear*: multiples of a step. *Exponential*: a given number of sizes, each larger than the one before
by the same factor, then rounded up to a step. An axis that has settings of its own under the linear strategy starts
with powers of two below its step. Shapes that no step can have are left out.

Prompts that follow tokens in the cache (a prefix that others have computed, or their own parts before) have shapes of
their own, under either strategy, on coarser axes: what is only read costs little, so much of it may be padding.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice, pairwise

LINEAR, EXPONENTIAL = "linear", "exponential"
_LENGTH_STEP = 128  # tokens of a prompt, under the exponential strategy
_BLOCK_STEP = 128
_RAMP_BATCH_STEP = 32
MOST_SHAPES = 20_000  # of a phase; nobody would wait for more
_PASS_TOKENS = 256  # a pass reads all weights, which takes about as long as computing so many tokens
_READ_SHARE = 8  # so many tokens that are only read count as one that is computed
_CONTEXT_FACTOR, _SMALLEST_CONTEXT = 4, 1024  # of tokens in the cache before prompts: between two, and where it ends
_GATHER_COST = 3  # a block that is gathered is read, written, and read again
_MOST_AFTER_CONTEXT = 8192  # tokens of several prompts in a pass: more of them are no faster together
_PICTURE_TOKENS = 6400  # that reading a picture takes as long as: of one whose tiles are all there
_BLOCK_TOKENS = 128
_MASKED_VALUES = 1 << 13  # entries of a mask, and scores under it, that take the memory of a token
_PICTURE_FACTOR = 4  # between two numbers of pictures


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A padded shape.

    `batch` rows; `length`: prompt tokens of each ("prefill"), cached blocks of all ("decode"; 0: any number), or prompt
    tokens in all beside rows that decode ("mixed"). `context`: tokens in the cache before those of each prompt, in
    whole blocks. `contiguous`: the blocks are the first ones of the cache, whosever they are. Of a tower ("picture")
    rows are tiles or patches. `pictures`: those that layers of cross-attention read, of each prompt or of all rows that
    decode.
    """

    phase: str
    batch: int
    length: int
    context: int = 0
    contiguous: bool = False
    pictures: int = 0

    @property
    def num_tokens(self) -> int:
        if self.phase in ("decode", "picture"):
            return self.batch
        return self.batch * self.length if self.phase == "prefill" else self.batch + self.length

    @property
    def cost(self) -> int:
        """What memory grows with."""
        if self.phase == "decode":
            return self.batch + self.length + self.pictures * _PICTURE_TOKENS // _BLOCK_TOKENS
        masks = self.num_tokens * self.pictures * _PICTURE_TOKENS // _MASKED_VALUES
        return self.num_tokens + self.batch * (self.context + self.pictures * _PICTURE_TOKENS) // _READ_SHARE + masks

    def __str__(self) -> str:
        if self.phase == "prefill":
            after = f" after {self.context} in the cache" if self.context else ""
            each = f" with up to {self.pictures} pictures each" if self.pictures else ""
            return f"{self.batch} prompts of {self.length} tokens{after}{each}"
        if self.phase == "mixed":
            return f"{self.length} prompt tokens beside {self.batch} requests"
        if self.phase == "picture":
            return f"pictures of {self.batch} tiles or patches"
        which = "the first " if self.contiguous else ""
        beside = f" and up to {self.pictures} pictures" if self.pictures else ""
        return f"{self.batch} requests" + (f" with {which}{self.length} blocks" if self.length else "") + beside


@dataclass(frozen=True, slots=True)
class PlanLimits:
    max_input_tokens: int
    max_total_tokens: int
    max_batch_size: int
    max_batch_prefill_tokens: int
    block_size: int
    num_blocks: int | None = None  # that requests can hold; None: as many as they could want
    cached_pictures: int = 0  # that have room, for layers of cross-attention

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_total_tokens // self.block_size)

    @property
    def longest_part(self) -> int:
        """Tokens of a prompt that are computed in one step."""
        return min(self.max_input_tokens, self.max_batch_prefill_tokens)


@dataclass(frozen=True, slots=True)
class Axis:
    """Settings of one axis; None: the default."""

    minimum: int | None = None
    step: int | None = None
    maximum: int | None = None
    count: int | None = None  # of sizes, exponential only

    @property
    def has_ramp(self) -> bool:
        return not (self.minimum is self.step is self.maximum is None)


@dataclass(frozen=True, slots=True)
class BucketSettings:
    strategy: str = EXPONENTIAL
    batch_step: int = 8  # these three: linear only
    prefill_batch_step: int = 4
    length_step: int = 128  # tokens; 0: every prompt is padded to the longest
    prompt_batches: Axis = Axis()
    prompt_lengths: Axis = Axis()
    decode_batches: Axis = Axis()
    decode_blocks: Axis = Axis()
    prompt_contexts: Axis = Axis()  # blocks before a prompt
    reuse: bool = False  # prefixes that others have computed
    base_length: int | None = None  # the shortest prompts are padded to it; linear: steps from there on double
    contiguous: bool = False  # decode steps may read the first blocks of the cache where they are
    pictures: int = 0  # of a request, at most


class BucketPlan:
    """Every pass has one of these shapes."""

    pads = True

    def __init__(
        self,
        prefill: Sequence[Bucket],
        decode: Sequence[Bucket],
        longest: int | None = None,  # tokens of a prompt; None: of the longest shape
        pass_tokens: int = _PASS_TOKENS,
        pictures: Sequence[Bucket] = (),
        most_tokens: int = 0,  # of prompts in a step of several passes
        reading: Sequence[Bucket] = (),  # those of passes whose layers of cross-attention read pictures
    ) -> None:
        self.pass_tokens = pass_tokens  # what a pass costs beside its tokens
        self.most_tokens = most_tokens
        self.prefill = tuple(sorted(prefill, key=lambda b: (b.num_tokens, b.length, b.context)))
        longest_shape = max((bucket.length for bucket in self.prefill), default=0)
        self.longest = longest_shape if longest is None else longest
        self.in_parts = any(bucket.context for bucket in self.prefill)  # prompts may follow tokens in the cache
        self.cuts = self.longest > longest_shape  # the longest must be computed in parts
        self.decode = tuple(sorted(decode, key=lambda b: (b.contiguous, b.batch, b.length)))
        self.has_contiguous = any(bucket.contiguous for bucket in self.decode)
        self.pictures = tuple(sorted(pictures))
        self.reading = tuple(sorted(reading))
        # Of rows that decode together: whoever shares pictures may have more, and is in another pass.
        self.most_read = max((bucket.pictures for bucket in self.reading if bucket.phase == "decode"), default=0)
        # The smallest first: what the next one takes is told from those before it.
        shapes = self.prefill + self.decode + self.pictures + self.reading
        self.shapes = tuple(sorted(shapes, key=lambda b: (b.cost, b)))

    def find(self, phase: str, rows: int, length: int, context: int = 0, pictures: int = 0) -> Bucket | None:
        """The shape for so many prompts, the longest of so many tokens after at most so many in the cache, or for so
        many rows with so many blocks in all, or of a tower's pass; None if that is more than the limits allow, or
        prompts cannot share a pass. `pictures`: see `Bucket`."""
        if phase == "picture":
            return next((bucket for bucket in self.pictures if bucket.batch >= rows), None)
        if phase == "prefill":
            prompts = self._find_prefill(rows, length, context)
            return None if prompts is None else self.where_read(Bucket(phase, *prompts), pictures)
        found = self._find_decode(rows, length)
        return None if found is None else self.where_read(Bucket(phase, *found), pictures)

    def where_read(self, bucket: Bucket, pictures: int) -> Bucket | None:
        """The same shape where so many pictures are read."""
        if not pictures:
            return bucket
        return next((each for each in self._reading_of.get(bucket, ()) if each.pictures >= pictures), None)

    def _find_prefill(self, rows: int, longest: int, before: int) -> tuple[int, int, int] | None:
        context = _at_least(self._contexts, before) if before else 0
        if context not in self._prefill_axes:
            return None
        lengths, batches = self._prefill_axes[context]
        length = _at_least(lengths, longest)
        batch = _at_least(batches[length], rows) if length is not None else None
        return None if length is None or batch is None else (batch, length, context)

    def choose_contiguous(self, listed: Bucket, rows: int, span: int) -> Bucket | None:
        """The shape for rows whose blocks are among so many of the first, where it moves fewer bytes than the one for
        the blocks as a list."""
        found = self._find_decode(rows, span, True)
        if found is None or found[1] >= _GATHER_COST * listed.length:
            return None
        return Bucket("decode", found[0], found[1], contiguous=True)

    def _find_decode(self, rows: int, blocks: int, contiguous: bool = False) -> tuple[int, int] | None:
        batches, lengths = self._decode_axes[contiguous]
        batch = _at_least(batches, rows)
        length = _at_least(lengths[batch], blocks) if batch is not None else None
        return None if length is None or batch is None else (batch, length)

    def prompts_fit(self, rows: int, longest: int, context: int = 0) -> bool:
        """Whether so many prompts, the longest of so many tokens after at most so many in the cache, can share a
        step: in one pass, or after cached tokens, where shapes are smaller, in several."""
        if self._find_prefill(rows, longest, context) is not None:
            return True
        one = self._find_prefill(1, longest, context) if context else None
        return one is not None and rows * one[1] <= self.most_tokens

    def group(self, prompts: Sequence[tuple[int, int]], pictures: Sequence[int] = ()) -> list[list[int]]:
        """Prompts of a step, as places in `prompts`: (tokens, tokens in the cache before them), that share a pass:
        those that are alike, where it saves padding. `pictures`: that each reads; none: nobody reads any.

        Prompts that no shape holds together are alone.
        """
        if not prompts:
            return []
        alone = [self._find_prefill(1, *prompt) or (1, *prompt) for prompt in prompts]
        reads = pictures or [0] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda place: (alone[place][2], reads[place], prompts[place]))
        cuts: list[int] = []
        for (size, read), alike in groupby(order, lambda place: (alone[place][1:], reads[place])):
            cuts += self._cut(size, read, cuts[-1] if cuts else 0, len(list(alike)))
        best: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # first places -> what they cost at least, where to cut
        for end in cuts:
            for start, (cost, before) in list(best.items()):
                together = [prompts[place] for place in order[start:end]]
                length, context = (max(numbers) for numbers in zip(*together, strict=True))
                bucket = self.find("prefill", end - start, length, context, max(reads[n] for n in order[start:end]))
                if bucket is not None:
                    total = cost + bucket.cost + self.pass_tokens
                    best[end] = min(best.get(end, (total, [*before, end])), (total, [*before, end]))
        if len(order) not in best:
            return [[place] for place in range(len(prompts))]
        return [sorted(order[start:end]) for start, end in pairwise((0, *best[len(order)][1]))]

    def _cut(self, size: tuple[int, int], read: int, start: int, count: int) -> list[int]:
        """Where passes may end among so many prompts alike, of a length and context, that read so many pictures: the
        last place is their end."""
        length, context = size
        batches = self._prefill_axes[context][1].get(length, [count]) if context in self._prefill_axes else [count]
        if read:
            batches = [n for n in batches if self.where_read(Bucket("prefill", n, *size), read)] or batches[:1]
        most = batches[-1]
        return [*range(start + most, start + count, most), start + count]

    @cached_property
    def _reading_of(self) -> dict[Bucket, list[Bucket]]:
        """Of each shape those in which pictures are read, few pictures first."""
        found: dict[Bucket, list[Bucket]] = {}
        for bucket in self.reading:
            found.setdefault(replace(bucket, pictures=0), []).append(bucket)
        return found

    @cached_property
    def _contexts(self) -> list[int]:
        """Those above 0."""
        return [context for context in self._prefill_axes if context]

    @cached_property
    def _prefill_axes(self) -> dict[int, tuple[list[int], dict[int, list[int]]]]:
        """Of each context the lengths, and of each of these the batches."""
        found: dict[int, tuple[list[int], dict[int, list[int]]]] = {}
        in_order = sorted(self.prefill, key=lambda b: (b.context, b.length, b.batch))
        for context, shapes in groupby(in_order, lambda b: b.context):
            batches = {length: [b.batch for b in group] for length, group in groupby(shapes, lambda b: b.length)}
            found[context] = (list(batches), batches)
        return found

    @cached_property
    def _decode_axes(self) -> dict[bool, tuple[list[int], dict[int, list[int]]]]:
        found: dict[bool, tuple[list[int], dict[int, list[int]]]] = {}
        for contiguous in (False, True):
            shapes = [bucket for bucket in self.decode if bucket.contiguous is contiguous]
            lengths = {batch: [b.length for b in group] for batch, group in groupby(shapes, lambda b: b.batch)}
            found[contiguous] = (list(lengths), lengths)
        return found


def plan_buckets(limits: PlanLimits, settings: BucketSettings, picture_sizes: Sequence[int] = ()) -> BucketPlan:
    """`picture_sizes`: of a tower's passes. Raises `ValueError` if there would be more shapes than anybody can use."""
    if settings.strategy == LINEAR:
        prefill, decode = _linear_prefill(limits, settings), _linear_decode(limits, settings)
    else:
        prefill, decode = _exponential_prefill(limits, settings), _exponential_decode(limits, settings)
    first = _collect(prefill)
    after: list[Bucket] = []
    if settings.reuse or limits.longest_part < limits.max_input_tokens:
        lengths = {bucket.length for bucket in first}
        after = _collect(_after_context(limits, settings, min(lengths), max(lengths)))
    listed = _collect(decode)
    in_place = _in_place(limits, settings, listed) if settings.contiguous else []
    shared = _shared(limits, listed) if settings.reuse else []
    pictures = [Bucket("picture", size, 0) for size in picture_sizes]
    prompts, rows = first + after, listed + in_place + shared
    return BucketPlan(
        prompts,
        rows,
        limits.max_input_tokens,
        pictures=pictures,
        most_tokens=limits.max_batch_prefill_tokens,
        reading=_collect((*_reading_prompts(limits, settings, prompts), *_reading_rows(limits, settings, rows))),
    )


def _collect(shapes: Iterable[Bucket]) -> list[Bucket]:
    found = list(islice(shapes, MOST_SHAPES + 1))
    if len(found) > MOST_SHAPES:
        raise ValueError(f"there would be more than {MOST_SHAPES:,} shapes of {found[0].phase} steps")
    return found


# -- linear --------------------------------------------------------------------------------------------------------


def _linear_prefill(limits: PlanLimits, settings: BucketSettings) -> Iterator[Bucket]:
    longest = limits.longest_part
    if settings.prompt_lengths.has_ramp:
        lengths = _ramp(settings.prompt_lengths, 128, 128, longest)
    elif settings.base_length is not None:
        lengths = doubling_steps(settings.base_length, settings.length_step or longest, longest)
    else:
        lengths = steps_up_to(settings.length_step or longest, longest)
    for length in lengths:
        most = min(limits.max_batch_size, limits.max_batch_prefill_tokens // length)
        if settings.prompt_batches.has_ramp:
            batches = _ramp(settings.prompt_batches, 1, _RAMP_BATCH_STEP, most)
        else:
            batches = steps_up_to(settings.prefill_batch_step, most)
        yield from (Bucket("prefill", batch, length) for batch in batches)


def _linear_decode(limits: PlanLimits, settings: BucketSettings) -> Iterator[Bucket]:
    """Without settings for blocks a row may have as many as the longest request: one shape for each batch."""
    most = limits.max_batch_size
    if settings.decode_batches.has_ramp:
        batches = _ramp(settings.decode_batches, 1, _RAMP_BATCH_STEP, most)
    else:
        batches = steps_up_to(settings.batch_step, most)
    usable = _usable_blocks(limits, settings.decode_blocks)
    if settings.decode_blocks.has_ramp:
        return _reachable(limits, batches, _ramp(settings.decode_blocks, 128, _BLOCK_STEP, usable))
    return (Bucket("decode", batch, min(usable, batch * limits.blocks_per_row)) for batch in batches)


def steps_up_to(step: int, maximum: int) -> list[int]:
    """step, 2 * step, ... and always `maximum` as the last."""
    if step < 1 or maximum < 1:
        raise ValueError(f"bucket step {step} and maximum {maximum} must be at least 1")
    return [*range(step, maximum, step), maximum]


def _ramp(axis: Axis, minimum: int, step: int, largest: int) -> list[int]:
    """minimum, 2 * minimum, 4 * minimum, ... below the step, then its multiples; `largest` is always the last."""
    minimum, step = axis.minimum or minimum, axis.step or step
    maximum = min(axis.maximum or largest, largest)
    sizes: list[int] = []
    size = minimum
    while size < min(step, maximum):
        sizes.append(size)
        size *= 2
    sizes += [size for size in range(step, maximum + 1, step) if size >= minimum]
    return sorted({*sizes, maximum, largest})


def doubling_steps(base: int, step: int, longest: int) -> list[int]:
    """base, base + step, then 2, 4, 8 ... steps more, as far as `longest`, which is the last."""
    lengths = [min(base, longest)]
    while lengths[-1] < longest:
        lengths.append(min(lengths[-1] + step, longest))
        step *= 2
    return lengths


# -- exponential ---------------------------------------------------------------------------------------------------


def _exponential_prefill(limits: PlanLimits, settings: BucketSettings) -> Iterator[Bucket]:
    most, longest = limits.max_batch_size, limits.longest_part
    batches = spread(1, 1, most, settings.prompt_batches.count or num_sizes(most))
    lengths = spread(_LENGTH_STEP, _LENGTH_STEP, longest, settings.prompt_lengths.count or num_sizes(longest))
    if settings.base_length is not None:
        base = min(settings.base_length, longest)
        lengths = [base, *(length for length in lengths if length > base)]
    for length in lengths:
        rows = limits.max_batch_prefill_tokens // length
        fitting = [batch for batch in batches if batch <= rows]
        yield from (Bucket("prefill", batch, length) for batch in fitting or [min(most, rows)])


def _exponential_decode(limits: PlanLimits, settings: BucketSettings) -> Iterator[Bucket]:
    most, axis = limits.max_batch_size, settings.decode_blocks
    batches = spread(1, 1, most, settings.decode_batches.count or num_sizes(most))
    count = axis.count or num_sizes(_wanted_blocks(limits, axis))
    blocks = spread(_BLOCK_STEP, _BLOCK_STEP, _usable_blocks(limits, axis), count)
    return _reachable(limits, batches, blocks)


def num_sizes(maximum: int) -> int:
    """One more than the logarithm to base 2, rounded up."""
    return (maximum - 1).bit_length() + 1


def spread(minimum: int, step: int, maximum: int, count: int) -> list[int]:
    """Up to `count` sizes from minimum to maximum by equal factors, each rounded up to a multiple of the step.

    Size i is `minimum * (maximum / minimum) ** (i / (count - 1))`: an irrational number that is compared with whole
    ones by raising both to the power of count - 1. Where rounding meets a size that is taken, the nearest free multiple
    (or the maximum) takes its place.
    """
    if count <= 1 or minimum >= maximum:
        return [maximum]
    root = count - 1
    free = sorted({*range(minimum, maximum + 1, step), maximum})
    if count >= len(free):  # each of them is taken by one; the powers below have as many digits as there are sizes
        return free
    taken: set[int] = set()
    for i in range(count):
        power = minimum ** (root - i) * maximum**i  # of the size
        size = min(maximum, _smallest_multiple(step, maximum, root, power))
        if size in taken:
            size = nearest(free, root, power)
        taken.add(size)
        if size in free:
            free.remove(size)
    return sorted(taken)


def _smallest_multiple(step: int, maximum: int, root: int, power: int) -> int:
    """The smallest multiple of the step whose `root`-th power is at least `power`, which is at most that of maximum."""
    low, high = 1, -(-maximum // step)
    while low < high:
        middle = (low + high) // 2
        if (middle * step) ** root >= power:
            high = middle
        else:
            low = middle + 1
    return low * step


def nearest(sizes: Sequence[int], root: int, power: int) -> int:
    """Of ascending sizes the one nearest to the `root`-th root of `power`; the smaller of two."""
    above = next((place for place, size in enumerate(sizes) if size**root > power), len(sizes))
    if above in (0, len(sizes)):
        return sizes[max(0, above - 1)]
    small, large = sizes[above - 1], sizes[above]
    return small if 2**root * power <= (small + large) ** root else large


# -- both ----------------------------------------------------------------------------------------------------------


def _after_context(limits: PlanLimits, settings: BucketSettings, shortest: int, longest: int) -> Iterator[Bucket]:
    """Shapes of prompts with tokens before them in the cache, without those that no prompt can have.

    `shortest`, `longest`: of prompts that begin in the pass.
    """
    size = limits.block_size
    contexts = _context_blocks(-(-(limits.max_input_tokens - 1) // size), size, settings)
    most_tokens = min(limits.max_batch_prefill_tokens, _MOST_AFTER_CONTEXT)
    # Limits are mostly powers of two: from three quarters on, the last two, of which passes take longest, are near each
    # other. Nothing is padded to less than a length that was asked for.
    lengths = doubled(shortest if settings.base_length is not None else -(-3 * shortest // 4), longest)
    for fewer, blocks in pairwise((0, *contexts)):
        left = limits.max_input_tokens - fewer * size - 1
        possible = [length for shorter, length in pairwise((0, *lengths)) if shorter < left]
        for length in possible:
            most = max(1, min(limits.max_batch_size, most_tokens // length))
            for batch in (1 << power for power in range(most.bit_length())):
                bucket = Bucket("prefill", batch, length, blocks * size)
                is_largest = length == possible[-1] and 2 * batch > most
                # What takes as long as reading the weights may be padded to the next larger shape.
                if is_largest or bucket.cost >= _PASS_TOKENS:
                    yield bucket


def doubled(first: int, longest: int) -> list[int]:
    """The first length, then each twice as long, as far as `longest`, which is the last."""
    lengths = [min(first, longest)]
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    return lengths


def _context_blocks(most: int, block_size: int, settings: BucketSettings) -> list[int]:
    """Numbers of blocks, the largest as many as there can be."""
    axis = settings.prompt_contexts
    if most < 1:
        return []
    smallest = max(1, _SMALLEST_CONTEXT // block_size)
    if settings.strategy == LINEAR and axis.has_ramp:
        return _ramp(axis, 1, smallest, most)
    if settings.strategy == EXPONENTIAL and axis.count:
        return spread(1, 1, most, axis.count)
    sizes = [most]
    while sizes[-1] > smallest:
        sizes.append(-(-sizes[-1] // _CONTEXT_FACTOR))
    return sizes[::-1]


def _wanted_blocks(limits: PlanLimits, axis: Axis) -> int:
    """Blocks of a full batch of the longest requests, and a step more."""
    size, rows = limits.block_size, limits.max_batch_size
    longest = limits.blocks_per_row * size + -(-(axis.step or _BLOCK_STEP) * size // rows)
    return max(_BLOCK_STEP, rows * longest // size)


def _usable_blocks(limits: PlanLimits, axis: Axis) -> int:
    wanted = _wanted_blocks(limits, axis)
    return wanted if limits.num_blocks is None else min(wanted, limits.num_blocks)


def _reachable(limits: PlanLimits, batches: Sequence[int], blocks: Sequence[int]) -> Iterator[Bucket]:
    """The product of both axes, without what no step looks up: each row has at least one block and at most so many."""
    for before, batch in pairwise((0, *batches)):
        first = bisect_left(blocks, before + 1)
        last = bisect_left(blocks, min(blocks[-1], batch * limits.blocks_per_row))
        yield from (Bucket("decode", batch, length) for length in blocks[first : last + 1])


def _shared(limits: PlanLimits, listed: Sequence[Bucket]) -> list[Bucket]:
    """Rows that share blocks list each of them: together they may list more than there are."""
    largest = {bucket.batch: bucket.length for bucket in sorted(listed)}
    most = {batch: batch * limits.blocks_per_row for batch in largest}
    return [Bucket("decode", batch, most[batch]) for batch, length in largest.items() if length < most[batch]]


def _in_place(limits: PlanLimits, settings: BucketSettings, listed: Sequence[Bucket]) -> list[Bucket]:
    """As many shapes for blocks that are read where they are. Block 0 is one of the first, so the largest has one more:
    it covers all that requests can hold."""
    usable = _usable_blocks(limits, settings.decode_blocks)
    return [Bucket("decode", each.batch, each.length + (each.length == usable), contiguous=True) for each in listed]


def _reading_prompts(limits: PlanLimits, settings: BucketSettings, shapes: Sequence[Bucket]) -> Iterator[Bucket]:
    """The same shapes with pictures to read: one for each prompt, and in passes of the fewest rows as many as a request
    may have. Prompts with several pictures are rare, and take so long that they may as well be alone."""
    most_each = min(settings.pictures, limits.cached_pictures, limits.max_input_tokens)
    fewest: dict[tuple[int, int], int] = {}
    for bucket in shapes:
        size = (bucket.length, bucket.context)
        fewest[size] = min(bucket.batch, fewest.get(size, bucket.batch))
    for bucket in shapes if most_each else ():
        is_least = bucket.batch == fewest[bucket.length, bucket.context]
        yield from (replace(bucket, pictures=count) for count in _picture_counts(1, most_each if is_least else 1))


def _reading_rows(limits: PlanLimits, settings: BucketSettings, shapes: Sequence[Bucket]) -> Iterator[Bucket]:
    """The same shapes with pictures that all rows read together: one each, and more where neighbours are read; no more
    than there is room for, unless rows share them."""
    most_each = min(settings.pictures, limits.cached_pictures, limits.max_input_tokens)
    most = max(limits.cached_pictures, limits.max_batch_size)
    for bucket in shapes if most_each else ():
        counts = _picture_counts(bucket.batch, min(bucket.batch * most_each, most))
        yield from (replace(bucket, pictures=count) for count in counts)


def _picture_counts(first: int, most: int) -> list[int]:
    sizes = [first]
    while sizes[-1] < most:
        sizes.append(min(_PICTURE_FACTOR * sizes[-1], most))
    return sizes


def _at_least(sizes: Sequence[int], size: int) -> int | None:
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
